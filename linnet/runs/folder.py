"""A run is a folder named by the hash of its resolved configuration.

<root>/<label>-<hash12>/
    config.yaml      the whole resolved configuration; its digest is the hash in the name
    tokenizer.json   what turns text into the model's tokens
    metrics.jsonl    one row a log interval, validation and event (linnet.runs.record)
    checkpoints/     the last few (linnet.runs.checkpoint)
    result.json      written last and atomically: where it is there, the run is done
    error.txt        why the last attempt failed, if it did
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from linnet.config import ConfigError, digest, read_yaml
from linnet.runs import checkpoint
from linnet.runs.files import write_atomic
from linnet.runs.record import Record, plain, read_rows


class LockedError(ConfigError):
    """Another process trains in the same run folder."""

    def __init__(self, path: Path, owner: str):
        by = f" (process {owner})" if owner else ""
        super().__init__([f"{path}: another process{by} is training this run; wait for it or stop it"], "run folder")


class RunFolder:
    """One run on disk. Reading needs no lock; `lock` is for the one process that trains."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    @staticmethod
    def name(config: Mapping) -> str:
        """The folder name of a resolved configuration: `<name or architecture>-<hash12>`."""
        label = config.get("name") or config.get("architecture") or ""
        label = re.sub(r"[^A-Za-z0-9._+-]+", "-", str(label)).strip("-.")
        return f"{label}-{digest(dict(config))}" if label else digest(dict(config))

    @classmethod
    def create(cls, root: str | Path, config: Mapping) -> "RunFolder":
        """The folder of a resolved configuration under `root`, made if it is not there yet.

        Raises:
            ConfigError: the folder is there with another configuration (somebody edited config.yaml).
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

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run. Raises `ConfigError` where `path` is none."""
        run = cls(path)
        if not run._config_file.is_file():
            inside = sorted(run.path.glob("*/config.yaml")) or sorted(run.path.glob("runs/*/config.yaml"))
            hint = f"; it holds runs, name one: {inside[0].parent}" if inside else ""
            reason = "it has no config.yaml" if run.path.is_dir() else "there is no such folder"
            reason = "it is a file" if run.path.is_file() else reason
            raise ConfigError([f"{path}: is not a run folder ({reason}){hint}"], "run folder")
        return run

    @property
    def config(self) -> dict:
        return read_yaml(self._config_file)

    @property
    def done(self) -> bool:
        return self._result_file.is_file()

    def result(self) -> dict:
        """What the run came to. Raises `ConfigError` where it is not done or the file is damaged."""
        try:
            return json.loads(self._result_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError([f"{self.path}: the run is not done (no result.json)"], "run folder") from None
        except ValueError as error:
            message = f"{self._result_file}: is damaged ({error}); delete it and run again"
            raise ConfigError([message], "run folder") from None

    def write_result(self, result: Mapping) -> None:
        """Marks the run done. Numbers that are not finite become null."""
        self._error_file.unlink(missing_ok=True)
        write_atomic(self._result_file, json.dumps(plain(result), indent=1, allow_nan=False) + "\n")

    def metrics(self) -> list[dict]:
        """All rows of metrics.jsonl, in order."""
        return read_rows(self._metrics_file)

    def record(self, keep: int | None = None) -> Record:
        """Opens metrics.jsonl for appending, cut back to its first `keep` rows. Only under `lock`."""
        return Record(self._metrics_file, keep)

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / "checkpoints"

    def checkpoints(self) -> list[Path]:
        """The checkpoints, oldest first (not verified; `linnet.runs.latest_good` does)."""
        return checkpoint.listed(self.checkpoint_folder)

    def error(self) -> str | None:
        return self._error_file.read_text(encoding="utf-8") if self._error_file.is_file() else None

    def write_error(self, text: str | None) -> None:
        """Says why the last attempt failed; None takes it back."""
        if text is None:
            self._error_file.unlink(missing_ok=True)
        else:
            write_atomic(self._error_file, text)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process; the system gives it back even when the process is killed.

        Raises:
            LockedError: another process holds it.
        """
        import fcntl  # not on Windows, where reading runs must still work

        with open(self.path / ".lock", "a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise LockedError(self.path, file.read().strip()) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)
                fcntl.flock(file, fcntl.LOCK_UN)

    def clean(self) -> None:
        """Removes what killed writers left half-written. Only under `lock`."""
        for path in self.path.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        checkpoint.clean(self.checkpoint_folder)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def _config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def _metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def _error_file(self) -> Path:
        return self.path / "error.txt"
