"""Files of records: text, JSONL, JSON, Parquet, FASTA and tables, row by row.

A text file is one document, a JSONL file has one document per line, a JSON file one per line, per item of its array or
for its one object, a Parquet file one per row, and a FASTA file one per record (`dna.py`). All but Parquet may be
compressed (`.gz`, `.zst`). Reading is bounded by the size of a file, so that a few kilobytes that expand to terabytes
are an error. A byte order mark at the start is left out of the text, and rows that are null or empty are left out and
counted. A row without the key of the text is an error.

All readers of files of records are here, also those of images, GLUE, Long Range Arena and local tasks: `read_rows`
(JSONL, JSON, Parquet and FASTA with text), `read_parquet`, `read_table` (tab-separated) and `read_lines`. They read in
bounded memory. An error of `UNREADABLE` ends a file, and `damage` says what is wrong with it.
"""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import sys
import tarfile
import typing
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from linnet.config import nearest
from linnet.data import dna
from linnet.install import install_command

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
KINDS |= dict.fromkeys((".fasta", ".fa", ".fna"), "fasta") | {".json": "json", ".csv": "table", ".tsv": "table"}
BOM = b"\xef\xbb\xbf"
# How files begin that are not text, and what a user can do with them.
FOREIGN = {
    b"\x1f\x8b": "is compressed by gzip; end its name in .gz",
    b"\x28\xb5\x2f\xfd": "is compressed by Zstandard; end its name in .zst",
    b"BZh91AY&SY": "is compressed by bzip2; decompress it with: bunzip2",
    b"\xfd7zXZ\0": "is compressed by xz; decompress it with: unxz",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"PAR1\x15": "is Parquet; end its name in .parquet",
    b"ARROW1\0": "is an Arrow file; write it as Parquet",
    b"%PDF-": "is PDF; extract its text first, for example with: pdftotext",
}
SNIFF = 8192  # bytes to read from the start of a file; enough to recognize most binary files
REPORTED = 5  # most problems listed per file
COMPRESSED = (".gz", ".zst")
# Text shrinks 3 to 20 times. A file whose documents hold more than EXPANSION times its bytes, and more than EXPANDED
# bytes, is refused.
EXPANSION, EXPANDED = 200, 1 << 26
ENDLESS = sys.maxsize - 1  # bytes, where nothing is too long
BATCH = 16 << 20  # bytes of Parquet that are decoded at a time, roughly


@dataclass(frozen=True)
class SourceFile:
    """A file of documents.

    Attributes:
        kind: "text", "jsonl", "json" (one value, an object or an array of objects), "parquet", "fasta" or "lines"
            (Parquet whose rows are the lines of one document). A "table" (CSV) is refused.
        named: whether a path or glob names the file directly; False if it was found in a folder.
        trusted: whether Linnet wrote the file, so that it may expand without bound.
    """

    path: Path
    kind: str
    named: bool
    trusted: bool = False


def read_documents(
    file: SourceFile, text_key: str, problems: list[str], empty: Counter[str] | None = None
) -> Iterator[bytes]:
    """Yields the documents of a file as UTF-8 without NUL; null and empty ones are left out.

    Args:
        file: what to read.
        text_key: the key (JSONL, JSON) or column (Parquet) that holds the text.
        problems: problems are appended here, at most about `REPORTED` lines; invalid documents are not yielded.
        empty: the rows that are left out are counted here, as "null" or "empty".
    """
    held, most, empty = 0, most_bytes(file), Counter() if empty is None else empty
    try:
        for text in _documents(file, text_key, problems, empty):
            held += len(text)
            if held > most:
                raise TooLarge(most)
            yield text
    except UNREADABLE as error:
        problems.append(f"{file.path}: {damage(error)}")


def most_bytes(file: SourceFile) -> int:
    """Returns the most bytes of text that a file may expand to."""
    return ENDLESS if file.trusted else _most_bytes(file.path)


def _most_bytes(path: Path) -> int:
    return max(EXPANDED, EXPANSION * path.stat().st_size)


class BadRow(Exception):
    """A document that cannot be read.

    Attributes:
        kind: the problem in a few words that are the same for all documents, for counts.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class EmptyRow(BadRow):
    """A row whose text is null or empty; `str` of it says which."""

    def __init__(self, value: str | None):
        super().__init__("no text", "null" if value is None else "empty")


class BadFile(BadRow):
    """A file that cannot be read on; the rows before have been yielded.

    Attributes:
        sentence: what is wrong with the file, and the fix.
    """

    def __init__(self, reason: str, kind: str = "damaged file", sentence: str | None = None):
        super().__init__(kind, reason)
        self.sentence = sentence or reason


class TooLarge(BadFile):
    """A file whose text is far larger than the file, as that of no real text is."""

    def __init__(self, most: int):
        reason = f"holds more than {most:,} bytes of text, {EXPANSION} times its size or more; no real text shrinks so "
        super().__init__(f"{reason}far. Decompress it, or leave it out", "file expands too far")


REMAKE = "make it again, or leave it out"
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, tarfile.TarError, csv.Error)
UNREADABLE = (*DAMAGED, BadRow, OSError, UnicodeDecodeError)


def damage(error: BaseException) -> str:
    """Returns what is wrong with a file, from the error of `UNREADABLE` that reading it raised."""
    if isinstance(error, BadRow):
        return getattr(error, "sentence", str(error))
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text ({error.reason}); convert the file"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return f"is truncated or damaged ({error}); {REMAKE}"


def kind_of(path: Path) -> str:
    """Returns the kind of a file by the end of its name, without the end that says how it is compressed.

    A .json file is JSONL if its first line is a whole object.
    """
    inner = Path(path.stem) if path.suffix.lower() in COMPRESSED else path
    kind = KINDS.get(inner.suffix.lower(), "text")
    if kind == "json":
        # A file that cannot be read stays "json", and its reader says why.
        with contextlib.suppress(*UNREADABLE):
            lines = read_lines(SourceFile(path, kind, True))
            _json_object(_json_value(next((line for line in lines if line.strip()), b"")))
            return "jsonl"
    return kind


def unreadable(file: SourceFile) -> str | None:
    """Returns why Linnet cannot read a file of this kind, compression and beginning, None if it can."""
    suffix = file.path.suffix.lower()
    if suffix in COMPRESSED and file.kind == "parquet":
        return f"is Parquet inside {suffix}; decompress it first, Parquet is compressed by itself"
    if file.kind == "table":
        way = "write it as JSONL, for example with pandas: read_csv(FILE).to_json('FILE.jsonl', orient='records', "
        return f"is a table (CSV), which is not text; {way}lines=True)"
    try:
        with open_file(file.path) as opened:
            start = opened.read(SNIFF)
    except UNREADABLE as error:
        return damage(error)
    if file.kind not in ("parquet", "lines") and (magic := next(filter(start.startswith, FOREIGN), None)):
        return FOREIGN[magic]
    if file.kind in ("jsonl", "json", "fasta") and (reason := _wide(start)):
        return reason
    if file.named:  # its reader names the first byte that is wrong
        return None
    if file.kind == "text" and b"\0" in start:
        return _wide(start) or _binary(start)
    return None if start else "is empty"


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file for reading, decompressed if its name says that it is compressed.

    Raises:
        BadFile: zstandard is missing, or while reading, the file is not whole.
    """
    suffix = path.suffix.lower()
    broken: tuple[type[BaseException], ...] = DAMAGED
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise BadFile(f"needs zstandard; install it: {install_command('data')}") from None
        broken += (zstandard.ZstdError, MemoryError)  # a frame may ask for a window of gigabytes
    try:
        with gzip.open(path, "rb") if suffix == ".gz" else open(path, "rb") as file:
            yield typing.cast(io.BufferedReader, io.BufferedReader(_Zstd(file)) if suffix == ".zst" else file)
    except broken as error:
        kind = "file cut short" if isinstance(error, EOFError) else "damaged file"
        raise BadFile(str(error), kind, f"is not a whole {suffix} file ({error}); {REMAKE}") from None


def fingerprint(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: Path, quotes: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yields line (from 1) and fields of each row of a tab-separated file.

    Args:
        quotes: whether a quote marks a field that may hold tabs and ends of lines; otherwise it is text.

    Raises:
        one of `UNREADABLE`.
    """
    with open(path, encoding="utf-8-sig", newline="" if quotes else None) as file:
        if not quotes:
            yield from enumerate((line.rstrip("\n").split("\t") for line in file), 1)
            return
        csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        reader = csv.reader(file, delimiter="\t")
        yield from ((reader.line_num, fields) for fields in reader)


class _Zstd(io.RawIOBase):
    """The text of a Zstandard file of one or more frames. zstandard's own reader takes a cut file for a whole one."""

    STEP = 4096  # compressed bytes at a time, which become at most 128 MB

    def __init__(self, raw: typing.Any):
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
    if reason := _wide(text):
        raise BadRow("UTF-16", reason)
    if b"\0" in text:
        raise BadRow("binary", _binary(text))
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        convert = "convert it, for example with: iconv -f latin1 -t utf-8"
        reason = f"is not UTF-8: byte {error.start} is 0x{text[error.start]:02x}; {convert}"
        raise BadRow("not UTF-8", reason) from None


def read_text(path: str | Path) -> str:
    """Returns the text of a file as it is, without a byte order mark. Raises `BadRow` as `decode_text`, or OSError."""
    return decode_text(Path(path).read_bytes().removeprefix(BOM))


def _binary(text: bytes) -> str:
    return f"is binary: byte {text.find(0)} is NUL; give UTF-8 text"


def _wide(text: bytes) -> str | None:
    """Returns the problem of a text that starts with the byte order mark of UTF-16 or UTF-32."""
    if not text.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")):
        return None
    bits = 32 if text[:4] in (b"\xff\xfe\0\0", b"\0\0\xfe\xff") else 16
    return f"is UTF-{bits}, not UTF-8; convert it with: iconv -f utf-{bits} -t utf-8"


def _read_whole(source: SourceFile) -> bytes:
    """Returns the content of a file. Raises TooLarge if it expands too far."""
    most = most_bytes(source)
    with open_file(source.path) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise TooLarge(most)
    return text.removeprefix(BOM)


def _documents(source: SourceFile, text_key: str, problems: list[str], empty: Counter[str]) -> Iterator[bytes]:
    """Yields the documents of a file; the arguments are those of `read_documents`, as are its errors raised."""
    if source.kind == "text":
        if text := _read_whole(source):
            decode_text(text)
            yield text
        return
    if source.kind == "lines":
        yield from _read_lines(source, text_key)
        return
    wrong = total = 0
    for row, values, text in read_rows(source, text_key):
        total += 1
        if isinstance(values, EmptyRow):
            empty[str(values)] += 1
        elif isinstance(values, BadRow):
            if (wrong := wrong + 1) <= REPORTED:
                problems.append(f"{source.path}: {PLACES[source.kind].format(row, row + 1)}{values}")
        else:
            yield text
    if wrong > REPORTED:
        problems.append(f"{source.path}: and {wrong - REPORTED} more bad rows of {total}")


PLACES = {"jsonl": "line {1}: ", "json": "item {1}: ", "parquet": "row {0}: ", "fasta": ""}  # from 0, and from 1


def read_rows(
    file: SourceFile, text_key: str | None = None, start: int = 0, end: int = -1, first: int = 0, longest: int = ENDLESS
) -> Iterator[tuple[int, dict | BadRow, bytes]]:
    """Yields the rows of a JSONL, JSON, Parquet or FASTA file, in bounded memory.

    Args:
        text_key: the key or column of the text; None, for JSON alone, asks for objects with any keys.
        start, end: the range to read, in bytes (JSONL, at line starts) or row groups (Parquet); -1 is the end.
        first: number of the first row.
        longest: most bytes of a line (JSONL) and of the text of a row.

    Returns:
        Number, values, and text as UTF-8 of each row; or number, what is wrong with it, and nothing. Lines that are
        blank count, and are not yielded.

    Raises:
        BadRow: the file is not read on. OSError: the file cannot be read.
    """
    items: Iterable[typing.Any]
    if file.kind == "json":
        items = _json_items(file)
    elif file.kind == "parquet":
        column = text_key or ""
        groups = range(start, end) if end >= 0 else range(len(parquet_groups(file.path, column)))
        items = (text for (text,) in read_parquet(file.path, [column], groups, [column]))
    else:
        items = read_lines(file, start, end, longest)
        items = (letters for _, letters in dna.read_fasta(items)) if file.kind == "fasta" else items
    what = f"{'column' if file.kind == 'parquet' else 'the value of'} {text_key!r}"
    for row, item in enumerate(items, first):
        if file.kind == "jsonl" and not item.strip():
            continue
        try:
            values = _values(item, file.kind, text_key, longest)
            text = _row_text(values, text_key, what)
            if len(text) > longest:
                raise BadRow("too long", f"has {len(text):,} bytes, more than {longest:,}")
        except BadRow as error:
            yield row, error, b""
        else:
            yield row, values, text


def _values(item: typing.Any, kind: str, text_key: typing.Any, longest: int) -> typing.Any:
    if kind == "jsonl":
        if len(item) > longest:
            raise BadRow("too long", f"has more than {longest:,} bytes")
        return _json_value(item)
    if kind == "fasta":
        if isinstance(item, str):
            raise BadRow("not FASTA", item)
        item = item.decode()
    return item if kind == "json" else {text_key: item}


def read_lines(
    file: SourceFile, start: int = 0, end: int = -1, longest: int = ENDLESS, blocks: bool = False
) -> Iterator[bytes]:
    """Yields the lines of a file; of longer ones, the first `longest` + 1 bytes.

    Args:
        start, end: bytes of the range to read, at line starts; -1 is the end of the file, which may expand to
            `most_bytes`.
        blocks: yield several whole lines at a time, which is faster, with the byte order mark.

    Raises:
        BadFile: the file is damaged, or expands too far.
    """
    most = most_bytes(file) if end < 0 else end - start
    left, whole = most, True
    with open_file(file.path) as opened:
        if start:
            opened.seek(start)
        while True:
            size = min(longest, left if end < 0 else left - 1) + 1
            cut = opened.peek(1)[:size].rfind(b"\n") + 1 if blocks and whole else 0
            if not (line := opened.read(cut) if cut else opened.readline(size)):
                return
            if (left := left - len(line)) < 0:
                raise TooLarge(most)
            if whole:
                yield line if blocks or start or left + len(line) < most else line.removeprefix(BOM)
            whole = line.endswith(b"\n")


def _json_items(source: SourceFile) -> list:
    """Returns the items of the array of a .json file, or its other value alone.

    Raises:
        BadRow: the file is not one JSON value, is damaged, or expands too far.
    """
    text = _read_whole(source)
    try:
        values = _json_value(text) if text.strip() else []
    except BadRow as error:
        fix = "write one JSON object per line (.jsonl), for example with: jq -c ."
        raise BadRow(error.kind, f"{error}; {fix}") from None
    return values if isinstance(values, list) else [values]


def _json_value(text: bytes) -> object:
    try:
        return json.loads(text.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8: byte {error.start} of the line is 0x{text[error.start]:02x}"
        raise BadRow("not UTF-8", reason) from None
    except json.JSONDecodeError as error:
        raise BadRow("not JSON", f"is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BadRow("not JSON", "is JSON that is nested too deeply to read") from None
    except ValueError:
        raise BadRow("not JSON", "has a number with too many digits to read") from None


def _json_object(values: object) -> dict:
    """Returns a value of JSON that is an object. Raises `BadRow` for another one."""
    if not isinstance(values, dict):
        raise BadRow("not an object", f"is not a JSON object but {type(values).__name__}; write one object per line")
    return values


def _row_text(row: object, text_key: str | None, what: str) -> bytes:
    """Returns the text of a JSON object as UTF-8. Raises `BadRow` as `encode_text`, or if there is no key or object."""
    values = _json_object(row)
    if text_key is None:
        return b""
    if text_key not in values:
        known = nearest(text_key, values) if values else "the line has no keys"
        chat = "; conversations are for objective: chat and linnet evaluate chat" if "messages" in values else ""
        raise BadRow("no text", f"has no key {text_key!r}; set text_key ({known}){chat}")
    return encode_text(values[text_key], what)


def encode_text(text: object, what: str) -> bytes:
    """Returns text as UTF-8. Raises `EmptyRow` if it is null or empty, and `BadRow` if it is not text, or has NUL or
    half a surrogate pair.

    Args:
        what: names the value in the message.
    """
    if text is None or text == "":
        raise EmptyRow(text)  # type: ignore[arg-type]
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


def _read_lines(source: SourceFile, text_key: str) -> Iterator[bytes]:
    """Yields one document: the rows of a Parquet file as lines, null and empty ones too."""
    groups = range(len(parquet_groups(source.path, text_key)))
    rows = read_parquet(source.path, [text_key], groups, [text_key])
    lines = [encode_text(text or "\n", f"column {text_key!r}").removesuffix(b"\n") + b"\n" for (text,) in rows]
    if lines:
        yield b"".join(lines)


@contextlib.contextmanager
def open_parquet(path: Path, dictionary: Iterable[str] = ()) -> Iterator[typing.Any]:
    """Opens a Parquet file. Columns of `dictionary` that store each distinct text once stay so in memory.

    Raises:
        BadFile: pyarrow is missing; or, also while reading, the file is damaged.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BadFile(f"reading Parquet needs pyarrow; install it: {install_command('data')}") from None
    try:
        metadata = parquet.read_metadata(path)
        # pyarrow raises KeyError for a column of lists or structs, which is stored under other names.
        stored = {metadata.schema.column(index).path for index in range(metadata.num_columns)}
        with parquet.ParquetFile(path, metadata=metadata, read_dictionary=[*stored.intersection(dictionary)]) as file:
            yield file
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        reason = f"is not a readable Parquet file ({(str(error) or type(error).__name__).splitlines()[0]})"
        raise BadFile(reason, sentence=f"{reason}; {REMAKE}") from None


def _parquet_batches(
    path: Path, columns: list[str], groups: Iterable[int] | None, dictionary: Iterable[str]
) -> Iterator[typing.Any]:
    with open_parquet(path, dictionary) as file:
        groups = list(range(file.metadata.num_row_groups) if groups is None else groups)
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        size = sum(_parquet_bytes(file.metadata, group, column) for group in groups for column in columns)
        batch_size = max(1, min(1024, BATCH * rows // max(size, 1)))
        yield from file.iter_batches(batch_size=batch_size, row_groups=groups, columns=columns)


def read_parquet(
    path: Path, columns: list[str], groups: Iterable[int] | None = None, dictionary: Iterable[str] = ()
) -> Iterator[tuple]:
    """Yields the values of some columns, row by row, from about `BATCH` bytes at a time.

    Args:
        groups: row groups to read; None reads all. dictionary: as in `open_parquet`.

    Raises:
        BadFile: as `open_parquet`, or text is not UTF-8.
    """
    try:
        for batch in _parquet_batches(path, columns, groups, dictionary):
            yield from zip(*(_column_values(batch.column(name)) for name in columns), strict=True)
    except UnicodeDecodeError as error:
        raise BadFile(f"has text in column {columns[0]!r} that is not UTF-8 ({error.reason})") from None


def parquet_groups(path: Path, text_key: str) -> list[tuple[int, int]]:
    """Returns rows and bytes of text of each row group, as the file states them.

    Raises:
        BadFile: as `open_parquet`, or the file has no such column, or states more text than a file of its size holds.
    """
    with open_parquet(path) as file:
        columns, metadata = file.schema_arrow.names, file.metadata
    if text_key not in columns:
        raise BadFile(f"has no column {text_key!r}; set text_key ({nearest(text_key, columns)})")
    groups = range(metadata.num_row_groups)
    row_groups = [(metadata.row_group(group).num_rows, _parquet_bytes(metadata, group, text_key)) for group in groups]
    most = _most_bytes(path)
    if metadata.num_rows > most or sum(size for _, size in row_groups) > most:
        raise TooLarge(most)
    return row_groups


def check_parquet(path: Path, text_key: str) -> None:
    """Adds up the text of a Parquet file without writing out a text that it stores once for many rows.

    Raises:
        BadFile: the file is damaged, or holds more text than `read_documents` reads.
    """
    import pyarrow
    from pyarrow import compute

    held, most = 0, _most_bytes(path)
    for batch in _parquet_batches(path, [text_key], None, [text_key]):
        column = batch.column(0)
        with contextlib.suppress(pyarrow.ArrowException):  # a column without text, which the reader names
            texts = getattr(column, "dictionary", column)
            sizes = compute.binary_length(texts)
            held += compute.sum(sizes if texts is column else sizes.take(column.indices)).as_py() or 0
        if held > most:
            raise TooLarge(most)


def _parquet_bytes(metadata: typing.Any, group: int, column: str) -> int:
    """Returns the bytes of a column of a row group after decompression, as the file states them."""
    chunks = (metadata.row_group(group).column(i) for i in range(metadata.num_columns))
    return sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)


def _column_values(column: typing.Any) -> Iterator[object]:
    """Yields the values of an Arrow column; one that is a dictionary is not written out."""
    if not hasattr(column, "dictionary"):
        yield from (value.as_py() for value in column)
        return
    values = column.dictionary.to_pylist()
    for index in column.indices.to_pylist():
        yield None if index is None else values[index]
