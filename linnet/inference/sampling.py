"""Sampling: the settings of a request, and the choice of the next token for all slots at once.

Each row of a batch is computed independently, from its own settings. Its random number is a function of its seed and of
the number of tokens drawn so far. So the tokens of a request do not depend on the other requests of the batch.
"""

from typing import NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor

from linnet.config import Config

MOST_LOGPROBS = 20
DRAWING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # keys that a model may have defaults of


class Sampling(Config):
    """How the tokens of a request are chosen, and when the completion ends.

    Probabilities are softmax(logits / temperature). `top_k` keeps the k likeliest tokens. Of these, `top_p` keeps the
    smallest set whose share of the probability is at least top_p, and `min_p` keeps the tokens whose probability is at
    least min_p times that of the likeliest.
    """

    max_tokens: int | None = Field(256, ge=1, description="null: until an end token or the limit of the context")
    temperature: float = Field(0.0, ge=0, le=1e4, allow_inf_nan=False, description="0 takes the likeliest token")
    top_k: int = Field(0, ge=0, lt=1 << 31, description="0 keeps all")
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    min_p: float = Field(0.0, ge=0, lt=1, allow_inf_nan=False)
    repetition_penalty: float = Field(
        1.0,
        ge=1e-3,
        le=1e3,
        allow_inf_nan=False,
        description="divides positive logits of tokens seen and multiplies negative ones; 1 changes nothing",
    )
    stop: list[str] = Field([], description="strings that end the completion and are not part of it")
    stop_tokens: list[int] = Field([], description="tokens that end the completion")
    ignore_end: bool = Field(False, description="continue after the end of a document")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="null: a random seed for each request")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="return log-probabilities: of the token, and of this many likeliest"
    )

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("'' would end every completion before it begins; remove it")
        return stop

    @property
    def plain(self) -> bool:
        """Whether these settings need only the likeliest token of the unchanged logits."""
        return self.temperature == 0 and self.repetition_penalty == 1 and self.logprobs is None


class Knobs(NamedTuple):
    """The sampling settings of all slots, one row per slot, on the device of the logits."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor  # int64
    drawn: Tensor  # int64: number of tokens drawn so far, updated in place
    seen: Tensor  # bool [slots, V]: tokens of prompt and completion, updated in place

    @classmethod
    def empty(cls, slots: int, vocab: int, device: torch.device) -> "Knobs":
        real = [torch.ones(slots, dtype=torch.float32, device=device) for _ in range(4)]
        whole = [torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(3)]
        seen = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        return cls(real[0], whole[0], real[1], real[2], real[3], whole[1], whole[2], seen)

    def set(self, slot: int, sampling: Sampling, seed: int, seen: Tensor) -> None:
        """Stores the settings of a request that enters a slot; `seen` [V] marks the tokens of its prompt."""
        for name in DRAWING:
            getattr(self, name)[slot] = getattr(sampling, name)
        self.seed[slot] = seed
        self.drawn[slot] = 0
        self.seen[slot] = seen


class Chosen(NamedTuple):
    """The chosen tokens [slots]. If requested: their log-probabilities [slots], the likeliest tokens and theirs."""

    tokens: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


def choose_greedy(logits: Tensor, vocab: int | None = None) -> Chosen:
    """Returns the likeliest of the first `vocab` tokens, or of all, of each row of logits."""
    return Chosen(logits[:, :vocab].argmax(-1))


def choose(logits: Tensor, knobs: Knobs, with_logprobs: bool) -> Chosen:
    """Draws a token from each row of logits by its knobs, and records it in `drawn` and `seen`.

    Log-probabilities are the model's own, before penalty, temperature and truncation.

    Args:
        logits: [slots, N]. Tokens are drawn from the first V of `Knobs.seen`; those after, rows of the embedding
            without a token, are never drawn, but count in log-probabilities, as in training.
    """
    whole = logits if logits.dtype == torch.float64 else logits.float()
    logits = whole[:, : knobs.seen.shape[1]]
    penalty = knobs.repetition_penalty[:, None].to(logits.dtype)
    values = torch.where(knobs.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    best = values.argmax(-1)
    greedy = knobs.temperature == 0
    heat = torch.where(greedy, 1.0, knobs.temperature)[:, None].to(logits.dtype)
    # Subtract the largest value before dividing, so that a tiny temperature gives 0 for it instead of infinity.
    values, order = values.sort(stable=True, dim=-1, descending=True)
    values = (values - values[:, :1]) / heat
    rank = torch.arange(values.shape[1], device=values.device)
    inside = (knobs.top_k == 0)[:, None] | (rank < knobs.top_k[:, None])
    shares = values.masked_fill(~inside, -torch.inf).softmax(-1)
    before = shares.cumsum(-1) - shares
    kept = inside & (before < knobs.top_p[:, None]) & (shares >= knobs.min_p[:, None] * shares[:, :1])
    kept[:, 0] = True  # each row keeps at least one token, in spite of rounding
    line = shares.masked_fill(~kept, 0).double().cumsum(-1)
    place = (line <= (uniform(knobs.seed, knobs.drawn) * line[:, -1])[:, None]).sum(-1)
    place = torch.minimum(place, kept.sum(-1) - 1)
    tokens = torch.where(greedy, best, order.gather(1, place[:, None])[:, 0])
    knobs.drawn.add_(1)
    knobs.seen.scatter_(1, tokens[:, None], True)
    if not with_logprobs:
        return Chosen(tokens)
    all_logprobs = whole.log_softmax(-1)[:, : logits.shape[1]]
    top_logprobs, top_tokens = all_logprobs.topk(min(MOST_LOGPROBS, logits.shape[1]), dim=-1)
    return Chosen(tokens, all_logprobs.gather(1, tokens[:, None])[:, 0], top_tokens, top_logprobs)


def uniform(seed: Tensor, count: Tensor) -> Tensor:
    """Returns random numbers in [0, 1), float64, that depend on (seed, count) alone: SplitMix64 (Steele et al. 2014).

    The first round maps seeds that are close to unrelated numbers. The second computes number `count` of that stream.
    """
    x = _mix(_mix(seed + _GOLDEN) + (count + 1) * _GOLDEN)
    return _shift(x, 11).double() * 2.0**-53


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # int64 arithmetic wraps around like uint64, so negative constants do
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts to the right and fills with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
