"""The verb `study`: a ladder of models, trained by `linnet.study`."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from linnet.config import ConfigError, digest, load_json, read_yaml
from linnet.papers.verbs.base import (
    Cost,
    Job,
    Outcome,
    Planned,
    Record,
    numbers,
    patiently,
    seconds_of,
    with_derived,
    write_planned,
)
from linnet.runs.files import write_atomic
from linnet.study.collect import PLAN, RUNS, columns
from linnet.study.collect import collect as collect_study
from linnet.study.config import StudyConfig, read_study
from linnet.study.executors import worker_slots
from linnet.study.ladder import Plan
from linnet.study.ladder import plan as make_plan
from linnet.study.runner import check_same_data, run_study
from linnet.train.identity import contents_of
from linnet.train.objectives import find_objective

SETTINGS = "study.yaml"
_NO_NUMBERS = frozenset("run architecture layout domain seed seconds status path".split())  # columns of table.csv


def check(job: Job) -> Cost:
    settings, plan = _plan(job)
    stated = settings.executor.throughput
    labels = dict.fromkeys(_label(job, run.record()) for run in plan.runs)
    return Cost(
        runs=len(plan.all_runs),
        flops=plan.flops,
        seconds=plan.flops / stated if stated else seconds_of(job.form, plan.flops),
        devices=worker_slots(settings.executor, settings.devices) * settings.devices,
        labels=tuple(labels),
        columns=with_derived(set(columns(find_objective(plan.runs[0].train).units)) - _NO_NUMBERS),
        notes=tuple(plan.notes()),
    )


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
    settings, plan = _plan(job)
    first = plan.runs[0].train
    check_same_data(folder(job), settings, find_objective(first).read(first, job.cache).digest)
    work = digest([job.digest, contents_of(first, job.cache)])
    for seed in job.seeds:  # runs of `points` have a seed of their own and go with every seed
        about = {
            name: [run.record() for run in runs if run.seed == seed or run.seed not in job.seeds]
            for name, runs in (("runs", plan.runs), ("sensitivity", plan.sensitivity))
        }
        write_planned(job, seed, work, about, console)
    patiently(partial(run_study, settings, job.folder, job.cache, plan=plan, console=console), console)


def collect(job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
    path = folder(job)
    runs = {run["run"]: run for plan in planned for run in plan.about["runs"]}
    if not (path / PLAN).is_file():  # the call is about to begin, or was stopped before its first run
        return Outcome([], unfinished=len(runs))
    _merge(path, planned, runs)
    records, seconds, flops = [], [], []
    rows = [row for row in collect_study(path) if row["run"] in runs]  # another call may have written its own plan
    for row in sorted(rows, key=lambda row: runs[row["run"]]["seed"]):
        if row["status"] == "unfinished":
            continue
        about = row | runs[row["run"]]
        values = numbers(row) if row["status"] == "done" else {}
        seconds.append(row.get("seconds") or 0.0)
        flops.append(about["flops"])
        values.pop("seconds", None)
        failed = "" if row["status"] == "done" else f"the run {row['status']}"
        records.append(Record(_label(job, about), about["seed"], values, run=path / row["path"], failed=failed))
    failures = tuple(path / row["path"] for row in rows if row["status"] == "failed")
    unfinished = len(runs) - len(records)
    return Outcome(records, path, math.fsum(seconds), len(records), math.fsum(flops), unfinished, failures)


def _merge(path: Path, planned: Sequence[Planned], runs: dict[str, dict[str, Any]]) -> None:
    """Makes the study in `path` that of all seeds, in the files that fits and reports read."""
    varied = {run["run"]: run for plan in planned for run in plan.about["sensitivity"]}
    record = load_json(path / PLAN) | {"runs": sorted(runs.values(), key=_order)}
    if varied:
        record["sensitivity"] = sorted(varied.values(), key=_order)
    write_atomic(path / PLAN, json.dumps(record, indent=1) + "\n")
    settings = read_yaml(path / SETTINGS) | {"seeds": [plan.seed for plan in planned]}
    write_atomic(path / SETTINGS, yaml.safe_dump(settings, sort_keys=False))


def _order(run: dict[str, Any]) -> tuple:
    return -run["flops"], -run["params_non_embedding"], run["architecture"], run["seed"]


def _plan(job: Job) -> tuple[StudyConfig, Plan]:
    values = {**job.values, "name": job.step.name, "seeds": job.seeds}
    settings = read_study(values)
    root = folder(job) / RUNS
    return settings, make_plan(settings, check_data=not job.planning, cache=job.cache, root=root, where=job.where)


def folder(job: Job) -> Path:
    """Returns the folder of the study of a step."""
    return job.folder / job.step.name


def _label(job: Job, about: dict[str, Any]) -> str:
    try:
        return job.step.label.format(**about)
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError([f"label: {job.step.label!r} names no column of a study ({error})"], job.where) from None
