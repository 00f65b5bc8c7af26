"""An HTTP server with OpenAI's API for the engine of `linnet.inference`. Needs the extra `serve`.

listener = bind(settings := ServeConfig(port=8000))
serve(Service(Engine.of_run("runs/tnl-10m-0123456789ab"), settings), listener)

The application runs under uvicorn; here are its socket, its signals, clients that do not read, and clients that still
send when they are answered.
"""

import asyncio
import errno
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

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


def serve(
    service: Service,
    listener: socket.socket,
    on_start: Callable[[], None] = lambda: None,
    on_stop: Callable[[int], None] = lambda running: None,
) -> None:
    """Serves on `listener` until SIGTERM or SIGINT; running responses then get `grace` seconds to finish.

    Args:
        on_start: called when the server accepts requests.
        on_stop: called with the number of running responses when it accepts no more.
    """
    Server(service, on_start, on_stop).run(sockets=[listener])


class Server(uvicorn.Server):
    """uvicorn with the settings of `ServeConfig`; `should_exit = True` ends it from another thread."""

    def __init__(
        self,
        service: Service,
        on_start: Callable[[], None] = lambda: None,
        on_stop: Callable[[int], None] = lambda running: None,
    ):
        settings = service.settings
        config = uvicorn.Config(
            create_app(service),
            http=_protocol(settings),
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
        self._service, self._on_start, self._on_stop = service, on_start, on_stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the running responses at a second SIGINT; a third leaves at once, as uvicorn does."""
        if sig == signal.SIGINT and self.should_exit and not self._ended and self._loop is not None:
            self._ended = self._service.closing = True
            self._loop.call_soon_threadsafe(self._service.end_calls)
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.closing = True
        self._on_stop(len(self._service.calls))
        asyncio.get_running_loop().call_later(self._service.settings.grace, self._service.end_calls)
        await super().shutdown(sockets)


LINGER = 2.0  # seconds without input after which a connection closes that was answered before the end of its request
MOST_DRAINED = 64 << 20  # bytes beyond `max_body` that such a connection may still send


class _Transport:
    """A transport that lingers before it closes: it sends no more, but reads and discards until the client closes.

    The system resets a connection that is closed with unread input, and the client may lose the answer.

    Args:
        sends: whether the client is in the middle of a request; `close` lingers then.
        most: bytes after which a lingering connection closes.
        seconds: after which it closes, or `LINGER` seconds after its last bytes.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        sends: Callable[[], bool],
        most: int,
        seconds: float,
    ):
        self._transport, self._loop, self._sends, self._left, self._seconds = transport, loop, sends, most, seconds
        self._end: asyncio.TimerHandle | None = None
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self.lingers:
            self._transport.write(data)

    def close(self) -> None:
        if self._sends() and not self.lingers:
            self.linger()
        else:
            self._transport.close()

    def linger(self) -> None:
        if not self.is_closing():
            self.lingers = True
            self._seconds += self._loop.time()
            try:
                self._transport.write_eof()
            except OSError:  # the client has reset the connection
                self._transport.close()
            else:
                self._transport.resume_reading()
                self.discard(b"")

    def discard(self, data: bytes) -> None:
        """Takes input of a lingering connection."""
        self._left -= len(data)
        wait = min(LINGER, self._seconds - self._loop.time())
        if self._end is not None:
            self._end.cancel()
        if self._left < 0 or wait <= 0:
            self._transport.close()
        else:
            self._end = self._loop.call_later(wait, self._transport.close)


def _protocol(settings: ServeConfig) -> type[H11Protocol]:
    class Protocol(H11Protocol):
        """Disconnects a client that reads nothing for `stream_timeout` seconds while data is pending, one whose headers
        take longer than `header_timeout` seconds, and one that sends on after its answer (see `_Transport`).

        Input that is not HTTP gets an error of the same shape as all others.
        """

        _stalled: asyncio.TimerHandle | None = None
        _headers: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            most, seconds = settings.max_body + MOST_DRAINED, settings.body_timeout
            super().connection_made(_Transport(transport, self.loop, self._sends_body, most, seconds))
            self._headers = self.loop.call_later(settings.header_timeout, self._refuse_late)

        def data_received(self, data: bytes) -> None:
            if self.transport.lingers:
                self.transport.discard(data)
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:  # the headers of a request are complete
                self._expect_no_headers()
            elif self._headers is None:  # the next request of this connection has begun
                self._headers = self.loop.call_later(settings.header_timeout, self._refuse_late)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._sends_body():  # the connection is not kept: the rest of a body may have no end
                self.transport.linger()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(settings.stream_timeout, self.transport.abort)

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
            message = f"the headers did not arrive within {settings.header_timeout:g} seconds; send them faster"
            self._end_with("408 Request Timeout", ApiError(408, message, code="request_timeout"))

        def _end_with(self, status: str, error: ApiError) -> None:
            if self.transport.is_closing():
                return
            body = to_json(error.body())
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.linger()

        def _sends_body(self) -> bool:
            return self.conn.their_state is h11.SEND_BODY

        def _expect_no_headers(self) -> None:
            if self._headers is not None:
                self._headers.cancel()
                self._headers = None

        def _unstall(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

    return Protocol
