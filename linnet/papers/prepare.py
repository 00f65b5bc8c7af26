"""Checks and prices items before any work: their data, devices, steps and configurations, all problems at once."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from linnet import trust
from linnet.config import ConfigError, digest, first_names, gather, nearest, override, refuse, unwritable
from linnet.data.wikitext import BadVocabulary, sha256, split_files, vocabulary_files
from linnet.papers.item import Form, Need, Step
from linnet.papers.library import Entry, Library, config_of, filled, folder_of
from linnet.papers.table import Request, Work, cells_of, scaled
from linnet.papers.verbs import EXACT, Cost, Job, find_verb
from linnet.papers.verbs.base import measurable

CACHE = "cache"
SEEDED = ("train", "study", "mad", "evaluate", "mean", "bench")
"""Verbs whose numbers depend on the seed, as far as they are not `EXACT`."""
MOST_NAMED = 4
"""Cells that a note about claims names."""


def prepare(library: Library, entries: Sequence[Entry], request: Request, problems: Sequence[str] = ()) -> list[Work]:
    """Checks items; does no work.

    Raises:
        ConfigError: all problems at once: unknown steps and data, folders that are not the data, missing devices, and
            those of every step's configuration.
    """
    problems = list(problems)
    notes, broken = _check_data(library, request, problems)
    known = {step.name for entry in entries if (form := entry.item.form(request.scale)) for step in form.steps}
    unknown = [name for name in request.only if known and name not in known]
    problems += [f"--only {name!r}: no step of that name; {nearest(name, known)}" for name in unknown]
    reason = None if request.planning else unwritable(request.out)
    if reason:
        problems.append(f"--out {str(request.out)!r}: {reason}; name another folder")
    works = []
    for entry in entries:
        with gather(problems):
            works.append(_prepare(library, entry, request, notes, broken, sealed=reason is not None))
    refuse(problems, "reproduce")
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
        step_problems: list[str] = []
        with gather(step_problems):
            job = _job(entry, form, step, request, folder, seeds, every, notes)
            every[step.name] = job = replace(job, planning=job.planning or sealed)
            if entry.own and step.name in wanted:  # the folder of items may have been received
                parts = list(_mappings([job.values, job.vary]))
                plugins = [
                    plugin for part in parts if isinstance(listed := part.get("plugins"), list) for plugin in listed
                ]
                trust.check_training({"plugins": plugins, "evaluations": parts}, entry.path, request.allow_plugins)
            if step.name not in wanted:
                skipped[step.name] = "left out by --only"
            elif reason := _skip(step, request, {**elsewhere, **skipped}):
                (elsewhere if request.planning else skipped)[step.name] = reason
            if step.name in wanted and (request.planning or step.name in skipped):
                step_problems += _absent_data(job, request)
            if step.name not in skipped:
                jobs[step.name] = job
                if complete and not broken & {*form.needs, *step.needs}:
                    costs[step.name] = find_verb(step.verb).check(job)
                    step_problems += _not_measured(step, costs[step.name])
        problems += [f"{entry.key}, {step.name}: {line}" for line in step_problems]
    if wanted and wanted <= skipped.keys() and complete:
        reasons = "; ".join(f"{name}: {skipped[name]}" for name in every if name in wanted)
        others = [step.name for step in form.steps if step.name not in wanted and not _skip(step, request, skipped)]
        fix = "give what they need" + (f", or --only {','.join(others)}" if others else "")
        problems.append(f"{entry.key}: no step can run here ({reasons}); {fix}, or see the cost with --plan")
    refuse(problems, "reproduce")
    told = tuple(dict.fromkeys(line for job in jobs.values() for line in job.notes))
    if costs.keys() == jobs.keys():
        known = () if request.seeds and not request.planning else seeds  # other calls may have, or get, other seeds
        told += tuple(_open_claims(entry, {name: job.step for name, job in jobs.items()}, costs, known))
    wants = [*form.needs, *(name for job in jobs.values() for name in job.step.needs)]
    absent = {name: library.data[name].about for name in wants if name not in request.data}
    return Work(entry, request.scale, form, folder, seeds, jobs, every, skipped, costs, told, absent, elsewhere)


def _not_measured(step: Step, cost: Cost) -> list[str]:
    """Returns a problem for each column of a step that its verb does not measure."""
    if (known := cost.columns) is None:
        return []
    named = {f"columns.{column}": source for column, source in step.columns.items()}
    asked = [(key, source, scaled(source)[0]) for key, source in named.items()]
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
    for step in steps.values():
        for cell, source in cells_of(published, step, costs):
            trained[cell] = step.verb in SEEDED and source not in EXACT
    notes, single, total = [], 0, len(entry.item.claims)
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
        what = f"{unmeasured} of {total} claims name rows that these steps do not measure"
        notes.append(f"{what}, and will not be decided: {first_names([*absent], MOST_NAMED)}")
    if single and len(seeds) == 1:
        what = f"{single} of {total} claims compare numbers that one seed cannot decide"
        notes.append(f"{what}; give --seeds 0,1,2, at three times the cost")
    return notes


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
    if form.device != "cpu" and not gpus():
        what = "a GPU" if form.device == "gpu" else "a cluster of GPUs"
        fix = "use --plan to see its cost, or --scale reduced" if request.scale == "full" else "run it on a GPU"
        if form.smaller is not None:
            fix += f", or a smaller form on two CPU cores: {form.smaller}"
        problems.append(f"{entry.key}: needs {what}, and no GPU is visible; {fix}")
    return problems


def gpus() -> int:
    """Returns how many GPUs this machine has."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _skip(step: Step, request: Request, skipped: dict[str, str]) -> str:
    """Returns why a step cannot run on this machine; "" if it can."""
    if step.of in skipped:
        return f"{step.of} is not run: {skipped[step.of]}"
    lacks = [f"--data {name}=FOLDER" for name in step.needs if name not in request.data]
    lacks += ["a GPU"] if step.device == "gpu" and not gpus() else []
    return f"needs {' and '.join(lacks)}" if lacks else ""


def _absent_data(job: Job, request: Request) -> list[str]:
    """Returns what the given folders lack for a training that will not be checked itself."""
    if job.step.verb != "train" or not job.step.needs or not request.data.keys() >= set(job.step.needs):
        return []
    from linnet.papers.verbs.train import data_problems

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


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    """Yields every mapping in a configuration."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _mappings(part)


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
        elif (digest := sha256(path)) != expected:
            digests = f"SHA-256 expected {expected}, found {digest}"
            lines.append(f"data {name}: {path.name} is not the published file: {digests}")
    return lines
