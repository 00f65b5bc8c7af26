"""Pieces that several figures share: encodings by architecture, laws with their bands, grids of panels."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from linnet.report import style, units

if TYPE_CHECKING:
    from linnet.report.records import Study

BUDGET_RAMP = ("#4B2991", "#872CA2", "#C0369D", "#EA4F88", "#FA7876", "#F6A97A")  # readable on white and on black
RUN_FIELDS = ("run", "architecture", "N", "D", "C", "loss", "state", "time", "folder")
FADED = 0.07  # opacity of architectures that are not in focus


@dataclass
class Figure:
    """One figure of the report.

    Attributes:
        name: stem of its files. title: a short heading. caption: how to read it, in plain text.
        spec: vega-lite specification, without a theme.
    """

    name: str
    title: str
    caption: str
    spec: dict[str, Any]


class Canvas:
    """What one figure is drawn with: the study, its colours, and the rows of its points and lines.

    Rows are kept apart from the Altair charts and joined to the specification at the end, because Altair checks every
    number of inline rows against its schema, which takes longer than all the rest.

    Attributes:
        alt: the altair module (imported late: it is in the extra `study`).
    """

    def __init__(self, study: "Study"):
        import altair as alt

        self.alt = alt
        self.study = study
        self._datasets: dict[str, list[dict]] = {}

    def data(self, rows: list[dict]):
        """Rows as named data; floats are cut to six digits, so that the page stays small."""
        name = f"rows-{len(self._datasets)}"
        self._datasets[name] = [{key: short(value) for key, value in row.items()} for row in rows]
        return self.alt.NamedData(name)

    def chart(self, rows: list[dict]):
        return self.alt.Chart(self.data(rows))

    def layer(self, *charts):
        """Layers in this order, without those that have no rows."""
        return self.alt.layer(*(chart for chart in charts if self._datasets[chart.data.name]))

    def colour(self, legend: bool = True, **look):
        return self._keyed(self.alt.Color, style.colours(self.study.architectures), legend, look | {"symbolOpacity": 1})

    def shape(self, legend: bool = True, **look):
        return self._keyed(self.alt.Shape, style.shapes(self.study.architectures), legend, look)

    def _keyed(self, channel, known: dict[str, str], legend: bool, look: dict):
        shown = self.alt.Legend(title=None, **look) if legend and len(known) > 1 else None
        scale = self.alt.Scale(domain=list(known), range=list(known.values()))
        return channel("architecture:N", scale=scale, legend=shown)

    def fade(self, value: float = 1.0):
        """An opacity: `value`, and almost nothing for other architectures than the one in focus.

        For strokeOpacity or fillOpacity where there is a choice: opacity is slow in a PNG, which gets a layer a mark.
        """
        # As an object of its own, of any opacity: Altair takes long to find what a condition given as a dict may be.
        in_focus = {"test": "focus == '' || focus == datum.architecture", "value": value}
        return self.alt.OpacityValue(FADED * value, condition=in_focus)

    def tooltip(self, fields) -> list:
        return [self.alt.Tooltip(f"{field}:N", title=field) for field in fields]

    def panel(self, drawn, name: str, columns: int):
        """One architecture's part of a grid of so many columns."""
        title = self.alt.TitleParams(text=name, color=style.colours(self.study.architectures)[name])
        return drawn.properties(title=title, width={1: 860, 2: 440, 3: 285}[columns], height=250)

    def grid(self, panels: list, columns: int, spacing: int = 24) -> dict[str, Any]:
        return self.joined("concat", panels, spacing) | {"columns": columns}

    def joined(self, how: str, panels: list, spacing: int) -> dict[str, Any]:
        """The specification of several panels, "concat", "hconcat" or "vconcat", so many pixels apart.

        It is put together behind Altair, which copies every panel several times at each level of nesting.
        """
        return {how: [self._spec(panel) for panel in panels], "spacing": spacing}

    def _spec(self, drawn) -> dict[str, Any]:
        """The specification of a chart without the header that only the outermost has, or one from `joined`."""
        if isinstance(drawn, dict):
            return drawn
        spec = drawn.to_dict()
        return {key: value for key, value in spec.items() if key not in ("$schema", "config")}

    def figure(self, name: str, title: str, caption: str, drawn) -> Figure:
        """Adds the parameter that brings one architecture forward, and the rows."""
        spec = {"$schema": self.alt.SCHEMA_URL, "description": f"{title}. {caption}"} | self._spec(drawn)
        # Put in behind Altair, which would copy all panels for it.
        spec["params"] = [{"name": "focus", "value": ""}, *spec.get("params", [])]
        return Figure(name, title, caption, spec | {"datasets": self._datasets})

    def curves(self, bands, lines, x, y: dict, hue, field: str, shade: float) -> list:
        """Bands, whose opacity is `shade`, and lines of a field, dashed beyond the data; `y` is of `style.axis`."""
        alt = self.alt
        area = self.chart(bands).mark_area(clip=True, opacity=1)
        low, high = alt.Y("low:Q", **y), alt.Y2("high:Q")
        layers = [area.encode(x, low, high, hue, fillOpacity=self.fade(shade))]
        for beyond in (False, True):
            width, dash, strength = (1.4, [5, 4], 0.7) if beyond else (2, [1, 0], 1.0)
            drawn = self.chart([row for row in lines if row["beyond"] == beyond])
            drawn = drawn.mark_line(strokeWidth=width, strokeDash=dash, clip=True)
            layers.append(drawn.encode(x, alt.Y(f"{field}:Q", **y), hue, strokeOpacity=self.fade(strength)))
        return layers

    def law_layers(self, bands, lines, points, x: dict, y: dict, fields) -> list:
        """Bands, lines (dashed beyond the data) and points (hollow where they do not count) against compute.

        Args:
            bands, lines: rows of `band` and `line` with the architecture.
            points: {"architecture", "C", "value", "inside", ...}; `fields` are shown on hovering.
            x, y: from `style.axis`.
        """
        at, value, hue = self.alt.X("C:Q", **x), self.alt.Y("value:Q", **y), self.colour()
        layers = self.curves(bands, lines, at, y, hue, "value", shade=0.13)
        for inside in (True, False):
            drawn = self.chart([row for row in points if row["inside"] == inside])
            drawn = drawn.mark_point(size=62, filled=inside, strokeWidth=1.7, opacity=1, clip=True)
            layers.append(drawn.encode(at, value, hue, self.shape(), opacity=self.fade(), tooltip=self.tooltip(fields)))
        return layers


def columns_for(panels: int) -> int:
    """Returns the number of panels per row: as many as fit, unless fewer avoid a last row with a single panel."""
    return {1: 1, 2: 2, 4: 2}.get(panels, 3)


def run_row(row) -> dict:
    """What hovering over a run shows, written out. `row` is a row of the study's table."""
    score = f"{units.significant(row['bits_per_byte'], 4)} bits per byte"
    if row.get("accuracy", math.nan) == row.get("accuracy", math.nan):  # not NaN: a run over images
        score = f"accuracy {row['accuracy']:.1%}"
    return {
        "run": row["run"],
        "architecture": row["architecture"],
        "N": f"{units.count(row['params_non_embedding'])} ({units.count(row['params_total'])} with embeddings)",
        "D": f"{units.count(row['tokens'])} tokens",
        "C": units.flops(row["flops"]),
        "loss": f"{units.loss(row['loss'])} nats per token, {score}",
        "state": units.size(row["state_bytes"]) + " a sequence",
        "time": units.duration(row["seconds"]),
        "folder": row["path"] if isinstance(row["path"], str) else units.MISSING,
    }


def short(value):
    """Six digits of a float, as a plain Python number; other values as they are."""
    if isinstance(value, bool | str | int | None):
        return value
    return float(f"{float(value):.6g}") if math.isfinite(value) else None


def by_label(alt, field: str, labels: Iterable[str], title: str | None = None):
    """Returns colours along the ramp for the values of a field, in the order of their labels."""
    labels = list(dict.fromkeys(labels))
    scale = alt.Scale(domain=labels, range=ramp(len(labels)))
    legend = alt.Legend(title=title, orient="top", direction="horizontal", symbolOpacity=1)
    return alt.Color(f"{field}:N", scale=scale, legend=legend)


def ramp(number: int) -> list[str]:
    """`number` colours from dark to light along the budget ramp."""
    if number == 1:
        return [BUDGET_RAMP[1]]
    colours = []
    for index in range(number):
        place = index * (len(BUDGET_RAMP) - 1) / (number - 1)
        low = min(int(place), len(BUDGET_RAMP) - 2)
        pairs = zip(_channels(BUDGET_RAMP[low]), _channels(BUDGET_RAMP[low + 1]), strict=True)
        colours.append("#" + "".join(f"{round(a + (b - a) * (place - low)):02x}" for a, b in pairs))
    return colours


def band(law, reach: float) -> list[dict]:
    """Points of a law's band up to `reach` times the largest compute it was fitted to, with 95 % limits."""
    return [row for row in line(law, reach) if row["low"] is not None]


def line(law, reach: float) -> list[dict]:
    """Points of a law: {"C", "value", "low", "high", "beyond"}; the end of the data belongs to both parts."""
    if law.refused:
        return []
    low, high = law.interval_at(law.c_max) or (None, None)
    end = {"C": law.c_max, "value": float(law.predict(law.c_max)), "low": low, "high": high}
    rows = law.band
    inside = [row for row in rows if row["C"] < law.c_max] + [end]
    beyond = [end] + [row for row in rows if law.c_max < row["C"] <= reach * law.c_max]
    return [row | {"beyond": False} for row in inside] + [row | {"beyond": True} for row in beyond]


def _channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
