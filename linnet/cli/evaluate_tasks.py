"""The part of `linnet evaluate` that asks questions through lm-evaluation-harness: --suite and --task."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.cli.evaluate_run import Opened, progress
from linnet.config import ConfigError


@dataclass(frozen=True)
class Asked:
    """What the command line says of tasks; `context` and `too_long` are None where it does not."""

    include: Path | None = None
    shots: int | None = None
    limit: int | None = None
    context: int | None = None
    too_long: str | None = None


def check_extra() -> None:
    """Raises ConfigError where the harness is not installed."""
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise ConfigError(["suites and tasks need lm-evaluation-harness; pip install 'linnet[eval]'"], "evaluate")


def ask_suite(opened: Opened, name: str, asked: Asked):
    """Asks a suite, prints what its papers print, and gives the record."""
    from linnet.evaluate.suites import counting, find_suite, load_suite, run_suite

    suite = find_suite(name)
    tasks = load_suite(suite, asked.shots)
    lm, ways = _model(opened, asked, suite.cut)
    with progress(opened, "requests", None) as bar:
        lm.progress = bar.reach
        results = run_suite(lm, suite, tasks, asked.limit)
    averages = [one for one in results if one.task == suite.name]
    shown = averages if suite.by_question else [*counting(suite, results), *averages]
    return _finish(opened, name, tasks, lm, results, shown, ways | {"suite": name, "shots": asked.shots})


def ask_tasks(opened: Opened, names: list[str], asked: Asked):
    """Asks tasks of the harness or of a folder, prints all their metrics, and gives the record."""
    from linnet.evaluate.tasks import find_tasks, run_tasks

    tasks = find_tasks(names, asked.include, shots=asked.shots)
    lm, ways = _model(opened, asked, False)
    with progress(opened, "requests", None) as bar:
        lm.progress = bar.reach
        results = run_tasks(lm, tasks, asked.limit)
    ways |= {"tasks": names, "include": None if asked.include is None else str(asked.include), "shots": asked.shots}
    return _finish(opened, "tasks", tasks, lm, results, results, ways)


def _model(opened: Opened, asked: Asked, cut: bool):
    """The adapter, and what was decided about contexts: attention reads no further than it was trained to."""
    from linnet.evaluate.harness import LinnetLM
    from linnet.evaluate.text import natural_method

    longest = asked.context
    if longest is None and (cut or natural_method(opened.model.config) == "windowed"):
        longest = opened.training_length
        if longest is None:
            message = f"context: {opened.path} does not say how long the sequences of training were; give --context N"
            raise ConfigError([message], "evaluate")
    too_long = asked.too_long or ("cut" if cut else "refuse")
    engine = opened.engine(longest + 1 if longest else 4096)
    ways = {"context": longest, "too_long": too_long, "limit": asked.limit, "precision": opened.precision}
    return LinnetLM(engine, longest, too_long), ways


def _finish(opened: Opened, kind: str, tasks: dict, lm, results: tuple, shown, asked: dict):
    from linnet.evaluate.results import Evaluation

    if not opened.quiet:
        _show(shown)
    told = {
        name: {"shots": task.get_config("num_fewshot"), "version": task.VERSION, "output_type": task.OUTPUT_TYPE}
        for name, task in tasks.items()
    }
    detail = {"tasks": told, "cuts": lm.cuts, "shown": [[one.task, one.metric] for one in shown]}
    return Evaluation(kind, opened.about, asked, results, detail)


def _show(results) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("task", "metric", "value", "error", "questions"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for one in results:
        error = _standard_error(one)
        cells = (f"{one.value:,.4f}", "" if error is None else f"{error:.4f}", f"{one.n:,}")
        table.add_row(escape(one.task), escape(one.metric), *cells)
    Console().print(table)


def _standard_error(result) -> float | None:
    """Of a plain mean over at least two questions."""
    from statistics import stdev

    if result.average != "mean" or len(result.items) < 2 or len({item.weight for item in result.items}) > 1:
        return None
    return stdev(item.score for item in result.items) / len(result.items) ** 0.5
