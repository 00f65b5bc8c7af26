"""The engine in its thread: many callers, cancellation, callers that break, an engine that breaks."""

import functools
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.inference import Completion, Engine, EngineProcess, Sampling, Worker
from linnet.models import build_model, family

LONG = Sampling(max_tokens=100_000, ignore_end=True)


def make(breaks: bool = False, problem: str | None = None) -> Engine:
    """An engine; one that `breaks` does so at prompts of one exclamation mark."""
    if problem is not None:
        raise ConfigError([problem], "run")
    engine = Engine(build_model(family("tnl")(32, 1)), ByteTokenizer(), slots=3, device="cpu")
    prefill = engine.model.prefill

    def breaking(tokens, states):
        if tokens.tolist() == [[ord("!")]]:
            raise TypeError("an exclamation mark")
        return prefill(tokens, states)

    if breaks:
        engine.model.prefill = breaking
    return engine


@pytest.fixture(params=[Worker, EngineProcess], scope="module")
def worker(request):
    """A worker, which at last is closed with a request that runs."""
    if request.param is Worker:
        worker = Worker(make(breaks=True))
    else:
        worker = EngineProcess(functools.partial(make, breaks=True), threads=1)
        worker.begin(make())
    yield worker
    pieces: queue.Queue = queue.Queue()
    worker.submit("a", LONG, pieces.put)
    assert pieces.get(timeout=60).finish is None
    worker.close()
    assert end_of(pieces).finish == "cancelled" and not worker.alive
    with pytest.raises(ConfigError, match="closing"):
        worker.submit("b", LONG, pieces.put)


def end_of(pieces):
    while (piece := pieces.get(timeout=60)).finish is None:
        pass
    return piece


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
    expected = make().generate([f"caller {i}" for i in range(12)], settings)
    assert [found[i].tokens for i in range(12)] == [completion.tokens for completion in expected]
    counters = worker.engine.counters if isinstance(worker, Worker) else worker.counters
    assert counters.finished["length"] >= 12 and not worker.load


def test_cancelling_ends_a_request(worker):
    pieces: queue.Queue = queue.Queue()
    request = worker.submit("a", LONG, pieces.put)
    assert pieces.get(timeout=60).finish is None
    worker.cancel(request)
    assert end_of(pieces).finish == "cancelled"


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
    worker.submit("!", LONG, pieces.put)
    last = []
    while len(last) < 2:
        if (piece := pieces.get(timeout=60)).finish is not None:
            last.append(piece)
    assert {piece.finish for piece in last} == {"error"} and "TypeError" in last[0].error
    assert "Traceback" in worker.error and worker.alive
    assert collect(worker, "c", Sampling(max_tokens=3, ignore_end=True)).finish == "length"


def test_a_killed_process_ends_its_requests_and_takes_no_more():
    worker = EngineProcess(make, threads=1)
    worker.begin(make())
    pieces: queue.Queue = queue.Queue()
    worker.submit("a", LONG, pieces.put)
    assert pieces.get(timeout=60).finish is None
    os.kill(worker._process.pid, signal.SIGINT)  # as a terminal sends it to all: the parent ends the engines
    worker.submit("b", Sampling(max_tokens=1), lambda piece: None)
    os.kill(worker._process.pid, signal.SIGKILL)
    piece = end_of(pieces)
    assert piece.finish == "error" and "exit code -9" in piece.error
    with pytest.raises(ConfigError, match="closing"):
        worker.submit("c", LONG, pieces.put)
    assert not worker.alive and not worker.load
    worker.close()


def test_what_loading_raises_is_raised_here():
    worker = EngineProcess(functools.partial(make, problem="this folder has no model"))
    with pytest.raises(ConfigError, match="this folder has no model"):
        worker.begin(make())
    assert not worker.alive


def test_closing_does_not_wait_for_a_model_that_loads():
    worker = EngineProcess(functools.partial(time.sleep, 600))
    began = time.monotonic()
    worker.close()
    assert not worker._process.is_alive() and time.monotonic() - began < 25  # it gives a running engine 30 s


@pytest.mark.system
@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"])
def test_the_process_ends_with_its_parent(ending):
    script = f"""
import os, signal, sys
from test_worker import EngineProcess, make
if __name__ == "__main__":
    worker = EngineProcess(make)
    worker.begin(make())
    worker.submit("a", None, lambda piece: None)
    print(worker._process.pid, flush=True)
    {ending}
"""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    program = [sys.executable, "-c", script]
    run = subprocess.run(program, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=240)
    assert run.returncode in (-9, 3), run.stderr
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.kill(int(run.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {run.stdout} is still there")
