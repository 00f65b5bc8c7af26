"""The suites of papers 000 and 001: which tasks, which metric of each, how many examples, and averages over them.

* csr: commonsense reasoning without examples, seven tasks in 000 (Table 4) and 001 (Table 2).
* perplexity: WikiText-2 by word and LAMBADA by its last word (000, Table 4, which does not say by what its are).
* scrolls: seven tasks over long texts without examples, greedy, contexts cut to the length of training (000, section
  3.4 and Tables 8 to 10; 001, Table 3). The average is that of the thirteen numbers which the papers print.
* mmlu, ceval: five examples (001, Table 2). C-Eval's answers are public for its validation part alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lm_eval.api.task import Task

from linnet.config import ConfigError, nearest
from linnet.evaluate.harness import LinnetLM
from linnet.evaluate.results import Result
from linnet.evaluate.suites_scrolls import scrolls_tasks
from linnet.evaluate.tasks import find_tasks, run_tasks

# Below 7B these say little: in 000's Table 4 every BoolQ of a smaller model is under the share of its most frequent
# answer (62.2 %), and up to 410M no WinoGrande (of two answers) or ARC-challenge (of four) is more than 2.5 points
# above guessing. The papers keep them; leaving them out is ours.
WITHOUT_SIGNAL = ("boolq", "winogrande", "arc_challenge")


@dataclass(frozen=True)
class Suite:
    """A suite.

    Attributes:
        tasks: names of tasks or groups of the harness, each with the metrics that count.
        shots: examples before each question; None leaves it to the tasks.
        cut: contexts are cut to the length of training, as the papers did it; else they are refused.
        averages: name -> tasks left out of it. Of the metrics that count, each as much as the others.
        by_question: of a group of tasks (MMLU): the average over its questions comes first, then over its tasks.
        folders: of the harness, where its tasks are.
    """

    name: str
    tasks: dict[str, tuple[str, ...]]
    folders: tuple[str, ...]
    shots: int | None = 0
    cut: bool = False
    averages: dict[str, tuple[str, ...]] | None = None
    by_question: bool = False


_ROUGE = ("rouge1", "rouge2", "rougeL")
_ALL = (
    Suite(
        "csr",
        {
            "boolq": ("acc",),
            "piqa": ("acc",),
            "hellaswag": ("acc_norm",),
            "winogrande": ("acc",),
            "arc_easy": ("acc",),
            "arc_challenge": ("acc_norm",),
            "openbookqa": ("acc_norm",),
        },
        ("super_glue", "piqa", "hellaswag", "winogrande", "arc", "openbookqa"),
        averages={
            "average": (),
            "average_without_boolq": ("boolq",),  # the six of papers 002 and 003
            "average_with_signal": WITHOUT_SIGNAL,
        },
    ),
    Suite(
        "perplexity",
        {"wikitext": ("word_perplexity",), "lambada_openai": ("perplexity",)},
        ("wikitext", "lambada"),
    ),
    Suite(
        "scrolls",
        {
            "scrolls_govreport": _ROUGE,
            "scrolls_summscreenfd": _ROUGE,
            "scrolls_qmsum": _ROUGE,
            "scrolls_qasper": ("f1",),
            "scrolls_narrativeqa": ("f1",),
            "scrolls_quality": ("em",),
            "scrolls_contractnli": ("em",),
        },
        ("scrolls",),
        cut=True,
        averages={"average": ()},
    ),
    Suite("mmlu", {"mmlu": ("acc",)}, ("mmlu/default",), shots=5, by_question=True),
    Suite("ceval", {"ceval-valid": ("acc",)}, ("ceval",), shots=5, by_question=True),
)
SUITES = {suite.name: suite for suite in _ALL}


def find_suite(name: str) -> Suite:
    """The suite of that name. Raises `ConfigError` with the nearest right one."""
    if name not in SUITES:
        raise ConfigError([f"suite: {name!r} is unknown; {nearest(name, SUITES)}"], "evaluate")
    return SUITES[name]


def load_suite(suite: Suite, shots: int | None = None, include: str | Path | None = None) -> dict[str, Task]:
    """The tasks of a suite with their data.

    Args:
        shots: examples before each question instead of the suite's own.
        include: a folder whose tasks replace the harness's of the same names; of SCROLLS, one with its zip files.

    Raises:
        ConfigError: data that cannot be loaded.
    """
    replaced = scrolls_tasks(include) if suite.name == "scrolls" else None
    shots = suite.shots if shots is None else shots
    return find_tasks(list(suite.tasks), include, shots=shots, folders=suite.folders, replaced=replaced)


def run_suite(lm: LinnetLM, suite: Suite, tasks: dict[str, Task], limit: int | None = None) -> tuple[Result, ...]:
    """Asks the tasks of a suite: the averages come first, under the suite's name, then every metric of every task."""
    results = run_tasks(lm, tasks, limit)
    return (*averages(suite, results), *results)


def counting(suite: Suite, results: Sequence[Result]) -> list[Result]:
    """The results that the suite's papers print, in their order."""
    if suite.by_question:
        (metrics,) = suite.tasks.values()
        return [one for one in results if one.metric in metrics and one.task != suite.name]
    found = {(one.task, one.metric): one for one in results}
    wanted = [(task, metric) for task, metrics in suite.tasks.items() for metric in metrics]
    return [found[place] for place in wanted if place in found]


def averages(suite: Suite, results: Sequence[Result]) -> list[Result]:
    """The suite's averages. Numbers that are missing or not finite (a task that failed) are dropped, as in 000."""
    numbers = [one for one in counting(suite, results) if math.isfinite(one.value)]
    if not numbers:
        return []
    if suite.by_question:
        items = [item._replace(id=f"{one.task}:{item.id}") for one in numbers for item in one.items]
        over_tasks = sum(one.value for one in numbers) / len(numbers)
        return [
            Result.of_items(suite.name, "average", items),
            Result(suite.name, "average_of_subjects", over_tasks, n=len(numbers)),
        ]
    found = []
    for name, left_out in (suite.averages or {}).items():
        kept = [one.value for one in numbers if one.task not in left_out]
        found.append(Result(suite.name, name, sum(kept) / len(kept), n=len(kept)))
    return found
