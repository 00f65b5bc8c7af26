"""Tells source code from prose, so that rules for prose leave code as it is."""

import re
import typing
from pathlib import PurePosixPath

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
