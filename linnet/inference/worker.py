"""Runs an engine in its own thread, for programs that serve many callers."""

import threading
import traceback
from collections.abc import Callable, Sequence

from linnet.config import ConfigError
from linnet.inference.engine import Engine
from linnet.inference.prefix import Prefix
from linnet.inference.request import Piece, Request
from linnet.inference.sampling import Sampling

OnPiece = Callable[[Piece], None]


class Worker:
    """Runs an engine while it has requests, and sleeps otherwise.

    Attributes:
        error: traceback of the engine's last failure; None if it never failed.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.error: str | None = None
        self._listeners: dict[Request, OnPiece] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="linnet-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None,
        on_piece: OnPiece,
        prefix: Prefix | None = None,
    ) -> Request:
        """Submits a request as `Engine.submit` does.

        Args:
            on_piece: called with each piece in the engine's thread; it must not block.

        Raises:
            ConfigError: the request is invalid, or the worker is closed.
        """
        with self._wake:
            if self._closing:
                raise ConfigError(["the engine is closing; send the request to another one"], "request")
            request = self.engine.submit(prompt, sampling, prefix)
            self._listeners[request] = on_piece
            self._wake.notify()
        return request

    def cancel(self, request: Request) -> None:
        """Cancels a request; its last piece, with finish "cancelled", follows in the next round."""
        self.engine.cancel(request)
        with self._wake:
            self._wake.notify()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, timeout: float = 30.0) -> None:
        """Cancels all requests and waits up to `timeout` seconds for the thread to end."""
        with self._wake:
            self._closing = True
            for request in self._listeners:
                self.engine.cancel(request)
            self._wake.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self.engine.busy and not self._closing:
                    self._wake.wait()
                if self._closing and not self.engine.busy:
                    return
            try:
                events = self.engine.advance()
            except Exception as error:  # any failure must reach all callers
                self.error = traceback.format_exc()
                events = self.engine.fail(f"{type(error).__name__}: {error}")
            for request, piece in events:
                self._tell(request, piece)

    def _tell(self, request: Request, piece: Piece) -> None:
        with self._wake:
            listener = self._listeners.pop(request) if piece.finish is not None else self._listeners[request]
        try:
            listener(piece)
        except Exception:  # a caller that disconnected must not end the streams of the others
            self.engine.cancel(request)
