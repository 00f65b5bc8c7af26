"""From the engine's thread to the event loop: the pieces of each request, in bounded memory, at a bounded rate."""

import asyncio
from collections import deque
from collections.abc import Callable

from linnet.inference import Piece, Request
from linnet.serve.errors import ApiError, Disconnected

INTERVAL = 0.02  # s between two deliveries: what a fast model says in between goes out together
PING = 15.0  # s after which a silent stream says that it is alive


class Call:
    """What one HTTP request has asked of the engine, and the pieces that its client has not been given yet.

    Attributes:
        running: choices that have not ended.
        failure: why the rest will not come, None if it will.
    """

    def __init__(self, cancel: Callable[[Request], None], backlog: int | None):
        self.requests: list[Request] = []
        self.running = 0
        self.failure: ApiError | Disconnected | None = None
        self._cancel, self._backlog = cancel, backlog
        self._pieces: list[tuple[int, Piece]] = []
        self._ready = asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether `take` has or will have something to give, if only a failure."""
        return self.running > 0 or bool(self._pieces) or self.failure is not None

    def push(self, index: int, piece: Piece) -> None:
        """Keeps a piece of choice `index`; a client too far behind loses the rest."""
        if piece.finish is not None:
            self.running -= 1
        if self.failure is None:
            self._pieces.append((index, piece))
            if self._backlog is not None and len(self._pieces) > self._backlog:
                message = f"the client is {self._backlog} tokens behind; read faster, or ask for fewer tokens"
                self.stop(ApiError(429, message, code="slow_client"))
            self._ready.set()

    def stop(self, failure: ApiError | Disconnected) -> None:
        """Frees the slots of what still runs; whoever waits in `take` gets `failure`."""
        if self.failure is None:
            self.failure = failure
            self._pieces = []
            self.close()
            self._ready.set()

    def close(self) -> None:
        """Cancels what still runs."""
        if self.running:
            for request in self.requests:
                self._cancel(request)

    async def take(self) -> list[tuple[int, Piece]]:
        """What has come since the last time, at least one piece, or none after `PING` seconds of silence.

        Raises:
            ApiError, Disconnected: the rest will not come.
        """
        if not self._pieces and self.failure is None:
            self._ready.clear()
            try:
                async with asyncio.timeout(PING):
                    await self._ready.wait()
            except TimeoutError:
                return []
        if self.failure is not None:
            raise self.failure
        pieces, self._pieces = self._pieces, []
        return pieces


class Hub:
    """Takes pieces from the engine's thread and delivers them in the event loop, many at a time.

    Waking the loop once a token and stream would cost both threads more than the tokens do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]):
        self._loop, self._on_end = loop, on_end
        self._inbox: deque[tuple[Call, int, Piece]] = deque()
        self._woken = False
        self._last = 0.0

    def put(self, call: Call, index: int, piece: Piece) -> None:
        """From any thread."""
        self._inbox.append((call, index, piece))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._plan)

    def _plan(self) -> None:
        if (wait := self._last + INTERVAL - self._loop.time()) > 0:
            self._loop.call_later(wait, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._woken = False  # before the inbox is emptied: what comes now is either taken here or wakes the loop again
        self._last = self._loop.time()
        while self._inbox:
            call, index, piece = self._inbox.popleft()
            call.push(index, piece)
            if piece.finish is not None:
                self._on_end()
