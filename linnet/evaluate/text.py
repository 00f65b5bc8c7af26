"""Perplexity of texts of any length, by document and by the length of the context.

Two ways to score a document longer than what a model was trained on:

* carried: the model reads it from its first to its last token, in chunks, from state to state, so that every token is
  predicted from all that came before. What a linear model does for free; attention keeps its whole cache.
* windowed: windows of `window` tokens start every `stride` tokens, and each scores the tokens that the one before it
  did not reach (the recipe of transformers' documentation on perplexity). What attention needs beyond its trained
  length; the context of a token is between `window - stride` and `window - 1` tokens.

A document begins with the end-of-document token, so that its first token is scored too. In training it stands behind
each document, and none before the first: a model of a single document has never read it.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.config import ConfigError
from linnet.data import Tokenizer
from linnet.data.sources import find_files, read_documents
from linnet.evaluate.mode import evaluating
from linnet.evaluate.results import Item, Result
from linnet.models import CausalLM, ModelConfig
from linnet.models.costs import meta_model

Method = Literal["carried", "windowed"]
RESAMPLES = 2000  # of the bootstrap
ROWS = 2**24  # most logits of windows at once


@dataclass(frozen=True)
class Document:
    """Token ids int64 [n], of which the first is context alone, and the words and bytes that the others stand for."""

    name: str
    tokens: np.ndarray
    words: int
    bytes: int

    @classmethod
    def of_text(cls, name: str, text: str, tokenizer: Tokenizer) -> "Document":
        """A text after `first_token`. Words are what white space separates; bytes are UTF-8."""
        tokens = np.concatenate([[first_token(tokenizer)], tokenizer.encode(text)])
        return cls(name, tokens, len(text.split()), len(text.encode()))


def first_token(tokenizer: Tokenizer) -> int:
    """What stands before a document: the end of the one before it, or what a converted model begins with instead."""
    return (tokenizer.end_of_document, *tokenizer.prompt_start)[-1]


def read_texts(
    paths: list[str], tokenizer: Tokenizer, text_key: str = "text", most_bytes: int | None = None
) -> list[Document]:
    """Reads the documents of files, folders and globs: a text file is one, JSONL has one per line, Parquet per row.

    Args:
        most_bytes: of the text, from its beginning on; the last document may be cut. None takes all.

    Raises:
        ConfigError: what cannot be found or read (of what is wanted), or holds no text.
    """
    problems: list[str] = []
    files = find_files(paths, "text", problems, skipped=[])
    documents, room = [], math.inf if most_bytes is None else most_bytes
    for file in files:
        for number, text in enumerate(read_documents(file, text_key, problems), 1):
            if len(text) > room:
                text = text[: int(room)]
            room -= len(text)
            name = str(file.path) if file.kind == "text" else f"{file.path}:{number}"
            # A character that is cut is lost.
            documents.append(Document.of_text(name, text.decode(errors="ignore"), tokenizer))
            if not room:
                break
        if not room:  # what comes behind may be far more than is wanted
            break
    if not documents and not problems:
        problems.append(f"text: {', '.join(map(repr, paths))} holds no text; name files with some")
    if problems:
        raise ConfigError(problems, "text")
    return documents


@dataclass(frozen=True)
class DocumentScore:
    """Sum of the negative log-likelihoods of a document's tokens in nats, and what it is to be divided by."""

    name: str
    nats: float
    tokens: int
    words: int
    bytes: int


@dataclass(frozen=True)
class ContextScore:
    """Mean loss of the tokens with at least `start` and less than `end` tokens before them."""

    start: int
    end: int
    loss: float
    tokens: int


@dataclass(frozen=True)
class TextScore:
    """How well a model predicts texts.

    Attributes:
        method: "carried", or "windowed" with `window` and `stride` in tokens (None where carried).
        documents: each document by itself.
        contexts: the loss by the number of tokens before the predicted one, in powers of two.
    """

    method: Method
    window: int | None
    stride: int | None
    documents: tuple[DocumentScore, ...]
    contexts: tuple[ContextScore, ...]

    def _total(self, of: str) -> float:
        return sum(getattr(document, of) for document in self.documents)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self._total("nats") / self._total("tokens")

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def word_perplexity(self) -> float:
        words = self._total("words")
        return _exp(self._total("nats") / words) if words else math.inf

    @property
    def byte_perplexity(self) -> float:
        return _exp(self._total("nats") / self._total("bytes"))

    @property
    def bits_per_byte(self) -> float:
        return self._total("nats") / math.log(2) / self._total("bytes")

    def interval(self, level: float = 0.95, seed: int = 0) -> tuple[float, float] | None:
        """Bootstrap interval of `bits_per_byte` over documents (percentiles); None for one document alone."""
        if len(self.documents) < 2:
            return None
        return tuple(np.quantile(resampled(self.documents, seed), [(1 - level) / 2, (1 + level) / 2]).tolist())

    def results(self) -> tuple[Result, ...]:
        """Of the record of an evaluation: an item a document, weighed by its bytes, tokens or words."""

        def over(metric: str, of: str, unit: float = 1.0, average: Literal["mean", "exp"] = "mean") -> Result:
            weighed = [(document, getattr(document, of)) for document in self.documents]
            items = [Item(document.name, document.nats / unit / size, size) for document, size in weighed if size]
            return Result.of_items("text", metric, items, "lower", average)

        found = [over("bits_per_byte", "bytes", math.log(2)), over("loss", "tokens")]
        found += [over("perplexity", "tokens", average="exp"), over("byte_perplexity", "bytes", average="exp")]
        if self._total("words"):
            found.append(over("word_perplexity", "words", average="exp"))
        return tuple(found)

    def to_dict(self) -> dict:
        """All of it, for JSON."""
        numbers = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
        totals = {of: self._total(of) for of in ("tokens", "words", "bytes")}
        return {
            **{name: getattr(self, name) for name in numbers},
            "bits_per_byte_interval": self.interval(),
            **totals,
            **dataclasses.asdict(self),
        }


def resampled(documents: Sequence[DocumentScore], seed: int = 0) -> np.ndarray:
    """Bits per byte of `RESAMPLES` drawings of as many documents with replacement, float64 [RESAMPLES]."""
    counts = np.array([(document.nats / math.log(2), document.bytes) for document in documents])
    rows = np.random.default_rng(seed).integers(len(counts), size=(RESAMPLES, len(counts)))
    bits, size = counts[rows].sum(1).T
    return bits / size


def natural_method(config: ModelConfig) -> Method:
    """Carried where the state does not grow with the context, else windowed."""
    return "windowed" if meta_model(config.model_dump_json()).backbone.state_grows else "carried"


@torch.no_grad()
def score_text(
    model: CausalLM,
    documents: Iterable[Document],
    *,
    method: Method = "carried",
    window: int = 1024,
    stride: int | None = None,
    chunk: int = 2048,
    autocast: contextlib.AbstractContextManager | None = None,
    progress: Callable[[int], None] | None = None,
) -> TextScore:
    """Scores documents, in the dtype of the model's parameters or under `autocast`.

    Args:
        documents: each of at least two tokens; shorter ones are left out.
        window, stride: of `method="windowed"`, in tokens; stride None is half a window.
        chunk: tokens read at once by `method="carried"`; the result does not depend on it, up to rounding.
        progress: called with the number of tokens that a step has scored.

    Raises:
        ValueError: there is nothing to score, or window, stride or chunk are out of range.
    """
    stride = window // 2 if stride is None else stride
    if window < 2 or not 1 <= stride < window or chunk < 1:
        raise ValueError(f"window {window}, stride {stride}, chunk {chunk}: give 1 <= stride < window and chunk >= 1")
    found, sums, counts = [], np.zeros(64), np.zeros(64, dtype=np.int64)
    scored = progress or (lambda count: None)
    with evaluating(model), autocast or contextlib.nullcontext():
        for document in documents:
            if len(document.tokens) < 2:
                continue
            if method == "carried":
                losses, contexts = _carried(model, document.tokens, chunk, scored), np.arange(1, len(document.tokens))
            else:
                losses, contexts = _windowed(model, document.tokens, window, stride, scored)
            bucket = np.frexp(contexts)[1] - 1  # [2^b, 2^(b+1))
            sums += np.bincount(bucket, losses, minlength=64)
            counts += np.bincount(bucket, minlength=64)
            score = DocumentScore(document.name, losses.sum().item(), len(losses), document.words, document.bytes)
            found.append(score)
    if not found:
        raise ValueError("there is nothing to score: no document has a token")
    used = np.flatnonzero(counts).tolist()
    buckets = [ContextScore(2**b, 2 ** (b + 1), (sums[b] / counts[b]).item(), counts[b].item()) for b in used]
    sizes = (window, stride) if method == "windowed" else (None, None)
    return TextScore(method, *sizes, tuple(found), tuple(buckets))


def _carried(model: CausalLM, tokens: np.ndarray, chunk: int, scored: Callable[[int], None]) -> np.ndarray:
    """Losses in nats, float64 [n - 1], of all tokens but the first, each from all before it."""
    parameter = next(model.parameters())
    ids = torch.from_numpy(tokens).to(parameter.device)
    dtype = torch.float64 if parameter.dtype == torch.float64 else None
    states, losses = model.init_state(1, len(tokens), ids.device, dtype), []
    for start in range(0, len(tokens) - 1, chunk):
        read = ids[start : start + chunk + 1]
        inputs = read[:chunk] if len(read) > chunk else read[:-1]
        logits, states = model(inputs[None], states)
        losses.append(_losses(logits[0], read[1:]))
        scored(len(losses[-1]))
    return torch.cat(losses).cpu().numpy()


def _windowed(
    model: CausalLM, tokens: np.ndarray, window: int, stride: int, scored: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """Losses float64 [n - 1] of all tokens but the first, and how many tokens the model saw before each."""
    ids = torch.from_numpy(tokens).to(next(model.parameters()).device)
    losses, contexts = np.empty(len(tokens) - 1), np.empty(len(tokens) - 1, dtype=np.int64)
    for begins, end_of_last in _windows(
        len(tokens), window, stride, max(1, ROWS // (window * model.config.vocab_size))
    ):
        length = min(window, len(tokens) - begins[0])
        rows = torch.stack([ids[begin : begin + length] for begin in begins])
        found = _losses(model(rows[:, :-1])[0], rows[:, 1:]).cpu().numpy()
        for begin, row in zip(begins, found, strict=True):
            first = max(end_of_last, 1)  # the first token that no window before this one has scored
            losses[first - 1 : begin + length - 1] = row[first - begin - 1 :]
            contexts[first - 1 : begin + length - 1] = np.arange(first - begin, length)
            scored(begin + length - first)
            end_of_last = begin + length
    return losses, contexts


def _windows(count: int, window: int, stride: int, batch: int) -> Iterator[tuple[list[int], int]]:
    """Starts of windows of one length, at most `batch` at once, and where the window before them ended."""
    begins = list(range(0, max(count - window, 0) + 1, stride))
    ended = 0
    for i in range(0, len(begins), batch):
        group = begins[i : i + batch]
        yield group, ended
        ended = min(group[-1] + window, count)
    if ended < count:
        yield [begins[-1] + stride], ended


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihoods in nats, float64 of the shape of `targets`; logits narrower than float32 are widened."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape).double()


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
