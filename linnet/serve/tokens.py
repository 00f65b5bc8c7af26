"""Names of tokens in log-probabilities."""

from linnet.data import Tokenizer

BROKEN = "\ufffd"


class TokenNames:
    """Names of single tokens: their text, or `token_id:7` for a token that is not text by itself.

    Examples of the latter are parts of a character and end tokens. The completions API uses the names as keys, so only
    tokens with the same text share a name.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first word of a text, so each token is decoded after another one.
        self._before = [] if tokenizer is None else tokenizer.encode("a").tolist()
        self._start = 0 if tokenizer is None else len(tokenizer.decode(self._before))
        self._texts: dict[int, str | None] = {}

    def text(self, token: int) -> str | None:
        """Returns the text of a token, or None if it is not complete text by itself."""
        if self._tokenizer is None:
            return None
        if token not in self._texts:
            text = self._tokenizer.decode([*self._before, token])[self._start :]
            self._texts[token] = None if not text or BROKEN in text else text
        return self._texts[token]

    def data(self, token: int) -> bytes | None:
        """Returns the bytes of a token, which may be part of a character, or None if they are not known."""
        text = self.text(token)
        if text is not None or self._tokenizer is None or self._tokenizer.byte_lengths is None:
            return None if text is None else text.encode()
        return self._tokenizer.token_bytes[token] or None  # an end token has no bytes

    def __getitem__(self, token: int) -> str:
        return self.text(token) or f"token_id:{token}"
