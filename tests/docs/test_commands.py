"""Every `linnet ...` command of README, docs and study files is one that the command line takes. None is run.

Every name that a Python block imports from Linnet is there, and every link to a file or a heading of one leads there.
"""

import ast
import functools
import importlib
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from linnet.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.yaml"), *ROOT.glob("linnet/*/*.yaml")]
LINE = re.compile(r"^(?:#? {4,}|\$ )((?:[A-Z_]+=\S+ )*linnet (?:[^\n\\]|\\\n|\\.)*)", re.MULTILINE)
FENCE = re.compile(r"^```(?:bash|sh|shell|console)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`((?:[A-Z_]+=\S+ )*linnet [^`]+)`(?!`)")
SHELL = frozenset({"|", "||", "&&", "&", ";", ">", ">>", "<", "2>"})


def commands(text: str, pattern: re.Pattern) -> list[str]:
    return [" ".join(found.replace("\\\n", " ").split()) for found in pattern.findall(text)]


@functools.cache
def cases(kind: str) -> dict[str, list[str]]:
    """Commands on lines of their own, or those inside of sentences, of each page that has any."""
    pages = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if kind == "line":
            fenced = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
            own = commands(text, LINE) + [line.strip() for line in fenced if line.startswith(("linnet ", "$ linnet "))]
        else:
            own = commands(text, SPAN)
        if own:
            pages[str(page.relative_to(ROOT))] = list(dict.fromkeys(own))
    return pages


def arguments(command: str) -> list[str]:
    """Words behind `linnet`, up to a comment or an operator of the shell."""
    lexer = shlex.shlex(command.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(lexer)
    words = words[words.index("linnet") + 1 :]
    end = next((i for i, word in enumerate(words) if word in SHELL), len(words))
    return words[:end]


@functools.cache
def root():
    return get_command(app)  # 30 ms each


def check(words: list[str], whole: bool) -> None:
    """Parses the words without running anything; `whole`: required arguments must be there."""
    command, names = root(), ["linnet"]
    while hasattr(command, "commands") and words:
        own = hasattr(command, "default") and words[0] not in ("--help", "-h")  # options of the default command
        if words[0].startswith("-") and not own:
            break
        name, *words = words
        if name not in command.commands and (default := getattr(command, "default", None)):
            name, words = default, [name, *words]
        assert name in command.commands, f"{' '.join(names)} has no command {name!r}"
        command, names = command.commands[name], [*names, name]
    if hasattr(command, "commands"):
        assert set(words) <= {"--help", "-h", "--version"}, f"{' '.join(names)} takes a command"
    else:
        try:
            command.make_context(
                " ".join(names), [word for word in words if word != "..."], resilient_parsing=not whole
            )
        except Exception as error:
            raise AssertionError(f"{' '.join(names)}: {error}") from error
        known = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        for word in words:  # resilient parsing lets unknown options pass
            assert not word.startswith("--") or word == "--help" or word.partition("=")[0] in known, word


def mistakes(commands: list[str], kind: str) -> list[str]:
    """What is wrong with each command that the command line does not take."""
    wrong = []
    for command in commands:
        try:
            check(arguments(command), whole=kind == "line" and "..." not in command)
        except AssertionError as error:
            wrong.append(f"{command}: {error}")
    return wrong


@pytest.mark.parametrize(
    "kind, page", [pytest.param(kind, page, id=f"{kind}-{page}") for kind in ("line", "span") for page in cases(kind)]
)
def test_the_commands_of_a_page_are_taken(kind, page):
    assert mistakes(cases(kind)[page], kind) == []


def test_the_pages_have_commands():
    assert sum(map(len, cases("line").values())) > 60 and sum(map(len, cases("span").values())) > 40


@pytest.mark.parametrize(
    "wrong", ["evaluate RUN --text a", "trian", "train --modle x", "mad rnu", "serve", "train --steps x"]
)
def test_mistakes_are_found(wrong):
    assert mistakes([f"linnet {wrong}"], "line") != []


PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=lambda page: page.name)
def test_python_blocks_import_what_is_there(page):
    imports = [
        node
        for block in PYTHON.findall(page.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "linnet"
    ]
    lacking = [
        f"{node.module}.{alias.name}"
        for node in imports
        for alias in node.names
        if not hasattr(importlib.import_module(str(node.module)), alias.name)
    ]
    assert lacking == []


LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_without_code(page: Path) -> str:
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    )


@functools.cache
def headings(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    anchors: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        name = re.sub(r"[^\w\- ]", "", LINK.sub("]", heading).strip().lower()).replace(" ", "-")
        anchors.append(f"{name}-{anchors.count(name)}" if name in anchors else name)
    return set(anchors)


def broken(page: Path) -> list[str]:
    wrong = []
    for link in LINK.findall(text_without_code(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or anchor and target.suffix == ".md" and anchor not in headings(target):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize(
    "page", sorted(str(page.relative_to(ROOT)) for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
)
def test_links_lead_to_a_file_and_a_heading(page):
    assert broken(ROOT / page) == []


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n[a](#one-two-three) [b](#gone) [c](gone.md) [d](https://x.org/y) `[e](gone.md)`"
    )
    assert broken(page) == ["#gone", "gone.md"]
