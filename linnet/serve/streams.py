"""Moves the pieces of each request from the engine's thread to the event loop, with bounded memory and rate."""

import asyncio
from collections import deque
from collections.abc import Callable

from linnet.inference import Piece, Request
from linnet.serve.errors import ApiError, Disconnected

INTERVAL = 0.02  # seconds between two deliveries; tokens generated in between are delivered together
PING = 15.0  # seconds without tokens after which a stream sends a comment to stay open


class Call:
    """The engine's requests of one HTTP request, and the pieces that its client has not received yet.

    Attributes:
        requests: the engine's requests, one per choice.
        running: number of choices that have not ended.
        failure: why the call ended early, else None.
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
        """Whether `take` can still return pieces or raise a failure."""
        return self.running > 0 or bool(self._pieces) or self.failure is not None

    def push(self, index: int, piece: Piece) -> None:
        """Stores a piece of choice `index`. If the client is more than `backlog` tokens behind, the call fails."""
        if piece.finish is not None:
            self.running -= 1
        if self.failure is None:
            self._pieces.append((index, piece))
            if self._backlog is not None and len(self._pieces) > self._backlog:
                message = f"the client is {self._backlog} tokens behind; read faster, or ask for fewer tokens"
                self.stop(ApiError(429, message, code="slow_client"))
            self._ready.set()

    def stop(self, failure: ApiError | Disconnected) -> None:
        """Cancels the running choices and makes `take` raise `failure`."""
        if self.failure is None:
            self.failure = failure
            self._pieces = []
            self.close()
            self._ready.set()

    def close(self) -> None:
        """Cancels the running choices."""
        if self.running:
            for request in self.requests:
                self._cancel(request)

    async def take(self) -> list[tuple[int, Piece]]:
        """Waits for new pieces and returns them as (index, piece), or an empty list after `PING` seconds without any.

        Raises:
            ApiError, Disconnected: the call ended early.
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

    Waking the event loop for each token of each stream would take both threads longer than generating the tokens.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]):
        self._loop, self._on_end = loop, on_end
        self._inbox: deque[tuple[Call, int, Piece]] = deque()
        self._woken = False
        self._last = 0.0

    def put(self, call: Call, index: int, piece: Piece) -> None:
        """Takes a piece of choice `index`. Any thread may call this."""
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
        # Reset the flag before emptying the inbox: a piece that arrives now is taken below, or wakes the loop again.
        self._woken = False
        self._last = self._loop.time()
        while self._inbox:
            call, index, piece = self._inbox.popleft()
            call.push(index, piece)
            if piece.finish is not None:
                self._on_end()
