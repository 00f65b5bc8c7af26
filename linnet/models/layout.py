"""Layout strings: which layers a model stacks, in order.

    tnl+sglu x24                                   24 blocks of one kind
    (hyena+swiglu attention+swiglu) x4             a pattern, four times
    2H:4A:4H:2A                                    a topology, with aliases {H: hyena+swiglu, A: attention+swiglu}

A block is `mixer+channel`, or a mixer or channel mixer alone. `xN` repeats what stands before it, a number before an
alias repeats the alias, and `:` separates like a space.
"""

import re
from typing import NamedTuple

from linnet.config import nearest
from linnet.layers.base import CHANNELS, MIXERS

_TOKEN = re.compile(r"\s*([()]|[^\s():]+)[\s:]*")


class LayerSpec(NamedTuple):
    """One block: names of its token mixer and its channel mixer; one of the two may be absent."""

    mixer: str | None
    channel: str | None


def parse_layout(layout: str, aliases: dict[str, str] | None = None) -> list[LayerSpec]:
    """The blocks that a layout string names, first to last.

    Raises:
        ValueError: an unknown layer (with the nearest known one), a parenthesis left open, or a misplaced `xN`.
    """
    tokens = _TOKEN.findall(layout)
    if not tokens:
        raise ValueError("the layout is empty; write for example 'tnl+sglu x6'")
    blocks, rest = _sequence(tokens, aliases or {}, layout)
    if rest:
        raise ValueError(f"layout {layout!r}: ')' without '('")
    return blocks


def _sequence(tokens: list[str], aliases: dict[str, str], layout: str) -> tuple[list[LayerSpec], list[str]]:
    blocks: list[LayerSpec] = []
    group: list[LayerSpec] | None = None  # what a following xN repeats
    while tokens and tokens[0] != ")":
        token, *tokens = tokens
        if repeat := re.fullmatch(r"[x*](\d+)", token):
            if group is None or int(repeat[1]) < 1:
                raise ValueError(
                    f"layout {layout!r}: {token!r} needs a block or group before it and a count of at least 1"
                )
            blocks += group * (int(repeat[1]) - 1)
            group = None
            continue
        if token == "(":
            group, tokens = _sequence(tokens, aliases, layout)
            if not tokens:
                raise ValueError(f"layout {layout!r}: '(' is never closed")
            tokens = tokens[1:]
            if not group:
                raise ValueError(f"layout {layout!r}: '()' holds no block")
        else:
            group = _item(token, aliases, layout)
        blocks += group
    return blocks, tokens


def _item(token: str, aliases: dict[str, str], layout: str) -> list[LayerSpec]:
    counted = re.fullmatch(r"(\d+)(\D.*)", token)
    count, name = (int(counted[1]), counted[2]) if counted else (1, token)
    if name in aliases:
        return parse_layout(aliases[name], {k: v for k, v in aliases.items() if k != name}) * count
    return [_block(name, aliases, layout)] * count


def _block(name: str, aliases: dict[str, str], layout: str) -> LayerSpec:
    mixer, plus, channel = name.partition("+")
    known = {**MIXERS, **CHANNELS, **aliases}
    if plus:
        if mixer not in MIXERS:
            raise ValueError(f"layout {layout!r}: token mixer {mixer!r} is unknown; {nearest(mixer, MIXERS)}")
        if channel not in CHANNELS:
            raise ValueError(f"layout {layout!r}: channel mixer {channel!r} is unknown; {nearest(channel, CHANNELS)}")
        return LayerSpec(mixer, channel)
    if mixer in MIXERS:
        return LayerSpec(mixer, None)
    if mixer in CHANNELS:
        return LayerSpec(None, mixer)
    raise ValueError(f"layout {layout!r}: layer {mixer!r} is unknown; {nearest(mixer, known)}")
