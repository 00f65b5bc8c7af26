"""The protocol: every run that a budget asks of each architecture, in bundles, the largest first; resumable.

    <folder>/
        plan.json     budget, specification, the models and the runs, by the names of their folders
        runs/         one run folder each: config.yaml, metrics.jsonl, result.json
        mad.csv       all results, a pure function of the run folders
        scores.csv    the scores of the architectures

What has a result is not trained again. Which of a setting's runs counts is decided on its validation split
(`linnet.study.mad.scores`); its accuracy is that on the test split.
"""

import contextlib
import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError, parse
from linnet.layers.base import load_plugin
from linnet.models import ModelConfig
from linnet.models.recipes.mad import fit_length
from linnet.runs import LockedError, RunFolder
from linnet.runs.files import write_atomic
from linnet.study.executors import ExecutorConfig, Job, Outcome, make_executor
from linnet.study.mad.bundle import DIVERGED, SHAPE, room, run_flops, train_bundle
from linnet.study.mad.results import TABLE, read_results
from linnet.study.mad.resume import finish
from linnet.study.mad.scores import Scores, score, write_scores
from linnet.study.mad.settings import BUDGETS, plan
from linnet.study.mad.state import state_size
from linnet.study.mad.training import MAD_LAB, MQAR, PAPER, Training
from linnet.study.progress import StudyProgress, count, duration
from linnet.train import device as devices

PLAN, RUNS = "plan.json", "runs"
LARGEST_BUNDLE = 24

COLUMNS = (
    "architecture task setting varied learning_rate weight_decay seed accuracy macro_batch validation_accuracy loss "
    "validation_loss train_loss epoch parameters state_size status diverged_at steps budget spec decay loads run"
).split()


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
class MadResult:
    """What a call of `run_mad` left: `failed` names the runs without a result, with the last line of why."""

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
    form = MQAR if budget in BUDGETS and BUDGETS[budget].mqar else MAD_LAB if spec == "mad-lab" else PAPER
    form = replace(form, spare=spare_decay)
    planned = plan(budget, tasks=tasks, settings=settings, spec=spec)
    runs, costs = [], {}
    for name, model in architectures.items():
        for one in planned:
            task = one.setting.task
            changes = {"vocab_size": task.num_tokens, "d_model": one.setting.width or model.d_model}
            config = parse(ModelConfig, model.model_dump() | changes, name)
            config = fit_length(config, task.input_length)
            shape = {
                "model": config.model_dump(mode="json"),
                **one.setting.to_dict(),
                "autoencoder": task.autoencoder,
                "input_length": task.input_length,
                "epochs": one.epochs,
                "batch_size": one.batch_size,
            }
            if form != PAPER:
                shape["training"] = form.to_dict()
            if task.name == "mqar":
                shape["answers"] = task.num_pairs
            key = name, one.setting
            costs[key] = costs[key] if key in costs else run_flops(shape)
            point = {"learning_rate": one.point.learning_rate, "weight_decay": one.point.weight_decay}
            for seed in seeds:
                full = {"name": f"{name}-{one.name}", "architecture": name, **shape, **point, "seed": seed}
                runs.append(MadRun(full, costs[key]))
    return runs


def bundles(runs: Sequence[MadRun], largest: int) -> list[list[MadRun]]:
    """Runs of one shape together, at most `largest`; the bundles with the most work first."""
    groups: dict[str, list[MadRun]] = {}
    for run in runs:
        groups.setdefault(run.shape, []).append(run)
    found = [group[i : i + largest] for group in groups.values() for i in range(0, len(group), largest)]
    return sorted(found, key=lambda bundle: -sum(run.flops for run in bundle))


def run_mad(
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
    bundle: int | None = None,
    compile: bool = False,
    plugins: Sequence[str] = (),
    spare_decay: bool = False,
    console: Console | None = None,
) -> MadResult:
    """Trains what is missing of a budget and scores what is there. Float32 on a CPU, bfloat16 autocast on a GPU.

    Args:
        architectures: name -> model; the vocabulary is that of each task.
        folder: of one budget, specification and device type; several calls may add architectures, tasks and seeds.
        executor: where bundles are trained; None is a process a GPU, or a CPU core.
        bundle: most runs to train together; None is 24 on a GPU, and 1 on a CPU, which a single model keeps busy.
        compile: bundles with `torch.compile`.
        plugins: files of mixers, as `linnet.layers.base.load_plugin` takes them.
        spare_decay: weight decay acts on the matrices of linear layers alone.

    Raises:
        ConfigError: nothing to run, a folder of another budget, or one that another process works in, before any run;
            later a disk that is full: runs that have ended are kept.
        KeyboardInterrupt: stopped; runs that have ended are kept.
    """
    folder, console = Path(folder), console or Console(quiet=True)
    kind = devices.choose(device).type
    precision = "bfloat16" if kind == "cuda" else "float32"
    runs = mad_runs(
        architectures, budget, tasks=tasks, settings=settings, spec=spec, seeds=seeds, spare_decay=spare_decay
    )
    with room(folder), _alone(folder):
        finish(RunFolder(path) for path in (folder / RUNS).iterdir())  # of bundles that were killed at their end
        about = {"budget": budget, "spec": spec, "precision": precision, "spare_decay": spare_decay}
        _check_plan(folder, about, runs, _designs(architectures, plugins))
        missing = [run for run in runs if not RunFolder(folder / RUNS / run.run).done]
        if len(missing) < len(runs):
            console.print(f"{len(runs) - len(missing)} of {len(runs)} runs are done; {len(missing)} to go")
        failed: dict[str, str] = {}
        try:
            if missing:
                common = {"root": str(folder / RUNS), "device": kind, "precision": precision, "compile": compile}
                common["plugins"] = list(plugins)
                groups = bundles(missing, bundle or (LARGEST_BUNDLE if kind == "cuda" else 1))
                console.print(_cost(missing, len(groups)))
                jobs = [_job(group, common | {"common": _known(group[0].config, budget)}) for group in groups]
                failed = _train(missing, jobs, folder, executor or ExecutorConfig(retries=1), console)
        finally:
            rows = collect(folder)  # so that the table is right whatever stopped the runs
        scores = score(read_results(folder)) if rows else None
        if scores is not None:
            write_scores(folder, scores)
    return MadResult(folder, scores, failed)


def collect(folder: Path) -> list[dict[str, Any]]:
    """The results of all run folders as rows, by architecture, setting and point; writes mad.csv atomically."""
    rows = []
    for path in sorted((folder / RUNS).glob("*/result.json")):
        rows.append(RunFolder(path.parent).result() | {"run": path.parent.name})
    rows.sort(key=lambda row: [row[k] for k in ("architecture", "setting", "learning_rate", "weight_decay", "seed")])
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(row | {"loads": json.dumps(row["loads"]) if row.get("loads") else ""} for row in rows)
    write_atomic(folder / TABLE, text.getvalue())
    return rows


def _cost(runs: Sequence[MadRun], groups: int) -> str:
    """What is ahead: model-steps and FLOPs, at most where runs may end early."""
    steps = sum(run.steps for run in runs)
    most = "at most " if any(Training.of(run.config).watch for run in runs) else ""
    work = f"{most}{count(steps)} model-steps and {sum(run.flops for run in runs):.2g} FLOPs"
    return f"{len(runs)} runs in {groups} bundles: {work}"


def _known(run: Mapping[str, Any], budget: str) -> dict[str, Any]:
    """What stands in the results of a bundle besides what training gives."""
    return {"state_size": state_size(ModelConfig.model_validate(run["model"])), "budget": budget}


def _job(group: list[MadRun], payload: dict[str, Any]) -> Job:
    return Job(group[0].run, payload | {"runs": [run.config for run in group]})


def _train(
    runs: list[MadRun], jobs: list[Job], folder: Path, config: ExecutorConfig, console: Console
) -> dict[str, str]:
    """Has the jobs done and returns the runs that failed."""
    executor = make_executor(config)
    root = folder / RUNS
    progress = StudyProgress(runs, root, None, executor.workers, console)
    failed: dict[str, str] = {}
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
                progress.line(name, _line(run, outcome, root / name))
    return failed


def _line(run: dict[str, Any], outcome: Outcome, path: Path) -> str:
    """One run in one line: what it was, and what it came to."""
    point = f"lr {run['learning_rate']:g} wd {run['weight_decay']:g}"
    head = f"{escape(run['architecture'])}  {run['setting']:<34} {point:<16}"
    if not RunFolder(path).done:
        return f"{head}  [red]failed[/]: {escape(outcome.error.strip().splitlines()[-1].strip())}"
    result = RunFolder(path).result()
    if result["status"] == DIVERGED:
        step = result["diverged_at"]  # None where only the scores were not finite
        return f"{head}  [red]diverged[/] at step {result['steps'] if step is None else step} of {result['steps']}"
    return f"{head}  accuracy {result['accuracy']:.3f}  loss {result['loss']:.3f}  {duration(outcome.seconds)}"


def _designs(architectures: Mapping[str, ModelConfig], plugins: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What each name stands for: the model, and the contents of the files that its mixers come from."""
    files = {load_plugin(one): Path(one.rpartition(":")[0]).read_bytes() for one in plugins}
    sums = {mixer: hashlib.sha256(text).hexdigest()[:12] for mixer, text in files.items()}
    return {
        name: model.model_dump(mode="json")
        | {"mixer file": {spec.mixer: sums[spec.mixer] for spec in model.blocks if spec.mixer in sums}}
        for name, model in architectures.items()
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*old, *new]):
        one, two = old.get(key), new.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from _changes(one, two, f"{at}{key}.")
        elif one != two:
            yield f"{at}{key} was {one!r} and is {two!r}"


def _begun(folder: Path) -> set[str]:
    """Architectures with a result or a checkpoint."""
    every = [RunFolder(path) for path in (folder / RUNS).iterdir() if path.is_dir()]
    return {run.config["architecture"] for run in every if run.done or run.checkpoints()}


def _check_plan(folder: Path, about: dict[str, Any], runs: list[MadRun], designs: dict[str, dict[str, Any]]) -> None:
    """Keeps runs of one budget and specification in one folder, and of one model under a name; writes down what was
    asked for."""
    path = folder / PLAN
    before: dict[str, Any] = {}
    if path.is_file():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError([f"{path}: is damaged ({error}); delete it and run again"], "MAD") from None
        problems = [
            f"{folder}: holds runs of {key} {before[key]}, not {value}; give another --out"
            for key, value in about.items()
            if before.get(key, value) != value
        ]
        known = before.get("models", {})
        changed = {name: ", ".join(_changes(known[name], one)) for name, one in designs.items() if name in known}
        if any(changed.values()):
            begun = _begun(folder)
            problems += [
                f"{folder}: holds runs of another {name} ({what}); give another --out"
                for name, what in changed.items()
                if what and name in begun
            ]
        if problems:
            raise ConfigError(problems, "MAD")
    models = before.get("models", {}) | designs
    names = dict.fromkeys([*before.get("runs", []), *(run.run for run in runs)])
    comparable = BUDGETS[about["budget"]].comparable
    write_atomic(
        path, json.dumps(about | {"comparable": comparable, "models": models, "runs": list(names)}, indent=1) + "\n"
    )


@contextlib.contextmanager
def _alone(folder: Path):
    """Holds the folder, so that two processes do not train the same runs."""
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{folder}: cannot be made ({error.strerror}); choose another --out"], "MAD") from None
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunFolder(folder).lock())
        except LockedError:
            message = (
                f"{folder}: another linnet mad run works in this folder; wait for it, stop it, or use another --out"
            )
            raise ConfigError([message], "MAD") from None
        yield
