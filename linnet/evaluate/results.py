"""The record of an evaluation: what was asked of which model, the numbers, and the score of every item.

Each evaluation is two files in `RUN/evaluations`, whose name begins with its kind ("text", "needle", a suite, ...):

    KIND-DIGEST.json    the output of `Evaluation.to_dict`; the digest is of `asked`, `scored` and the checkpoint's step
    KIND-DIGEST.csv     one row per item of each result: task,metric,id,score,weight

    {"format": 1, "kind": "csr",
     "model": {"run", "architecture", "params_total", "params_non_embedding", "tokenizer",   # None where not known
               "step", "tokens", "flops",                                                    # at that checkpoint
               "trained", "evaluated"},                                                      # date and environment
     "asked": {...},                                                                         # settings, of that kind
     "scored": "1a2b3c4d5e6f",                                         # digest of the texts, questions or needles
     "results": [{"task", "metric", "value", "n", "better": "higher" | "lower", "average": "mean" | "exp" | null}],
     "items": "csr-1a2b3c4d5e6f.csv",
     "detail": {...}}                                                                        # more of that kind

`scored` is a digest of what the model was asked: the bytes of texts, the questions and prompts of tasks, the sentences
and seeds of needles, the sequences of recall. It does not depend on the model or its tokenizer. Results of two models
are compared only if it agrees. Records of Linnet 0.1 do not have it (None).

`average` relates `value` to the items. "mean": `value` is the weighted mean of their scores. "exp": it is the
exponential of that mean (perplexities). null: there are no items. Items of two models can be paired if task, metric
and id agree.
"""

import contextlib
import csv
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from linnet import provenance
from linnet.config import ConfigError, digest, gather, load_json
from linnet.runs import RunFolder
from linnet.runs.files import csv_text, read_csv, write_atomic
from linnet.runs.record import plain

if TYPE_CHECKING:  # records are read without torch
    from linnet.runs.model import Loaded

FOLDER = "evaluations"
FORMAT = 1
_COLUMNS = ("task", "metric", "id", "score", "weight")


def digest_of(parts: Iterable[bytes | str]) -> str:
    """Returns `scored` of a record: a digest of the parts, in their order."""
    sha256 = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha256.update(len(data).to_bytes(8, "big") + data)
    return sha256.hexdigest()[:12]


class OtherFormatError(ConfigError):
    """A JSON file that is not an evaluation of this format."""


class Item(NamedTuple):
    """The score of one question, document or cell, and its weight in the mean (bytes, words or 1)."""

    id: str
    score: float
    weight: float = 1.0


@dataclass(frozen=True)
class Result:
    """A number, and the items of which it is the average.

    Attributes:
        average: "mean": `value` is the weighted mean of the scores. "exp": it is the exponential of this mean. None:
            `items` is empty.
        n: number of items, also for a result that does not keep them.
    """

    task: str
    metric: str
    value: float
    items: tuple[Item, ...] = ()
    better: Literal["higher", "lower"] = "higher"
    average: Literal["mean", "exp"] | None = None
    n: int = 0

    @classmethod
    def of_items(
        cls,
        task: str,
        metric: str,
        items: Iterable[Item],
        better: Literal["higher", "lower"] = "higher",
        average: Literal["mean", "exp"] = "mean",
    ) -> "Result":
        """Returns the average of items. Raises ValueError if the sum of their weights is 0."""
        items = tuple(items)
        weight = math.fsum(item.weight for item in items)
        if not weight:
            raise ValueError(f"{task}, {metric}: the weights of the items sum to 0; give items with weights above 0")
        mean = math.fsum(item.score * item.weight for item in items) / weight
        return cls(task, metric, math.exp(min(mean, 700.0)) if average == "exp" else mean, items, better, average,
                   len(items))  # fmt: skip

    def to_dict(self) -> dict:
        """Returns all fields but the items."""
        names = ("task", "metric", "value", "n", "better", "average")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Evaluation:
    """The record of an evaluation; the top of this module describes its fields."""

    kind: str
    model: dict[str, Any]
    asked: dict[str, Any]
    results: tuple[Result, ...]
    detail: dict[str, Any] = field(default_factory=dict)
    scored: str | None = None

    @property
    def name(self) -> str:
        """The name of its files, without suffix."""
        about = {"asked": plain(self.asked), "step": self.model.get("step")}
        return f"{self.kind}-{digest(about if self.scored is None else about | {'scored': self.scored})}"

    def to_dict(self) -> dict:
        """Returns the content of the JSON file."""
        values = {"format": FORMAT, "kind": self.kind, "model": self.model, "asked": self.asked, "scored": self.scored}
        values |= {"results": [result.to_dict() for result in self.results]}
        return plain(values | {"items": f"{self.name}.csv", "detail": self.detail})

    def save(self, run: str | Path) -> Path:
        """Writes both files into `RUN/evaluations`, each in one atomic step; files of the same name are replaced.

        Returns:
            the path of the JSON file.

        Raises:
            OSError: a file cannot be written.
        """
        folder = Path(run) / FOLDER
        folder.mkdir(exist_ok=True)
        rows = ({"task": r.task, "metric": r.metric, **item._asdict()} for r in self.results for item in r.items)
        write_atomic(folder / f"{self.name}.csv", csv_text(_COLUMNS, rows))
        path = folder / f"{self.name}.json"  # written last, so that its items exist
        write_atomic(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        return path


def shown_score(value: float) -> str:
    """A score: four decimals, none from 1,000 on, four digits from a million on. 571676.04 -> 571,676."""
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.4g}"


def read_evaluation(path: str | Path) -> Evaluation:
    """Reads an evaluation from its JSON file, with its items.

    Raises:
        ConfigError: a file is missing or damaged.
        OtherFormatError: the file is not an evaluation of this format.
    """
    path = Path(path)
    try:
        values = load_json(path)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            message = f"{path}: not an evaluation of format {FORMAT}; delete the file, or evaluate again"
            raise OtherFormatError([message], "evaluations")
        items: dict[tuple[str, str], list[Item]] = {}
        for row in read_csv(path.with_name(values["items"])):
            item = Item(row["id"], float(row["score"]), float(row["weight"]))
            items.setdefault((row["task"], row["metric"]), []).append(item)
        results = tuple(
            Result(
                **{**fields, "value": math.nan if fields["value"] is None else fields["value"]},
                items=tuple(items.get((fields["task"], fields["metric"]), ())),
            )
            for fields in values["results"]
        )
        kept = (values["kind"], values["model"], values["asked"], results, values["detail"], values.get("scored"))
        return Evaluation(*kept)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        message = f"{path}: cannot be read ({type(error).__name__}: {error}); delete the file, or evaluate again"
        raise ConfigError([message], "evaluations") from None


def read_evaluations(run: str | Path, problems: list[str] | None = None) -> list[Evaluation]:
    """Returns all evaluations of a run or model folder, in the order of their names; other formats are skipped.

    Args:
        run: the folder.
        problems: if given, damaged files are skipped, and their problems are appended to this list.

    Raises:
        ConfigError: files are damaged and `problems` is None; all of them are named.
    """
    evaluations, damaged = [], []
    for path in sorted((Path(run) / FOLDER).glob("*.json")):
        with gather(damaged), contextlib.suppress(OtherFormatError):
            evaluations.append(read_evaluation(path))
    if problems is not None:
        problems += damaged
    elif damaged:
        raise ConfigError(damaged, "evaluations")
    return evaluations


def describe_model(folder: RunFolder, loaded: "Loaded") -> dict[str, Any]:
    """Returns `model` of the record, which describes the evaluated model.

    Step, tokens and FLOPs are None for a model folder. A model of images has `images`, and no tokens.
    """
    from linnet.models import count_parameters

    total, outside = count_parameters(loaded.model.config)
    result = {}
    with contextlib.suppress(ConfigError):  # an unfinished run or a model folder has no result
        result = folder.result()
    step = loaded.step
    rows = [row for row in folder.metrics() if row.get("step")] if step is not None else []
    read: dict[str, float | None] = {"tokens": None, "flops": None}
    for name in ("tokens", "images", "flops"):
        if counted := [row for row in rows if name in row]:
            # They grow in proportion to the step, but not while the batch grows (`batch_ramp`).
            row = min(counted, key=lambda row: abs(row["step"] - step))
            value = row[name] / row["step"] * step
            read[name] = value if name == "flops" else round(value)
    return {
        "run": folder.path.resolve().name,
        "architecture": folder.config.get("architecture"),
        "params_total": total,
        "params_non_embedding": outside,
        "tokenizer": None if loaded.tokenizer is None else loaded.tokenizer.digest,
        "step": step,
        "documents": loaded.documents,
        **read,
        "trained": {key: result[key] for key in ("date", "environment") if key in result},
        "evaluated": provenance.stamp(next(loaded.model.parameters()).device),
    }
