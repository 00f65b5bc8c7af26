"""Token shards: the token ids of a split, stored on disk once and memory-mapped.

A corpus folder has two files per split: `<split>.bin` (ids, little-endian, the smallest unsigned integer that fits) and
`<split>.documents` (int64: where each document starts, then the number of tokens). `corpus.json` holds their sizes and
SHA-256, and its own SHA-256. A folder is written under a temporary name and renamed when it is complete, so a corpus
folder is always complete, even if two processes prepare it at the same time.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from linnet.config import ConfigError, load_json
from linnet.data.sources import fingerprint

METADATA = "corpus.json"
OFFSET = np.dtype("<i8")
# Seconds after which an unfinished folder counts as left by a killed process, where folders cannot be locked.
ABANDONED = 24 * 3600

_verified: set[tuple] = set()  # (path, size, modification time) of the files that this process has verified


class CorpusDamaged(ConfigError):
    """A file of a prepared corpus is missing, truncated or changed since it was written."""


class TokenShards:
    """One split of a corpus. `shards[a:b]` is a read-only array of ids, memory-mapped from the file.

    Args:
        folder: the corpus folder.
        split: "train" or "validation".
        entry: the value that `ShardWriter.finish` returned for the split.
        end_of_document: the id after each document.

    Attributes:
        tokens: the ids, memory-mapped, [len(self)].
        document_starts: int64 [documents + 1], memory-mapped: where each document starts, then the number of tokens.
        documents, bytes: number of documents, and bytes of their text.
        unknown: number of tokens that replace text the tokenizer could not express.

    Raises:
        ConfigError: a file is missing or its size has changed since it was written.
    """

    def __init__(self, folder: Path, split: str, entry: dict, end_of_document: int):
        self.path = Path(folder) / f"{split}.bin"
        self.split = split
        self.end_of_document = end_of_document
        self.documents, self.bytes, self.unknown = entry["documents"], entry["bytes"], entry["unknown"]
        self._files = {Path(folder) / name: values for name, values in entry["files"].items()}
        if problems := [problem for path, values in self._files.items() if (problem := size_problem(path, values))]:
            raise damaged(folder, problems)
        self.tokens = np.memmap(self.path, dtype=np.dtype(entry["dtype"]), mode="r")
        self.document_starts = np.memmap(self.path.with_suffix(".documents"), dtype=OFFSET, mode="r")

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, index: slice | int | np.ndarray) -> np.ndarray:
        return self.tokens[index]

    def document(self, number: int) -> np.ndarray:
        """Returns the ids of one document, without its end-of-document token."""
        start, end = self.document_starts[number : number + 2]
        return self.tokens[start : end - 1]

    def verify(self) -> None:
        """Reads the files and compares their size and SHA-256 with `corpus.json`.

        Raises:
            ConfigError: names each file that differs, and how to rebuild it.
        """
        _verify(self.path.parent, self._files)

    def verify_once(self) -> None:
        """Calls `verify`, unless this process has done so and the files have not changed since."""
        verify_files(self.path.parent, self._files)


class ShardWriter:
    """Writes one split into a folder, document by document."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, end_of_document: int, unknown: int | None):
        self._names = (f"{split}.bin", f"{split}.documents")
        self._files = [open(folder / name, "wb") for name in self._names]
        self._hashes = [hashlib.sha256(), hashlib.sha256()]
        self._dtype, self._unknown = dtype, unknown
        self._end = np.array([end_of_document], dtype=dtype)
        self._tokens = self._documents = self._bytes = self._unknowns = 0

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Appends the tokens of a document with `text_bytes` bytes of text, and the end-of-document token."""
        self._write(1, np.array([self._tokens], dtype=OFFSET))
        self._write(0, np.concatenate([tokens.astype(self._dtype, copy=False), self._end]))
        self._tokens += len(tokens) + 1
        self._documents += 1
        self._bytes += text_bytes
        if self._unknown is not None:
            self._unknowns += int(np.count_nonzero(tokens == self._unknown))

    def finish(self) -> dict:
        """Flushes the files to disk, closes them, and returns the split's entry for `corpus.json`."""
        self._write(1, np.array([self._tokens], dtype=OFFSET))
        files = {}
        for name, file, checksum in zip(self._names, self._files, self._hashes, strict=True):
            file.flush()
            os.fsync(file.fileno())
            files[name] = {"size": file.tell(), "sha256": checksum.hexdigest()}
            file.close()
        return {
            "documents": self._documents,
            "bytes": self._bytes,
            "tokens": self._tokens,
            "unknown": self._unknowns,
            "dtype": self._dtype.str,
            "files": files,
        }

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _write(self, number: int, values: np.ndarray) -> None:
        data = values.tobytes()
        self._hashes[number].update(data)
        self._files[number].write(data)


def file_entry(path: Path) -> dict:
    """Returns size and SHA-256 of a file, for `corpus.json`."""
    return {"size": path.stat().st_size, "sha256": fingerprint(path)}


def size_problem(path: Path, entry: dict) -> str | None:
    """Returns a problem if a file is missing or does not have the size in its entry, else None."""
    if not path.is_file():
        return f"{path}: is missing"
    if (size := path.stat().st_size) != entry["size"]:
        kind = "truncated" if size < entry["size"] else "too long"
        return f"{path}: is {kind}: {size} bytes instead of {entry['size']}"
    return None


def content_problem(path: Path, entry: dict) -> str | None:
    """Returns a problem if the SHA-256 of a file is not that of its entry, else None."""
    if fingerprint(path) == entry["sha256"]:
        return None
    return f"{path}: is corrupted: its SHA-256 changed since it was written"


def verify_files(folder: Path, files: dict[Path, dict], fix: str = "") -> None:
    """Compares files with their entries, unless this process has done so and they have not changed since.

    Args:
        fix: how to rebuild the folder, if not as `damaged` says.

    Raises:
        ConfigError: names each file that differs, and how to rebuild it.
    """
    if not all(path.is_file() and _state(path) in _verified for path in files):
        _verify(folder, files, fix)


def write_metadata(folder: Path, values: dict) -> None:
    """Writes `corpus.json` with the SHA-256 of its own values."""
    text = json.dumps({**values, "sha256": _checksum(values)}, indent=1)
    with open(folder / METADATA, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_metadata(folder: Path) -> dict:
    """Reads `corpus.json`. Raises `ConfigError` if it is missing or was changed since it was written."""
    path = Path(folder) / METADATA
    try:
        values = load_json(path)
        if values.pop("sha256") == _checksum(values):
            return values
    except FileNotFoundError:
        raise damaged(folder, [f"{path}: is missing"]) from None
    except (ValueError, KeyError, AttributeError, TypeError):
        pass
    raise damaged(folder, [f"{path}: is corrupted: its content changed since it was written"])


@contextlib.contextmanager
def new_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder that becomes `target` at the end of the `with` block, or is removed if the block fails.

    Args:
        target: the final folder. If another process creates it in the meantime, that one stays; both have the same
            content.
        replace: replace the files in `target`, which is damaged. Processes that have mapped the old files keep them.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    temporary, lock = _locked_folder(target)
    try:
        yield temporary
        if replace and target.is_dir():
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == METADATA):
                os.replace(path, target / path.name)
            return
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def damaged(folder: Path, problems: list[str], fix: str = "") -> CorpusDamaged:
    """Returns the error for a damaged corpus folder; each problem ends with the fix."""
    again = f"delete the folder {folder} and run again, or run `linnet data` again, which rebuilds it from its sources"
    fix = fix or again
    return CorpusDamaged([f"{problem}; {fix}" for problem in problems], "data")


def _locked_folder(target: Path) -> tuple[Path, int | None]:
    """Makes an unfinished folder beside `target` and locks it for as long as this process lives.

    Returns:
        The folder, and the descriptor that holds the lock; None where folders cannot be locked.
    """
    while True:
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        temporary.mkdir()
        if fcntl is None:
            return temporary, None
        try:
            lock = os.open(temporary, os.O_RDONLY)
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if temporary.is_dir():
                return temporary, lock
        except BlockingIOError:  # another process is about to remove it
            pass
        except OSError:  # a file system without locks: the folder counts as left behind by its age
            os.close(lock)
            return temporary, None
        os.close(lock)


def _remove_abandoned(folder: Path) -> None:
    """Removes unfinished folders whose process has ended, and, where that cannot be known, those of yesterday."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if not path.is_dir():
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink()
            elif fcntl is None:
                _remove_old(path)
            else:
                lock = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                except BlockingIOError:  # its process lives
                    pass
                except OSError:
                    _remove_old(path)
                finally:
                    os.close(lock)


def _remove_old(path: Path) -> None:
    if time.time() - path.stat().st_mtime > ABANDONED:
        shutil.rmtree(path)


def _verify(folder: Path, files: dict[Path, dict], fix: str = "") -> None:
    problems = []
    for path, entry in files.items():
        if problem := size_problem(path, entry) or content_problem(path, entry):
            problems.append(problem)
    if problems:
        raise damaged(folder, problems, fix)
    _verified.update(_state(path) for path in files)


def _checksum(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _state(path: Path) -> tuple:
    state = path.stat()
    return str(path.resolve()), state.st_size, state.st_mtime_ns
