"""What to do with an item (`Request`, `Work`), and its table: measured numbers beside the printed ones, verdicts,
and what was not run."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from linnet.config import ConfigError, nearest
from linnet.laws.orders import t_interval
from linnet.papers.claims import NOT_RUN, UNDECIDED, Measured, difference, judge
from linnet.papers.item import Form, Published, Step, number
from linnet.papers.library import Entry
from linnet.papers.verbs import EXACT, Cost, Job, Outcome, Record, find_verb
from linnet.study.sensitivity import UNKNOWN

FORMAT = 2
REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"


@dataclass(frozen=True)
class Request:
    """What to do with items.

    Attributes:
        scale: reduced or full.
        only: names of steps; those that they follow are added. Empty: all.
        data: name -> folder.
        seeds: in place of those of the form.
        out: folder of reproductions.
        planning: nothing will run, so neither data nor devices need to be there.
        allow_plugins: run Python files that a user's items name, although no run was made with them here.
    """

    scale: str = "reduced"
    only: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    out: Path = Path("reproductions")
    planning: bool = False
    allow_plugins: bool = False


@dataclass(frozen=True)
class Work:
    """A checked item at one scale.

    Attributes:
        jobs: the steps that were asked for and can run, in order. every: all steps.
        skipped: step -> why it will not run. costs: step -> its cost.
        elsewhere: of a plan: step that it prices -> why a run on this machine would skip it.
        notes: what the user should know before the work, such as data with another content.
        missing: data that a plan needs and that are not given: name -> what they are.
    """

    entry: Entry
    scale: str
    form: Form
    folder: Path
    seeds: list[int]
    jobs: dict[str, Job]
    every: dict[str, Job]
    skipped: dict[str, str]
    costs: dict[str, Cost]
    notes: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)


def table(
    work: Work,
    outcomes: Mapping[str, Outcome],
    seeds: Sequence[int] = (),
    notes: Sequence[str] = (),
    broken: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns the table of an item, its verdicts, and what was not run, as plain values.

    Args:
        outcomes: of the steps that were run, in the order of the item.
        seeds: all seeds of these steps; none if they do not depend on any.
        notes: what else a reader of the table should know.
        broken: step -> why its results cannot be collected.
    """
    item = work.entry.item
    reasons = {**work.skipped, **(broken or {})}
    skipped = {name: reasons.get(name, "not run yet") for name in work.every if name not in outcomes}
    cells, failed, more = _cells(work, {name: outcome.records for name, outcome in outcomes.items()})
    published = item.published
    unfinished = {name for name, outcome in outcomes.items() if outcome.unfinished}
    broke = any(record.failed for outcome in outcomes.values() for record in outcome.records)
    missing = _Missing(work, failed, skipped, unfinished)
    expected, text, wrong = (
        (published.expected, published.text, published.wrong) if published else (lambda row, column: None,) * 3
    )
    rows = tuple(published.rows) if published else ()
    verdicts = [judge(claim, cells, expected, missing, rows, text, wrong) for claim in item.claims]
    apart = _not_comparable(work, cells)
    shown = {}
    for row in rows:
        assert published is not None
        shown[row] = {column: _cell(work, row, column, cells, column in apart) for column in published.columns}
    return {
        "format": FORMAT,
        "paper": work.entry.paper,
        "own": work.entry.own,
        "items": str(work.entry.path.parents[1]) if work.entry.own else None,
        "item": work.entry.name,
        "title": item.title,
        "scale": work.scale,
        "source": published.source if published else None,
        "seeds": list(seeds) or work.form.seeds,
        "columns": dict(published.columns) if published else {},
        "base": published.base if published else None,
        "rows": shown,
        "stand_ins": _stand_ins(work, outcomes),
        "not_compared": sorted(apart),
        "errata": [erratum.model_dump() for erratum in published.errata] if published else [],
        "verdicts": [{"claim": v.claim, "verdict": v.verdict, "reason": v.reason} for v in verdicts],
        "outcome": _outcome(work, shown, whole=not (skipped or unfinished or broke)),
        "differs": work.form.differs,
        "note": item.note,
        "rates": _unknown_sensitivity(work, outcomes),
        "skipped": skipped,
        "failed": [os.path.relpath(path, work.folder) for outcome in outcomes.values() for path in outcome.failed],
        "notes": list(dict.fromkeys([*notes, *more])),
        "steps": {
            name: {"verb": work.every[name].step.verb, "runs": outcome.runs, "flops": outcome.flops}
            for name, outcome in outcomes.items()
        },
    }


def _unknown_sensitivity(work: Work, outcomes: Mapping[str, Outcome]) -> str | None:
    """Returns what a reader must know if claims compare rows that were trained at one learning rate each; else None."""
    if not any(claim.kind in ("order", "equal") and len(claim.rows) > 1 for claim in work.entry.item.claims):
        return None
    trained = [
        name
        for name in outcomes
        if (job := work.every[name]).step.verb in ("train", "study") and not job.values.get("rate_sensitivity")
    ]
    return f"{', '.join(trained)}: {UNKNOWN}" if trained else None


def _cells(work: Work, records: Mapping[str, Sequence[Record]]):
    """Returns (row, column) -> measured, (row, column) -> why not, and notes."""
    published = work.entry.item.published
    cells: dict[tuple[str, str], Measured] = {}
    failed: dict[tuple[str, str], str] = {}
    notes: list[str] = []
    explicit: set[tuple[str, str]] = set()
    for name, step_records in records.items():
        step = work.every[name].step
        unknown = sorted(
            {r.label for r in step_records if published and step.rows.get(r.label, r.label) not in published.rows}
        )
        if unknown and step.rows:
            notes.append(f"{name}: not rows of the table: {', '.join(unknown)}")
        known = {column for record in step_records for column in record.values}
        for source in {scaled(source)[0] for source in step.columns.values()} - known if known else ():
            notes.append(f"{name}: measures no column {source!r}; {nearest(source, known)}")
        if published is None:
            continue
        wanted = {scaled(step.columns.get(column, column))[0] for column in published.columns}
        chosen = _best(step, step_records, wanted, notes)
        for row in published.rows:
            mine = [record for record in chosen if step.rows.get(record.label, record.label) == row]
            for column in published.columns:
                key, source = (row, column), step.columns.get(column, column)
                if key in explicit and column not in step.columns:
                    continue
                measured = None
                if labels := _ambiguous(mine, source):
                    which = f"{' and '.join(labels)} are all row {row} and have {source}"
                    notes.append(f"{name}: {which}; map one of them to another row (`rows`)")
                else:
                    measured = _measured(mine, source)
                if measured is not None:
                    cells[key] = measured
                    if column in step.columns:
                        explicit.add(key)
                elif mine and column in step.columns and all(record.failed for record in mine):
                    failed[key] = f"{row}: {mine[0].failed}"
    return cells, failed, notes


def _best(step: Step, records: Sequence[Record], wanted: set[str], notes: list[str]) -> list[Record]:
    """Returns one record per label, seed and kind of numbers; `wanted` are the columns that the table shows."""
    groups: dict[tuple[str, int | None, tuple[str, ...]], list[Record]] = {}
    for record in records:
        columns = tuple(sorted(record.values)) if record.seed is None else ()
        groups.setdefault((record.label, record.seed, columns), []).append(record)
    chosen = []
    for (label, seed, _), group in groups.items():
        done = [record for record in group if not record.failed]
        if len(group) == 1 or (step.best is None and not done):
            chosen.append(group[0])
            continue
        if step.best is None:
            if any(wanted & record.values.keys() for record in done):
                which = f"{len(group)} records of {label}, seed {seed}"
                notes.append(f"{step.name}: {which}; the item must say which (`best`)")
            continue
        column, sign = step.best.removeprefix("-"), -1 if step.best.startswith("-") else 1
        ranked = sorted((r for r in done if column in r.values), key=lambda r: sign * r.values[column])
        chosen.append(ranked[0] if ranked else group[0])
    return chosen


def _ambiguous(records: Sequence[Record], source: str) -> list[str]:
    """Returns the labels of one row of which several have a value of one seed; [] if at most one has."""
    samples = [record for record in records if scaled(source)[0] in record.values]
    seeds = [record.seed for record in samples]
    return list(dict.fromkeys(record.label for record in samples)) if len(set(seeds)) < len(seeds) else []


def _measured(records: Sequence[Record], source: str) -> Measured | None:
    name, operator, factor = scaled(source)
    scale = (lambda x: x / factor) if operator == "/" else (lambda x: x * factor)
    samples = [record for record in records if name in record.values]
    if not samples:
        return None
    values = {record.seed: scale(record.values[name]) for record in samples}
    if len(samples) == 1 and samples[0].seed is None:
        interval = samples[0].intervals.get(name)
        unsure = interval is None and name in samples[0].intervals
        return Measured(values, None if interval is None else (scale(interval[0]), scale(interval[1])), unsure)
    if name in EXACT and len(set(values.values())) == 1:
        return Measured({None: next(iter(values.values()))})
    return Measured(values)


def scaled(source: str) -> tuple[str, str, float]:
    """Splits `params_total / 1e6` or `100 * accuracy` into name, operator and number."""
    parts = source.split()
    if len(parts) == 3 and parts[1] in "/*" and (factor := number(parts[2])):
        return parts[0], parts[1], factor
    if len(parts) == 3 and parts[1] == "*" and (factor := number(parts[0])):
        return parts[2], "*", factor
    return source, "*", 1.0


class _Missing:
    """Says why a cell was not measured."""

    def __init__(
        self, work: Work, failed: Mapping[tuple[str, str], str], skipped: Mapping[str, str], unfinished: set[str]
    ):
        self.work, self.failed, self.skipped, self.unfinished = work, failed, skipped, unfinished
        self.cells: dict[str, set[tuple[str, str]]] = {}

    def __call__(self, row: str, column: str) -> tuple[str, str]:
        if reason := self.failed.get((row, column)):
            return UNDECIDED, reason
        return NOT_RUN, self._reason(row, column)

    def _reason(self, row: str, column: str) -> str:
        """Names the step that would give the number: one that names the column, else one that measures it."""
        for step in sorted(self.work.form.steps, key=lambda step: column not in step.columns):
            if step.name not in self.unfinished and step.name not in self.skipped:
                continue
            if (row, column) in self._cells(step):
                if step.name in self.unfinished:
                    return f"{step.name} is not finished"
                return f"{step.name} is not run: {self.skipped[step.name]}"
        return f"no step of the {self.work.scale} form measures {row} on {column}"

    def _cells(self, step: Step) -> set[tuple[str, str]]:
        """Returns the cells that a step would fill. Steps that were left out are priced now, for their labels."""
        if step.name not in self.cells:
            costs = {name: self._cost(name) for name in (step.name, step.of) if name is not None}
            published = self.work.entry.item.published
            self.cells[step.name] = {cell for cell, _ in cells_of(published, step, costs)} if published else set()
        return self.cells[step.name]

    def _cost(self, name: str) -> Cost:
        if name in self.work.costs:
            return self.work.costs[name]
        job = self.work.every[name]
        with contextlib.suppress(ConfigError):
            return find_verb(job.step.verb).check(replace(job, planning=True))
        return Cost()


def _not_comparable(work: Work, cells: Mapping[tuple[str, str], Measured]) -> set[str]:
    """Returns columns that the small models of a reduced form measure, and that no claim compares with the print.

    Coefficients of laws, which have no seed, may be compared at any size.
    """
    if work.scale == "full":
        return set()
    compared = {column for claim in work.entry.item.claims if claim.kind == "printed" for column in claim.columns}
    return {column for (_, column), measured in cells.items() if None not in measured.values} - compared


def _stand_ins(work: Work, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Returns row -> the model that a reduced form trained in its place, with its parameters where they are known."""
    if work.scale == "full":
        return {}
    records = [(work.every[name].step, record) for name, outcome in outcomes.items() for record in outcome.records]
    sizes = {record.label: record.values["params_total"] for _, record in records if "params_total" in record.values}
    names: dict[str, str] = {}
    for step, record in records:
        row = step.rows.get(record.label, record.label)
        if row != record.label and record.seed is not None:
            size = f", {sizes[record.label]:,.0f} parameters" if record.label in sizes else ""
            names[row] = f"{record.label}{size}"
    return names


def _cell(work: Work, row: str, column: str, cells: Mapping[tuple[str, str], Measured], apart: bool) -> dict[str, Any]:
    """Returns what is printed and measured. `apart`: the print says nothing about the models of this form."""
    published, measured = work.entry.item.published, cells.get((row, column))
    assert published is not None
    printed = None if apart else published.rows[row].get(column)
    cell: dict[str, Any] = {"printed": printed}
    expected = None if apart else published.expected(row, column)
    if expected != number(printed):
        cell["corrected"] = expected
    if measured is not None:
        interval = measured.interval
        if interval is None and not measured.exact:
            low, high = t_interval(list(measured.values.values()))
            interval = None if math.isnan(low) else (low, high)
        cell |= {
            "measured": measured.mean,
            "interval": None if interval is None else list(interval),
            "values": {("exact" if seed is None else str(seed)): value for seed, value in measured.values.items()},
        }
        if work.scale == "full":
            cell["inside"] = published.inside(row, column, measured.mean)
    if published.base is not None and row != published.base:
        base = published.expected(published.base, column)
        if expected is not None and base is not None:
            wrong = "corrected" in cell or published.wrong(published.base, column) is not None
            cell["corrected_difference" if wrong else "printed_difference"] = expected - base
        if measured is not None and (first := cells.get((published.base, column))) is not None:
            low, high = difference(measured, first)
            if not math.isnan(low):
                cell["difference"] = [low, high]
    return cell


def _outcome(work: Work, rows: Mapping[str, Mapping[str, Mapping[str, Any]]], whole: bool) -> dict[str, Any] | None:
    """Returns whether a full form reproduced the numbers with a tolerance; None for reduced forms and without any.

    Args:
        whole: every step and run has ended well, so that what has no number is not part of the form: a table also has
            models that Linnet does not train.
    """
    published = work.entry.item.published
    if work.scale != "full" or published is None or not published.tolerance:
        return None
    cells = [
        (f"{row}, {column}", rows[row][column].get("inside"), "measured" in rows[row][column])
        for row in published.rows
        for column in published.tolerance
        if published.expected(row, column) is not None
    ]
    outside = [name for name, inside, _ in cells if inside is False]
    absent = [name for name, _, measured in cells if not measured]
    compared = len(cells) - len(absent)
    return {
        "says": REPRODUCED if compared and not outside and whole else NOT_REPRODUCED,
        "compared": compared,
        "printed": len(cells),
        "outside": outside,
        "not_measured": [] if whole else absent,
    }


def cells_of(published: Published, step: Step, costs: Mapping[str, Cost]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yields the cells that a step may fill, as (row, column), each with the measured column.

    Args:
        costs: of the step, and of the one whose runs it scores. Without its labels all rows may be filled; without its
            columns, those that the step names.
    """
    labels, known = costs[step.name].labels, costs[step.name].columns
    if labels is None and step.verb == "evaluate" and step.of is not None and step.of in costs:
        labels = costs[step.of].labels
    rows = published.rows if labels is None else {step.rows.get(label, label) for label in labels}
    for column in published.columns:
        source = scaled(step.columns.get(column, column))[0]
        if source in known if known is not None else column in step.columns or not step.columns:
            for row in rows:
                yield (row, column), source
