"""The picture of `linnet bench generate`: speed against batch and context, and what a sequence carries."""

import csv
from pathlib import Path

from linnet.config import FIGURES, ConfigError, check_study, grouped
from linnet.report import shell, style, units
from linnet.report.drawing import Figure
from linnet.runs.files import read_csv

WIDTH, HEIGHT = 300, 260
PANELS = (
    # x, y, and their titles; a panel shows the rows that differ only in x
    ("batch", "decode_tokens_per_second", "sequences at once", "new tokens per second"),
    ("context", "token_ms", "context (tokens)", "milliseconds per token"),
    ("context", "carried_bytes", "context (tokens)", "carried bytes per sequence"),
)


def write_throughput(rows: list[dict], folder: Path) -> list[Path]:
    """Draws generate.svg and generate.png into `folder`.

    Raises:
        ConfigError: the extra `study`, which draws figures, is not installed, or all rows have one batch and context.
    """
    check_study(FIGURES, "report", f", or draw it elsewhere: linnet bench draw {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    figure = draw(rows)
    shell.write_pictures(folder, figure)
    return [folder / f"{figure.name}.{kind}" for kind in ("svg", "png")]


def read_rows(file: Path) -> list[dict]:
    """Reads the rows of a generate.csv. Raises ConfigError if it cannot be read."""
    try:
        rows = list(read_csv(file))
        whole, real = ("batch", "prompt", "new", "carried_bytes"), ("token_ms", "decode_tokens_per_second")
        for row in rows:
            row |= {name: int(row[name]) for name in whole if row[name]}
            row |= {name: float(row[name]) for name in real if row[name]}
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read ({error.strerror})"], "linnet bench") from None
    except (KeyError, ValueError, csv.Error) as error:
        raise ConfigError(
            [f"{file}: not a table of `linnet bench generate --out` ({error}); make it again"], "linnet bench"
        ) from None
    return rows


def draw(rows: list[dict]) -> Figure:
    """Draws three panels, one line per model and system; rows without a time (out of memory) are left out.

    Raises:
        ConfigError: no two cases differ, so that there is nothing to draw.
    """
    import altair as alt

    rows = [_row(row) for row in rows if not row["error"] and row.get("token_ms")]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    scale = alt.Scale(domain=labels, range=list(style.colours(labels).values()))
    shapes = alt.Scale(domain=labels, range=list(style.shapes(labels).values()))
    legend = alt.Legend(orient="bottom", columns=2, labelLimit=320)
    panels = []
    for x, y, x_title, y_title in PANELS:
        shown = [{"label": row["label"], "x": row[x], "y": row[y]} for row in _alike(rows, x)]
        if len({point["x"] for point in shown}) < 2:
            continue
        places = sorted({point["x"] for point in shown})
        base = alt.Chart(alt.Data(values=shown))
        by = {
            "x": alt.X(
                "x:Q",
                title=x_title,
                scale=alt.Scale(type="log", base=2, nice=False, domain=style.padded(places, True)),
                axis=_ticks(alt, places, [_short(place) for place in places]),
            ),
            "y": _vertical(alt, y, y_title, [point["y"] for point in shown]),
            "color": alt.Color("label:N", scale=scale, title=None, legend=legend),
        }
        dots = base.mark_point(filled=True, size=46, opacity=1)
        dots = dots.encode(**by, shape=alt.Shape("label:N", scale=shapes, title=None))
        line = base.mark_line(strokeWidth=1.8).encode(**by)
        panels.append((line + dots).properties(width=WIDTH, height=HEIGHT))
    if not panels:
        what = "all cases that were timed have the same batch and the same context; give --batch or --context again"
        raise ConfigError([what], "linnet bench")
    drawn = alt.hconcat(*panels, spacing=28)
    caption = (
        "Greedy decoding, every token brought to the host. Left: a batch of prompts of one length. Centre and right: "
        "the smallest batch, behind contexts of different lengths; a recurrent state does not grow, a cache does."
    )
    return Figure("generate", "Generation", caption, drawn.to_dict())


def _row(row: dict) -> dict:
    return row | {"context": row["prompt"], "label": f"{row['model']}, {row['system']}"}


def _alike(rows: list[dict], x: str) -> list[dict]:
    """The rows that differ in x alone: those of the most frequent value of everything else."""
    others = ("prompt", "new") if x == "batch" else ("batch", "new")
    groups = grouped((tuple(row[key] for key in others), row) for row in rows)
    return max(groups.values(), key=lambda group: len({row[x] for row in group}), default=[])


def _vertical(alt, quantity: str, title: str, values: list[float]):
    # At least a factor of eight, so that what is flat looks flat.
    middle = (min(values) * max(values)) ** 0.5
    domain = style.padded([min(*values, middle / 8**0.5), max(*values, middle * 8**0.5)], True)
    if quantity == "carried_bytes":
        return alt.Y("y:Q", **style.axis(alt, "bytes", domain, title))
    ticks = style.decimal_ticks(*domain)
    axis = _ticks(alt, ticks, [units.count(tick) for tick in ticks])
    return alt.Y("y:Q", title=title, scale=alt.Scale(type="log", domain=domain, nice=False), axis=axis)


def _ticks(alt, places: list, names: list[str]):
    shown = "[" + ",".join(f"'{name}'" for name in names) + "]"
    return alt.Axis(values=places, labelExpr=f"{shown}[indexof({places}, datum.value)]", labelOverlap="greedy")


def _short(tokens: int) -> str:
    """Lengths as people name them: 128k of 131,072."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"
