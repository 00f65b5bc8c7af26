"""Writing files atomically, and tables as CSV."""

import contextlib
import csv
import errno
import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from linnet.config import ConfigError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: BaseException) -> bool:
    """Whether a write failed because a disk or a quota is full. Safetensors gives the number only in its message."""
    return getattr(error, "errno", None) in FULL or re.search(r"os error (28|27|122)\b", str(error)) is not None


@contextlib.contextmanager
def room(folder: str | Path, where: str) -> Iterator[None]:
    """Turns the error of a full disk into a `ConfigError` of `where` that explains how to continue."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        problem = f"{folder}: the disk is full; free some space and run the same command again to continue"
        raise ConfigError([problem], where) from None


def check_empty(folder: Path, where: str) -> None:
    """Raises ConfigError of `where` if something with this name is not an empty folder."""
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError([f"{folder}: is not an empty folder; choose a new one with --out"], where)


@contextlib.contextmanager
def new_folder(folder: Path, where: str) -> Iterator[None]:
    """Makes a folder for the block to write into. If the block fails, all that it wrote is removed again.

    Raises:
        ConfigError: of `where`: the folder is not empty or cannot be made, or a file of it cannot be written.
    """
    check_empty(folder, where)
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{folder}: cannot be made ({error.strerror}); choose another with --out"], where) from None
    try:
        yield
    except BaseException as error:
        for entry in folder.iterdir():
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        if not there:
            folder.rmdir()
        if not isinstance(error, OSError | SafetensorError):
            raise
        fix = "the disk is full; free some space" if is_full(error) else f"{error}; choose another with --out"
        raise ConfigError([f"{folder}: cannot be written: {fix}"], where) from error


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Gives an OSError without a file the path that is written: a write to an open file fails without its name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes text (as UTF-8) or bytes so that a reader sees the old file or the new one, even if the machine stops."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def csv_text(columns: Iterable[str], rows: Iterable[Mapping[str, Any]], end: str = "\n") -> str:
    """Returns rows as CSV with a header; other keys of rows are left out, and None becomes an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator=end, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def sync_file(path: Path) -> None:
    """Waits until the contents of a file are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk. Does nothing on Windows, which cannot sync folders."""
    if os.name != "nt":
        sync_file(path)
