"""The verb `mad`: skill scores of architectures, one record for each seed."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from linnet.config import digest, gather, parse, refuse
from linnet.mad.architectures import TOTAL, architecture, mqar_architecture
from linnet.mad.results import RUNS, read_results
from linnet.mad.run import Work, forms, mad_runs, prepare, train
from linnet.mad.scores import LOSS, all_numbers, number_of, score
from linnet.mad.settings import BUDGETS
from linnet.papers.settings import MadSettings
from linnet.papers.verbs.base import Cost, Job, Outcome, Planned, Record, patiently, seconds_of, write_planned
from linnet.runs import RunFolder


def check(job: Job) -> Cost:
    settings, models = _models(job)
    if not job.planning:
        _prepare(job, settings, models)
    runs = mad_runs(models, settings.budget, **_asked(job, settings))
    flops = sum(run.flops for run in runs)
    columns = {"score", LOSS, "score_macro_batch", "score_macro_batch_test", "params_total", "state_size"}
    columns |= {run.config[key] for run in runs for key in ("task", "setting")}
    labels = tuple(settings.architectures)
    return Cost(len(runs), flops, seconds_of(job.form, flops), labels=labels, columns=frozenset(columns))


def run(job: Job, earlier: Mapping[str, Outcome], console: Console) -> None:
    settings, models = _models(job)
    work = _prepare(job, settings, models)
    for seed in job.seeds:
        seed_runs = [run for run in work.runs if run.config["seed"] == seed]
        runs = {name: [run.run for run in seed_runs if run.config["architecture"] == name] for name in models}
        about = {"runs": runs, "flops": math.fsum(run.flops for run in seed_runs)}
        write_planned(job, seed, digest([job.digest, work.about, work.models]), about, console)
    patiently(partial(train, work, bundle=settings.bundle, console=console), console)


def collect(job: Job, planned: Sequence[Planned], earlier: Mapping[str, Outcome]) -> Outcome:
    settings = parse(MadSettings, job.values, job.where)
    folder = job.folder / job.step.name
    left = {(plan.seed, name): _left(folder, runs) for plan in planned for name, runs in plan.about["runs"].items()}
    results = read_results(folder) if any(folder.glob(f"{RUNS}/*/result.json")) else []
    done = [result for result in results if (result.seed, result.architecture) in left]
    records: list[Record] = []
    number = number_of(settings.budget)
    number["metric"] = number["metric"] if settings.metric is None else settings.metric
    number["legacy"] = number["legacy"] if settings.legacy is None else settings.legacy
    for seed in (plan.seed for plan in planned):
        of_seed = [result for result in done if result.seed == seed and not left[seed, result.architecture]]
        step_scores = score(of_seed, **number)
        others = all_numbers(of_seed)
        known = not any(result.ended and math.isnan(result.loss) for result in of_seed)
        losses = score(of_seed, metric=LOSS, legacy=number["legacy"]) if known else {}
        for name in settings.architectures:
            if failed := [run for run in left[seed, name] if RunFolder(folder / RUNS / run).error() is not None]:
                records.append(Record(name, seed, failed=f"{len(failed)} of its runs failed"))
                continue
            if left[seed, name]:
                continue
            if name not in step_scores:
                reason = step_scores.unscored.get(name, "no run trained to the end")
                records.append(Record(name, seed, failed=reason))
                continue
            mad_score, values = step_scores[name], {}
            for task, task_score in mad_score.tasks.items():
                values[task] = task_score.score
                values |= {setting: each.score for setting, each in task_score.settings.items()}
            values["score"] = fmean(task_score.score for task_score in mad_score.tasks.values())
            values |= {LOSS: losses[name].score} if name in losses else {}
            for (metric, legacy), scores in others.items():
                if metric == "macro_batch":
                    values[f"score_macro_batch{'_test' if legacy else ''}"] = scores[name].score
            more = {"params_total": mad_score.parameters, "state_size": mad_score.state_size}
            values |= {key: float(value) for key, value in more.items() if value is not None}
            records.append(Record(name, seed, values))
    runs = sum(len(runs) for plan in planned for runs in plan.about["runs"].values())
    missing = [folder / RUNS / run for names in left.values() for run in names]
    failures = tuple(path for path in missing if RunFolder(path).error() is not None)
    flops = math.fsum(plan.about["flops"] for plan in planned)
    unfinished = len(missing) - len(failures)
    return Outcome(records, folder, runs=runs - len(missing), flops=flops, unfinished=unfinished, failed=failures)


def _left(folder: Path, runs: Sequence[str]) -> list[str]:
    """Returns the runs that have no result."""
    return [run for run in runs if not RunFolder(folder / RUNS / run).done]


def _models(job: Job) -> tuple[MadSettings, dict[str, Any]]:
    settings = parse(MadSettings, job.values, job.where)
    mqar = settings.budget in BUDGETS and BUDGETS[settings.budget].mqar
    problems: list[str] = []
    models = {}
    for name in settings.architectures:
        with gather(problems):
            if mqar:
                models[name] = mqar_architecture(name, settings.set)
            else:
                state = TOTAL if settings.state is None else settings.state
                layers = forms(settings.budget, settings.spec, settings.layers, settings.training).layers
                published = layers == "mad-lab"
                models[name] = architecture(name, settings.set, state, "mad-lab" if published else "paper")
    refuse(problems, job.where)
    return settings, models


def _asked(job: Job, settings: MadSettings) -> dict[str, Any]:
    named = {"tasks": settings.tasks, "settings": settings.settings, "spec": settings.spec}
    return {**named, "layers": settings.layers, "training": settings.training, "seeds": job.seeds}


def _prepare(job: Job, settings: MadSettings, models: dict[str, Any]) -> Work:
    return prepare(models, job.folder / job.step.name, budget=settings.budget, **_asked(job, settings))
