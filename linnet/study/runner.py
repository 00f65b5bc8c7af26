"""Runs a study from its configuration to its table: plans, trains the missing runs, collects.

    <out>/<name>/
        study.yaml     the configuration
        plan.json      the planned runs
        runs/          one folder per run (linnet.runs); a run with a result.json is done
        table.csv      the results of the runs (linnet.study.collect)

A study keeps no other state. If it runs again, it trains only the missing runs, each from its last checkpoint.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from rich.console import Console
from rich.markup import escape

from linnet import trust
from linnet.config import ConfigError, load_json, read_yaml, refuse
from linnet.data.corpus import MixtureSource, Portion, mixture_of
from linnet.options import duration
from linnet.runs import RunFolder
from linnet.runs.files import write_atomic
from linnet.runs.folder import patiently
from linnet.study.collect import PLAN, RUNS, collect
from linnet.study.config import StudyConfig
from linnet.study.differences import write_differences
from linnet.study.executors import Job, Outcome, device_problem, is_out_of_memory, make_executor
from linnet.study.ladder import Plan, PlannedRun, RateRun, evaluation_problems
from linnet.study.ladder import plan as make_plan
from linnet.study.progress import StudyProgress, count
from linnet.train import TrainingConfig, passes, read_training, run_folder, train
from linnet.train.evaluation import collected
from linnet.train.monitor import stop_with_parent
from linnet.train.objective import Data
from linnet.train.objectives import find_objective
from linnet.train.processes.launch import temporary_folder
from linnet.train.together import bundles, train_together

T = TypeVar("T")

CACHE = "cache"  # folder of prepared corpora, inside the folder of studies
LOCK_PATIENCE = 60.0  # seconds to wait for a run that a worker of a killed study still locks


@dataclass(frozen=True)
class StudyResult:
    """The result of a study.

    Attributes:
        rows: of its table. `broken` lists those that are not done.
        failed: folders of the planned runs without a result. A run that diverged has one.
    """

    folder: Path
    rows: list[dict[str, Any]]
    failed: tuple[Path, ...] = ()

    @property
    def broken(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["status"] != "done"]


def run_study(
    config: StudyConfig,
    out: str | Path = "studies",
    cache: str | Path | None = None,
    *,
    plan: Plan | None = None,
    seconds: dict[str, float] | None = None,
    console: Console | None = None,
) -> StudyResult:
    """Trains the runs of a study that are not done yet and collects all runs into its table.

    Args:
        config: the study.
        out: folder of studies; this study uses `out/<name>`.
        cache: folder of prepared corpora; default: `out/cache`.
        plan, seconds: results of `linnet.study.plan` and `linnet.study.timing.estimate`, if the caller has them.
        console: shows progress; default: no output.

    Returns:
        The folder of the study, the rows of its table, and the folders of the runs that failed.

    Raises:
        ConfigError: the configuration, its data or an evaluation is wrong, or another process works in the folder.
            Raised before any run starts.
        KeyboardInterrupt: the study was stopped. Finished and started runs are kept, and the next call resumes them.
    """
    cache = Path(cache) if cache is not None else Path(out) / CACHE
    console = console or Console(quiet=True)
    folder = Path(out) / config.name
    plan = plan or make_plan(config, cache=cache, root=folder / RUNS)
    _check_devices(plan, config)
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    with RunFolder(folder).alone("linnet study", "study"):
        objective = find_objective(plan.runs[0].train)
        data = objective.read(plan.runs[0].train, cache)
        _check_data(plan, data)
        tokens = [run.tokens for run in plan.all_runs]
        show_passes(tokens, objective.size(data), objective.units, console)
        if getattr(config.data, "mixture", None):
            mixture = mixture_of(config.data, data)
            show_sources(mixture, [source.end - source.start for source in mixture], tokens, console)
        check_same_data(folder, config, data.digest)
        write_atomic(folder / "study.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        record = {"corpus": data.digest, "runs": [run.record() for run in plan.runs]}
        if plan.sensitivity:
            record["sensitivity"] = [run.record() for run in plan.sensitivity]
        write_atomic(folder / PLAN, json.dumps(record, indent=1) + "\n")
        missing = [run for run in plan.all_runs if not RunFolder(folder / RUNS / run.run).done]
        if len(missing) < (planned := len(plan.all_runs)):
            console.print(f"{planned - len(missing)} of {planned} runs are done; {len(missing)} remain")
        if missing:
            _train(missing, folder / RUNS, cache, config, seconds, console)
        rows = collect(folder)
        write_differences(folder, config.architectures, rows)
        paths = [folder / RUNS / run.run for run in plan.all_runs]
        return StudyResult(folder, rows, tuple(path for path in paths if not RunFolder(path).done))


def train_run(job: Job) -> str:
    """Trains the run `config` of a job in the calling process and returns its status, `done` or `diverged`.

    Raises:
        LockedError: another process still locks the run after `LOCK_PATIENCE` seconds.
    """
    (config,) = _read(job, [job.payload["config"]])
    return patiently(partial(_train_alone, config, *_folders(job)), seconds=LOCK_PATIENCE).result()["status"]


def train_runs(job: Job) -> str:
    """Trains the runs `configs` of a job, several of them together, and returns `done`.

    A bundle that memory does not hold is halved.

    Raises:
        LockedError: as `train_run`.
    """

    def train_bundle(configs: list[TrainingConfig]) -> None:
        make = partial(train_together, configs) if len(configs) > 1 else partial(_train_alone, configs[0])
        patiently(partial(make, *_folders(job)), seconds=LOCK_PATIENCE)

    return in_halves(_read(job, job.payload["configs"]), train_bundle)


def in_halves(runs: list[T], train_bundle: Callable[[list[T]], list[T] | None]) -> str:
    """Trains runs together, in halves where memory does not hold them, and returns `done`.

    Args:
        train_bundle: trains runs; those that it returns go on in a bundle of their own.
    """
    waiting = [runs]
    while waiting:
        if not (bundle := waiting.pop(0)):
            continue
        with collected():  # of the models, or of the exception, only cycles are left after the block
            try:
                waiting.insert(0, train_bundle(bundle) or [])
            except Exception as error:
                if len(bundle) == 1 or not is_out_of_memory(error):
                    raise
                waiting[:0] = [bundle[: len(bundle) // 2], bundle[len(bundle) // 2 :]]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return "done"


def _train_alone(config: TrainingConfig, root: Path, cache: Path) -> RunFolder:
    make = train if config.parallel.devices == 1 else train_on_devices
    return make(config, root, cache)


def _read(job: Job, values: list[dict[str, Any]]) -> list[TrainingConfig]:
    trust.accept(job.payload["trusted"])  # a worker on another machine has no list, and may have another file
    for config in values:
        trust.check_plugins(config, f"the plan of {job.payload['root']}")
    return [read_training(config, "configuration") for config in values]


def _folders(job: Job) -> tuple[Path, Path]:
    return Path(job.payload["root"]), Path(job.payload["cache"])


def train_on_devices(config: TrainingConfig, root: Path, cache: Path) -> RunFolder:
    """Trains one run in as many processes as `config.parallel` asks for, with `linnet train --devices`.

    Raises:
        ConfigError: as `linnet.train.train`. RuntimeError: the training failed; its last lines are the message.
        LockedError: another process trains this run.
    """
    folder = run_folder(config, root, cache)
    if folder.done:
        return folder
    with folder.lock() if folder.exists else contextlib.nullcontext():
        pass  # an error here, not in another process
    with temporary_folder("linnet-run-") as temporary:
        file = temporary / "run.json"
        file.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "linnet", "train", str(file), "--devices", str(config.parallel.devices)]
        process = subprocess.Popen(
            [*command, "--out", str(root), "--cache", str(cache), "--json"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=stop_with_parent,
        )
        try:
            _, errors = process.communicate()
        except BaseException:  # a stop: the ranks save a checkpoint
            process.terminate()
            process.wait()
            raise
    if folder.done:
        return folder
    text = errors.strip()
    if process.returncode == 2:
        raise ConfigError([line.strip().removeprefix("- ") for line in text.splitlines()[-5:]], "train")
    raise RuntimeError(f"linnet train --devices ended with {process.returncode}: {text[-2000:]}")


def _check_devices(plan: Plan, config: StudyConfig) -> None:
    """Raises ConfigError if runs ask for more devices than there are, or cannot be divided among them."""
    devices = config.devices
    if devices == 1:
        return
    problems = [problem] if (problem := device_problem(config.executor, devices)) else []
    for run in plan.runs:
        problems += find_objective(run.train).parallel_problems(run.train, devices)
    refuse(problems, "study")


def _train(
    runs: list[PlannedRun],
    root: Path,
    cache: Path,
    config: StudyConfig,
    seconds: dict[str, float] | None,
    console: Console,
) -> None:
    executor = make_executor(config.executor, config.devices)
    trust.remember(config.plugins)
    shared = {"root": str(root), "cache": str(cache), "trusted": list(trust.digests(config.plugins).values())}
    groups = [
        [runs[index] for index in group] for group in bundles([run.train for run in runs], config.executor.bundle)
    ]
    together = {group[0].run: group for group in groups}
    jobs = [
        Job(name, {"configs": [run.train.model_dump(mode="json") for run in group], **shared})
        for name, group in together.items()
    ]
    progress = StudyProgress(runs, root, seconds, executor.workers, console)
    try:
        with progress, contextlib.closing(executor.run(jobs, train_runs)) as outcomes:
            for outcome in outcomes:
                if outcome is None:
                    progress.tick()
                    continue
                for run in together[outcome.job.run]:
                    run_outcome = outcome if not RunFolder(root / run.run).done else replace(outcome, status="done")
                    if run_outcome.status == "failed":
                        run_folder(run.train, root, cache).write_error(outcome.error)
                    progress.line(run.run, _line(run, run_outcome, root))
    finally:
        collect(root.parent)  # in `finally`, so that the table is up to date even if the study was stopped


def show_passes(tokens: list[int], available: float, units: str, console: Console, about: bool = False) -> None:
    """Prints how many times the runs read the training data, in yellow if some read them too often."""
    text, warning = passes.line(tokens, available, units, about)
    console.print(f"[yellow]warning: {text}[/]" if warning else text, highlight=False, soft_wrap=True)


def show_sources(
    mixture: Sequence[MixtureSource | Portion],
    available: Sequence[float | None],
    tokens: list[int],
    console: Console,
    about: bool = False,
) -> None:
    """Prints what each source of a mixture gives to the runs; the arguments are those of `passes.study_lines`."""
    for text, warning in passes.study_lines(mixture, available, tokens, about):
        shown = f"[yellow]warning: {escape(text)}[/]" if warning else escape(text)
        console.print(shown, highlight=False, soft_wrap=True)


def _line(run: PlannedRun, outcome: Outcome, root: Path) -> str:
    """Returns one line about a finished run: its settings and its result."""
    head = f"{run.architecture:<12} {run.budget:<8.3g} {run.size:<7} {count(run.params_non_embedding):>6} parameters"
    if isinstance(run, RateRun):
        head += f"  {run.factor:g} x the rate"
    if outcome.status == "failed":
        last = outcome.error.strip().splitlines()[-1]
        tries = f" after {outcome.attempts} attempts" if outcome.attempts > 1 else ""
        return f"{head}  [red]failed[/]{tries}: {escape(last)}"
    result = RunFolder(root / run.run).result()
    if result["status"] == "diverged":
        return f"{head}  [red]diverged[/] at step {result.get('steps', '?')} of {run.steps}"
    objective = find_objective(run.train)
    scores = [
        f"{'?' if (value := result.get(key)) is None else f'{value:.3f}'} {words.replace(' per ', '/')}  "
        for key, words in objective.SCORES.items()
    ]
    loss = result.get("loss")  # None if not finite
    return (
        f"{head}  {count(run.tokens):>6} {objective.units}  loss {'?' if loss is None else f'{loss:.4f}'}  "
        f"{''.join(scores)}{duration(outcome.seconds)}"
    )


def _check_data(plan: Plan, data: Data) -> None:
    """Raises ConfigError if the data are too small for some run, or an evaluation does not fit the data."""
    runs = {run.seq_len: run.train for run in sorted(plan.all_runs, key=lambda run: run.tokens)}  # the longest ones
    problems = [line for train in runs.values() for line in find_objective(train).data_problems(train, data)]
    first = plan.runs[0].train
    if find_objective(first).evaluations_need_data(first):  # otherwise `plan` has checked the evaluations
        problems += evaluation_problems(first, [length for length in runs if length], data)
    refuse(problems, "study")


def check_same_data(folder: Path, config: StudyConfig, corpus: str) -> None:
    """Raises ConfigError if finished runs of the folder used the same `data` settings, but another text."""
    if not (folder / PLAN).is_file() or not (folder / "study.yaml").is_file():
        return
    try:
        before = load_json(folder / PLAN)["corpus"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{folder / PLAN}: is damaged ({error}) and does not identify the text that the runs were trained on"
        raise ConfigError([f"{problem}; if the text is the same, delete this file and run again"], "study") from None
    same_name = read_yaml(folder / "study.yaml").get("data") == config.data.model_dump(mode="json")
    if same_name and before != corpus and any(folder.glob(f"{RUNS}/*/result.json")):
        problem = f"data: the text has changed since the finished runs in {folder} were trained"
        raise ConfigError([f"{problem}; give the study another name, or delete that folder"], "study")
