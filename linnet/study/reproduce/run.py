"""Checks, prices and runs items; collects their records into a table with verdicts.

    works = prepare(library, entries, Request(scale="reduced"))     all problems at once, before any work
    result = run(works[0])                                          trains what is missing

    <out>/<paper>-<item>/<scale>/
        planned/       what every call set out to do (planned.py)
        <step>/        what the verb keeps: a study, runs, a MAD folder
        result.json    the table and the verdicts of all that is done, a function of planned/ and the runs
        costs.json     seconds and versions, which differ from run to run

There is no other state: running again does what is missing and writes the same table.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from linnet import provenance
from linnet.config import ConfigError, digest, gather, nearest, override, unwritable
from linnet.data.wikitext import BadVocabulary, sha256, split_files, vocabulary_files
from linnet.runs.files import is_full, write_atomic
from linnet.study.reproduce.claims import NOT_RUN, UNDECIDED, Measured, difference, judge, t_interval
from linnet.study.reproduce.item import Form, Need, Published, Step, number
from linnet.study.reproduce.library import Entry, Library, config_of, filled, folder_of
from linnet.study.reproduce.planned import alone, read_planned
from linnet.study.reproduce.verbs import EXACT, Cost, Job, Outcome, Record, find_verb
from linnet.study.reproduce.verbs.base import measurable
from linnet.study.sensitivity import UNKNOWN

FORMAT = 1
RESULT, COSTS, CACHE = "result.json", "costs.json", "cache"
REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
SEEDED = ("train", "study", "mad", "evaluate", "mean")
"""Verbs whose numbers depend on the seed, as far as they are not `EXACT`."""
MOST_NAMED = 4
"""Cells that a note about claims names."""


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
    """

    scale: str = "reduced"
    only: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    out: Path = Path("reproductions")
    planning: bool = False


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


def prepare(library: Library, entries: Sequence[Entry], request: Request, problems: Sequence[str] = ()) -> list[Work]:
    """Checks items; does no work.

    Raises:
        ConfigError: all problems at once: unknown steps and data, folders that are not the data, missing devices, and
            those of every step's configuration.
    """
    problems = list(problems)
    notes, broken = _check_data(library, request, problems)
    known = {step.name for one in entries if (form := one.item.form(request.scale)) for step in form.steps}
    unknown = [name for name in request.only if known and name not in known]
    problems += [f"--only {name!r}: no step of that name; {nearest(name, known)}" for name in unknown]
    reason = None if request.planning else unwritable(request.out)
    if reason:
        problems.append(f"--out {str(request.out)!r}: {reason}; name another folder")
    works = []
    for entry in entries:
        with gather(problems):
            works.append(_prepare(library, entry, request, notes, broken, sealed=reason is not None))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "reproduce")
    return works


def _prepare(
    library: Library,
    entry: Entry,
    request: Request,
    notes: dict[str, tuple[str, ...]],
    broken: set[str],
    sealed: bool = False,
) -> Work:
    """Returns one checked item. `sealed`: its folder cannot be written to, so no data are prepared in the cache."""
    form = entry.item.form(request.scale)
    if form is None or not form.steps:
        reason = form.skip if form is not None else _absent(entry, request.scale)
        raise ConfigError([f"ITEM {entry.key}: cannot be run at --scale {request.scale}: {reason}"], "reproduce")
    problems = [] if request.planning else _missing(library, entry, form, request)
    complete = not problems  # else steps would name data and devices that are missing again
    folder = request.out / f"{'own-' if entry.own else ''}{entry.paper}-{entry.name}" / request.scale
    wanted = _with_earlier(form.steps, request.only)
    jobs: dict[str, Job] = {}
    every: dict[str, Job] = {}
    skipped: dict[str, str] = {}
    elsewhere: dict[str, str] = {}
    costs: dict[str, Cost] = {}
    seeds = list(request.seeds) or form.seeds
    for step in form.steps:
        found: list[str] = []
        with gather(found):
            job = _job(entry, form, step, request, folder, seeds, every, notes)
            every[step.name] = job = replace(job, planning=job.planning or sealed)
            if step.name not in wanted:
                skipped[step.name] = "left out by --only"
            elif reason := _skip(step, request, {**elsewhere, **skipped}):
                (elsewhere if request.planning else skipped)[step.name] = reason
            if step.name in wanted and (request.planning or step.name in skipped):
                found += _absent_data(job, request)
            if step.name not in skipped:
                jobs[step.name] = job
                if complete and not broken & {*form.needs, *step.needs}:
                    costs[step.name] = find_verb(step.verb).check(job)
                    found += _not_measured(step, costs[step.name])
        problems += [f"{entry.key}, {step.name}: {line}" for line in found]
    if wanted <= skipped.keys() and complete:
        reasons = "; ".join(f"{name}: {skipped[name]}" for name in every if name in wanted)
        others = [step.name for step in form.steps if step.name not in wanted and not _skip(step, request, skipped)]
        fix = "give what they need" + (f", or --only {','.join(others)}" if others else "")
        problems.append(f"{entry.key}: no step can run here ({reasons}); {fix}, or see the cost with --plan")
    if problems:
        raise ConfigError(problems, "reproduce")
    told = tuple(dict.fromkeys(line for job in jobs.values() for line in job.notes))
    if costs.keys() == jobs.keys():
        told += tuple(_open_claims(entry, {name: job.step for name, job in jobs.items()}, costs, seeds))
    wants = [*form.needs, *(name for job in jobs.values() for name in job.step.needs)]
    absent = {name: library.data[name].about for name in wants if name not in request.data}
    return Work(entry, request.scale, form, folder, seeds, jobs, every, skipped, costs, told, absent, elsewhere)


def _not_measured(step: Step, cost: Cost) -> list[str]:
    """Returns a problem for each column of a step that its verb does not measure."""
    if (known := cost.columns) is None:
        return []
    named = {f"columns.{column}": source for column, source in step.columns.items()}
    asked = [(key, source, _scaled(source)[0]) for key, source in named.items()]
    asked += [("best", step.best, step.best.removeprefix("-"))] if step.best is not None else []
    return [
        f"{key}: {source!r} is not measured by {step.verb}; {measurable(known)}"
        for key, source, name in asked
        if name not in known
    ]


def _open_claims(entry: Entry, steps: Mapping[str, Step], costs: Mapping[str, Cost], seeds: Sequence[int]) -> list[str]:
    """Returns what the reader of a plan should know about claims that no run of these steps will decide."""
    published = entry.item.published
    claims = [claim for claim in entry.item.claims if claim.rows]
    if published is None or not claims:
        return []
    trained: dict[tuple[str, str], bool] = {}  # a cell that will be measured -> whether its number depends on the seed
    for name, step in steps.items():
        for cell, source in _filled(published, step, costs[name]):
            trained[cell] = step.verb in SEEDED and source not in EXACT
    notes, single = [], 0
    absent: dict[str, None] = {}
    unmeasured = 0
    for claim in claims:
        cells = [(row, column) for row in claim.rows for column in claim.columns]
        if missing := [f"{row} ({column})" for row, column in cells if (row, column) not in trained]:
            absent |= dict.fromkeys(missing)
            unmeasured += 1
        else:
            single += any(trained[cell] for cell in cells)
    if unmeasured:
        names = [*absent][:MOST_NAMED]
        more = f" and {len(absent) - len(names)} more" if len(absent) > len(names) else ""
        what = f"{unmeasured} of {len(claims)} claims name rows that these steps do not measure"
        notes.append(f"{what}, and will not be decided: {', '.join(names)}{more}")
    if single and len(seeds) == 1:
        what = f"{single} of {len(claims)} claims compare trained models, which one seed cannot decide"
        notes.append(f"{what}; give --seeds 0,1,2, at three times the cost")
    return notes


def _filled(published: Published, step: Step, cost: Cost) -> Iterator[tuple[tuple[str, str], str]]:
    """Yields the cells that a step may fill, as (row, column), each with the measured column."""
    rows = published.rows if cost.labels is None else {step.rows.get(label, label) for label in cost.labels}
    for column in published.columns:
        source = _scaled(step.columns.get(column, column))[0]
        if cost.columns is None or source in cost.columns:
            for row in rows:
                yield (row, column), source


def _absent(entry: Entry, scale: str) -> str:
    if entry.item.full is None and entry.item.reduced is None:
        if shown := list(dict.fromkeys([*entry.item.commands, *(f"pytest {test}" for test in entry.item.tests)])):
            return f"it has no steps of its own; run {' or '.join(shown)}"
        return "it lists printed numbers only; read them in docs/papers.md"
    return f"it has no {scale} form; use --scale {'reduced' if scale == 'full' else 'full'}"


def _missing(library: Library, entry: Entry, form: Form, request: Request) -> list[str]:
    problems = []
    for name in form.needs:
        if name not in request.data:
            about = library.data[name].about
            problems.append(f"{entry.key}: needs data {name!r} ({about}); give --data {name}=FOLDER")
    if form.device != "cpu" and not _gpus():
        what = "a GPU" if form.device == "gpu" else "a cluster of GPUs"
        fix = "use --plan to see its cost, or --scale reduced" if request.scale == "full" else "run it on a GPU"
        if form.smaller is not None:
            fix += f", or a smaller form on two CPU cores: {form.smaller}"
        problems.append(f"{entry.key}: needs {what}, and no GPU is visible; {fix}")
    return problems


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _skip(step: Step, request: Request, skipped: dict[str, str]) -> str:
    """Returns why a step cannot run on this machine; "" if it can."""
    if step.of in skipped:
        return f"{step.of} is not run: {skipped[step.of]}"
    lacks = [f"--data {name}=FOLDER" for name in step.needs if name not in request.data]
    lacks += ["a GPU"] if step.device == "gpu" and not _gpus() else []
    return f"needs {' and '.join(lacks)}" if lacks else ""


def _absent_data(job: Job, request: Request) -> list[str]:
    """Returns what the given folders lack for a training that will not be checked itself."""
    if job.step.verb != "train" or not job.step.needs or not request.data.keys() >= set(job.step.needs):
        return []
    from linnet.study.reproduce.verbs.train import data_problems

    return data_problems(job)


def _with_earlier(steps: Sequence[Step], only: Sequence[str]) -> set[str]:
    """Returns the names of the wanted steps and of those that they follow."""
    wanted = {step.name for step in steps if not only or step.name in only}
    for step in reversed(steps):
        if step.name in wanted and step.of is not None:
            wanted.add(step.of)
    return wanted


def _job(
    entry: Entry,
    form: Form,
    step: Step,
    request: Request,
    folder: Path,
    seeds: list[int],
    before: Mapping[str, Job],
    notes: Mapping[str, tuple[str, ...]],
) -> Job:
    values = _set(config_of(entry, step.config), step.set)
    if step.verb == "models" and isinstance(values.get("study"), str):
        values["study"] = config_of(entry, values["study"])
    vary = {label: _set(values, changes) for label, changes in step.vary.items()}
    identity = digest([step.verb, values, vary, before[step.of].digest if step.of is not None else None])
    values, vary = filled(values, dict(request.data)), filled(vary, dict(request.data))
    if step.verb == "evaluate" and isinstance(values.get("include"), str):
        values["include"] = folder_of(entry, values["include"])
    cache = (request.out / CACHE).absolute()
    where = f"{entry.key}, {step.name}"
    told = tuple(line for name in sorted({*form.needs, *step.needs}) for line in notes.get(name, ()))
    return Job(where, step, form, values, vary, seeds, folder, cache, request.planning, dict(before), identity, told)


def _set(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return override(values, [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def _check_data(library: Library, request: Request, problems: list[str]) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Returns name -> notes on the content of data, and the names of folders that are not the data.

    Adds the problems of these, and unknown names.
    """
    notes, broken = {}, set()
    for name, folder in request.data.items():
        if name not in library.data:
            problems.append(f"--data {name}: unknown; {nearest(name, library.data)}")
            continue
        need, path = library.data[name], Path(folder).expanduser()
        if not path.is_dir():
            problems.append(f"--data {name}={folder}: not a folder; name the folder of {need.about}")
            broken.add(name)
            continue
        files, absent = _files(need, path)
        if absent:
            broken.add(name)
            problems += [f"--data {name}={folder}: {line}" for line in absent]
        notes[name] = tuple(_other_content(name, files, need))
    return notes, broken


def _files(need: Need, folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Returns published file -> the file that is read for it, and what the folder lacks, with the fix.

    Data that a training reads by name are found by the code that reads them, so that both accept the same folders.
    """
    if need.vocabulary:
        try:
            return vocabulary_files(folder), []
        except BadVocabulary as error:
            return {}, [str(error).removeprefix(f"{folder} ")]
    files, lacks = {name: folder / name for name in need.sha256}, []
    for part in need.wikitext:
        paths, reason = split_files(folder, part)
        files |= {f"wiki.{part}.raw": path for path in paths[:1]}
        lacks += [reason] if reason else []
    if absent := [pattern for pattern in need.files if not any(folder.glob(pattern))]:
        lacks.append(f"has no {', '.join(absent)}; name the folder of {need.about}")
    return files, lacks


def _other_content(name: str, files: Mapping[str, Path], need: Need) -> list[str]:
    lines = []
    for file, expected in need.sha256.items():
        path = files.get(file)
        if path is None or not path.is_file():
            continue
        if need.wikitext and path.name != file:
            lines.append(f"data {name}: {path.name} is read in place of {file}, and is not compared with it")
        elif (found := sha256(path)) != expected:
            digests = f"SHA-256 expected {expected}, found {found}"
            lines.append(f"data {name}: {path.name} is not the published file: {digests}")
    return lines


def run(work: Work, console: Console | None = None) -> dict[str, Any]:
    """Runs what is missing of the steps and seeds that were asked for, writes the table of all that this and other
    calls have done, and returns it as result.json holds it.

    A step that fails stops the steps that follow it; the others go on.

    Raises:
        ConfigError: a step failed or the disk is full; or the first other error of a step, with a note. The table of
            all that is done is written nevertheless, unless the disk is full.
    """
    console = console or Console(quiet=True)
    try:
        return _run(work, console)
    except OSError as error:
        if not is_full(error):
            raise
        fix = "free some space and run the same command again to continue"
        raise ConfigError([f"{work.folder}: the disk is full ({error.strerror}); {fix}"], "reproduce") from None


def _run(work: Work, console: Console) -> dict[str, Any]:
    work.folder.mkdir(parents=True, exist_ok=True)
    earlier: dict[str, Outcome] = {}
    failed: dict[str, Exception] = {}
    for name, job in work.jobs.items():
        if job.step.of in failed:
            failed[name] = failed[job.step.of]
            continue
        console.print(f"[bold]{job.where}[/] ({job.step.verb})", highlight=False)
        verb = find_verb(job.step.verb)
        try:
            with _one_thread(job.step.verb):
                verb.run(job, earlier, console)
            if any(other.step.of == name for other in work.jobs.values()):
                earlier[name] = verb.collect(job, read_planned(job), earlier)
        except Exception as error:
            if is_full(error):
                raise
            failed[name] = error
            console.print(f"{job.where}: failed: {_last_line(error)}", markup=False)
    with alone(work.folder, console):  # calls write one after the other, so that the last one sees the work of all
        result, broken = _write(work)
    failed |= {name: error for name, error in broken.items() if name in work.jobs and name not in failed}
    if failed:
        _raise(work, failed)
    return result


@contextlib.contextmanager
def _one_thread(verb: str) -> Iterator[None]:
    """Limits torch to one CPU thread, so that calls with other seeds can run side by side.

    The models of reduced forms are too small for more threads. `bench` keeps all of them, as `linnet bench` does, and
    so does a user who sets OMP_NUM_THREADS.
    """
    import torch

    before = torch.get_num_threads()
    if verb != "bench" and "OMP_NUM_THREADS" not in os.environ and not _gpus():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()


def _raise(work: Work, failed: Mapping[str, Exception]) -> NoReturn:
    """Raises the errors of steps: all together if a user can fix them, else the first that is a bug."""
    told = f"{work.entry.key}: {', '.join(failed)} failed; what is done is in {work.folder / RESULT}"
    for error in failed.values():
        if not isinstance(error, ConfigError):
            error.add_note(told)
            raise error
    problems = [line for error in failed.values() if isinstance(error, ConfigError) for line in error.problems]
    fix = "fix this and run the same command again"
    raise ConfigError([*dict.fromkeys(problems), f"{told}; {fix}"], "reproduce")


def _write(work: Work) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Writes the table of all that is done in the folder of an item, and its costs.

    Returns:
        The table, and the errors of steps whose results cannot be read or fitted, which are not in it.
    """
    outcomes: dict[str, Outcome] = {}
    broken: dict[str, Exception] = {}
    seeds: set[int] = set()
    notes: list[str] = []
    for name, job in work.every.items():
        planned = read_planned(job)
        if not planned or (job.step.of is not None and job.step.of not in outcomes):
            continue
        try:
            outcomes[name] = find_verb(job.step.verb).collect(job, planned, outcomes)
        except Exception as error:
            if is_full(error):
                raise
            broken[name] = error
            continue
        seeds |= {one.seed for one in planned if one.seed is not None}
        notes += [line for one in planned for line in one.notes]
        if count := outcomes[name].unfinished:
            runs = "1 planned run is" if count == 1 else f"{count} planned runs are"
            notes.append(f"{name}: {runs} not finished; the command that began them goes on with them")
    reasons = {name: f"it failed: {_last_line(error)}" for name, error in broken.items()}
    result = table(work, outcomes, sorted(seeds), notes, reasons)
    write_atomic(work.folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")
    seconds = {name: outcome.seconds for name, outcome in outcomes.items()}
    costs = {"seconds": seconds, "minutes_stated": work.form.minutes, "made": provenance.versions()}
    write_atomic(work.folder / COSTS, json.dumps(costs, indent=1) + "\n")
    return result, broken


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
    expected, text = (published.expected, published.text) if published else (lambda row, column: None,) * 2
    rows = tuple(published.rows) if published else ()
    verdicts = [judge(claim, cells, expected, missing, rows, text) for claim in item.claims]
    shown = {}
    for row in rows:
        assert published is not None
        shown[row] = {column: _cell(work, row, column, cells) for column in published.columns}
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
        "errata": [one.model_dump() for one in published.errata] if published else [],
        "verdicts": [{"claim": v.claim, "verdict": v.verdict, "reason": v.reason} for v in verdicts],
        "outcome": _outcome(work, shown, whole=not (skipped or unfinished or broke)),
        "differs": work.form.differs,
        "note": item.note,
        "rates": _unknown_sensitivity(work, outcomes),
        "skipped": skipped,
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
    found: dict[tuple[str, str], Measured] = {}
    failed: dict[tuple[str, str], str] = {}
    notes: list[str] = []
    explicit: set[tuple[str, str]] = set()
    for name, own in records.items():
        step = work.every[name].step
        unknown = sorted({r.label for r in own if published and step.rows.get(r.label, r.label) not in published.rows})
        if unknown and step.rows:
            notes.append(f"{name}: not rows of the table: {', '.join(unknown)}")
        known = {column for record in own for column in record.values}
        for source in {_scaled(source)[0] for source in step.columns.values()} - known if known else ():
            notes.append(f"{name}: measures no column {source!r}; {nearest(source, known)}")
        if published is None:
            continue
        chosen = _best(step, own, {_scaled(step.columns.get(column, column))[0] for column in published.columns}, notes)
        for row in published.rows:
            mine = [record for record in chosen if step.rows.get(record.label, record.label) == row]
            for column in published.columns:
                key, source = (row, column), step.columns.get(column, column)
                if key in explicit and column not in step.columns:
                    continue
                measured = _measured(mine, source)
                if measured is not None:
                    found[key] = measured
                    if column in step.columns:
                        explicit.add(key)
                elif mine and column in step.columns and all(record.failed for record in mine):
                    failed[key] = f"{row}: {mine[0].failed}"
    return found, failed, notes


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


def _measured(records: Sequence[Record], source: str) -> Measured | None:
    name, operator, factor = _scaled(source)
    scale = (lambda x: x / factor) if operator == "/" else (lambda x: x * factor)
    own = [record for record in records if name in record.values]
    if not own:
        return None
    values = {record.seed: scale(record.values[name]) for record in own}
    if len(own) == 1 and own[0].seed is None:
        interval = own[0].intervals.get(name)
        unsure = interval is None and name in own[0].intervals
        return Measured(values, None if interval is None else (scale(interval[0]), scale(interval[1])), unsure)
    if name in EXACT and len(set(values.values())) == 1:
        return Measured({None: next(iter(values.values()))})
    return Measured(values)


def _scaled(source: str) -> tuple[str, str, float]:
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
            cost = self.work.costs.get(step.name, Cost())
            with contextlib.suppress(ConfigError):
                if step.name not in self.work.costs:
                    cost = find_verb(step.verb).check(replace(self.work.every[step.name], planning=True))
            published = self.work.entry.item.published
            self.cells[step.name] = {cell for cell, _ in _filled(published, step, cost)} if published else set()
        return self.cells[step.name]


def _cell(work: Work, row: str, column: str, cells: Mapping[tuple[str, str], Measured]) -> dict[str, Any]:
    published, measured = work.entry.item.published, cells.get((row, column))
    assert published is not None
    printed = published.rows[row].get(column)
    cell: dict[str, Any] = {"printed": printed}
    expected = published.expected(row, column)
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
        own, base = expected, published.expected(published.base, column)
        if own is not None and base is not None:
            cell["printed_difference"] = own - base
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


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Returns all results under a folder of reproductions, with `costs` beside each. Raises ConfigError if none."""
    found, problems = [], []
    for path in sorted(folder.glob(f"*/*/{RESULT}")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}")
            values["folder"] = os.path.relpath(path.parent, folder)
            costs = path.with_name(COSTS)
            values["costs"] = json.loads(costs.read_text(encoding="utf-8")) if costs.is_file() else {}
            found.append(values)
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{path}: is damaged ({error}); delete it and run the item again")
    if not found and not problems:
        problems.append(f"{folder}: no item was run there; run linnet reproduce PAPER ITEM --out {folder}")
    if problems:
        raise ConfigError(problems, "reproduce report")
    return found
