"""Runs a function on parts, in this process or in several, none of which outlives this one."""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, get_context, parent_process
from typing import Any, TypeVar

from linnet.config import ConfigError
from linnet.data.clean.documents import Part
from linnet.trust import safe_path

Result = TypeVar("Result")


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
            for found in connection.wait(list(running)):
                ready: Any = found
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
    threading.Thread(target=_end_with_parent, daemon=True).start()
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


def _end_with_parent() -> None:
    connection.wait([parent_process().sentinel])  # type: ignore[union-attr]
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


def _on_ray(function: Callable, parts: Sequence[Part], workers: int) -> Iterator[tuple[Part, Any]]:
    from linnet.data.clean.cluster import run_on_ray

    return run_on_ray(function, parts, workers)


ENGINES: dict[str, Callable[[Callable, Sequence[Part], int], Iterator[tuple[Part, Any]]]] = {
    "local": _in_processes,
    "ray": _on_ray,
}
