"""Writes docs/papers.md from the items, so that a row cannot name a command that does not exist."""

from collections.abc import Iterable

from linnet.config import grouped
from linnet.papers.item import Erratum, Form
from linnet.papers.library import Entry, Library

COMMAND = "linnet reproduce --markdown > docs/papers.md"
OTHER = "other"  # work that is not one of the papers
HEAD = f"""# From the papers to files and commands

Where is this equation, table or figure of a paper in the code, and which command reproduces it?

    linnet reproduce                       # every table and figure: state, data, hardware, cost
    linnet reproduce 000 table7            # its reduced form, beside the printed numbers, with verdicts
    linnet models                          # recipes with the papers' sizes: parameters and FLOPs

Linnet cites the papers by number:

{{papers}}

This page is written by `{COMMAND}` from the items in `linnet/papers/items`.
[reproduce.md](reproduce.md) says how to read a verdict and how to add an item.
"""
STATES = """A state is **complete** (the full and the reduced form are true; an item without forms is a formula, a
setting or a timing, which its tests or commands show), **partial** (only a part of it can be run, or one of the
forms) or **printed** (nothing of it can be run; `linnet reproduce` lists it).
"""


def write_markdown(library: Library) -> str:
    """Returns the text of docs/papers.md."""
    named = "\n".join(
        f'- {key}: "{paper.title}" ({paper.name})' for key, paper in library.papers.items() if key != OTHER
    )
    parts = [HEAD.format(papers=named), STATES]
    for key, paper in library.papers.items():
        parts.append(f"## {paper.title}\n" if key == OTHER else f"## {key}, {paper.name or paper.title}\n")
        if paper.about:
            parts.append(f"{paper.about.strip()}\n")
        entries = library.of(key)
        if entries:
            rows = [_row(entry) for entry in entries]
            head = ("table or figure", "state", "where", "command", "reduced", "full")
            parts.append(_table(head, rows))
        if paper.parts:
            rows = [(part.what, part.where, part.see) for part in paper.parts]
            parts.append(_table(("equation or section", "where", "command or test"), rows))
        errata = [*paper.errata, *(line for entry in entries for line in _errata(entry))]
        if errata:
            title = paper.errata_title or f"Errata of {key}:"
            parts.append(f"{title.strip()}\n\n" + "\n".join(f"- {_one_line(line)}" for line in errata) + "\n")
        if notes := [(entry, entry.item.note) for entry in entries if entry.item.note]:
            lines = [f"- {_source(entry)}: {_one_line(note)}" for entry, note in notes]
            parts.append(f"Notes on {key}:\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _row(entry: Entry) -> tuple[str, ...]:
    item = entry.item
    calls = [f"linnet reproduce {entry.key}"] if item.reduced and item.reduced.steps else []
    if not calls and item.full and item.full.steps:
        calls = [f"linnet reproduce {entry.key} --scale full"]
    commands = ", ".join(f"`{command}`" for command in [*calls, *item.commands])
    tests = ", ".join(f"`{test}`" for test in item.tests)
    where = ", ".join(f"`{path}`" for path in item.where)
    return (
        f"{_source(entry)}, {item.title}",
        item.state,
        where,
        "; ".join(part for part in (commands, tests) if part),
        _form(item.reduced),
        _form(item.full),
    )


def _source(entry: Entry) -> str:
    if entry.item.published:
        return entry.item.published.source
    for start, word in (("table", "Table"), ("fig", "Figure"), ("eq", "Equations"), ("appendix", "Appendix")):
        if entry.name.startswith(start):
            return f"{word} {entry.name.removeprefix(start)}"
    return entry.name


def _form(form: Form | None) -> str:
    if form is None:
        return "-"
    if not form.steps:
        return f"not yet: {_one_line(form.skip or '')}"
    device = {"cpu": "CPU", "gpu": "GPU", "cluster": "cluster"}[form.device]
    time = "" if form.minutes is None else f" {_time(form.minutes, form.device == 'cluster')}"
    told = " (measured)" if form.measured else ""
    return ", ".join([f"{device}{time}{told}", *(f"`{name}`" for name in form.needs)])


def _time(minutes: float, cluster: bool) -> str:
    if minutes >= 2880:
        return f"{minutes / 1440:,.0f} GPU-days" if cluster else f"{minutes / 1440:.3g} days"
    return f"{minutes / 60:.3g} h" if minutes >= 120 else f"{minutes:.3g} min"


def _errata(entry: Entry) -> Iterable[str]:
    published = entry.item.published
    groups = grouped((error.why, error) for error in (published.errata if published else ()))
    for why, errors in groups.items():
        what = "; ".join(
            f"{error.row}, {error.column}: printed {error.printed}, {_corrected(error)}" for error in errors
        )
        yield f"{_source(entry)}: {what}. {why}"


def _corrected(error: Erratum) -> str:
    return "right unknown" if error.corrected is None else f"right {error.corrected}"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [_line(head), _line(("---",) * len(head)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _one_line(text: str) -> str:
    return " ".join(text.split())
