"""Runs items that `prepare` has checked, and writes the table of all that is done.

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
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from linnet import provenance
from linnet.config import ConfigError, load_json, refuse
from linnet.papers.prepare import gpus
from linnet.papers.table import FORMAT, Work, table
from linnet.papers.verbs import Outcome, find_verb
from linnet.papers.verbs.base import alone, read_planned
from linnet.runs.files import is_full, room, write_atomic

RESULT, COSTS = "result.json", "costs.json"


def run(work: Work, console: Console | None = None) -> dict[str, Any]:
    """Runs what is missing of the steps and seeds that were asked for, writes the table of all that this and other
    calls have done, and returns it as result.json holds it.

    A step that fails stops the steps that follow it; the others go on.

    Raises:
        ConfigError: a step failed or the disk is full; or the first other error of a step, with a note. The table of
            all that is done is written nevertheless, unless the disk is full.
    """
    with room(work.folder, "reproduce"):
        return _run(work, console or Console(quiet=True))


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


def _one_thread(verb: str) -> contextlib.AbstractContextManager:
    """Limits torch to one CPU thread, so that calls with other seeds can run side by side.

    The models of reduced forms are too small for more threads. `bench` keeps all of them, as `linnet bench` does, and
    so does a user who sets OMP_NUM_THREADS.
    """
    from linnet.train.device import use_threads

    return use_threads(None if verb == "bench" or provenance.chosen_threads() is not None or gpus() else 1)


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
        seeds |= {plan.seed for plan in planned if plan.seed is not None}
        notes += [line for plan in planned for line in plan.notes]
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


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Returns all results under a folder of reproductions, with `costs` beside each. Raises ConfigError if none."""
    results, problems = [], []
    for path in sorted(folder.glob(f"*/*/{RESULT}")):
        try:
            values = load_json(path)
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}")
            values["folder"] = os.path.relpath(path.parent, folder)
            costs = path.with_name(COSTS)
            values["costs"] = load_json(costs) if costs.is_file() else {}
            results.append(values)
        except (ValueError, KeyError, TypeError) as error:
            what = f"{path}: is damaged or of another version ({error})"
            problems.append(f"{what}; run the item again, which writes it anew")
    if not results and not problems:
        problems.append(f"{folder}: no item was run there; run linnet reproduce PAPER ITEM --out {folder}")
    refuse(problems, "reproduce report")
    return results
