"""The value of a metric that guessing gives: the baseline for a share of right answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from lm_eval.api.task import Task

from linnet.evaluate.results import Result
from linnet.evaluate.tasks.suites import Suite, averages, counting

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
