"""The requests of OpenAI's API: every key and its range.

As in OpenAI's API, null means that the key is missing. Every key of OpenAI's API is known. One that changes no response
(labels, hints for a cache) is not used; any other that this server does not support is accepted only at the values that
have no effect, so that every response matches its request. Keys that OpenAI does not have (top_k, min_p,
repetition_penalty, stop_token_ids, ignore_eos, return_token_ids) have the names that other servers of open models use.

A body, a JSON object, is read within limits of size and time.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request
from pydantic import FailFast, Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from linnet.config import Config, parse
from linnet.inference import MOST_LOGPROBS, Sampling
from linnet.inference.sampling import DRAWING
from linnet.serve.errors import ApiError, Disconnected

MOST_STOPS = 16
_UNUSED = "not used, since it changes no response"
_ONLY_TEXT = "leave it out; responses are plain text"
_MOST_KEYS = 64  # per object; bounds the length of the error


def _only(*values: object, fix: str) -> Any:
    """Returns the type of a key that has no effect at `values` and is an error at others."""

    def check(value: object) -> object:
        if value is None or any(_same(value, known) for known in values):
            return value
        raise ValueError(f"{_shown(value)} is not supported; {fix}")

    return Annotated[Any, PlainValidator(check), WithJsonSchema({"enum": [None, *values]})]


def _same(a: object, b: object) -> bool:
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _check_prompt(value: object) -> list[str | list[int]]:
    """Returns a list of prompts from text, texts, token ids or lists of token ids."""
    fix = "give text, a list of token ids, or a list of either"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"{_shown(value)} is not a prompt; {fix}")
    if not value:
        raise ValueError(f"[] holds no prompt; {fix}")
    if _all_ids(value):
        return [value]
    if all(isinstance(part, str) for part in value):
        return value
    if all(isinstance(part, list) and part and _all_ids(part) for part in value):
        return value
    raise ValueError(f"{_shown(value)} mixes kinds or holds empty lists; {fix}")


def _all_ids(values: list) -> bool:
    return all(type(value) is int for value in values)


def _check_stop(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"{_shown(value)} is not a stop string; give a text or a list of texts")
    if len(stops) > MOST_STOPS or "" in stops:
        raise ValueError(f"{_shown(value)} has too many or empty texts; give at most {MOST_STOPS}, none of them empty")
    return stops


def _check_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not _all_ids(value) or min(value, default=0) < 0:
        raise ValueError(f"{_shown(value)} is not a list of token ids; give whole numbers from 0 on")
    return value


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
Prompt = Annotated[
    Any,
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
                {"type": "null"},
            ]
        }
    ),
]
Stop = Annotated[
    Any,
    PlainValidator(_check_stop),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MOST_STOPS}, {"type": "null"}]}),
]
Ids = Annotated[
    Any,
    PlainValidator(_check_ids),
    WithJsonSchema({"anyOf": [{**_IDS, "minItems": 0}, {"type": "null"}]}),
]


class _Object(Config):
    NULLS: ClassVar[tuple[str, ...]] = ()  # keys at which null has a meaning of its own

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        if len(values) > _MOST_KEYS:
            raise ValueError(f"has {len(values)} keys; use only {', '.join(sorted(cls.model_fields))}")
        return {key: value for key, value in values.items() if value is not None or key in cls.NULLS}


class StreamOptions(_Object):
    """Options of a stream."""

    include_usage: bool | None = Field(False, description="send a last chunk with the token counts")
    include_obfuscation: bool | None = Field(None, description=_UNUSED)


class GenerationRequest(_Object):
    """Keys that completions and chat completions share."""

    model: str
    temperature: float | None = Field(1.0, ge=0, le=100, description="0 takes the likeliest token")
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(0, ge=0, lt=1 << 31, description="0 keeps all tokens")
    min_p: float | None = Field(0.0, ge=0, lt=1)
    repetition_penalty: float | None = Field(1.0, ge=0.01, le=100)
    n: int | None = Field(1, ge=1, description="completions per prompt, with consecutive seeds")
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: Stop = []
    stop_token_ids: Ids = []
    ignore_eos: bool | None = Field(False, description="continue after the end of a document")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(False, description="add the token ids to each choice")
    frequency_penalty: _only(0, fix="use repetition_penalty") = 0
    presence_penalty: _only(0, fix="use repetition_penalty") = 0
    logit_bias: _only({}, fix="leave it out") = None
    user: str | None = Field(None, description=_UNUSED)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream: true; set it, or leave stream_options out")
        return self

    def sampling(
        self, choice: int, max_tokens: int, logprobs: int | None, defaults: Mapping[str, float] | None = None
    ) -> Sampling:
        """Returns the engine's settings for one of `n` choices; `defaults` are the model's own, by key."""
        presets = {key: value for key, value in (defaults or {}).items() if key not in self.model_fields_set}
        return Sampling(
            max_tokens=max_tokens,
            **{key: presets.get(key, getattr(self, key)) for key in DRAWING},
            stop=self.stop,
            stop_tokens=self.stop_token_ids,
            ignore_end=self.ignore_eos,
            seed=None if self.seed is None else (self.seed + choice) % (1 << 63),
            logprobs=logprobs,
        )


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt = Field("", description="an empty text begins a new document")
    max_tokens: int | None = Field(16, ge=0)
    echo: bool | None = Field(False, description="return the prompt before its completion")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    best_of: int | None = Field(None, ge=1, description="must equal n")
    suffix: _only("", fix="leave it out; the model can only continue a prompt") = ""

    @model_validator(mode="after")
    def _as_many_as_n(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of: {self.best_of} is not supported; leave it out, or set it to n")
        return self


_NO_TOOLS = "leave it out; use tools and tool_calls"
_NO_PART = "leave it out; a turn is text alone"


def _empty(fix: str) -> Any:
    """Returns the type of a key that other servers send empty; templates do not see it."""
    return Annotated[_only("", [], {}, fix=fix), Field(exclude=True)]


class TextPart(_Object):
    """A text part of a message. Images, audio and files are not supported."""

    type: Literal["text"]
    text: str
    annotations: _empty(_NO_PART) = None


def _check_content(value: object, info: ValidationInfo) -> str:
    if value is None:  # an answer without text, as clients send it back; other roles have nothing to say then
        if info.data.get("role") == "assistant":
            return ""
        raise ValueError("null is allowed for role assistant alone; text is required")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) <= 1024:
        return "".join(parse(TextPart, part).text for part in value)
    raise ValueError(f"{_shown(value)} is not valid content; give text, or a list of at most 1024 parts of type text")


class Function(_Object):
    """A function that the model may call. `parameters` is a JSON schema, which only the model reads."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: _only(False, fix="leave it out; answers are not forced into a schema") = Field(None, exclude=True)


class Tool(_Object):
    type: Literal["function"]
    function: Function


def _check_arguments(value: object) -> dict:
    """Returns the arguments of a call as an object, as templates expect them, from the text that clients send."""
    try:
        arguments = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{_shown(value)} is not a JSON object as text; send the arguments as the answer had them")
    return arguments


class CalledFunction(_Object):
    name: str
    arguments: Annotated[Any, PlainValidator(_check_arguments), WithJsonSchema({"type": "string"})]


class CalledTool(_Object):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = Field(None, exclude=True)
    function: CalledFunction


class Message(_Object):
    """One turn of a conversation. A `content` of null is an empty turn of the assistant."""

    NULLS = ("content",)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Any,
        PlainValidator(_check_content),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": TextPart.model_json_schema(), "maxItems": 1024},
                    {"type": "null"},
                ]
            }
        ),
    ]
    name: str | None = None
    tool_calls: list[CalledTool] | None = Field(None, max_length=128, description="role assistant alone")
    tool_call_id: str | None = Field(None, description="role tool alone: the call that this turn answers")
    function_call: _empty(_NO_TOOLS) = None
    annotations: _empty(_NO_PART) = None
    refusal: _empty(_NO_PART) = None
    audio: _empty(_NO_PART) = None
    reasoning: _empty(_NO_PART) = None
    reasoning_content: _empty(_NO_PART) = None

    @model_validator(mode="before")
    @classmethod
    def _calls_without_text(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        if values.get("tool_calls") == []:  # as other servers send a turn without calls
            return {key: value for key, value in values.items() if key != "tool_calls"}
        return {"content": None, **values} if values.get("tool_calls") else values

    @model_validator(mode="after")
    def _roles_of_calls(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls: role {self.role} makes no calls; leave it out, or use role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"tool_call_id: role {self.role} answers no call; leave it out, or use role tool")
        return self


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=1024)
    max_tokens: int | None = Field(None, ge=1, description="older name of max_completion_tokens")
    max_completion_tokens: int | None = Field(None, ge=1, description="null: until an end token or the server's limit")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=128, description="passed to the chat template")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=32, description="values of variables that the chat template reads, such as enable_thinking"
    )
    tool_choice: _only("none", "auto", fix="use auto or none; calls are not forced") = None
    parallel_tool_calls: bool | None = Field(None, description="true, or not used without tools")
    functions: _only([], fix=_NO_TOOLS) = None
    function_call: _only("none", "auto", fix=_NO_TOOLS) = None
    response_format: _only({"type": "text"}, fix=_ONLY_TEXT) = None
    modalities: _only(["text"], fix=_ONLY_TEXT) = None
    audio: _only(fix=_ONLY_TEXT) = None
    prediction: _only(fix="leave it out; responses are not predicted") = None
    moderation: _only(fix="leave it out; responses are not moderated") = None
    web_search_options: _only(fix="leave it out; this server searches nothing") = None
    reasoning_effort: _only("none", fix="leave it out; use chat_template_kwargs") = None
    verbosity: _only("medium", fix="leave it out") = None
    service_tier: _only("auto", "default", fix="leave it out; there is one tier") = None
    store: _only(False, fix="leave it out; this server does not store responses") = None
    metadata: dict[str, str] | None = Field(None, description=_UNUSED)
    safety_identifier: str | None = Field(None, description=_UNUSED)
    prompt_cache_key: str | None = Field(None, description=_UNUSED)
    prompt_cache_retention: str | None = Field(None, description=_UNUSED)
    prompt_cache_options: dict[str, Any] | None = Field(None, description=_UNUSED)

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs: true; set it, or leave top_logprobs out")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: differs from max_completion_tokens; give one of them")
        if self.offered and self.parallel_tool_calls is False:
            raise ValueError("parallel_tool_calls: false is not supported; leave it out, and use the first call alone")
        return self

    @property
    def offered(self) -> list[dict]:
        """The tools that the model may call, for the chat template."""
        if not self.tools or self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


_JSON = re.compile(r"application/(\w+\+)?json\s*(;|$)", re.IGNORECASE)
_SHOWN = 80
MOST_NESTED = 1 << 16  # lists and objects of a body: each takes many times its two bytes, and no request needs more
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # also one without an end, so that no byte is read twice


def too_large(most: int) -> ApiError:
    message = f"the request is larger than this server's limit of {most:,} bytes; send less, or raise --max-body"
    return ApiError(413, message, code="request_too_large")


async def read_body(request: Request, most: int, timeout: float) -> bytes:
    """Returns the body, of at most `most` bytes, which must arrive within `timeout` seconds.

    Raises:
        ApiError: 408 (time), 413 (size), or 415 if the body is compressed or its content type is not JSON. Browsers let
            web pages send other content types to servers on the user's machine without permission.
        Disconnected: the client disconnected.
    """
    kind = request.headers.get("content-type", "")
    if not _JSON.match(kind):
        message = f"content-type: {kind[:_SHOWN]!r} is not supported; send JSON as application/json"
        raise ApiError(415, message, code="unsupported_media_type")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        message = f"content-encoding: {coding[:_SHOWN]!r} is not supported; send the body as it is"
        raise ApiError(415, message, code="unsupported_media_type")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large(most)
    except TimeoutError:
        message = f"the request did not arrive within {timeout:g} seconds; send it faster"
        raise ApiError(408, message, code="request_timeout") from None
    except ClientDisconnect:
        raise Disconnected from None
    return bytes(body)


def parse_json(body: bytes) -> dict:
    """Returns the JSON object in `body`.

    Raises:
        ApiError: it is not one, has NaN or invalid UTF-8, or more than `MOST_NESTED` lists and objects.
    """
    if body.count(b"[") + body.count(b"{") > MOST_NESTED:
        values = _STRING.sub(b"", body)  # a text may hold any number of brackets
        if (count := values.count(b"[") + values.count(b"{")) > MOST_NESTED:
            message = f"the body is JSON of {count:,} lists and objects; send at most {MOST_NESTED:,}"
            raise ApiError(400, message, code="invalid_json")
    try:
        values = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        reason = "the body is not UTF-8" if not _is_utf8(body) else f"the body is not JSON: {error}"
        raise ApiError(400, f"{reason}; send one JSON object", code="invalid_json") from None
    if not isinstance(values, dict):
        message = f"the body is JSON of type {type(values).__name__}; send an object with the keys of the request"
        raise ApiError(400, message, code="invalid_json")
    return values


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
