"""The record of an evaluation: what was asked of which model, the numbers, and the score of every item.

Each evaluation is two files in `RUN/evaluations`, whose name begins with its kind ("text", "needle", a suite, ...):

    KIND-DIGEST.json    what `Evaluation.to_dict` gives; the digest is of `asked` and of the checkpoint's step
    KIND-DIGEST.csv     a row an item of each result: task,metric,id,score,weight

    {"format": 1, "kind": "csr",
     "model": {"run", "architecture", "params_total", "params_non_embedding", "tokenizer",   # None where not known
               "step", "tokens", "flops",                                                    # at that checkpoint
               "trained", "evaluated"},                                                      # date and environment
     "asked": {...},                                                                         # settings, of that kind
     "results": [{"task", "metric", "value", "n", "better": "higher" | "lower", "average": "mean" | "exp" | null}],
     "items": "csr-1a2b3c4d5e6f.csv",
     "detail": {...}}                                                                        # more of that kind

`value` is the weighted mean of the items' scores (`"mean"`), or its exponential (`"exp"`, of perplexities), or no mean
of items at all (null, then there are none). Results of two models can be paired where task, metric and ids agree.
"""

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from linnet import provenance
from linnet.config import ConfigError, digest, gather
from linnet.runs import RunFolder
from linnet.runs.files import write_atomic
from linnet.runs.record import plain

if TYPE_CHECKING:  # what was measured is read without torch
    from linnet.runs.model import Loaded

FOLDER = "evaluations"
FORMAT = 1
_COLUMNS = ("task", "metric", "id", "score", "weight")


class OtherFormatError(ConfigError):
    """A JSON file that is not an evaluation of this format."""


class Item(NamedTuple):
    """The score of one question, document or cell; `weight` is what it counts in the mean (bytes, words, 1)."""

    id: str
    score: float
    weight: float = 1.0


@dataclass(frozen=True)
class Result:
    """A number, and the items that it is the average of.

    Attributes:
        average: "mean": of the scores, weighted; "exp": its exponential; None: of no items, which then are empty.
        n: how many items there were, for a result that does not keep them.
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
        """The average of items. Raises ValueError where they weigh nothing together."""
        items = tuple(items)
        weight = math.fsum(item.weight for item in items)
        if not weight:
            raise ValueError(f"{task}, {metric}: there are no items that weigh anything")
        mean = math.fsum(item.score * item.weight for item in items) / weight
        return cls(task, metric, math.exp(min(mean, 700.0)) if average == "exp" else mean, items, better, average,
                   len(items))  # fmt: skip

    def to_dict(self) -> dict:
        """Without the items."""
        names = ("task", "metric", "value", "n", "better", "average")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Evaluation:
    """What was asked of which model, and what came of it; see the top of this module."""

    kind: str
    model: dict[str, Any]
    asked: dict[str, Any]
    results: tuple[Result, ...]
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of its files, without their endings."""
        return f"{self.kind}-{digest({'asked': plain(self.asked), 'step': self.model.get('step')})}"

    def to_dict(self) -> dict:
        """What the JSON file holds."""
        values = {"format": FORMAT, "kind": self.kind, "model": self.model, "asked": self.asked}
        values |= {"results": [result.to_dict() for result in self.results]}
        return plain(values | {"items": f"{self.name}.csv", "detail": self.detail})

    def save(self, run: str | Path) -> Path:
        """Writes both files into `RUN/evaluations`, whole or not at all, over those of the same name.

        Returns:
            the JSON file.

        Raises:
            OSError: they cannot be written.
        """
        folder = Path(run) / FOLDER
        folder.mkdir(exist_ok=True)
        table = io.StringIO()
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for result in self.results:
            writer.writerows((result.task, result.metric, *item) for item in result.items)
        write_atomic(folder / f"{self.name}.csv", table.getvalue())
        path = folder / f"{self.name}.json"  # last: where it is, the items are
        write_atomic(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        return path


def read_evaluation(path: str | Path) -> Evaluation:
    """An evaluation from its JSON file, with its items.

    Raises:
        ConfigError: a file that is not there, or is damaged. OtherFormatError: one that is not of this format.
    """
    path = Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            message = f"{path}: not an evaluation of format {FORMAT}; delete it, or evaluate again"
            raise OtherFormatError([message], "evaluations")
        items: dict[tuple[str, str], list[Item]] = {}
        with open(path.with_name(values["items"]), encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                item = Item(row["id"], float(row["score"]), float(row["weight"]))
                items.setdefault((row["task"], row["metric"]), []).append(item)
        results = tuple(
            Result(
                **{**one, "value": math.nan if one["value"] is None else one["value"]},
                items=tuple(items.get((one["task"], one["metric"]), ())),
            )
            for one in values["results"]
        )
        return Evaluation(values["kind"], values["model"], values["asked"], results, values["detail"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        message = f"{path}: cannot be read ({type(error).__name__}: {error}); delete it, or evaluate again"
        raise ConfigError([message], "evaluations") from None


def read_evaluations(run: str | Path, problems: list[str] | None = None) -> list[Evaluation]:
    """All evaluations of a run or model folder, by name; those of other formats are left out.

    Args:
        problems: takes what is wrong with damaged files, which then are left out.

    Raises:
        ConfigError: all files that are damaged, where `problems` is None.
    """
    found, damaged = [], []
    for path in sorted((Path(run) / FOLDER).glob("*.json")):
        with gather(damaged), contextlib.suppress(OtherFormatError):
            found.append(read_evaluation(path))
    if problems is not None:
        problems += damaged
    elif damaged:
        raise ConfigError(damaged, "evaluations")
    return found


def describe_model(folder: RunFolder, loaded: "Loaded") -> dict[str, Any]:
    """Which model was evaluated: `model` of the record. A model folder has no step, tokens and FLOPs."""
    from linnet.models import count_parameters

    total, outside = count_parameters(loaded.model.config)
    result = {}
    with contextlib.suppress(ConfigError):  # not done, or a model folder
        result = folder.result()
    step = loaded.step
    tokens = flops = None
    if step is not None:
        counted = [row for row in folder.metrics() if row.get("step") and {"tokens", "flops"} <= row.keys()]
        if counted:  # both grow with the steps alone
            tokens, flops = (counted[-1][name] / counted[-1]["step"] * step for name in ("tokens", "flops"))
            tokens = round(tokens)
    return {
        "run": folder.path.resolve().name,
        "architecture": folder.config.get("architecture"),
        "params_total": total,
        "params_non_embedding": outside,
        "tokenizer": None if loaded.tokenizer is None else loaded.tokenizer.digest,
        "step": step,
        "documents": loaded.documents,
        "tokens": tokens,
        "flops": flops,
        "trained": {key: result[key] for key in ("date", "environment") if key in result},
        "evaluated": provenance.stamp(next(loaded.model.parameters()).device),
    }
