"""metrics.jsonl: one JSON object per line, appended while a run trains.

Training rows, validation rows (`validation_loss`), evaluations (`evaluation`) and events (`event`; a failed evaluation
is an event) share the file, in chronological order. A checkpoint records the number of rows at its time and their
SHA-256, so that a resumed run appends after exactly those rows: no row is written twice, a line torn by a kill is
dropped, and rows that were lost or edited are noticed.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from linnet.config import ConfigError
from linnet.runs.files import write_atomic

MOST_ROW = 1 << 24  # bytes of a row; a file with longer ones is damaged

_NUMBERS = (
    "params_total params_non_embedding tokens flops loss curve train_loss validation_loss bits_per_byte seconds"
).split()  # as rows and results have them

ROWS_LOST = "rows_lost"
"""`event` of the row that says that rows before it are missing or changed."""


BY_WEIGHTS = "flops_paper_by_weights"
"""Key of a result.json: mixers that `flops_paper` counts by their weights alone, because they define no count."""


class Record:
    """The open metrics.jsonl of a training run.

    Attributes:
        rows: number of rows in the file.
        sha256: SHA-256 of the rows, each with its line break, in hexadecimal.
    """

    def __init__(self, path: Path, keep: int | None = None):
        """Opens (or starts) the record and truncates it to its first `keep` rows; None keeps every complete row."""
        self.path = path
        lines = _whole_lines(path)
        lines = lines if keep is None else lines[:keep]
        text = "".join(line + "\n" for line in lines)
        if _differs(path, text.encode()):
            write_atomic(path, text)
        self.rows, self._sha256 = len(lines), hashlib.sha256(text.encode())
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
        self._sha256.update(line)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

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

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_rows(path: Path) -> list[dict]:
    """Returns all complete rows of a metrics.jsonl; skips a torn last line of a running or killed process."""
    return [json.loads(line) for line in _whole_lines(path)]


def last_rows(path: Path, count: int) -> list[dict]:
    """Returns the last complete rows of a metrics.jsonl, at most `count`, without reading a long file whole."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        block, text = 1 << 16, b""
        while end > 0 and text.count(b"\n") <= count:
            start = max(0, end - block)
            file.seek(start)
            text, end = file.read(end - start) + text, start
    lines = text.splitlines(keepends=True)[0 if end == 0 else 1 :]
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):  # a row that a running process is writing, or damage
            rows += [row] if line.endswith(b"\n") and _is_row(row := json.loads(line)) else []
    return [row for row in rows if type(row.get("step", 0)) is int][-count:]


def lost_rows(path: Path, meta: Mapping) -> str | None:
    """Returns a message if rows of a metrics.jsonl from before a checkpoint are missing or changed, else None.

    Args:
        meta: plain values of the checkpoint. Those of 0.1.0 have no SHA-256; then only the number of rows is compared.
    """
    expected = meta.get("rows", 0)
    lines = _whole_lines(path)[:expected]
    if len(lines) < expected:
        return f"{path}: {expected - len(lines)} of the first {expected} rows are missing or cannot be read"
    text = "".join(line + "\n" for line in lines)
    if meta.get("rows_sha256") not in (None, hashlib.sha256(text.encode()).hexdigest()):
        return f"{path}: some of the first {expected} rows were removed or changed after they were written"
    return None


def curve_rows(rows: list[dict]) -> list[dict]:
    """Returns the points of a training curve for fits and reports, each with its mean loss as `loss`.

    These are the rows with `curve`, which do not depend on `run.log_every`; without such rows, all training rows.
    """
    if points := [row | {"loss": row["curve"]} for row in rows if "curve" in row]:
        return points
    return [row for row in rows if "loss" in row and "event" not in row]


def wrong_numbers(values: Mapping) -> str:
    """Returns the first key of a row or a result whose value is not a number or null; "" if there is none."""
    return next((key for key in _NUMBERS if type(values.get(key)) not in (int, float, type(None))), "")


def _is_row(values: object) -> bool:
    """Whether parsed JSON is a row of a run. Anything else was written by another hand, or is damage."""
    return isinstance(values, dict) and not wrong_numbers(values)


def plain(value):
    """Returns `value` for strict JSON: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _differs(path: Path, content: bytes) -> bool:
    """Whether a record is not a file of this content. A link is none: rows would go where it leads to."""
    if path.is_symlink() or not path.is_file():
        return os.path.lexists(path)
    return path.stat().st_size != len(content) or path.read_bytes() != content


def _whole_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    lines: list[str] = []
    with open(path, "rb") as file:
        while (raw := file.readline(MOST_ROW)).endswith(b"\n"):
            try:
                line = raw.decode("utf-8").rstrip("\n")
                if not _is_row(json.loads(line)):
                    break
            except (ValueError, RecursionError):  # a power failure in the middle of a block: later rows may be wrong
                break
            lines.append(line)
    return lines
