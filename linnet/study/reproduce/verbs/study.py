"""The verb `study`: a ladder of models, trained by `linnet.study`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from linnet.config import ConfigError
from linnet.study.collect import RUNS
from linnet.study.config import StudyConfig, read_study
from linnet.study.executors import worker_slots
from linnet.study.ladder import Plan
from linnet.study.ladder import plan as make_plan
from linnet.study.reproduce.verbs.base import Cost, Job, Outcome, Record, numbers
from linnet.study.runner import run_study


def check(job: Job) -> Cost:
    settings, plan = _plan(job)
    throughput = settings.executor.throughput or job.form.throughput
    labels = dict.fromkeys(_label(job, run.record()) for run in plan.runs)
    return Cost(
        runs=len(plan.all_runs),
        flops=plan.flops,
        seconds=plan.flops / throughput if throughput else None,
        devices=worker_slots(settings.executor, settings.devices) * settings.devices,
        labels=tuple(labels),
        notes=tuple(plan.notes()),
    )


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> Outcome:
    settings, plan = _plan(job)
    result = run_study(settings, job.folder, job.cache, plan=plan, console=console)
    planned = {run.run: run.record() for run in plan.runs}
    records, seconds = [], 0.0
    for row in result.rows:
        if row["run"] not in planned:
            continue
        about = row | planned[row["run"]]
        values = numbers(row) if row["status"] == "done" else {}
        seconds += row.get("seconds") or 0.0
        values.pop("seconds", None)
        failed = "" if row["status"] == "done" else f"the run {row['status']}"
        path = result.folder / row["path"]
        records.append(Record(_label(job, about), about["seed"], values, run=path, failed=failed))
    return Outcome(records, result.folder, seconds)


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
