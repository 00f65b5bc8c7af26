"""Jobs that say what they do, for tests of what executes them: importable by name in every process."""

import os
import signal
import time
from pathlib import Path

from linnet.config import ConfigError
from linnet.study.executors import Job

LONG = 240  # seconds that no test waits for


def work(job: Job) -> str:
    """A stand-in for a training: notes that it started in the job's file, then does what the job says."""
    does = job.payload
    log = Path(does["log"])
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    tries = len(log.read_text().split())
    match does.get("do"):
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "die once" if tries == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise RuntimeError("a bad step")
        case "raise once" if tries == 1:
            raise OSError("a file was busy")
        case "misconfigured":
            raise ConfigError(["steps: must be positive"])
        case "memory":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        case "diverge":
            return "diverged"
        case "sleep":
            try:
                time.sleep(LONG)
            except KeyboardInterrupt:
                log.write_text("interrupted")
                raise
    return "done"


def jobs_of(folder: Path, *doings: str) -> list[Job]:
    return [
        Job(f"{number}-{does}", {"log": str(folder / f"{number}.log"), "do": does})
        for number, does in enumerate(doings)
    ]


def tries(job: Job) -> int:
    return len(Path(job.payload["log"]).read_text().split())
