"""Inputs and outputs of the engine: requests, pieces and completions."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from linnet.data import Tokenizer
from linnet.inference.sampling import Sampling
from linnet.inference.text import Detokenizer, StopFilter

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Piece:
    """One token of a request, or the end of a request without a token.

    Attributes:
        token: the token id; None if the request was cancelled or failed.
        text: the text that became final with this token; "" while it may still be part of a stop string or of an
            incomplete character.
        logprob: log-probability of the token in nats, if requested.
        top_logprobs: pairs (token, logprob) of the likeliest tokens, the likeliest first, if requested.
        finish: why the request ended, in its last piece: "stop" (a stop string, a stop token or the end of a document),
            "length", "cancelled" or "error". None in all other pieces.
        error: the error message of a failed request, else "".
        offset: number of characters of the completion before this token, those held back for a stop string included.
    """

    token: int | None
    text: str = ""
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish: str | None = None
    error: str = ""
    offset: int = 0


class Request:
    """A prompt that the engine processes, as `Engine.submit` returns it.

    Attributes:
        id: a number that is unique in this process.
        prompt: token ids, without those of the prefix.
        prompt_tokens: number of tokens of prefix and prompt together.
        sampling: how tokens are chosen.
        seed: the seed in `sampling`, or the one that was drawn if that is None.
        max_tokens: most tokens of the completion; None for no limit.
        generated: number of tokens generated so far.
        cancelled: whether the request is to end in the next round.
        cached_tokens: tokens of the prompt that a kept prefix saved.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        prompt_tokens: int,
        sampling: Sampling,
        seed: int,
        max_tokens: int | None,
        tokenizer: Tokenizer | None,
    ):
        self.id = next(_numbers)
        self.prompt, self.prompt_tokens, self.sampling, self.seed = prompt, prompt_tokens, sampling, seed
        self.max_tokens, self.generated = max_tokens, 0
        self.cancelled = False
        self.cached_tokens = 0
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt)
        self._filter = StopFilter(sampling.stop) if sampling.stop else None
        self._ends = set(sampling.stop_tokens)
        if tokenizer is not None and not sampling.ignore_end:
            self._ends |= {tokenizer.end_of_document, *tokenizer.generation_ends}

    @property
    def on_last_token(self) -> bool:
        """Whether the next token reaches `max_tokens`, so that the request ends with any token."""
        return self.max_tokens is not None and self.generated + 1 >= self.max_tokens

    def accept(self, token: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> Piece:
        """Returns the piece for the next token of this request."""
        self.generated += 1
        ended = token in self._ends
        last = ended or (self.max_tokens is not None and self.generated >= self.max_tokens)
        text, offset = "", 0
        if self._detokenizer is not None:
            text = "" if ended else self._detokenizer.push(token)
            text += self._detokenizer.flush() if last else ""
            offset = self._detokenizer.length if ended else self._detokenizer.offset
        stopped = False
        if self._filter is not None:
            text, stopped = self._filter.push(text)
            if last and not stopped:
                text += self._filter.flush()
        finish = "stop" if stopped or ended else "length" if last else None
        return Piece(token, text, logprob, top, finish, offset=offset)


@dataclass(frozen=True)
class Completion:
    """The result of a request. `tokens` includes the end token or stop token; `text` does not."""

    request: Request
    tokens: list[int]
    text: str
    finish: str
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, pieces: Iterable[Piece]) -> "Completion":
        """Joins the pieces of a finished request."""
        pieces = list(pieces)
        told = [piece for piece in pieces if piece.logprob is not None]
        return cls(
            request,
            [piece.token for piece in pieces if piece.token is not None],
            "".join(piece.text for piece in pieces),
            pieces[-1].finish,
            [piece.logprob for piece in told],
            [piece.top_logprobs for piece in told],
        )
