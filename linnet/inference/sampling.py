"""How the next token is chosen: the settings of a request, and the choice for all slots at once.

Every row of a batch is computed on its own, from its own settings, and its random number is a function of its seed and
of how many tokens it has drawn. So what a request gets does not depend on its neighbours.
"""

from typing import NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor

from linnet.config import Config

MOST_LOGPROBS = 20


class Sampling(Config):
    """How the tokens of a request are chosen, and when they end.

    Probabilities are those of logits / temperature; `top_k` keeps the likeliest, `top_p` of those the fewest that hold
    this share of the probability, `min_p` what is at least this share of the likeliest one.
    """

    max_tokens: int | None = Field(128, ge=1, description="null: until an end, or the limit of the context")
    temperature: float = Field(0.0, ge=0, le=1e4, allow_inf_nan=False, description="0 takes the likeliest token")
    top_k: int = Field(0, ge=0, lt=1 << 31, description="0 keeps all")
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    min_p: float = Field(0.0, ge=0, lt=1, allow_inf_nan=False)
    repetition_penalty: float = Field(
        1.0,
        ge=1e-3,
        le=1e3,
        allow_inf_nan=False,
        description="divides the positive logits of tokens seen",
    )
    stop: list[str] = Field([], description="texts that end the completion; they are not part of it")
    stop_tokens: list[int] = Field([], description="tokens that end the completion")
    ignore_end: bool = Field(False, description="go on behind the end of a document")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="null: drawn anew")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="log-probabilities of the token and of so many of the likeliest"
    )

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("'' ends every completion before it begins; drop it")
        return stop

    @property
    def plain(self) -> bool:
        """Whether the likeliest token of the raw logits is all that is asked for."""
        return self.temperature == 0 and self.repetition_penalty == 1 and self.logprobs is None


class Knobs(NamedTuple):
    """The settings of all slots, one row a slot, where the logits are."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor  # int64
    drawn: Tensor  # int64: tokens drawn so far, in place
    seen: Tensor  # bool [slots, V]: tokens of prompt and completion, in place

    @classmethod
    def empty(cls, slots: int, vocab: int, device: torch.device) -> "Knobs":
        real = [torch.ones(slots, dtype=torch.float32, device=device) for _ in range(4)]
        whole = [torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(3)]
        seen = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        return cls(real[0], whole[0], real[1], real[2], real[3], whole[1], whole[2], seen)

    def set(self, slot: int, sampling: Sampling, seed: int, seen: Tensor) -> None:
        """Takes the settings of a request that enters a slot; `seen` [V] are the tokens of its prompt."""
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            getattr(self, name)[slot] = getattr(sampling, name)
        self.seed[slot] = seed
        self.drawn[slot] = 0
        self.seen[slot] = seen


class Chosen(NamedTuple):
    """The tokens of all slots [slots], and where asked for: their log-probabilities, the likeliest ones and theirs."""

    tokens: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


def choose_greedy(logits: Tensor) -> Chosen:
    """The likeliest tokens of logits [slots, V]."""
    return Chosen(logits.argmax(-1))


def choose(logits: Tensor, knobs: Knobs, with_logprobs: bool) -> Chosen:
    """Draws a token from each row of logits [slots, V] as its knobs say; counts it in `drawn` and `seen`.

    Log-probabilities are those of the model: before penalty, temperature and truncation.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    penalty = knobs.repetition_penalty[:, None].to(logits.dtype)
    values = torch.where(knobs.seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    best = values.argmax(-1)
    greedy = knobs.temperature == 0
    heat = torch.where(greedy, 1.0, knobs.temperature)[:, None].to(logits.dtype)
    # From the largest down, so that a tiny temperature gives zeros and not infinities.
    values, order = values.sort(stable=True, dim=-1, descending=True)
    values = (values - values[:, :1]) / heat
    rank = torch.arange(values.shape[1], device=values.device)
    inside = (knobs.top_k == 0)[:, None] | (rank < knobs.top_k[:, None])
    shares = values.masked_fill(~inside, -torch.inf).softmax(-1)
    before = shares.cumsum(-1) - shares
    kept = inside & (before < knobs.top_p[:, None]) & (shares >= knobs.min_p[:, None] * shares[:, :1])
    kept[:, 0] = True  # rounding leaves no row without a token
    line = shares.masked_fill(~kept, 0).double().cumsum(-1)
    place = (line <= (uniform(knobs.seed, knobs.drawn) * line[:, -1])[:, None]).sum(-1)
    place = torch.minimum(place, kept.sum(-1) - 1)
    tokens = torch.where(greedy, best, order.gather(1, place[:, None])[:, 0])
    knobs.drawn.add_(1)
    knobs.seen.scatter_(1, tokens[:, None], True)
    if not with_logprobs:
        return Chosen(tokens)
    all_logprobs = logits.log_softmax(-1)
    top_logprobs, top_tokens = all_logprobs.topk(min(MOST_LOGPROBS, logits.shape[1]), dim=-1)
    return Chosen(tokens, all_logprobs.gather(1, tokens[:, None])[:, 0], top_tokens, top_logprobs)


def uniform(seed: Tensor, count: Tensor) -> Tensor:
    """Random numbers in [0, 1), float64, a function of (seed, count) alone: SplitMix64 (Steele et al. 2014).

    The first round turns seeds that are close into numbers that are not; the second draws number `count` of the seed.
    """
    x = _mix(_mix(seed + _GOLDEN) + (count + 1) * _GOLDEN)
    return _shift(x, 11).double() * 2.0**-53


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as signed numbers, which wrap around as the unsigned ones do
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
