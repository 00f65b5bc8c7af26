"""Layout strings: which layers a model stacks, in order.

    tnl+sglu x24                                   24 blocks of one kind
    (hyena+swiglu attention+swiglu) x4             a pattern, four times
    2H:4A:4H:2A                                    a topology, with aliases {H: hyena+swiglu, A: attention+swiglu}

A block is `mixer+channel`, or a mixer or channel mixer alone. `xN` repeats what stands before it, a number before an
alias repeats the alias, and `:` separates like a space.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from linnet.config import nearest
from linnet.layers.base import CHANNELS, MIXERS

_TOKEN = re.compile(r"[()]|[^\s():]+")
MOST_BLOCKS = 4096  # more are a slip, and would take minutes and much memory to look at
_SHOWN = 100  # characters of a layout in a message
_INDENT = " " * 6
_OWN = ", or give a mixer of your own (--mixer FILE.py:Class, or `plugins` in a file)"


class LayerSpec(NamedTuple):
    """One block: names of its token mixer and its channel mixer; one of the two may be absent."""

    mixer: str | None
    channel: str | None


class LayoutError(ValueError):
    """A layout that does not parse.

    Attributes:
        layout: the text. marks: (start, end, what is wrong there), in order.
    """

    def __init__(self, layout: str, marks: list[tuple[int, int, str]], alias: str = ""):
        self.layout, self.marks = layout, sorted(marks)
        where = f"layout, alias {alias!r}" if alias else "layout"
        super().__init__(
            f"{where}: {'; '.join(what for *_, what in self.marks).replace('?;', '?')}\n{_excerpt(layout, self.marks)}"
        )


def parse_layout(layout: str, aliases: Mapping[str, str] | None = None) -> list[LayerSpec]:
    """The blocks that a layout string names, first to last.

    Raises:
        LayoutError: unknown layers (with the nearest known ones), a parenthesis left open, or a misplaced `xN`; the
            message shows the layout with the wrong places marked, all unknown layers at once.
    """
    return _Parser(layout, aliases or {}).parse()


def nearest_layer(name: str, known: Iterable[str]) -> str:
    """As `nearest`; where no name is near, it may be one of an own mixer, so the message says how to give that."""
    told = nearest(name, known)
    return told if told.startswith("did you mean") or set(known) <= set(CHANNELS) else told + _OWN


class _Parser:
    def __init__(self, layout: str, aliases: Mapping[str, str], alias: str = ""):
        self.layout, self.aliases, self.alias = layout, aliases, alias
        self.tokens = list(_TOKEN.finditer(layout))
        self.marks: list[tuple[int, int, str]] = []

    def parse(self) -> list[LayerSpec]:
        if not self.tokens:
            raise self._error(0, 1, "it is empty; write for example 'tnl+sglu x6'")
        blocks, at = self._sequence(0)
        if at < len(self.tokens):
            raise self._error(*self.tokens[at].span(), "')' without '('")
        if self.marks:
            raise LayoutError(self.layout, self.marks, self.alias)
        return blocks

    def _sequence(self, at: int) -> tuple[list[LayerSpec], int]:
        """Blocks from token `at` to the end or an unopened ')', and the place of what ended them."""
        blocks: list[LayerSpec] = []
        group: list[LayerSpec] | None = None  # what a following xN repeats
        while at < len(self.tokens) and self.tokens[at][0] != ")":
            token, opened = self.tokens[at], at
            at += 1
            if repeat := re.fullmatch(r"[x*](\d+)", token[0]):
                if group is None or int(repeat[1]) < 1:
                    what = f"{token[0]!r} needs a block or group before it and a count of at least 1"
                    raise self._error(*token.span(), what)
                self._limit(len(blocks) + len(group) * (int(repeat[1]) - 1), token.span())
                blocks += group * (int(repeat[1]) - 1)
                group = None
                continue
            if token[0] == "(":
                group, at = self._sequence(at)
                if at == len(self.tokens):
                    raise self._error(*token.span(), "'(' is never closed")
                at += 1
                if at == opened + 2:
                    raise self._error(token.start(), self.tokens[at - 1].end(), "'()' holds no block")
            else:
                group = self._item(token[0], token.span())
            self._limit(len(blocks) + len(group), token.span())
            blocks += group
        return blocks, at

    def _item(self, token: str, span: tuple[int, int]) -> list[LayerSpec]:
        counted = re.fullmatch(r"(\d+)(\D.*)", token)
        count, name = (int(counted[1]), counted[2]) if counted else (1, token)
        if name in self.aliases:
            rest = {key: value for key, value in self.aliases.items() if key != name}
            blocks = _Parser(self.aliases[name], rest, name).parse()
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


def _excerpt(layout: str, marks: list[tuple[int, int, str]]) -> str:
    """The layout and, under it, carets at the marks; of a long layout the part around the first."""
    under = [" "] * (max(len(layout), *(end for _, end, _ in marks)) + 1)
    for start, end, _ in marks:
        under[start:end] = "^" * (end - start)
    first = 0 if len(layout) <= _SHOWN else max(0, marks[0][0] - _SHOWN // 2)
    part = re.sub(r"\s", " ", layout[first : first + _SHOWN])
    before, after = ("..." if cut else "" for cut in (first > 0, first + _SHOWN < len(layout)))
    carets = " " * len(before) + "".join(under[first : first + _SHOWN + 1]).rstrip()
    return f"{_INDENT}{before}{part}{after}\n{_INDENT}{carets}"
