"""Turns a stream of tokens into text. Text is released only when later tokens can no longer change it."""

from collections.abc import Sequence

from linnet.data import Tokenizer

BROKEN = "\ufffd"
_CONTEXT = (
    8  # earlier tokens that are decoded again with new ones, for tokenizers that treat the start of a text specially
)


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
        self._context = _CONTEXT if tokenizer.byte_lengths is None else 0
        # Bytes without the end of their character are decoded as one U+FFFD, or by some tokenizers as one for each.
        self._most_held = 3 if tokenizer.byte_lengths is None else 1
        self._new: list[int] = []  # tokens after `_before`; the first `_shown` characters of their text were returned
        self._shown = self._held = self.length = self.offset = 0
        self._keep([])
        for token in prompt[-_CONTEXT:]:
            self.push(int(token))
        if self._new and tokenizer.encode(self._text()).tolist()[-len(self._new) :] == self._new:
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
        elif len(self._new) > _CONTEXT:  # characters are shorter than this, so these bytes are not valid UTF-8
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
    """Cuts a text that arrives in parts before the first stop string."""

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that cannot be part of a stop string, and whether a stop string is complete."""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            shown, self._held = self._held[: min(places)[0]], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def flush(self) -> str:
        """Returns the text that was held back as a possible start of a stop string."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
