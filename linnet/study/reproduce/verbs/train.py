"""The verb `train`: one training for each label of `vary` and each seed."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from linnet.config import ConfigError, gather
from linnet.study.reproduce.verbs.base import Cost, Job, Outcome, Record, numbers
from linnet.train import read_training, train
from linnet.train.config import resolve
from linnet.train.objectives import find_objective
from linnet.train.preflight import preflight


def check(job: Job) -> Cost:
    problems: list[str] = []
    flops, labels, notes = 0.0, [], []
    for label, seed, values in _trainings(job):
        with gather(problems):
            config = resolve(read_training(values, f"{job.where}: {label}"))
            if label not in labels:
                labels.append(label)
                if config.epochs is not None:
                    notes.append(f"{label}: `epochs` are counted once the data are there")
                else:
                    costs = find_objective(config).count_costs(config)
                    batches = config.batch_sizes.first(config.total_steps) / config.batch_size
                    flops += len(job.seeds) * batches * costs.flops
                if not job.planning and seed == job.seeds[0]:
                    preflight(config, job.cache)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), job.where)
    throughput = job.form.throughput
    seconds = flops / throughput if throughput and not notes else None
    return Cost(
        len(labels) * len(job.seeds), None if notes else flops, seconds, labels=tuple(labels), notes=tuple(notes)
    )


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> Outcome:
    records, seconds = [], 0.0
    for label, seed, values in _trainings(job):
        config = read_training(values, f"{job.where}: {label}")
        console.print(f"training {label}, seed {seed}", markup=False)
        folder = train(config, job.folder / job.step.name, job.cache)
        result = folder.result()
        found = numbers(result)
        seconds += found.pop("seconds", 0.0)
        failed = "" if result["status"] == "done" else f"the run {result['status']}"
        records.append(Record(label, seed, {} if failed else found, run=folder.path, failed=failed))
    return Outcome(records, job.folder / job.step.name, seconds)


def _trainings(job: Job) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for label, values in (job.vary or {job.step.name: job.values}).items():
        name = re.sub(r"[^\w.-]+", "-", label).strip("-.") or job.step.name
        for seed in job.seeds:
            yield label, seed, {**values, "name": name, "seed": seed}
