"""Leaves out the documents with the worst scores, a share of each source.

Sources differ in their scores (code is easier to predict than prose), so one threshold for all would mostly cut one of
them. Low scores are repetitions more often than good text; the low tail is shown, and cut only on request (`low`).
"""

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from linnet.config import Config, ConfigError
from linnet.corpus.documents import Document, Part, Samples, read_part
from linnet.corpus.scoring.score import LETTERS, NATS
from linnet.corpus.stage import Progress, open_stage

SHOWN = 3  # documents at each end of the scores of a source, and on each side of a cut
CLIPPED = 200  # most characters of a document that is shown
QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
ALL = "all"  # name of the only group with `by: all`
Per = Literal["byte", "letter"]
KEYS: dict[Per, str] = {"byte": NATS, "letter": LETTERS}


class FilterConfig(Config):
    """Which documents are left out."""

    keep: float = Field(0.9, gt=0, le=1, description="share of the scored documents at or below the upper threshold")
    low: float = Field(0.0, ge=0, lt=1, description="share of the scored documents with the lowest scores to leave out")
    by: Literal["source", "all"] = Field("source", description="whether each source has thresholds of its own")
    per: Per = Field("letter", description="the score: nats per letter, which treats all alphabets alike, or per byte")

    @field_validator("low")
    @classmethod
    def _leaves_some(cls, low: float, info: ValidationInfo) -> float:
        if low >= info.data.get("keep", 1):
            raise ValueError(f"{low:g} leaves nothing of the share {info.data['keep']:g} that `keep` keeps; use less")
        return low


@dataclass(frozen=True)
class Cut:
    """Scores outside of [low, high] are left out. None: no bound."""

    low: float | None
    high: float | None

    def drops(self, score: float) -> str | None:
        """Returns the tail to which a score belongs, None if its document is kept."""
        if self.high is not None and score > self.high:
            return "high tail"
        return "low tail" if self.low is not None and score < self.low else None


def find_cut(scores: Sequence[float], keep: float, low: float = 0.0) -> Cut:
    """Returns the thresholds of one group. Documents with the score of a threshold are kept.

    Args:
        scores: nats per letter or byte, in any order.
        keep, low: as in `FilterConfig`.
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64))
    n = len(ordered)
    kept, dropped = min(n, math.ceil(round(keep * n, 9))), math.floor(round(low * n, 9))
    high = float(ordered[kept - 1]) if 0 < kept < n else None
    return Cut(float(ordered[dropped]) if 0 < dropped < n else None, high)


def filter_stage(
    sources: Sequence[str],
    out: Path,
    settings: FilterConfig,
    *,
    workers: int = 1,
    engine: str = "local",
    anew: bool = False,
    progress: Progress | None = None,
) -> dict:
    """Writes the documents that are kept. Returns the content of `stage.json`, whose `results` has the thresholds,
    quantiles and both tails of each source.

    Raises:
        ConfigError: all problems of sources and `out`; or no document has a score.
    """
    with open_stage("filter", list(sources), out, settings, anew=anew) as stage:
        if stage.done:
            return stage.finish()
        files = stage.map(
            "scores", ReadScores(settings.by, settings.per), workers=workers, engine=engine, progress=progress
        )
        found = _merged([json.loads(path.read_text(encoding="utf-8")) for path in files])
        if not found:
            problem = f"SOURCE: no document of {', '.join(sources)} has a score per {settings.per}"
            raise ConfigError([f"{problem}; run `linnet corpus score` first"], "filter")
        cuts = {name: find_cut(group["scores"], settings.keep, settings.low) for name, group in found.items()}
        keep = KeepDocuments(settings.by, settings.per, tuple(cuts.items()))
        stage.write(keep, workers=workers, engine=engine, progress=progress)
        return stage.finish({name: _described(group, cuts[name]) for name, group in sorted(found.items())})


def score_of(document: Document, per: Per = "letter") -> float | None:
    """Returns the score of a document, None if it has none."""
    score = document.extra.get(KEYS[per])
    return float(score) if isinstance(score, int | float) and not isinstance(score, bool) else None


@dataclass(frozen=True)
class ReadScores:
    """Reads the scores of a part, and the documents at both ends: JSON {group: {"scores", "lowest", "highest"}}."""

    by: str
    per: Per

    def __call__(self, part: Part) -> bytes:
        found: dict[str, dict[str, Any]] = {}
        for document in read_part(part, Counter()):
            if (score := score_of(document, self.per)) is None:
                continue
            group = found.setdefault(_group(document, self.by), {"scores": [], "lowest": [], "highest": []})
            group["scores"].append(score)
            for name, sign in (("lowest", -1), ("highest", 1)):
                _push(group[name], sign * score, document, score)
        for group in found.values():
            for name in ("lowest", "highest"):
                group[name] = [shown for *_, shown in sorted(group[name], reverse=True)]
        return json.dumps(found, ensure_ascii=False).encode()


@dataclass(frozen=True)
class KeepDocuments:
    """The second pass: yields the documents within the thresholds of their groups, and those without a score."""

    by: str
    per: Per
    cuts: tuple[tuple[str, Cut], ...]

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]:
        cuts = dict(self.cuts)
        for document in read_part(part, counts, samples):
            score = score_of(document, self.per)
            tail = None if score is None else cuts[_group(document, self.by)].drops(score)
            if score is None:
                counts["kept.without a score"] += 1
            if tail is None:
                yield document
            else:
                counts[f"left out.{tail}"] += 1
                samples.add(f"left out.{tail}", document, score=score, text=document.text)


def _group(document: Document, by: str) -> str:
    return document.source if by == "source" else ALL


def _shown(document: Document, score: float) -> dict:
    text = document.text[:CLIPPED]
    return {"score": score, "source": document.source, "file": document.file, "row": document.row, "text": text}


def _push(heap: list, key: float, document: Document, score: float) -> None:
    """Keeps the entries with the `SHOWN` largest keys; among equal ones the first that came."""
    # The second number orders equal keys by their arrival. It differs between the entries modulo SHOWN, hence always.
    if len(heap) < SHOWN:
        heapq.heappush(heap, (key, -len(heap), _shown(document, score)))
    elif key > heap[0][0]:
        heapq.heapreplace(heap, (key, heap[0][1] - SHOWN, _shown(document, score)))


def _merged(parts: list[Mapping[str, Any]]) -> dict[str, dict[str, list]]:
    """Joins what `ReadScores` found in each part, in the order of the parts."""
    found: dict[str, dict[str, list]] = {}
    for part in parts:
        for name, group in part.items():
            own = found.setdefault(name, {"scores": [], "lowest": [], "highest": []})
            for key in own:
                own[key] += group[key]
    for own in found.values():
        own["lowest"] = sorted(own["lowest"], key=lambda one: one["score"])[:SHOWN]
        own["highest"] = sorted(own["highest"], key=lambda one: -one["score"])[:SHOWN]
    return found


def _described(group: Mapping[str, list], cut: Cut) -> dict:
    scores = np.asarray(group["scores"])
    return {
        "scored": len(scores),
        "above": int((scores > cut.high).sum()) if cut.high is not None else 0,
        "below": int((scores < cut.low).sum()) if cut.low is not None else 0,
        "low": cut.low,
        "high": cut.high,
        "quantiles": {f"{q:g}": round(float(np.quantile(scores, q)), 6) for q in QUANTILES},
        "lowest": group["lowest"],
        "highest": group["highest"],
    }
