"""Filters that keep or drop a whole document, after the rules have cleaned it.

Each is a pure function of a text that returns a measure; the settings say which measures are kept. The two about
repetition follow Rae et al. 2021 (arXiv:2112.11446, table A1), but count characters, so that they mean the same in
languages without spaces between words.
"""

import re
import typing
import unicodedata
from collections.abc import Mapping
from functools import cache
from pathlib import PurePosixPath

import numpy as np
from pydantic import Field, ValidationInfo, field_validator, model_validator

from linnet.config import Config, shown


class Switch(Config):
    """A rule without settings of its own. `false` in a file turns it off, `true` on."""

    enabled: bool = Field(True, description="false leaves the rule out")

    @model_validator(mode="before")
    @classmethod
    def _switched(cls, values: typing.Any) -> typing.Any:
        if isinstance(values, bool):
            return {"enabled": values}
        if not isinstance(values, Mapping | Switch):
            raise ValueError(f"{shown(values)} is not a setting of a rule; write true, false or its settings")
        return values


MOST = 1_000_000  # characters of a document that `repeated_ngrams` and `letters` look at: memory stays bounded

# U+FFFD, control characters that are not white space, noncharacters.
BROKEN = "\x00-\x08\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ufdd0-\ufdef\ufffd-\uffff"
_BROKEN = re.compile(f"[{BROKEN}]")


class Broken(Switch):
    """Documents that were decoded wrongly, or are not text."""

    share: float = Field(
        0.05, ge=0, le=1, description="largest share of replacement and control characters, outside of spans"
    )


class Length(Switch):
    """Documents that are too short to learn from, or too long."""

    shortest: int = Field(64, ge=0, description="smallest number of bytes in UTF-8")
    longest: int | None = Field(None, ge=1, description="largest number of bytes in UTF-8; null: no limit")

    @field_validator("longest")
    @classmethod
    def _above_shortest(cls, longest: int | None, info: ValidationInfo) -> int | None:
        shortest = info.data.get("shortest", 0)
        if longest is not None and longest < shortest:
            raise ValueError(f"{longest} is below shortest: {shortest}, so every document would be dropped; raise it")
        return longest


class Letters(Switch):
    """Documents of numbers and symbols."""

    share: float = Field(
        0.4, ge=0, le=1, description="smallest share of letters and their marks among characters that are not spaces"
    )


class RepeatedLines(Switch):
    """Documents of menus, notices and other lines that repeat."""

    share: float = Field(0.3, ge=0, le=1, description="largest share of characters in lines that came before")


class RepeatedNgrams(Switch):
    """Documents that repeat themselves inside of lines."""

    length: int = Field(50, ge=5, le=1000, description="characters of an n-gram")
    share: float = Field(0.3, ge=0, le=1, description="largest share of n-grams that came before")


def broken(text: str) -> float:
    """Returns the share of characters that say that a text was decoded wrongly, or is not text."""
    if text.isascii() and text.isprintable() or not text:
        return 0.0
    return len(_BROKEN.findall(text)) / len(text)


@cache
def _classes() -> np.ndarray:
    """Returns the class of every code point: 0 white space, 1 letter or mark, 2 other."""
    classes = np.full(0x110000, 2, np.uint8)
    for code in range(0x40000):  # letters end in the third plane
        if unicodedata.category(chr(code))[0] in "LM":
            classes[code] = 1
        elif chr(code).isspace():
            classes[code] = 0
    return classes


def _codes(text: str) -> np.ndarray:
    if text.isascii():
        return np.frombuffer(text.encode(), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def letters(text: str) -> float:
    """Returns the share of letters and combining marks among the characters that are not white space."""
    counts = np.bincount(_classes()[_codes(text[:MOST])], minlength=3)
    return float(counts[1] / max(1, counts[1] + counts[2]))


def repeated_lines(text: str) -> float:
    """Returns the share of characters in lines that are equal to a line before them, without white space around."""
    seen: set[str] = set()
    total = repeated = 0
    for line in map(str.strip, text[:MOST].split("\n")):
        total += len(line)
        if line in seen:
            repeated += len(line)
        seen.add(line)
    return repeated / max(1, total)


@cache
def _all_powers(size: int, base: int) -> np.ndarray:
    powers = np.full(size, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _powers(count: int, base: int) -> np.ndarray:
    """Returns base^0, base^1, ... modulo 2^64; at most 16 MB stay in memory for each base."""
    return _all_powers(1 << (count - 1).bit_length(), base)[:count]


def repeated_ngrams(text: str, length: int) -> float:
    """Returns the share of n-grams of characters that are equal to one before them.

    Of a long text, one n-gram in 16 is looked at: those whose hash is divisible by 16, which are the same wherever they
    stand.

    Args:
        length: characters of an n-gram.
    """
    codes = _codes(text[:MOST])
    if len(codes) <= length:
        return 0.0
    # A polynomial in an odd base modulo 2^64, which has an inverse: the sum of a window, shifted to the start.
    base = 0x9E3779B97F4A7C15
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(1)) * _powers(len(codes), base), out=sums[1:])
    hashes = (sums[length:] - sums[:-length]) * _powers(len(sums) - length, pow(base, -1, 1 << 64))
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(32)
    if len(hashes) > 4096:
        some = hashes[(hashes & np.uint64(15)) == 0]
        # Far fewer than one in 16: there are few different ones, so that a part of the text says enough.
        hashes = some if len(some) > len(hashes) // 64 else hashes[:65_536]
    return 1 - len(np.unique(hashes)) / len(hashes)


# Tells source code from prose, so that rules for prose leave code as it is.

Kind = typing.Literal["prose", "code"]

# Files of programs, of their data and of their builds. HTML, Markdown, LaTeX and reStructuredText are prose.
CODE = frozenset(
    ".ada .asm .awk .bash .bat .bzl .c .cc .cfg .clj .cmake .cpp .cs .css .csv .cu .cuh .cxx .d .dart .diff .el "
    ".erl .ex .exs .f .f90 .fs .go .gradle .groovy .h .hh .hpp .hs .ini .ipynb .java .jl .js .jsx .kt .lean "
    ".lisp .lock .lua .m4 .mjs .mk .ml .mli .nim .nix .pas .patch .php .pl .pm .proto .ps1 .py .pyi .pyx .r .rb "
    ".rkt .rs .s .scala .scm .scss .sh .sol .sql .swift .tcl .tf .toml .ts .tsv .tsx .v .vb .vhd .vim .vue .xml "
    ".yaml .yml .zig .zsh".split()
)
_NAMES = frozenset({"makefile", "dockerfile", "cmakelists.txt", "meson.build", "build.bazel"})
_PACKED = frozenset({".gz", ".zst"})
_ROWS = frozenset({".json", ".jsonl", ".ndjson", ".parquet"})  # of any kind

MOST_LINES = 400  # looked at; the beginning of a program says what it is
SHARE = 0.2  # of the lines that look like statements; comments, strings and continued lines do not
_LINE = re.compile(
    r"[ \t]*+(?!<)(?:"
    r"(?:def|class|async def|fn|func|function|struct|enum|impl|interface|namespace|package|module|typedef|template)\b"
    r"[^.]*+[({:;]\s*+$"
    r"|(?:import|from|using|use|require|export|include)\b[ \t]++[\w.:*\"'<>{}, /@-]++(?:[ \t]import\b.*+)?;?$"
    r"|#\s*+(?:include|define|ifdef|ifndef|endif|pragma|undef)\b"
    r"|(?:public|private|protected|static|const|let|var|val|mut|final|extern|void|int|char|float|double|bool|auto)\b"
    r".*(?:[;{(,)]$|=)"
    r"|(?:if|elif|else|for|while|with|try|except|finally|switch|case|do|match)\b[^.]*+[:{]$"
    r"|(?:return|yield|raise|throw|break|continue|pass|assert|del|await|goto|echo)\b"
    r"(?:;|$|[ \t]++[^ \t]++;?$|.*+[()\[\]=;].*+$)"
    r"|@\w[\w.]*+(?:\(.*+)?$"
    r"|(?:[}\])]++[;,)]*+|[{(\[]|\*/|/\*.*+|//.*+|\"\"\"|'''|end)$"
    r"|(?:self|this)[.]\w"
    r"|[\w.\[\]\"'*&>-]++(?:[ \t]*+:[ \t]*+[\w.\[\], |]++)?[ \t]*+(?:[-+*/|&^%]|<<|>>|:)?=(?!=)"
    r"|[\w.:]++(?:->\w++)?\(.*+[,;({)]$"
    r"|.*+(?<=[;{}])(?<=[)\]\"'][;{]|[ \t)][{]|.[}])$"
    r")"
)


def kind_of_file(file: str) -> Kind | None:
    """Returns what a file's name says of its text; None if it says nothing, as that of a file of rows."""
    path = PurePosixPath(file.lower())
    if path.suffix in _PACKED:
        path = path.with_suffix("")
    if path.suffix in _ROWS or not path.suffix and path.name not in _NAMES:
        return None
    return "code" if path.suffix in CODE or path.name in _NAMES else "prose"


def looks_like_code(text: str) -> bool:
    """Returns whether a fifth of the first lines have the form of statements, whatever the language.

    Pages of HTML and Markdown with fenced code are prose. A guess; docs/corpus.md says how often it is wrong.
    """
    if text.startswith("```") or "\n```" in text or text[:200].lstrip().lower().startswith(("<!doctype", "<html")):
        return False
    lines: list[str] = []
    position = 0
    while len(lines) < MOST_LINES and position < len(text):
        end = text.find("\n", position)
        end = len(text) if end < 0 else end
        line = text[position : min(end, position + 200)].rstrip()
        if line.strip():
            lines.append(line)
        position = end + 1
    return len(lines) >= 5 and sum(_LINE.match(line) is not None for line in lines) >= SHARE * len(lines)
