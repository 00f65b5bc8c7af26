"""Runs an engine in its own thread, for programs that serve many callers."""

import threading
import traceback
from collections.abc import Callable, Sequence

import numpy as np

from linnet.config import ConfigError
from linnet.inference.engine import Engine
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
            request = self.engine.submit(prompt, sampling)
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
        with self.engine.on_device():
            self._work()

    def _work(self) -> None:
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


class Workers:
    """Engines of one model on several devices, each in a thread of its own.

    A request goes to a device with a free slot, of these to the one that keeps the longest of its prefixes, of these to
    the least busy one. Its tokens do not depend on the device.
    """

    def __init__(self, engines: Sequence[Engine]):
        self._workers = [Worker(engine) for engine in engines]

    def submit(self, prompt: np.ndarray, sampling: Sampling | None, on_piece: OnPiece) -> Request:
        """Submits a request as `Worker.submit` does."""

        def fit(worker: Worker) -> tuple[bool, int, int]:
            engine = worker.engine
            busy = engine.active + engine.waiting
            return busy < engine.slots, engine.kept(prompt), -busy

        best = self._workers[0] if len(self._workers) == 1 else max(self._workers, key=fit)
        return best.submit(prompt, sampling, on_piece)

    def cancel(self, request: Request) -> None:
        """Cancels a request, as `Worker.cancel` does."""
        for worker in self._workers:  # the one that does not have it only looks at its queue
            worker.cancel(request)

    @property
    def alive(self) -> bool:
        return all(worker.alive for worker in self._workers)

    @property
    def error(self) -> str | None:
        """Traceback of the last failure of an engine; None if none failed."""
        return next((worker.error for worker in self._workers if worker.error), None)

    def close(self) -> None:
        """Cancels all requests and waits for the threads to end."""
        for worker in self._workers:
            worker.close()
