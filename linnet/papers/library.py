"""Reads the items of the package (or of another folder of the same form). Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from linnet.config import C, ConfigError, Problem, _Loader, gather, natural, nearest, parse, read_yaml, refuse, shown
from linnet.papers.item import Form, Item, Need, Paper, Step, valid_forms

ITEMS = Path(__file__).parent / "items"
PACKAGE = Path(__file__).parents[1]
PAPER, DATA = "paper.yaml", "data.yaml"


@dataclass(frozen=True)
class Entry:
    """An item with its place: `paper` and `name` are what one types."""

    paper: str
    name: str
    path: Path
    item: Item

    @property
    def key(self) -> str:
        return f"{self.paper} {self.name}"

    @property
    def own(self) -> bool:
        """Whether it is a user's item, which may have the name of one of the package."""
        return not self.path.is_relative_to(ITEMS)


@dataclass(frozen=True)
class Library:
    """All papers, items and data: by paper, by (paper, item), by name."""

    papers: dict[str, Paper] = field(default_factory=dict)
    items: dict[tuple[str, str], Entry] = field(default_factory=dict)
    data: dict[str, Need] = field(default_factory=dict)

    def of(self, paper: str) -> list[Entry]:
        """Returns the items of a paper in its order."""
        return [entry for (of, _), entry in self.items.items() if of == paper]

    def unknown(self, paper: str) -> str:
        """Returns what is wrong with the name of a paper, and the fix; "" if it has items."""
        known = list(dict.fromkeys(of for of, _ in self.items))
        if paper in known:
            return ""
        if having := [of for of, name in self.items if name == paper]:
            return f"is an item of {', '.join(having)}; write linnet reproduce {having[0]} {paper}"
        if paper.isdecimal():  # of numbers, the nearest text is not the nearest paper
            short = f"did you mean {paper.zfill(3)!r}?" if paper.zfill(3) in known else f"known: {', '.join(known)}"
            return f"unknown; {short}"
        return (
            f"has no items; known: {', '.join(known)}" if paper in self.papers else f"unknown; {nearest(paper, known)}"
        )

    def find(self, paper: str, names: list[str]) -> list[Entry]:
        """Returns the named items, all of the paper without names. Raises ConfigError with all that are unknown."""
        if problem := self.unknown(paper):
            raise ConfigError([f"PAPER {paper!r}: {problem}"], "reproduce")
        known = {name for of, name in self.items if of == paper}
        problems = [
            f"ITEM {name!r}: paper {paper} has none; {nearest(name, known)}" for name in names if name not in known
        ]
        refuse(problems, "reproduce")
        return [entry for entry in self.of(paper) if not names or entry.name in names]


def read_library(folder: Path = ITEMS, strict: bool = False) -> Library:
    """Reads every paper and item.

    Args:
        folder: <paper>/<item>.yaml, <paper>/paper.yaml, data.yaml.
        strict: read with `parse_yaml`, which also finds keys that come twice; ten times slower.

    Raises:
        ConfigError: all problems of all files.
    """
    problems: list[str] = []
    library = _read(folder, strict, problems)
    refuse(problems, "items")
    return library


def _read(folder: Path, strict: bool, problems: list[str]) -> Library:
    """Returns the papers, items and data that can be read; adds the problems of the others, each with its file."""
    papers: dict[str, Paper] = {}
    items: dict[tuple[str, str], Entry] = {}
    data = _read_data(folder / DATA, strict, problems)
    for path in sorted(folder.glob(f"*/{PAPER}")):
        paper = path.parent.name
        values = _yaml(path, strict, problems)
        details = None if values is None else _parsed(Paper, values, str(path), problems)
        order = details.order if details is not None else []
        if details is not None:
            papers[paper] = details
        names = {file.stem: file for file in path.parent.glob("*.yaml") if file.name != PAPER}
        problems += [f"{path}: order: no item {name!r}; {nearest(name, names)}" for name in order if name not in names]
        for name in sorted(names, key=lambda name: _place(name, order)):
            values = _yaml(names[name], strict, problems)
            if values is None:
                continue
            item = _parsed(Item, values, str(names[name]), problems)
            if item is not None:
                items[paper, name] = Entry(paper, name, names[name], item)
            forms = valid_forms(values) if item is None else {"full": item.full, "reduced": item.reduced}
            problems += [f"{names[name]}: {line}" for line in _unknown_data(forms, data)]
    return Library(papers, items, data)


def read_own(folder: Path, paper: str = "", names: Sequence[str] = ()) -> tuple[Library, int]:
    """Reads a user's items, in the form of those of the package, whose data they may name too.

    Args:
        paper, names: the items that are asked for; without names all of them are.

    Returns:
        The library, and the number of problems of files that are not asked for.

    Raises:
        ConfigError: all problems of the files that are asked for, also of configurations that the items name, and of
            files that would not be read.
    """
    if not folder.is_dir():
        raise ConfigError([f"{folder}: not a folder; give the one that has PAPER/{PAPER} and PAPER/ITEM.yaml"], "items")
    problems = [
        f"{path}: lies in no paper's folder; move it to {folder}/PAPER/{path.name}"
        for path in sorted(folder.glob("*.yaml"))
        if path.name != DATA
    ]
    for place in sorted({path.parent for path in folder.glob("*/*.yaml")}):
        if not (place / PAPER).is_file():
            problems.append(f"{place}: has no {PAPER}; write one with a line such as `title: My paper`")
    if not problems and not any(folder.glob(f"*/{PAPER}")):
        problems.append(f"{folder}: has no items; write PAPER/{PAPER} and PAPER/ITEM.yaml (docs/reproduce.md)")
    library = _read(folder, True, problems)
    files = [place / f"{name}.yaml" for name in names for place in (folder / paper, folder)]
    paths = [folder, folder / DATA, folder / paper, folder / paper / PAPER, *files]
    asked = [line for line in problems if not names or Path(Problem(line).path) in paths]
    others = len(problems) - len(asked)
    for entry in library.items.values():
        entry_problems: list[str] = []
        for step in [step for form in (entry.item.full, entry.item.reduced) if form for step in form.steps]:
            with gather(entry_problems):
                config_of(entry, step.config)
        entry_problems = list(dict.fromkeys(entry_problems))
        if names and entry.path not in paths:
            others += len(entry_problems)
        else:
            asked += entry_problems
    refuse(asked, "items")
    return library, others


def config_of(entry: Entry, config: dict[str, Any] | str) -> dict[str, Any]:
    """Returns a configuration, read from its file if it is named. Raises ConfigError if there is no such file."""
    if not isinstance(config, str):
        return config
    tried = [entry.path.parent / config, PACKAGE / config]
    for path in tried:
        if path.is_file():
            return read_yaml(path)
    problem = f"{entry.path}: config {config!r}: no such file; tried {' and '.join(map(str, tried))}; check the name"
    raise ConfigError([problem], "reproduce")


def folder_of(entry: Entry, folder: str) -> str:
    """Returns a folder that an item names: beside the item, in the package, or as it is given."""
    # Digests of steps hold the names of 0.2, where the items were in study/reproduce.
    inside = PACKAGE / re.sub(r"^study/reproduce/", "papers/", folder)
    return str(next((path for path in (entry.path.parent / folder, inside) if path.is_dir()), folder))


def placeholders(value: Any) -> set[str]:
    """Returns the names of data that a configuration refers to as `${NAME}`."""
    if isinstance(value, str):
        return set(_PLACE.findall(value))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(placeholders, parts))


def filled(value: Any, data: dict[str, str]) -> Any:
    """Returns a configuration with the folders of data in the place of `${NAME}`."""
    if isinstance(value, str):
        return _PLACE.sub(lambda match: data.get(match[1], match[0]), value)
    if isinstance(value, dict):
        return {key: filled(part, data) for key, part in value.items()}
    return [filled(part, data) for part in value] if isinstance(value, list) else value


_PLACE = re.compile(r"\$\{([\w.-]+)\}")


def _unknown_data(forms: Mapping[str, Form | None], data: dict[str, Need]) -> list[str]:
    problems = []
    for scale, form in forms.items():
        if form is None:
            continue
        names = [*form.needs, *(name for step in form.steps for name in step.needs)]
        problems += [
            f"{scale}.needs: unknown data {name!r}; {nearest(name, data)}" for name in names if name not in data
        ]
        for step in form.steps:
            wanted = placeholders([_plain(step), step.set, step.vary]) - {*form.needs, *step.needs}
            problems += [
                f"{scale}.steps.{step.name}: ${{{name}}} is not under needs; add it there" for name in sorted(wanted)
            ]
    return list(dict.fromkeys(problems))


def _plain(step: Step) -> Any:
    return step.config if isinstance(step.config, dict) else {}


def _place(name: str, order: list[str]) -> tuple:
    return (0, order.index(name), natural(name)) if name in order else (1, 0, natural(name))


def _read_data(path: Path, strict: bool, problems: list[str]) -> dict[str, Need]:
    """Returns the data of a `data.yaml`, if there is one, and those of the package that it does not name."""
    known = {} if path == ITEMS / DATA else _read_data(ITEMS / DATA, False, problems)
    values = (_yaml(path, strict, problems) if path.is_file() else None) or {}
    needs = {name: _parsed(Need, value, f"{path}: {name}", problems) for name, value in values.items()}
    return known | {name: need for name, need in needs.items() if need is not None}


def _parsed(cls: type[C], values: Any, where: str, problems: list[str]) -> C | None:
    with gather(problems, f"{where}: {{}}".format):
        if not isinstance(values, dict):
            raise ConfigError([f"must be a mapping of keys to values (given {shown(values)})"])
        return parse(cls, values)
    return None


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads what `linnet.config.parse_yaml` reads, with the same numbers, but keys that come twice pass."""


_FastLoader.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_FastLoader.yaml_constructors = _Loader.yaml_constructors


def _yaml(path: Path, strict: bool, problems: list[str]) -> dict[str, Any] | None:
    """Returns the mapping in a file; None with a problem if it has none."""
    try:
        values = read_yaml(path) if strict else yaml.load(path.read_text(encoding="utf-8"), _FastLoader)
        if not isinstance(values, dict):
            raise ConfigError([f"must be a mapping of keys to values, not {type(values).__name__}"])
        return values
    except ConfigError as error:
        problems += [line if str(path) in line else f"{path}: {line}" for line in error.problems]
    except yaml.YAMLError as error:
        problems.append(f"{path}: {' '.join(str(error).split())}")
    return None
