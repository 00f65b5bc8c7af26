"""The response to a request for completions: one JSON object, or a stream of server-sent events."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator

from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from linnet.inference import Piece
from linnet.serve.errors import ApiError, Disconnected
from linnet.serve.formats import Format, usage
from linnet.serve.scoring import Echo, Score, score_prompt
from linnet.serve.service import Service
from linnet.serve.streams import Call

_log = logging.getLogger("linnet.serve")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # asks reverse proxies to forward each event immediately
]


class Answer(Response):
    """Sends the pieces of a call to its client. If the client disconnects, the call ends and its slots are freed.

    Args:
        prompt_tokens: number of tokens of all prompts; each prompt counts once.
        stream: whether to send events instead of one object.
        show_usage: whether a stream ends with an event that has the token counts.
        score: echoed prompts whose own tokens are scored first, each with the number of likeliest tokens per place.
        started: `time.monotonic()` when the request arrived.
    """

    def __init__(
        self,
        service: Service,
        call: Call,
        form: Format,
        *,
        prompt_tokens: int,
        stream: bool,
        show_usage: bool,
        score: list[tuple[Echo, int]],
        started: float,
    ):
        super().__init__()
        self._service, self._call, self._form = service, call, form
        self._prompt_tokens, self._stream, self._show_usage = prompt_tokens, stream, show_usage
        self._score, self._started = score, started
        self._tokens = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_events(send) if self._stream else self._send_object(scope, receive, send))
        except Disconnected:
            pass
        finally:
            watcher.cancel()
            self._service.leave(self._call)
            self._service.metrics.whole.observe(time.monotonic() - self._started)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.stop(Disconnected())

    async def _send_object(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: dict[int, list[Piece]] = defaultdict(list)
        try:
            await self._score_prompts()
            while self._call.open:
                for index, piece in await self._take():
                    choices[index].append(piece)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        done = [self._form.choice(index, choices[index]) for index in sorted(choices)]
        body = to_json(self._form.frame(done, usage=self._usage()))
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        try:
            await self._score_prompts()
            while self._call.open:
                pieces = await self._take()
                events = b"".join(self._events(pieces)) if pieces else b": waiting\n\n"
                if events:
                    await _send_part(send, events)
            if self._show_usage:
                await _send_part(send, _event(self._form.frame([], usage=self._usage())))
            await _send_part(send, b"data: [DONE]\n\n", more=False)
        except ApiError as error:
            await _send_part(send, _event(error.body()), more=False)

    def _events(self, pieces: list[tuple[int, Piece]]) -> Iterator[bytes]:
        """Yields one event per choice with all of its new tokens."""
        choices: dict[int, list[Piece]] = defaultdict(list)
        for index, piece in pieces:
            choices[index].append(piece)
        extra = {"usage": None} if self._show_usage else {}
        for index, own in choices.items():
            if (choice := self._form.choice(index, own)) is not None:
                yield _event(self._form.frame([choice], **extra))

    async def _take(self) -> list[tuple[int, Piece]]:
        pieces = await self._call.take()
        if not pieces:
            self._service.check_alive()
        for _, piece in pieces:
            if piece.finish == "error":
                _log.error("a completion failed: %s", self._service.worker.error or piece.error)
                raise ApiError(500, f"the engine failed: {piece.error[:200]}", code="engine_error")
            if piece.finish == "cancelled":
                raise ApiError(500, "the completion was cancelled", code="cancelled")
            if piece.token is not None and not self._tokens:
                self._service.metrics.first_token.observe(time.monotonic() - self._started)
            self._tokens += piece.token is not None
        return pieces

    async def _score_prompts(self) -> None:
        """Scores the tokens of echoed prompts chunk by chunk, and stops if the client has disconnected."""
        for echo, top in self._score:
            async with self._service.scoring:
                chunks = score_prompt(self._service.engine, echo.ids, top)
                while (chunk := await _next(chunks)) is not None:
                    echo.scores += chunk
                    if self._call.failure is not None:
                        raise self._call.failure

    def _usage(self) -> dict:
        cached = sum(request.cached_tokens for request in self._call.requests)
        return usage(self._prompt_tokens, self._tokens, cached)


async def _next(chunks: Iterator[list[Score | None]]) -> list[Score | None] | None:
    try:
        return await asyncio.to_thread(next, chunks, None)
    except Exception as error:
        _log.exception("scoring a prompt failed")
        raise ApiError(500, f"scoring the prompt failed: {type(error).__name__}", code="engine_error") from error


def _event(value: dict) -> bytes:
    return b"data: " + to_json(value, inf_nan_mode="null") + b"\n\n"


async def _send_part(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
