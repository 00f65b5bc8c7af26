"""Layouts: which layers a model stacks, in order, as a string or as a list of blocks.

    tnl+sglu x24                                   24 blocks of one kind
    (hyena+swiglu attention+swiglu) x4             a pattern, four times
    2H:4A:4H:2A                                    a topology, with aliases {H: hyena+swiglu, A: attention+swiglu}
    (L L L G) x6                                   with aliases {L: {layer: attention+swiglu, options: {attention:
                                                   {window: 64}}}, G: attention+swiglu}
    tpe cosformer2+sglu x12                        a mixer before the layers, then 12 blocks
    mamba&mamba attention+swiglu                   two layers of a pattern: `&` joins blocks that are cut as one

A block is `mixer+channel`, or a mixer or channel mixer alone. `xN` repeats the block or group before it, a number
before an alias repeats the alias, and `:` separates like a space. An alias is a layout, or a mapping of a layout and
the options that its layers override.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import Field

from linnet.config import Config, first_of, nearest, parse
from linnet.layers.base import CHANNELS, MIXERS, nearest_name

_TOKEN = re.compile(r"[()]|[^\s():]+")
_ALIAS = re.compile(r"(?![x*]\d+$)[^\s():+\d][^\s():+]*")
MOST_BLOCKS = 4096  # a larger number is a typing error, and parsing it would take minutes and much memory
MOST_DEPTH = 32  # of parentheses in each other, and of aliases that name aliases
_LISTED = 20  # problems of a layout in a message
_SHOWN = 100  # characters of a layout in a message
_INDENT = " " * 6
_OWN = (
    ", or give a mixer of your own (--mixer FILE.py:Class, `plugins` in a file, or linnet.layers.load_plugin in Python)"
)

Options = Mapping[str, Mapping[str, Any]]  # layer name -> options


class Alias(Config):
    """A short name for blocks with options of their own."""

    layer: str = Field(description="a layout, for example 'attention+swiglu'")
    options: dict[str, dict[str, Any]] = Field({}, description="by layer; they override the model's `options`")


@dataclass(frozen=True)
class LayerSpec:
    """One block.

    Attributes:
        mixer, channel: names of its token mixer and its channel mixer; one of the two may be None.
        options: options by layer that an alias overrides.
        alias: name of this alias, for messages.
        together: blocks from this one on that are one layer of a pattern (`mamba&mamba`).
    """

    mixer: str | None
    channel: str | None
    options: Options = field(default_factory=dict, hash=False)
    alias: str = field(default="", compare=False)
    together: int = field(default=1, compare=False, repr=False)

    def __iter__(self):
        yield from (self.mixer, self.channel)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the layers of this block."""
        return tuple(name for name in self if name)


@dataclass(frozen=True)
class Stack:
    """A parsed layout.

    Attributes:
        before: mixers before the layers (`Mixer.before_layers`).
        blocks: the layers, first to last.
        head, body: text of the layout before and from the first block.
    """

    before: list[LayerSpec]
    blocks: list[LayerSpec]
    head: str
    body: str

    @property
    def names(self) -> list[str]:
        """Returns the names of all layers, in the order in which they first appear."""
        return list(dict.fromkeys(name for spec in (*self.before, *self.blocks) for name in spec.names))

    @property
    def units(self) -> list[list[LayerSpec]]:
        """Returns the blocks in groups that repeat and are cut as one; most have one block."""
        groups: list[list[LayerSpec]] = []
        at = 0
        while at < len(self.blocks):
            groups.append(self.blocks[at : at + self.blocks[at].together])
            at += len(groups[-1])
        return groups


class LayoutError(ValueError):
    """A layout that does not parse.

    Attributes:
        layout: the text. marks: (start, end, problem) of each wrong place, in order.
    """

    def __init__(self, layout: str, marks: list[tuple[int, int, str]], alias: str = ""):
        self.layout, self.marks = layout, sorted(marks)
        where = f"layout, alias {alias!r}" if alias else "layout"
        problems = first_of(list(dict.fromkeys(what for *_, what in self.marks)), _LISTED)
        super().__init__(f"{where}: {'; '.join(problems).replace('?;', '?')}\n{_excerpt(layout, self.marks)}")


def parse_layout(layout: str, aliases: Mapping[str, Any] | None = None) -> list[LayerSpec]:
    """Returns the blocks that a layout names, first to last, without the mixers before them.

    Args:
        aliases: by name, each a layout, an `Alias`, or its plain values {"layer": ..., "options": ...}.

    Raises:
        LayoutError: the layout has unknown layers, an unclosed parenthesis or a misplaced `xN`. The message lists all
            unknown layers with the nearest known names, and shows the layout with the wrong places marked.
        ValueError: an alias refers to itself, or has a name that is not allowed.
    """
    return parse_stack(layout, aliases).blocks


def parse_stack(layout: str, aliases: Mapping[str, Any] | None = None) -> Stack:
    """Returns the blocks as `parse_layout` does, and the mixers before them (`tpe cosformer2+sglu x12`)."""
    aliases = {
        name: alias if isinstance(alias, str | Alias) else parse(Alias, alias, f"aliases.{name}")
        for name, alias in (aliases or {}).items()
    }
    if problems := check_aliases(aliases):
        raise ValueError("; ".join(problems))
    return _Parser(layout, aliases).parse()


def check_aliases(aliases: Mapping[str, str | Alias]) -> list[str]:
    """Returns the problems of aliases: bad names, references to themselves, and options of layers they do not have."""
    problems = []
    for name in aliases:
        if name in MIXERS or name in CHANNELS:
            problems.append(f"aliases.{name}: {name!r} is the name of a layer; choose another name for the alias")
        elif not isinstance(name, str) or not _ALIAS.fullmatch(name):
            problems.append(
                f"aliases.{name}: {name!r} cannot be used in a layout; begin with a letter, without spaces, '+', ':', "
                "parentheses, or the form x2"
            )
    uses = {name: [token for token in _names(_text(alias)) if token in aliases] for name, alias in aliases.items()}
    cyclic: set[str] = set()
    for name in aliases:
        if name not in cyclic and (way := _way_back(name, uses)):
            cyclic.update(way)
            what = "refers to itself" if len(way) == 2 else f"refers to itself through {' -> '.join(way)}"
            problems.append(f"aliases.{name}: {what} ({_text(aliases[name])!r}); write layers instead")
    if not problems:
        problems += [line for name, alias in aliases.items() for line in _alias_options(name, alias, aliases)]
    return problems


def written(layout: list[str | Mapping[str, Any]], aliases: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Writes a list of blocks as a layout string; returns it and the aliases, with new ones for blocks with options.

    Args:
        layout: each entry is a layout string, or a mapping {layer, options} as in `aliases`.

    Raises:
        ValueError: an entry has another form.
    """
    aliases, tokens = dict(aliases), []
    for place, entry in enumerate(layout):
        if isinstance(entry, str):
            tokens.append(entry)
        elif (
            isinstance(entry, Mapping) and isinstance(entry.get("layer"), str) and set(entry) <= set(Alias.model_fields)
        ):
            tokens.append(_name_for(dict(entry), aliases) if entry.get("options") else entry["layer"])
        else:
            raise ValueError(
                f"layout.{place}: {entry!r} is not a block; write 'tnl+sglu', or {{layer: 'tnl+sglu', options: ...}}"
            )
    return _joined(tokens), aliases


def cut(layout: str, num_layers: int, aliases: Mapping[str, str | Alias]) -> tuple[str, dict[str, Any]]:
    """Repeats a layout until it has `num_layers` blocks, the last repetition cut short. Joined blocks count as one.

    Returns:
        The layout and the aliases, with new ones if the cut goes through an alias with options.
    """
    stack, alias_map = parse_stack(layout, aliases), dict(aliases)
    repeats, rest = divmod(num_layers, len(stack.units))
    tokens = [f"({stack.body}) x{repeats}"] if repeats else []
    for unit in stack.units[:rest]:
        layers = [({"layer": "+".join(spec.names), "options": spec.options}) for spec in unit]
        tokens.append("&".join(_name_for(layer, alias_map) if layer["options"] else layer["layer"] for layer in layers))
    return stack.head + _joined(tokens), alias_map


def shares(blocks: Sequence[LayerSpec], num_layers: int) -> tuple[str, str] | None:
    """Returns a mixer's share in a pattern, and in the pattern repeated and cut at `num_layers` blocks, as text.

    It is the mixer whose share differs most. None if no share differs by more than a tenth: 10 of 19 blocks are as near
    to a half as 19 blocks can be.
    """
    pattern = [f"{spec.mixer} ({spec.alias})" if spec.mixer and spec.options else spec.mixer for spec in blocks]
    whole = [pattern[place % len(pattern)] for place in range(num_layers)]
    changes = {
        name: abs(whole.count(name) * len(pattern) / (pattern.count(name) * num_layers) - 1)
        for name in dict.fromkeys(pattern)
        if name is not None
    }
    name = max(changes, key=lambda mixer: changes[mixer], default=None)
    if name is None or changes[name] <= 0.1:
        return None
    return f"{name} in {pattern.count(name)} of {len(pattern)} blocks", f"in {whole.count(name)} of {num_layers}"


def nearest_layer(name: str, known: Iterable[str]) -> str:
    """Returns the text of `nearest_name`; if no name is near, also explains how to use a mixer from a file."""
    hint = nearest_name(name, known)
    return hint if hint.startswith("did you mean") or set(known) <= set(CHANNELS) else hint + _OWN


def _text(alias: str | Alias) -> str:
    return alias if isinstance(alias, str) else alias.layer


def _names(layout: str) -> list[str]:
    """Returns the tokens of a layout without counts."""
    names = [re.sub(r"^[0-9]+(?=[^0-9])", "", token) for token in _TOKEN.findall(layout)]
    return [part for name in names for part in (name, *name.split("&"))] if "&" in layout else names


def _way_back(name: str, uses: Mapping[str, list[str]]) -> list[str]:
    """Returns the aliases on the way from one back to itself, both ends included; [] if there is no such way."""
    left = [(name, used) for used in uses[name]]
    user: dict[str, str] = {}  # alias -> the one through which it was reached
    while left:
        by, at = left.pop()
        if at not in user:
            user[at] = by
            if at == name:
                break
            left += [(at, used) for used in uses[at]]
    else:
        return []
    way = [name, user[name]]
    while way[-1] != name:
        way.append(user[way[-1]])
    return way[::-1]


def _alias_options(name: str, alias: str | Alias, aliases: Mapping[str, str | Alias]) -> list[str]:
    """Returns a problem for each option of an alias that belongs to a layer which the alias does not contain."""
    if isinstance(alias, str) or not alias.options:
        return []
    try:
        used = set(_Parser(alias.layer, aliases, name).parse(alone=True).names)
    except LayoutError:
        return []  # the layout that uses the alias reports it
    return [
        f"aliases.{name}.options.{layer}: the layout {alias.layer!r} has no such layer; {nearest(layer, used)}"
        for layer in alias.options
        if layer not in used
    ]


def _name_for(entry: dict[str, Any], aliases: dict[str, Any]) -> str:
    """Returns the alias of an entry: an equal one if it exists, else a new one."""
    for name, alias in aliases.items():
        if (alias.model_dump() if isinstance(alias, Alias) else alias) == entry:
            return name
    name = next(f"B{n}" for n in range(1, len(aliases) + 2) if f"B{n}" not in aliases)
    aliases[name] = entry
    return name


def _joined(tokens: list[str]) -> str:
    """Joins tokens with spaces; writes a run of equal tokens as `token xN`."""
    runs: list[list] = []
    for token in tokens:
        if runs and runs[-1][0] == token and not re.search(r"[\s():]", token):
            runs[-1][1] += 1
        else:
            runs.append([token, 1])
    return " ".join(token if count == 1 else f"{token} x{count}" for token, count in runs)


def _over(options: Options, winner: Options) -> Options:
    """Returns options by layer; those of `winner` override the others."""
    return {name: {**options.get(name, {}), **winner.get(name, {})} for name in {**options, **winner}}


class _Parser:
    def __init__(self, layout: str, aliases: Mapping[str, str | Alias], alias: str = "", depth: int = 0):
        self.layout, self.aliases, self.alias, self.depth = layout, aliases, alias, depth
        self.tokens = list(_TOKEN.finditer(layout))
        self.marks: list[tuple[int, int, str]] = []

    def parse(self, alone: bool = False) -> Stack:
        """Parses the whole layout. With `alone`, a layout that is only a mixer before the layers is valid."""
        if not self.tokens:
            raise self._error(0, 1, "it is empty; write for example 'tnl+sglu x6'")
        at, before = 0, []
        while not (self.alias and not alone) and at < len(self.tokens) and (spec := self._first(self.tokens[at][0])):
            if spec.mixer in [other.mixer for other in before]:
                self.marks.append((*self.tokens[at].span(), f"{spec.mixer!r} is twice before the layers; write once"))
            before.append(spec)
            at += 1
        if before and at == len(self.tokens):
            if alone:
                return Stack(before, [], self.layout, "")
            what = f"{self.layout.strip()!r} has no layers after it; write for example 'tpe tnl+sglu x6'"
            raise self._error(*self.tokens[-1].span(), what)
        start = self.tokens[at].start()
        blocks, at = self._sequence(at)
        if at < len(self.tokens):
            raise self._error(*self.tokens[at].span(), "')' without '('")
        if self.marks:
            raise LayoutError(self.layout, self.marks, self.alias)
        start = start if before else 0
        return Stack(before, blocks, self.layout[:start], self.layout[start:])

    def _first(self, token: str, depth: int = 0) -> LayerSpec | None:
        """Returns the mixer before the layers that a token names, or None."""
        if token in self.aliases and depth <= MOST_DEPTH:
            alias = self.aliases[token]
            spec = self._first(_text(alias).strip(), depth + 1) if _text(alias).strip() != token else None
            if spec is None or isinstance(alias, str):
                return spec
            return LayerSpec(spec.mixer, None, _over(spec.options, alias.options), token)
        return LayerSpec(token, None) if token in MIXERS and MIXERS[token].before_layers else None

    def _sequence(self, at: int, depth: int = 0) -> tuple[list[LayerSpec], int]:
        """Returns the blocks from token `at` to the end or an unmatched ')', and the index of the ending token."""
        blocks: list[LayerSpec] = []
        group: list[LayerSpec] | None = None  # the blocks that a following xN repeats
        while at < len(self.tokens) and self.tokens[at][0] != ")":
            token, opened = self.tokens[at], at
            at += 1
            if repeat := re.fullmatch(r"[x*]([0-9]+)", token[0]):
                times = _count(repeat[1])
                if group is None or times < 1:
                    what = f"{token[0]!r} needs a block or group before it and a count of at least 1"
                    raise self._error(*token.span(), what)
                self._limit(len(blocks) + len(group) * (times - 1), token.span())
                blocks += group * (times - 1)
                group = None
                continue
            if token[0] == "(":
                if depth == MOST_DEPTH:
                    raise self._error(*token.span(), f"more than {MOST_DEPTH} parentheses in each other; write fewer")
                group, at = self._sequence(at, depth + 1)
                if at == len(self.tokens):
                    raise self._error(*token.span(), "'(' is never closed")
                at += 1
                if at == opened + 2:
                    raise self._error(token.start(), self.tokens[at - 1].end(), "'()' contains no block")
            else:
                group = self._item(token[0], token.span())
            self._limit(len(blocks) + len(group), token.span())
            blocks += group
        return blocks, at

    def _item(self, token: str, span: tuple[int, int]) -> list[LayerSpec]:
        if re.match(r"[x*]\d+$|\d", token) and not token.isascii() and not re.match("[0-9]", token):
            raise self._error(*span, f"{token!r} has digits of another script; write the count with 0 to 9")
        counted = re.fullmatch(r"([0-9]+)([^0-9].*)", token)
        count, name = (_count(counted[1]), counted[2]) if counted else (1, token)
        if count < 1:
            raise self._error(*span, f"{token!r} repeats a block 0 times; give a count of at least 1, or leave it out")
        if name in self.aliases:
            if self.depth == MOST_DEPTH:
                raise self._error(*span, f"more than {MOST_DEPTH} aliases that name each other; write the layers")
            alias = self.aliases[name]
            blocks = _Parser(_text(alias), self.aliases, name, self.depth + 1).parse().blocks
            if isinstance(alias, Alias) and alias.options:
                options = [{layer: alias.options[layer] for layer in b.names if layer in alias.options} for b in blocks]
                blocks = [
                    replace(b, options=_over(b.options, o), alias=name) for b, o in zip(blocks, options, strict=True)
                ]
        elif "&" in name:
            blocks, start = [], span[1] - len(name)
            for part in name.split("&"):
                blocks += self._item(part, (start, start + len(part))) if part else [self._block("", start)]
                start += len(part) + 1
            blocks[0] = replace(blocks[0], together=len(blocks))
        else:
            blocks = [self._block(name, span[1] - len(name))]
        self._limit(len(blocks) * count, span)
        return blocks * count

    def _limit(self, blocks: int, span: tuple[int, int]) -> None:
        if blocks > MOST_BLOCKS:
            what = f"{self.layout[slice(*span)]!r} makes more than {MOST_BLOCKS:,} blocks; give fewer"
            raise self._error(*span, what)

    def _block(self, name: str, start: int) -> LayerSpec:
        mixer, plus, channel = name.partition("+")
        if mixer in MIXERS and MIXERS[mixer].before_layers:
            what = f"{mixer!r} is only allowed alone before all layers; write it once at the start of the layout"
            self.marks.append((start, start + len(name), what))
            return LayerSpec(None, None)
        if plus:
            self._check(mixer, start, "token mixer", MIXERS)
            self._check(channel, start + len(mixer) + 1, "channel mixer", CHANNELS)
            return LayerSpec(mixer, channel)
        if mixer in CHANNELS and mixer not in MIXERS:
            return LayerSpec(None, mixer)
        self._check(mixer, start, "layer", {**MIXERS, **CHANNELS, **self.aliases})
        return LayerSpec(mixer, None)

    def _check(self, name: str, start: int, kind: str, known: Mapping) -> None:
        if not name:
            self.marks.append((start, start + 1, f"a {kind} is missing; {nearest(name, known)}"))
        elif name not in known:
            self.marks.append((start, start + len(name), f"{kind} {name!r} is unknown; {nearest_layer(name, known)}"))

    def _error(self, start: int, end: int, what: str) -> LayoutError:
        return LayoutError(self.layout, [*self.marks, (start, end, what)], self.alias)


def _count(digits: str) -> int:
    """Returns a count; of one with more than 10 digits, which no layout may have, the first 10."""
    return int(digits.lstrip("0")[:10] or "0")


def _excerpt(layout: str, marks: list[tuple[int, int, str]]) -> str:
    """Returns the layout and, under it, carets at the marks; of a long layout the part around the first mark."""
    under = [" "] * (max(len(layout), *(end for _, end, _ in marks)) + 1)
    for start, end, _ in marks:
        under[start:end] = "^" * (end - start)
    first = 0 if len(layout) <= _SHOWN else max(0, marks[0][0] - _SHOWN // 2)
    part = re.sub(r"\s", " ", layout[first : first + _SHOWN])
    before, after = ("..." if cut else "" for cut in (first > 0, first + _SHOWN < len(layout)))
    carets = " " * len(before) + "".join(under[first : first + _SHOWN + 1]).rstrip()
    return f"{_INDENT}{before}{part}{after}\n{_INDENT}{carets}"
