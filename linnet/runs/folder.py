"""A run is a folder named by a digest of the keys that its result depends on.

<root>/<label>-<digest>/
    config.yaml      the whole resolved configuration, every key, with the format and digest in its first lines
    plugins/         a copy of each file of its own mixers (linnet.trust)
    tokenizer.json   turns text into the model's tokens
    metrics.jsonl    one row per log interval, validation and event (linnet.runs.record)
    progress         FLOPs so far, where rows are far apart; until the result
    checkpoints/     the newest few (linnet.runs.checkpoint)
    result.json      written last and atomically: if it exists, the run is done
    error.txt        error of the last attempt, if it failed
    errors/          rank-<N>.txt: errors of the other ranks of a run on several devices

The caller decides which keys count: `linnet.train.identity` for trainings. In the first format, which 0.1.0 wrote for
trainings and which MAD still uses, the digest covers all keys, and config.yaml does not contain it.
"""

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from linnet import trust
from linnet.config import ConfigError, digest, load_json, load_text, read_yaml
from linnet.runs import checkpoint
from linnet.runs.files import UNFINISHED, remove_path, write_atomic
from linnet.runs.record import ROWS_LOST, Record, last_rows, lost_rows, plain, read_rows, wrong_numbers
from linnet.trust import with_copies

FORMAT = 2
CLASSES = "classes.json"  # of a model of images: a list of the names of its classes, in the order of its outputs
PICTURES = "pictures"  # folder of what an objective draws at each validation: step-00001000.png
STATED = ("format", "digest", "extended")  # keys of config.yaml that are not part of the configuration
_LINE = 100  # more characters than the lines of `_HEAD` have
_HEAD = re.compile(r"format: (\d+)\ndigest: \"([0-9a-f]{12})\"\n")


class LockedError(ConfigError):
    """Another process trains in the same run folder."""

    def __init__(self, path: Path, owner: str):
        by = f" (process {owner})" if owner else ""
        super().__init__([f"{path}: another process{by} is training this run; wait for it or stop it"], "run folder")


class InUseError(LockedError):
    """Another process works in a folder of runs."""

    def __init__(self, problem: str, where: str):
        ConfigError.__init__(self, [problem], where)


T = TypeVar("T")

POLL = 0.2  # seconds between two looks at a lock


def patiently(work: Callable[[], T], tell: Callable[[str], None] | None = None, seconds: float = math.inf) -> T:
    """Calls `work` until no other process holds the lock that it needs.

    Args:
        tell: called once with a line that says what it waits for.

    Raises:
        LockedError: another process still holds the lock after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return work()
        except LockedError as error:
            if time.monotonic() > deadline:
                raise
            if tell is not None:
                tell(f"waiting: {error.problems[0]}")
        tell = None
        time.sleep(POLL)


def keep_copies(values: Mapping[str, Any], folder: Path) -> None:
    """Copies the plugins of a configuration, as they are now, into the folder of its run or model."""
    for plugin, recorded in (values.get("plugin_digests") or {}).items():
        copy = trust.copy_of(plugin, recorded, folder)
        if trust.plugin_digest(plugin) == recorded and not copy.is_file():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(copy, trust.plugin_file(plugin).read_bytes())


class RunFolder:
    """One run on disk. Reading needs no lock; the training process holds `lock`."""

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        self._config_file, self._lock_file = path / "config.yaml", path / ".lock"
        self._metrics_file, self._result_file = path / "metrics.jsonl", path / "result.json"
        self._error_file, self._errors = path / "error.txt", path / "errors"
        self._progress_file = path / "progress"

    @staticmethod
    def name(config: Mapping, identity: str | None = None) -> str:
        """Returns the folder name of a resolved configuration: `<name or architecture>-<digest>`.

        Args:
            identity: digest of the keys that the result depends on; None uses the digest of all keys.
        """
        label = config.get("name") or config.get("architecture") or ""
        label = re.sub(r"[^A-Za-z0-9._+-]+", "-", str(label)).strip("-.")
        identity = identity or digest(dict(config))
        return f"{label}-{identity}" if label else identity

    @classmethod
    def create(cls, root: str | Path, config: Mapping) -> "RunFolder":
        """Returns the folder under `root` that is named by the digest of all keys; creates it if it is missing.

        Raises:
            ConfigError: the folder exists with another configuration, so config.yaml was edited.
        """
        config = dict(config)
        run = cls(Path(root) / cls.name(config))
        run.path.mkdir(parents=True, exist_ok=True)
        if not run._config_file.exists():
            write_atomic(run._config_file, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
        elif digest(run.config) != digest(config):
            raise ConfigError(
                [f"{run._config_file} was changed: its digest is {digest(run.config)}, not {digest(config)}; "
                 "restore it, or delete the folder to train anew"],
                "run folder",
            )  # fmt: skip
        return run

    def write_config(self, config: Mapping, identity: str, extended: list[dict] | None = None) -> None:
        """Creates the folder and writes config.yaml.

        Args:
            config: every key.
            identity: digest of the keys that the result depends on.
            extended: earlier digests and lengths of the run, as the property `extended` returns them.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        keep_copies(config, self.path)
        text = f'format: {FORMAT}\ndigest: "{identity}"\n'  # quoted: some digests would be read as numbers
        text += yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        if extended:
            text += "extended:\n"
            text += "".join(f'- {{digest: "{stage["digest"]}", steps: {stage["steps"]}}}\n' for stage in extended)
        write_atomic(self._config_file, text)

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Returns an existing run. Raises `ConfigError` if `path` is not one."""
        run = cls(path)
        if not run.exists:
            inside = sorted(run.path.glob("*/config.yaml")) or sorted(run.path.glob("runs/*/config.yaml"))
            hint = f"; it contains runs, give one of them: {inside[0].parent}" if inside else ""
            if (run.path / "config.json").is_file():
                hint = f"; if it is a checkpoint of transformers, make a folder of it with: linnet convert {path}"
            if (run.path / UNFINISHED).is_dir():
                hint = "; the command that writes it was killed, or still runs: wait for it, or run it again"
            reason = "it has no config.yaml" if run.path.is_dir() else "there is no such folder"
            if not run.path.exists():
                hint = "; check the path (linnet runs lists the runs in a folder)"
            reason = "it is a file" if run.path.is_file() else reason
            raise ConfigError([f"{path}: is not a run folder ({reason}){hint}"], "run folder")
        return run

    @classmethod
    def all(cls, root: str | Path) -> list["RunFolder"]:
        """Returns the run folders directly in `root`, sorted by name."""
        return [cls(path.parent) for path in sorted(Path(root).glob("*/config.yaml"))]

    @property
    def exists(self) -> bool:
        return self._config_file.is_file()

    @property
    def config(self) -> dict:
        """The resolved configuration. Plugins whose files are elsewhere are named by the folder's copies of them."""
        values = with_copies(read_yaml(self._config_file), self.path)
        return values if self.digest is None else {key: v for key, v in values.items() if key not in STATED}

    @property
    def digest(self) -> str | None:
        """Returns the digest in config.yaml; None for a folder of the first format. Reads only the first lines."""
        with open(self._config_file, encoding="utf-8") as file:
            match = _HEAD.match(file.readline(_LINE) + file.readline(_LINE))
        if match is None:
            return None
        if int(match[1]) > FORMAT:
            message = f"{self._config_file}: format {match[1]}, but this release of Linnet reads up to {FORMAT}"
            raise ConfigError([f"{message}; use a newer release"], "run folder")
        return match[2]

    @property
    def extended(self) -> list[dict]:
        """Returns `digest` and `steps` of the run before each `linnet train --extend`, oldest first."""
        return read_yaml(self._config_file).get("extended", [])

    @property
    def done(self) -> bool:
        return self._result_file.is_file()

    @property
    def begun(self) -> bool:
        """Whether a training opened its record here or saved a checkpoint."""
        return self._metrics_file.is_file() or self.checkpoint_folder.is_dir()

    def result(self) -> dict:
        """Returns the content of result.json. Raises `ConfigError` if the run is not done or the file is damaged."""
        try:
            result = load_json(self._result_file)
        except FileNotFoundError:
            raise ConfigError([f"{self.path}: the run is not done (no result.json)"], "run folder") from None
        except ValueError as error:
            raise self.damaged_result(str(error)) from None
        if not isinstance(result, dict) or not isinstance(result.get("status"), str):
            raise self.damaged_result("it has no status")
        if (wrong := wrong_numbers(result)) or type(result.get("steps", 0)) is not int:
            raise self.damaged_result(f"{wrong or 'steps'} is not a number")
        return result

    def damaged_result(self, reason: str) -> ConfigError:
        """Returns the error for a result.json that is not what a run wrote."""
        message = f"{self._result_file}: is damaged ({reason}); delete it and run again"
        return ConfigError([message], "run folder")

    def write_result(self, result: Mapping) -> None:
        """Writes result.json, which marks the run done. Numbers that are not finite become null."""
        self.write_error(None)
        self._progress_file.unlink(missing_ok=True)
        write_atomic(self._result_file, json.dumps(plain(result), indent=1, allow_nan=False) + "\n")

    def reopen(self) -> None:
        """Makes a done run unfinished again; its result is kept as result-<steps>.json."""
        if self.done:
            self._result_file.rename(self._earlier_result)

    @property
    def _earlier_result(self) -> Path:
        return self.path / f"result-{self.result().get('steps', 0):08d}.json"

    def undo_of_extension(self) -> Callable[[], None]:
        """Returns a function that restores config.yaml and result.json of now, after `reopen` and `write_config`."""
        config = load_text(self._config_file)
        kept = self._earlier_result if self.done else None

        def undo() -> None:
            write_atomic(self._config_file, config)
            if kept is not None:
                kept.rename(self._result_file)
                self.write_error(None)

        return undo

    def write_progress(self, flops: float) -> None:
        """Writes the FLOPs so far, for a display, between two rows of a record whose rows are far apart."""
        write_atomic(self._progress_file, f"{flops}\n")

    def flops_so_far(self) -> float:
        """Returns the FLOPs in the last complete row of the record, or later ones of `write_progress`; 0 without."""
        flops = 0.0
        with contextlib.suppress(OSError):
            rows = reversed(last_rows(self._metrics_file, 20))
            flops = next((float(row["flops"]) for row in rows if row.get("flops")), 0.0)
        with contextlib.suppress(OSError, ValueError):
            flops = max(flops, float(load_text(self._progress_file)))
        return flops

    def metrics(self) -> list[dict]:
        """Returns all rows of metrics.jsonl, in order."""
        return read_rows(self._metrics_file)

    def lost_rows(self, meta: Mapping) -> str | None:
        """Returns a message if rows of metrics.jsonl from before a checkpoint are missing or changed, else None."""
        return lost_rows(self._metrics_file, meta)

    def curve_problem(self) -> str | None:
        """Returns why the training curve in metrics.jsonl is not the one that was recorded, None if it is.

        The newest checkpoint vouches for the rows before it. A run without checkpoints, or of 0.1.0, is not checked.
        """
        for path in reversed(self.checkpoints()):
            with contextlib.suppress(ConfigError):
                if problem := self.lost_rows(checkpoint.read_meta(path)):
                    return problem
                break
        lost = next((row for row in self.metrics() if row.get("event") == ROWS_LOST), None)
        return None if lost is None else f"{self._metrics_file}: rows were lost before the run continued"

    def record(self, keep: int | None = None) -> Record:
        """Opens metrics.jsonl for appending, truncated to its first `keep` rows. Call it only under `lock`."""
        return Record(self._metrics_file, keep)

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / "checkpoints"

    def checkpoints(self) -> list[Path]:
        """Returns the checkpoints, oldest first, unverified; `linnet.runs.latest_good` verifies them."""
        return checkpoint.listed(self.checkpoint_folder)

    def best_step(self) -> int | None:
        """Returns the step of the lowest validation loss in the record, the first of equal ones; None without any."""
        rows = [row for row in self.metrics() if type(row.get("step")) is int]
        scored = [row for row in rows if row.get("validation_loss") is not None]
        return min(scored, key=lambda row: row["validation_loss"], default={}).get("step")

    def best_checkpoint(self) -> Path:
        """Returns the checkpoint of the lowest validation loss.

        Raises:
            ConfigError: the record has no validation, or that checkpoint was not kept.
        """
        if (step := self.best_step()) is None:
            raise ConfigError(
                [f"{self.path}: its record has no validation, so no checkpoint is the best"], "run folder"
            )
        if (path := checkpoint.place(self.checkpoint_folder, step)) not in self.checkpoints():
            problem = f"{self.path}: its lowest validation loss is at step {step}, whose checkpoint was not kept"
            raise ConfigError(
                [f"{problem}; train it with run.keep_best=true into another --out, or use the last checkpoint"],
                "run folder",
            )
        return path

    def error(self) -> str | None:
        return load_text(self._error_file, errors="replace") if self._error_file.is_file() else None

    def write_error(self, text: str | None, rank: int = 0) -> None:
        """Writes the error of the last attempt: to error.txt, or to errors/rank-<N>.txt of another rank than 0.

        None removes the errors of all ranks.
        """
        if text is None:
            self._error_file.unlink(missing_ok=True)
            shutil.rmtree(self._errors, ignore_errors=True)
        elif rank:
            self._errors.mkdir(parents=True, exist_ok=True)
            write_atomic(self._errors / f"rank-{rank}.txt", text)
        else:
            write_atomic(self._error_file, text)

    @contextlib.contextmanager
    def alone(self, work: str, where: str) -> Iterator[None]:
        """Locks a folder of runs and removes what a stopped process left. Raises InUseError if another works in it."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.lock())
            except LockedError:
                fix = "wait for it, stop it, or use another --out"
                raise InUseError(f"{self.path}: another {work} works in this folder; {fix}", where) from None
            self.clean()
            yield

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the run for this process. The operating system releases the lock even if the process is killed.

        Raises:
            LockedError: another process holds the lock.
            ConfigError: a link or a device is in the place of the lock's file, as a folder from somebody else may have
                it; the process would overwrite what it leads to.
        """
        import fcntl  # missing on Windows, where reading runs must still work

        if self._lock_file.is_symlink() or (self._lock_file.exists() and not self._lock_file.is_file()):
            raise ConfigError([f"{self._lock_file}: is not a file; delete it and run again"], "run folder")
        with open(self._lock_file, "a+", encoding="utf-8") as file:
            for patience in (True, False):  # `owner` of another process may hold the lock for a moment
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if patience:
                        time.sleep(0.05)
                        continue
                    file.seek(0)
                    raise LockedError(self.path, file.read(_LINE).strip()) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)
                fcntl.flock(file, fcntl.LOCK_UN)

    def owner(self) -> str | None:
        """Returns the id of the process that holds the lock, as text ("" if it is not known); None if none holds it."""
        if not self._lock_file.is_file():
            return None
        import fcntl

        with open(self._lock_file, encoding="utf-8") as file:
            written = file.read(_LINE).strip()
            if not written:  # the holder writes its id at once and empties the file at the end
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return written
        return None  # the holder was killed

    def clean(self) -> None:
        """Removes half-written files of killed processes. Call it only under `lock`."""
        for path in self.path.glob(".*.tmp"):
            remove_path(path)
        checkpoint.clean(self.checkpoint_folder)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"
