"""The verb `models`: counts of models on the meta device."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from linnet.config import gather, parse, refuse
from linnet.models.config import ModelConfig
from linnet.models.costs import count_parameters, summary
from linnet.models.recipes import table
from linnet.models.registry import unknown_recipe
from linnet.papers.settings import ModelsSettings
from linnet.papers.verbs.base import Cost, Job, Outcome, Planned, Record, numbers, write_planned
from linnet.study.config import read_study
from linnet.study.ladder import plan


def check(job: Job) -> Cost:
    records = _records(job)
    columns = frozenset(name for record in records for name in record.values)
    labels = tuple(record.label for record in records)
    return Cost(runs=len(records), flops=0.0, seconds=0.0, labels=labels, columns=columns)


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
    write_planned(job, None, job.digest, {}, console)


def collect(job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
    records = _records(job)
    return Outcome(records, runs=len(records), flops=0.0)


def _records(job: Job) -> list[Record]:
    settings = parse(ModelsSettings, job.values, job.where)
    problems: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    known = table.names_of(table.TEXT) + table.names_of(table.IMAGES)
    for wanted in settings.recipes:
        names = [name for name in known if name.startswith(wanted)]
        if not names:
            problems.append(unknown_recipe(wanted))
        with gather(problems):
            rows |= {name: table.recipe_summary(name, settings.context) for name in names}
    for label, values in settings.configs.items():
        with gather(problems):
            rows[label] = _count(label, values, settings.context)
    if isinstance(settings.study, dict):  # a file was read before
        with gather(problems):
            rows |= _planned(job, settings.study)
    if not problems and not rows:
        problems.append("recipes: none; name recipes, configs or a study")
    refuse(problems, job.where)
    return [Record(label, None, numbers(row)) for label, row in rows.items()]


def _count(label: str, values: Any, context: int) -> dict[str, Any]:
    if isinstance(values, str):
        return table.recipe_summary(values, context)
    config = parse(ModelConfig, values, label)
    try:
        return summary(label, config, context)
    except ValueError:  # a layout that the conventions of the papers do not count
        total, non_embedding = count_parameters(config)
        return {"params_total": total, "params_non_embedding": non_embedding}


def _planned(job: Job, study: dict[str, Any]) -> dict[str, dict[str, Any]]:
    runs = plan(read_study({"name": job.step.name, **study}), check_data=False).runs
    return {job.step.label.format(**run.record()): run.record() for run in runs}
