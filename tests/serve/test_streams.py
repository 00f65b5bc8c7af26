"""Streams that begin, break, wait, dawdle and are ended: the others go on, and slots come free."""

import asyncio
import gc
import itertools
import json
import socket
import statistics
import threading
import tracemalloc

import pytest
from serving import LONG, Running, read_until, serve, wait_for

from linnet.inference import Piece
from linnet.serve.errors import ApiError, Disconnected
from linnet.serve.service import Call, Hub

ENDLESS = {"stream": True, "max_tokens": 16384, "ignore_eos": True, "prompt": "x"}


def expected(running: Running, count: int) -> list[int]:
    ask = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return running.post(prompt="The bird", **ask).json["choices"][0]["token_ids"]


def streams(client: socket.socket) -> bool:
    """Returns whether the first piece has arrived, which stays unread. Before it, `live` may be 0 still."""
    return b"data: {" in client.recv(4096, socket.MSG_PEEK)


def test_disconnects_free_their_slots_and_leave_the_others_alone():
    with serve(slots=3) as running:
        tokens = expected(running, 400)
        found: list[int] = []

        def read() -> None:
            stream = running.client().completions.create(
                model="tiny",
                prompt="The bird",
                max_tokens=400,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            found.extend(token for part in stream for token in part.choices[0].token_ids)

        reader = threading.Thread(target=read)
        reader.start()
        for abrupt in range(12):  # six at a time for the two slots left, in each state: waiting, reading, streaming
            client = running.connect(**ENDLESS)
            if abrupt % 2:
                read_until(client, b"data: ")
            client.close()
        reader.join(LONG)
        assert found == tokens
        service = running.service
        assert wait_for(lambda: service.live == 0 and service.engine.active == 0 and not service.calls)
        assert running.service.engine.counters.finished["cancelled"] > 0


def test_leaving_a_whole_answer_frees_its_slots_too():
    with serve(slots=2) as running:
        client = running.connect(**{**ENDLESS, "stream": False, "n": 4})
        assert wait_for(lambda: running.service.engine.active == 2 and running.service.engine.waiting == 2)
        client.close()
        assert wait_for(lambda: running.service.live == 0 and not running.service.calls)


def test_more_streams_than_slots_all_end_with_their_own_tokens(openai):
    with serve(slots=3, queue=40) as running:
        seeds = range(10)
        ask = {"prompt": "The bird", "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        alone = [running.post(**ask, seed=seed).json["choices"][0]["token_ids"] for seed in seeds]

        async def stream(client: openai.AsyncOpenAI, seed: int) -> list[int]:
            ids = {"ignore_eos": True, "return_token_ids": True}
            parts = await client.completions.create(
                model="tiny", prompt="The bird", max_tokens=40, seed=seed, stream=True, extra_body=ids
            )
            return [token async for part in parts for token in part.choices[0].token_ids]

        async def everyone() -> list[list[int]]:
            async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
                return await asyncio.gather(*(stream(client, seed) for seed in seeds))

        assert asyncio.run(everyone()) == alone


def test_full_server_says_when_to_come_again(openai):
    with serve(slots=1, queue=2) as running:
        clients = [running.connect(**ENDLESS) for _ in range(3)]
        assert wait_for(lambda: running.service.live == 3)
        reply = running.post(prompt="x")
        assert reply.status == 429 and reply.error["code"] == "server_busy" and int(reply.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            running.client().completions.create(model="tiny", prompt="x")
        assert running.post(prompt="x", n=4).status in (400, 429)
        assert running.request("GET", "/health").status == 200
        for client in clients:
            client.close()
        assert wait_for(lambda: running.service.live == 0)
        assert running.post(prompt="x", n=4).status == 400  # more than slots and queue will ever hold
        assert running.post(prompt="x", n=3, max_tokens=2).status == 200


def test_client_that_does_not_read_loses_its_slot_and_holds_nobody():
    with serve(slots=2, stream_backlog=300, stream_timeout=2.0, send_buffer=4096) as running:
        # Log-probabilities fill the socket's buffers soon, and then the backlog; the other's 300 tokens never do.
        idle = running.connect(receive_buffer=4096, **ENDLESS, logprobs=20)
        tokens = expected(running, 300)
        stream = running.client().completions.create(
            model="tiny",
            prompt="The bird",
            max_tokens=300,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        assert [token for part in stream for token in part.choices[0].token_ids] == tokens
        assert wait_for(lambda: running.service.live == 0)  # cancelled behind the backlog
        # Long before the usual 60 seconds of a client that reads nothing.
        assert wait_for(lambda: not running.service.calls and not running.server.server_state.connections, 40)
        idle.close()


def test_client_too_far_behind_is_told_when_it_reads():
    with serve(slots=1, stream_backlog=50, send_buffer=4096) as running:
        slow = running.connect(receive_buffer=4096, **ENDLESS, logprobs=20)
        assert wait_for(lambda: streams(slow) and running.service.live == 0)
        assert running.post(prompt="x", max_tokens=2).status == 200
        assert b'"slow_client"' in read_until(slow, b"slow_client")
        slow.close()


def test_reader_who_catches_up_loses_nothing():
    with serve(slots=1, send_buffer=4096) as running:
        tokens = expected(running, 600)
        client = running.connect(
            receive_buffer=4096,
            **{**ENDLESS, "prompt": "The bird", "max_tokens": 600},
            temperature=0,
            return_token_ids=True,
        )
        assert wait_for(lambda: streams(client) and running.service.live == 0)  # generated to the end, nothing read
        answer = read_until(client, b"data: [DONE]")
        client.close()
        # Events may be cut by the chunks of HTTP, whose lines of sizes are dropped here.
        body = b"".join(part for i, part in enumerate(answer.partition(b"\r\n\r\n")[2].split(b"\r\n")) if i % 2)
        events = [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == tokens


def test_shutdown_lets_short_streams_end_and_tells_long_ones():
    with serve(slots=2, grace=3.0) as running:
        long = running.connect(**ENDLESS)
        short = running.connect(**{**ENDLESS, "max_tokens": 20})
        read_until(long, b"data: ")
        begun = read_until(short, b"data: ")
        running.server.should_exit = True
        assert b"data: [DONE]" in begun + (b"" if b"[DONE]" in begun else read_until(short, b"[DONE]"))
        answer = read_until(long, b'"error"')
        answer += read_until(long)  # to the end of the connection
        assert b"shutting down" in answer and b"[DONE]" not in answer
        assert wait_for(lambda: not running.service.worker.alive)
        with pytest.raises(ConnectionError):
            running.connect(**ENDLESS).recv(1)


def test_stream_in_the_queue_stays_open_and_begins_when_a_slot_is_free(monkeypatch):
    monkeypatch.setattr("linnet.serve.service.PING", 0.05)
    with serve(slots=1) as running:
        first = running.connect(**ENDLESS)
        read_until(first, b"data: ")
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": True}
        second = running.client().completions.create(**ask, extra_body={"ignore_eos": True, "return_token_ids": True})
        third = running.connect(**{**ENDLESS, "max_tokens": 3})
        assert b": waiting\n\n" in read_until(third, b": waiting", b"data: ")
        first.close()
        assert sum(len(part.choices[0].token_ids) for part in second) == 3
        assert b"[DONE]" in read_until(third, b"[DONE]")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_whose_thread_is_gone_is_reported(monkeypatch):
    monkeypatch.setattr("linnet.serve.service.PING", 0.05)
    with serve(slots=1) as running:

        def leave(kind):
            raise SystemExit  # what ends a thread without a word

        running.service.engine._decoder.choose = leave
        reply = running.post(prompt="x")
        assert reply.status == 503 and reply.error["code"] == "engine_stopped"
        assert running.request("GET", "/health").status == 503 and running.post(prompt="x").status == 503


def test_refuses_what_comes_while_it_closes():
    with serve() as running:
        running.service.closing = True
        for method, path in (("POST", "/v1/completions"), ("GET", "/health")):
            reply = running.request(method, path, b"{}" if method == "POST" else None)
            assert reply.status == 503 and reply.error["code"] == "closing"
        assert int(running.post(prompt="x").headers["retry-after"]) > 0


def test_requests_leave_nothing_behind():
    def requests(running: Running, count: int) -> None:
        for number in range(count):
            if number % 4 == 0:
                client = running.connect(**ENDLESS)
                read_until(client, b"data: ")
                client.close()
            elif number % 4 == 1:
                assert running.post(prompt="x", max_tokens=-1).status == 400
            else:
                ask = {"prompt": "x" * (number % 30 + 1), "max_tokens": 2, "logprobs": 1, "stop": ["zz"]}
                assert running.post(**ask, stream=number % 4 == 2).status == 200
        assert wait_for(lambda: running.service.live == 0 and not running.service.calls)
        gc.collect()

    with serve() as running:
        requests(running, 40)  # fills caches
        tracemalloc.start()
        try:
            requests(running, 20)
            sizes = [tracemalloc.get_traced_memory()[0]]
            for _ in range(3):
                requests(running, 20)
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    # A late cache may fill in one round; what requests leave behind grows in the others too.
    grown = statistics.median(after - before for before, after in itertools.pairwise(sizes))
    assert grown < 20 * 500  # bytes a request; a piece or a body left behind is more


def test_pieces_of_many_threads_arrive_in_order_and_ends_are_counted():
    async def main() -> None:
        ended = []
        hub = Hub(asyncio.get_running_loop(), lambda: ended.append(1))
        calls = [Call(lambda request: None, None) for _ in range(4)]

        def produce(call: Call, index: int) -> None:
            for token in range(500):
                hub.put(call, index, Piece(token, finish="length" if token == 499 else None))

        threads = [threading.Thread(target=produce, args=(call, i)) for call in calls for i in range(2)]
        for call in calls:
            call.running = 2
        for thread in threads:
            thread.start()
        for call in calls:
            found: dict[int, list[int]] = {0: [], 1: []}
            while call.open:
                for index, piece in await call.take():
                    found[index].append(piece.token)
            assert found == {0: list(range(500)), 1: list(range(500))}
        assert len(ended) == 8

    asyncio.run(main())


def test_call_keeps_its_first_failure_and_cancels_once():
    async def main() -> None:
        cancelled = []
        call = Call(cancelled.append, backlog=3)
        call.requests, call.running = ["a", "b"], 2
        for token in range(3):
            call.push(0, Piece(token))
        assert len(await call.take()) == 3
        for token in range(5):
            call.push(1, Piece(token))
        assert cancelled == ["a", "b"]
        call.stop(Disconnected())
        with pytest.raises(ApiError) as error:
            await call.take()
        assert error.value.code == "slow_client" and cancelled == ["a", "b"]
        for index in range(2):
            call.push(index, Piece(None, finish="cancelled"))
        # The failure is what the client must hear of, not the end of what ran.
        assert call.running == 0 and call.open
        with pytest.raises(ApiError):
            await call.take()

    asyncio.run(main())
