"""The suites of papers 000 and 001: their tasks, the metrics that count, the number of examples, and the averages.

* csr: commonsense reasoning without examples, seven tasks in 000 (Table 4) and 001 (Table 2).
* perplexity: WikiText-2 per word and LAMBADA on its last word (000, Table 4, which does not state its unit).
* scrolls: seven tasks over long texts without examples, with greedy decoding and contexts cut to the training length
  (000, section 3.4 and Tables 8 to 10; 001, Table 3). The average is over the thirteen numbers that the papers print.
* mmlu, ceval: five examples (001, Table 2). C-Eval publishes the answers of its validation split only.
"""

import json
import math
import re
import string
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from datasets import Dataset
from huggingface_hub import hf_hub_download
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask, Task

from linnet.config import refuse, unknown
from linnet.evaluate.harness import LinnetLM
from linnet.evaluate.results import Result
from linnet.evaluate.tasks import find_tasks, run_tasks

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


# SCROLLS' seven tasks for lm-evaluation-harness, scored here (U. Shaham et al., arXiv:2201.03533; extra `eval`).
#
# The harness's own tasks download a script that scores answers, and they need a part of transformers that release 5
# removed. The tasks of this module use the same prompts and the same validation data. They score each answer between 0
# and 1 with `linnet.evaluate.tasks.suites`; the score of a task is the mean.
#
# Summaries and answers to QMSum, Qasper and NarrativeQA are generated up to the end of the line. QuALITY and
# ContractNLI choose the answer with the highest log-likelihood per character. Questions of Qasper whose references are
# all yes or no choose between these two words.

# The metrics of SCROLLS (U. Shaham et al., arXiv:2201.03533), computed here: ROUGE and F1.
#
# The benchmark's own script is downloaded at each use. Here ROUGE comes from the package `rouge-score` (extra `eval`),
# without stemming. F1 compares answers after SQuAD's normalisation. A prediction is compared with each of
# its references, and the best value counts. All numbers lie between 0 and 1; papers print them in per cent.

ROUGES = ("rouge1", "rouge2", "rougeL")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """Returns an answer in SQuAD's normal form: lower case, no ASCII punctuation, no articles, single spaces."""
    bare = answer.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def f1(prediction: str, references: Sequence[str]) -> float:
    """Returns the best F1 of the words of prediction and reference after `normalise`; repeated words count repeatedly.

    F1 is 0 if no word is common, also for two empty answers (SQuAD 1.1, as in the benchmark).
    """
    return max(_f1(normalise(prediction).split(), normalise(reference).split()) for reference in references)


def rouge(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Returns ROUGE-1, -2 and -L by name: for each, the best F-measure over the references."""
    scores = [_scorer().score(reference, prediction) for reference in references]
    return {name: max(score[name].fmeasure for score in scores) for name in ROUGES}


def _f1(words: list[str], expected: list[str]) -> float:
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0


@lru_cache(maxsize=1)
def _scorer() -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer  # imports scipy.stats, which takes longer than most tasks' metrics

    return RougeScorer(list(ROUGES), use_stemmer=False)


REPOSITORY = "tau/scrolls"  # on the Hugging Face Hub: one zip file per data set
_RELATIONS = ["Not mentioned", "Entailment", "Contradiction"]
_OPTIONS = ("(A)", "(B)", "(C)", "(D)")


def scrolls_tasks(folder: str | Path | None = None) -> dict[str, Callable[[], Task]]:
    """Returns functions that make the seven tasks, by their names in the harness.

    Args:
        folder: a folder with zip files of the data sets (qasper.zip, ...); missing ones come from the hub.
    """
    return {name: partial(_Asked, config=_config(name, kind, folder)) for name, kind in _KINDS.items()}


class _Kind(NamedTuple):
    """One task.

    Attributes:
        data: name of the data set.
        read: (text of a document, its references) -> {"prompt", "choices"}.
        metrics: names of its metrics.
    """

    data: str
    read: Callable[[str, list[str]], dict]
    metrics: tuple[str, ...]


def _find(name: str, folder: str | Path | None) -> str | Path:
    if folder is not None and (path := Path(folder) / f"{name}.zip").is_file():
        return path
    return hf_hub_download(REPOSITORY, f"{name}.zip", repo_type="dataset")


def _config(name: str, kind: _Kind, folder: str | Path | None) -> dict:
    return {
        "task": name,
        "custom_dataset": lambda **_: {"validation": Dataset.from_list(_documents(kind, _find(kind.data, folder)))},
        "validation_split": "validation",
        "output_type": "generate_until",
        "doc_to_text": lambda document: document["prompt"],
        "doc_to_target": lambda document: " " + ", ".join(document["outputs"]),
        "generation_kwargs": {"until": ["\n"], "do_sample": False},
        "process_results": partial(_score, kind.metrics),
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in kind.metrics],
        "metadata": {"version": 2.0},
    }


class _Asked(ConfigurableTask):
    """A task that scores choices by likelihood; for documents without choices it generates the answer."""

    def guess(self, doc: dict) -> float:
        """Returns the score that guessing gives: 1 / number of choices, or 0 for a generated answer."""
        return 1 / len(doc["choices"]) if doc["choices"] else 0.0

    def construct_requests(self, doc: dict, ctx: str, **kwargs) -> list[Instance] | Instance:
        if not doc["choices"]:
            return super().construct_requests(doc, ctx, **kwargs)
        about = {key: value for key, value in kwargs.items() if key not in ("apply_chat_template", "chat_template")}
        return [
            Instance(request_type="loglikelihood", doc=doc, arguments=(ctx, f" {choice}"), idx=i, **about)
            for i, choice in enumerate(doc["choices"])
        ]


def _documents(kind: _Kind, path: str | Path) -> list[dict]:
    """Returns the validation split of a data set; rows with the same id are one question with several references."""
    outputs: dict[str, list[str]] = {}
    inputs: dict[str, str] = {}
    with zipfile.ZipFile(path) as archive, archive.open(f"{kind.data}/validation.jsonl") as lines:
        for line in lines:
            row = json.loads(line)
            inputs.setdefault(row["id"], row["input"])
            outputs.setdefault(row["id"], []).append(row["output"])
    return [{"id": id, "outputs": outputs[id], **kind.read(text, outputs[id])} for id, text in inputs.items()]


def _score(metrics: tuple[str, ...], document: dict, results: list) -> dict[str, float]:
    choices = document["choices"]
    if metrics == ("em",):
        by_length = [nats / len(choice) for (nats, _), choice in zip(results, choices, strict=True)]
        return {"em": float(choices[int(np.argmax(by_length))] == _plain(document["outputs"][0]))}
    answer = choices[int(np.argmax([nats for nats, _ in results]))] if choices else results[0]
    if metrics == ROUGES:
        return rouge(answer, document["outputs"])
    return {"f1": f1(answer if answer.strip() else "Unanswerable", document["outputs"])}


def _summary(text: str, outputs: list[str]) -> dict:
    return {"prompt": f"{text}\n\nQuestion: What is a summary of the preceding text?\nAnswer:", "choices": []}


def _question(text: str, outputs: list[str], choices: Iterable[str] = ()) -> dict:
    question, _, rest = text.partition("\n\n")
    return {"prompt": f"{rest}\n\nQuestion: {question}\nAnswer:", "choices": list(choices)}


def _qasper(text: str, outputs: list[str]) -> dict:
    yes_or_no = all(normalise(output) in ("yes", "no") for output in outputs)
    return _question(text, outputs, ("yes", "no") if yes_or_no else ())


def _quality(text: str, outputs: list[str]) -> dict:
    """Reads a document of QuALITY, whose four choices lie between the question and the story."""
    question, _, rest = text.partition("\n\n")
    end = rest.find("\n\n", rest.find("(D)"))
    listed, story = rest[:end], rest[end:].strip()
    places = [listed.index(option) for option in _OPTIONS]
    ends = [*places[1:], len(listed)]
    choices = [_plain(listed[place + 3 : stop]) for place, stop in zip(places, ends, strict=True)]
    return {"prompt": f"{story}\n\nQuestion: {question}\nAnswer:", "choices": choices}


def _contract(text: str, outputs: list[str]) -> dict:
    hypothesis, _, rest = text.partition("\n\n")
    return {"prompt": f"{rest}\n\nHypothesis: {hypothesis}\nConclusion:", "choices": _RELATIONS}


def _plain(answer: str) -> str:
    return " ".join(answer.split())


_KINDS = {
    "scrolls_govreport": _Kind("gov_report", _summary, ROUGES),
    "scrolls_summscreenfd": _Kind("summ_screen_fd", _summary, ROUGES),
    "scrolls_qmsum": _Kind("qmsum", _question, ROUGES),
    "scrolls_qasper": _Kind("qasper", _qasper, ("f1",)),
    "scrolls_narrativeqa": _Kind("narrative_qa", _question, ("f1",)),
    "scrolls_quality": _Kind("quality", _quality, ("em",)),
    "scrolls_contractnli": _Kind("contract_nli", _contract, ("em",)),
}


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
        {name: kind.metrics for name, kind in _KINDS.items()},
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
        return [result for result in results if result.metric in metrics and result.task != suite.name]
    by_place = {(result.task, result.metric): result for result in results}
    wanted = [(task, metric) for task, metrics in suite.tasks.items() for metric in metrics]
    return [by_place[place] for place in wanted if place in by_place]


def averages(suite: Suite, results: Sequence[Result]) -> list[Result]:
    """Returns the suite's averages. As in paper 000, they skip values that are missing or not finite."""
    numbers = [result for result in counting(suite, results) if math.isfinite(result.value)]
    if not numbers:
        return []
    if suite.by_question:
        items = [item._replace(id=f"{result.task}:{item.id}") for result in numbers for item in result.items]
        over_tasks = sum(result.value for result in numbers) / len(numbers)
        return [
            Result.of_items(suite.name, "average", items),
            Result(suite.name, "average_of_subjects", over_tasks, n=len(numbers)),
        ]
    means = []
    for name, left_out in (suite.averages or {}).items():
        kept = [result.value for result in numbers if result.task not in left_out]
        means.append(Result(suite.name, name, sum(kept) / len(kept), n=len(kept)))
    return means


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
    baselines: dict[tuple[str, str], float] = {}
    for name, task in tasks.items():
        metrics = [result.metric for result in results if result.task == name]
        if task.OUTPUT_TYPE == "multiple_choice":
            if task.get_config("process_results") is not None:  # its own score, such as the mass of all right answers
                continue
            shares = [_guess(task, doc) for doc in islice(task.eval_docs, limit)]
            baselines |= {(name, metric): sum(shares) / len(shares) for metric in metrics if metric in PICKED}
        else:
            guess = getattr(task, "guess", None)  # tasks of SCROLLS have it, since some of their questions have choices
            shares = [guess(doc) for doc in islice(task.eval_docs, limit)] if guess is not None else [0.0]
            free = sum(shares) / len(shares)
            baselines |= {(name, metric): free for metric in metrics if metric.partition(",")[0] in FOUND}
    if suite is None:
        return baselines
    guessed = [
        replace(result, value=baselines[result.task, result.metric], items=())
        for result in results
        if _place(result) in baselines
    ]
    if suite.by_question:
        wanted = [result.value for result in counting(suite, guessed)]
        return baselines | {
            _place(result): sum(wanted) / len(wanted) for result in results if result.task == suite.name and wanted
        }
    if len(counting(suite, guessed)) == len(counting(suite, results)):
        baselines |= {_place(result): result.value for result in averages(suite, guessed)}
    return baselines


def _guess(task: Task, doc: Mapping[str, Any]) -> float:
    """Returns the share of a question's choices that are right; a list of answers has several."""
    answer = task.doc_to_target(doc)
    return (len(set(answer)) if isinstance(answer, list) else 1) / len(task.doc_to_choice(doc))


def _place(result: Result) -> tuple[str, str]:
    return result.task, result.metric
