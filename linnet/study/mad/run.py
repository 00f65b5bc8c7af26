"""The protocol: every run that a budget asks of each architecture, in bundles, the largest first; resumable.

What has a result is not trained again. Which of a setting's runs counts is decided on its validation split
(`linnet.study.mad.scores`); its accuracy is that on the test split.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError, gather, parse
from linnet.models import ModelConfig
from linnet.models.recipes.mad import fit_length
from linnet.runs import RunFolder
from linnet.study.executors import Executor, ExecutorConfig, Job, Outcome, make_executor
from linnet.study.mad.architectures import recorded
from linnet.study.mad.bundle import DIVERGED, SHAPE, run_flops, train_bundle
from linnet.study.mad.folder import alone, check_plan, collect, designs, room, write_plan
from linnet.study.mad.results import RUNS, read_results
from linnet.study.mad.resume import finish
from linnet.study.mad.scores import Scores, score, write_scores
from linnet.study.mad.settings import BUDGETS, PlannedRun, Setting, plan
from linnet.study.mad.state import state_size
from linnet.study.mad.training import MAD_LAB, MQAR, PAPER, Training
from linnet.study.progress import StudyProgress, count, duration
from linnet.train import device as devices
from linnet.train.objectives.synthetic import SyntheticObjective, synthetic_objective

LARGEST_BUNDLE = 24


@dataclass(frozen=True)
class MadRun:
    """One model to train: the resolved configuration of its run folder, and what it costs."""

    config: dict[str, Any]
    flops: float

    @property
    def run(self) -> str:
        return RunFolder.name(self.config)

    @property
    def steps(self) -> int:
        """Updates, if it goes to its end."""
        return self.config["epochs"] * -(-self.config["train_samples"] // self.config["batch_size"])

    @property
    def shape(self) -> str:
        """The same for runs that can be trained together."""
        return json.dumps([self.config.get(key) for key in SHAPE], sort_keys=True)


@dataclass(frozen=True)
class Work:
    """What `prepare` found nothing wrong with.

    Attributes:
        about: what all runs of the folder share. models: what each name stands for.
        device: "cpu" or "cuda". plugins: files of mixers.
    """

    folder: Path
    about: dict[str, Any]
    models: dict[str, dict[str, Any]]
    runs: list[MadRun]
    executor: Executor
    device: str
    plugins: tuple[str, ...]


@dataclass(frozen=True)
class MadResult:
    """What is in a folder after its runs: `failed` names those without a result, with the last line of why."""

    folder: Path
    scores: Scores | None
    failed: dict[str, str]


def mad_runs(
    architectures: Mapping[str, ModelConfig],
    budget: str = "core",
    *,
    tasks: Sequence[str] = (),
    settings: Sequence[str] = (),
    spec: str = "paper",
    seeds: Sequence[int] = (0,),
    spare_decay: bool = False,
) -> list[MadRun]:
    """Every run of a budget. Raises `ConfigError` as `plan` does, and where a model cannot have a task's tokens."""
    planned = plan(budget, tasks=tasks, settings=settings, spec=spec)
    form = MQAR if BUDGETS[budget].mqar else MAD_LAB if spec == "mad-lab" else PAPER
    form = replace(form, spare=spare_decay)
    own = {} if form == PAPER else {"training": form.to_dict()}
    runs, problems = [], []
    for name, model in architectures.items():
        shapes: dict[Setting, dict[str, Any]] = {}
        costs: dict[Setting, float] = {}
        for one in planned:
            if one.setting not in shapes:
                shapes[one.setting] = {}
                try:
                    objective = _objective(model, one)
                    shapes[one.setting] = _shape(objective, one) | own
                    costs[one.setting] = run_flops(shapes[one.setting], objective)
                except ConfigError as error:
                    problems += [f"{name} at {one.setting.name}: {problem}" for problem in error.problems]
        if problems:
            continue
        for one in planned:
            point = {"learning_rate": one.point.learning_rate, "weight_decay": one.point.weight_decay}
            about = {"name": f"{name}-{one.name}", "architecture": name, **shapes[one.setting], **point}
            runs += [MadRun(about | {"seed": seed}, costs[one.setting]) for seed in seeds]
    if problems:
        raise ConfigError(problems, "MAD")
    return runs


def bundles(runs: Sequence[MadRun], largest: int) -> list[list[MadRun]]:
    """Runs of one shape together, at most `largest`; the bundles with the most work first."""
    groups: dict[str, list[MadRun]] = {}
    for run in runs:
        groups.setdefault(run.shape, []).append(run)
    found = [group[i : i + largest] for group in groups.values() for i in range(0, len(group), largest)]
    return sorted(found, key=lambda bundle: -sum(run.flops for run in bundle))


def prepare(
    architectures: Mapping[str, ModelConfig],
    folder: str | Path,
    *,
    budget: str = "core",
    tasks: Sequence[str] = (),
    settings: Sequence[str] = (),
    spec: str = "paper",
    seeds: Sequence[int] = (0,),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    executor: ExecutorConfig | None = None,
    plugins: Sequence[str] = (),
    spare_decay: bool = False,
) -> Work:
    """Plans all runs of a budget without touching anything. Float32 on a CPU, bfloat16 autocast on a GPU.

    Args:
        architectures: name -> model; the vocabulary is that of each task.
        folder: of one budget, specification and device type; several calls may add architectures, tasks and seeds.
        tasks, settings: only these, as `plan` takes them.
        executor: where bundles are trained; None is a process a GPU, or a CPU core.
        plugins: files of mixers, as `linnet.layers.base.load_plugin` takes them.
        spare_decay: weight decay acts on the matrices of linear layers alone.

    Raises:
        ConfigError: all that is wrong, at once: no such budget, task, setting or device, models that a task cannot be
            asked of, a folder of other runs; after that, a Ray that cannot be reached.
    """
    folder, problems = Path(folder), []
    runs: list[MadRun] = []
    models: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = {"budget": budget, "spec": spec, "spare_decay": spare_decay}
    with gather(problems):
        runs = mad_runs(
            architectures, budget, tasks=tasks, settings=settings, spec=spec, seeds=seeds, spare_decay=spare_decay
        )
    with gather(problems):
        kind = devices.choose(device).type
        about["precision"] = "bfloat16" if kind == "cuda" else "float32"
    with gather(problems):
        models = designs(architectures, plugins)
    with gather(problems):
        check_plan(folder, about if budget in BUDGETS else {}, models)
    if problems:
        raise ConfigError(problems, "MAD")
    workers = make_executor(executor or ExecutorConfig(retries=1))  # last, for it may start a Ray
    return Work(folder, about, models, runs, workers, kind, tuple(plugins))


def train(work: Work, *, bundle: int | None = None, compile: bool = False, console: Console | None = None) -> MadResult:
    """Trains what is missing of prepared work and scores what is there.

    Args:
        bundle: most runs to train together; None is 24 on a GPU, and 1 on a CPU, which a single model keeps busy.
        compile: bundles with `torch.compile`.

    Raises:
        ConfigError: another process works in the folder; later a disk that is full: runs that have ended are kept.
        KeyboardInterrupt: stopped; runs that have ended are kept.
    """
    folder, console = work.folder, console or Console(quiet=True)
    with room(folder), alone(folder):
        finish(RunFolder(path) for path in (folder / RUNS).iterdir())  # of bundles that were killed at their end
        check_plan(folder, work.about, work.models)  # once more, for now nobody else changes it
        write_plan(folder, work.about, work.models, [run.run for run in work.runs])
        missing = [run for run in work.runs if not RunFolder(folder / RUNS / run.run).done]
        if len(missing) < len(work.runs):
            console.print(f"{len(work.runs) - len(missing)} of {len(work.runs)} runs are done; {len(missing)} to go")
        failed: dict[str, str] = {}
        try:
            if missing:
                groups = bundles(missing, bundle or (LARGEST_BUNDLE if work.device == "cuda" else 1))
                console.print(_cost(missing, len(groups)))
                jobs = [_job(group, work, compile) for group in groups]
                failed = _train(missing, jobs, folder, work.executor, console)
        finally:
            rows = collect(folder)  # so that the table is right whatever stopped the runs
        scores = score(read_results(folder)) if rows else None
        if scores is not None:
            write_scores(folder, scores)
    return MadResult(folder, scores, failed)


def _objective(model: ModelConfig, one: PlannedRun) -> SyntheticObjective:
    """Returns the objective of an architecture at one setting: with its vocabulary, width and length."""
    task = one.setting.task
    changes = {"vocab_size": task.num_tokens, "d_model": one.setting.width or model.d_model}
    config = fit_length(parse(ModelConfig, model.model_dump() | changes), task.input_length)
    return synthetic_objective(task, config)


def _shape(objective: SyntheticObjective, one: PlannedRun) -> dict[str, Any]:
    """Returns the keys that the runs of an architecture at one setting have in common.

    They are part of the name of each run folder, so keys that an objective does not need stay as they are.
    """
    task = objective.task
    shape = {
        "model": recorded(objective.model),
        **one.setting.to_dict(),
        "autoencoder": task.autoencoder,
        "input_length": task.input_length,
        "epochs": one.epochs,
        "batch_size": one.batch_size,
    }
    return shape | ({} if task.questions is None else {"answers": task.questions})


def _job(group: list[MadRun], work: Work, compile: bool) -> Job:
    model = ModelConfig.model_validate(group[0].config["model"])
    payload = {
        "root": str(work.folder / RUNS),
        "device": work.device,
        "precision": work.about["precision"],
        "compile": compile,
        "plugins": list(work.plugins),
        "common": {"state_size": state_size(model), "budget": work.about["budget"]},  # of all results
        "runs": [run.config for run in group],
    }
    return Job(group[0].run, payload)


def _cost(runs: Sequence[MadRun], groups: int) -> str:
    """What is ahead: model-steps and FLOPs, at most where runs may end early."""
    steps = sum(run.steps for run in runs)
    most = "at most " if any(Training.of(run.config).watch for run in runs) else ""
    work = f"{most}{count(steps)} model-steps and {sum(run.flops for run in runs):.2g} FLOPs"
    return f"{len(runs)} runs in {groups} bundles: {work}"


def _train(runs: list[MadRun], jobs: list[Job], folder: Path, executor: Executor, console: Console) -> dict[str, str]:
    """Has the jobs done and returns the runs that failed."""
    root = folder / RUNS
    progress = StudyProgress(runs, root, None, executor.workers, console)
    failed: dict[str, str] = {}
    width = max(len(run.config["architecture"]) for run in runs)
    with progress, contextlib.closing(executor.run(jobs, train_bundle)) as outcomes:
        for outcome in outcomes:
            if outcome is None:
                progress.tick()
                continue
            for run in outcome.job.payload["runs"]:
                name = RunFolder.name(run)
                if not RunFolder(root / name).done:
                    RunFolder.create(root, run).write_error(outcome.error)
                    failed[name] = outcome.error.strip().splitlines()[-1].strip()
                progress.line(name, _line(run, outcome, root / name, width))
    return failed


def _line(run: dict[str, Any], outcome: Outcome, path: Path, width: int) -> str:
    """One run in one line: what it was, its name in a column of `width`, and what it came to."""
    point = f"lr {run['learning_rate']:g} wd {run['weight_decay']:g}"
    head = f"{escape(run['architecture'].ljust(width))}  {run['setting']:<34} {point:<16}"
    if not RunFolder(path).done:
        return f"{head}  [red]failed[/]: {escape(outcome.error.strip().splitlines()[-1].strip())}"
    result = RunFolder(path).result()
    if result["status"] == DIVERGED:
        step = result["diverged_at"]  # None where only the scores were not finite
        return f"{head}  [red]diverged[/] at step {result['steps'] if step is None else step} of {result['steps']}"
    return f"{head}  accuracy {result['accuracy']:.3f}  loss {result['loss']:.3f}  {duration(outcome.seconds)}"
