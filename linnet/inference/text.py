"""From tokens to text as they come: nothing is shown that a later token could still change."""

from collections.abc import Sequence

from linnet.data import Tokenizer

BROKEN = "\ufffd"
_CONTEXT = (
    8  # tokens before the new ones that are decoded with them, where a tokenizer treats the start of a text apart
)


class Detokenizer:
    """The text of a stream of tokens, in constant memory. A character whose bytes are not all there is held back."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._context = _CONTEXT if tokenizer.byte_lengths is None else 0
        self._keep(list(prompt[-_CONTEXT:]))
        self._new: list[int] = []  # shown up to the `_shown`-th character behind `_before`
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._new.append(token)
        text = self._text()
        whole = text[:-1] if text.endswith(BROKEN) else text
        fresh = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if whole is text:
            self._keep(self._before + self._new)
            self._new, self._shown = [], 0
        elif len(self._new) > _CONTEXT:  # no character is that long: the bytes make none
            fresh += self.flush()
            self._keep([])
        return fresh

    def flush(self) -> str:
        """What is held back: the stream is over."""
        rest = self._text()[self._shown :]
        self._new, self._shown = [], 0
        return rest

    def _keep(self, shown: list[int]) -> None:
        """The last of the tokens whose text was shown."""
        self._before = shown[-self._context :] if self._context else []
        self._before_length = len(self._tokenizer.decode(self._before))

    def _text(self) -> str:
        return self._tokenizer.decode([*self._before, *self._new])[self._before_length :]


class StopFilter:
    """Cuts a text that comes in parts before the first of some stop strings."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is no part of a stop string, and whether a stop string is complete."""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            shown, self._held = self._held[: min(places)[0]], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
