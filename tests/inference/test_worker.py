"""The engine in its thread: many callers, cancellation, callers that break, an engine that breaks."""

import queue
import threading

import pytest

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.inference import Completion, Engine, Sampling, Worker
from linnet.models import build_model, family

LONG = Sampling(max_tokens=100_000, ignore_end=True)


@pytest.fixture
def worker():
    model = build_model(family("tnl")(32, 1))
    worker = Worker(Engine(model, ByteTokenizer(), slots=3, device="cpu"))
    yield worker
    worker.close()
    assert not worker.alive


def collect(worker, prompt, sampling):
    pieces: queue.Queue = queue.Queue()
    request = worker.submit(prompt, sampling, pieces.put)
    found = []
    while not found or found[-1].finish is None:
        found.append(pieces.get(timeout=60))
    return Completion.of(request, found)


def test_callers_in_threads_get_their_own_completions(worker):
    settings = [Sampling(max_tokens=5 + i, temperature=1.0, seed=i, ignore_end=True) for i in range(12)]
    found = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: collect(worker, f"caller {i}", settings[i])}))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    model = build_model(family("tnl")(32, 1))
    expected = Engine(model, ByteTokenizer(), slots=3, device="cpu").generate(
        [f"caller {i}" for i in range(12)], settings
    )
    assert [found[i].tokens for i in range(12)] == [completion.tokens for completion in expected]
    assert worker.engine.counters.finished == {"length": 12} and not worker.engine.busy


def test_cancelling_and_closing_end_requests(worker):
    pieces: queue.Queue = queue.Queue()
    request = worker.submit("a", LONG, pieces.put)
    assert pieces.get(timeout=60).finish is None
    worker.cancel(request)
    while (piece := pieces.get(timeout=60)).finish is None:
        pass
    assert piece.finish == "cancelled"
    worker.submit("b", LONG, pieces.put)
    worker.close()
    while (piece := pieces.get(timeout=60)).finish is None:
        pass
    assert piece.finish == "cancelled"
    with pytest.raises(ConfigError, match="closing"):
        worker.submit("c", LONG, pieces.put)


def test_a_caller_that_breaks_does_not_end_the_others(worker):
    def broken(piece):
        raise ValueError("gone")

    request = worker.submit("a", LONG, broken)
    assert len(collect(worker, "b", Sampling(max_tokens=20, ignore_end=True)).tokens) == 20
    assert request.cancelled and worker.alive


def test_an_engine_that_breaks_says_so_to_all_and_goes_on(worker):
    pieces: queue.Queue = queue.Queue()
    worker.submit("a", LONG, pieces.put)
    pieces.get(timeout=60)
    good = worker.engine.model.prefill
    worker.engine.model.prefill = None
    worker.submit("b", LONG, pieces.put)
    last = []
    while len(last) < 2:
        if (piece := pieces.get(timeout=60)).finish is not None:
            last.append(piece)
    assert {piece.finish for piece in last} == {"error"} and "TypeError" in last[0].error
    assert "Traceback" in worker.error and worker.alive
    worker.engine.model.prefill = good
    assert collect(worker, "c", Sampling(max_tokens=3, ignore_end=True)).finish == "length"
