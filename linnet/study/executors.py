"""Where runs are trained: in this process, in a pool of local processes, or on a Ray cluster. One interface.

An executor takes jobs and a function `work(job)` and yields an `Outcome` for each job as it ends (and None now and
then, so that whoever waits can refresh a display). What is true of a run is on disk (`linnet.runs`): an executor holds
no state worth keeping, and stopping it loses at most the steps since the last checkpoint of each running run.

A job whose process dies, or that raises, is tried again `retries` times; then its outcome is `failed` and the rest goes
on. Bad configurations and exhausted memory would fail again in the same way, so these are not retried.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context, parent_process
from typing import Any, Literal, Protocol

from pydantic import Field

from linnet.config import Config, ConfigError
from linnet.install import install_command

TICK = 0.5  # seconds between two looks at what runs
GRACE = 60.0  # seconds that a worker has to end its step and save a checkpoint after it was asked to stop


class ExecutorConfig(Config):
    """Where runs are trained: `inline` (this process), `local` (a pool of processes) or `ray` (a cluster).

    Attributes:
        kind: inline: this process, one run after another; local: a pool of processes; ray: a Ray cluster.
        workers: runs at the same time; default one a GPU, or one a CPU core where there is no GPU.
        threads: CPU threads of a worker; default cores / workers.
        throughput: training FLOP/s of one worker, for the ETA; default: measured on this machine before the start.
        address: of a Ray cluster (`auto` or `ray://...`); default: a Ray started on this machine.
        retries: how often a run whose process died or that failed is tried again before it is recorded as failed.
    """

    kind: Literal["inline", "local", "ray"] = "local"
    workers: int | None = Field(None, gt=0)
    threads: int | None = Field(None, gt=0)
    throughput: float | None = Field(None, gt=0)
    address: str | None = None
    retries: int = Field(2, ge=0)


@dataclass(frozen=True)
class Job:
    """One run to train: `payload` is plain data that `work` understands; `label` names it in messages."""

    run: str
    payload: dict[str, Any]
    label: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `status` as `work` returned it, or `failed` with the error's text."""

    job: Job
    status: str
    error: str = ""
    seconds: float = 0.0
    attempts: int = 1
    final: bool = True


Work = Callable[[Job], str]


class Executor(Protocol):
    workers: int

    def run(self, jobs: Sequence[Job], work: Work) -> Iterator[Outcome | None]: ...


def make_executor(config: ExecutorConfig) -> Executor:
    """The executor that a study asks for. Raises `ConfigError` where Ray is asked for and not installed."""
    if config.kind == "inline":
        return Inline(config.retries)
    if config.kind == "local":
        return LocalPool(worker_slots(config), worker_threads(config), config.retries, _visible_gpus())
    return Ray(config.workers, worker_threads(config), config.retries, config.address)


def worker_slots(config: ExecutorConfig) -> int:
    """Runs at the same time on this machine: as configured, or one a GPU, or one a CPU core."""
    if config.kind == "inline":
        return 1
    return config.workers or len(_visible_gpus()) or cpu_cores()


class Inline:
    """Runs one job after another in this process: the simplest to debug."""

    workers = 1

    def __init__(self, retries: int = 2):
        self.retries = retries

    def run(self, jobs: Sequence[Job], work: Work) -> Iterator[Outcome | None]:
        for job in jobs:
            attempts, outcome = 0, None
            while outcome is None or not (outcome.final or attempts > self.retries):
                attempts += 1
                outcome = attempt(work, job)
            yield replace(outcome, attempts=attempts)


class LocalPool:
    """A pool of spawned processes; each trains many runs, so torch is imported once a worker and not once a run.

    Workers end by themselves when this process is gone, whatever killed it, and so give up the locks on their runs.
    """

    def __init__(self, workers: int, threads: int = 1, retries: int = 2, devices: Sequence[str] = ()):
        self.workers, self.threads, self.retries = workers, threads, retries
        self.devices = list(devices)

    def run(self, jobs: Sequence[Job], work: Work) -> Iterator[Outcome | None]:
        waiting = deque((job, 1) for job in jobs)
        slots = [_Worker(self.threads, self._device(i)) for i in range(min(self.workers, len(jobs)))]
        try:
            while waiting or any(slot.job for slot in slots):
                for slot in slots:
                    if waiting and not slot.job:
                        slot.send(work, *waiting.popleft())
                busy = {slot.pipe: slot for slot in slots if slot.job}
                for pipe in connection.wait(list(busy), timeout=TICK):
                    slot = busy[pipe]
                    job, number = slot.job, slot.number
                    outcome = slot.receive()
                    if outcome.final or number > self.retries:
                        yield replace(outcome, attempts=number)
                    else:
                        waiting.appendleft((job, number + 1))
                yield None
        finally:  # also where the caller stops listening (Ctrl-C)
            for slot in slots:
                slot.ask_to_end()
            deadline = time.monotonic() + GRACE
            for slot in slots:
                slot.end(deadline)

    def _device(self, index: int) -> str | None:
        return self.devices[index % len(self.devices)] if self.devices else None


class Ray:
    """Runs jobs as Ray tasks (extra `cluster`). The study folder must be on storage that every machine sees.

    Ray places the tasks and survives the loss of a machine: a lost task is tried again like a dead process.
    A task takes `threads` CPUs, and one GPU where the cluster has any.
    """

    def __init__(self, workers: int | None, threads: int, retries: int = 2, address: str | None = None):
        try:
            import ray
        except ImportError:
            message = f"executor.kind: 'ray' needs the package ray; install it: {install_command('cluster')}"
            raise ConfigError([message], "study") from None
        self.ray, self.retries, self.threads = ray, retries, threads
        if not ray.is_initialized():
            # without an address a Ray is started here, with a worker's threads for each of `workers` runs
            cpus = None if address or workers is None else workers * threads
            try:
                _reach(address)
                ray.init(
                    address=address,
                    num_cpus=cpus,
                    include_dashboard=False if address is None else None,
                    log_to_driver=False,
                    logging_level="ERROR",
                    configure_logging=False,
                )
            except (OSError, ValueError) as error:
                reason = str(error).splitlines()[0]
                problem = f"executor.address: no Ray cluster at {address!r} ({reason}); start one with ray start --head"
                raise ConfigError([problem], "study") from None
        resources = ray.cluster_resources()
        self.gpus = 1 if resources.get("GPU", 0) >= 1 else 0
        slots = resources["GPU"] if self.gpus else resources.get("CPU", 1) / threads
        self.workers = max(1, min(int(slots), workers or int(slots)))

    def run(self, jobs: Sequence[Job], work: Work) -> Iterator[Outcome | None]:
        ray, threads, here = self.ray, self.threads, os.getcwd()

        @ray.remote(num_cpus=threads, num_gpus=self.gpus, max_retries=0)
        def task(job: Job) -> Outcome:
            os.chdir(here)  # relative paths of data and plugins mean the same there
            prepare_worker(threads, None, watch=False)
            return attempt(work, job)

        waiting = deque((job, 1) for job in jobs)
        running: dict[Any, tuple[Job, int]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    job, number = waiting.popleft()
                    running[task.remote(job)] = (job, number)
                ended, _ = ray.wait(list(running), timeout=TICK)
                for reference in ended:
                    job, number = running.pop(reference)
                    try:
                        outcome = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        outcome = Outcome(job, "failed", f"the process or its machine was lost: {error}", final=False)
                    if outcome.final or number > self.retries:
                        yield replace(outcome, attempts=number)
                    else:
                        waiting.appendleft((job, number + 1))
                yield None
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


def _reach(address: str | None) -> None:
    """Raises OSError where nothing listens at host:port: Ray would try for minutes, then end this process."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def worker_threads(config: ExecutorConfig) -> int:
    """CPU threads of a worker: as configured, or its share of the cores of this machine."""
    return config.threads or max(1, cpu_cores() // worker_slots(config))


def attempt(work: Work, job: Job) -> Outcome:
    """Runs a job once; an error becomes an outcome, and `final` says that trying again would not help."""
    start = time.perf_counter()
    try:
        status, error, final = work(job), "", True
    except Exception as problem:
        status, error = "failed", "".join(traceback.format_exception(problem))
        final = isinstance(problem, ConfigError) or is_out_of_memory(problem)
        if is_out_of_memory(problem):
            error = f"out of memory: {problem}\n\n{error}"
    return Outcome(job, status, error, time.perf_counter() - start, final=final)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def cpu_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_worker(threads: int, device: str | None, watch: bool = True) -> None:
    """Sets up a worker process: its share of the cores, its GPU, its end when the parent is gone, its signals."""
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    _share_cores(threads)
    if watch:
        # Ctrl-C goes to all processes of the terminal's group; here the parent alone hears it, and asks with SIGTERM
        if hasattr(os, "setpgrp"):
            os.setpgrp()
        signal.signal(signal.SIGTERM, _stop)
        threading.Thread(target=end_with_parent, daemon=True).start()


class _Worker:
    """One process and the job that it runs; started when first needed, and again after it died."""

    def __init__(self, threads: int, device: str | None):
        self.arguments = (threads, device)
        self.process = self.pipe = self.job = None
        self.number, self.started = 0, 0.0

    def send(self, work: Work, job: Job, number: int) -> None:
        self.job, self.number, self.started = job, number, time.perf_counter()
        if self.process is None:
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, *self.arguments), daemon=True)
            self.process.start()
            theirs.close()  # so that the pipe ends when the process does
        try:
            self.pipe.send((work, job))
        except BrokenPipeError:
            pass  # it died while idle; receive says so

    def receive(self) -> Outcome:
        job, self.job = self.job, None
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            code = self.process.exitcode
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self.process, pid = None, self.process.pid
            self.pipe.close()
            text = f"the worker process {pid} died ({cause}): killed, out of memory, or a crash in native code"
            return Outcome(job, "failed", text, time.perf_counter() - self.started, final=False)

    def ask_to_end(self) -> None:
        """An idle worker ends with its pipe; a busy one is told with SIGTERM and leaves a run that can be resumed."""
        if self.process is not None and self.job is not None:
            self.process.terminate()
        elif self.process is not None:
            self.pipe.close()

    def end(self, deadline: float) -> None:
        if self.process is not None:
            self.process.join(max(0.0, deadline - time.monotonic()))
            if self.process.is_alive():
                self.process.kill()
                self.process.join()


def _serve(pipe: connection.Connection, threads: int, device: str | None) -> None:
    """The life of a worker: one job after another, until the pipe closes."""
    try:
        prepare_worker(threads, device)
        while True:
            work, job = pipe.recv()
            _share_cores(threads)
            pipe.send(attempt(work, job))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass


def _share_cores(threads: int) -> None:
    """Limits torch: by what it reads when it is imported, and by a call where the work has imported it already."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


def _stop(signum, frame) -> None:
    raise KeyboardInterrupt


def end_with_parent() -> None:
    """Ends this process once its parent is gone, however that ended; for a daemon thread of a worker."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES of the GPUs that this process sees."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(i) for i in range(count)]
