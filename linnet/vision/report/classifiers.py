"""The page of several image classifiers on the same images: accuracies with intervals, paired tests, curves, speed."""

from collections.abc import Callable, Sequence
from html import escape
from os.path import relpath
from pathlib import Path

from linnet import provenance
from linnet.config import FIGURES, check_study
from linnet.evaluate.compare import REAL, Comparison, between, compare, shared, shown
from linnet.laws.orders import Order
from linnet.report import shell, style, units
from linnet.report.drawing import Canvas, Figure
from linnet.report.records import finite
from linnet.runs.files import write_atomic
from linnet.vision.report.classifier import Classifier, read_classifier

POINTS = 200  # most points of a training curve that are drawn


class Models:
    """Runs by their names; `architectures` are the names, under the name that `Canvas` reads."""

    def __init__(self, runs: dict[str, Classifier]):
        self.runs = runs
        self.architectures = list(runs)


def write_classifiers(
    runs: dict[str, Path], page: Path, *, title: str, command: str, pages: dict[str, Path] | None = None,
    pictures: Sequence[tuple[str, str, bytes]] = (),
) -> Path:  # fmt: skip
    """Writes the page, and a PNG and an SVG of each figure beside it.

    Args:
        runs: run folders by the names of their models; each was scored by `linnet evaluate images`.
        page: path of an .html file; its folder is created.
        command: command that makes the page again.
        pages: pages of single models, to which names lead.
        pictures: (heading, caption, bytes of a PNG file) of pictures that are shown on the page.

    Raises:
        ConfigError: the page cannot be written, or the extra `study` is not installed.
    """
    check_study(FIGURES, "report")
    path = shell.page_path(page.parent, page)
    models = Models({name: read_classifier(folder) for name, folder in runs.items()})
    figures = [figure for figure in (_curves(models), _accuracies(models)) if figure is not None]
    for figure in figures:
        shell.write_pictures(path.parent, figure)
    links = {name: relpath(one, path.parent) for name, one in (pages or {}).items()}
    write_atomic(path, _page(models, figures, links, title, command, pictures))
    return path


def _page(models: Models, figures: list[Figure], links: dict[str, str], title: str, command: str, pictures) -> str:
    import base64

    parts = [f'<p class="lead">{_lead(models)}</p>', shell.key(models.architectures)]
    parts += ["<h2>Scores</h2>", _table(models, links), *_tests(models)]
    parts += [shell.section(figure, command) for figure in figures]
    for heading, caption, data in pictures:
        picture = f'<img class="sheet" src="data:image/png;base64,{base64.b64encode(data).decode()}" alt="">'
        parts += [f"<h2>{escape(heading)}</h2>", f'<p class="caption">{escape(caption)}</p>', picture]
    facts = {
        "Redraw": f"<code>{escape(command)}</code>",
        "Trained with": escape(provenance.shown(one.result for one in models.runs.values())),
        "Drawn with": escape(shell.drawn_with()),
    }
    return shell.document(title, [*parts, "<h2>How this was made</h2>", shell.facts(facts)])


def _lead(models: Models) -> str:
    records = [one.record for one in models.runs.values() if one.record is not None]
    count = f"{units.plural(len(models.runs), 'model')}"
    if not records:
        return escape(f"{count}; none is scored yet.")
    images, classes = records[0].detail["images"], len(records[0].detail["classes"])
    values = {name: _accuracy(one) for name, one in models.runs.items() if one.record is not None}
    pairs = frozenset(pair for comparison in _comparisons(models) for pair in comparison.order.apart)
    highest = units.ranked(Order(values, apart=pairs), "accuracy", lambda name: f"{values[name]:.2%}")
    return f"{escape(count)}, scored on {images:,} held-out images of {classes} classes. {highest}"


def _accuracy(one: Classifier) -> float:
    assert one.record is not None
    return next(result.value for result in one.record.results if result.metric == "accuracy")


def _table(models: Models, links: dict[str, str]) -> str:
    titles = ("Parameters", "Accuracy", "95 % interval", "Loss (nats)", "Calibration error", "Training images/s",
              "Scoring images/s", "Time of training")  # fmt: skip
    head = "<th>Model</th>" + "".join(f'<th class="n">{title}</th>' for title in titles)
    rows = []
    for name, one in models.runs.items():
        result, record = one.result, one.record
        values = {found.metric: found.value for found in record.results} if record else {}
        low, high = record.detail["wilson"]["accuracy"] if record else (None, None)
        speed = record.detail["images_per_second"] if record else None
        trained = result.get("images_per_second")
        cells = [
            (result.get("params_total"), units.count),
            (values.get("accuracy"), lambda value: f"{value:.2%}"),
            (low, lambda value, high=high: f"{value:.1%} to {high:.1%}"),
            (values.get("nll"), lambda value: f"{value:.4f}"),
            (values.get("calibration_error"), lambda value: f"{value:.4f}"),
            (trained, lambda value: f"{value:,.0f}"),
            (speed, lambda value: f"{value:,.0f}"),
            (result.get("seconds"), units.duration),
        ]
        row = "".join(_cell(value, form) for value, form in cells)
        swatch = shell.swatch(models.architectures, name)
        swatch = f'<a href="{escape(links[name])}">{swatch}</a>' if name in links else swatch
        rows.append(f"<tr><td>{swatch}</td>{row}</tr>")
    return shell.table("models", head, rows, "sortable")


def _cell(value: float | None, form: Callable[[float], str]) -> str:
    text = units.MISSING if value is None else form(value)
    return f'<td class="n" data-v="{"" if value is None else value}">{text}</td>'


def _comparisons(models: Models) -> list[Comparison]:
    """Returns the paired tests of all models that were scored on the same images."""
    found = {name: [one.record] for name, one in models.runs.items() if one.record is not None}
    return [one for one in compare(shared(found)) if one.differences]


def _tests(models: Models) -> list[str]:
    comparisons = _comparisons(models)
    if not comparisons:
        return []
    head = '<th>Models</th><th class="n">Difference in accuracy</th><th class="n">Adjusted p</th><th></th>'
    rows = [
        f"<tr><td>{escape(one.first)} − {escape(one.second)}</td>"
        f'<td class="n">{shown(one.value)}{between(one.interval)}</td><td class="n">{one.adjusted:.2g}</td>'
        f"<td>{'they differ' if one.adjusted < REAL else 'may be chance'}</td></tr>"
        for comparison in comparisons
        for one in comparison.differences
    ]
    caption = (
        "Paired permutation tests on the same images, adjusted together by Holm's method. They compare these weights; "
        "another seed gives other weights."
    )
    return ["<h3>Differences</h3>", f'<p class="caption">{caption}</p>', shell.table("tests", head, rows)]


def _curves(models: Models) -> Figure | None:
    canvas = Canvas(models)
    alt = canvas.alt
    losses, shares = [], []
    for name, one in models.runs.items():
        every = max(1, len(one.curve) // POINTS)
        losses += [{"architecture": name, "step": row["step"], "value": row["loss"]} for row in one.curve[::every]]
        shares += [
            {"architecture": name, "step": row["step"], "value": row["validation_accuracy"],
             "accuracy": f"{row['validation_accuracy']:.2%} at step {row['step']:,}"}
            for row in one.validations if finite(row.get("validation_accuracy"))
        ]  # fmt: skip
    if not losses or not shares:
        return None
    last = max(row["step"] for row in (*losses, *shares))
    x = alt.X("step:Q", title="step", scale=alt.Scale(domain=[0, last], nice=False)).axis(format=",.0f", tickCount=6)
    domain = style.padded([max(row["value"], 1e-6) for row in losses], True)
    y = alt.Y("value:Q", **style.axis(alt, "loss", domain, "training loss (nats per image)"))
    hue = canvas.colour()
    line = canvas.chart(losses).mark_line(strokeWidth=1.4, clip=True)
    left = line.encode(x, y, hue, strokeOpacity=canvas.fade(0.85)).properties(width=420, height=260)
    y = alt.Y("value:Q", title="held-out accuracy", scale=alt.Scale(domain=[0, 1])).axis(format=".0%", tickCount=5)
    base, tooltip = canvas.chart(shares), canvas.tooltip(("architecture", "accuracy"))
    line = base.mark_line(strokeWidth=1.8).encode(x, y, hue, strokeOpacity=canvas.fade(0.9))
    dots = base.mark_point(size=50, filled=True, opacity=1)
    dots = dots.encode(x, y, hue, canvas.shape(), fillOpacity=canvas.fade(), tooltip=tooltip)
    right = canvas.layer(line, dots).properties(width=420, height=260)
    caption = "The loss of training batches, and the accuracy on held-out images."
    return canvas.figure("training", "Training", caption, canvas.joined("hconcat", [left, right], 28))


def _accuracies(models: Models) -> Figure | None:
    """Accuracy with its interval against the speed of training."""
    canvas = Canvas(models)
    alt = canvas.alt
    rows = []
    for name, one in models.runs.items():
        speed = one.result.get("images_per_second")
        if one.record is None or not finite(speed):
            continue
        low, high = one.record.detail["wilson"]["accuracy"]
        rows.append(
            {"architecture": name, "speed": speed, "value": _accuracy(one), "low": low, "high": high,
             "accuracy": f"{_accuracy(one):.2%} ({low:.1%} to {high:.1%})", "images/s": f"{speed:,.0f} in training"}
        )  # fmt: skip
    if not rows:
        return None
    wide = alt.Scale(domain=[0, 1.1 * max(row["speed"] for row in rows)], nice=False)
    x = alt.X("speed:Q", title="training images per second", scale=wide).axis(format=",.0f", tickCount=6)
    domain = style.padded([row[key] for row in rows for key in ("low", "high")], False)
    y = alt.Y("value:Q", title="accuracy", scale=alt.Scale(domain=domain, zero=False)).axis(format=".0%", tickCount=6)
    base, hue, tooltip = canvas.chart(rows), canvas.colour(), canvas.tooltip(("architecture", "accuracy", "images/s"))
    low, high = alt.Y("low:Q", title="accuracy", scale=alt.Scale(domain=domain, zero=False)), alt.Y2("high:Q")
    rules = base.mark_rule(strokeWidth=1.6).encode(x, low, high, hue, strokeOpacity=canvas.fade(0.8))
    dots = base.mark_point(size=90, filled=True, opacity=1)
    dots = dots.encode(x, y, hue, canvas.shape(), fillOpacity=canvas.fade(), tooltip=tooltip)
    caption = "Accuracy with its 95 % interval (Wilson) against the speed of training on this machine."
    drawn = canvas.layer(rules, dots).properties(width=640, height=260)
    return canvas.figure("accuracy-against-speed", "Accuracy and speed", caption, drawn)
