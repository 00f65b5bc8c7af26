"""Responses in the format of OpenAI's API: completions and chat completions, as one object or in chunks."""

import math
import time
import uuid
from collections.abc import Sequence

from linnet.inference import Piece
from linnet.serve.scoring import Echo, Score, TokenNames
from linnet.serve.tools import ToolCalls

LEAST = -9999.0  # log-probability of an impossible token, because JSON has no infinity
_Told = tuple[int, Score | None, int]  # a token, its score, and its offset in the text


class Format:
    """Formats the response to one request.

    `choice` is called with all pieces of a choice, or, for a stream, repeatedly with the new pieces.

    Args:
        stream: whether the response is a stream of chunks.
        logprobs: whether log-probabilities were requested.
        ids: whether token ids were requested.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, names: TokenNames, model: str, stream: bool, logprobs: bool, ids: bool):
        self._names, self._logprobs, self._with_ids, self._stream = names, logprobs, ids, stream
        self._frame = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_kind if stream else self.kind,
            "created": int(time.time()),
            "model": model,
        }

    def frame(self, choices: list[dict], **usage: dict | None) -> dict:
        """Returns the object that contains the choices, and `usage` if given."""
        return {**self._frame, "choices": choices, **usage}

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict | None:
        """Returns choice `index` with these pieces, or None if they have nothing to send yet."""
        text = "".join(piece.text for piece in pieces)
        ids = [piece.token for piece in pieces if piece.token is not None]
        finish = pieces[-1].finish if pieces else None
        return self._choice(index, pieces, text, ids, finish)

    def _choice(
        self, index: int, pieces: Sequence[Piece], text: str, ids: list[int], finish: str | None
    ) -> dict | None:
        raise NotImplementedError


class CompletionFormat(Format):
    """Responses of /v1/completions.

    Attributes:
        echoes: with `echo`, the prompt of each choice.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, names: TokenNames, model: str, stream: bool, logprobs: bool, ids: bool):
        super().__init__(names, model, stream, logprobs, ids)
        self.echoes: dict[int, Echo] = {}
        self._echoed: dict[int, int] = {}  # characters of the prompt in each choice's text

    def _choice(
        self, index: int, pieces: Sequence[Piece], text: str, ids: list[int], finish: str | None
    ) -> dict | None:
        told: list[_Told] = []
        if (echo := self.echoes.pop(index, None)) is not None:
            told += zip(echo.ids, echo.scores, echo.offsets, strict=False)
            self._echoed[index] = len(echo.text)
            text, ids = echo.text + text, [*echo.ids, *ids]
        start = self._echoed.get(index, 0)
        for piece in pieces:
            if piece.token is not None:
                told.append((piece.token, (piece.logprob, piece.top_logprobs), start + piece.offset))
        if not (text or finish or (self._logprobs and told) or (self._with_ids and ids)):
            return None
        logprobs = self._lines(told) if self._logprobs else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return choice | ({"token_ids": ids} if self._with_ids else {})

    def _lines(self, told: list[_Told]) -> dict:
        return {
            "tokens": [self._names[token] for token, _, _ in told],
            "token_logprobs": [None if score is None else finite(score[0]) for _, score, _ in told],
            "top_logprobs": [
                # As in OpenAI's API, the token itself is always included.
                None if score is None else {self._names[t]: finite(lp) for t, lp in (*score[1], (token, score[0]))}
                for token, score, _ in told
            ],
            "text_offset": [offset for _, _, offset in told],
        }


class ChatFormat(Format):
    """Responses of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, names: TokenNames, model: str, stream: bool, logprobs: bool, ids: bool, with_tools: bool = False
    ):
        super().__init__(names, model, stream, logprobs, ids)
        self._begun: set[int] = set()
        self._with_tools = with_tools
        self._tools: dict[int, ToolCalls] = {}

    def _choice(
        self, index: int, pieces: Sequence[Piece], text: str, ids: list[int], finish: str | None
    ) -> dict | None:
        told = [piece for piece in pieces if piece.token is not None] if self._logprobs else []
        calls: list[dict] = []
        if self._with_tools:
            tools = self._tools.setdefault(index, ToolCalls())
            text, calls = tools.push(text)
            text += tools.flush() if finish else ""
            finish = "tool_calls" if finish == "stop" and tools.count else finish
        choice: dict = {"index": index}
        if self._stream:
            if not (text or calls or finish or told or (self._with_ids and ids)):
                return None
            role = {} if index in self._begun else {"role": "assistant"}
            self._begun.add(index)
            choice["delta"] = {**role, "content": text} | ({"tool_calls": calls} if calls else {})
        else:
            choice["message"] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
            choice["message"] |= {"tool_calls": calls} if calls else {}
        choice["logprobs"] = {"content": [self._line(piece) for piece in told]} if self._logprobs else None
        choice["finish_reason"] = finish
        return choice | ({"token_ids": ids} if self._with_ids else {})

    def _line(self, piece: Piece) -> dict:
        tops = [self._named(token, logprob) for token, logprob in piece.top_logprobs]
        return {**self._named(piece.token, piece.logprob), "top_logprobs": tops}

    def _named(self, token: int, logprob: float) -> dict:
        data = self._names.data(token)
        return {"token": self._names[token], "logprob": finite(logprob), "bytes": None if data is None else list(data)}


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict:
    return {
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
