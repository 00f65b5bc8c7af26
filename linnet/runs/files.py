"""Writing files atomically, and tables as CSV."""

import contextlib
import csv
import errno
import glob
import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from safetensors import SafetensorError

from linnet.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

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
NAMES = ".names"  # in there, once all is written: the names that move to the folder


def check_empty(folder: Path, where: str) -> None:
    """Raises ConfigError of `where` if something with this name is not an empty folder.

    A folder that a killed command left counts as empty.
    """
    if not os.path.lexists(folder):
        return
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {UNFINISHED, *_moved(folder)}:
        return
    if folder.is_dir() and (folder / UNFINISHED).is_dir():
        what = f"holds what a killed command left ({UNFINISHED}, which may be deleted), and other files"
        raise ConfigError([f"{folder}: {what}; move these elsewhere and run again, or choose a new --out"], where)
    raise ConfigError([f"{folder}: is not an empty folder; choose a new one with --out"], where)


def _moved(folder: Path) -> set[str]:
    """Returns the names in a folder that a command which was killed at its very end had moved there."""
    try:
        names = os.fsdecode((folder / UNFINISHED / NAMES).read_bytes()).split("\0")
    except OSError:
        return set()
    return {name for name in names if not os.path.lexists(folder / UNFINISHED / name)}


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
            for name in _moved(folder):
                remove_path(folder / name)
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            yield unfinished
            written = sorted(os.listdir(unfinished), key=lambda name: name.startswith("config."))
            write_atomic(unfinished / NAMES, os.fsencode("\0".join(written)))
            for name in written:
                os.replace(unfinished / name, folder / name)
            shutil.rmtree(unfinished)
        except BaseException as error:
            for path in (unfinished, *(folder / name for name in written)):
                remove_path(path)
            if not there:
                folder.rmdir()
            if not isinstance(error, OSError | SafetensorError):
                raise
            fix = "the disk is full; free some space" if is_full(error) else f"{error}; choose another with --out"
            raise ConfigError([f"{folder}: cannot be written: {fix}"], where) from error


@contextlib.contextmanager
def naming(path: str | Path, temporary: Path | None = None) -> Iterator[None]:
    """Gives an OSError without a file, or of the temporary one, the path that is written.

    A write to an open file fails without its name.
    """
    try:
        yield
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes text (as UTF-8) or bytes so that a reader sees the old file or the new one, even if the machine stops."""
    temporary = _unfinished(path)
    try:
        with naming(path, temporary):
            with open(temporary, "xb") as file:
                _lock(file.fileno())
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def save_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file as `write_atomic` writes text, with the permissions that other files get.

    Some releases of safetensors write into the file itself. Others write into a file `.tmpXXXXXX` beside it, which a
    kill leaves there, and which only its owner may read. Both happen in a folder here, which the next call removes.

    Raises:
        OSError, SafetensorError: it cannot be written; a file that was there is as before.
    """
    from safetensors.torch import save_file

    temporary = _unfinished(path)
    lock = None
    try:
        with naming(path, temporary):
            temporary.mkdir()
        if fcntl is not None:
            _lock(lock := os.open(temporary, os.O_RDONLY))
        file = temporary / path.name
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file, metadata)
        file.chmod(temporary.stat().st_mode & 0o666)
        sync_file(file)
        os.replace(file, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    sync_folder(path.parent)


def remove_path(path: Path) -> None:
    """Removes a file, a link or a folder with all that it holds, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _unfinished(path: Path) -> Path:
    """Returns a free name beside `path` for what will become it. Removes what killed processes left for it."""
    mine = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove_path(mine)  # of a killed process; a link would lead the bytes elsewhere
    if fcntl is not None:
        for half in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            with contextlib.suppress(OSError, ValueError, OverflowError):  # the name may be anything
                _remove_abandoned(half, int(half.name[len(path.name) + 2 : -4]))
    return mine


def _remove_abandoned(half: Path, pid: int) -> None:
    """Removes an unfinished file or folder if the process `pid` has ended, or none on another machine holds its lock.

    Raises:
        OSError: a process is writing it.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        descriptor = os.open(half, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_path(half)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Locks an unfinished file or folder until it is closed. Does nothing where there are no locks."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
