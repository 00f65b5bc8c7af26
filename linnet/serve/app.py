"""The HTTP application: OpenAI's paths for one engine."""

import asyncio
import hmac
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linnet import __version__
from linnet.config import ConfigError
from linnet.serve import schemas
from linnet.serve.body import read_body, too_large
from linnet.serve.endpoints import Prepared, check_model, model_card, prepare_chat, prepare_completion
from linnet.serve.errors import (
    ApiError,
    Disconnected,
    answer_api_error,
    answer_config_error,
    answer_exception,
    answer_http_exception,
)
from linnet.serve.requests import ChatRequest, CompletionRequest
from linnet.serve.service import Service

_PORT = re.compile(rb":\d+$")
_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics", "/openapi.json"}


class Gate:
    """ASGI middleware that refuses requests by their headers."""

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

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.responses.labels(path, message["status"]).inc()
            await send(message)

        refusal = self._refusal(scope["path"], dict(scope["headers"]))
        await (self._app if refusal is None else refusal)(scope, receive, counted)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Response | None:
        host = _PORT.sub(b"", headers.get(b"host", b"")).decode("latin-1").lower()
        if self._hosts is not None and host and host not in self._hosts:
            name = host[:100]
            message = f"host: {name!r} is not an accepted name of this server; start it with --allowed-host {name}"
            return ApiError(403, message, code="unknown_host").response()
        if self._key is not None and path.startswith("/v1"):
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
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
        responses=_responses(schemas.CompletionBody, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503, stream=True),
        openapi_extra=_body(CompletionRequest) | security,
    )
    async def completions(request: Request) -> Response:
        return await generate(request, prepare_completion)

    @app.post(
        "/v1/chat/completions",
        summary="Answer in a conversation, if the model has a chat template",
        responses=_responses(schemas.ChatBody, 400, 401, 403, 404, 408, 413, 415, 429, 500, 503, stream=True),
        openapi_extra=_body(ChatRequest) | security,
    )
    async def chat(request: Request) -> Response:
        return await generate(request, prepare_chat)

    @app.get(
        "/v1/models",
        summary="The model that is served",
        responses=_responses(schemas.ModelList, 401, 403, 413),
        openapi_extra=security,
    )
    async def models() -> Response:
        return _json({"object": "list", "data": [model_card(service)]})

    @app.get(
        "/v1/models/{model:path}",
        summary="A model by its name",
        responses=_responses(schemas.ModelCard, 401, 403, 404, 413),
        openapi_extra=security,
    )
    async def model(model: str) -> Response:
        check_model(service, model)
        return _json(model_card(service))

    @app.get("/health", summary="Whether it can generate", responses=_responses(schemas.Health, 403, 413, 503))
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
    return ok | {status: {"model": schemas.ErrorBody, "description": _ERRORS[status]} for status in statuses}


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
