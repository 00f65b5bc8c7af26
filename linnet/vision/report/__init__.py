"""Pages of image models: of a classifier, of several on the same images, and of a denoiser."""

import base64
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from os.path import relpath
from pathlib import Path
from typing import Any, TypeVar

from linnet import provenance
from linnet.config import FIGURES, check_study, load_json
from linnet.evaluate.compare import REAL, Comparison, between, compare, shared, shown
from linnet.evaluate.results import Evaluation, read_evaluations
from linnet.laws.orders import Order
from linnet.report import shell, style, units
from linnet.report.downstream import over_steps
from linnet.report.drawing import Canvas, Figure
from linnet.report.records import OneRun, finite, read_run
from linnet.runs.folder import CLASSES, PICTURES

POINTS = 400  # most points of a training curve that are drawn
R = TypeVar("R", bound=OneRun)


def _write(
    run: str | Path,
    out: str | Path | None,
    read: Callable[[str | Path], R],
    drawings: Sequence[Callable[[R], Figure | None]],
    page_of: Callable[[R, list[Figure], str], str],
) -> Path:
    check_study(FIGURES, "report")
    contents = read(run)
    page = shell.page_path(run, out)
    command = shell.typed("linnet", "report", run, out=out)
    figures = [figure for draw in drawings if (figure := draw(contents)) is not None]
    shell.write_page(page, page_of(contents, figures, command), figures)
    return page


def _trained(found: OneRun, parameters: int | None) -> str:
    """Returns the size of a model and the length of its training in words."""
    words = [f"{units.count(parameters)} parameters"] if parameters else []
    if found.curve:
        images = found.curve[-1].get("images")
        words.append(f"trained on {images:,} images" if images else f"trained for {found.curve[-1]['step']:,} steps")
    return escape(", ".join(words)) + "." if words else ""


def _loss_panel(canvas: Canvas, found: OneRun, title: str, unit: str) -> tuple[Any, Any]:
    """Returns the axis of steps, and the losses of training batches (a thin line) and of held-out images (dots)."""
    alt, name = canvas.alt, found.name
    every = max(1, len(found.curve) // POINTS)
    training = [{"architecture": name, "step": row["step"], "value": row["loss"]} for row in found.curve[::every]]
    held = [
        {"architecture": name, "step": row["step"], "value": row["validation_loss"],
         "held-out": f"{row['validation_loss']:.4f}{unit} at step {row['step']:,}"}
        for row in found.validations
    ]  # fmt: skip
    last = max([row["step"] for row in (*training, *held)], default=1)
    x = alt.X("step:Q", title="step", scale=alt.Scale(domain=[0, last], nice=False)).axis(format=",.0f", tickCount=6)
    values = [max(row["value"], 1e-6) for row in (*training, *held)]
    y = alt.Y("value:Q", **style.axis(alt, "loss", style.padded(values, True), title))
    line = canvas.chart(training).mark_line(strokeWidth=1, opacity=0.55, clip=True)
    layers = [line.encode(x, y, canvas.colour(legend=False))]
    dots = canvas.chart(held)
    layers.append(dots.mark_line(style=style.INK, strokeWidth=1.8, clip=True).encode(x, y))
    dots = dots.mark_point(style=style.INK, size=34, filled=True, opacity=1)
    layers.append(dots.encode(x, y, tooltip=canvas.tooltip(("held-out",))))
    return x, canvas.layer(*layers).properties(width=420, height=260, title="loss")


# The page of an image classifier: accuracy, training curves, calibration, confusions and the worst mistakes.
#
# Everything on it is in the run folder: config.yaml, metrics.jsonl, result.json, and the record of
# `linnet evaluate images` if there is one. Nothing is scored here, and the images need not be there.


CELLS = 40  # up to so many classes the confusions are drawn as a matrix
LISTED = 12  # most confusions that the table lists


@dataclass(frozen=True)
class Classifier(OneRun):
    """The run of a classifier.

    Attributes:
        record: the newest record of `linnet evaluate images` on the held-out images, or else on others; or None.
    """

    record: Evaluation | None


def write_classifier(run: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page of an image classifier, and a PNG and an SVG of each figure beside it.

    Args:
        run: the run folder.
        out: the page; default `report/index.html` in the run folder.

    Raises:
        ConfigError: the folder cannot be read, the page cannot be written, or the extra `study` is not installed.
    """
    drawings = _classifier_curves, over_steps, _calibration, _matrix
    return _write(run, out, read_classifier, drawings, _classifier_page)


def read_classifier(run: str | Path) -> Classifier:
    """Reads a run folder. Raises ConfigError if it cannot be read."""
    contents = read_run(run)
    records = [record for record in read_evaluations(contents.folder, []) if record.kind == "images"]
    # Held-out images of the training first (no `data`), then the latest step.
    records.sort(key=lambda record: (bool(record.asked.get("data")), -(record.model.get("step") or 0)))
    return Classifier(**vars(contents), record=records[0] if records else None)


def _classifier_page(found: Classifier, figures: list[Figure], command: str) -> str:
    parts = [f'<p class="lead">{_classifier_lead(found)}</p>']
    if found.record is None:
        fix = escape(shell.typed("linnet", "evaluate", "images", found.folder))
        parts.append(
            f'<p class="notice">The confusions, the calibration and the mistakes need an evaluation: <code>{fix}</code>'
            "</p>"
        )
    else:
        parts += _classifier_scores(found.record)
    parts += [shell.section(figure, command) for figure in figures]
    if found.record is not None:
        parts += [*_confused(found.record), *_mistakes(found.record)]
    parts += shell.how_made(command, "the run folder alone", _classifier_facts(found))
    return shell.document(f"Image classifier: {found.name}", parts)


def _classifier_lead(found: Classifier) -> str:
    result, record = found.result, found.record
    parameters = result.get("params_total") or (record.model.get("params_total") if record else None)
    text = _trained(found, parameters)
    if record is not None:
        low, high = record.detail["wilson"]["accuracy"]
        text += f" Of {record.detail['images']:,} {_scored(record)}, <b>{_accuracy(found):.2%}</b> are right "
        text += f"(95 % interval {low:.2%} to {high:.2%}; guessing: {1 / len(record.detail['classes']):.2%})."
        step, last = record.model.get("step"), max((row["step"] for row in found.curve), default=0)
        if step is not None and step < last:
            text += f" <b>These are scores of step {step:,}</b>, and the training is at step {last:,}; evaluate again."
    elif finite(result.get("accuracy")):
        text += f" Held-out accuracy: <b>{result['accuracy']:.2%}</b>."
    return text


def _scored(record: Evaluation) -> str:
    data = record.asked.get("data")
    return f"images of {escape(', '.join(Path(source).name for source in data))}" if data else "held-out images"


def _classifier_scores(record: Evaluation) -> list[str]:
    names = {
        "accuracy": "Accuracy",
        "top5_accuracy": "Top-5 accuracy",
        "nll": "Loss (nats per image)",
        "calibration_error": "Calibration error (ECE)",
    }
    chances = {metric: value for _, metric, value in record.detail["chance"]}
    rows = []
    for result in record.results:
        if result.metric not in names:
            continue
        share = result.metric in chances
        low, high = record.detail["wilson"].get(result.metric, (None, None)) if share else (None, None)
        interval = f"{low:.2%} to {high:.2%}" if share else ""
        value = f"{result.value:.2%}" if share else f"{result.value:.4f}"
        guess = f"{chances[result.metric]:.2%}" if share else ""
        rows.append((names[result.metric], value, interval, guess))
    columns = ("*", "#Value", "#95 % interval (Wilson)", "#Guessing")
    return ["<h2>Scores</h2>", shell.table("scores", columns, rows)]


def _classifier_curves(found: Classifier) -> Figure | None:
    if not found.curve and not found.validations:
        return None
    canvas = Canvas(found)
    alt, name = canvas.alt, found.name
    x, panel = _loss_panel(canvas, found, "loss (nats per image)", " nats per image")
    panels = [panel]
    if shares := _held_out_accuracies(name, found):
        y = alt.Y("value:Q", title="held-out accuracy", scale=alt.Scale(domain=[0, 1])).axis(format=".0%", tickCount=5)
        base = canvas.chart(shares)
        line = base.mark_line(style=style.INK, strokeWidth=1.8).encode(x, y)
        dots = base.mark_point(style=style.INK, size=34, filled=True, opacity=1)
        dots = dots.encode(x, y, tooltip=canvas.tooltip(("accuracy",)))
        panels.append(canvas.layer(line, dots).properties(width=420, height=260, title="accuracy"))
    caption = (
        "The loss of the training batches (thin; augmented images, so it may lie above), and loss and accuracy on "
        "held-out images (dots)."
    )
    return canvas.figure("training", "Training", caption, canvas.joined("hconcat", panels, 28))


def _held_out_accuracies(name: str, run: OneRun) -> list[dict[str, Any]]:
    return [
        {"architecture": name, "step": row["step"], "value": row["validation_accuracy"],
         "accuracy": f"{row['validation_accuracy']:.2%} at step {row['step']:,}"}
        for row in run.validations if finite(row.get("validation_accuracy"))
    ]  # fmt: skip


def _calibration(found: Classifier) -> Figure | None:
    if found.record is None:
        return None
    canvas = Canvas(found)
    alt = canvas.alt
    rows = [
        {"low": bin["low"], "high": bin["high"], "confidence": bin["confidence"], "accuracy": bin["accuracy"],
         "count": bin["count"],
         "bin": f"confidence {bin['low']:.0%} to {bin['high']:.0%}: {bin['count']:,} images",
         "right": f"{bin['accuracy']:.1%} right, mean confidence {bin['confidence']:.1%}"}
        for bin in found.record.detail["bins"] if bin["count"]
    ]  # fmt: skip
    hue = style.PALETTE[0]
    share = alt.Scale(domain=[0, 1])
    x = alt.X("low:Q", title="confidence", scale=share).axis(format=".0%", tickCount=5)
    y = alt.Y("accuracy:Q", title="accuracy", scale=share).axis(format=".0%", tickCount=5)
    tooltip = canvas.tooltip(("bin", "right"))
    floor, look = alt.Y2(datum=0), {"color": hue, "opacity": 0.75}
    bars = canvas.chart(rows).mark_rect(**look).encode(x, alt.X2("high:Q"), y, floor, tooltip=tooltip)
    line = canvas.chart([{"low": 0.0, "accuracy": 0.0}, {"low": 1.0, "accuracy": 1.0}])
    line = line.mark_line(style=style.INK, strokeDash=[4, 4]).encode(x, y)
    left = canvas.layer(bars, line).properties(width=420, height=260, title="accuracy by confidence")
    counts = alt.Y("count:Q", title="images").axis(format=",.0f", tickCount=5)
    right = canvas.chart(rows).mark_rect(**look).encode(x, alt.X2("high:Q"), counts, floor, tooltip=tooltip)
    right = right.properties(width=420, height=260, title="images by confidence")
    error = found.record.detail["calibration_error"]
    caption = (
        "Images grouped by the probability of the predicted class. A calibrated model is right as often as it is "
        f"confident: bars on the dashed line. The mean distance from it, weighted by images, is {error:.4f} (ECE)."
    )
    return canvas.figure("calibration", "Calibration", caption, canvas.joined("hconcat", [left, right], 28))


def _matrix(found: Classifier) -> Figure | None:
    if found.record is None or len(found.record.detail["classes"]) > CELLS:
        return None
    canvas = Canvas(found)
    alt = canvas.alt
    classes = found.record.detail["classes"]
    totals = {label: 0 for label in range(len(classes))}
    for label, _, count in found.record.detail["confusions"]:
        totals[label] += count
    rows = [
        {"label": classes[label], "predicted": classes[guess], "share": count / totals[label], "count": count,
         "images": f"{count:,} of {totals[label]:,} images of {classes[label]} ({count / totals[label]:.1%})"}
        for label, guess, count in found.record.detail["confusions"]
    ]  # fmt: skip
    cell = 30 if len(classes) <= 20 else 18
    x = alt.X("predicted:N", sort=classes, title="predicted", scale=alt.Scale(domain=classes))
    y = alt.Y("label:N", sort=classes, title="label", scale=alt.Scale(domain=classes))
    scale = alt.Scale(scheme="blues", domain=[0, 1], type="sqrt")
    base = canvas.chart(rows)
    tooltip = canvas.tooltip(("label", "predicted", "images"))
    colour = alt.Color("share:Q", scale=scale, legend=alt.Legend(title="of the label", format=".0%"))
    cells = base.mark_rect().encode(
        x.axis(labelAngle=-40 if max(map(len, classes)) > 2 else 0), y, colour, tooltip=tooltip
    )
    layers = [cells]
    if len(classes) <= 20:
        dark = alt.condition("datum.share > 0.2", alt.value("white"), alt.value("#1d1d1f"))
        layers.append(base.mark_text(fontSize=11).encode(x, y, text="count:Q", color=dark))
    side = cell * len(classes)
    drawn = canvas.layer(*layers).properties(width=max(side, 160), height=max(side, 160))
    caption = "How the images of each label (row) were classified; numbers are images, colours their share of the row."
    return canvas.figure("confusions", "Confusions", caption, drawn)


def _confused(record: Evaluation) -> list[str]:
    classes = record.detail["classes"]
    wrong = sorted((row for row in record.detail["confusions"] if row[0] != row[1]), key=lambda row: -row[2])[:LISTED]
    if not wrong:
        return []
    rows = [
        (escape(classes[label]), escape(classes[guess]), shell.sorted_by(count, f"{count:,}"))
        for label, guess, count in wrong
    ]
    table = shell.table("confused", ("Label", "Predicted", "#Images"), rows, "sortable")
    return ["<h3>The most frequent confusions</h3>", table]


def _mistakes(record: Evaluation) -> list[str]:
    classes, mistakes = record.detail["classes"], record.detail["mistakes"]
    if not mistakes:
        return []
    caption = "The wrong answers to whose label the model gave the lowest probability, as the model saw the images."
    pictures = "".join(
        f'<figure><img src="data:image/png;base64,{escape(mistake["png"])}" alt="image {mistake["index"]}">'
        f"<figcaption>{escape(classes[mistake['label']])} ({mistake['label_probability']:.2%})<br>"
        f"→ <b>{escape(classes[mistake['predicted']])}</b> ({mistake['probability']:.0%})</figcaption></figure>"
        for mistake in mistakes
    )
    return shell.captioned("The worst mistakes", caption, f'<div class="tiles">{pictures}</div>')


def _classifier_facts(found: Classifier) -> dict[str, str]:
    record = found.record
    speed = f"{record.detail['images_per_second']:,.0f} images per second at evaluation" if record else ""
    return {
        "Trained with": escape(provenance.shown([found.result])) if found.result else "not finished",
        "Evaluated with": escape(provenance.shown([record.model.get("evaluated") or {}])) if record else "",
        "Images scored": f"digest {record.scored}, {_scored(record)}" if record else "",
        "Speed": speed,
    }


# The page of several image classifiers on the same images: accuracies with intervals, paired tests, curves, speed.


POINTS_EACH = 200  # most points of a training curve that are drawn


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
    figures = [figure for figure in (_classifiers_curves(models), _accuracies(models)) if figure is not None]
    links = {name: relpath(target, path.parent) for name, target in (pages or {}).items()}
    shell.write_page(path, _classifiers_page(models, figures, links, title, command, pictures), figures)
    return path


def _classifiers_page(
    models: Models, figures: list[Figure], links: dict[str, str], title: str, command: str, pictures
) -> str:
    parts = [f'<p class="lead">{_classifiers_lead(models)}</p>', shell.key(models.architectures)]
    parts += ["<h2>Scores</h2>", _table(models, links), *_tests(models)]
    parts += [shell.section(figure, command) for figure in figures]
    for heading, caption, data in pictures:
        picture = (
            f'<img class="sheet" src="data:image/png;base64,{base64.b64encode(data).decode()}" alt="{escape(heading)}">'
        )
        parts += shell.captioned(escape(heading), escape(caption), picture)
    trained = escape(provenance.shown(model.result for model in models.runs.values()))
    return shell.document(title, [*parts, *shell.how_made(command, "", {"Trained with": trained})])


def _classifiers_lead(models: Models) -> str:
    records = [model.record for model in models.runs.values() if model.record is not None]
    count = f"{units.plural(len(models.runs), 'model')}"
    if not records:
        return escape(f"{count}; none is scored yet.")
    images, classes = records[0].detail["images"], len(records[0].detail["classes"])
    values = {name: _accuracy(model) for name, model in models.runs.items() if model.record is not None}
    pairs = frozenset(pair for comparison in _comparisons(models) for pair in comparison.order.apart)
    highest = units.ranked(Order(values, apart=pairs), "accuracy", lambda name: f"{values[name]:.2%}")
    return f"{escape(count)}, scored on {images:,} held-out images of {classes} classes. {highest}"


def _accuracy(one: Classifier) -> float:
    assert one.record is not None
    return next(result.value for result in one.record.results if result.metric == "accuracy")


def _table(models: Models, links: dict[str, str]) -> str:
    columns = ("Model", "#Parameters", "#Accuracy", "#95 % interval", "#Loss (nats)", "#Calibration error",
               "#Training images/s", "#Scoring images/s", "#Time of training")  # fmt: skip
    rows = []
    for name, model in models.runs.items():
        result, record = model.result, model.record
        values = {score.metric: score.value for score in record.results} if record else {}
        low, high = record.detail["wilson"]["accuracy"] if record else (None, None)
        swatch = shell.swatch(models.architectures, name)
        cells = [
            (result.get("params_total"), units.count),
            (values.get("accuracy"), "{:.2%}".format),
            (low, lambda value, high=high: f"{value:.1%} to {high:.1%}"),
            (values.get("nll"), "{:.4f}".format),
            (values.get("calibration_error"), "{:.4f}".format),
            (result.get("images_per_second"), "{:,.0f}".format),
            (record.detail["images_per_second"] if record else None, "{:,.0f}".format),
            (result.get("seconds"), units.duration),
        ]
        numbers = [shell.sorted_by(value, units.MISSING if value is None else form(value)) for value, form in cells]
        rows.append((f'<a href="{escape(links[name])}">{swatch}</a>' if name in links else swatch, *numbers))
    return shell.table("models", columns, rows, "sortable")


def _comparisons(models: Models) -> list[Comparison]:
    """Returns the paired tests of all models that were scored on the same images."""
    records = {name: [model.record] for name, model in models.runs.items() if model.record is not None}
    return [comparison for comparison in compare(shared(records)) if comparison.differences]


def _tests(models: Models) -> list[str]:
    comparisons = _comparisons(models)
    if not comparisons:
        return []
    columns = ("Models", "#Difference in accuracy", "#Adjusted p", "")
    rows = [
        (
            f"{escape(test.first)} − {escape(test.second)}",
            f"{shown(test.value)}{between(test.interval)}",
            f"{test.adjusted:.2g}",
            "they differ" if test.adjusted < REAL else "may be chance",
        )
        for comparison in comparisons
        for test in comparison.differences
    ]
    caption = (
        "Paired permutation tests on the same images, adjusted together by Holm's method. They compare these weights; "
        "another seed gives other weights."
    )
    return ["<h3>Differences</h3>", f'<p class="caption">{caption}</p>', shell.table("tests", columns, rows)]


def _classifiers_curves(models: Models) -> Figure | None:
    canvas = Canvas(models)
    alt = canvas.alt
    losses, shares = [], []
    for name, model in models.runs.items():
        every = max(1, len(model.curve) // POINTS_EACH)
        losses += [{"architecture": name, "step": row["step"], "value": row["loss"]} for row in model.curve[::every]]
        shares += _held_out_accuracies(name, model)
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
    for name, model in models.runs.items():
        speed = model.result.get("images_per_second")
        if model.record is None or not finite(speed):
            continue
        low, high = model.record.detail["wilson"]["accuracy"]
        rows.append(
            {"architecture": name, "speed": speed, "value": _accuracy(model), "low": low, "high": high,
             "accuracy": f"{_accuracy(model):.2%} ({low:.1%} to {high:.1%})", "images/s": f"{speed:,.0f} in training"}
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


# The page of a denoiser: samples, samples over training, loss by time step, and distances to real images.
#
# Everything on it is in the run folder: config.yaml, metrics.jsonl, result.json, `pictures`, and the records of
# `linnet evaluate samples` if there are any. Nothing is drawn from the model here.


WIDE, NARROW = 480, 160  # pixels of the last picture, and of those over the training
STRIP = 12  # most pictures of the training that are shown
BIN = "validation_loss_t"


@dataclass(frozen=True)
class Denoiser(OneRun):
    """The run of a denoiser.

    Attributes:
        pictures: grids of samples, PNG, by their step.
        records: of `linnet evaluate samples`, by extractor, settings and step.
    """

    pictures: dict[int, Path]
    records: list[Evaluation]


def write_denoiser(run: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page of a run of `objective: diffusion`, and a PNG and an SVG of each figure beside it.

    Args:
        run: the run folder.
        out: the page; default `report/index.html` in the run folder.

    Raises:
        ConfigError: the folder cannot be read, the page cannot be written, or the extra `study` is not installed.
    """
    return _write(run, out, read_denoiser, (over_steps, _losses), _denoiser_page)


def read_denoiser(run: str | Path) -> Denoiser:
    """Reads a run folder. Raises ConfigError if it cannot be read."""
    contents = read_run(run)
    records = [record for record in read_evaluations(contents.folder, []) if record.kind == "samples"]
    records.sort(key=lambda record: (record.asked["extractor"], record.model.get("step") or 0, record.asked["samples"]))
    pictures = {int(path.stem[5:]): path for path in sorted((contents.folder / PICTURES).glob("step-????????.png"))}
    return Denoiser(**vars(contents), pictures=pictures, records=records)


def _denoiser_page(found: Denoiser, figures: list[Figure], command: str) -> str:
    parts = [f'<p class="lead">{_denoiser_lead(found)}</p>', *_samples(found), *_denoiser_scores(found), *_strip(found)]
    parts += [shell.section(figure, command) for figure in figures]
    parts += shell.how_made(command, "the run folder alone", _denoiser_facts(found))
    return shell.document(f"Denoiser: {found.name}", parts)


def _denoiser_lead(found: Denoiser) -> str:
    text = _trained(found, found.result.get("params_total"))
    if found.validations:
        row = found.validations[-1]
        text += f" Held-out loss: <b>{row['validation_loss']:.4f}</b>"
        if finite(row.get("validation_mse")):
            text += f", of which {row['validation_mse']:.4f} is the squared error of the noise"
        text += "."
    return text


def _samples(found: Denoiser) -> list[str]:
    if not found.pictures:
        fix = escape(shell.typed("linnet", "sample", found.folder))
        return [f'<p class="notice">The training drew no pictures; <code>{fix}</code> draws samples.</p>']
    step, path = list(found.pictures.items())[-1]
    classes = _classes(found.folder)
    rows = f" Rows, from the top: {escape(', '.join(classes))}." if classes else ""
    caption = f"Samples after step {step:,}, one row per class (at most ten), always from the same noise.{rows}"
    return shell.captioned("Samples", caption, _image(path.read_bytes(), f"step {step}", WIDE))


def _strip(found: Denoiser) -> list[str]:
    steps = list(found.pictures)
    if len(steps) < 2:
        return []
    shown = sorted({steps[number * (len(steps) - 1) // (STRIP - 1)] for number in range(STRIP)})
    tiles = "".join(
        f'<figure style="width:auto">{_image(found.pictures[step].read_bytes(), f"step {step}", NARROW)}'
        f"<figcaption>step {step:,}</figcaption></figure>"
        for step in shown
    )
    caption = "The same samples over the training: equal places have equal noise and equal classes."
    return shell.captioned("Samples over training", caption, f'<div class="tiles">{tiles}</div>')


def _image(png: bytes, alt: str, wide: int) -> str:
    """Returns a picture, enlarged by a whole factor to about `wide` pixels."""
    data = base64.b64encode(png).decode()
    width = int.from_bytes(png[16:20], "big")  # of the header of a PNG file
    size = f"width:{width * max(1, wide // width)}px;height:auto;max-width:100%"
    return f'<img class="sheet" src="data:image/png;base64,{data}" alt="{escape(alt)}" style="{size}">'


def _denoiser_scores(found: Denoiser) -> list[str]:
    if not found.records and found.evaluations:  # which measured samples during the training
        return []
    if not found.records:
        fix = escape(shell.typed("linnet", "evaluate", "samples", found.folder, "--extractor", "CLASSIFIER"))
        return [f'<p class="notice">Distances to real images need an evaluation: <code>{fix}</code></p>']
    parts = ["<h2>Distances to real images</h2>"]
    for extractor in dict.fromkeys(record.asked["extractor"] for record in found.records):
        scored = [record for record in found.records if record.asked["extractor"] == extractor]
        distance, kernel = (result.metric for result in scored[0].results[:2])
        real = scored[-1].detail["real"]
        caption = (
            f"In the features of {escape(extractor)}, to {real['images']:,} training images. Of {real['held_out']:,} "
            f"held-out images {escape(distance)} is {real[distance]:.3f}. Numbers of other features are not comparable."
        )
        columns = ("#Step", "#Samples", "#Sampler", "#Guidance", f"#{escape(distance)}", f"#{escape(kernel)}",
                   "#Asked class", "#Memorised", "#Precision", "#Recall")  # fmt: skip
        parts += [f'<p class="caption">{caption}</p>', shell.table("distances", columns, map(_cells, scored))]
    return parts


def _cells(record: Evaluation) -> list[str]:
    values = {result.metric: result.value for result in record.results}
    asked, (distance, kernel) = record.asked, record.results[:2]
    return [
        f"{record.model.get('step') or 0:,}",
        f"{asked['samples']:,}",
        f"{escape(asked['sampler'])}, {asked['steps']}",
        f"{asked['guidance']:g}",
        f"{distance.value:.3f}",
        f"{kernel.value:.5f} ± {record.detail['kernel_error']:.5f}",
        f"{values['asked_class']:.1%}" if "asked_class" in values else "",
        f"{values['memorised']:.1%}",
        *(f"{values[name]:.1%}" if name in values else "" for name in ("precision", "recall")),
    ]


def _losses(found: Denoiser) -> Figure | None:
    if not found.curve and not found.validations:
        return None
    canvas = Canvas(found)
    alt = canvas.alt
    x, panel = _loss_panel(canvas, found, "loss (squared error + bits)", "")
    panels = [panel]
    starts = sorted({int(key.removeprefix(BIN)) for row in found.validations for key in row if key.startswith(BIN)})
    if starts:
        width = 1000 // len(starts)
        names = [f"{start} to {start + width - 1}" for start in starts]
        bins = [
            {"step": row["step"], "value": row[f"{BIN}{start}"], "t": name,
             "loss": f"t {name}: {row[f'{BIN}{start}']:.4f} at step {row['step']:,}"}
            for row in found.validations for start, name in zip(starts, names, strict=True) if f"{BIN}{start}" in row
        ]  # fmt: skip
        domain = style.padded([max(row["value"], 1e-6) for row in bins], True)
        y = alt.Y("value:Q", **style.axis(alt, "loss", domain, "held-out loss"))
        scale = alt.Scale(domain=names, range=list(style.PALETTE[: len(names)]))
        colour = alt.Color("t:N", scale=scale, sort=names, legend=alt.Legend(title="time step t"))
        base = canvas.chart(bins)
        line = base.mark_line(strokeWidth=1.6).encode(x, y, colour)
        dots = base.mark_point(size=30, filled=True, opacity=1).encode(x, y, colour, tooltip=canvas.tooltip(("loss",)))
        panels.append(canvas.layer(line, dots).properties(width=420, height=260, title="held-out loss by time step"))
    caption = (
        "The loss of training batches (thin) and of held-out images with fixed time steps and noise (dots), and the "
        "held-out loss in four ranges of time steps: t = 0 has almost no noise, t = 999 almost no image."
    )
    drawn = canvas.joined("hconcat", panels, 28) | {"resolve": {"scale": {"color": "independent"}}}
    return canvas.figure("training", "Training", caption, drawn)


def _classes(folder: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        names = load_json(folder / CLASSES)
        count = min(10, len(names))
        return [str(names[number * len(names) // count]) for number in range(count)]
    return []


def _denoiser_facts(found: Denoiser) -> dict[str, str]:
    speeds = [f"{record.detail['samples_per_second']:,.1f} samples per second" for record in found.records[-1:]]
    return {
        "Trained with": escape(provenance.shown([found.result])) if found.result else "not finished",
        "Sampled at": speeds[0] if speeds else "",
    }
