"""Sources of text: the standard library, files, folders, globs, JSONL, Parquet, FASTA, and data sets of the Hub.

A text file is one document, a JSONL file has one document per line, a Parquet file one per row, and a FASTA file one
per record (`dna.py`). All but Parquet may be compressed (`.gz`, `.zst`). Reading is bounded by the size of a file, so
that a few kilobytes that expand to terabytes are an error.

A folder is read recursively: all of its UTF-8 files are read in the order of their paths, except hidden ones; other
files are skipped and listed. Of a folder that a stage of `linnet corpus` wrote, only the documents are read. Files that
are named directly (by a path or a glob) must be text: a binary or badly encoded one is an error.
"""

import contextlib
import glob
import gzip
import hashlib
import io
import json
import os
import sys
import sysconfig
import time
import typing
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from linnet.config import nearest
from linnet.data import dna, hub, wikitext
from linnet.install import install_command

STDLIB = "stdlib"
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
KINDS |= dict.fromkeys((".fasta", ".fa", ".fna"), "fasta")
# Folders that are not part of the library, and tests, some of which contain invalid source text on purpose.
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
SNIFF = 8192  # bytes to read from the start of a file; enough to recognize most binary files
FINGERPRINTS = "fingerprints.json"
STAGE = "stage.json"  # what a folder of `linnet corpus` holds; written last
PLAN = "parts/plan.json"  # what it will hold, while it is being written
LARGE = 16 << 20  # bytes from which the fingerprint of a file is stored
_SMALL: dict[str, list] = {}  # device and number of a smaller file -> its size, times and fingerprint
SETTLED = 2.0  # seconds after which another change to a file certainly changes its times
REPORTED = 5  # most problems listed per file
COMPRESSED = (".gz", ".zst")
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
# Text shrinks 3 to 20 times. A file whose documents hold more than EXPANSION times its bytes, and more than EXPANDED
# bytes, is refused.
EXPANSION, EXPANDED = 200, 1 << 26
BATCH = 16 << 20  # bytes of Parquet that are decoded at a time, roughly
SYSTEM = ("/proc", "/sys", "/dev")  # folders of devices and of the kernel's tables, which block or never end


@dataclass(frozen=True)
class SourceFile:
    """A file of documents.

    Attributes:
        kind: "text", "jsonl", "parquet", "fasta" or "lines" (Parquet whose rows are the lines of one document).
        named: whether a path or glob names the file directly; False if it was found in a folder.
        trusted: whether Linnet wrote the file, so that it may expand without bound.
    """

    path: Path
    kind: str
    named: bool
    trusted: bool = False


def find_files(source: str | list[str], key: str, problems: list[str], skipped: list[str]) -> list[SourceFile]:
    """Lists the files of a source without reading all of their content.

    Args:
        source: "stdlib", or a list of paths of files and folders, globs, names on the Hub, and "stdlib".
        key: the name of the configuration key, for messages.
        problems: problems are appended here, one line each.
        skipped: files in folders that are not text are appended here with the reason.

    Returns:
        Each file once; files of folders and globs in the order of their paths.
    """
    found: dict[str, SourceFile] = {}
    folders: dict[str, str] = {}
    for name in [source] if isinstance(source, str) else source:
        files, reason = _find(name, skipped)
        if reason:
            problems.append(f"{key}: {name!r} {reason}")
        for file in files:
            found.setdefault(_real(file.path, folders), file)
    if not found and not problems:
        problems.append(f"{key}: is an empty list; name at least one file, folder or glob, or {STDLIB!r}")
    return list(found.values())


def _real(path: Path, folders: dict[str, str]) -> str:
    """Returns a path without links. `folders` keeps those of folders, which are found once for all their files."""
    folder, name = os.path.split(path)
    if os.path.islink(path) or name in ("", ".", ".."):
        return os.path.realpath(path)
    if folder not in folders:
        folders[folder] = os.path.realpath(folder)
    return os.path.join(folders[folder], name)


def read_documents(file: SourceFile, text_key: str, problems: list[str]) -> Iterator[bytes]:
    """Yields the documents of a file as UTF-8 without NUL; empty ones are left out.

    Args:
        file: what to read.
        text_key: the key (JSONL) or column (Parquet) that holds the text.
        problems: problems are appended here, at most about `REPORTED` lines; invalid documents are not yielded.
    """
    reader = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "fasta": _read_fasta}
    reader |= {"lines": _read_lines}
    held, most = 0, most_bytes(file)
    try:
        for text in reader[file.kind](file, text_key, problems):
            held += len(text)
            if held > most:
                raise TooLarge(most)
            yield text
    except TooLarge as error:
        problems.append(f"{file.path}: {error}")
    except (EOFError, zlib.error, gzip.BadGzipFile, BadZstd) as error:
        kind = file.path.suffix.lower()
        problems.append(f"{file.path}: is not a whole {kind} file ({error}); make it again, or leave it out")
    except OSError as error:
        problems.append(f"{file.path}: cannot be read: {error.strerror or error}")


def most_bytes(file: SourceFile) -> int:
    """Returns the most bytes of text that a file may expand to."""
    return sys.maxsize - 1 if file.trusted else max(EXPANDED, EXPANSION * file.path.stat().st_size)


class TooLarge(Exception):
    """A file whose text is far larger than the file, as that of no real text is."""

    def __init__(self, most: int):
        super().__init__(
            f"holds more than {most:,} bytes of text, {EXPANSION} times its size or more; no real text shrinks so "
            "far. Decompress it, or leave it out"
        )


class BadZstd(Exception):
    """A damaged file of Zstandard."""


class BadRow(Exception):
    """A document that cannot be read.

    Attributes:
        kind: the problem in a few words that are the same for all documents, for counts.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


def fingerprint(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprints(files: list[SourceFile], cache: Path | None) -> list[str]:
    """Returns the `fingerprint` of each file. Stores those of large files in the folder `cache`, unless it is None.

    Like git, this treats a file as unchanged if its size and its times of modification and change are the same. The
    fingerprint of a file that changed a moment ago is not stored, because a second change could leave its times equal.
    A process remembers those of small files: the runs of a study ask for them again and again.
    """
    known = _known(cache)
    found: list[str] = []
    fresh: dict[str, list] = {}
    for file in files:
        state = file.path.stat()
        stamp = [state.st_size, state.st_mtime_ns, state.st_ctime_ns]
        large = state.st_size >= LARGE
        key = str(file.path.resolve()) if large else f"{state.st_dev} {state.st_ino}"
        remembered = (known if large else _SMALL).get(key)
        if remembered and remembered[:3] == stamp:
            found.append(remembered[3])
            continue
        found.append(fingerprint(file.path))
        if time.time() - max(state.st_mtime, state.st_ctime) > SETTLED:
            (fresh if large else _SMALL)[key] = [*stamp, found[-1]]
    _remember(cache, known, fresh)
    return found


def remembered(key: str, stamp: str, newest: float, compute: Callable[[], str], cache: Path | None) -> str:
    """Returns `compute()`, or what it returned when it was last called for this key and stamp.

    Args:
        key: the path of a folder. stamp: a digest of the names, sizes and times of its files.
        newest: time of the last change to a file. As for `fingerprints`, the result of a recent change is not stored.
        cache: the folder where results are stored; None stores nothing.
    """
    known = _known(cache)
    if known.get(key, [])[:1] == [stamp]:
        return known[key][-1]
    found = compute()
    if time.time() - newest > SETTLED:
        _remember(cache, known, {key: [stamp, found]})
    return found


def _known(cache: Path | None) -> dict:
    known: dict = {}
    if cache is not None:
        with contextlib.suppress(OSError, ValueError):
            known = json.loads((cache / FINGERPRINTS).read_text(encoding="utf-8"))
    return known


def _remember(cache: Path | None, known: dict, fresh: dict) -> None:
    if not fresh or cache is None:
        return
    cache.mkdir(parents=True, exist_ok=True)
    temporary = cache / f".{uuid.uuid4().hex}.tmp"
    temporary.write_text(json.dumps({**known, **fresh}), encoding="utf-8")
    os.replace(temporary, cache / FINGERPRINTS)


def stdlib_folder() -> Path:
    """Returns the folder of the Python standard library, also from inside a virtual environment."""
    return Path(sysconfig.get_path("stdlib"))


def _find(name: str, skipped: list[str]) -> tuple[list[SourceFile], str | None]:
    if not name:  # as a path, an empty name would mean the current folder
        return [], "is empty; name a file, folder or glob"
    if name == STDLIB:
        root = stdlib_folder()
        paths = [path for path in _walk(root, NOT_LIBRARY) if path.suffix == ".py" and path.stat().st_size]
        files = [SourceFile(path, "text", named=False) for path in paths]
        return files, None if files else f"found no Python source in {root}; give your own files"
    if "\0" in name:
        return [], "contains NUL, which no path can; name a file, folder or glob"
    if hub.is_name(name):
        return _of_hub(name)
    if (part := wikitext.parse_name(name)) is not None:
        paths, reason = wikitext.find_split(part)
        kinds = {path: "lines" if path.suffix in wikitext.PARQUET else "text" for path in paths}
        return [SourceFile(path, kind, named=True) for path, kind in kinds.items()], reason
    path = Path(name).expanduser()
    if place := _system(path):
        return [], f"is in {place}, which holds devices and tables of the kernel, not text; name other files"
    if path.is_dir():
        if (path / "loop.yaml").is_file() and (path / "round-1").is_dir():
            return [], "is a loop of `linnet corpus`, whose rounds repeat the text; name the folder `kept` of one"
        if (path / PLAN).is_file() and not (path / STAGE).is_file():
            return [], "is a stage of `linnet corpus` that has not ended; run its command again, which resumes"
        if (stage := read_stage(path)) is not None:
            return _of_stage(path, stage)
        files = [file for file in (_sniff(path, skipped) for path in _walk(path)) if file]
        return files, None if files else _without_text(path)
    if path.exists():
        return _named(path)
    if glob.has_magic(name):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        results = [_named(match) for match in matches if match.is_file()]
        if not results:
            return [], f"matches no files; check the pattern (relative patterns start in {Path.cwd()})"
        reasons = [f"matches {files[0].path}, which {reason}" for files, reason in results if reason]
        return [file for files, _ in results for file in files], "; it also ".join(reasons) or None
    return [], f"does not exist; check the path (relative ones start in {Path.cwd()})"


def read_stage(folder: Path) -> dict | None:
    """Returns the content of `stage.json` of a folder that a stage of `linnet corpus` wrote; None for other folders."""
    # All but the first are for other files of this name.
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        values = json.loads((folder / STAGE).read_text(encoding="utf-8"))
        shards = values["shards"] if {"format", "stage"} <= values.keys() else [{}]
        if all(isinstance(shard["bytes"], int) and Path(shard["name"]).name == shard["name"] for shard in shards):
            return values
    return None


def _of_stage(folder: Path, stage: dict) -> tuple[list[SourceFile], str | None]:
    files = [SourceFile(folder / shard["name"], "jsonl", True, True) for shard in stage["shards"] if shard["documents"]]
    for file, size in zip(files, [shard["bytes"] for shard in stage["shards"] if shard["documents"]], strict=True):
        if not file.path.is_file():
            return [], f"is a stage of `linnet corpus` whose shard {file.path.name} is missing; make it again"
        if (found := file.path.stat().st_size) != size:
            return [], f"has {file.path.name} with {found:,} bytes instead of {size:,}; make the stage again"
        if reason := _unreadable(file):
            return [], f"has {file.path.name}, which {reason}"
    return files, None if files else "is a stage of `linnet corpus` that holds no documents; give another folder"


def _without_text(folder: Path) -> str:
    """Returns the problem of a folder without text; one with pictures gets the command that reads them."""
    if any(path.suffix.lower() in PICTURES for path in _walk(folder)):
        return f"is a folder of images without text; prepare images with: linnet data images {folder}"
    return "is a folder without text; give a folder with UTF-8 text, JSONL or Parquet files"


def _of_hub(name: str) -> tuple[list[SourceFile], str | None]:
    try:
        results = [_named(path) for path in hub.dataset_files(name)]
    except hub.HubError as error:
        return [], str(error)
    reasons = [f"has {files[0].path if files else 'a file'}, which {reason}" for files, reason in results if reason]
    return [file for files, _ in results for file in files], "; it also ".join(reasons) or None


def _system(path: Path) -> str | None:
    """Returns the folder of `SYSTEM` that a path leads into, or None. Files in shared memory (/dev/shm) are files."""
    real = os.path.realpath(path)
    if real.startswith("/dev/shm/"):
        return None
    return next((place for place in SYSTEM if real == place or real.startswith(f"{place}/")), None)


def _kind(path: Path) -> str:
    """Returns the kind of a file by the end of its name, without the end that says how it is compressed."""
    inner = Path(path.stem) if path.suffix.lower() in COMPRESSED else path
    return KINDS.get(inner.suffix.lower(), "text")


def _named(path: Path) -> tuple[list[SourceFile], str | None]:
    files = [SourceFile(path, _kind(path), named=True)]
    if not path.is_file():
        return [], "is neither a file nor a folder"
    if place := _system(path):
        return [], f"is in {place}, which holds devices and tables of the kernel, not text; name other files"
    if reason := _unreadable(files[0]):
        return [], reason
    return files, None if path.stat().st_size else "is an empty file; leave it out or give one with text"


def _walk(folder: Path, leave_out: frozenset[str] = frozenset({"__pycache__"})) -> Iterator[Path]:
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in leave_out and os.path.join(parent, name) not in SYSTEM
        ]
        if STAGE in names and (stage := read_stage(Path(parent))) is not None:  # its documents, not its records
            names, folders[:] = [shard["name"] for shard in stage["shards"] if shard["documents"]], []
        elif "parts" in folders and _is_unfinished(Path(parent)):
            names, folders[:] = [PLAN], []  # which `_sniff` skips with the reason
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    yield from sorted(
        (path for path in paths if os.path.isfile(path) and not (os.path.islink(path) and _system(path))),
        key=lambda path: path.relative_to(folder).as_posix(),
    )


def _is_unfinished(folder: Path) -> bool:
    """Whether a folder holds a stage of `linnet corpus` that has not ended."""
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        return {"format", "stage"} <= json.loads((folder / PLAN).read_text(encoding="utf-8")).keys()
    return False


def _sniff(path: Path, skipped: list[str]) -> SourceFile | None:
    kind = _kind(path)
    if path.as_posix().endswith(f"/{PLAN}") and _is_unfinished(folder := path.parents[1]):
        skipped.append(
            f"{folder}: is a stage of `linnet corpus` that has not ended; run its command again, which resumes"
        )
        return None
    if reason := _unreadable(SourceFile(path, kind, named=False)):
        skipped.append(f"{path}: {reason}")
        return None
    try:
        with open_file(path) as file:
            start = file.read(SNIFF)
    except OSError as error:
        skipped.append(f"{path}: cannot be read: {error.strerror or error}")
        return None
    except (EOFError, zlib.error, BadZstd) as error:
        skipped.append(f"{path}: is not a whole {path.suffix.lower()} file ({error})")
        return None
    if not start or kind == "text" and b"\0" in start:
        skipped.append(f"{path}: {'is empty' if not start else _text_problem(start)}")
        return None
    return SourceFile(path, kind, named=False)


def _unreadable(file: SourceFile) -> str | None:
    """Returns why Linnet cannot read a file of this kind and compression, None if it can."""
    suffix = file.path.suffix.lower()
    if suffix in COMPRESSED and file.kind == "parquet":
        return f"is Parquet inside {suffix}; decompress it first, Parquet is compressed by itself"
    if suffix == ".zst":
        try:
            import zstandard  # noqa: F401
        except ImportError:
            return f"needs zstandard; install it: {install_command('data')}"
    return None


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading, decompressed if its name says that it is compressed.

    Raises:
        EOFError, zlib.error, gzip.BadGzipFile, BadZstd: while reading, the file is not whole.
    """
    suffix = path.suffix.lower()
    if suffix == ".gz":
        with gzip.open(path, "rb") as file:
            yield typing.cast(BinaryIO, file)
    elif suffix == ".zst":
        import zstandard

        try:
            with open(path, "rb") as raw:
                with io.BufferedReader(_Zstd(raw)) as file:
                    yield file
        except (zstandard.ZstdError, MemoryError) as error:  # a frame may ask for a window of gigabytes
            raise BadZstd(error) from None
    else:
        with open(path, "rb") as file:
            yield file


class _Zstd(io.RawIOBase):
    """The text of a Zstandard file of one or more frames. zstandard's own reader takes a cut file for a whole one."""

    STEP = 4096  # compressed bytes at a time, which become at most 128 MB

    def __init__(self, raw: BinaryIO):
        self._raw, self._text, self._unused = raw, memoryview(b""), b""
        self._frame: typing.Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: typing.Any) -> int:
        import zstandard

        while not self._text:
            data = self._unused or self._raw.read(self.STEP)
            self._unused = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("it ends in the middle")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._text = memoryview(self._frame.decompress(data))
            if self._frame.eof:
                self._unused, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size


def decode_text(text: bytes) -> str:
    """Returns the text of a file. Raises `BadRow` if it is not UTF-8, or has NUL."""
    if text[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise BadRow("UTF-16", "is UTF-16, not UTF-8; convert it with: iconv -f utf-16 -t utf-8")
    if (nul := text.find(b"\0")) >= 0:
        raise BadRow("binary", f"is binary: byte {nul} is NUL; give UTF-8 text")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        convert = "convert it, for example with: iconv -f latin1 -t utf-8"
        reason = f"is not UTF-8: byte {error.start} is 0x{text[error.start]:02x}; {convert}"
        raise BadRow("not UTF-8", reason) from None


def _text_problem(text: bytes) -> str | None:
    try:
        decode_text(text)
    except BadRow as error:
        return str(error)
    return None


def _read_text(source: SourceFile, text_key: str, problems: list[str]) -> Iterator[bytes]:
    path, most = source.path, most_bytes(source)
    with open_file(path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise TooLarge(most)
    if reason := _text_problem(text):
        problems.append(f"{path}: {reason}")
    elif text:
        yield text


def _read_jsonl(source: SourceFile, text_key: str, problems: list[str]) -> Iterator[bytes]:
    path, most = source.path, most_bytes(source)
    wrong, total = 0, 0
    with open_file(path) as lines:
        for number, line in enumerate(_bounded(lines, most), 1):
            if not line.strip():
                continue
            total += 1
            try:
                if text := row_text(json_row(line), text_key):
                    yield text
                continue
            except BadRow as error:
                reason = str(error)
            wrong += 1
            if wrong <= REPORTED:
                problems.append(f"{path}: line {number}: {reason}")
    if wrong > REPORTED:
        problems.append(f"{path}: and {wrong - REPORTED} more bad lines of {total}")


def _read_fasta(source: SourceFile, text_key: str, problems: list[str]) -> Iterator[bytes]:
    wrong = 0
    with open_file(source.path) as file:
        for _, found in dna.read_fasta(_bounded(file, most_bytes(source))):
            if isinstance(found, bytes):
                if found:
                    yield found
            elif (wrong := wrong + 1) <= REPORTED:
                problems.append(f"{source.path}: {found}")
    if wrong > REPORTED:
        problems.append(f"{source.path}: and {wrong - REPORTED} more bad records")


def _bounded(file: BinaryIO, most: int) -> Iterator[bytes]:
    """Yields the lines of a file. Raises TooLarge once they hold more than `most` bytes."""
    read = 0
    for line in iter(lambda: file.readline(most + 1), b""):
        if (read := read + len(line)) > most:
            raise TooLarge(most)
        yield line


def json_row(line: bytes) -> dict:
    """Returns the JSON object of a line. Raises `BadRow` if the line is not one."""
    try:
        values = json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: byte {error.start} of the line is 0x{line[error.start]:02x}"
        raise BadRow("not UTF-8", reason) from None
    except json.JSONDecodeError as error:
        raise BadRow("not JSON", f"is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadRow("not JSON", "is JSON that is nested too deeply to read") from None
    except ValueError:
        raise BadRow("not JSON", "has a number with too many digits to read") from None
    if not isinstance(values, dict):
        raise BadRow("not an object", f"is not a JSON object but {type(values).__name__}; write one object per line")
    return values


def row_text(values: dict, text_key: str) -> bytes:
    """Returns the text of a JSON object as UTF-8. Raises `BadRow` if it has none."""
    if text_key not in values:
        known = nearest(text_key, values) if values else "the line has no keys"
        raise BadRow("no text", f"has no key {text_key!r}; set text_key ({known})")
    return encode_text(values[text_key], f"the value of {text_key!r}")


def encode_text(text: object, what: str) -> bytes:
    """Returns text as UTF-8. Raises `BadRow` if it is not text, or has NUL or half a surrogate pair.

    Args:
        what: names the value in the message.
    """
    if not isinstance(text, str):
        raise BadRow("no text", f"{what} is of type {type(text).__name__}; give text")
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        reason = f"{what} contains half of a surrogate pair at character {error.start}; give valid Unicode"
        raise BadRow("half a surrogate pair", reason) from None
    if b"\0" in encoded:
        place = f"at character {text.index(chr(0))}"
        raise BadRow("NUL", f"{what} contains NUL {place}, which marks the end of a document; remove it")
    return encoded


def _read_parquet(source: SourceFile, text_key: str, problems: list[str]) -> Iterator[bytes]:
    path = source.path
    try:
        groups = parquet_groups(path, text_key)
        wrong = row = 0
        for row, text in parquet_texts(path, text_key, range(len(groups))):
            try:
                if encoded := b"" if text is None else encode_text(text, f"column {text_key!r}"):
                    yield encoded
            except BadRow as error:
                if (wrong := wrong + 1) <= REPORTED:
                    problems.append(f"{path}: row {row}: {error}")
        if wrong > REPORTED:
            problems.append(f"{path}: and {wrong - REPORTED} more bad rows of {row + 1}")
    except BadParquet as error:
        problems.append(f"{path}: {error}")


def _read_lines(source: SourceFile, text_key: str, problems: list[str]) -> Iterator[bytes]:
    """Yields one document: the rows of a Parquet file as lines, empty ones too."""
    try:
        rows = parquet_texts(source.path, text_key, range(len(parquet_groups(source.path, text_key))))
        lines = [encode_text(text or "", f"column {text_key!r}").removesuffix(b"\n") + b"\n" for _, text in rows]
        if lines:
            yield b"".join(lines)
    except (BadParquet, BadRow) as error:
        problems.append(f"{source.path}: {error}")


class BadParquet(Exception):
    """A Parquet file that cannot be read; the message says why."""


def parquet_groups(path: Path, text_key: str) -> list[tuple[int, int]]:
    """Returns rows and bytes of text of each row group, as the file states them.

    Raises:
        BadParquet: pyarrow is missing, the file is damaged, or it has no such column.
        TooLarge: it states more text than a file of its size holds.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BadParquet(f"reading Parquet needs pyarrow; install it: {install_command('data')}") from None
    try:
        columns = parquet.read_schema(path).names
        if text_key not in columns:
            raise BadParquet(f"has no column {text_key!r}; set text_key ({nearest(text_key, columns)})")
        metadata = parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise _unreadable_parquet(error) from None
    groups = range(metadata.num_row_groups)
    found = [(metadata.row_group(group).num_rows, parquet_bytes(metadata, group, text_key)) for group in groups]
    most = max(EXPANDED, EXPANSION * path.stat().st_size)
    if metadata.num_rows > most or sum(size for _, size in found) > most:
        raise TooLarge(most)
    return found


def parquet_texts(path: Path, text_key: str, groups: Iterable[int]) -> Iterator[tuple[int, object]]:
    """Yields number (from 0 at the first group read) and value of each row of some row groups.

    Raises:
        BadParquet: the file is damaged.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        # A column that stores each distinct text once stays so in memory.
        file = parquet.ParquetFile(path, read_dictionary=[text_key])
        groups, row = list(groups), 0
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        size = sum(parquet_bytes(file.metadata, group, text_key) for group in groups)
        batch_size = max(1, min(1024, BATCH * rows // max(size, 1)))
        for batch in file.iter_batches(batch_size=batch_size, row_groups=groups, columns=[text_key]):
            for text in column_texts(batch.column(0)):
                yield row, text
                row += 1
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise _unreadable_parquet(error) from None


def _unreadable_parquet(error: BaseException) -> BadParquet:
    return BadParquet(f"is not a readable Parquet file ({(str(error) or type(error).__name__).splitlines()[0]})")


def parquet_bytes(metadata: typing.Any, group: int, column: str) -> int:
    """Returns the bytes of a column of a row group after decompression, as the file states them."""
    chunks = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def column_texts(column: typing.Any) -> Iterator[object]:
    """Yields the values of an Arrow column; one that is a dictionary is not written out."""
    if not hasattr(column, "dictionary"):
        yield from column.to_pylist()
        return
    values = column.dictionary.to_pylist()
    for index in column.indices.to_pylist():
        yield None if index is None else values[index]
