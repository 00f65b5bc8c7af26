"""Checks the host, key and size of every request before it is read, and counts responses."""

import hmac
import re

from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linnet.serve.body import too_large
from linnet.serve.errors import ApiError
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
