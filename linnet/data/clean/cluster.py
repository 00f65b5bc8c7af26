"""Runs a function on parts as tasks of a Ray cluster whose machines share the storage of sources and folders."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from linnet.config import ConfigError
from linnet.data.clean.documents import Part

ENDING = 10.0  # seconds for tasks to end when the stage is stopped


def run_on_ray(function: Callable[[Part], Any], parts: Sequence[Part], workers: int) -> Iterator[tuple[Part, Any]]:
    """Yields each part with the result of `function`, in the order in which they end.

    This process must be connected to the cluster. Ray starts a task again if its worker or machine is lost.

    Args:
        workers: most tasks at a time.

    Raises:
        ConfigError: a task was lost several times. Errors of the function are raised here.
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
