"""The engine behind the HTTP server: admission of requests, running them, and shutdown. With the settings of the
server: address, access and limits.
"""

import asyncio
import collections
import ipaddress
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import Field, SecretStr, field_validator

from linnet.config import Config, Problem, Seconds
from linnet.data.chat.template import ChatTemplate
from linnet.inference import Engine, EngineProcess, Piece, Request, Sampling, Workers
from linnet.inference.engine import encode
from linnet.serve.errors import ApiError, Disconnected
from linnet.serve.scoring import TokenNames

# Moves the pieces of each request from the engine's thread to the event loop, with bounded memory and rate.

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


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServeConfig(Config):
    """Settings of the HTTP server; the engine has its own (slots, device).

    Attributes:
        host: address to listen on.
        allowed_hosts: accepted names in the Host header, "*" for all. If empty, a server on loopback accepts only names
            of loopback, so that a web page cannot reach it under its own domain name; other servers accept all.
        queue: completions that may wait for a slot; further ones are refused with status 429.
        max_prompt_tokens: upper bound of tokens per prompt.
    """

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8000, ge=0, le=65535, description="port; 0 takes a free one")
    api_key: SecretStr | None = Field(None, description="bearer token that /v1 requires")
    allowed_hosts: list[str] = []
    queue: int = Field(256, ge=0)
    max_tokens: int = Field(16384, ge=1, description="upper bound of max_tokens per completion")
    max_prompt_tokens: int = Field(131072, ge=1)
    max_choices: int = Field(128, ge=1, description="upper bound of completions per request: prompts times n")
    max_body: int = Field(4 << 20, ge=1, description="upper bound of bytes per request")
    header_timeout: Seconds = Field(10.0, description="seconds for the headers of a request to arrive")
    body_timeout: Seconds = Field(30.0, description="seconds for the body of a request to arrive")
    stream_timeout: Seconds = Field(60.0, description="seconds without reading after which a client is disconnected")
    stream_backlog: int = Field(4096, ge=1, description="tokens that a stream may be ahead of its client")
    grace: float = Field(30.0, ge=0, le=1e8, description="seconds for responses to end at shutdown")

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, key: SecretStr | None) -> SecretStr | None:
        text = None if key is None else key.get_secret_value()
        if text is not None and not (text.isascii() and text.isprintable() and text and " " not in text):
            raise ValueError("must be printable ASCII without spaces, and not empty, so that a header can carry it")
        return key

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def hosts(self) -> frozenset[str] | None:
        """The accepted host names, or None if all are accepted."""
        if "*" in self.allowed_hosts or not (self.loopback or self.allowed_hosts):
            return None
        return frozenset({"localhost", "127.0.0.1", "[::1]", self.host.lower(), *map(str.lower, self.allowed_hosts)})


class Metrics(Collector):
    """The metrics of one server, in a separate registry, so that two servers in one process do not share metrics."""

    def __init__(self, engines: Sequence[Engine | EngineProcess]):
        self._engines = engines
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.responses = Counter("linnet_http_responses", "HTTP responses", ["path", "status"], registry=self._registry)
        self.first_token = Histogram(
            "linnet_time_to_first_token_seconds",
            "From the request to its first token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.whole = Histogram(
            "linnet_request_seconds",
            "From the request to the end of its response",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        engines, totals = self._engines, [engine.counters for engine in self._engines]
        finished = CounterMetricFamily("linnet_completions", "Completions by how they ended", labels=["finish"])
        for finish, count in sum((counters.finished for counters in totals), collections.Counter()).items():
            finished.add_metric([finish], count)
        yield finished
        for name, words in (
            ("prompt_tokens", "Tokens read"),
            ("prefix_hits", "Prompts that began at kept states"),
            ("prefix_tokens", "Tokens that kept states saved"),
            ("generated_tokens", "Tokens generated"),
            ("rounds", "Rounds of the engines"),
        ):
            yield CounterMetricFamily(f"linnet_{name}", words, sum(getattr(counters, name) for counters in totals))
        for name, words, value in (
            ("prefix_bytes", "Memory of kept states", sum(engine.kept_bytes for engine in engines)),
            ("completions_waiting", "Completions without a slot", sum(engine.waiting for engine in engines)),
            ("completions_active", "Completions in a slot", sum(engine.active for engine in engines)),
            ("slots", "Slots of all engines", sum(engine.slots for engine in engines)),
            ("state_bytes", "Memory of a slot", engines[0].state_bytes),
        ):
            yield GaugeMetricFamily(f"linnet_{name}", words, value)


class Service:
    """The engines of a model with their limits. It starts in the event loop (`start`) and must be used only there.

    Args:
        engine: the engine, which also says the model's name and limits.
        others: engines of the same model and settings on other devices, whose processes were started. Their loading is
            waited for, and its errors are raised.

    Attributes:
        capacity: most choices in the engine and its queue together.
        slots: slots of all engines.
        live: choices in the engine or its queue now.
        calls: the running HTTP requests for completions.
        closing: whether the server shuts down and refuses new requests.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServeConfig,
        template: ChatTemplate | None = None,
        others: Sequence[EngineProcess] = (),
    ):
        self.engine, self.settings, self.template = engine, settings, template
        if template is not None:
            engine.turn_ends |= set(template.turn_ends)
        for process in others:
            process.begin(engine)
        self._others = others
        self.names = TokenNames(engine.tokenizer)
        self.created = int(time.time())
        self.slots = engine.slots * (1 + len(others))
        self.capacity = self.slots + settings.queue
        self.live = 0
        self.calls: set[Call] = set()
        self.closing = False
        self.metrics = Metrics([engine, *others])
        self.scoring = asyncio.Semaphore(1)  # scores one prompt at a time, because each needs the memory of a chunk
        self._entering = 0
        self.worker: Workers | None = None
        self._hub: Hub | None = None

    def start(self) -> None:
        self._hub = Hub(asyncio.get_running_loop(), self._ended)
        self.worker = Workers(self.engine, self._others)

    async def close(self) -> None:
        """Ends all running responses and the engines."""
        self.closing = True
        self.end_calls()
        await asyncio.to_thread(self.worker.close)

    def end_calls(self) -> None:
        """Ends every response with an error, because the server shuts down."""
        for call in list(self.calls):
            call.stop(_closing())

    def check_open(self) -> None:
        """Raises `ApiError` if the server is shutting down or its engine has stopped."""
        if self.closing:
            raise _closing()
        self.check_alive()

    def check_alive(self) -> None:
        """Raises `ApiError` if the engine has stopped."""
        if self.worker is None or not self.worker.alive:
            raise ApiError(503, "the engine has stopped; restart the server", code="engine_stopped")

    @contextmanager
    def entry(self) -> Iterator[None]:
        """Counts a request while its body is read and checked, to bound the memory for bodies.

        Raises `ApiError` if the server is full.
        """
        self.check_open()
        self._check_room(1)
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1

    def open(self, prompts: list[tuple[np.ndarray, Sampling]], stream: bool) -> Call:
        """Submits the choices of one HTTP request to the engine. Raises `ApiError` if the server is full."""
        self.check_open()
        self._check_room(len(prompts), own_entry=1)
        call = Call(self.worker.cancel, self.settings.stream_backlog if stream else None)
        self.calls.add(call)
        try:
            for index, (prompt, sampling) in enumerate(prompts):
                call.requests.append(self.worker.submit(prompt, sampling, partial(self._hub.put, call, index)))
                call.running += 1
                self.live += 1
        except BaseException:
            self.leave(call)
            raise
        return call

    def leave(self, call: Call) -> None:
        """Ends `call` and cancels its running choices."""
        call.stop(Disconnected())
        self.calls.discard(call)

    def tokens(
        self, prompt: str | list[int], max_tokens: int | None, default: int | None, key: str
    ) -> tuple[np.ndarray, int]:
        """Returns the token ids of a prompt, and the most tokens of its completion.

        Args:
            max_tokens: the requested number of tokens; None takes `default`, or less if the context is too short.
            default: default of `max_tokens`; None takes the server's limit.
            key: name of the prompt in messages.

        Raises:
            ApiError: lists all problems.
        """
        settings, engine, problems = self.settings, self.engine, []
        ids = encode(prompt, engine.tokenizer, engine.vocab, problems)
        if not problems and not len(ids):
            problems.append("prompt: is empty; give at least one token")
        if problems:
            raise ApiError.of_problems([Problem(line).at(key) for line in problems])
        if max_tokens is not None and max_tokens > settings.max_tokens:
            what = f"max_tokens: {max_tokens} exceeds this server's limit of {settings.max_tokens}"
            fix = "use less, or raise --max-tokens"
            problems.append(f"{what}; {fix}")
        most = min(default or settings.max_tokens, settings.max_tokens)
        longest = settings.max_prompt_tokens
        if engine.limit is not None:
            longest = min(longest, engine.limit - 1)
            most = min(most, engine.limit - len(ids))
            if len(ids) <= longest and not problems and (max_tokens or 0) > engine.limit - len(ids):
                problems.append(
                    f"max_tokens: {max_tokens} after a prompt of {len(ids)} tokens exceeds the context of "
                    f"{engine.limit}; use at most {engine.limit - len(ids)}"
                )
        if len(ids) > longest:
            option = "--max-prompt-tokens" if longest == settings.max_prompt_tokens else "--context-length"
            fix = f"shorten it, or raise {option}"
            problems.append(f"{key}: {len(ids)} tokens exceed this server's limit of {longest}; {fix}")
        if problems:
            raise ApiError.of_problems(problems, code="context_length_exceeded")
        return ids, most if max_tokens is None else max_tokens

    def _ended(self) -> None:
        self.live -= 1

    def _check_room(self, count: int, own_entry: int = 0) -> None:
        if count > self.capacity:
            message = f"n: {count} completions exceed the capacity of this server; use at most {self.capacity}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if self.live + self._entering - own_entry + count > self.capacity:
            message = f"the server is full: {self.live} of at most {self.capacity} completions run or wait; retry later"
            wait = max(1, min(60, self.live // self.slots))
            raise ApiError(429, message, code="server_busy", headers={"Retry-After": str(wait)})


def _closing() -> ApiError:
    return ApiError(503, "the server is shutting down; try again later", code="closing", headers={"Retry-After": "5"})
