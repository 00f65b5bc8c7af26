"""The page of a denoiser: samples, samples over training, loss by time step, and distances to real images.

Everything on it is in the run folder: config.yaml, metrics.jsonl, result.json, `pictures`, and the records of
`linnet evaluate samples` if there are any. Nothing is drawn from the model here.
"""

import base64
import contextlib
import json
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
from linnet.runs.folder import CLASSES, PICTURES

POINTS = 400  # most points of a training curve that are drawn
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
    check_study(FIGURES, "report")
    found = read_denoiser(run)
    page = shell.page_path(run, out)
    command = shell.typed("linnet", "report", run, out=out)
    figures = [one for one in (over_steps(found), _losses(found)) if one is not None]
    for figure in figures:
        shell.write_pictures(page.parent, figure)
    write_atomic(page, _page(found, figures, command))
    return page


def read_denoiser(run: str | Path) -> Denoiser:
    """Reads a run folder. Raises ConfigError if it cannot be read."""
    found = read_run(run)
    records = [one for one in read_evaluations(found.folder, []) if one.kind == "samples"]
    records.sort(key=lambda one: (one.asked["extractor"], one.model.get("step") or 0, one.asked["samples"]))
    pictures = {int(path.stem[5:]): path for path in sorted((found.folder / PICTURES).glob("step-????????.png"))}
    return Denoiser(**vars(found), pictures=pictures, records=records)


def _page(found: Denoiser, figures: list[Figure], command: str) -> str:
    parts = [f'<p class="lead">{_lead(found)}</p>', *_samples(found), *_scores(found), *_strip(found)]
    parts += [shell.section(figure, command) for figure in figures]
    parts += ["<h2>How this was made</h2>", shell.facts(_facts(found, command))]
    return shell.document(f"Denoiser: {found.name}", parts)


def _lead(found: Denoiser) -> str:
    parameters = found.result.get("params_total")
    words = [f"{units.count(parameters)} parameters"] if parameters else []
    if found.curve:
        images = found.curve[-1].get("images")
        words.append(f"trained on {images:,} images" if images else f"trained for {found.curve[-1]['step']:,} steps")
    text = escape(", ".join(words)) + "." if words else ""
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
    return ["<h2>Samples</h2>", f'<p class="caption">{caption}</p>', _image(path.read_bytes(), f"step {step}", WIDE)]


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
    return [
        "<h2>Samples over training</h2>",
        f'<p class="caption">{caption}</p>',
        f'<div class="tiles">{tiles}</div>',
    ]


def _image(png: bytes, alt: str, wide: int) -> str:
    """Returns a picture, enlarged by a whole factor to about `wide` pixels."""
    data = base64.b64encode(png).decode()
    width = int.from_bytes(png[16:20], "big")  # of the header of a PNG file
    own = f"width:{width * max(1, wide // width)}px;height:auto;max-width:100%"
    return f'<img class="sheet" src="data:image/png;base64,{data}" alt="{escape(alt)}" style="{own}">'


def _scores(found: Denoiser) -> list[str]:
    if not found.records and found.evaluations:  # which measured samples during the training
        return []
    if not found.records:
        words = ("linnet", "evaluate", "samples", found.folder, "--extractor", "CLASSIFIER")
        fix = escape(shell.typed(*words))
        return [f'<p class="notice">Distances to real images need an evaluation: <code>{fix}</code></p>']
    parts = ["<h2>Distances to real images</h2>"]
    for extractor in dict.fromkeys(one.asked["extractor"] for one in found.records):
        own = [one for one in found.records if one.asked["extractor"] == extractor]
        distance, kernel = (one.metric for one in own[0].results[:2])
        real = own[-1].detail["real"]
        caption = (
            f"In the features of {escape(extractor)}, to {real['images']:,} training images. Of {real['held_out']:,} "
            f"held-out images {escape(distance)} is {real[distance]:.3f}. Numbers of other features are not comparable."
        )
        head = "".join(
            f'<th class="n">{word}</th>'
            for word in ("Step", "Samples", "Sampler", "Guidance", escape(distance), escape(kernel), "Asked class",
                         "Memorised", "Precision", "Recall")
        )  # fmt: skip
        parts += [f'<p class="caption">{caption}</p>', shell.table("distances", head, [_row(one) for one in own])]
    return parts


def _row(record: Evaluation) -> str:
    values = {one.metric: one.value for one in record.results}
    asked, (distance, kernel) = record.asked, record.results[:2]
    cells = [
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
    return "<tr>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) + "</tr>"


def _losses(found: Denoiser) -> Figure | None:
    if not found.curve and not found.validations:
        return None
    canvas = Canvas(found)
    alt, name = canvas.alt, found.name
    every = max(1, len(found.curve) // POINTS)
    training = [{"architecture": name, "step": row["step"], "value": row["loss"]} for row in found.curve[::every]]
    held = [
        {"architecture": name, "step": row["step"], "value": row["validation_loss"],
         "held-out": f"{row['validation_loss']:.4f} at step {row['step']:,}"}
        for row in found.validations
    ]  # fmt: skip
    last = max([row["step"] for row in (*training, *held)], default=1)
    x = alt.X("step:Q", title="step", scale=alt.Scale(domain=[0, last], nice=False)).axis(format=",.0f", tickCount=6)
    values = [max(row["value"], 1e-6) for row in (*training, *held)]
    y = alt.Y("value:Q", **style.axis(alt, "loss", style.padded(values, True), "loss (squared error + bits)"))
    line = canvas.chart(training).mark_line(strokeWidth=1, opacity=0.55, clip=True)
    layers = [line.encode(x, y, canvas.colour(legend=False))]
    dots = canvas.chart(held)
    tooltip = canvas.tooltip(("held-out",))
    layers.append(dots.mark_line(style=style.INK, strokeWidth=1.8, clip=True).encode(x, y))
    layers.append(dots.mark_point(style=style.INK, size=34, filled=True, opacity=1).encode(x, y, tooltip=tooltip))
    panels = [canvas.layer(*layers).properties(width=420, height=260, title="loss")]
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
        names = json.loads((folder / CLASSES).read_text(encoding="utf-8"))
        count = min(10, len(names))
        return [str(names[number * len(names) // count]) for number in range(count)]
    return []


def _facts(found: Denoiser, command: str) -> dict[str, str]:
    speeds = [f"{one.detail['samples_per_second']:,.1f} samples per second" for one in found.records[-1:]]
    return {
        "Redraw": f"<code>{escape(command)}</code>, from the run folder alone",
        "Trained with": escape(provenance.shown([found.result])) if found.result else "not finished",
        "Sampled at": speeds[0] if speeds else "",
        "Drawn with": escape(shell.drawn_with()),
    }
