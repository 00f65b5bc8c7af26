"""The verb `bench`: times of generation on this machine. Each seed is one measurement, kept in the item's folder."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from linnet.config import ConfigError, digest, load_json, parse, refuse
from linnet.inference.benchmark import NUMBERS, Case, Linnet, copy_bandwidth, measure
from linnet.models import RECIPES, get_recipe
from linnet.models.registry import unknown_recipe
from linnet.papers.settings import BenchSettings
from linnet.papers.verbs.base import Cost, Job, Outcome, Planned, Record, numbers, write_planned
from linnet.runs.files import write_atomic


def check(job: Job) -> Cost:
    settings = parse(BenchSettings, job.values, job.where)
    refuse([unknown_recipe(name) for name in settings.models if name not in RECIPES], job.where)
    cases = len(settings.batch) + len(settings.context)
    return Cost(runs=len(settings.models) * cases * len(job.seeds), columns=NUMBERS)


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
    settings = parse(BenchSettings, job.values, job.where)
    files = {
        seed: {model: f"{model}-{seed}-{digest(settings)}.json" for model in settings.models} for seed in job.seeds
    }
    for seed in job.seeds:
        write_planned(job, seed, digest([job.digest, digest(settings)]), files[seed], console)
    for seed in job.seeds:
        for model, name in files[seed].items():
            kept = job.folder / job.step.name / name
            if not kept.is_file():
                console.print(f"timing {model}, measurement {seed}", markup=False)
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(kept, json.dumps(_measure(settings, model), indent=1) + "\n")


def collect(job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
    records, unfinished = [], 0
    for plan in planned:
        for name in plan.about.values():
            kept = job.folder / job.step.name / name
            if not kept.is_file():
                unfinished += 1
                continue
            try:
                rows = load_json(kept)
            except ValueError as error:
                raise ConfigError([f"{kept}: is damaged ({error}); delete it and run again"], job.where) from None
            for row in rows:
                label = job.step.label.format(**row)
                records.append(Record(label, plan.seed, {} if row["error"] else numbers(row), failed=row["error"]))
    return Outcome(records, runs=len(records), unfinished=unfinished)


def _measure(settings: BenchSettings, model: str) -> list[dict[str, Any]]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, settings.dtype or ("bfloat16" if device == "cuda" else "float32"))
    cases = [Case(batch, settings.prompt, settings.new) for batch in settings.batch]
    cases += [Case(settings.batch[0], length, settings.context_new) for length in settings.context]
    system = Linnet(get_recipe(model), model, device, dtype)
    rows = measure(system, cases, settings.repeats, copy_bandwidth(torch.device(device)))
    return [{**row, "architecture": model} for row in rows]
