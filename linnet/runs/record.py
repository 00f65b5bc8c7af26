"""metrics.jsonl: one JSON object per line, appended while a run trains.

Training rows, validation rows (`validation_loss`), evaluations (`evaluation`) and events (`event`; a failed evaluation
is an event) share the file, in chronological order. A checkpoint records the number of rows at its time, so that a
resumed run appends after exactly those rows: no row is written twice, and a line torn by a kill is dropped.
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from linnet.config import ConfigError
from linnet.runs.files import write_atomic


class Record:
    """The open metrics.jsonl of a training run.

    Attributes:
        rows: number of rows in the file.
    """

    def __init__(self, path: Path, keep: int | None = None):
        """Opens (or starts) the record and truncates it to its first `keep` rows; None keeps every complete row."""
        self.path = path
        lines = _whole_lines(path)
        lines = lines if keep is None else lines[:keep]
        text = "".join(line + "\n" for line in lines)
        if path.exists() and path.read_bytes() != text.encode():
            write_atomic(path, text)
        self.rows = len(lines)
        self._file = open(path, "ab", buffering=0)

    def write(self, row: Mapping) -> None:
        """Appends one row and flushes it to the operating system, so that a killed process loses no row.

        Raises:
            ConfigError: the disk is full or fails. Earlier rows stay; resuming the run drops the torn line.
        """
        line = (json.dumps(plain(row)) + "\n").encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error) from error
        self.rows += 1

    def sync(self) -> None:
        """Waits until all rows are on the disk. Raises ConfigError as `write` does."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> ConfigError:
        message = f"{self.path}: cannot be written ({error.strerror}); run the same command again to continue"
        return ConfigError([message], "record")

    def roll_back(self, keep: int) -> None:
        """Drops the rows after the first `keep`, except events, which explain why the run went back.

        Events of failed evaluations are dropped too, because these evaluations run again.
        """
        events = [row for row in read_rows(self.path)[keep:] if "event" in row and "evaluation" not in row]
        self._file.close()
        self.__init__(self.path, keep)
        for row in events:
            self.write(row)

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[dict]:
    """Returns all complete rows of a metrics.jsonl; skips a torn last line of a running or killed process."""
    return [json.loads(line) for line in _whole_lines(path)]


def curve_rows(rows: list[dict]) -> list[dict]:
    """Returns the points of a training curve for fits and reports, each with its mean loss as `loss`.

    These are the rows with `curve`, which do not depend on `run.log_every`; without such rows, all training rows.
    """
    if points := [row | {"loss": row["curve"]} for row in rows if "curve" in row]:
        return points
    return [row for row in rows if "loss" in row and "event" not in row]


def plain(value):
    """Returns `value` for strict JSON: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = []
    for raw in path.read_bytes().splitlines(keepends=True):
        if not raw.endswith(b"\n"):
            break
        try:
            line = raw.decode("utf-8").rstrip("\n")
            json.loads(line)
        except ValueError:  # a power failure in the middle of a block: the following rows cannot be trusted either
            break
        lines.append(line)
    return lines
