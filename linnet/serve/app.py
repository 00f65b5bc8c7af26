"""The HTTP application: OpenAI's paths for one engine, and its requests from a checked body of /v1/completions or
/v1/chat/completions.
"""

import asyncio
import hmac
import logging
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linnet import __version__
from linnet.config import ConfigError, parse
from linnet.inference import Piece, Sampling
from linnet.serve import formats
from linnet.serve.errors import (
    ApiError,
    Disconnected,
    answer_api_error,
    answer_config_error,
    answer_exception,
    answer_http_exception,
)
from linnet.serve.formats import ChatFormat, CompletionFormat, Format, usage
from linnet.serve.requests import ChatRequest, CompletionRequest, GenerationRequest, parse_json, read_body, too_large
from linnet.serve.scoring import Echo, Score, score_prompt
from linnet.serve.service import Call, Service

# The response to a request for completions: one JSON object, or a stream of server-sent events.

_log = logging.getLogger("linnet.serve")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks reverse proxies to forward each event immediately
]


class Answer(Response):
    """Sends the pieces of a call to its client. If the client disconnects, the call ends and its slots are freed.

    Args:
        prepared: what the request asks for.
        started: `time.monotonic()` when the request arrived.
    """

    def __init__(self, service: Service, call: Call, prepared: "Prepared", started: float):
        super().__init__()
        self._service, self._call, self._prepared, self._started = service, call, prepared, started
        self._form, self._tokens = prepared.form, 0
        options = prepared.request.stream_options
        self._show_usage = options is not None and options.include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (
                self._send_events(send) if self._prepared.request.stream else self._send_object(scope, receive, send)
            )
        except Disconnected:
            pass
        finally:
            watcher.cancel()
            self._service.leave(self._call)
            self._service.metrics.whole.observe(time.monotonic() - self._started)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.stop(Disconnected())

    async def _send_object(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: dict[int, list[Piece]] = defaultdict(list)
        try:
            await self._score_prompts()
            while self._call.open:
                for index, piece in await self._take():
                    choices[index].append(piece)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        done = [self._form.choice(index, choices[index]) for index in sorted(choices)]
        body = to_json(self._form.frame(done, usage=self._usage()))
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        try:
            await self._score_prompts()
            while self._call.open:
                pieces = await self._take()
                events = b"".join(self._events(pieces)) if pieces else b": waiting\n\n"
                if events:
                    await _send_part(send, events)
            if self._show_usage:
                await _send_part(send, _event(self._form.frame([], usage=self._usage())))
            await _send_part(send, b"data: [DONE]\n\n", more=False)
        except ApiError as error:
            await _send_part(send, _event(error.body()), more=False)

    def _events(self, pieces: list[tuple[int, Piece]]) -> Iterator[bytes]:
        """Yields one event per choice with all of its new tokens."""
        choices: dict[int, list[Piece]] = defaultdict(list)
        for index, piece in pieces:
            choices[index].append(piece)
        extra = {"usage": None} if self._show_usage else {}
        for index, tokens in choices.items():
            if (choice := self._form.choice(index, tokens)) is not None:
                yield _event(self._form.frame([choice], **extra))

    async def _take(self) -> list[tuple[int, Piece]]:
        pieces = await self._call.take()
        if not pieces:
            self._service.check_alive()
        for _, piece in pieces:
            if piece.finish == "error":
                _log.error("a completion failed: %s", self._service.worker.error or piece.error)
                raise ApiError(500, f"the engine failed: {piece.error[:200]}", code="engine_error")
            if piece.finish == "cancelled":
                raise ApiError(500, "the completion was cancelled", code="cancelled")
            if piece.token is not None and not self._tokens:
                self._service.metrics.first_token.observe(time.monotonic() - self._started)
            self._tokens += piece.token is not None
        return pieces

    async def _score_prompts(self) -> None:
        """Scores the tokens of echoed prompts chunk by chunk, and stops if the client has disconnected."""
        for echo, top in self._prepared.score:
            async with self._service.scoring:
                chunks = score_prompt(self._service.engine, echo.ids, top)
                while (chunk := await _next(chunks)) is not None:
                    echo.scores += chunk
                    if self._call.failure is not None:
                        raise self._call.failure

    def _usage(self) -> dict:
        cached = sum(request.cached_tokens for request in self._call.requests)
        return usage(self._prepared.prompt_tokens, self._tokens, cached)


async def _next(chunks: Iterator[list[Score | None]]) -> list[Score | None] | None:
    try:
        return await asyncio.to_thread(next, chunks, None)
    except Exception as error:
        _log.exception("scoring a prompt failed")
        raise ApiError(500, f"scoring the prompt failed: {type(error).__name__}", code="engine_error") from error


def _event(value: dict) -> bytes:
    return b"data: " + to_json(value, inf_nan_mode="null") + b"\n\n"


async def _send_part(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


_PORT = re.compile(rb":\d+$")
_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/openapi.json"}


class Gate:
    """ASGI middleware that refuses requests by their headers.

    It also announces that the connection closes after an answer to a request whose body was not read.
    """

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service
        key = service.settings.api_key
        self._key = None if key is None else key.get_secret_value().encode()
        self._hosts = service.settings.hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in _PATHS else "other"
        headers = dict(scope["headers"])
        unread = b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"

        async def received() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.responses.labels(path, message["status"]).inc()
                if unread:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        await (self._app if refusal is None else refusal)(scope, received, counted)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Response | None:
        host = _PORT.sub(b"", headers.get(b"host", b"")).decode("latin-1").lower()
        if self._hosts is not None and host and host not in self._hosts:
            name = host[:100]
            message = f"host: {name!r} is not an accepted name of this server; start it with --allowed-host {name}"
            return ApiError(403, message, code="unknown_host").response()
        if self._key is not None and path.startswith("/v1"):
            kind, _, secret = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(secret.strip(), self._key):
                message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
                return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}).response()
        length = headers.get(b"content-length", b"0")
        most = self._service.settings.max_body
        return too_large(most).response() if length.isdigit() and int(length) > most else None


_ERRORS = {
    400: "The request is wrong; the message names the key, the value and the fix",
    401: "The API key is missing or wrong",
    403: "The Host header names another server",
    404: "Unknown model or path",
    408: "The request did not arrive in time",
    413: "The request is too large",
    415: "The request is not JSON",
    429: "The server is full; Retry-After says when to try again",
    500: "The engine failed",
    503: "The server is shutting down or its engine has stopped",
}


def create_app(service: Service) -> FastAPI:
    """Returns the application of a service; the service starts and closes with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = FastAPI(
        title="Linnet",
        version=__version__,
        description="OpenAI's API for one model of Linnet. Errors are always {error: {message, type, param, code}}.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page would load scripts from other servers
        redoc_url=None,
        exception_handlers={
            ApiError: answer_api_error,
            ConfigError: answer_config_error,
            HTTPException: answer_http_exception,
            Disconnected: _answer_nobody,
            Exception: answer_exception,
        },
    )
    app.add_middleware(Gate, service=service)
    security = {} if service.settings.api_key is None else {"security": [{"key": []}]}

    async def generate(request: Request, prepare: Callable[[Service, bytes], Prepared]) -> Response:
        started, settings = time.monotonic(), service.settings
        with service.entry():
            body = await read_body(request, settings.max_body, settings.body_timeout)
            # Parsing and encoding a long prompt takes time; in a thread, other streams continue.
            prepared = await asyncio.to_thread(prepare, service, body)
            return prepared.answer(service, started)

    @app.post(
        "/v1/completions",
        summary="Continue prompts",
        responses=_responses(formats.CompletionBody, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503, stream=True),
        openapi_extra=_body(CompletionRequest) | security,
    )
    async def completions(request: Request) -> Response:
        return await generate(request, prepare_completion)

    @app.post(
        "/v1/chat/completions",
        summary="Answer in a conversation, if the model has a chat template",
        responses=_responses(formats.ChatBody, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503, stream=True),
        openapi_extra=_body(ChatRequest) | security,
    )
    async def chat(request: Request) -> Response:
        return await generate(request, prepare_chat)

    @app.get(
        "/v1/models",
        summary="The model that is served",
        responses=_responses(formats.ModelList, 401, 403, 413),
        openapi_extra=security,
    )
    async def models() -> Response:
        return _json({"object": "list", "data": [model_card(service)]})

    @app.get(
        "/v1/models/{model:path}",
        summary="A model by its name",
        responses=_responses(formats.ModelCard, 401, 403, 404, 413),
        openapi_extra=security,
    )
    async def model(model: str) -> Response:
        check_model(service, model)
        return _json(model_card(service))

    @app.get("/health", summary="Whether it can generate", responses=_responses(formats.Health, 403, 413, 503))
    async def health() -> Response:
        service.check_open()
        return _json({"status": "ok"})

    @app.get(
        "/metrics",
        summary="Counters and times for Prometheus",
        response_class=Response,
        responses=_responses(None, 403, 413) | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    _describe(app, service)
    return app


def _responses(body: type[BaseModel] | None, *statuses: int, stream: bool = False) -> dict:
    ok: dict = {} if body is None else {200: {"model": body, "description": "Done"}}
    if stream:
        ok[200]["content"] = {"text/event-stream": {}}
    return ok | {status: {"model": formats.ErrorBody, "description": _ERRORS[status]} for status in statuses}


def _body(request: type[BaseModel]) -> dict:
    """Returns the OpenAPI entry of a body that the endpoint checks itself, to report all problems at once as 400."""
    schema = request.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _describe(app: FastAPI, service: Service) -> None:
    """Adds to the OpenAPI page what FastAPI does not know: schemas of body parts, the model and the limits."""
    page, settings = app.openapi(), service.settings
    components = page.setdefault("components", {}).setdefault("schemas", {})
    for request in (CompletionRequest, ChatRequest):
        components.update(request.model_json_schema(ref_template="#/components/schemas/{model}").get("$defs", {}))
    limits = {"max_tokens": settings.max_tokens, "max_completion_tokens": settings.max_tokens}
    limits["n"] = min(settings.max_choices, service.capacity)
    for path in page["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            if "requestBody" in operation:
                keys = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
                keys["model"]["enum"] = [service.engine.name]
                for key, most in limits.items():
                    if key in keys:
                        keys[key]["anyOf"][0]["maximum"] = most
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    if settings.api_key is not None:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}


def _json(value: dict) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _answer_nobody(request: Request, error: Disconnected) -> Response:
    return Response(status_code=499)  # for the metrics, as in nginx; the client has disconnected


DEFAULT_TOKENS = 16  # default of max_tokens for completions, as in OpenAI's API; chats have no such default


MOST_LOGPROBS_HELD = 1 << 21  # of a request: each takes 0.2 to 0.7 KB until the answer is sent


class Prepared:
    """A checked and encoded request. It is made in another thread, because encoding may take long.

    Attributes:
        choices: for each completion, the token ids of its prompt and its sampling settings.
        prompt_tokens: number of tokens of all prompts; each prompt counts once.
        form: format of the response.
        score: echoed prompts whose own tokens are scored first, each with the number of likeliest tokens per place.
        generates: False if `max_tokens` is 0, so that prompts are only echoed and scored.
    """

    def __init__(self, request: GenerationRequest):
        self.request = request
        self.choices: list[tuple[list[int], Sampling]] = []
        self.prompt_tokens = 0
        self.form: Format
        self.score: list[tuple[Echo, int]] = []
        self.generates = True

    def answer(self, service: Service, started: float) -> Answer:
        """Submits the choices to the engine and returns the response. Raises `ApiError` if the server is full."""
        call = service.open(self.choices if self.generates else [], self.request.stream)
        if not self.generates:
            call.running = len(self.choices)
            for index in range(len(self.choices)):
                call.push(index, Piece(None, finish="length"))
        return Answer(service, call, self, started)


def prepare_completion(service: Service, body: bytes) -> Prepared:
    """Returns the checked body of /v1/completions. Raises `ApiError` or `ConfigError` with all of its problems."""
    request = parse(CompletionRequest, parse_json(body), "request", large_integers=True)
    check_model(service, request.model)
    _check_count(service, len(request.prompt) * request.n)
    prepared = Prepared(request)
    prepared.form = form = CompletionFormat(
        service.names, request.model, request.stream, request.logprobs is not None, request.return_token_ids
    )
    prepared.generates = request.max_tokens != 0
    limit = request.max_tokens if "max_tokens" in request.model_fields_set else None
    for number, prompt in enumerate(request.prompt):
        key = "prompt" if len(request.prompt) == 1 else f"prompt[{number}]"
        tokens, most = service.tokens(prompt, limit, DEFAULT_TOKENS, key)
        ids = tokens.tolist()
        first = len(prepared.choices)
        settings = max(most, 1), request.logprobs, service.engine.generation.sampling
        prepared.choices += [(tokens, request.sampling(i, *settings)) for i in range(request.n)]
        prepared.prompt_tokens += len(ids)
        if request.echo:
            scored = request.logprobs is not None
            echo = Echo.of(prompt, ids, service.engine.tokenizer, prepared.generates, scored)
            form.echoes |= dict.fromkeys(range(first, first + request.n), echo)
            if scored:
                prepared.score.append((echo, request.logprobs))
    if request.logprobs is not None:
        _check_logprobs(prepared, "logprobs", request.logprobs, sum(len(echo.ids) for echo, _ in prepared.score))
    service.engine.check(*prepared.choices[0])  # the settings that all choices share
    return prepared


def prepare_chat(service: Service, body: bytes) -> Prepared:
    """Returns the checked body of /v1/chat/completions. Raises `ApiError` or `ConfigError` with all of its problems."""
    request = parse(ChatRequest, parse_json(body), "request", large_integers=True)
    check_model(service, request.model)
    _check_count(service, request.n)
    if service.template is None:
        what = f"model: {request.model!r} has no chat template"
        message = f"{what}; use /v1/completions, or put chat_template.jinja into its folder"
        raise ApiError(404, message, param="model", code="no_chat_template")
    prepared = Prepared(request)
    top = (request.top_logprobs or 0) if request.logprobs else None
    prepared.form = ChatFormat(
        service.names, request.model, request.stream, request.logprobs, request.return_token_ids, bool(request.offered)
    )
    if request.offered and not service.template.knows_tools:
        message = f"tools: the chat template of {request.model!r} shows the model no tools; leave it out"
        raise ApiError(400, message, param="tools", code="no_tools")
    options = request.chat_template_kwargs or {}
    if unknown := [name for name in options if name not in service.template.options]:
        known = ", ".join(service.template.options) or "none"
        what = f"chat_template_kwargs: the chat template reads no variable {unknown[0][:200]!r} (its own: {known})"
        raise ApiError(400, f"{what}; leave it out", param="chat_template_kwargs", code="invalid_value")
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    limit = request.max_completion_tokens or request.max_tokens
    encoded = service.template.encode(messages, request.offered, options)
    tokens, most = service.tokens(encoded, limit, None, "messages")
    prepared.prompt_tokens = len(tokens)
    for i in range(request.n):
        sampling = request.sampling(i, most, top, service.engine.generation.sampling)
        ends = [] if request.ignore_eos else service.template.turn_ends
        sampling = sampling.model_copy(update={"stop_tokens": [*sampling.stop_tokens, *ends]})
        prepared.choices.append((tokens, sampling))
    if top is not None:
        _check_logprobs(prepared, "top_logprobs", top, 0)
    service.engine.check(*prepared.choices[0])
    return prepared


def _check_logprobs(prepared: Prepared, key: str, value: int, echoed: int) -> None:
    """Raises `ApiError` if the answer may hold more log-probabilities than `MOST_LOGPROBS_HELD`.

    A stream holds those of echoed prompts alone, which several choices share.

    Args:
        key, value: the key of the request that asks for so many likeliest tokens, besides the token itself.
        echoed: tokens of prompts that are scored.
    """
    request, tokens = prepared.request, echoed
    if not request.stream:
        generated = sum(sampling.max_tokens for _, sampling in prepared.choices) if prepared.generates else 0
        tokens = echoed * request.n + generated
    if (count := tokens * (value + 1)) > MOST_LOGPROBS_HELD:
        what = f"{key}: {value} likeliest tokens and the token itself, at up to {tokens:,} places, are {count:,}"
        fix = "ask for fewer, for fewer tokens (max_tokens) or completions" + ("" if request.stream else ", or stream")
        message = f"{what} log-probabilities; one request may have {MOST_LOGPROBS_HELD:,}; {fix}"
        raise ApiError(400, message, param=key, code="invalid_value")


def check_model(service: Service, model: str) -> None:
    """Raises `ApiError` 404 unless `model` is the model of this server."""
    if model != service.engine.name:
        message = f"model: {model[:200]!r} is not served here; use {service.engine.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def model_card(service: Service) -> dict:
    return {"id": service.engine.name, "object": "model", "created": service.created, "owned_by": "linnet"}


def _check_count(service: Service, count: int) -> None:
    if count > (most := min(service.settings.max_choices, service.capacity)):
        message = f"n: {count} completions (prompts times n) are too many for one request; ask for at most {most}"
        raise ApiError(400, message, param="n", code="invalid_value")
