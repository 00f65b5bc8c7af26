"""Processes that benchmarks kill: starts them, finds those below them, and waits for their end. Linux: reads /proc."""

import collections
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 30.0  # seconds in which the processes of a killed command must end


def start(work: Callable[[Path], None], root: Path) -> int:
    """Forks: the child needs no time to import torch. Returns its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            work(root)
            status = 0
        finally:
            os._exit(status)
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def descendants(pid: int) -> list[int]:
    """Returns the processes below `pid`, its children first."""
    children = collections.defaultdict(list)
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            text = Path(f"/proc/{int(entry)}/stat").read_text()
            children[int(text.rpartition(")")[2].split()[1])].append(int(entry))
    found, rest = [], [pid]
    while rest:
        found += (below := children[rest.pop(0)])
        rest += below
    return found


def is_worker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def left_after(pids: list[int]) -> list[int]:
    """Waits until the processes have ended. Returns those that have not after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
