"""Work on data in parts: the pool that runs them, and the lock and the files of the folder that they write.

No process outlives the command that started it, and no file is there by half.
"""

import contextlib
import json
import os
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from linnet.config import ConfigError
from linnet.trust import safe_path

ENDING = 10.0  # seconds for tasks of Ray to end when the work is stopped
WAIT = 10.0  # seconds until the workers of a killed command must have ended

Result = TypeVar("Result")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part:
    """One unit of work, which makes one shard. Parts depend on the inputs alone, never on the number of workers."""

    number: int
    pieces: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Bytes of text, roughly."""
        return sum(piece.size for piece in self.pieces)


def run_parts(
    function: Callable[[Part], Result], parts: Sequence[Part], *, workers: int = 1, engine: str = "local"
) -> Iterator[tuple[Part, Result]]:
    """Yields each part with the result of `function`, in the order in which they end.

    Args:
        function: picklable, and so are its results.
        workers: processes; 1 runs everything in this one.
        engine: "local", or "ray" for the tasks of a Ray cluster that shares this file system.

    Raises:
        ConfigError: a worker died. Errors of the function are raised here.
    """
    if engine not in ENGINES:
        raise ConfigError([f"--engine {engine}: is unknown; use {' or '.join(ENGINES)}"], "command line")
    if engine == "local" and (workers == 1 or len(parts) < 2):
        for part in parts:
            yield part, function(part)
    else:
        yield from ENGINES[engine](function, parts, workers)


def abandoned() -> bool:
    """Whether this is a worker whose parent has died, so that it must not write any more."""
    parent = parent_process()
    return parent is not None and not parent.is_alive()


def _in_processes(function: Callable, parts: Sequence[Part], workers: int) -> Iterator[tuple[Part, Any]]:
    context, rest = get_context("spawn"), list(reversed(parts))
    running: dict[Any, tuple[Any, Part]] = {}  # by connection
    processes = []
    try:
        for _ in range(min(workers, len(parts))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function), daemon=True)
            with safe_path():
                process.start()
            theirs.close()
            processes.append(process)
            running[ours] = (process, rest.pop())
            _send(ours, *running[ours])
        while running:
            for pipe in connection.wait(list(running)):
                ready: Any = pipe
                process, part = running.pop(ready)
                try:
                    error, result = ready.recv()
                except (EOFError, OSError):
                    process.join()
                    raise _died(process.exitcode, part) from None
                if error is not None:
                    raise error
                if rest:
                    running[ready] = (process, rest.pop())
                    _send(ready, *running[ready])
                yield part, result
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _send(ours: Any, process: Any, part: Part) -> None:
    try:
        ours.send(part)
    except OSError:  # it has just died
        process.join()
        raise _died(process.exitcode, part) from None


def _serve(theirs: Any, function: Callable) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    threading.Thread(target=end_with_parent, daemon=True).start()
    while True:
        try:
            part = theirs.recv()
        except (EOFError, OSError):
            return
        answer: tuple[Exception | None, Any]
        try:
            answer = None, function(part)
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            answer = error, None
        theirs.send(answer)


def end_with_parent() -> None:
    """Waits until the parent process has ended for any reason, then ends this process. Runs in a daemon thread."""
    if (parent := parent_process()) is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _died(code: int | None, part: Part) -> ConfigError:
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    hint = "; if memory ran out, give fewer --workers" if code == -signal.SIGKILL else ""
    names = " to ".join(
        f"{piece.source}/{piece.file}".removeprefix("/")
        for piece in dict.fromkeys([*part.pieces[:1], *part.pieces[-1:]])
    )
    where = f"part {part.number}" + (f" ({names})" if names else "")
    return ConfigError([f"a worker {how} at {where}; the same command resumes{hint}"], "workers")


def _on_ray(function: Callable[[Part], Any], parts: Sequence[Part], workers: int) -> Iterator[tuple[Part, Any]]:
    """`run_parts` as tasks of a Ray cluster whose machines share the storage of sources and folders.

    This process must be connected to the cluster. Ray starts a task again if its worker or machine is lost; a task that
    is lost several times is a ConfigError.
    """
    import ray

    if not ray.is_initialized():
        raise ConfigError(["--engine ray: this process is not connected to Ray; call ray.init() first"], "ray")
    task = ray.remote(num_cpus=1, max_retries=3)(_call)
    shared, here, rest = ray.put(function), os.getcwd(), list(reversed(parts))
    running: dict[Any, Part] = {}
    try:
        while rest or running:
            while rest and len(running) < workers:
                part = rest.pop()
                running[task.remote(shared, part, here)] = part
            ready, _ = ray.wait(list(running))
            for reference in ready:
                part = running.pop(reference)
                try:
                    yield part, ray.get(reference)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except ray.exceptions.RayError as error:
                    reason = str(error).splitlines()[0]
                    message = f"part {part.number} was lost on the Ray cluster ({reason}); the same command resumes"
                    raise ConfigError([message], "ray") from None
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=ENDING)


def _call(function: Callable[[Part], Any], part: Part, here: str) -> Any:
    try:
        os.chdir(here)  # Ray starts its processes elsewhere, and paths may be relative
    except OSError as error:
        message = f"{here}: {error.strerror} on a machine of the cluster; use storage that all machines share"
        raise ConfigError([message], "ray") from None
    return function(part)


ENGINES: dict[str, Callable[[Callable, Sequence[Part], int], Iterator[tuple[Part, Any]]]] = {
    "local": _in_processes,
    "ray": _on_ray,
}


def batches(items: Iterable[T], most: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields consecutive items together, as soon as their sizes add up to `most`, and what is left at the end."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write that becomes `path` at the end of the `with` block, or is removed if the block fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process; a link would lead the bytes elsewhere
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if abandoned():  # another command may have begun to write here
            raise InterruptedError("the command that this process worked for has ended")
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):  # a write fails without a name
            error.filename = str(path)
        raise
    if os.name != "nt":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def write_json(path: Path, values: object) -> None:
    """Writes values as JSON, whole by rename. Bytes of a path that are not UTF-8 are written as JSON's escapes."""
    text = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False)
    with whole_file(path) as file:
        file.write(text.encode(errors="backslashreplace") + b"\n")


def remove_halves(out: Path) -> None:
    """Removes what a killed command was writing into the folder of a stage."""
    for path in [*out.glob(".*.tmp"), *(out / "parts").glob(".*.tmp")]:
        path.unlink(missing_ok=True)


def clear_stage(out: Path, files: Iterable[Path], last: Path) -> None:
    """Removes what a stage wrote, and last of all the file without which the folder would not be known as one."""
    for path in files:
        path.unlink(missing_ok=True)
    shutil.rmtree(out / "parts", ignore_errors=True)
    last.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(out: Path, wait: float = WAIT) -> Iterator[None]:
    """Holds the lock of a stage's folder, which ends with this process.

    Raises ConfigError if another process holds it for `wait` seconds; with a longer `wait` than usual, warns first.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(out, os.O_RDONLY)
    try:
        deadline, patience = time.monotonic() + wait, time.monotonic() + WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"--out {out}: another process is writing it; wait for it, or name another folder"
                    raise ConfigError([message], "command line") from None
                if time.monotonic() > patience:
                    warnings.warn(f"waiting for another process that writes {out}", stacklevel=4)
                    patience = deadline
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)
