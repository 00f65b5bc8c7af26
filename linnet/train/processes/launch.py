"""Starts one process per device on this machine, with torchrun's agent, and ends them together.

`linnet train CONFIG --devices N` runs the agent in a thread of this process (the launcher). The agent starts N workers,
which run the same command, and starts them again from the last checkpoint if one of them dies. Signals stay with the
launcher, which passes the first one on: the workers save and end, however long that takes; a second one kills them.

Launcher and workers share a folder (`LINNET_LAUNCH`):

    pid-<rank>              the process of a worker
    failed-<attempt>-<rank> the error of a worker that failed
    end                     the launch is over, with this exit code: a worker that starts now ends at once

`PYTHONSAFEPATH=1 torchrun ... -m linnet train CONFIG` starts workers without a launcher of ours; then torchrun decides
on restarts.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from linnet.config import ConfigError
from linnet.parallel import alive
from linnet.parallel.mesh import is_secondary, is_shared, rank, world
from linnet.provenance import SHARE, THREADS
from linnet.train.monitor import stop_with_parent

FOLDER, PROCESS = "LINNET_LAUNCH", "LINNET_LAUNCHER"
LOCK = "lock"  # file in a temporary folder, which the process that made it locks
RESTARTS = 3
HINTS = {
    signal.SIGKILL: "; the system may be out of memory",
    signal.SIGABRT: "; as NCCL does if a communication fails or takes longer than parallel.timeout",
}
SPEAK = 1.0  # seconds for rank 0 to print an error that it may share, before the agent ends it
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        code: exit code.
        message: what went wrong, if no worker could print it; else None.
    """

    code: int
    message: str | None = None


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Makes a temporary folder for the context, and removes those of this name whose processes were killed."""
    import fcntl  # missing on Windows, where reading runs must still work

    for lock in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        with contextlib.suppress(OSError), open(lock) as file:  # of another user, or of a process that works
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as path, open(f"{path}/.{LOCK}", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it when the process ends, however it ends
        os.rename(file.name, f"{path}/{LOCK}")  # only now, so that no other process takes it for a free one
        yield Path(path)


def started() -> bool:
    """Returns whether `launch` started this process."""
    return FOLDER in os.environ and "RANK" in os.environ


def restarted() -> int:
    """Returns how often torchrun's agent has started the processes of this launch again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch(
    arguments: list[str],
    devices: int,
    restarts: int = RESTARTS,
    environment: Mapping[str, str] | None = None,
    again: str = "the same command continues from the last checkpoint",
) -> Outcome:
    """Runs `python -P -m linnet <arguments>` in one process per device until all have ended. Blocks.

    Args:
        arguments: of the command line; the workers see from their environment that they need not launch anything.
        devices: number of processes.
        restarts: how often the processes are started again after one of them died.
        environment: variables of the processes, if the environment does not have them.
        again: what the message about a process that died says of the next call.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `Outcome` says it in one line
    failures: dict = {}
    errors: list[BaseException] = []
    with temporary_folder("linnet-launch-") as folder:
        threads = max(1, len(os.sched_getaffinity(0)) // devices) if hasattr(os, "sched_getaffinity") else 1
        variables = dict(environment or {})
        if THREADS not in variables and THREADS not in os.environ:
            variables |= dict.fromkeys((THREADS, SHARE), str(threads))
        if sys.platform in LOOPBACK:  # all ranks are on this machine, whatever its name resolves to
            variables["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
        variables = {key: value for key, value in variables.items() if key not in os.environ} | {
            FOLDER: str(folder),
            PROCESS: str(os.getpid()),
        }
        os.environ.update(variables)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=devices,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=restarts,
            monitor_interval=0.1,
            local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        )

        def agent() -> None:
            try:
                launch_agent(config, sys.executable, ["-u", "-P", "-m", "linnet", *arguments])
            except ChildFailedError as error:
                failures.update(error.failures)
            except BaseException as error:
                errors.append(error)

        # torch installs signal handlers of its own unless its agent runs in another thread than the main one. Those
        # would kill workers that need more than 30 seconds for their checkpoint.
        thread = threading.Thread(target=agent, name="linnet-launch", daemon=True)
        try:
            with _passed_on(folder):
                thread.start()
                while thread.is_alive():
                    thread.join(0.2)
            return _outcome(folder, failures, errors, again)
        finally:
            for key in variables:
                os.environ.pop(key, None)


def _outcome(folder: Path, failures: dict, errors: list[BaseException], again: str) -> Outcome:
    notes = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
    told = [json.loads(path.read_text(encoding="utf-8")) for path in notes]
    first = next((note for note in told if not note["secondary"]), None)
    reason = None if first is None else f"rank {first['rank']}: {first['error']}"
    with contextlib.suppress(FileNotFoundError):
        end = json.loads((folder / "end").read_text(encoding="utf-8"))
        return Outcome(end["code"], reason if end["rank"] else None)
    if errors:
        return Outcome(1, f"the processes could not be started: {errors[0]}")
    if not failures:
        return Outcome(0)
    # Timestamps are whole seconds: the others have ended because one was lost, or by the agent's SIGTERM.
    number, failure = min(
        failures.items(),
        key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].exitcode > 0, item[1].timestamp, item[0]),
    )
    if reason is None:
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = HINTS.get(-code, "")
        reason = f"rank {number} {how}{hint}"
    return Outcome(1, f"{reason}; {again}")


@contextlib.contextmanager
def _passed_on(folder: Path) -> Iterator[None]:
    """Passes the first SIGINT or SIGTERM of the launcher on to the workers; a second one kills them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        _end(folder, 128 + number, 0)  # first: workers that are being started must not start
        came.append(number)
        for path in folder.glob("pid-*"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), number if len(came) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _end(folder: Path, code: int, rank: int) -> None:
    """Writes that the launch is over. The first call counts."""
    with contextlib.suppress(FileExistsError, FileNotFoundError), open(folder / "end", "x", encoding="utf-8") as file:
        json.dump({"code": code, "rank": rank}, file)


@contextlib.contextmanager
def worker() -> Iterator[None]:
    """Runs a command as one of several processes; does nothing in a process that was started alone.

    Rank 0 prints what happens, and its exit code is the command's. An error that all ranks share ends the launch: no
    restart would change it. So does a lack of memory. Any other error of one rank ends its process, and the agent
    starts all of them again.
    """
    if world() == 1:
        yield
        return
    folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
    mine = rank()
    if folder is not None:
        (folder / f"pid-{mine}").write_text(str(os.getpid()))
        if (folder / "end").exists():
            raise SystemExit(0)
    _end_with_parent()
    try:
        yield
    except BaseException as error:
        code = exit_code(error)
        if code is not None and folder is not None:
            _end(folder, code, mine)
        if is_shared(error):
            alive.leave()
        if code is not None and not mine:
            raise  # prints the error and ends with its code
        if code is not None and is_shared(error):
            raise SystemExit(0) from None  # rank 0 prints it
        if not isinstance(error, Exception):
            os._exit(code or 0)
        if folder is not None:
            _note_failure(folder, mine, error)
        if not is_secondary(error) and (not mine or folder is None):
            raise
        line = (str(error).strip().splitlines() or [""])[0]
        if not is_secondary(error):
            print("".join(traceback.format_exception(error)), file=sys.stderr, end="", flush=True)
        elif not mine:
            print(f"rank 0 ends, another rank was lost ({type(error).__name__}: {line[:300]})", file=sys.stderr)
        if code is not None:
            time.sleep(SPEAK)
        sys.stdout.flush()
        os._exit(1)  # an ordinary end would wait in NCCL for ranks that do not answer


def ended_by(command: Callable[[], object]) -> int | str | None:
    """Runs a command of a worker and returns its exit code: 0 once the launch is over, which has a code of its own.

    The agent would take another code for a crash, and start all workers again.
    """
    code: int | str | None = 0
    try:
        command()
    except SystemExit as end:
        code = end.code
    return 0 if started() and (Path(os.environ[FOLDER]) / "end").exists() else code


def exit_code(error: BaseException) -> int | None:
    """Returns the exit code of an error that ends a launch, None if starting the processes again may help."""
    import torch

    from linnet.runs.files import FULL

    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if type(error).__name__ == "Exit" and hasattr(error, "exit_code"):  # typer's
        return error.exit_code
    if isinstance(error, ConfigError | MemoryError | torch.OutOfMemoryError):
        return 2
    if isinstance(error, OSError) and error.errno in FULL:
        return 2
    return None


def _note_failure(folder: Path, mine: int, error: BaseException) -> None:
    attempt = restarted()
    line = (str(error).strip().splitlines() or [""])[0]
    note = {"rank": mine, "error": f"{type(error).__name__}: {line}"[:500], "secondary": is_secondary(error)}
    with contextlib.suppress(OSError):
        temporary = folder / f".failed-{attempt}-{mine}"
        temporary.write_text(json.dumps(note), encoding="utf-8")
        temporary.rename(folder / f"failed-{attempt}-{mine}")


def _end_with_parent() -> None:
    """Stops this process when its agent dies: it has a session of its own and would go on.

    Ends at once if the launcher died while this process was starting: no other rank will come.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_parent()
        if os.environ.get(PROCESS, str(os.getppid())) != str(os.getppid()):
            raise SystemExit(0)
