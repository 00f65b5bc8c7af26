"""Executors: train runs in this process, in a pool of local processes, or on a Ray cluster, behind one interface.

An executor takes jobs and a function `work(job)`. It yields one `Outcome` per job when the job ends, and None from time
to time, so that the caller can refresh a display. The state of a run is on disk (`linnet.runs`), not in the executor:
stopping an executor loses at most the steps since the last checkpoint of each running run.

If a job raises or its process dies, the executor tries it again up to `retries` times. Then the outcome is `failed` and
the other jobs continue. Wrong configurations and exhausted memory are not retried: they would fail in the same way.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context
from typing import Any, Literal, Protocol

from pydantic import Field

from linnet.config import Config, ConfigError
from linnet.provenance import SHARE, THREADS, chosen_threads
from linnet.signals import Interrupt
from linnet.trust import safe_path

TICK = 0.5  # longest wait in seconds for an outcome before an executor yields None
GRACE = 60.0  # seconds in which a worker must finish its step and save a checkpoint after a request to stop


class ExecutorConfig(Config):
    """Where runs are trained: `inline` (this process), `local` (a pool of processes) or `ray` (a cluster).

    Attributes:
        kind: inline: this process, one run after another; local: a pool of processes; ray: a Ray cluster.
        workers: number of runs trained at the same time; default: one per GPU, or one per CPU core without a GPU.
        threads: CPU threads per worker; default: cores / workers, fewer for small models, and for local workers at most
            OMP_NUM_THREADS.
        throughput: training FLOP/s of one worker, for the time estimate; default: measured on this machine.
        address: address of a Ray cluster (`auto` or `ray://...`); default: start Ray on this machine.
        bundle: most runs that one worker trains together, with one batched call per step
            (`linnet.train.together`). They may differ in their seed, learning rate and weight decay only; 1
            trains each run alone.
        retries: how many times a failed run, or a run whose process died, is tried again before it counts as failed.
    """

    kind: Literal["inline", "local", "ray"] = "local"
    workers: int | None = Field(None, gt=0, le=1 << 16)
    threads: int | None = Field(None, gt=0, le=1 << 12)
    throughput: float | None = Field(None, gt=0)
    address: str | None = None
    bundle: int = Field(1, gt=0)
    retries: int = Field(2, ge=0)


READ_BY = {"workers": ("local", "ray"), "threads": ("local", "ray"), "address": ("ray",)}


def unread_problems(config: ExecutorConfig) -> list[str]:
    """Returns which keys are set, but not read by an executor of this kind. `workers: 1` is what inline does anyway."""
    return [
        f"{key}: {value} has no effect with kind: {config.kind}; leave it out, or use kind: {kinds[0]}"
        for key, kinds in READ_BY.items()
        if (value := getattr(config, key)) is not None
        and config.kind not in kinds
        and (key, value) != ("workers", worker_slots(config))
    ]


@dataclass(frozen=True)
class Job:
    """One run to train: `payload` is plain data for `work`; `label` is the name in messages."""

    run: str
    payload: dict[str, Any]
    label: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the `status` that `work` returned, or `failed` with the text of the error.

    `final` is False if another attempt may succeed.
    """

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


def make_executor(config: ExecutorConfig, devices: int = 1) -> Executor:
    """Returns the executor of a configuration, whose runs take `devices` devices each.

    Raises:
        ConfigError: this machine has too few devices for one run, or Ray is missing or cannot be reached.
    """
    if problem := device_problem(config, devices):
        raise ConfigError([problem], "study")
    if config.kind == "inline":
        return Inline(config.retries)
    if config.kind == "local":
        gpus = _visible_gpus()
        groups = [",".join(gpus[at : at + devices]) for at in range(0, len(gpus) - devices + 1, devices)]
        return LocalPool(worker_slots(config, devices), *worker_threads(config, devices), config.retries, groups)
    return Ray(config.workers, *worker_threads(config, devices), config.retries, config.address, devices)


def device_problem(config: ExecutorConfig, devices: int) -> str | None:
    """Returns why this machine cannot give a run `devices` devices, None if it can or if Ray places the runs."""
    if devices == 1 or config.kind == "ray":
        return None
    gpus = len(_visible_gpus())
    have, kind = (gpus, "GPU") if gpus else (cpu_cores(), "CPU core")
    if devices <= have:
        return None
    machine = f"this machine has {have} {kind}{'s' * (have != 1)}"
    return f"train.parallel: asks for {devices} devices per run, {machine}; use fewer, or executor.kind: ray"


def worker_slots(config: ExecutorConfig, devices: int = 1) -> int:
    """Returns the number of runs at the same time on this machine: `workers`, or else as many as have their devices.

    Args:
        devices: GPUs of one run, or CPU cores without a GPU.
    """
    if config.kind == "inline":
        return 1
    return config.workers or max(1, (len(_visible_gpus()) or cpu_cores()) // devices)


class Inline:
    """Runs one job after another in this process. Use it to debug."""

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
    """A pool of spawned processes. Each worker trains many runs, so torch is imported once per worker.

    A worker ends when this process ends for any reason, including a kill, and so releases the lock on its run.
    """

    def __init__(
        self, workers: int, threads: int = 1, chosen: bool = True, retries: int = 2, devices: Sequence[str] = ()
    ):
        self.workers, self.threads, self.chosen, self.retries = workers, threads, chosen, retries
        self.devices = list(devices)

    def run(self, jobs: Sequence[Job], work: Work) -> Iterator[Outcome | None]:
        waiting = deque((job, 1) for job in jobs)
        slots = [_Worker(self.threads, self.chosen, self._device(i)) for i in range(min(self.workers, len(jobs)))]
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
        finally:  # also runs if the caller stops iterating (Ctrl-C)
            for slot in slots:
                slot.ask_to_end()
            deadline = time.monotonic() + GRACE
            for slot in slots:
                slot.end(deadline)

    def _device(self, index: int) -> str | None:
        return self.devices[index % len(self.devices)] if self.devices else None


class Ray:
    """Runs jobs as Ray tasks (extra `cluster`). The study folder must be on storage that all machines share.

    Ray places the tasks. If a machine is lost, its tasks are tried again, as after the death of a local process.
    A task takes `threads` CPUs per device, and if the cluster has GPUs, `devices` of them on one machine.
    """

    def __init__(
        self,
        workers: int | None,
        threads: int,
        chosen: bool = True,
        retries: int = 2,
        address: str | None = None,
        devices: int = 1,
    ):
        from linnet.train.processes.cluster import (  # imports torch, which local workers import later
            connect,
            import_ray,
        )

        ray = import_ray("executor.kind: 'ray'")
        self.ray, self.retries, self.threads, self.chosen = ray, retries, threads, chosen
        # Without an address, Ray starts on this machine with enough CPUs for `workers` runs.
        cpus = None if address or workers is None else workers * threads * devices
        connect(ray, address, cpus, "executor.address")
        resources = ray.cluster_resources()
        self.gpus = devices if resources.get("GPU", 0) >= 1 else 0
        self.cpus = threads * devices
        slots = resources["GPU"] / devices if self.gpus else resources.get("CPU", 1) / self.cpus
        if devices > 1 and slots < 1:
            have = f"{resources['GPU']:.0f} GPUs" if self.gpus else f"{resources.get('CPU', 0):.0f} CPUs"
            problem = f"train.parallel: asks for {devices} devices per run, the cluster has {have}; use fewer"
            raise ConfigError([problem], "study")
        self.workers = max(1, min(int(slots), workers or int(slots)))

    def run(self, jobs: Sequence[Job], work: Work) -> Iterator[Outcome | None]:
        ray, threads, chosen, here = self.ray, self.threads, self.chosen, os.getcwd()

        @ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0)
        def task(job: Job) -> Outcome:
            os.chdir(here)  # so that relative paths of data and plugins resolve as in this process
            prepare_worker(threads, chosen, None, watch=False)
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


def worker_threads(config: ExecutorConfig, devices: int = 1) -> tuple[int, bool]:
    """Returns the CPU threads per process, and whether the user chose them; if not, small models train with fewer.

    They are `threads`, or an equal share of the cores of this machine. A local process, whose environment is this one,
    has at most OMP_NUM_THREADS.
    """
    if config.threads:
        return config.threads, True
    share = max(1, cpu_cores() // (worker_slots(config, devices) * devices))
    most = (chosen_threads() or "").partition(",")[0].strip()  # "4,2": of regions inside regions
    if config.kind == "ray" or not most.isdecimal() or int(most) == 0:
        return share, False
    return min(share, int(most)), True


def attempt(work: Work, job: Job) -> Outcome:
    """Runs a job once and returns its outcome. An error gives status `failed`, `final` if a retry would not help."""
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
    """Returns whether an exception means that GPU or CPU memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def cpu_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_worker(threads: int, chosen: bool, device: str | None, watch: bool = True) -> None:
    """Sets up a worker process: CPU threads, GPU and, if `watch`, signals and the end when the parent process ends."""
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    _share_cores(threads, chosen)
    if watch:
        # The terminal sends Ctrl-C to its whole process group. Workers leave the group, so that only the parent
        # receives it; the parent then stops them with SIGTERM.
        if hasattr(os, "setpgrp"):
            os.setpgrp()
        signal.signal(signal.SIGTERM, Interrupt(patient=False))  # while a run trains it has its own
        from linnet.data.parts import end_with_parent  # imports NumPy, which this process may do without

        threading.Thread(target=end_with_parent, daemon=True).start()


class _Worker:
    """One process and its current job. The process starts with the first job, and again after it died."""

    def __init__(self, threads: int, chosen: bool, device: str | None):
        self.arguments = (threads, chosen, device)
        self.process = self.pipe = self.job = None
        self.number, self.started = 0, 0.0

    def send(self, work: Work, job: Job, number: int) -> None:
        self.job, self.number, self.started = job, number, time.perf_counter()
        if self.process is None:
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs, *self.arguments), daemon=True)
            with safe_path():
                self.process.start()
            theirs.close()  # so that the pipe closes when the process ends
        with suppress(BrokenPipeError):  # the process died while idle; `receive` reports it
            self.pipe.send((work, job))

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
        """Asks the process to end: closes the pipe of an idle worker, or sends SIGTERM to a busy one.

        A busy worker saves a checkpoint, so its run can be resumed.
        """
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


def _serve(pipe: connection.Connection, threads: int, chosen: bool, device: str | None) -> None:
    """Main loop of a worker process: runs one job after another until the pipe closes."""
    try:
        prepare_worker(threads, chosen, device)
        while True:
            work, job = pipe.recv()
            _share_cores(threads, chosen)
            pipe.send(attempt(work, job))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass


def _share_cores(threads: int, chosen: bool) -> None:
    """Limits the threads of torch: by the variable that it reads on import, and by a call if it is imported already."""
    os.environ[THREADS] = str(threads)
    if chosen:
        os.environ.pop(SHARE, None)
    else:
        os.environ[SHARE] = str(threads)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(threads)


def _visible_gpus() -> list[str]:
    """Returns the GPUs that this process sees, as values for CUDA_VISIBLE_DEVICES."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(i) for i in range(count)]
