"""An HTTP server with OpenAI's API for the engine of `linnet.inference`. Needs the extra `serve`.

listener = bind(settings := ServeConfig(port=8000))
serve(Service(Engine.of_run("runs/tnl-10m-0123456789ab"), settings), listener)

The application runs under uvicorn; here are its socket, its signals, and clients that do not read.
"""

import asyncio
import errno
import socket
from collections.abc import Callable

import h11
import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.h11_impl import H11Protocol

from linnet.config import ConfigError
from linnet.data.chat.template import ChatTemplate, load_chat_template
from linnet.serve.app import create_app
from linnet.serve.errors import ApiError
from linnet.serve.service import ServeConfig, Service

__all__ = ["ChatTemplate", "ServeConfig", "Server", "Service", "bind", "create_app", "load_chat_template", "serve"]


def bind(settings: ServeConfig) -> socket.socket:
    """Binds the port before the model is loaded, so that a busy port fails fast. Raises `ConfigError` if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        message = f"host: {settings.host!r} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all"
        raise ConfigError([message], "server") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port: {settings.port} is in use on {settings.host}; choose another, or 0 for any free one"
        else:
            message = f"host: cannot listen on {settings.host}:{settings.port} ({error.strerror}); choose another"
        raise ConfigError([message], "server") from None
    return listener


def serve(service: Service, listener: socket.socket, on_start: Callable[[], None] = lambda: None) -> None:
    """Serves on `listener` until SIGTERM or SIGINT; running responses then get `grace` seconds to finish.

    Args:
        on_start: called when the server accepts requests.
    """
    Server(service, on_start).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn with the settings of `ServeConfig`; `should_exit = True` ends it from another thread."""

    def __init__(self, service: Service, on_start: Callable[[], None] = lambda: None):
        settings = service.settings
        config = uvicorn.Config(
            create_app(service),
            http=_protocol(settings.stream_timeout, settings.header_timeout),
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # After the grace period, streams get an error event; this leaves time for its bytes.
            timeout_graceful_shutdown=int(settings.grace) + 5,
        )
        super().__init__(config)
        self._service, self._on_start = service, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.closing = True
        asyncio.get_running_loop().call_later(self._service.settings.grace, self._service.end_calls)
        await super().shutdown(sockets)


def _protocol(timeout: float, header_timeout: float) -> type[H11Protocol]:
    class Protocol(H11Protocol):
        """Disconnects a client that reads nothing for `timeout` seconds while data is pending, and one whose headers
        take longer than `header_timeout` seconds.

        Input that is not HTTP gets an error of the same shape as all others.
        """

        _stalled: asyncio.TimerHandle | None = None
        _headers: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._headers = self.loop.call_later(header_timeout, self._refuse_late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:  # the headers of a request are complete
                self._expect_no_headers()
            elif self._headers is None:  # the next request of this connection has begun
                self._headers = self.loop.call_later(header_timeout, self._refuse_late)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._unstall()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unstall()
            self._expect_no_headers()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            error = ApiError(400, "this is not HTTP/1.1; send well-formed requests", code="invalid_http")
            self._end_with("400 Bad Request", error)

        def _refuse_late(self) -> None:
            self._headers = None
            message = f"the headers did not arrive within {header_timeout:g} seconds; send them faster"
            self._end_with("408 Request Timeout", ApiError(408, message, code="request_timeout"))

        def _end_with(self, status: str, error: ApiError) -> None:
            if self.transport.is_closing():
                return
            body = to_json(error.body())
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

        def _expect_no_headers(self) -> None:
            if self._headers is not None:
                self._headers.cancel()
                self._headers = None

        def _unstall(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

    return Protocol
