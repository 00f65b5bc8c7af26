"""Reads the cells of a table of runs as text: CSV, TSV, JSONL or a JSON array, plain or gzipped."""

import csv
import gc
import gzip
import io
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pandas as pd

from linnet.config import MOST_TEXT, ConfigError, first_names, refuse

LONGEST = 16 * 2**20
"""Largest number of characters of one cell."""
LARGE = 2**20
"""Number of characters of a text from which the time of reading it counts."""
SHOWN = 12
"""Largest number of lines that a message names."""


def read_cells(path: Path) -> pd.DataFrame:
    """Returns the cells of a file as text. The index is the line number in the file; `attrs["note"]` may hold a note.

    A file is JSONL if its name ends in .jsonl or .ndjson (or the same with .gz), or if it begins with a brace. It is an
    array of JSON objects if it begins with a bracket; their numbers then replace line numbers.

    Raises:
        ConfigError: lists every problem: no such file, not text, lines that are not JSON objects, ragged rows, a column
            that occurs twice, no rows.
    """
    text = _text(path)
    collecting = gc.isenabled()
    gc.disable()  # a million rows are a million lists, and collecting them takes longer than reading
    try:
        return _parse(text, path)
    finally:
        if collecting:
            gc.enable()


def _parse(text: str, path: Path) -> pd.DataFrame:
    if path.name.removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson")) or text.lstrip()[:1] in ("{", "["):
        return _read_json(text, path)
    return _read_csv(text, path)


def unended_note(text: str) -> str:
    """Returns a note on a CSV whose last line has no line end; "" if it has one, or its last cell is not a number.

    Spreadsheets may leave the line end out. A file that is cut off lacks it too, and its last number may be another.
    """
    last = text.rpartition("\n")[2].strip()
    cell = re.split("[,;\t]", last)[-1].strip()
    if text.endswith(("\n", "\r")) or not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d*)?", cell.lower()):
        return ""
    number = text.count("\n") + 1
    return f"line {number}: the last line has no line end, so if the file was cut off, {cell} may be a part of a number"


def lines_of(numbers) -> str:
    """Returns line numbers as text: `line 3`, `lines 3, 4 and 10 more`."""
    listed = [str(number) for number in numbers]
    return ("line " if len(listed) == 1 else "lines ") + first_names(listed, SHOWN)


def _text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError([f"{path}: a folder, not a table; give a CSV or JSONL file"], "table")
    if path.exists() and not path.is_file():
        raise ConfigError([f"{path}: not a regular file; give a CSV or JSONL file"], "table")
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as file:
            content = file.read(MOST_TEXT + 1)
        if len(content) > MOST_TEXT:
            raise ConfigError([f"{path}: has more than {MOST_TEXT:,} bytes; give a table of runs"], "table")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file or folder"], "table") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError([f"a damaged gzip file ({error}); write it again"], str(path)) from None
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError([f"cannot be read as UTF-8 text: {error}"], str(path)) from None
    if "\0" in text:
        raise ConfigError(["contains NUL bytes, so it is a binary file; give a CSV"], str(path))
    return text


def _read_csv(text: str, path: Path) -> pd.DataFrame:
    header = text.partition("\n")[0]
    separator = max(",;\t", key=header.count)
    cells = _read_plain(text, separator)
    cells = _read_unusual(text, separator, path) if cells is None else cells
    cells.attrs["note"] = unended_note(text)
    return cells


def _read_unusual(text: str, separator: str, path: Path) -> pd.DataFrame:
    before = csv.field_size_limit(LONGEST)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        rows = [(reader.line_num, row) for row in reader if "".join(row).strip()]
    except csv.Error as error:
        reason = f"line {reader.line_num + 1}: {error}; look for a quote that is not closed"
        raise ConfigError([reason], str(path)) from None
    finally:
        csv.field_size_limit(before)
    if not rows:
        raise ConfigError(["empty: a table needs a header line and rows"], str(path))
    names = [name.strip() for name in rows[0][1]]
    problems = [
        f"column {name!r} occurs twice; rename one" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    body = rows[1:]
    ragged = [number for number, row in body if len(row) != len(names)]
    if ragged:
        problems.append(f"{lines_of(ragged)}: the number of cells is not {len(names)}, as in the header")
    if not body:
        problems.append("has a header but no rows; add one row per run")
    refuse(problems, str(path))
    columns = dict(zip(names, zip(*(row for _, row in body), strict=True), strict=True))
    return pd.DataFrame(columns, index=[number for number, _ in body], dtype=object)


def _read_plain(text: str, separator: str) -> pd.DataFrame | None:
    """Returns the cells of a file of many lines without quotes, spaces around cells or mistakes; else None.

    One split of the whole text takes a fifth of the time of a CSV reader. Everything unusual is left to the reader,
    which names the lines.
    """
    unusual = {'"', "\r", "\t", separator + " ", "\n "} - {separator}
    if len(text) < LARGE or any(mark in text for mark in unusual):
        return None
    text = text.rstrip("\n")
    names = [name.strip() for name in text.partition("\n")[0].split(separator)]
    width = len(names)
    content = np.frombuffer(text.encode(), dtype=np.uint8)
    ends = np.append(np.flatnonzero(content == ord("\n")), len(content))
    marks = np.searchsorted(np.flatnonzero(content == ord(separator)), ends)
    lengths = np.diff(ends) - 1
    if len(set(names)) < width or len(ends) < 2 or lengths.max() > LONGEST:
        return None
    # A row without a cell is as long as its separators.
    if (np.diff(marks, prepend=0) != width - 1).any() or lengths.min() < width:
        return None
    cells = text.replace("\n", separator).split(separator)
    columns = {name: cells[width + place :: width] for place, name in enumerate(names)}
    return pd.DataFrame(columns, index=np.arange(2, len(ends) + 1), dtype=object)


def _read_json(text: str, path: Path) -> pd.DataFrame:
    rows, numbers, problems = [], [], []
    try:
        items = json.loads(text) if text.lstrip()[:1] == "[" else text.splitlines()
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"not a JSON array ({error}); write [{{...}}, ...], an object per run"], str(path)) from None
    for number, row in enumerate(items, 1):
        if isinstance(row, str) and not row.strip():
            continue
        try:
            row = json.loads(row) if isinstance(row, str) else row
        except (ValueError, RecursionError):
            problems.append(f"line {number}: not JSON; write one object per line, or an array of objects")
            continue
        if not isinstance(row, dict):
            problems.append(f"line {number}: not a JSON object; write one object per run")
            continue
        rows.append({str(key).strip(): "" if value is None else str(value) for key, value in row.items()})
        numbers.append(number)
    refuse(problems, str(path), SHOWN)
    if not rows:
        raise ConfigError(["empty: write one JSON object per run"], str(path))
    return pd.DataFrame(rows, index=numbers, dtype=object).fillna("")
