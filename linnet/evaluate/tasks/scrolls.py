"""SCROLLS' seven tasks for lm-evaluation-harness, scored here (U. Shaham et al., arXiv:2201.03533; extra `eval`).

The harness's own tasks download a script that scores answers, and they need a part of transformers that release 5
removed. The tasks of this module use the same prompts and the same validation data. They score each answer between 0
and 1 with `linnet.evaluate.tasks.scrolls`; the score of a task is the mean.

Summaries and answers to QMSum, Qasper and NarrativeQA are generated up to the end of the line. QuALITY and ContractNLI
choose the answer with the highest log-likelihood per character. Questions of Qasper whose references are all yes or no
choose between these two words.
"""

import json
import re
import string
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from datasets import Dataset
from huggingface_hub import hf_hub_download
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask, Task

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer
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
        "metric_list": [{"metric": one, "aggregation": "mean", "higher_is_better": True} for one in kind.metrics],
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
