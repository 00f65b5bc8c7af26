"""From a `core` score to a published one, one cause at a time (paper 004, Figure 3.7).

Each step changes one thing of the step before, at the six baselines: the tasks, the training, the layers, the number
that scores a run, and how a run is selected. The last two need no further training. The rest of the way are the other
60 settings, whose scores come from a folder of the budget `published`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from linnet.config import ConfigError, gather, refuse
from linnet.mad.architectures import TOTAL, architecture, state_size, target_size
from linnet.mad.results import TABLE, read_results
from linnet.mad.run import Work, prepare, train
from linnet.mad.scores import PUBLISHED, Scores, number_of, score
from linnet.study.executors import ExecutorConfig

ARCHITECTURES = ("mad-attention-swiglu", "mad-gla-swiglu")
PUBLISHED_FOLDER = "published"


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name, cause: of the step; what it changes. folder: of its runs, within the folder of the waterfall.
        spec, training, layers: forms of its runs (`linnet.mad.run.prepare`).
        metric, legacy: how runs are scored and selected (`linnet.mad.scores.score`).
    """

    name: str
    cause: str
    folder: str
    spec: str = "mad-lab"
    training: str = "mad-lab"
    layers: Literal["paper", "mad-lab"] = "mad-lab"
    metric: str = "accuracy"
    legacy: bool = False


STEPS = (
    Step("core", "the baselines as the paper describes them", "core", "paper", "paper", "paper"),
    Step(
        "tasks", "tasks and training targets of the published implementation", "tasks", training="paper", layers="paper"
    ),
    Step("training", "its training: constant rate, early end, lowest test loss", "training", layers="paper"),
    Step("layers", "its layers: 352, sine filters, dense experts, biases", "layers"),
    Step("number", "its number: mean over classes and batches", "layers", metric="macro_batch"),
    Step("selection", "its selection of runs, on the test split", "layers", metric="macro_batch", legacy=True),
)
TRAINED = tuple(step for step in STEPS if step.folder == step.name)
SETTINGS = "settings"  # the last step: the mean over all 66 settings


def prepare_waterfall(
    folder: str | Path,
    architectures: Sequence[str] = ARCHITECTURES,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    tasks: Sequence[str] = (),
    budget: str = "core",
    changes: Mapping[str, Any] | None = None,
    known: str | Path | None = None,
    published: str | Path | None = None,
    executor: ExecutorConfig | None = None,
) -> list[Work]:
    """Plans the runs of all steps, in order, and writes nothing.

    Args:
        architectures: recipes or layouts. tasks: only these, all if empty. budget: `core`, or `smoke` to try it out.
        changes: keys of `ModelConfig` that override the defaults in all steps. With some, models keep the state that
            their options give.
        known: the folder of another waterfall, whose finished runs are not trained again (`known` of `prepare`).
        published: the folder that `waterfall_rows` will read.

    Raises:
        ConfigError: all problems at once: an architecture or task is unknown, a folder has other runs, `known` has no
            step, or `published` is of another budget.
    """
    problems: list[str] = []
    names = [step.folder for step in TRAINED]
    there = [] if known is None else [name for name in names if (Path(known) / name / TABLE).is_file()]
    if known is not None and not Path(known).is_dir():
        problems.append(f"known {known}: no such folder; give a folder of linnet mad waterfall")
    elif known is not None and not there:
        problems.append(f"known {known}: has no {TABLE} in {', '.join(names)}; give a folder of linnet mad waterfall")
    if published is not None:
        with gather(problems):
            _scores(Path(published), **number_of(PUBLISHED_FOLDER), budget=PUBLISHED_FOLDER)
    works = []
    for step in TRAINED:
        models = {}
        for name in architectures:
            with gather(problems, f"{name}: {{}}".format):
                models[name] = architecture(name, changes, 0 if changes else TOTAL, step.layers)
        with gather(problems):
            work = prepare(
                models,
                Path(folder) / step.folder,
                budget=budget,
                tasks=tasks,
                device=device,
                executor=executor,
                spec=step.spec,
                training=step.training,
                layers=step.layers,
                known=Path(known) / step.folder if known is not None and step.folder in there else None,
            )
            works.append(work)
    refuse(problems, "MAD")
    return works


def train_waterfall(works: Sequence[Work], console: Console | None = None) -> dict[str, str]:
    """Trains what has no result of planned steps. Returns each run that failed, with the last line of its error."""
    failed: dict[str, str] = {}
    for work in works:
        failed |= train(work, console=console).failed
    return failed


def state_notes(architectures: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    """Returns which fixed state the models of a waterfall have, where `changes` keep them from the usual one."""
    lines = []
    for name in architectures if changes else ():
        sizes: dict[int, list[str]] = {}
        for step in TRAINED:
            model = architecture(name, changes, 0, step.layers)
            if (size := state_size(model)) != (target := target_size(model)):
                sizes.setdefault(size, []).append(step.name)
        if sizes:
            where = {size: f" ({', '.join(steps)})" if len(sizes) > 1 else "" for size, steps in sizes.items()}
            shown = ", ".join(f"{size:,}{steps}" for size, steps in where.items())
            lines.append(f"{name}: its fixed state is {shown}, not {target:,}: with --set, options stay as they are")
    return lines


def waterfall_rows(folder: str | Path, published: str | Path | None = None) -> list[dict[str, Any]]:
    """Returns a row for each architecture and step, in order: step, cause, architecture, score and its change from the
    step before (points of accuracy in per cent; None where that has other tasks), and the score of each task.

    The first step is named by its budget. A row whose score cannot be compared with others has a `note`.

    Args:
        published: folder of the budget `published`, for the last step; default: `published` in `folder`, if it exists.

    Raises:
        ConfigError: a step has no runs, or `published` is of another budget.
    """
    folder = Path(folder)
    parts = [(step.name, step.cause, folder / step.folder, step.metric, step.legacy) for step in STEPS]
    last = Path(published) if published is not None else folder / PUBLISHED_FOLDER
    if published is not None or last.is_dir():
        number = number_of(PUBLISHED_FOLDER)
        parts.append((SETTINGS, "all 66 settings", last, number["metric"], number["legacy"]))
    rows: list[dict[str, Any]] = []
    before: dict[str, float] = {}
    scored: dict[str, tuple[str, ...]] = {}
    for name, cause, path, metric, legacy in parts:
        scores = _scores(path, metric, legacy, PUBLISHED_FOLDER if name == SETTINGS else "")
        for model in sorted(scores if name != SETTINGS else scores.keys() & before.keys()):
            value = 100 * scores[model].score
            row: dict[str, Any] = {"step": name, "cause": cause, "architecture": model, "score": value}
            tasks = tuple(scores[model].tasks)
            row["change"] = value - before[model] if tasks == scored.get(model) else None  # else means over other tasks
            if name == STEPS[0].name:
                row["step"] = scores[model].budget or name
            if not scores[model].comparable:
                row["note"] = "; ".join(scores[model].reasons)
            rows.append(row | {task: 100 * task_score.score for task, task_score in scores[model].tasks.items()})
            before[model], scored[model] = value, tasks
    if parts[-1][0] == SETTINGS:
        for model in sorted(before.keys() & PUBLISHED.keys()):
            printed = dict(PUBLISHED[model])
            row = {"step": "as printed", "cause": "arXiv:2406.06484, Figure 3", "architecture": model}
            total = printed.pop("all")
            change = total - before[model] if printed.keys() == set(scored[model]) else None
            rows.append(row | {"score": total, "change": change} | printed)
    return sorted(rows, key=lambda row: row["architecture"])


def _scores(folder: Path, metric: str, legacy: bool, budget: str) -> Scores:
    results = read_results(folder)
    others = {result.budget for result in results} - {budget}
    if budget and others:
        raise ConfigError(
            [f"{folder}: has runs of the budget {', '.join(sorted(others))}; give one of {budget}"], "MAD"
        )
    return score(results, metric=metric, legacy=legacy)
