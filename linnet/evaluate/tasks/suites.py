"""The suites of papers 000 and 001: their tasks, the metrics that count, the number of examples, and the averages.

* csr: commonsense reasoning without examples, seven tasks in 000 (Table 4) and 001 (Table 2).
* perplexity: WikiText-2 per word and LAMBADA on its last word (000, Table 4, which does not state its unit).
* scrolls: seven tasks over long texts without examples, with greedy decoding and contexts cut to the training length
  (000, section 3.4 and Tables 8 to 10; 001, Table 3). The average is over the thirteen numbers that the papers print.
* mmlu, ceval: five examples (001, Table 2). C-Eval publishes the answers of its validation split only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from lm_eval.api.task import Task

from linnet.config import refuse, unknown
from linnet.evaluate.harness import LinnetLM
from linnet.evaluate.results import Result
from linnet.evaluate.tasks import find_tasks, run_tasks
from linnet.evaluate.tasks.scrolls import scrolls_tasks

# These tasks carry little signal below 7B. In Table 4 of paper 000, every BoolQ score of a smaller model is below the
# share of the most frequent answer (62.2 %), and up to 410M no score of WinoGrande (two choices) or ARC-challenge (four
# choices) is more than 2.5 points above guessing. The papers keep these tasks; Linnet adds an average without them.
WITHOUT_SIGNAL = ("boolq", "winogrande", "arc_challenge")


@dataclass(frozen=True)
class Suite:
    """A suite of tasks.

    Attributes:
        tasks: names of tasks or groups of the harness, each with the metrics that count.
        folders: folders of the harness that contain the tasks.
        shots: examples before each question; None leaves it to the tasks.
        cut: whether contexts are cut to the training length, as in the papers; otherwise long ones are an error.
        averages: name of an average -> tasks left out of it. All metrics that count have equal weight.
        by_question: for a group of tasks (MMLU): report the average over questions first, then the one over tasks.
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
            "average_without_boolq": ("boolq",),  # the six tasks of papers 002 and 003
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
    """Returns the suite of that name. Raises `ConfigError` with the nearest known name."""
    refuse(unknown("suite:", [name], SUITES), "evaluate")
    return SUITES[name]


def load_suite(suite: Suite, shots: int | None = None, include: str | Path | None = None) -> dict[str, Task]:
    """Returns the tasks of a suite by name, with their data.

    Args:
        suite: the suite.
        shots: examples before each question; None is the suite's own number.
        include: a folder whose tasks replace the harness's tasks of the same names; for SCROLLS, a folder with its
            zip files.

    Raises:
        ConfigError: data cannot be loaded.
    """
    replaced = scrolls_tasks(include) if suite.name == "scrolls" else None
    shots = suite.shots if shots is None else shots
    return find_tasks(list(suite.tasks), include, shots=shots, folders=suite.folders, replaced=replaced)


def run_suite(lm: LinnetLM, suite: Suite, tasks: dict[str, Task], limit: int | None = None) -> tuple[Result, ...]:
    """Asks the tasks of a suite and returns its averages (with the suite's name as task), then all metrics."""
    results = run_tasks(lm, tasks, limit)
    return (*averages(suite, results), *results)


def counting(suite: Suite, results: Sequence[Result]) -> list[Result]:
    """Returns the results that the papers print, in the papers' order."""
    if suite.by_question:
        (metrics,) = suite.tasks.values()
        return [one for one in results if one.metric in metrics and one.task != suite.name]
    found = {(one.task, one.metric): one for one in results}
    wanted = [(task, metric) for task, metrics in suite.tasks.items() for metric in metrics]
    return [found[place] for place in wanted if place in found]


def averages(suite: Suite, results: Sequence[Result]) -> list[Result]:
    """Returns the suite's averages. As in paper 000, they skip values that are missing or not finite."""
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


# The value of a metric that guessing gives: the baseline for a share of right answers.

PICKED = ("acc", "acc_norm", "acc_bytes")  # metrics of questions with choices
FOUND = ("exact_match", "em", "f1", "acc")  # metrics of generated answers, which cannot be guessed


def chances(
    tasks: Mapping[str, Task], results: Sequence[Result], suite: Suite | None = None, limit: int | None = None
) -> dict[tuple[str, str], float]:
    """Returns (task, metric) -> the value that guessing gives, for each result that is a share of right answers.

    Args:
        tasks: the tasks that were asked, with their questions.
        results: the results of the tasks, and the averages of `suite`.
        suite: the suite of the tasks; None if they were asked by name.
        limit: only the first `limit` questions of each task were asked; None means all of them.
    """
    found = {}
    for name, task in tasks.items():
        own = [one.metric for one in results if one.task == name]
        if task.OUTPUT_TYPE == "multiple_choice":
            shares = [1 / len(task.doc_to_choice(doc)) for doc in islice(task.eval_docs, limit)]
            found |= {(name, metric): sum(shares) / len(shares) for metric in own if metric in PICKED}
        else:
            guess = getattr(task, "guess", None)  # tasks of SCROLLS have it, since some of their questions have choices
            shares = [guess(doc) for doc in islice(task.eval_docs, limit)] if guess is not None else [0.0]
            free = sum(shares) / len(shares)
            found |= {(name, metric): free for metric in own if metric.partition(",")[0] in FOUND}
    if suite is None:
        return found
    guessed = [replace(one, value=found[one.task, one.metric], items=()) for one in results if _place(one) in found]
    if suite.by_question:
        wanted = [one.value for one in counting(suite, guessed)]
        return found | {_place(one): sum(wanted) / len(wanted) for one in results if one.task == suite.name and wanted}
    if len(counting(suite, guessed)) == len(counting(suite, results)):
        found |= {_place(one): one.value for one in averages(suite, guessed)}
    return found


def _place(result: Result) -> tuple[str, str]:
    return result.task, result.metric
