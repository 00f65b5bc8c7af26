"""The part of `linnet evaluate` that asks questions through lm-evaluation-harness: --suite and --task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.cli.evaluate_run import Opened, progress
from linnet.config import ConfigError, gather, not_installed
from linnet.install import install_command


@dataclass(frozen=True)
class Asked:
    """What the command line says of tasks; `context` and `too_long` are None where it does not."""

    include: Path | None = None
    shots: int | None = None
    limit: int | None = None
    context: int | None = None
    too_long: str | None = None


@dataclass(frozen=True)
class Questions:
    """Tasks with their data: of a suite, or by the names that were given."""

    kind: str
    suite: Any
    names: list[str]
    tasks: dict[str, Any]


def prepare(suites: list[str], names: list[str], asked: Asked) -> list[Questions]:
    """Loads and checks all questions. Raises ConfigError with what is wrong with them, or for a missing extra."""
    if not suites and not names:
        return []
    if not_installed(["lm_eval"]):
        message = f"suites and tasks need lm-evaluation-harness; install it: {install_command('eval')}"
        raise ConfigError([message], "evaluate")
    from linnet.evaluate.suites import find_suite, load_suite
    from linnet.evaluate.tasks import find_tasks

    with Console(stderr=True).status("reading the questions"):
        found, problems = [], []
        for name in dict.fromkeys(suites):
            with gather(problems):
                suite = find_suite(name)
                found.append(Questions(name, suite, [], load_suite(suite, asked.shots, asked.include)))
        if names:
            with gather(problems):
                found.append(Questions("tasks", None, names, find_tasks(names, asked.include, shots=asked.shots)))
    if problems:  # what several say alike, such as where data come from, is said once, at the last
        raise ConfigError(list(dict.fromkeys(reversed(problems)))[::-1], "tasks")
    return found


def context_of(opened: Opened, questions: Questions, asked: Asked) -> tuple[int | None, str]:
    """How far the model may see, None for all, and what becomes of what is longer.

    Raises:
        ConfigError: the length of training is needed, and the folder does not say it.
    """
    from linnet.evaluate.text import natural_method

    cut, longest = questions.suite is not None and questions.suite.cut, asked.context
    if longest is None and (cut or natural_method(opened.model.config) == "windowed"):
        longest = opened.training_length
        if longest is None:
            message = f"context: {opened.path} does not say how long the sequences of training were; give --context N"
            raise ConfigError([message], "evaluate")
    return longest, asked.too_long or ("cut" if cut else "refuse")


def ask(opened: Opened, questions: Questions, asked: Asked):
    """Asks them, prints what came of it (of a suite, what its papers print), and gives the record."""
    from linnet.evaluate.chance import chances
    from linnet.evaluate.harness import LinnetLM
    from linnet.evaluate.results import Evaluation
    from linnet.evaluate.suites import counting, run_suite
    from linnet.evaluate.tasks import run_tasks

    longest, too_long = context_of(opened, questions, asked)
    suite, tasks = questions.suite, questions.tasks
    with progress(opened, "requests", None) as bar:
        lm = LinnetLM(opened.engine(longest + 1 if longest else 4096), longest, too_long, bar.reach)
        results = run_tasks(lm, tasks, asked.limit) if suite is None else run_suite(lm, suite, tasks, asked.limit)
    shown = results
    if suite is not None:
        averages = [one for one in results if one.task == suite.name]
        shown = averages if suite.by_question else [*counting(suite, results), *averages]
    guessed = chances(tasks, results, suite, asked.limit)
    if not opened.quiet:
        _show(shown, guessed)
    told = {
        name: {"shots": task.get_config("num_fewshot"), "version": task.VERSION, "output_type": task.OUTPUT_TYPE}
        for name, task in tasks.items()
    }
    settings = {"context": longest, "too_long": too_long, "limit": asked.limit, "shots": asked.shots}
    settings |= {"suite": questions.kind} if suite is not None else {"tasks": questions.names}
    settings |= {"include": None if asked.include is None else str(asked.include), "precision": opened.precision}
    detail = {"tasks": told, "cuts": lm.cuts, "shown": [[one.task, one.metric] for one in shown]}
    detail["chance"] = [[task, metric, value] for (task, metric), value in guessed.items()]
    return Evaluation(questions.kind, opened.about, settings, results, detail)


def _show(results, guessed: dict[tuple[str, str], float]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("task", "metric", "value", "error", "guessing", "questions"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for one in results:
        error = _standard_error(one)
        chance = guessed.get((one.task, one.metric))
        cells = (
            f"{one.value:,.4f}",
            "" if error is None else f"{error:.4f}",
            "" if chance is None else f"{chance:.4f}",
        )
        table.add_row(escape(one.task), escape(one.metric), *cells, f"{one.n:,}")
    Console().print(table)


def _standard_error(result) -> float | None:
    """Of a plain mean over at least two questions."""
    from statistics import stdev

    if result.average != "mean" or len(result.items) < 2 or len({item.weight for item in result.items}) > 1:
        return None
    return stdev(item.score for item in result.items) / len(result.items) ** 0.5
