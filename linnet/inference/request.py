"""Inputs and outputs of the engine: requests, pieces and completions."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from linnet.data import Tokenizer
from linnet.inference.sampling import Sampling

# Turns a stream of tokens into text. Text is released only when later tokens can no longer change it.

BROKEN = "\ufffd"
# Earlier tokens that are decoded again with new ones, for tokenizers that treat the start of a text specially.
CONTEXT = 8


class Detokenizer:
    """Decodes a stream of tokens in constant memory. Holds back a character until all of its bytes are there.

    Args:
        prompt: tokens before the stream. The stream begins with the character that the last of them leave incomplete.

    Attributes:
        length: characters of the text so far, without those that are held back.
        offset: number of characters before the text of the last token. All tokens of a character have its offset.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._context = CONTEXT if tokenizer.byte_lengths is None else 0
        # Bytes without the end of their character are decoded as one U+FFFD, or by some tokenizers as one for each.
        self._most_held = 3 if tokenizer.byte_lengths is None else 1
        self._new: list[int] = []  # tokens after `_before`; the first `_shown` characters of their text were returned
        self._shown = self._held = self.length = self.offset = 0
        self._keep([])
        for token in prompt[-CONTEXT:]:
            self.push(int(token))
        if self._new:
            size = max(1, len(tokenizer.encode(2 * BROKEN)) - len(tokenizer.encode(BROKEN)))  # tokens of one
            if tokenizer.encode(self._text()).tolist()[-size:] == self._new[-size:]:
                self._restart()  # the prompt ends with a whole U+FFFD
        self.length = self.offset = 0

    def push(self, token: int) -> str:
        """Returns the text that became final with this token."""
        self._new.append(token)
        text = self._text()
        whole = text[: max(len(text.rstrip(BROKEN)), len(text) - self._most_held)]
        fresh = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        # The token comes after held text that is still broken; otherwise it continues the held character.
        self.offset = self.length + min(self._held, len(fresh) - len(fresh.lstrip(BROKEN)))
        self.length, self._held = self.length + len(fresh), len(text) - len(whole)
        if not self._held:
            self._restart()
        elif len(self._new) > CONTEXT:  # characters are shorter than this, so these bytes are not valid UTF-8
            fresh += self.flush()
            self._keep([])
        return fresh

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the stream."""
        rest = self._text()[self._shown :]
        self.length += len(rest)
        self._new, self._shown, self._held = [], 0, 0
        return rest

    def _restart(self) -> None:
        self._keep(self._before + self._new)
        self._new, self._shown, self._held = [], 0, 0

    def _keep(self, shown: list[int]) -> None:
        """Keeps the last of the tokens whose text was returned, as context for the next ones."""
        self._before = shown[-self._context :] if self._context else []
        self._before_length = len(self._tokenizer.decode(self._before))

    def _text(self) -> str:
        return self._tokenizer.decode([*self._before, *self._new])[self._before_length :]


class StopFilter:
    """Cuts a text that arrives in parts before the stop string that is complete first, in whatever parts it arrives.

    Of several that end at the same character, the longest counts.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = [_Stop(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that cannot be part of a stop string, and whether a stop string is complete."""
        before = len(self._held)
        self._held += text
        ends = [(stop, stop.push(text)) for stop in self._stops]
        if matches := [(end, -len(stop.text)) for stop, end in ends if end is not None]:
            end, shorter = min(matches)
            shown, self._held = self._held[: before + end + shorter], ""
            return shown, True
        keep = max((stop.begun for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """Returns the text that was held back as a possible start of a stop string."""
        rest, self._held = self._held, ""
        return rest


class _Stop:
    """Finds a stop string in a text that arrives in parts (Knuth, Morris and Pratt).

    Each character takes constant time on average: a request may name long stop strings, and all others wait for it.

    Attributes:
        begun: length of the longest start of the stop string with which the text ends.
    """

    def __init__(self, text: str):
        self.text, self.begun = text, 0
        self._borders = [0, 0]  # by length of a start: its longest end, shorter than it, that is a start too

    def push(self, text: str) -> int | None:
        """Returns how many characters of `text` complete the stop string, or None."""
        if not self.begun and self.text[0] not in text:
            return None
        for number, character in enumerate(text, 1):
            self.begun = self._extended(self.begun, character)
            if self.begun == len(self.text):
                return number
            if self.begun == len(self._borders):
                self._borders.append(self._extended(self._borders[-1], character))
        return None

    def _extended(self, begun: int, character: str) -> int:
        while begun and self.text[begun] != character:
            begun = self._borders[begun]
        return begun + (self.text[begun] == character)


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

    Args:
        before: the last tokens of the prefix.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        prompt_tokens: int,
        sampling: Sampling,
        seed: int,
        max_tokens: int | None,
        tokenizer: Tokenizer | None,
        ends: Iterable[int],
        before: Sequence[int] = (),
    ):
        self.id = next(_numbers)
        self.prompt, self.prompt_tokens, self.sampling, self.seed = prompt, prompt_tokens, sampling, seed
        self.max_tokens, self.generated = max_tokens, 0
        self.cancelled = False
        self.cached_tokens = 0
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, [*before, *prompt[-CONTEXT:]])
        self._filter = StopFilter(sampling.stop) if sampling.stop else None
        self._ends = set(sampling.stop_tokens)
        if not sampling.ignore_end:
            self._ends |= set(ends)

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
