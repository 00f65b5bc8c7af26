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


UNFINISHED = ".unfinished.tmp"  # in a folder that is being written: what it will hold


def check_empty(folder: Path, where: str) -> None:
    """Raises ConfigError of `where` if something with this name is not an empty folder.

    A folder that a killed command left counts as empty.
    """
    if not os.path.lexists(folder) or folder.is_dir() and {path.name for path in folder.iterdir()} <= {UNFINISHED}:
        return
    if folder.is_dir() and (folder / UNFINISHED).is_dir():
        what = f"holds what a killed command left ({UNFINISHED}, which may be deleted), and other files"
        raise ConfigError([f"{folder}: {what}; move these elsewhere and run again, or choose a new --out"], where)
    raise ConfigError([f"{folder}: is not an empty folder; choose a new one with --out"], where)


@contextlib.contextmanager
def new_folder(folder: Path, where: str) -> Iterator[Path]:
    """Yields an empty folder inside of `folder`, whose content moves to `folder` at the end of the block.

    If the block fails, all that it wrote is removed again. If the process is killed, the next call removes it.

    Raises:
        ConfigError: of `where`: the folder is not empty or cannot be made, another process writes it, or a file of it
            cannot be written.
    """
    from linnet.data.parts import locked  # with numpy, which records are read without

    check_empty(folder, where)  # before a folder is made
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"{folder}: cannot be made ({error.strerror}); choose another with --out"], where) from None
    unfinished, written = folder / UNFINISHED, []
    with locked(folder, wait=0):
        check_empty(folder, where)  # another process may just have ended
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            yield unfinished
            written = sorted(os.listdir(unfinished), key=lambda name: name.startswith("config."))
            for name in written:
                os.replace(unfinished / name, folder / name)
            unfinished.rmdir()
        except BaseException as error:
            for path in (unfinished, *(folder / name for name in written)):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
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
        temporary.unlink(missing_ok=True)  # of a killed process; a link would lead the text elsewhere
        with naming(path), open(temporary, "xb") as file:
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


def read_csv(path: Path) -> csv.DictReader:
    """Returns the rows of a table that `csv_text` made.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
        csv.Error: the last line has no end. A number that is cut off would be read as another number.
    """
    text = path.read_bytes().decode("utf-8")
    if not ends_whole(text):
        raise csv.Error("the last line has no line end, so it may be cut off")
    return csv.DictReader(io.StringIO(text, newline=""))


def ends_whole(text: str) -> bool:
    """Whether the last line of a text has a line end, as that of every file has that Linnet writes."""
    return not text or text.endswith(("\n", "\r"))


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
