"""Training on a Ray cluster: Ray Train starts one process per device, and starts them again when one is lost.

Each process calls `linnet.train.train`, so the run folder has the record and the checkpoints, as without Ray, and the
same command continues it, on a cluster or not. Run folder, data and plugins must be on storage that all machines share;
the working directory too, because Ray starts its processes elsewhere. No checkpoint or metric goes through Ray: this
process shows the rows of the record while it grows.

With a range of workers the group shrinks when machines leave and grows when they come back. Both are a restart from the
last checkpoint, so set `run.checkpoint_minutes`.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from linnet.config import ConfigError, gather, refuse
from linnet.install import install_command
from linnet.runs import RunFolder
from linnet.runs.files import write_atomic
from linnet.train.config import TrainingConfig, resolve
from linnet.train.identity import as_begun, contents_of, find
from linnet.train.loop import train
from linnet.train.monitor import check_loggers
from linnet.train.objective import Progress
from linnet.train.objectives import find_objective, in_steps, read_training
from linnet.trust import safe_path

LOCAL = "local"  # the address that starts Ray on this machine
POLL = 0.5  # seconds between two looks at the record


def import_ray(option: str) -> Any:
    """Returns the package ray. Raises ConfigError that names `option` if it is missing."""
    try:
        import ray
    except ImportError:
        problem = f"{option}: needs the package ray, which is missing; run {install_command('cluster')}"
        raise ConfigError([problem], "command line") from None
    return ray


def connect(ray: Any, address: str | None, cpus: int | None, option: str) -> None:
    """Connects this process to a Ray cluster, unless it is connected.

    Args:
        address: `auto`, `ray://host:port` or `host:port`; None starts Ray on this machine with `cpus` CPUs (default:
            all).

    Raises:
        ConfigError: there is no cluster; the message names `option`.
    """
    _print_to_stderr(ray)
    if ray.is_initialized():
        return
    try:
        _reach(address)
        job = ray.job_config.JobConfig()
        job._py_driver_sys_path = _ModuleFolders()
        with safe_path():
            ray.init(
                address=address,
                job_config=job,
                num_cpus=cpus,
                include_dashboard=False if address is None else None,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        problem = f"{option}: no Ray cluster at {address!r} ({reason}); start one: ray start --head"
        raise ConfigError([problem], "ray") from None


class _ModuleFolders(list):
    """Folders that Ray puts on the path of its workers' modules: the current one only if it is on this process's."""

    def extend(self, folders: Iterable[str]) -> None:
        super().extend(folder for folder in folders if folder in sys.path)


def _print_to_stderr(ray: Any) -> None:
    """Makes a thread of Ray print what it says of workers that died to the standard error.

    It prints to the standard output, whatever `log_to_driver` is, and so between the lines of `--json`.
    """
    module: Any = getattr(getattr(ray, "_private", None), "worker", None)  # no public setting does this
    original = getattr(module, "print_to_stdstream", None)
    if original is None or getattr(original, "to_stderr", False):
        return

    def print_to_stdstream(data: dict, *arguments: Any, **options: Any) -> None:
        original({**data, "is_err": True}, *arguments, **options)

    print_to_stdstream.to_stderr = True  # type: ignore[attr-defined]
    module.print_to_stdstream = print_to_stdstream


def _reach(address: str | None) -> None:
    """Raises OSError if nothing listens at host:port. Ray itself would retry for minutes and then end this process."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def workers_of(text: str) -> tuple[int, int]:
    """Returns the least and most workers of `8` or `4:8`. Raises ConfigError for anything else."""
    least, _, most = text.partition(":") if ":" in text else (text, "", text)
    with contextlib.suppress(ValueError):
        bounds = int(least), int(most)
        if 1 <= bounds[0] <= bounds[1]:
            return bounds
    raise ConfigError([f"--workers: {text!r}; use a number such as 8, or least:most such as 4:8"], "command line")


def train_on_ray(
    config: TrainingConfig,
    root: str | Path,
    cache: str | Path,
    address: str,
    workers: tuple[int, int],
    restarts: int = 3,
    progress: Progress | None = None,
) -> RunFolder:
    """Trains one model on a Ray cluster, or continues its run. Returns at once if the run is done.

    Args:
        config, root, cache, progress: as for `linnet.train.train`; paths are those of this process.
        address: of the cluster: `auto`, `ray://host:port`, or `local` to start Ray on this machine.
        workers: least and most processes, one per GPU (per CPU with `run.device: cpu`).
        restarts: how often the processes are started again after one of them was lost.

    Raises:
        ConfigError: lists all problems of the configuration, the cluster and the number of workers.
        RuntimeError: a process failed more often than `restarts`.
    """
    least, most = workers
    problems = _count_problems(config, least, most)
    with gather(problems):
        check_loggers(config.run.loggers)
    with gather(problems):
        ray = import_ray("--ray")
    refuse(problems, "train")
    root, cache = Path(root).absolute(), Path(cache).absolute()
    config = in_steps(resolve(config), cache, progress)
    place = find(config, root, contents_of(config, cache))
    if place.folder.done:
        return place.folder
    config = as_begun(place, config)
    ours = not ray.is_initialized()
    connect(ray, None if address == LOCAL else address, most if address == LOCAL else None, "--ray")
    before = signal.getsignal(signal.SIGINT)
    try:
        with _shown(place.folder, config, progress):
            refusal = _fit(config, root, cache, least, most, restarts, _on_gpus(ray, config, least))
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGINT, before)  # Ray Train leaves its own, which asks a controller that is gone
        if ours:
            ray.shutdown()
    if refusal is not None:
        raise ConfigError(refusal["problems"], refusal["where"])
    return RunFolder.open(place.folder.path)


def _count_problems(config: TrainingConfig, least: int, most: int) -> list[str]:
    """Returns the problems of each number of workers that the group may have."""
    kind = find_objective(config)
    groups = {count: kind.parallel_problems(config, count) for count in range(least, most + 1)}
    wrong = {count: lines for count, lines in groups.items() if lines}
    if least == most or not wrong:
        return [problem for group in wrong.values() for problem in group]
    counts = ", ".join(map(str, wrong))
    first = next(iter(wrong.values()))[0]
    what = f"--workers: the group may have {counts} workers, which the training does not fit ({first})"
    return [f"{what}; give one number"]


def _on_gpus(ray: Any, config: TrainingConfig, least: int) -> bool:
    """Returns whether workers take GPUs. Raises ConfigError if the cluster can never have enough devices."""
    have = ray.cluster_resources()
    gpus = config.run.device != "cpu" and (have.get("GPU", 0) >= 1 or config.run.device == "cuda")
    kind = "GPU" if gpus else "CPU"
    if have.get(kind, 0) < least:
        problem = f"--workers: {least} need a {kind} each, the cluster has {have.get(kind, 0):.0f}; use fewer"
        raise ConfigError([problem], "ray")
    return gpus


def _fit(
    config: TrainingConfig, root: Path, cache: Path, least: int, most: int, restarts: int, gpus: bool
) -> dict[str, Any] | None:
    """Trains until the run has ended. Returns the problems that stopped it, None without any."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray_cache = cache / "ray"  # Ray's files, which are small
    ray_cache.mkdir(parents=True, exist_ok=True)
    refused = ray_cache / f"refused-{uuid.uuid4().hex}.json"
    settings = {
        "config": config.model_dump(mode="json"),
        "root": str(root),
        "cache": str(cache),
        "folder": os.getcwd(),
        "refused": str(refused),
    }
    trainer = TorchTrainer(
        work,
        train_loop_config=settings,
        # gloo beside NCCL, for what ranks tell each other on the host.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=least if least == most else (least, most), use_gpu=gpus),
        run_config=RunConfig(
            name=config.name or config.architecture,
            storage_path=str(ray_cache),
            failure_config=FailureConfig(max_failures=restarts),
        ),
    )
    trainer.fit()
    if not refused.exists():
        return None
    try:
        return json.loads(refused.read_text(encoding="utf-8"))
    finally:
        refused.unlink()


def work(settings: dict[str, Any]) -> None:
    """Trains in one process of the group. Ray Train has connected the group and set torchrun's variables."""
    try:
        try:
            os.chdir(settings["folder"])
        except OSError as error:
            where = f"{settings['folder']} on {socket.gethostname()}"
            problem = f"{where}: {error.strerror}; start from a folder on storage that all machines share"
            raise ConfigError([problem], "ray") from None
        config = read_training(settings["config"])  # imports plugins, and compares their digests
        train(config, settings["root"], settings["cache"])
    except ConfigError as error:  # starting again would not help, so the process ends well
        refused = Path(settings["refused"])
        if not refused.exists():
            write_atomic(refused, json.dumps({"problems": error.problems, "where": error.where}))


@contextlib.contextmanager
def _shown(folder: RunFolder, config: TrainingConfig, progress: Progress | None) -> Iterator[None]:
    """Passes rows that come into the record on to `progress`."""
    if progress is None:
        yield
        return
    ended = threading.Event()
    follower = threading.Thread(target=_follow, args=(folder.path, config, progress, ended), daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join(10)


def _follow(path: Path, config: TrainingConfig, progress: Callable[[dict], None], ended: threading.Event) -> None:
    record, started = path / "metrics.jsonl", False
    at = record.stat().st_size if record.exists() else 0
    while True:
        last = ended.is_set()
        size = record.stat().st_size if record.exists() else 0
        at = min(at, size)  # the record was cut back to a checkpoint
        if size > at:
            with record.open("rb") as file:
                file.seek(at)
                text = file.read(size - at)
            whole = text[: text.rfind(b"\n") + 1]
            at += len(whole)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if not started:
                        started = True
                        steps = {"step": row.get("step", 0), "steps": config.total_steps}
                        progress({"event": "start", **steps, "path": str(path)})
                    progress(row)
        if last:
            return
        ended.wait(POLL)
