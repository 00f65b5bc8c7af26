"""Sources of text as documents that keep their identity through all stages, in parts that are fixed by the inputs.

A document is known by (source, file, row): ids inside of data repeat. A JSONL file has one document per line, a JSON
file one per item, a Parquet file one per row, and a text file is one document; a text file of more than `PIECE` bytes
is cut at line ends. What cannot be read is left out, counted by kind and sampled with its reason: broken encodings,
lines over `LONGEST` bytes (skipped while streaming), rows without text, and the rest of a compressed file after the
place where it is damaged.
"""

import glob
import hashlib
import itertools
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from linnet.data import hub, records, sources
from linnet.data.parts import Part
from linnet.data.records import BadFile, BadRow, EmptyRow, SourceFile

PARTS = 64  # of the inputs, roughly: enough to share them among workers
SMALLEST, LARGEST = 1 << 20, 64 << 20  # bytes of text in one part, roughly: at least, and at most
PIECE = 16 << 20  # bytes from which a text file is cut, at the next end of a line
LONGEST = 32 << 20  # most bytes of a line, and of the text of a row
ESCAPED = 8  # a line of a stage has at most this many times the bytes: JSON writes a control character in six
SHRINKS = 4  # bytes of text per compressed byte, roughly; only balances parts
BLOCK = 1 << 20
KEPT = 5  # samples kept per name
CLIPPED = 400  # most characters of a value in a sample
_LABEL = re.compile(r"[\w][\w.+-]*")


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it comes from.

    Attributes:
        source: label of the source on the command line.
        file: path of the file below the source.
        row: number of the line, of the row or of the piece in the file, from 0.
        extra: JSON values: the other keys of a JSONL row, and values that stages add.
    """

    text: str
    source: str
    file: str
    row: int
    extra: dict = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file.

    Attributes:
        path: the file on this machine.
        kind: "text", "jsonl", "json", "parquet" or "stage" (a shard of an earlier stage).
        source, file: as in `Document`.
        start, end: bytes (text and JSONL) or row groups (Parquet); end -1 is the end of the file.
        row: number of the first row.
        size: bytes of text, roughly.
    """

    path: Path
    kind: str
    source: str
    file: str
    text_key: str
    start: int
    end: int
    row: int
    size: int


class Samples:
    """A few examples per name, chosen by a hash of their documents: the same ones in any order of reading."""

    def __init__(self) -> None:
        self._found: dict[str, dict[tuple, dict]] = {}

    def wants(self, name: str, document: Document) -> bool:
        """Whether `add` would keep this example; ask before an expensive one is made."""
        kept = self._found.get(name, {})
        return len(kept) < KEPT or _place(document) < max(kept)

    def add(self, name: str, document: Document, **values: object) -> None:
        """Keeps an example of a document; long text in `values` is clipped."""
        if not self.wants(name, document):
            return
        kept = self._found.setdefault(name, {})
        origin = {"source": document.source, "file": document.file, "row": document.row}
        kept.setdefault(_place(document), origin | {key: _clipped(value) for key, value in values.items()})
        while len(kept) > KEPT:
            del kept[max(kept)]

    def merge(self, dumped: dict[str, list]) -> None:
        """Adds what `dump` returned, possibly read from JSON."""
        for name, examples in dumped.items():
            kept = self._found.setdefault(name, {})
            kept |= {tuple(place): values for place, values in examples}
            for place in sorted(kept)[KEPT:]:
                del kept[place]

    def dump(self) -> dict[str, list]:
        """Returns the examples with their places, for `merge`."""
        return {name: sorted(kept.items(), key=lambda pair: pair[0]) for name, kept in sorted(self._found.items())}

    def values(self) -> dict[str, list[dict]]:
        """Returns the examples by name."""
        return {name: [values for _, values in examples] for name, examples in self.dump().items()}


@dataclass
class Inputs:
    """All that a stage reads.

    Attributes:
        parts: the units of work.
        described: per source: label, kind ("files" or "stage"), number of files, bytes, and a digest of the content;
            no path of this machine.
        labels: labels of the sources of the documents.
        history: `stage.json` of all stages before this one, oldest first, without samples.
        skipped: files of folders that are not read, with the reason.
    """

    parts: list[Part] = field(default_factory=list)
    described: list[dict] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    history: list[dict] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    _stamps: dict[Path, tuple] = field(default_factory=dict)

    def changed(self) -> list[Path]:
        """Returns the files that have changed since they were found."""
        return [path for path, stamp in self._stamps.items() if not path.is_file() or stamp_of(path) != stamp]


def find_parts(
    names: list[str], key: str, problems: list[str], skipped: list[str], text_key: str = "text"
) -> list[Part]:
    """Returns the parts of sources; the arguments are those of `find_inputs`."""
    inputs = find_inputs(names, key, problems, text_key)
    skipped += inputs.skipped
    return inputs.parts


def find_inputs(names: list[str], key: str, problems: list[str], text_key: str = "text") -> Inputs:
    """Finds the files of sources, reads them once for their digests, and cuts them into parts.

    Args:
        names: folders, files, globs, "stdlib", names on the Hub, and folders of earlier stages, whose shards are
            compared with their SHA-256. `label=SOURCE` gives a label.
        key: name of the option, for messages.
        problems: problems are appended here, one line each.
        text_key: key (JSONL) or column (Parquet) of the text.
    """
    inputs = Inputs()
    resolved = check_sources(names, key, problems)
    sizes = (_size(file, source.stage) for source in resolved for file in source.files)
    part = max(SMALLEST, min(sum(sizes) // PARTS, LARGEST))
    pieces: list[Piece] = []
    for source in resolved:
        inputs.labels += [label for label in source.labels if label not in inputs.labels]
        if source.stage is None:
            pieces += _of_files(source, key, text_key, part, problems, inputs)
        else:
            pieces += _of_stage(Path(source.path).expanduser(), source.stage, key, problems, inputs)
    inputs.parts = _pack(pieces, part)
    return inputs


@dataclass(frozen=True)
class Resolved:
    """A source: its path (or other name), the labels of its documents, its files, and its `stage.json` if it is one."""

    path: str
    labels: list[str]
    files: list[SourceFile]
    skipped: list[str]
    stage: dict | None


def check_sources(names: list[str], key: str, problems: list[str]) -> list[Resolved]:
    """Finds the files of sources without reading all of their content; the arguments are those of `find_inputs`."""
    resolved: list[Resolved] = []
    owners: dict[str, str] = {}
    if not names:
        problems.append(f"{key}: no source is given; name a file, a folder, a glob or {sources.STDLIB!r}")
    for name in names:
        label, path = _labelled(name)
        stage = sources.read_stage(Path(path).expanduser()) if path and "\0" not in path else None
        before = len(problems)
        if stage is not None and label:
            problems.append(f"{key}: {name!r} is a stage, whose documents have labels; name it without {label}=")
        skipped: list[str] = []
        files = sources.find_files([path], key, problems, skipped)
        if letters := [file.path for file in files if file.kind == "fasta"]:
            problems.append(f"{key}: {letters[0]} is FASTA, which has no text to clean; leave it out")
        if len(problems) > before:
            continue
        labels = [label or _label(path)] if stage is None else stage["labels"]
        for source in labels:
            if source in owners:
                fix = f"give one a label: {source}-2={path}" if stage is None else "clean their sources in one command"
                problems.append(f"{key}: {owners[source]!r} and {name!r} both have the label {source!r}; {fix}")
            owners.setdefault(source, name)
        folders = sorted({file.path.parent for file in files if stage is None})
        if inner := [folder for folder in folders if sources.read_stage(folder) is not None]:
            problems.append(f"{key}: {name!r} holds the stage {inner[0]}; name the folders that you mean, stages apart")
        resolved.append(Resolved(path, labels, files, skipped, stage))
    return resolved


def around(out: Path, names: Sequence[str]) -> list[str]:
    """Returns the sources that are folders around `out`, or that folder."""
    folders = {name: Path(_labelled(name)[1]).expanduser() for name in names if "\0" not in name}
    return [name for name, path in folders.items() if path.is_dir() and out.resolve().is_relative_to(path.resolve())]


def read_part(part: Part, counts: Counter, samples: Samples | None = None) -> Iterator[Document]:
    """Yields the documents of a part that have text.

    Args:
        counts: `documents read/LABEL` and `bytes read/LABEL` are counted here, and `unreadable.KIND` for what is left
            out.
        samples: gets examples of what is left out, under the same names.
    """
    for piece in part.pieces:

        def refuse(row: int, kind: str, reason: object, piece: Piece = piece) -> None:
            counts[f"unreadable.{kind}"] += 1
            if samples is not None:
                samples.add(f"unreadable.{kind}", Document("", piece.source, piece.file, row), reason=str(reason))

        for document in (_read_text if piece.kind == "text" else _read_rows)(piece, refuse):
            counts[f"documents read/{document.source}"] += 1
            counts[f"bytes read/{document.source}"] += len(document.text.encode())
            yield document


def encode(document: Document) -> bytes:
    """Returns a document as a line of JSON, as a shard holds it."""
    values = {"text": document.text, "source": document.source, "file": document.file, "row": document.row}
    if document.extra:
        values["extra"] = document.extra
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


_Refuse = Callable[[int, str, object], None]


def _read_text(piece: Piece, refuse: _Refuse) -> Iterator[Document]:
    """Yields the pieces of a text file, each cut at the first end of a line after `PIECE` bytes."""
    row, size = piece.row, 0
    held: list[bytes] = []
    try:
        for block in records.read_lines(_file(piece), piece.start, piece.end, LONGEST, blocks=True):
            while block:
                end = block.find(b"\n", max(0, PIECE - size - 1)) + 1 or len(block)
                lines, block = block[:end], block[end:]
                size += end
                if size > LONGEST:
                    refuse(row, "too long", f"has a line of more than {LONGEST - PIECE:,} bytes")
                    lines = lines[: lines.rfind(b"\n", 0, -1) + 1]
                held.append(lines)
                if size >= PIECE:
                    yield from _decoded(held, piece, row, refuse)
                    row, held, size = row + 1, [], 0
        yield from _decoded(held, piece, row, refuse)
    except BadFile as error:
        yield from _decoded(held, piece, row, refuse)
        refuse(row, error.kind, f"{error}; the rows before are kept")


def _decoded(lines: list[bytes], piece: Piece, row: int, refuse: _Refuse) -> Iterator[Document]:
    try:
        if text := b"".join(lines).removeprefix(records.BOM if row == 0 else b""):
            yield Document(records.decode_text(text), piece.source, piece.file, row)
    except BadRow as error:
        refuse(row, error.kind, error)


def _read_rows(piece: Piece, refuse: _Refuse) -> Iterator[Document]:
    row = piece.row - 1
    longest = {"stage": LONGEST * ESCAPED, "json": records.ENDLESS}.get(piece.kind, LONGEST)
    key = piece.text_key
    try:
        for row, values, _ in records.read_rows(_file(piece), key, piece.start, piece.end, piece.row, longest):
            if isinstance(values, BadRow):
                empty = f"the value of {key!r} is " if isinstance(values, EmptyRow) else ""
                refuse(row, values.kind, f"{empty}{values}")
                continue
            if piece.kind == "stage":
                origin = (values["source"], values["file"], values["row"], values.get("extra", {}))
                yield Document(values[key], *origin)
                continue
            extra = {name: value for name, value in values.items() if name != key}
            try:
                if extra:
                    json.dumps(extra, ensure_ascii=False, allow_nan=False).encode()
            except (ValueError, RecursionError):  # also half a surrogate pair, and infinity
                refuse(row, "not JSON", "has a key or value that JSON in UTF-8 cannot hold, next to its text")
                continue
            yield Document(values[key], piece.source, piece.file, row, extra)
    except BadRow as error:
        reason = f"{error}; the rows before are kept" if isinstance(error, BadFile) else error
        refuse(row + 1, error.kind, reason)


def _file(piece: Piece) -> SourceFile:
    stage = piece.kind == "stage"
    return SourceFile(piece.path, "jsonl" if stage else piece.kind, False, stage)


def _labelled(name: str) -> tuple[str, str]:
    """Returns the label ("" if none is given) and the source of `label=SOURCE`."""
    label, equals, rest = name.partition("=")
    if equals and _LABEL.fullmatch(label) and not os.path.lexists(os.path.expanduser(name)):
        return label, rest
    return "", name


def _label(name: str) -> str:
    """Returns the last part of a source without suffixes, as a label."""
    if name == sources.STDLIB:
        return name
    if hub.is_name(name):
        return name.removeprefix("hf:").partition(":")[0].rpartition("/")[2]
    path = Path(name).expanduser()
    if not path.exists() and glob.has_magic(name):
        path = _root(name)
    path = path if path.name not in ("", "..") else path.resolve()
    stem = path.name
    if not path.is_dir():
        stem = path.stem if path.suffix.lower() in records.COMPRESSED else stem
        stem = Path(stem).stem
    return _printable(stem) or "root"


def _root(name: str, files: list[SourceFile] | None = None) -> Path:
    """Returns the folder below which the files of a source are named."""
    if name == sources.STDLIB:
        return sources.stdlib_folder()
    if hub.is_name(name):
        return Path(os.path.commonpath([file.path.parent for file in files or []]))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        return path.parent
    parts = path.parts
    return Path(*parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])


def _printable(name: str) -> str:
    """Returns a name of a file, whose bytes may be no UTF-8, as text."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _size(file: SourceFile, stage: dict | None) -> int:
    """Returns the bytes of text of a file, roughly."""
    compressed = stage is not None or file.path.suffix.lower() in records.COMPRESSED
    return file.path.stat().st_size * (SHRINKS if compressed else 1)


def _of_files(source: Resolved, key: str, text_key: str, part: int, problems: list[str], inputs: Inputs) -> list[Piece]:
    name, (label,), skipped = source.path, source.labels, source.skipped
    before, root = len(problems), _root(name, source.files)
    pieces, content, size = [], [], 0
    for file in source.files:
        below = _printable(file.path.relative_to(root).as_posix())
        try:
            stamp = stamp_of(file.path)  # before it is read, so that a change from then on is seen
            file_pieces, sha256 = _cut(file, label, below, text_key, part)
        except (BadFile, OSError) as error:
            reason = f"{file.path}: {getattr(error, 'strerror', None) or error}"
            (problems if file.named else skipped).append(f"{key}: {reason}" if file.named else reason)
            continue
        inputs._stamps[file.path] = stamp
        pieces += file_pieces
        content.append([below, file.kind, sha256])
        size += file.path.stat().st_size
    place = f"{root}{os.sep}"
    inputs.skipped += [f"{label}: {_printable(line.removeprefix(place))}" for line in skipped]
    described = {"label": label, "kind": "files", "files": len(content), "bytes": size, "text_key": text_key}
    inputs.described.append(described | {"digest": hashlib.sha256(json.dumps(content).encode()).hexdigest()})
    if not content and len(problems) == before:
        problems.append(f"{key}: {name!r} has no file that can be read; the first: {skipped[0]}")
    return pieces


def _cut(file: SourceFile, label: str, below: str, text_key: str, part: int) -> tuple[list[Piece], str]:
    """Returns the pieces of a file and its SHA-256."""
    path, kind = file.path, file.kind
    if kind == "parquet":
        pieces, row, start, size, first = [], 0, 0, 0, 0
        groups = records.parquet_groups(path, text_key)
        records.check_parquet(path, text_key)
        for number, (rows, held) in enumerate(groups, 1):
            row, size = row + rows, size + held
            if size >= part or number == len(groups):
                pieces.append(Piece(path, kind, label, below, text_key, start, number, first, size))
                start, size, first = number, 0, row
        return pieces, sources.fingerprint(path)
    if kind == "json" or path.suffix.lower() in records.COMPRESSED:
        return [Piece(path, kind, label, below, text_key, 0, -1, 0, _size(file, None))], sources.fingerprint(path)
    places, sha256 = _line_starts(path, PIECE if kind == "text" else part)
    pieces = [
        Piece(path, kind, label, below, text_key, start, end, number if kind == "text" else row, end - start)
        for number, ((start, row), (end, _)) in enumerate(itertools.pairwise(places))
    ]
    return pieces, sha256


def _line_starts(path: Path, every: int) -> tuple[list[tuple[int, int]], str]:
    """Reads a file once.

    Returns:
        Byte and number of a line at the start, at the first line start after each `every` bytes, and at the end; and
        the SHA-256 of the file.
    """
    digest, places = hashlib.sha256(), [(0, 0)]
    position, rows, target = 0, 0, every - 1
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if position + len(block) > target:
                end = block.find(b"\n", max(0, target - position)) + 1
                if end:
                    places.append((position + end, rows + block.count(b"\n", 0, end)))
                    target = position + end + every - 1
            rows += block.count(b"\n")
            position += len(block)
    if places[-1][0] < position:
        places.append((position, rows))
    return places, digest.hexdigest()


def _of_stage(folder: Path, stage: dict, key: str, problems: list[str], inputs: Inputs) -> list[Piece]:
    pieces = []
    for shard in stage["shards"]:
        path = folder / shard["name"]
        inputs._stamps[path] = stamp_of(path)
        if sources.fingerprint(path) != shard["sha256"]:
            problems.append(f"{key}: {path}: changed since the stage was written; make {folder} again")
        if shard["documents"]:
            pieces.append(Piece(path, "stage", "", shard["name"], "text", 0, -1, 0, shard["text_bytes"]))
    described = {"label": stage["stage"], "kind": "stage", "files": len(stage["shards"])}
    size = sum(shard["bytes"] for shard in stage["shards"])
    inputs.described.append(described | {"bytes": size, "digest": sources.fingerprint(folder / sources.STAGE)})
    record = {name: value for name, value in stage.items() if name not in ("history", "samples")}
    inputs.history += [entry for entry in [*stage["history"], record] if entry not in inputs.history]
    return pieces


def _pack(pieces: list[Piece], part: int) -> list[Part]:
    parts: list[Part] = []
    held: list[Piece] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += piece.size
        if size >= part:
            parts.append(Part(len(parts), tuple(held)))
            held, size = [], 0
    if held:
        parts.append(Part(len(parts), tuple(held)))
    return parts


def stamp_of(path: Path) -> tuple:
    """Returns what changes when a file is written again: its size and time."""
    state = path.stat()
    return state.st_size, state.st_mtime_ns


def _place(document: Document) -> tuple:
    name = f"{document.source}\0{document.file}\0{document.row}"
    return zlib.crc32(name.encode()), document.source, document.file, document.row


def _clipped(value: object) -> object:
    return f"{value[:CLIPPED]}..." if isinstance(value, str) and len(value) > CLIPPED else value
