"""A study from configuration to table: plan, train what is missing, collect.

    <out>/<name>/
        study.yaml     the configuration
        plan.json      the runs that it needs
        runs/          one folder a run (linnet.runs); a result.json there means done
        table.csv      what they came to (linnet.study.collect)

Nothing else is remembered: run the same study again and only what is missing is trained, from its last checkpoint.
"""

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError, parse, read_yaml
from linnet.runs import LockedError, RunFolder
from linnet.runs.files import write_atomic
from linnet.study.collect import PLAN, RUNS, collect
from linnet.study.config import StudyConfig
from linnet.study.executors import Job, Outcome, make_executor
from linnet.study.ladder import Plan, PlannedRun, evaluation_problems
from linnet.study.ladder import plan as make_plan
from linnet.study.progress import StudyProgress, count, duration
from linnet.train import TrainConfig, run_folder, train
from linnet.train.objective import Data
from linnet.train.objectives import find_objective

CACHE = "cache"  # folder of prepared corpora, in that of studies
LOCK_PATIENCE = 60.0  # seconds to wait for a run that workers of a killed study still hold


@dataclass(frozen=True)
class StudyResult:
    """What a study came to: its folder, the rows of its table, and the rows among them that failed or diverged."""

    folder: Path
    rows: list[dict[str, Any]]

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
    """Trains the runs of a study that are not done yet and collects all into its table.

    Args:
        config: the study.
        out: folder of studies; this one gets `out/<name>`.
        cache: folder of prepared corpora; default: `out/cache`.
        plan, seconds: from `linnet.study.plan` and `linnet.study.timing.estimate`, where the caller has them.
        console: where progress is shown; default: nowhere.

    Raises:
        ConfigError: the configuration, its data or an evaluation is wrong, or another process works in the folder;
            before any run.
        KeyboardInterrupt: stopped; finished and started runs are kept and go on next time.
    """
    cache = Path(cache) if cache is not None else Path(out) / CACHE
    console = console or Console(quiet=True)
    folder = Path(out) / config.name
    plan = plan or make_plan(config, cache=cache, root=folder / RUNS)
    (folder / RUNS).mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        objective = find_objective(plan.runs[0].train)
        data = objective.read(plan.runs[0].train, cache)
        _check_data(plan, data)
        longest = max(run.tokens for run in plan.runs)
        available = objective.size(data)
        if longest > available:
            console.print(
                f"note: the training data have {count(available)} {objective.units}; the longest run reads them "
                f"{longest / available:.1f} times, and repeated data count for less"
            )
        _same_data(folder, config, data.digest)
        write_atomic(folder / "study.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        record = {"corpus": data.digest, "runs": [run.record() for run in plan.runs]}
        write_atomic(folder / PLAN, json.dumps(record, indent=1) + "\n")
        missing = [run for run in plan.runs if not RunFolder(folder / RUNS / run.run).done]
        if len(missing) < len(plan.runs):
            console.print(f"{len(plan.runs) - len(missing)} of {len(plan.runs)} runs are done; {len(missing)} to go")
        if missing:
            _train(missing, folder / RUNS, cache, config, seconds, console)
        return StudyResult(folder, collect(folder))


def train_run(job: Job) -> str:
    """Trains one run (in whatever process this is called) and returns its status, `done` or `diverged`."""
    config = parse(TrainConfig, job.payload["config"])
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            run = train(config, Path(job.payload["root"]), Path(job.payload["cache"]))
            return run.result()["status"]
        except LockedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _train(
    runs: list[PlannedRun],
    root: Path,
    cache: Path,
    config: StudyConfig,
    seconds: dict[str, float] | None,
    console: Console,
) -> None:
    executor = make_executor(config.executor)
    planned = {run.run: run for run in runs}
    jobs = [
        Job(run.run, {"config": run.train.model_dump(mode="json"), "root": str(root), "cache": str(cache)})
        for run in runs
    ]
    progress = StudyProgress(runs, root, seconds, executor.workers, console)
    try:
        with progress, contextlib.closing(executor.run(jobs, train_run)) as outcomes:
            for outcome in outcomes:
                if outcome is None:
                    progress.tick()
                    continue
                if outcome.status == "failed":
                    run_folder(planned[outcome.job.run].train, root, cache).write_error(outcome.error)
                progress.line(outcome.job.run, _line(planned[outcome.job.run], outcome, root))
    finally:
        collect(root.parent)  # so that the table is right whatever stopped the study


def _line(run: PlannedRun, outcome: Outcome, root: Path) -> str:
    """One run in one line: what it was, and what it came to."""
    head = f"{run.architecture:<12} {run.budget:<8.3g} {run.size:<7} {count(run.params_non_embedding):>6} parameters"
    if outcome.status == "failed":
        last = outcome.error.strip().splitlines()[-1]
        tries = f" after {outcome.attempts} attempts" if outcome.attempts > 1 else ""
        return f"{head}  [red]failed[/]{tries}: {escape(last)}"
    result = RunFolder(root / run.run).result()
    if outcome.status == "diverged":
        return f"{head}  [red]diverged[/] at step {result.get('steps', '?')} of {run.steps}"
    return (
        f"{head}  {count(run.tokens):>6} tokens  loss {result['loss']:.4f}  "
        f"{result['bits_per_byte']:.3f} bits/byte  {duration(outcome.seconds)}"
    )


def _check_data(plan: Plan, data: Data) -> None:
    """Raises ConfigError for data that are too few for some runs, and evaluations that do not fit them."""
    runs = {run.seq_len: run.train for run in plan.runs}
    problems = [line for train in runs.values() for line in find_objective(train).data_problems(train, data)]
    first = plan.runs[0].train
    if find_objective(first).evaluations_need_data(first):  # otherwise the plan has checked them
        problems += evaluation_problems(first, runs, data)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)), "study")


def _same_data(folder: Path, config: StudyConfig, corpus: str) -> None:
    """Raises ConfigError where the folder has runs on other data that go by the same name."""
    if not (folder / PLAN).is_file() or not (folder / "study.yaml").is_file():
        return
    try:
        before = json.loads((folder / PLAN).read_text(encoding="utf-8"))["corpus"]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{folder / PLAN}: is damaged ({error}), and does not say what text the runs were trained on"
        raise ConfigError([f"{problem}; if it is the same, delete that file to go on"], "study") from None
    same_name = read_yaml(folder / "study.yaml").get("data") == config.data.model_dump(mode="json")
    if same_name and before != corpus and any(folder.glob(f"{RUNS}/*/result.json")):
        problem = f"data: the text is no longer what the finished runs in {folder} were trained on"
        raise ConfigError([f"{problem}; give the study another name, or delete that folder"], "study")


@contextlib.contextmanager
def _alone(folder: Path):
    """Holds the study folder, so that two processes do not work on one study."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunFolder(folder).lock())
        except LockedError:
            message = f"{folder}: another linnet study works in this folder; wait for it, stop it, or use another --out"
            raise ConfigError([message], "study") from None
        yield
