"""Responses in the format of OpenAI's API: completions and chat completions, as one object or in chunks, and
their schemas for the OpenAPI page.

Calls of tools have the form in which Hermes and Qwen write them. A call is `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, with white space anywhere between its parts.
"""

import json
import math
import time
import uuid
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel
from pydantic_core import from_json

from linnet.inference import Piece
from linnet.serve.scoring import Echo, Score, TokenNames

LEAST = -9999.0  # log-probability of an impossible token, because JSON has no infinity
Pieces = Sequence[Piece]
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

    def choice(self, index: int, pieces: Pieces) -> dict | None:
        """Returns choice `index` with these pieces, or None if they have nothing to send yet."""
        text = "".join(piece.text for piece in pieces)
        ids = [piece.token for piece in pieces if piece.token is not None]
        finish = pieces[-1].finish if pieces else None
        return self._choice(index, pieces, text, ids, finish)

    def _choice(self, index: int, pieces: Pieces, text: str, ids: list[int], finish: str | None) -> dict | None:
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

    def _choice(self, index: int, pieces: Pieces, text: str, ids: list[int], finish: str | None) -> dict | None:
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

    def _choice(self, index: int, pieces: Pieces, text: str, ids: list[int], finish: str | None) -> dict | None:
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


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class PromptTokens(BaseModel):
    """Tokens of prompts that kept states of earlier prompts saved; several choices of one prompt count each."""

    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    """One entry per token; null log-probabilities for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None


class CompletionBody(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class Called(BaseModel):
    """The name of a tool and its arguments, an object as JSON."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    index: int
    id: str
    type: Literal["function"]
    function: Called


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] = []


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: list[int] | None = None


class ChatBody(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"]


OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_CHARACTERS = 1 << 20  # of a call; longer ones are text, so that a stream does not wait forever


class ToolCalls:
    """Takes the text of a completion as it comes, and gives back what is text and what are calls.

    Text that may begin a call is held back until it does not. White space beside a call is dropped, and what looks
    like a call but is none stays text. Each character is searched once, so that a long call takes linear time.
    """

    def __init__(self) -> None:
        self._spaces: list[str] = []  # white space that is dropped if a call follows
        self._inside: list[str] | None = None  # the text of a call that is not complete, without its tags
        self._characters = 0  # of these
        self._begun = ""  # the start of the tag that is looked for
        self._after_call = False  # whether white space that follows is that beside a call
        self.count = 0  # of calls so far

    def push(self, text: str) -> tuple[str, list[dict]]:
        """Returns the text that can be sent now, and the calls that are complete, as OpenAI's API has them."""
        text, self._begun = self._begun + text, ""
        shown: list[str] = []
        calls: list[dict] = []
        while True:
            if self._after_call:
                text = text.lstrip()
                self._after_call = not text
            tag = OPEN if self._inside is None else CLOSE
            before, match, text = text.partition(tag)
            if not match:
                self._begun = _begun(before, tag)
                before = before[: len(before) - len(self._begun)]
            if self._inside is None:
                if words := before.rstrip():
                    shown += [*self._spaces, words]
                    self._spaces = []
                self._spaces.append(before[len(words) :])
                self._inside, self._characters = ([] if match else None), 0
            else:
                self._inside.append(before)
                self._characters += len(before)
                if match:
                    calls += self._close(shown)
                elif self._characters > MOST_CHARACTERS:
                    shown.append(self.flush())
            if not match:
                return "".join(shown), calls

    def flush(self) -> str:
        """Returns the text that is still held back, at the end of the completion."""
        held = [*self._spaces, *([] if self._inside is None else [OPEN, *self._inside]), self._begun]
        self._spaces, self._inside, self._begun = [], None, ""
        text = "".join(held)
        return text if text.strip() or not self.count else ""

    def _close(self, shown: list[str]) -> list[dict]:
        """Returns the call that is now complete. If it is none, appends its text to `shown`, with the tags."""
        assert self._inside is not None
        text, self._inside = "".join(self._inside), None
        call = self._call(text)
        if call is None:
            shown += [*self._spaces, OPEN, text, CLOSE]
        self._spaces, self._after_call = [], call is not None
        return [] if call is None else [call]

    def _call(self, text: str) -> dict | None:
        try:
            value = from_json(text, allow_inf_nan=False)
            if not isinstance(value, dict) or not isinstance(value.get("name"), str):
                return None
            arguments = value.get("arguments", {})
            if not isinstance(arguments, dict | str):
                return None
            whole = isinstance(arguments, str)
            written = arguments if whole else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):  # not JSON, or a number or half of a surrogate pair that JSON cannot hold
            return None
        self.count += 1
        function = {"name": value["name"], "arguments": written}
        return {"index": self.count - 1, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _begun(text: str, tag: str) -> str:
    """Returns the start of `tag` with which `text` ends, "" for none. The first character of a tag is there once."""
    start = text.rfind(tag[0], max(0, len(text) - len(tag) + 1))
    return text[start:] if start >= 0 and tag.startswith(text[start:]) else ""
