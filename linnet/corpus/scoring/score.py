"""Nats per byte of every document, with the state carried from its beginning to its end.

A model predicts its own training text too well. With two models, each document is therefore scored by the one that was
trained on the other half (`half_of`). Documents under `SHORT` bytes are too noisy to be scored; they are kept.
"""

import functools
import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator

from linnet.config import Config, ConfigError, checking, gather, refuse
from linnet.corpus.documents import Document, Part, Samples, read_part
from linnet.corpus.stage import Progress, open_stage, run_stage
from linnet.evaluate.likelihood import log_likelihoods
from linnet.evaluate.texts import Document as ScoredText
from linnet.evaluate.texts import first_token, natural_method, score_text
from linnet.inference.prefix import weights_digest
from linnet.models import CausalLM
from linnet.runs import RunFolder
from linnet.runs.model import TEXT, load_checkpoint, read_config, read_tokenizer
from linnet.train.device import use_threads

NATS = "nats_per_byte"  # keys of the scores in `Document.extra`
LETTERS = "nats_per_letter"
SHORT = 64  # bytes from which a document is scored
LONG = 1 << 14  # tokens from which a document is read alone, in chunks
DIGITS = 6  # decimals of a score
GROUP = 1024  # most documents that are put in order of their length at a time
GROUP_BYTES = 8 << 20  # most bytes of text of a group


class ScoreConfig(Config):
    """What the scores depend on, besides the documents.

    Attributes:
        models: digests of the configurations and weights of the models.
        seed: of the halves, if there are two models.
        device: kind of the device, cpu or cuda; another one changes scores by rounding.
        precision: number format of weights and products.
        shortest: bytes from which a document is scored.
    """

    models: list[str]
    seed: int
    device: str
    precision: str
    shortest: int = SHORT


def half_of(text: str, seed: int = 0) -> int:
    """Returns the half of a document, 0 or 1. It depends on the text alone, so copies are in the same half."""
    key = seed.to_bytes(8, "little")
    return hashlib.blake2b(text.encode(), digest_size=1, key=key).digest()[0] & 1


def letters(text: str) -> int:
    """Returns the length of a text in which a character of two bytes of UTF-8 counts once, and any other as its bytes.

    Letters of Latin, Greek, Cyrillic, Hebrew and Arabic are then one each, in ASCII or not. Characters of three and
    four bytes (Han, kana, Hangul, symbols) say more than a letter, about as much as their bytes.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    return len(text.encode()) - int(((codes >= 0x80) & (codes < 0x800)).sum())


def score_stage(
    sources: Sequence[str],
    models: Sequence[str | Path],
    out: Path,
    *,
    seed: int = 0,
    device: str = "cpu",
    precision: str = "float32",
    workers: int = 1,
    engine: str = "local",
    text_key: str = "text",
    anew: bool = False,
    allow_plugins: bool = False,
    progress: Progress | None = None,
) -> dict:
    """Writes the documents of sources with their scores. Returns the content of `stage.json`.

    Args:
        models: one run or model folder; or two, of which the first was trained on the documents of half 0 and the
            second on those of half 1 (`half_of` with the same seed).
        device: device of the models. A CPU uses one thread per worker, so that scores do not depend on their number.
        workers, engine: as in `linnet.data.parts.run_parts`; with Ray, all machines see the folders of the models.

    Raises:
        ConfigError: all problems of models, sources and `out`; or a model's logits are not finite.
    """
    check_models(models, device, workers, allow_plugins)
    work = ScoreDocuments(tuple(str(path) for path in models), seed, device, precision, allow_plugins)
    digests = [scorer.digest for scorer in work.scorers()]
    settings = ScoreConfig(models=digests, seed=seed, device=device.partition(":")[0], precision=precision)
    return run_stage(
        "score",
        list(sources),
        out,
        settings,
        work,
        workers=workers,
        engine=engine,
        text_key=text_key,
        anew=anew,
        progress=progress,
    )


def check_models(models: Sequence[str | Path], device: str, workers: int, allow_plugins: bool = False) -> None:
    """Raises ConfigError with all models that cannot score text, before weights are read."""
    problems: list[str] = []
    if not 1 <= len(models) <= 2:
        problems.append(f"--model: {len(models)} models are given; give one, or two that each read one half")
    for path in models:
        with gather(problems):
            folder = RunFolder.open(path)
            read_config(folder, allow_plugins, TEXT)
            if read_tokenizer(folder) is None:
                problems.append(f"--model {path}: has no tokenizer.json, which texts need; put one into the folder")
    if device != "cpu" and workers > 1:
        problems.append(f"--workers {workers}: the models would share one {device}; use 1")
    refuse(problems, "score")


@dataclass(frozen=True)
class ScoreDocuments:
    """The work of the stage `score`; the arguments are those of `score_stage`."""

    models: tuple[str, ...]
    seed: int
    device: str
    precision: str
    allow_plugins: bool = False

    def scorers(self) -> list["Scorer"]:
        return [_scorer(path, self.device, self.precision, self.allow_plugins) for path in self.models]

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]:
        scorers = self.scorers()
        for group in _groups(read_part(part, counts, samples)):
            scores: dict[int, float] = {}
            for number, scorer in enumerate(scorers):
                mine = [
                    place
                    for place, document in enumerate(group)
                    if len(document.text.encode()) >= SHORT
                    and (len(scorers) == 1 or half_of(document.text, self.seed) != number)
                ]
                nats = scorer.nats_per_byte([group[place].text for place in mine])
                scores |= dict(zip(mine, nats, strict=True))
            for place, document in enumerate(group):
                counts["scores.scored" if place in scores else f"scores.none, under {SHORT} bytes"] += 1
                extra = {key: value for key, value in document.extra.items() if key not in (NATS, LETTERS)}
                if place in scores:
                    extra[NATS] = scores[place]
                    size = len(document.text.encode())
                    extra[LETTERS] = round(scores[place] * size / letters(document.text), DIGITS)
                yield replace(document, extra=extra)


class Scorer:
    """A language model that scores texts.

    Attributes:
        digest: of its configuration and weights.
    """

    def __init__(self, path: str, device: str, precision: str, allow_plugins: bool):
        loaded = load_checkpoint(path, device, getattr(torch, precision), allow_plugins=allow_plugins)
        self.model: CausalLM = loaded.model
        assert loaded.tokenizer is not None  # check_models
        self.tokenizer, self.path = loaded.tokenizer, path
        self.digest = weights_digest(self.model, self.model.config.model_dump_json())
        # A state that grows is a cache of attention, which is not used beyond the length of its training.
        grows = natural_method(self.model.config) == "windowed"
        self.window = (RunFolder.open(path).config.get("seq_len") or 1024) if grows else None

    def nats_per_byte(self, texts: Sequence[str]) -> list[float]:
        """Returns the negative log-likelihood of each text in nats per byte of UTF-8, rounded to `DIGITS` decimals.

        Texts of similar length are read together, and common beginnings once (`log_likelihoods`). Long ones are read
        alone: in chunks with carried state, or in windows if the state grows with the context.
        """
        sizes = [len(text.encode()) for text in texts]
        tokens = [np.asarray(self.tokenizer.encode(text), dtype=np.int64) for text in texts]
        first, most = first_token(self.tokenizer), min(self.window or LONG, LONG)
        nats = np.zeros(len(texts))
        short = [i for i, ids in enumerate(tokens) if 0 < len(ids) <= most]
        # One thread, because sums of several threads are rounded in another order.
        with use_threads(1), checking("model", lambda problem: f"{self.path}: {problem}"):
            likelihoods = log_likelihoods(self.model, [([first], tokens[i]) for i in short])
            nats[short] = [-likelihood.nats for likelihood in likelihoods]
            for i in (i for i, ids in enumerate(tokens) if len(ids) > most):
                document = ScoredText("a document", np.concatenate([[first], tokens[i]]), 0, sizes[i])
                window = {} if self.window is None else {"method": "windowed", "window": self.window}
                nats[i] = score_text(self.model, [document], **window).documents[0].nats
        return [round(float(total) / size, DIGITS) for total, size in zip(nats, sizes, strict=True)]


_scorer = functools.lru_cache(maxsize=2)(Scorer)


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields documents in groups that bound the memory, in their order."""
    group: list[Document] = []
    size = 0
    for document in documents:
        if group and (len(group) == GROUP or size + len(document.text) > GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(document)
        size += len(document.text)
    if group:
        yield group


# Leaves out the documents with the worst scores, a share of each source.
#
# Sources differ in their scores (code is easier to predict than prose), so one threshold for all would mostly cut one
# of them. Low scores are repetitions more often than good text; the low tail is shown, and cut only on request (`low`).

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
        groups = _merged([json.loads(path.read_text(encoding="utf-8")) for path in files])
        if not groups:
            problem = f"SOURCE: no document of {', '.join(sources)} has a score per {settings.per}"
            raise ConfigError([f"{problem}; run `linnet corpus score` first"], "filter")
        cuts = {name: find_cut(group["scores"], settings.keep, settings.low) for name, group in groups.items()}
        keep = KeepDocuments(settings.by, settings.per, tuple(cuts.items()))
        stage.write(keep, workers=workers, engine=engine, progress=progress)
        return stage.finish({name: _described(group, cuts[name]) for name, group in sorted(groups.items())})


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
        groups: dict[str, dict[str, Any]] = {}
        for document in read_part(part, Counter()):
            if (score := score_of(document, self.per)) is None:
                continue
            group = groups.setdefault(_group(document, self.by), {"scores": [], "lowest": [], "highest": []})
            group["scores"].append(score)
            for name, sign in (("lowest", -1), ("highest", 1)):
                _push(group[name], sign * score, document, score)
        for group in groups.values():
            for name in ("lowest", "highest"):
                group[name] = [shown for *_, shown in sorted(group[name], reverse=True)]
        return json.dumps(groups, ensure_ascii=False).encode()


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
    groups: dict[str, dict[str, list]] = {}
    for part in parts:
        for name, group in part.items():
            merged = groups.setdefault(name, {"scores": [], "lowest": [], "highest": []})
            for key in merged:
                merged[key] += group[key]
    for merged in groups.values():
        merged["lowest"] = sorted(merged["lowest"], key=lambda document: document["score"])[:SHOWN]
        merged["highest"] = sorted(merged["highest"], key=lambda document: -document["score"])[:SHOWN]
    return groups


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
