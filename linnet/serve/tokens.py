"""Names of tokens in log-probabilities."""

from linnet.data import Tokenizer

BROKEN = "\ufffd"


class TokenNames:
    """The text of single tokens; a token that is not text by itself (part of a character, an end) is `token_id:7`.

    The completions API uses the names as keys, so only tokens of the same text share a name.
    """

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        # Some tokenizers drop the space before the first word of a text, so a token is decoded after another.
        self._before = [] if tokenizer is None else tokenizer.encode("a").tolist()
        self._start = 0 if tokenizer is None else len(tokenizer.decode(self._before))
        self._texts: dict[int, str | None] = {}

    def text(self, token: int) -> str | None:
        """Returns the text, None if the token is not whole text by itself."""
        if self._tokenizer is None:
            return None
        if token not in self._texts:
            text = self._tokenizer.decode([*self._before, token])[self._start :]
            self._texts[token] = None if not text or BROKEN in text else text
        return self._texts[token]

    def __getitem__(self, token: int) -> str:
        return self.text(token) or f"token_id:{token}"
