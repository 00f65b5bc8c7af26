"""The page of an image classifier: accuracy, training curves, calibration, confusions and the worst mistakes.

Everything on it is in the run folder: config.yaml, metrics.jsonl, result.json, and the record of
`linnet evaluate images` if there is one. Nothing is scored here, and the images need not be there.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from linnet import provenance
from linnet.config import FIGURES, check_study
from linnet.evaluate.results import Evaluation, read_evaluations
from linnet.report import shell, style, units
from linnet.report.downstream import over_steps
from linnet.report.drawing import Canvas, Figure
from linnet.report.records import OneRun, finite, read_run
from linnet.runs.files import write_atomic

CELLS = 40  # up to so many classes the confusions are drawn as a matrix
LISTED = 12  # most confusions that the table lists
POINTS = 400  # most points of a training curve that are drawn


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
    check_study(FIGURES, "report")
    found = read_classifier(run)
    page = shell.page_path(run, out)
    command = shell.typed("linnet", "report", run, out=out)
    figures = [
        one for one in (_curves(found), over_steps(found), _calibration(found), _matrix(found)) if one is not None
    ]
    for figure in figures:
        shell.write_pictures(page.parent, figure)
    write_atomic(page, _page(found, figures, command))
    return page


def read_classifier(run: str | Path) -> Classifier:
    """Reads a run folder. Raises ConfigError if it cannot be read."""
    found = read_run(run)
    records = [one for one in read_evaluations(found.folder, []) if one.kind == "images"]
    # Held-out images of the training first (no `data`), then the latest step.
    records.sort(key=lambda one: (bool(one.asked.get("data")), -(one.model.get("step") or 0)))
    return Classifier(**vars(found), record=records[0] if records else None)


def _page(found: Classifier, figures: list[Figure], command: str) -> str:
    parts = [f'<p class="lead">{_lead(found)}</p>']
    if found.record is None:
        fix = escape(shell.typed("linnet", "evaluate", "images", found.folder))
        parts.append(
            f'<p class="notice">The confusions, the calibration and the mistakes need an evaluation: <code>{fix}</code>'
            "</p>"
        )
    else:
        parts += _scores(found.record)
    parts += [shell.section(figure, command) for figure in figures]
    if found.record is not None:
        parts += [*_confused(found.record), *_mistakes(found.record)]
    parts += ["<h2>How this was made</h2>", shell.facts(_facts(found, command))]
    return shell.document(f"Image classifier: {found.name}", parts)


def _lead(found: Classifier) -> str:
    result, record = found.result, found.record
    parameters = result.get("params_total") or (record.model.get("params_total") if record else None)
    words = [f"{units.count(parameters)} parameters"] if parameters else []
    if found.curve:
        images = found.curve[-1].get("images")
        words.append(f"trained on {images:,} images" if images else f"trained for {found.curve[-1]['step']:,} steps")
    text = escape(", ".join(words)) + "." if words else ""
    if record is not None:
        value = next(one.value for one in record.results if one.metric == "accuracy")
        low, high = record.detail["wilson"]["accuracy"]
        text += f" Of {record.detail['images']:,} {_scored(record)}, <b>{value:.2%}</b> are right "
        text += f"(95 % interval {low:.2%} to {high:.2%}; guessing: {1 / len(record.detail['classes']):.2%})."
    elif finite(result.get("accuracy")):
        text += f" Held-out accuracy: <b>{result['accuracy']:.2%}</b>."
    return text


def _scored(record: Evaluation) -> str:
    data = record.asked.get("data")
    return f"images of {escape(', '.join(Path(one).name for one in data))}" if data else "held-out images"


def _scores(record: Evaluation) -> list[str]:
    names = {
        "accuracy": "Accuracy",
        "top5_accuracy": "Top-5 accuracy",
        "nll": "Loss (nats per image)",
        "calibration_error": "Calibration error (ECE)",
    }
    chances = {metric: value for _, metric, value in record.detail["chance"]}
    rows = []
    for one in record.results:
        if one.metric not in names:
            continue
        share = one.metric in chances
        low, high = record.detail["wilson"].get(one.metric, (None, None)) if share else (None, None)
        interval = f"{low:.2%} to {high:.2%}" if share else ""
        value = f"{one.value:.2%}" if share else f"{one.value:.4f}"
        guess = f"{chances[one.metric]:.2%}" if share else ""
        cells = f'<td class="n">{value}</td><td class="n">{interval}</td><td class="n">{guess}</td>'
        rows.append(f"<tr><th>{names[one.metric]}</th>{cells}</tr>")
    head = '<th></th><th class="n">Value</th><th class="n">95 % interval (Wilson)</th><th class="n">Guessing</th>'
    return ["<h2>Scores</h2>", shell.table("scores", head, rows)]


def _curves(found: Classifier) -> Figure | None:
    if not found.curve and not found.validations:
        return None
    canvas = Canvas(found)
    alt, name = canvas.alt, found.name
    every = max(1, len(found.curve) // POINTS)
    training = [{"architecture": name, "step": row["step"], "value": row["loss"]} for row in found.curve[::every]]
    held = [
        {"architecture": name, "step": row["step"], "value": row["validation_loss"],
         "held-out": f"{row['validation_loss']:.4f} nats per image at step {row['step']:,}"}
        for row in found.validations
    ]  # fmt: skip
    last = max([row["step"] for row in (*training, *held)], default=1)
    x = alt.X("step:Q", title="step", scale=alt.Scale(domain=[0, last], nice=False)).axis(format=",.0f", tickCount=6)
    values = [row["value"] for row in (*training, *held)]
    domain = style.padded([max(value, 1e-6) for value in values], True)
    y = alt.Y("value:Q", **style.axis(alt, "loss", domain, "loss (nats per image)"))
    line = canvas.chart(training).mark_line(strokeWidth=1, opacity=0.55, clip=True)
    layers = [line.encode(x, y, canvas.colour(legend=False))]
    dots = canvas.chart(held)
    tooltip = canvas.tooltip(("held-out",))
    layers.append(dots.mark_line(style=style.INK, strokeWidth=1.8, clip=True).encode(x, y))
    layers.append(dots.mark_point(style=style.INK, size=34, filled=True, opacity=1).encode(x, y, tooltip=tooltip))
    panels = [canvas.layer(*layers).properties(width=420, height=260, title="loss")]
    shares = [
        {"architecture": name, "step": row["step"], "value": row["validation_accuracy"],
         "accuracy": f"{row['validation_accuracy']:.2%} at step {row['step']:,}"}
        for row in found.validations if finite(row.get("validation_accuracy"))
    ]  # fmt: skip
    if shares:
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


def _calibration(found: Classifier) -> Figure | None:
    if found.record is None:
        return None
    canvas = Canvas(found)
    alt = canvas.alt
    rows = [
        {"low": one["low"], "high": one["high"], "confidence": one["confidence"], "accuracy": one["accuracy"],
         "count": one["count"],
         "bin": f"confidence {one['low']:.0%} to {one['high']:.0%}: {one['count']:,} images",
         "right": f"{one['accuracy']:.1%} right, mean confidence {one['confidence']:.1%}"}
        for one in found.record.detail["bins"] if one["count"]
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
    wrong = sorted((one for one in record.detail["confusions"] if one[0] != one[1]), key=lambda one: -one[2])[:LISTED]
    if not wrong:
        return []
    head = '<th>Label</th><th>Predicted</th><th class="n">Images</th>'
    rows = [
        f"<tr><td>{escape(classes[label])}</td><td>{escape(classes[guess])}</td>"
        f'<td class="n" data-v="{count}">{count:,}</td></tr>'
        for label, guess, count in wrong
    ]
    return ["<h3>The most frequent confusions</h3>", shell.table("confused", head, rows, "sortable")]


def _mistakes(record: Evaluation) -> list[str]:
    classes, mistakes = record.detail["classes"], record.detail["mistakes"]
    if not mistakes:
        return []
    caption = "The wrong answers to whose label the model gave the lowest probability, as the model saw the images."
    pictures = "".join(
        f'<figure><img src="data:image/png;base64,{escape(one["png"])}" alt="image {one["index"]}">'
        f"<figcaption>{escape(classes[one['label']])} ({one['label_probability']:.2%})<br>"
        f"→ <b>{escape(classes[one['predicted']])}</b> ({one['probability']:.0%})</figcaption></figure>"
        for one in mistakes
    )
    return ["<h2>The worst mistakes</h2>", f'<p class="caption">{caption}</p>', f'<div class="tiles">{pictures}</div>']


def _facts(found: Classifier, command: str) -> dict[str, str]:
    record = found.record
    speed = f"{record.detail['images_per_second']:,.0f} images per second at evaluation" if record else ""
    return {
        "Redraw": f"<code>{escape(command)}</code>, from the run folder alone",
        "Trained with": escape(provenance.shown([found.result])) if found.result else "not finished",
        "Evaluated with": escape(provenance.shown([record.model.get("evaluated") or {}])) if record else "",
        "Images scored": f"digest {record.scored}, {_scored(record)}" if record else "",
        "Speed": speed,
        "Drawn with": escape(shell.drawn_with()),
    }
