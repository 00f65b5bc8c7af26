"""An item: one table, figure or claim of a paper as data, with the forms in which Linnet runs it.

Items lie in `items/<paper>/<item>.yaml`, beside `items/<paper>/paper.yaml` (`Paper`) and `items/data.yaml` (`Need`). No
item has Python of its own. Importing this module does not import torch.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from linnet.config import Config, SeveralKeys, nearest
from linnet.papers.claims import Claim, parse_claim

T = TypeVar("T")

VERBS = ("study", "train", "mad", "evaluate", "fit", "bench", "models", "mean")
FOLLOWERS = ("evaluate", "fit")
"""Verbs that work on the runs of an earlier step, which `of` names."""
SCALES = ("reduced", "full")

Cell = int | float | str | None
"""A number as printed. Text with a number keeps its digits ("2.300"); a claim about other text cannot be told."""


class Erratum(Config):
    """A printed number that is wrong.

    Attributes:
        row: row of `published.rows`.
        column: column of `published.columns`.
        printed: what the paper prints.
        corrected: the right number, which comparisons use; None: unknown, and the cell is not compared.
        why: how we know.
    """

    row: str
    column: str
    printed: Cell
    corrected: Cell = None
    why: str


class Published(Config):
    """Numbers as printed.

    Attributes:
        source: table, figure or section of the paper.
        columns: column -> unit.
        rows: row -> column -> number. A row may lack columns. A row without numbers is measured only.
        base: row with which the report compares the others, as differences.
        tolerance: column -> how far a full form may be off to count as reproduced: `2 %` of the printed number, or a
            number in the column's unit, or `digits`: equal in every printed digit.
        errata: wrong numbers; `rows` holds what is printed.
    """

    source: str
    columns: dict[str, str] = Field(min_length=1)
    rows: dict[str, dict[str, Cell]] = Field(min_length=1)
    base: str | None = None
    tolerance: dict[str, float | str] = Field(default_factory=dict)
    errata: list[Erratum] = Field(default_factory=list)

    @model_validator(mode="after")
    def _names(self):
        problems = [
            f"rows.{row}.{column}: unknown column; {nearest(column, self.columns)}"
            for row, cells in self.rows.items()
            for column in cells
            if column not in self.columns
        ]
        for error in self.errata:
            if error.row not in self.rows:
                problems.append(f"errata: unknown row {error.row!r}; {nearest(error.row, self.rows)}")
            elif (there := self.rows[error.row].get(error.column)) != error.printed:
                what = f"errata: {error.row}.{error.column} is not {error.printed!r} in rows"
                problems.append(f"{what}; write what is printed there ({there!r})")
        if self.base is not None and self.base not in self.rows:
            problems.append(f"base: unknown row {self.base!r}; {nearest(self.base, self.rows)}")
        for column, value in self.tolerance.items():
            if column not in self.columns:
                problems.append(f"tolerance.{column}: unknown column; {nearest(column, self.columns)}")
            if isinstance(value, str) and value != "digits" and not _SHARE.fullmatch(value):
                problems.append(f"tolerance.{column}: {value!r} is unknown; write 'N %', a number or 'digits'")
        if problems:
            raise SeveralKeys(problems, "published")
        return self

    def expected(self, row: str, column: str) -> float | None:
        """Returns the number that a measured one is compared with: the printed one, or its correction."""
        for error in self.errata:
            if (error.row, error.column) == (row, column):
                return number(error.corrected)
        return number(self.rows.get(row, {}).get(column))

    def wrong(self, row: str, column: str) -> str | None:
        """Returns what is printed in a cell that the errata correct; None for all other cells."""
        return next((str(e.printed) for e in self.errata if (e.row, e.column) == (row, column)), None)

    def text(self, row: str, column: str) -> str | None:
        """Returns what is printed in place of a number, such as OOM; None for numbers, empty cells and errata."""
        cell = self.rows.get(row, {}).get(column)
        wrong = self.wrong(row, column) is not None
        return None if cell is None or wrong or number(cell) is not None else str(cell)

    def inside(self, row: str, column: str, value: float) -> bool | None:
        """Returns whether a measured number lies inside the tolerance; None without a number or a tolerance."""
        expected, bound = self.expected(row, column), self.tolerance.get(column)
        if expected is None or bound is None:
            return None
        if bound == "digits":
            cell = self.rows[row][column]
            last = Decimal(str(expected if number(cell) is None else cell)).as_tuple().exponent
            return abs(value - expected) <= 0.5 * 10.0 ** int(last) * (1 + 1e-9)
        if isinstance(bound, str):
            return abs(value - expected) <= float(bound.removesuffix("%")) / 100 * abs(expected)
        return abs(value - expected) <= bound


_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%")


def number(cell: Cell) -> float | None:
    """Returns the number of a cell; None for other text."""
    try:
        value = float(cell) if cell is not None else None
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) else None


class Step(Config):
    """One verb with its configuration.

    Attributes:
        verb: study, train, mad, evaluate, fit, bench, models or mean (docs/reproduce.md lists the keys of each).
        name: name of the step, by which `of` and `--only` find it.
        config: the verb's configuration, or a file of it: beside the item, or in the package (`study/demo.yaml`).
            `${NAME}` in a text stands for the folder of `--data NAME=FOLDER`.
        set: changes of the configuration, dotted key -> value.
        vary: train only: label -> changes, one run each. Without it the step is one run, and its label is `name`.
        of: evaluate and fit: the earlier step whose runs are used.
        label: study, and steps `of` one: how a row of its table is called, such as `{architecture} {size}`.
        best: of several records with the same label and seed, take the one with the lowest value of this column (or the
            highest, with a `-` in front). Without it such records are an error.
        rows: measured label -> row of `published`. Labels that are rows already need no entry.
        columns: column of `published` -> measured column. Columns of the same name need no entry.
        needs: data without which this step alone is skipped.
        device: what this step alone needs; it is skipped elsewhere.
    """

    verb: str
    name: str = ""
    config: dict[str, Any] | str = Field(default_factory=dict)
    set: dict[str, Any] = Field(default_factory=dict)
    vary: dict[str, dict[str, Any]] = Field(default_factory=dict)
    of: str | None = None
    label: str = "{architecture}"
    best: str | None = None
    rows: dict[str, str] = Field(default_factory=dict)
    columns: dict[str, str] = Field(default_factory=dict)
    needs: list[str] = Field(default_factory=list)
    device: Literal["cpu", "gpu"] = "cpu"

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        return {"name": values["verb"], **values} if isinstance(values, dict) and "verb" in values else values

    @field_validator("verb")
    @classmethod
    def _known(cls, verb: str) -> str:
        if verb not in VERBS:
            raise ValueError(f"{verb!r} is not a verb; {nearest(verb, VERBS)}")
        return verb

    @model_validator(mode="after")
    def _follows(self):
        problems = []
        if self.of is not None and self.verb not in FOLLOWERS:
            problems.append(f"of: {self.of!r} has no effect on {self.verb}; only {' and '.join(FOLLOWERS)} take it")
        if self.verb == "evaluate" and self.of is None:
            problems.append("of: required with evaluate; name the step whose runs it scores")
        if self.vary and self.verb != "train":
            problems.append(f"vary: has no effect on {self.verb}; only train takes it")
        if problems:
            raise SeveralKeys(problems, "step")
        return self


class Form(Config):
    """A scale at which an item runs.

    Attributes:
        steps: run in this order.
        minutes: stated cost on `device`, in minutes of one device.
        measured: `minutes` was measured, on a CPU as user and system time of one thread; otherwise it is an estimate.
        device: cpu (two cores), gpu (one GPU) or cluster.
        needs: names of data in `items/data.yaml`, all required.
        seeds: seeds of the steps; `--seeds` replaces them.
        throughput: FLOP/s of one device, at which `--plan` prices trainings, and studies without `executor.throughput`;
            of a cluster 3e14 by default.
        differs: what a form changes of the paper, and so cannot show.
        smaller: a command, as one types it, that runs a smaller form of a form for a GPU on two CPU cores. The error on
            a machine without a GPU names it.
        skip: why the form cannot be run today; its claims are `not run` with this reason.
    """

    steps: list[Step] = Field(default_factory=list)
    minutes: float | None = Field(None, ge=0)
    measured: bool = False
    device: Literal["cpu", "gpu", "cluster"] = "cpu"
    needs: list[str] = Field(default_factory=list)
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    throughput: float | None = Field(None, gt=0)
    differs: str | None = None
    smaller: str | None = None
    skip: str | None = None

    @model_validator(mode="after")
    def _ordered(self):
        seen: set[str] = set()
        problems = []
        for step in self.steps:
            if step.name in seen:
                problems.append(f"steps: two are named {step.name!r}; give one a name of its own")
            if step.of is not None and step.of not in seen:
                problems.append(f"steps.{step.name}.of: {step.of!r} is not an earlier step; {nearest(step.of, seen)}")
            seen.add(step.name)
        if twice := sorted({seed for seed in self.seeds if self.seeds.count(seed) > 1}):
            problems.append(f"seeds: {', '.join(map(str, twice))} comes twice; give each once")
        if not self.steps and self.skip is None:
            problems.append("steps: none; give steps, or `skip` with the reason")
        if problems:
            raise SeveralKeys(problems, "form")
        return self


def _claim(value: Any) -> Any:
    return parse_claim(value) if not isinstance(value, Claim) else value


class Item(Config):
    """One table, figure or claim of a paper.

    Attributes:
        title: what it is about, a few words.
        where: files of the package, relative to `linnet/` (or to the clone: benchmarks/, configs/).
        tests: test files.
        state: complete: full and reduced form are true, or there are none and tests or commands show all of it;
            partial: only a part can be run, or one of the forms; printed: nothing can be run.
        note: what a reader must know; Markdown.
        commands: further commands that are part of the item, as one types them.
        published: the printed numbers. None: the item has none (a property, a formula).
        claims: sentences that can be false (docs/reproduce.md has their grammar).
        full: the paper's size. None where nothing can be run.
        reduced: the declared small form.
    """

    title: str
    where: list[str] = Field(default_factory=list)
    tests: list[str] = Field(default_factory=list)
    state: Literal["complete", "partial", "printed"]
    note: str | None = None
    commands: list[str] = Field(default_factory=list)
    published: Published | None = None
    claims: list[Annotated[Claim, BeforeValidator(_claim)]] = Field(default_factory=list)
    full: Form | None = None
    reduced: Form | None = None

    @model_validator(mode="after")
    def _consistent(self):
        problems = _unknown_names(self.published, self.claims, {"full": self.full, "reduced": self.reduced})
        if self.state == "printed" and (self.full or self.reduced):
            problems.append("state: printed, but the item has steps; say partial")
        if problems:
            raise SeveralKeys(problems, "item")
        return self

    @classmethod
    def extra_problems(cls, values: Any) -> list[str]:
        """Returns unknown rows and columns if other keys are wrong too, for which `_consistent` does not run."""
        if not isinstance(values, dict):
            return []
        published, claims = _valid(Published.model_validate, values.get("published")), values.get("claims")
        if published is None and values.get("published") is not None:
            return []
        parsed = [claim for raw in claims if (claim := _valid(parse_claim, raw))] if isinstance(claims, list) else []
        return _unknown_names(published, parsed, valid_forms(values))

    def form(self, scale: str) -> Form | None:
        """Returns the form of a scale: full or reduced."""
        return self.full if scale == "full" else self.reduced


def _unknown_names(published: Published | None, claims: Sequence[Claim], forms: Mapping[str, Form | None]) -> list[str]:
    """Returns the rows and columns in claims and steps that the table lacks."""
    rows = published.rows if published else {}
    columns = published.columns if published else {}
    problems = [
        f"claims: {claim.text!r}: unknown {what} {name!r}; {nearest(name, known)}"
        for claim in claims
        for what, names, known in (("row", claim.rows, rows), ("column", claim.columns, columns))
        for name in names
        if name not in known
    ]
    every = [(scale, form, step) for scale, form in forms.items() if form is not None for step in form.steps]
    for scale, form, step in every:
        for key, names, known in (("rows", step.rows.values(), rows), ("columns", step.columns, columns)):
            problems += [
                f"{scale}.steps.{step.name}.{key}: unknown {key[:-1]} {name!r}; {nearest(name, known)}"
                for name in names
                if name not in known
            ]
        if not any(other.of == step.name for other in form.steps):  # which may give its labels other rows
            problems += [
                f"{scale}.steps.{step.name}.vary: unknown row {label!r}; {nearest(label, rows)}, or map it under `rows`"
                for label in step.vary
                if step.rows.get(label, label) not in rows
            ]
    return list(dict.fromkeys(problems))


def valid_forms(values: Mapping[str, Any]) -> dict[str, Form | None]:
    """Returns the forms of an item's plain values by scale; None for those that are absent or wrong."""
    return {scale: _valid(Form.model_validate, values.get(scale)) for scale in SCALES}


def _valid(make: Callable[[Any], T], value: Any) -> T | None:
    try:
        return make(value)
    except ValueError:
        return None


class Part(Config):
    """An equation or section of a paper that is code, without a table of its own: a row of docs/papers.md.

    Attributes:
        what: equation, section or appendix, and its subject.
        where: files, or layers, as the page shows them; Markdown.
        see: commands or tests that show it; Markdown.
    """

    what: str
    where: str = ""
    see: str = ""


class Paper(Config):
    """A paper: `items/<paper>/paper.yaml`.

    Attributes:
        title: its title.
        name: a short name for lists, such as TNL.
        about: Markdown above its tables in docs/papers.md.
        parts: rows without an item.
        errata_title: sentence above the errata.
        errata: errors of the paper that the code follows or corrects; Markdown. Those of printed numbers belong to the
            items and are added.
        order: item names in the order of the paper; others follow by name.
    """

    title: str
    name: str = ""
    about: str = ""
    parts: list[Part] = Field(default_factory=list)
    errata_title: str = ""
    errata: list[str] = Field(default_factory=list)
    order: list[str] = Field(default_factory=list)


class Need(Config):
    """Data that a user brings: an entry of `items/data.yaml`.

    Attributes:
        about: what it is, and where it comes from.
        files: globs, relative to the folder; each must match a file.
        wikitext: parts of WikiText of the folder, in any form that `wikitext-103=FOLDER` of a training reads.
        vocabulary: the folder is GPT-2's vocabulary, in any form that `fairseq:FOLDER` of a training reads.
        sha256: file -> SHA-256; another content is said, not refused.
    """

    about: str
    files: list[str] = Field(default_factory=list)
    wikitext: list[Literal["train", "valid", "test"]] = Field(default_factory=list)
    vocabulary: bool = False
    sha256: dict[str, str] = Field(default_factory=dict)
