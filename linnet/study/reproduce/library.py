"""Reads the items of the package (or of another folder of the same form). Imports no torch."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from linnet.config import C, ConfigError, _Loader, gather, nearest, parse, parse_yaml
from linnet.study.reproduce.item import Item, Need, Paper, Step

ITEMS = Path(__file__).parent / "items"
PACKAGE = Path(__file__).parents[2]
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


@dataclass(frozen=True)
class Library:
    """All papers, items and data: by paper, by (paper, item), by name."""

    papers: dict[str, Paper] = field(default_factory=dict)
    items: dict[tuple[str, str], Entry] = field(default_factory=dict)
    data: dict[str, Need] = field(default_factory=dict)

    def of(self, paper: str) -> list[Entry]:
        """Returns the items of a paper in its order."""
        return [entry for (of, _), entry in self.items.items() if of == paper]

    def find(self, paper: str, names: list[str]) -> list[Entry]:
        """Returns the named items, all of the paper without names. Raises ConfigError with all that are unknown."""
        if paper not in self.papers:
            raise ConfigError([f"PAPER {paper!r}: unknown; {nearest(paper, self.papers)}"], "reproduce")
        known = {name for of, name in self.items if of == paper}
        problems = [
            f"ITEM {name!r}: paper {paper} has none; {nearest(name, known)}" for name in names if name not in known
        ]
        if problems:
            raise ConfigError(problems, "reproduce")
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
    papers: dict[str, Paper] = {}
    items: dict[tuple[str, str], Entry] = {}
    data: dict[str, Need] = {}
    if (folder / DATA).is_file():
        for name, values in (_yaml(folder / DATA, strict, problems) or {}).items():
            if (need := _parsed(Need, values, f"{DATA}: {name}", problems)) is not None:
                data[name] = need
    for path in sorted(folder.glob(f"*/{PAPER}")):
        paper = path.parent.name
        found = _parsed(Paper, _yaml(path, strict, problems), f"{paper}/{PAPER}", problems)
        if found is None:
            continue
        papers[paper] = found
        names = {one.stem: one for one in path.parent.glob("*.yaml") if one.name != PAPER}
        problems += [f"{paper}/{PAPER}: order: no item {n!r}" for n in found.order if n not in names]
        for name in sorted(names, key=lambda name: _place(name, found.order)):
            values = _yaml(names[name], strict, problems)
            item = _parsed(Item, values, f"{paper}/{name}.yaml", problems)
            if item is not None:
                items[paper, name] = Entry(paper, name, names[name], item)
                problems += [f"{paper}/{name}.yaml: {line}" for line in _unknown_data(item, data)]
    if problems:
        raise ConfigError(problems, str(folder))
    return Library(papers, items, data)


def config_of(entry: Entry, config: dict[str, Any] | str) -> dict[str, Any]:
    """Returns a configuration, read from its file if it is named. Raises ConfigError if there is no such file."""
    if not isinstance(config, str):
        return config
    for path in (entry.path.parent / config, PACKAGE / config):
        if path.is_file():
            values = parse_yaml(path.read_text(encoding="utf-8"))
            if isinstance(values, dict):
                return values
    raise ConfigError([f"{entry.key}: config {config!r}: no such file beside the item or in the package"], "reproduce")


def placeholders(value: Any) -> set[str]:
    """Returns the names of data that a configuration refers to as `${NAME}`."""
    if isinstance(value, str):
        return set(_PLACE.findall(value))
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(placeholders, parts))


def filled(value: Any, data: dict[str, str]) -> Any:
    """Returns a configuration with the folders of data in the place of `${NAME}`."""
    if isinstance(value, str):
        return _PLACE.sub(lambda found: data.get(found[1], found[0]), value)
    if isinstance(value, dict):
        return {key: filled(part, data) for key, part in value.items()}
    return [filled(part, data) for part in value] if isinstance(value, list) else value


_PLACE = re.compile(r"\$\{([\w.-]+)\}")


def _unknown_data(item: Item, data: dict[str, Need]) -> list[str]:
    problems = []
    for form in filter(None, (item.full, item.reduced)):
        names = [*form.needs, *(name for step in form.steps for name in step.needs)]
        problems += [f"needs: unknown data {name!r}; {nearest(name, data)}" for name in names if name not in data]
        for step in form.steps:
            wanted = placeholders([_plain(step), step.set, step.vary]) - {*form.needs, *step.needs}
            problems += [f"steps.{step.name}: ${{{name}}} is not under needs" for name in sorted(wanted)]
    return list(dict.fromkeys(problems))


def _plain(step: Step) -> Any:
    return step.config if isinstance(step.config, dict) else {}


def _place(name: str, order: list[str]) -> tuple:
    natural = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    return (0, order.index(name), natural) if name in order else (1, 0, natural)


def _parsed(cls: type[C], values: Any, where: str, problems: list[str]) -> C | None:
    if values is None:
        return None
    found: list[str] = []
    with gather(found):
        if not isinstance(values, dict):
            raise ConfigError([f"must be a mapping, not {type(values).__name__}"], where)
        return parse(cls, values, where)
    problems += [f"{where}: {line}" for line in found]
    return None


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads what `linnet.config.parse_yaml` reads, with the same numbers, but keys that come twice pass."""


_FastLoader.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_FastLoader.yaml_constructors = _Loader.yaml_constructors


def _yaml(path: Path, strict: bool, problems: list[str]) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        return parse_yaml(text) if strict else yaml.load(text, _FastLoader)
    except (yaml.YAMLError, ValueError) as error:
        problems.append(f"{path.parent.name}/{path.name}: {' '.join(str(error).split())}")
        return None
