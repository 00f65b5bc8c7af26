"""Worker processes for the distributed tests: one pool for all, because starting a process dominates such a test.

A test takes the fixture `pool` and sends a function, which runs once in each of n processes with a gloo group:

    def add(x):                                        # in the test's own file, at its top level
        dist.all_reduce(x)
        return dist.get_rank(), x

    def test_add(pool):
        assert [total.item() for _, total in pool.run(3, add, torch.ones(()))] == [3, 3, 3]

`run` returns the ranks' results in order. Functions travel by file and name, arguments and results as pickles.

* Return numbers, tensors, tuples and dicts: a class of a test file has another name in the worker.
* Each call has its own default process group, made before and destroyed after, and the environment that torchrun
  sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and so on). `group=False` leaves the group to the
  function: for code that starts one itself from that environment.
* A call that takes longer than `timeout` seconds fails with the stack of every rank. An exception on any rank fails
  the call with that rank's traceback; the others get `GRACE` seconds to finish. Either way all workers are killed,
  and the next call starts new ones, which takes milliseconds: they are forked from a server that has imported torch
  and Linnet.
* `fresh=True` uses processes of its own, for functions that kill themselves or leave a mess. A rank that dies counts
  as a result there: `Died(exit code)`, negative for a signal.
* Combine cases in one call where they are small, and keep models tiny (width 32, 2 layers, float64).

Each call starts with the seeds 0, float32 as the default type and one thread.
"""

import atexit
import faulthandler
import gc
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WORKERS = 4
THREADS = 32  # of a worker, above which it makes place for a new one
GRACE = 2.0  # seconds that the other ranks get to finish after one has failed
SLACK = 5.0  # seconds after its timeout in which a worker must have ended itself

# Imported once, by the server that the workers are forked from. The second row is what torch.compile needs.
PRELOAD = [
    *("numpy", "pytest", "typer.testing", "sklearn.metrics", "torch"),
    *("torch._dynamo", "functorch.compile"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("linnet.train", "linnet.parallel.build", "linnet.cli"),
]


class WorkerError(AssertionError):
    """A rank raised, died or ran out of time. The message has each failed rank's traceback."""


@dataclass(frozen=True)
class Died:
    """A rank that ended without a result. The exit code is negative for a signal: -9 is SIGKILL."""

    exit_code: int


class Pool:
    """Four worker processes, started at the first call. Not safe for threads."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="linnet-pool-")
        self._calls = 0
        atexit.register(self.close)

    def run(
        self,
        world: int,
        function: Callable | str,
        *args: object,
        timeout: float = 60.0,
        fresh: bool = False,
        group: bool = True,
        env: dict[str, str] | None = None,
        **kwargs: object,
    ) -> list:
        """The results of function(*args, **kwargs) in `world` processes, by rank.

        Args:
            world: Number of ranks, 1 to 4 (any number with `fresh`).
            function: A function at the top level of a file, or "module:function" for one that can be imported.
            timeout: Seconds the call may take, the making of the group included.
            fresh: Use new processes and end them after the call. A rank that dies gives `Died`.
            group: Make a default gloo group of `world` ranks around the call.
            env: More environment variables for this call.

        Raises:
            WorkerError: If a rank raised, died (unless fresh) or took longer than `timeout`.
        """
        self._calls += 1
        call = Path(self._folder.name) / str(self._calls)
        call.mkdir()
        if fresh:
            workers = [_Worker() for _ in range(world)]
        else:
            if world > WORKERS:
                raise ValueError(f"the pool has {WORKERS} workers, not {world}: pass fresh=True")
            if not all(worker.fit() for worker in self._workers):
                self.close()
            self._workers += [_Worker() for _ in range(WORKERS - len(self._workers))]
            workers = self._workers[:world]
        port = str(_free_port())
        for rank, worker in enumerate(workers):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "TORCHELASTIC_RESTART_COUNT": "0",
                **(env or {}),
            }
            worker.send(_Call(_name(function), args, kwargs, variables, str(call), timeout, group))
        whole = False
        try:
            outcomes = _gather(workers, time.monotonic() + timeout + SLACK, fresh)
            failures = [rank for rank, (kind, _) in enumerate(outcomes) if kind not in ("result", "died")]
            if failures:
                raise WorkerError(_report(function, world, timeout, outcomes, failures, call))
            whole = True
        finally:
            if fresh or not whole:
                for worker in workers if fresh else self._workers:
                    worker.kill()
                if not fresh:
                    self._workers = []
        return [value for _, value in outcomes]

    def close(self) -> None:
        """Ends the workers. The next call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []


@dataclass(frozen=True)
class _Call:
    function: tuple[str, str]  # the file or the module, and the function's name in it
    args: tuple
    kwargs: dict
    env: dict[str, str]
    folder: str
    timeout: float
    group: bool


class _Worker:
    def __init__(self) -> None:
        # Forked from a server, not from this process, which has threads. The server imports this file by its name.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    def fit(self) -> bool:
        """Whether it is alive and not crowded by the threads of groups that are gone.

        PyTorch's caches keep device meshes, these their groups, and each group's thread wakes a hundred times a second.
        """
        return self._process.is_alive() and len(list(Path(f"/proc/{self._process.pid}/task").glob("*"))) <= THREADS

    def send(self, call: _Call) -> None:
        # As bytes: Connection.send would pass tensors through shared memory, which dies with its process.
        self._pipe.send_bytes(pickle.dumps(call))

    @property
    def pipe(self) -> multiprocessing.connection.Connection:
        return self._pipe

    def receive(self) -> tuple[str, object]:
        """("result", value) or ("error", traceback), or ("died", exit code) of a process that ended."""
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return "died", Died(self._process.exitcode if self._process.exitcode is not None else 0)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(5)
        self._pipe.close()


def _gather(workers: list[_Worker], deadline: float, fresh: bool) -> list[tuple[str, object]]:
    outcomes: list[tuple[str, object]] = [("late", None)] * len(workers)
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting and time.monotonic() < deadline:
        for pipe in multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic())):
            rank = waiting.pop(pipe)
            outcomes[rank] = workers[rank].receive()
            kind, value = outcomes[rank]
            if kind == "died" and not fresh:
                outcomes[rank] = ("lost", value)
            if outcomes[rank][0] in ("error", "lost"):
                deadline = min(deadline, time.monotonic() + GRACE)
    return outcomes


def _report(function, world, timeout, outcomes, failures, folder: Path) -> str:
    name = function if isinstance(function, str) else function.__name__
    lines = [f"{name} failed on {len(failures)} of {world} ranks"]
    for rank in failures:
        kind, value = outcomes[rank]
        stack = folder / f"stack-{rank}.txt"
        text = stack.read_text() if stack.exists() else ""
        if kind == "error":
            lines.append(f"--- rank {rank} raised:\n{value}")
        elif text:  # the watchdog wrote it, then ended the process
            lines.append(f"--- rank {rank} took longer than {timeout} s:\n{text}")
        elif kind == "lost":
            lines.append(f"--- rank {rank} died with exit code {value.exit_code}")
        else:
            lines.append(f"--- rank {rank} was still running {GRACE} s after another rank failed")
    return "\n".join(lines)


def _name(function: Callable | str) -> tuple[str, str]:
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return module, name
    return function.__code__.co_filename, function.__qualname__


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# In the workers.


def _serve(pipe: multiprocessing.connection.Connection) -> None:
    import torch

    gc.freeze()  # what the server imported stays: to look at it would copy its pages
    gc.set_threshold(20_000, 20, 100)  # as in tests/conftest.py
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))  # what the files of tests share, by name
    environment = dict(os.environ)
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            outcome = "result", _run(call)
            message = pickle.dumps(outcome)
        except BaseException:
            message = pickle.dumps(("error", traceback.format_exc()))
        finally:
            os.environ.clear()
            os.environ.update(environment)
        pipe.send_bytes(message)


def _run(call: _Call) -> object:
    import numpy as np
    import torch
    import torch.distributed as dist

    rank, world = int(call.env["RANK"]), int(call.env["WORLD_SIZE"])
    os.environ.update(call.env)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    with open(f"{call.folder}/stack-{rank}.txt", "w") as stack:
        # Ends the process, whatever it waits in, even if the test's process is dead by then.
        faulthandler.dump_traceback_later(call.timeout, exit=True, file=stack)
        try:
            if call.group:
                store = dist.FileStore(f"{call.folder}/store", world)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            return _load(*call.function)(*call.args, **call.kwargs)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()


def _load(source: str, name: str) -> Callable:
    if not source.endswith(".py"):
        module = importlib.import_module(source)
    elif (module := sys.modules.get(source)) is None:
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        module = importlib.util.module_from_spec(spec)
        # Under its own name for pickles of the classes that it defines, and under its path, which no other file has.
        sys.modules[source] = sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
        sys.modules[source] = module
    found = module
    for part in name.split("."):
        found = getattr(found, part)
    return found
