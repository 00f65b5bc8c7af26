"""Engines that serve many callers: one in a thread, further ones in processes of their own."""

import atexit
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch

from linnet.config import ConfigError
from linnet.inference.engine import Counters, Engine
from linnet.inference.prefix import covered, cuts
from linnet.inference.request import Piece, Request
from linnet.inference.sampling import Sampling
from linnet.trust import safe_path

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
    def load(self) -> int:
        """Number of requests in slots and in the queue."""
        return self.engine.active + self.engine.waiting

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
            events, error = self.engine.advance_or_fail()
            self.error = error or self.error
            for request, piece in events:
                self._tell(request, piece)

    def _tell(self, request: Request, piece: Piece) -> None:
        with self._wake:
            listener = self._listeners.pop(request) if piece.finish is not None else self._listeners[request]
        try:
            listener(piece)
        except Exception:  # a caller that disconnected must not end the streams of the others
            self.engine.cancel(request)


class EngineProcess:
    """An engine in a process of its own, which takes requests as a `Worker` does.

    Python runs one thread of a process at a time, and launching the kernels of a prompt takes most of it: engines in
    threads would wait for each other.

    Attributes:
        error: as of `Worker`.
        counters, kept_bytes: as of `Engine`, after its last round.
    """

    def __init__(self, make: Callable[[], Engine], threads: int | None = None):
        """Starts the process, which loads the model.

        Args:
            make: returns the engine; is pickled.
            threads: threads of PyTorch on a CPU; None leaves its default.
        """
        self.error: str | None = None
        self.counters, self.kept_bytes = Counters(), 0
        self._kept: frozenset[bytes] = frozenset()
        self._live: dict[int, tuple[Request, OnPiece]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, threads), daemon=True)
        with safe_path():
            self._process.start()
        theirs.close()  # so that the pipe closes when the process ends
        atexit.register(self.close)  # before `multiprocessing` would wait for the process
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._receiver = threading.Thread(target=self._receive, daemon=True)

    def begin(self, like: Engine) -> None:
        """Waits until the model is loaded. Raises what its loading raised.

        Args:
            like: an engine of the same model and settings in this process, which checks requests.
        """
        self._like, self.slots = like, like.slots
        try:
            problem = self._pipe.recv()
        except EOFError:
            problem = RuntimeError(self._death())
        if problem is not None:
            self.close()
            raise problem
        self._outbox.put((None, like.turn_ends))
        self._sender.start()
        self._receiver.start()

    def submit(self, prompt: np.ndarray, sampling: Sampling | None, on_piece: OnPiece) -> Request:
        """Submits a request as `Worker.submit` does."""
        request = self._like.check(prompt, sampling or Sampling())
        with self._lock:
            if not self.alive:
                raise ConfigError(["the engine is closing; send the request to another one"], "request")
            self._live[request.id] = request, on_piece
        self._outbox.put((request.id, (request.prompt, request.sampling)))
        return request

    def cancel(self, request: Request) -> None:
        """Cancels a request, as `Worker.cancel` does."""
        request.cancelled = True
        if request.id in self._live:
            self._outbox.put((request.id, None))

    def kept(self, prompt: np.ndarray) -> int:
        """Returns how many tokens of a prompt the prefix cache saved after the last round."""
        return covered(cuts(prompt, self._like.prefill_chunk, self._like.turn_ends), self._kept) if self._kept else 0

    @property
    def load(self) -> int:
        return len(self._live)

    @property
    def active(self) -> int:
        return min(self.load, self.slots)

    @property
    def waiting(self) -> int:
        return self.load - self.active

    @property
    def alive(self) -> bool:
        return not self._closing and self._receiver.is_alive()

    def close(self, timeout: float = 30.0) -> None:
        """Cancels all requests and waits up to `timeout` seconds for the process to end."""
        self._closing = True
        atexit.unregister(self.close)
        if self._sender.is_alive():
            self._outbox.put(None)
            self._receiver.join(timeout)
        else:  # it loads the model, and nothing waits for that any more; or it has ended
            self._process.kill()
        self._pipe.close()
        self._process.join(timeout)
        self._process.kill()

    def _send(self) -> None:
        with suppress(OSError):  # the process died, which `_receive` reports
            while True:
                message = self._outbox.get()
                self._pipe.send(message)
                if message is None:
                    return

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                events, error, self.counters, self.kept_bytes, kept = self._pipe.recv()
                self.error, self._kept = error or self.error, self._kept if kept is None else kept
                for number, cached_tokens, piece in events:
                    self._tell(number, piece, cached_tokens)
        with self._lock:
            self._closing, closing = True, self._closing
            numbers = list(self._live)
        self.error = self.error if closing else self._death()
        for number in numbers:
            self._tell(
                number, Piece(None, finish="cancelled") if closing else Piece(None, finish="error", error=self.error)
            )

    def _tell(self, number: int, piece: Piece, cached_tokens: int = 0) -> None:
        request, listener = self._live.pop(number) if piece.finish is not None else self._live[number]
        request.cached_tokens = cached_tokens
        try:
            listener(piece)
        except Exception:  # as in `Worker`
            self.cancel(request)

    def _death(self) -> str:
        self._process.join()
        return f"the process of an engine ended with exit code {self._process.exitcode}: killed, or out of memory"


def _serve(pipe: Connection, make: Callable[[], Engine], threads: int | None) -> None:
    """Runs an engine: takes requests from a pipe and answers with the pieces of each round, until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all processes; the parent ends this one
        signal.signal(number, signal.SIG_IGN)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        engine = make()
    except Exception as error:
        pipe.send(error)
        return
    requests: dict[int, Request] = {}
    numbers: dict[Request, int] = {}
    told: frozenset[bytes] = frozenset()
    with engine.on_device(), suppress(EOFError, OSError):
        pipe.send(None)
        while True:
            while pipe.poll(0 if engine.busy else None):
                if (message := pipe.recv()) is None:
                    return
                number, content = message
                if number is None:
                    engine.turn_ends = content
                elif content is not None:
                    requests[number] = engine.submit(*content)
                    numbers[requests[number]] = number
                elif number in requests:
                    engine.cancel(requests[number])
            events, error = engine.advance_or_fail()
            named = [(numbers[request], request.cached_tokens, piece) for request, piece in events]
            for number, _, piece in named:
                if piece.finish is not None:
                    del numbers[requests.pop(number)]
            kept = frozenset() if engine.prefixes is None else engine.prefixes.keys
            pipe.send((named, error, engine.counters, engine.kept_bytes, None if kept == told else kept))
            told = kept


class Workers:
    """Engines of one model on several devices: the first in a thread, the others in processes that have begun.

    A request goes to a device with a free slot, of these to the one that keeps the longest of its prefixes, of these to
    the least busy one. Its tokens do not depend on the device.
    """

    def __init__(self, engine: Engine, others: Sequence[EngineProcess] = ()):
        self._engines = [engine, *others]
        self._workers = [Worker(engine), *others]

    def submit(self, prompt: np.ndarray, sampling: Sampling | None, on_piece: OnPiece) -> Request:
        """Submits a request as `Worker.submit` does."""

        def fit(number: int) -> tuple[bool, int, int]:
            load, engine = self._workers[number].load, self._engines[number]
            return load < engine.slots, engine.kept(prompt), -load

        best = max(range(len(self._workers)), key=fit) if len(self._workers) > 1 else 0
        return self._workers[best].submit(prompt, sampling, on_piece)

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
        """Cancels all requests and waits for the engines to end."""
        for worker in self._workers:
            worker.close()
