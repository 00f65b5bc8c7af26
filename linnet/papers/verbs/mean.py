"""The verb `mean`: the mean of one number over earlier trainings, such as the average over the tasks of a benchmark."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rich.console import Console

from linnet.config import ConfigError, nearest, parse, refuse
from linnet.papers.settings import MeanSettings
from linnet.papers.verbs import train
from linnet.papers.verbs.base import Cost, Job, Outcome, Planned, Record, measurable, write_planned


def check(job: Job) -> Cost:
    settings = parse(MeanSettings, job.values, job.where)
    trainings = [name for name, before in job.before.items() if before.step.verb == "train"]
    unknown = [name for name in settings.steps if name not in trainings]
    if unknown:
        problems = [f"steps: {name!r} is not an earlier train step; {nearest(name, trainings)}" for name in unknown]
        raise ConfigError(problems, job.where)
    problems = []
    for name in settings.steps:
        with suppress(ConfigError):  # that step reports its problems itself
            if settings.column not in (known := train.measured(job.before[name])):
                problems.append(f"column: {settings.column!r} is not measured by {name!r}; {measurable(known)}")
    refuse(problems, job.where)
    first, *others = ([_row(job, name, label) for label in _labels(job, name)] for name in settings.steps)
    labels = tuple(row for row in first if all(row in other for other in others))
    return Cost(runs=0, flops=0.0, seconds=0.0, labels=labels, columns=frozenset([settings.column]))


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
    write_planned(job, None, job.digest, {}, console)


def collect(job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
    settings = parse(MeanSettings, job.values, job.where)
    if any(name not in earlier for name in settings.steps):
        return Outcome([])
    parts = [
        {(_row(job, name, record.label), record.seed): record for record in earlier[name].records}
        for name in settings.steps
    ]
    means = []
    for row, seed in parts[0]:
        records = [part[row, seed] for part in parts if (row, seed) in part]
        if len(records) < len(parts):
            continue
        values = [record.values[settings.column] for record in records if settings.column in record.values]
        failed = [
            f"{name}: {record.failed}" for name, record in zip(settings.steps, records, strict=True) if record.failed
        ]
        if len(values) == len(parts):
            means.append(Record(row, seed, {settings.column: math.fsum(values) / len(values)}))
        elif failed:
            means.append(Record(row, seed, failed=failed[0]))
    return Outcome(means, unfinished=sum(earlier[name].unfinished for name in settings.steps))


def _labels(job: Job, name: str) -> tuple[str, ...]:
    return tuple(job.before[name].step.vary) or (name,)


def _row(job: Job, name: str, label: str) -> str:
    return job.before[name].step.rows.get(label, label)
