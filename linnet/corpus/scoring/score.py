"""Nats per byte of every document, with the state carried from its beginning to its end.

A model predicts its own training text too well. With two models, each document is therefore scored by the one that was
trained on the other half (`half_of`). Documents under `SHORT` bytes are too noisy to be scored; they are kept.
"""

import contextlib
import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from linnet.config import Config, checking, gather, refuse
from linnet.corpus.documents import Document, Part, Samples, read_part
from linnet.corpus.stage import Progress, run_stage
from linnet.evaluate.likelihood import log_likelihoods
from linnet.evaluate.texts import text
from linnet.inference.prefix import weights_digest
from linnet.models import CausalLM
from linnet.runs import RunFolder
from linnet.runs.model import TEXT, load_checkpoint, read_config, read_tokenizer

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
                found = scorer.nats_per_byte([group[place].text for place in mine])
                scores |= dict(zip(mine, found, strict=True))
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
        grows = text.natural_method(self.model.config) == "windowed"
        self.window = (RunFolder.open(path).config.get("seq_len") or 1024) if grows else None

    def nats_per_byte(self, texts: Sequence[str]) -> list[float]:
        """Returns the negative log-likelihood of each text in nats per byte of UTF-8, rounded to `DIGITS` decimals.

        Texts of similar length are read together, and common beginnings once (`log_likelihoods`). Long ones are read
        alone: in chunks with carried state, or in windows if the state grows with the context.
        """
        sizes = [len(one.encode()) for one in texts]
        tokens = [np.asarray(self.tokenizer.encode(one), dtype=np.int64) for one in texts]
        first, most = text.first_token(self.tokenizer), min(self.window or LONG, LONG)
        nats = np.zeros(len(texts))
        short = [i for i, ids in enumerate(tokens) if 0 < len(ids) <= most]
        with one_thread():
            with checking("model", lambda problem: f"{self.path}: {problem}"):
                found = log_likelihoods(self.model, [([first], tokens[i]) for i in short])
                nats[short] = [-one.nats for one in found]
                for i in (i for i, ids in enumerate(tokens) if len(ids) > most):
                    document = text.Document("a document", np.concatenate([[first], tokens[i]]), 0, sizes[i])
                    window = {} if self.window is None else {"method": "windowed", "window": self.window}
                    nats[i] = text.score_text(self.model, [document], **window).documents[0].nats
        return [round(float(one) / size, DIGITS) for one, size in zip(nats, sizes, strict=True)]


@functools.lru_cache(maxsize=2)
def _scorer(path: str, device: str, precision: str, allow_plugins: bool) -> Scorer:
    return Scorer(path, device, precision, allow_plugins)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Lets PyTorch use one thread on the CPU, because sums of several threads are rounded in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
