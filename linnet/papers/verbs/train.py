"""The verb `train`: one training for each label of `vary` and each seed."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from linnet.config import ConfigError, digest, gather, refuse, unwritable
from linnet.data import DataConfig
from linnet.data.problems import missing_text
from linnet.evaluate.retrieval.needle import lessons, write_lessons
from linnet.options import duration
from linnet.papers.verbs.base import (
    Cost,
    Job,
    Outcome,
    Planned,
    Record,
    numbers,
    patiently,
    read_planned,
    seconds_of,
    with_derived,
    write_planned,
)
from linnet.runs import RunFolder
from linnet.train import read_training, train
from linnet.train.config import resolve
from linnet.train.identity import contents_of, digest_of
from linnet.train.loop import result_numbers
from linnet.train.objectives import find_objective
from linnet.train.preflight import preflight


def check(job: Job) -> Cost:
    problems: list[str] = []
    flops, labels, notes = 0.0, [], []
    first: dict[tuple, str] = {}  # epochs and digest of a training -> its label
    for label, seed, values in _trainings(job):
        with gather(problems):
            config = resolve(read_training(values, f"{job.where}: {label}"))
            if label not in labels:
                labels.append(label)
                # The steps of an epoch are not known before the data are there.
                steps = {} if config.epochs is None else {"epochs": None, "steps": 1}
                same = config.epochs, digest_of(config.model_copy(update=steps), None)
                if (other := first.setdefault(same, label)) != label:
                    what = f"vary: {other!r} and {label!r} are the same training and would share its runs"
                    problems.append(f"{what}; give one of them another value of some key, or leave it out")
                if config.epochs is not None:
                    notes.append(f"{label}: `epochs` are counted once the data are there")
                else:
                    costs = find_objective(config).count_costs(config)
                    batches = config.batch_sizes.first(config.total_steps) / config.batch_size
                    flops += len(job.seeds) * batches * costs.flops
                if not job.planning and seed == job.seeds[0]:
                    preflight(config, job.cache)
    refuse(problems, job.where)
    seconds = None if notes else seconds_of(job.form, flops)
    return Cost(
        len(labels) * len(job.seeds),
        None if notes else flops,
        seconds,
        labels=tuple(labels),
        columns=None if job.values.get("evaluations") else measured(job),  # those of a file may have any name
        notes=tuple(notes),
    )


def data_problems(job: Job) -> list[str]:
    """Returns what is wrong with the files that the trainings of a step read. Prepares none, and reads no text."""
    problems: list[str] = []
    seen: list[Any] = []
    for label, _, values in _trainings(replace(job, seeds=job.seeds[:1], planning=True)):
        with gather(problems), contextlib.suppress(OSError):
            config = read_training(values, f"{job.where}: {label}")
            if config.data in seen:
                continue
            seen.append(config.data)
            if isinstance(config.data, DataConfig):
                problems += missing_text(config.data)
            else:
                find_objective(config).content(config, None if job.planning else job.cache)
    return list(dict.fromkeys(problems))


def measured(job: Job) -> frozenset[str]:
    """Returns the names of the numbers that the trainings of a step may have."""
    names: set[str] = set()
    for label, _, values in _trainings(replace(job, seeds=job.seeds[:1], planning=True)):
        names |= result_numbers(read_training(values, f"{job.where}: {label}"))
    return with_derived(names - {"seconds"})


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
    trainings = [
        (label, seed, read_training(values, f"{job.where}: {label}")) for label, seed, values in _trainings(job)
    ]
    contents: dict[str, Any] = {}
    for label, _, config in trainings:
        contents.setdefault(label, contents_of(config, job.cache) or config.file_names())
    work = digest([job.digest, contents])
    known = {plan.seed: plan.about for plan in read_planned(job) if plan.work == work}
    runs: dict[int, dict[str, str | None]] = {seed: {} for seed in job.seeds}
    for label, seed, _ in trainings:
        runs[seed][label] = known.get(seed, {}).get(label)
    for seed in job.seeds:
        write_planned(job, seed, work, runs[seed], console)
    root = job.folder / job.step.name
    done = {(seed, label): _seconds(root, runs[seed][label]) for label, seed, _ in trainings}
    for place, (label, seed, config) in enumerate(trainings):
        spent = [seconds for seconds in done.values() if seconds is not None]
        if done[seed, label] is not None:
            told = ", done before"
        else:
            told = f", about {duration(fmean(spent) * (len(done) - len(spent)))} left" if spent else ""
        console.print(f"{place + 1} of {len(trainings)}: {label}, seed {seed}{told}", markup=False)
        folder = patiently(partial(train, config, root, job.cache), console)
        runs[seed][label] = folder.path.name
        write_planned(job, seed, work, runs[seed], console)
        done[seed, label] = _seconds(root, folder.path.name)


def _seconds(root: Path, name: str | None) -> float | None:
    """Returns the seconds that a finished run recorded; None if it is not finished."""
    if name is None or not (folder := RunFolder(root / name)).done:
        return None
    return numbers(folder.result()).get("seconds", 0.0)


def collect(job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
    records, seconds, unfinished = [], [], 0
    for plan in planned:
        for label, name in plan.about.items():
            if name is None or not (folder := RunFolder(job.folder / job.step.name / name)).done:
                unfinished += 1
                continue
            result = folder.result()
            values = numbers(result) | {
                f"{row['evaluation']}.{metric}@{row['step']}": value
                for row in folder.metrics()
                for metric, value in row.get("metrics", {}).items()
            }
            seconds.append(values.pop("seconds", 0.0))
            failed = "" if result["status"] == "done" else f"the run {result['status']}"
            records.append(Record(label, plan.seed, {} if failed else values, run=folder.path, failed=failed))
    flops = math.fsum(record.values.get("flops", 0.0) for record in records)
    root = job.folder / job.step.name
    return Outcome(records, root, math.fsum(seconds), len(records), flops, unfinished)


def _trainings(job: Job) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for label, values in (job.vary or {job.step.name: job.values}).items():
        if (wanted := values.get("lessons")) is not None:
            values = {key: value for key, value in values.items() if key != "lessons"}
            values["data"] = {**values.get("data", {}), "source": [str(_lessons(job, label, wanted))]}
        name = re.sub(r"[^\w.-]+", "-", label).strip("-.") or job.step.name
        for seed in job.seeds:
            yield label, seed, {**values, "name": name, "seed": seed}


def _lessons(job: Job, label: str, wanted: Any) -> Path:
    """Returns the file of texts from which a model learns to find needles; writes it, unless nothing will run."""
    path = job.cache / f"lessons-{digest(wanted)}.jsonl"
    if not job.planning and (reason := unwritable(job.cache)):
        raise ConfigError([f"{job.cache}: {reason}; choose another cache folder"])
    try:
        if not job.planning:
            return write_lessons(path, **wanted)
        next(lessons(**wanted), None)
    except TypeError as error:
        raise ConfigError([f"{label}: lessons: {error}; linnet.evaluate.retrieval.needle lists its keys"]) from None
    return path
