"""Perplexity of texts of any length, by document and by the length of the context.

There are two ways to score a document that is longer than the training sequences:

* carried: the model reads the document in chunks and carries its state from chunk to chunk, so that it predicts every
  token from all tokens before it. A linear model needs constant memory for this; attention keeps its whole cache.
* windowed: windows of `window` tokens start every `stride` tokens, and each scores the tokens that the previous one did
  not reach (the recipe in the documentation of transformers on perplexity). Attention needs this beyond its training
  length. The context of a token has between `window - stride` and `window - 1` tokens.

An end-of-document token precedes each document, so that its first token is scored too. In training this token
follows each document and does not precede the first one. A model trained on a single document has therefore never
read it.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import ConfigError, checking, refuse
from linnet.data import Tokenizer
from linnet.data.records import read_documents
from linnet.data.sources import find_files
from linnet.evaluate.likelihood import evaluating
from linnet.evaluate.results import Item, Result, digest_of
from linnet.laws.orders import percentile_interval
from linnet.layers.positions import length_problems
from linnet.models import CausalLM, ModelConfig
from linnet.models.causal_lm import IGNORE, CacheLengths, merge
from linnet.models.costs import meta_model
from linnet.ops.sequence import sequence_parallel
from linnet.parallel.mesh import divided

if TYPE_CHECKING:
    from linnet.parallel.mesh import Mesh


Method = Literal["carried", "windowed"]
RESAMPLES = 2000  # bootstrap resamples
CHUNK = 2048  # tokens per forward pass of `carried`
LOGITS = 2**24  # upper bound of logits per batch of windows
GPU_CHUNK, GPU_LOGITS = 8192, 2**29  # the same on a GPU, which would wait for the host between smaller passes


@dataclass(frozen=True)
class Document:
    """A tokenized document.

    Attributes:
        name: the file, and for JSONL and Parquet the row.
        tokens: ids, int64 [n]; the first is context and is not scored.
        words, bytes: length of the text.
        digest: of the text's bytes; "" if it is not known.
    """

    name: str
    tokens: np.ndarray
    words: int
    bytes: int
    digest: str = ""

    @classmethod
    def of_text(cls, name: str, text: str, tokenizer: Tokenizer) -> "Document":
        """Tokenizes a text after `first_token`. White space separates words; bytes are those of UTF-8."""
        tokens = np.concatenate([[first_token(tokenizer)], tokenizer.encode(text)])
        data = text.encode()
        return cls(name, tokens, len(text.split()), len(data), digest_of([data]))


def first_token(tokenizer: Tokenizer) -> int:
    """Returns the token that precedes a document: end-of-document, or the start token of a converted model."""
    return (tokenizer.end_of_document, *tokenizer.prompt_start)[-1]


def read_texts(
    paths: list[str], tokenizer: Tokenizer, text_key: str = "text", most_bytes: int | None = None
) -> list[Document]:
    """Reads documents: one per text file, one per line of JSONL, one per row of Parquet.

    Args:
        paths: files, folders or globs.
        tokenizer: the tokenizer of the model.
        text_key: key (JSONL) or column (Parquet) of the text.
        most_bytes: read only the first `most_bytes` bytes of text; the last document may be cut. None reads all.

    Raises:
        ConfigError: a file is not found or cannot be read, or there is no text.
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
            # Ignoring errors drops a character that was cut.
            documents.append(Document.of_text(name, text.decode(errors="ignore"), tokenizer))
            if not room:
                break
        if not room:  # the remaining files may be large
            break
    if not documents and not problems:
        problems.append(f"text: {', '.join(map(repr, paths))} holds no text; name files with some")
    refuse(problems, "text")
    return documents


@dataclass(frozen=True)
class DocumentScore:
    """Score of one document.

    Attributes:
        nats: sum of the negative log-likelihoods of its tokens, in nats.
        tokens, words, bytes: its length in units of each metric.
    """

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
        method: "carried" or "windowed".
        window, stride: in tokens; None for "carried".
        documents: one score per document.
        contexts: mean loss by the number of tokens before the predicted one, in bins between powers of two.
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
        """Mean negative log-likelihood in nats per token."""
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

    def interval(self, seed: int = 0) -> tuple[float, float] | None:
        """Returns the 95 % bootstrap interval of `bits_per_byte` over documents; None for fewer than six."""
        sizes = [document.bytes for document in self.documents]
        return percentile_interval(resampled(self.documents, seed), len(sizes), sizes)

    def results(self) -> tuple[Result, ...]:
        """Returns the results of the record: one item per document, weighted by its bytes, tokens or words."""

        def over(metric: str, of: str, unit: float = 1.0, average: Literal["mean", "exp"] = "mean") -> Result:
            weighed = [(document, getattr(document, of)) for document in self.documents]
            items = [Item(document.name, document.nats / unit / size, size) for document, size in weighed if size]
            return Result.of_items("text", metric, items, "lower", average)

        results = [over("bits_per_byte", "bytes", math.log(2)), over("loss", "tokens")]
        results += [over("perplexity", "tokens", average="exp"), over("byte_perplexity", "bytes", average="exp")]
        if self._total("words"):
            results.append(over("word_perplexity", "words", average="exp"))
        return tuple(results)

    def to_dict(self) -> dict:
        """Returns all numbers as plain values for JSON."""
        numbers = ("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
        totals = {of: self._total(of) for of in ("tokens", "words", "bytes")}
        return {
            **{name: getattr(self, name) for name in numbers},
            "bits_per_byte_interval": self.interval(),
            **totals,
            **dataclasses.asdict(self),
        }


def resampled(documents: Sequence[DocumentScore], seed: int = 0) -> np.ndarray:
    """Returns bits per byte of `RESAMPLES` bootstrap resamples of the documents, float64 [RESAMPLES]."""
    counts = np.array([(document.nats / math.log(2), document.bytes) for document in documents])
    rows = np.random.default_rng(seed).integers(len(counts), size=(RESAMPLES, len(counts)))
    bits, size = counts[rows].sum(1).T
    return bits / size


def natural_method(config: ModelConfig) -> Method:
    """Returns "carried" if the model has a state that does not grow with the context, else "windowed".

    A learned table of positions ends, and so does the context through which a state can be carried.
    """
    if config.num_positions is not None:
        return "windowed"
    backbone = meta_model(config.model_dump_json()).backbone
    return "windowed" if backbone.state_grows or backbone.nominal_state else "carried"


def stride_problems(stride: int | None, window: int | None) -> list[str]:
    """Returns why windows of so many tokens do not overlap; None stands for a number that fits."""
    if stride is None or window is None or stride < window:
        return []
    return [f"stride: {stride} is not below the window of {window} tokens; use 1 to {window - 1}"]


def check_lengths(config: ModelConfig, documents: Iterable[Document], method: Method, window: int) -> None:
    """Raises ConfigError if a learned table of positions is shorter than what a method reads at once."""
    rows = config.num_positions
    longest = max(documents, key=lambda document: len(document.tokens), default=None)
    if rows is None or longest is None:
        return
    length, fix = len(longest.tokens) - 1, "use method: windowed"  # of each row the last token is only a target
    with checking("evaluate") as problems:
        if method == "carried":
            problems += length_problems(f"method: carried: tokens of {longest.name}", length, rows, fix)
        elif length > rows:
            problems += length_problems("window", window, rows)


@torch.no_grad()
def score_text(
    model: CausalLM,
    documents: Iterable[Document],
    *,
    method: Method = "carried",
    window: int = 1024,
    stride: int | None = None,
    chunk: int | None = None,
    autocast: contextlib.AbstractContextManager | None = None,
    progress: Callable[[int], None] | None = None,
) -> TextScore:
    """Scores documents, in the dtype of the model's parameters or under `autocast`.

    Several devices (`linnet.parallel.mesh.dividing`) share the documents, or the batches of windows.

    Args:
        model: the model, on the device of its parameters.
        documents: documents of at least two tokens; shorter ones are skipped.
        method: "carried" or "windowed".
        window, stride: for "windowed", in tokens; a stride of None is half a window.
        chunk: for "carried", tokens per forward pass, which changes the result only by rounding; None is 2,048, and on
            a GPU up to 8,192.
        autocast: precision of the forward pass; None is that of the parameters.
        progress: called after each forward pass with the number of tokens that it scored.

    Raises:
        ConfigError: the model gives losses that are not finite.
        ValueError: there is nothing to score, or window, stride or chunk is out of range.
    """
    stride = window // 2 if stride is None else stride
    if chunk is None:
        on_gpu = next(model.parameters()).is_cuda
        chunk = CHUNK * max(1, min(GPU_CHUNK, GPU_LOGITS // model.config.vocab_size) // CHUNK) if on_gpu else CHUNK
    if window < 2 or not 1 <= stride < window or chunk < 1:
        raise ValueError(f"window {window}, stride {stride}, chunk {chunk}: give 1 <= stride < window and chunk >= 1")
    scored = progress or (lambda count: None)
    readable = [document for document in documents if len(document.tokens) > 1]
    if not readable:
        raise ValueError("there is nothing to score: no document has a token")

    def counted(document: Document, losses: np.ndarray, contexts: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        if not np.isfinite(losses).all():
            bad = f"{np.count_nonzero(~np.isfinite(losses))} of {len(losses)} tokens have no finite loss"
            raise ConfigError([f"{document.name}: {bad}; the model's logits are NaN or infinite"], "model")
        bucket = np.frexp(contexts)[1] - 1  # [2^b, 2^(b+1))
        return losses.sum().item(), np.bincount(bucket, losses, minlength=64), np.bincount(bucket, minlength=64)

    def carried(document: Document) -> tuple[float, np.ndarray, np.ndarray]:
        losses = carried_losses(model, document.tokens, chunk, scored)
        return counted(document, losses, np.arange(1, len(document.tokens)))

    with evaluating(model), autocast or contextlib.nullcontext():
        if method == "carried":
            rows = divided(readable, carried, lambda document: len(document.tokens))
        else:
            texts = [document.tokens for document in readable]
            losses = windowed_losses(model, texts, window, stride, scored)
            rows = [counted(document, *of) for document, of in zip(readable, losses, strict=True)]
    sums, counts = np.zeros(64), np.zeros(64, dtype=np.int64)
    for _, nats, number in rows:
        sums += nats
        counts += number
    scores = [
        DocumentScore(document.name, nats, len(document.tokens) - 1, document.words, document.bytes)
        for document, (nats, _, _) in zip(readable, rows, strict=True)
    ]
    used = np.flatnonzero(counts).tolist()
    buckets = [ContextScore(2**b, 2 ** (b + 1), (sums[b] / counts[b]).item(), counts[b].item()) for b in used]
    sizes = (window, stride) if method == "windowed" else (None, None)
    return TextScore(method, *sizes, tuple(scores), tuple(buckets))


def carried_losses(model: CausalLM, tokens: np.ndarray, chunk: int, scored: Callable[[int], None]) -> np.ndarray:
    """Returns losses in nats, float64 [n - 1], of all tokens but the first, each predicted from all before it."""
    parameter = next(model.parameters())
    ids = torch.from_numpy(tokens).to(parameter.device)
    dtype = torch.float64 if parameter.dtype == torch.float64 else None
    states, losses = model.init_state(1, len(tokens), ids.device, dtype), []
    lengths = CacheLengths(model, len(tokens))  # attention reads the part of its cache that is in use
    for start in range(0, len(tokens) - 1, chunk):
        read = ids[start : start + chunk + 1]
        inputs = read[:chunk] if len(read) > chunk else read[:-1]
        logits, after = model(inputs[None], lengths.corner(states, start + len(inputs)))
        states = merge(states, after)
        losses.append(_losses(logits[0], read[1:]))
        scored(len(losses[-1]))
    return torch.cat(losses).cpu().numpy()


def windowed_losses(
    model: CausalLM, texts: Sequence[np.ndarray], window: int, stride: int, scored: Callable[[int], None]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns of each text the losses in nats, float64 [n - 1], of all tokens but the first, and their context lengths.

    Several devices share the batches of windows of all texts.
    """
    device = next(model.parameters()).device
    rows = max(1, (GPU_LOGITS if device.type == "cuda" else LOGITS) // (window * model.config.vocab_size))
    batches = [
        (number, min(window, len(tokens) - begins[0]), begins, end_of_last)
        for number, tokens in enumerate(texts)
        for begins, end_of_last in _windows(len(tokens), window, stride, rows)
    ]

    def score(batch: tuple[int, int, list[int], int]) -> list[np.ndarray]:
        number, length, begins, end_of_last = batch
        rows = torch.from_numpy(np.stack([texts[number][begin : begin + length] for begin in begins])).to(device)
        parts = []
        for begin, row in zip(begins, _losses(model(rows[:, :-1])[0], rows[:, 1:]).cpu().numpy(), strict=True):
            first = max(end_of_last, 1)  # the first token that no earlier window scored
            parts.append(row[first - begin - 1 :])
            scored(len(parts[-1]))
            end_of_last = begin + length
        return parts

    losses, contexts = ([[] for _ in texts] for _ in range(2))
    for (number, length, *_), parts in zip(
        batches, divided(batches, score, lambda batch: batch[1] * len(batch[2])), strict=True
    ):
        losses[number] += parts
        contexts[number] += [np.arange(length - len(part), length) for part in parts]
    return [(np.concatenate(nats), np.concatenate(before)) for nats, before in zip(losses, contexts, strict=True)]


def _windows(count: int, window: int, stride: int, batch: int) -> Iterator[tuple[list[int], int]]:
    """Yields starts of up to `batch` windows of one length, and the end of the window before them."""
    begins = list(range(0, max(count - window, 0) + 1, stride))
    ended = 0
    for i in range(0, len(begins), batch):
        group = begins[i : i + batch]
        yield group, ended
        ended = min(group[-1] + window, count)
    if ended < count:
        yield [begins[-1] + stride], ended


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns negative log-likelihoods in nats, float64 with the shape of `targets`, computed in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(targets.shape).double()


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


# Perplexities of a text by the convention of WikiText-103 at 44M (papers 001 to 003), and by two that compare.
#
# The text is one stream of tokens in which a token ends every line (a tokenizer with `line_ends`) or every document.
# It is cut into blocks of N tokens without memory: a block sees the token before it and its own tokens, from a zero
# state, and all of its tokens are scored. From the same nats follow three numbers:
#
# * `perplexity`: per token and line end. This is the number that the papers print. It depends on the tokenizer and is
#   not a word perplexity: 24 here is not 24 of a word-level table.
# * `word_perplexity`: per word between white space and line end, the unit of word-level tables.
# * `bits_per_byte`: per byte of the text as it is in the file.
#
# `carried` gives the same three numbers with a state that goes on from block to block, which a model can do whose state
# does not grow.


@dataclass(frozen=True)
class Stream:
    """Texts as one stream of tokens.

    Attributes:
        tokens: int64 [n]; the first is context and is not scored.
        names: of the units of text whose nats are summed: lines if a token ends every line, else documents.
        unit: int64 [n - 1], the unit of each scored token.
        words: int64 [units], words between white space, and line ends. bytes: int64 [units].
        line_ends: whether units are lines.
    """

    tokens: np.ndarray
    names: tuple[str, ...]
    unit: np.ndarray
    words: np.ndarray
    bytes: np.ndarray
    line_ends: bool


def read_stream(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> Stream:
    """Returns the stream of (name, text). Raises ConfigError if no text has a line."""
    end, by_line = tokenizer.end_of_document, getattr(tokenizer, "line_ends", False)
    tokens, names, words, sizes = [np.array([end])], [], [], []
    units: list[np.ndarray] = []
    for name, text in texts:
        ids = np.append(tokenizer.encode(text), end)
        lines = text.removesuffix("\n").split("\n")
        if by_line:
            counts = np.concatenate([[0], (ids == end).cumsum()[:-1]])  # the end of a line belongs to it
            words += [len(line.split()) + 1 for line in lines]
            sizes += [len(line.encode()) + 1 for line in lines]
            sizes[-1] -= not text.endswith("\n")
        else:
            counts, lines = np.zeros(len(ids), dtype=np.int64), [""] * len(lines)
            words.append(len(text.split()) + len(lines))
            sizes.append(len(text.encode()))
        units.append(counts + len(names))
        names += [f"{name}:{number}" for number in range(1, len(lines) + 1)] if by_line else [name]
        tokens.append(ids)
    if not names:
        raise ConfigError(["blocks: there is no text to score; name files with some"], "evaluate")
    counted = (np.array(words), np.array(sizes))
    return Stream(np.concatenate(tokens), tuple(names), np.concatenate(units), *counted, by_line)


@dataclass(frozen=True)
class StreamScore:
    """Nats of a stream, float64 [units], and the tokens of each unit, int64 [units]."""

    stream: Stream
    nats: np.ndarray
    tokens: np.ndarray

    def results(self, task: str) -> tuple[Result, ...]:
        """Returns the three numbers, with an item per unit of text."""

        def over(metric: str, sizes: np.ndarray, unit: float = 1.0, exp: bool = True) -> Result:
            named = zip(self.stream.names, self.nats.tolist(), sizes.tolist(), strict=True)
            items = [Item(name, nats / unit / size, size) for name, nats, size in named if size]
            return Result.of_items(task, metric, items, "lower", "exp" if exp else "mean")

        return (
            over("perplexity", self.tokens),
            over("word_perplexity", self.stream.words),
            over("bits_per_byte", self.stream.bytes, math.log(2), exp=False),
        )


@torch.no_grad()
def score_stream(
    model: CausalLM, stream: Stream, block: int | None, progress: Callable[[int], None] | None = None
) -> StreamScore:
    """Scores a stream in blocks of `block` tokens without memory, or with a carried state if `block` is None.

    Raises:
        ConfigError: the model gives losses that are not finite.
    """
    told = progress or (lambda count: None)
    with evaluating(model):
        if block is None:
            losses = carried_losses(model, stream.tokens, 2048, told)
        else:
            losses = windowed_losses(model, [stream.tokens], block + 1, block, told)[0][0]
    if not np.isfinite(losses).all():
        bad = f"{np.count_nonzero(~np.isfinite(losses))} of {len(losses)} tokens have no finite loss"
        raise ConfigError([f"blocks: {bad}; the model's logits are NaN or infinite"], "model")
    count = len(stream.names)
    nats = np.bincount(stream.unit, losses, minlength=count)
    return StreamScore(stream, nats, np.bincount(stream.unit, minlength=count))


# Held-out loss: nats per token, perplexity, and bits per byte, which does not depend on the tokenizer.


@dataclass(frozen=True)
class Score:
    """Loss over fixed held-out tokens.

    Attributes:
        loss: mean negative log-likelihood in nats per token.
        bits_per_byte: sum of negative log-likelihoods in bits, divided by the bytes of the scored tokens' text.
        tokens: number of scored tokens.
        bytes: bytes of their text.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: float

    @classmethod
    def of(cls, nats: float, tokens: int, size: float) -> "Score":
        """Returns the score of a sum of negative log-likelihoods [nats] over tokens with `size` bytes of text."""
        return cls(nats / tokens, nats / math.log(2) / size if size else math.nan, tokens, size)

    @classmethod
    def over(cls, scores: Sequence["Score"]) -> "Score":
        """Returns the score of the tokens of all scores together."""
        nats = sum(score.loss * score.tokens for score in scores)
        return cls.of(nats, sum(score.tokens for score in scores), sum(score.bytes for score in scores))

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def score(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, ...]],
    byte_lengths: np.ndarray | float = 1.0,
    autocast: contextlib.AbstractContextManager | None = None,
    loss: Callable[..., tuple[Tensor, Tensor]] | None = None,
    mesh: "Mesh | None" = None,
) -> Score:
    """Scores a causal language model.

    On several ranks batches are dealt to them in turn, and every rank makes the same number of forward passes, because
    each pass communicates: a rank without a batch scores one whose targets are all ignored.

    Args:
        model: runs on the device of its parameters.
        batches: (tokens, targets), int64 [B, T], and further arguments of `loss`; targets of -100 are not scored.
        byte_lengths: bytes per token, int [vocab], or their mean over the text if single tokens have no length.
        autocast: precision of the forward pass; None is that of the parameters.
        loss: batch -> (sum of negative log-likelihoods in nats, count); None is `model.loss`.
        mesh: ranks that score together; `batches` is then a sequence with len(), the same on all ranks.

    Raises:
        ValueError: there is no target to score.
    """
    device = next(model.parameters()).device
    lengths = torch.as_tensor(np.asarray(byte_lengths, dtype=np.float64))
    total, tokens, size = torch.zeros((), dtype=torch.float64, device=device), 0, 0.0
    rows = contextlib.nullcontext() if mesh is None else sequence_parallel(mesh.sp_group, mesh.sequence_method)
    with evaluating(model), rows:
        for batch in batches if mesh is None else _dealt(batches, mesh):
            targets = batch[1]
            scored = targets[targets != IGNORE]
            with autocast or contextlib.nullcontext():
                nll, _ = (loss or model.loss)(*(tensor.to(device) for tensor in batch))
            total += nll.double()
            tokens += scored.numel()
            size += scored.numel() * lengths.item() if lengths.ndim == 0 else lengths[scored].sum().item()
    if mesh is not None:
        total, tokens, size = _sum_over_ranks(model, total, tokens, size, mesh)
    if tokens == 0:
        raise ValueError("there is nothing to score: no batch has a target")
    return Score.of(total.item(), tokens, size)


def _dealt(batches: Sequence[tuple[Tensor, ...]], mesh: "Mesh") -> Iterator[tuple[Tensor, ...]]:
    """Yields every `mesh.dp`-th batch; where they run out, a last one that counts for nothing."""
    for first in range(0, len(batches), mesh.dp):
        number = first + mesh.dp_rank
        batch = batches[min(number, len(batches) - 1)]
        yield batch if number < len(batches) else (batch[0], torch.full_like(batch[1], IGNORE), *batch[2:])


def _sum_over_ranks(
    model: nn.Module, total: Tensor, tokens: int, size: float, mesh: "Mesh"
) -> tuple[Tensor, int, float]:
    """Returns the sums of all ranks, and frees the weights that the last forward pass gathered."""
    from linnet.parallel.build import settle

    settle(model)
    # The ranks of one row have summed up their spans, but have each counted the targets of the whole row.
    counted = [tokens, size] if mesh.sp_rank == 0 else [0, 0.0]
    sums = torch.cat([total[None], torch.tensor(counted, dtype=torch.float64, device=total.device)])
    torch.distributed.all_reduce(sums, group=mesh.data_group)
    return sums[0], round(sums[1].item()), sums[2].item()
