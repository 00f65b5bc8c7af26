"""ListOps (Nangia and Bowman 2018, arXiv:1804.06028), with the distribution of the Long Range Arena.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]        the label is the value, 5

A node is a digit with probability 3/4, otherwise an operator with 2 to 10 arguments; at the largest depth all nodes are
digits. A tree has one token per digit, and two per operator: `[MAX` and `]`. Trees of more than 500 and fewer than
2,000 tokens are kept, which are 8.4 % of all. MED is the floor of the median, SM the sum modulo 10.

Trees are drawn level by level, thousands at a time. The children of a level lie in the order of their parents, so
lengths, places and values of all nodes of a level come from a few calls of NumPy.
"""

import re
from dataclasses import dataclass, field

import numpy as np

from linnet.data.order import mix
from linnet.data.synthetic.base import Draws
from linnet.encoders.lra.task import END, SYMBOLS, UNKNOWN, LraTask, Shard, SplitName

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
MIN, MAX, MED, SM = range(4)
VOCABULARY = (*map(str, range(10)), *OPERATORS, "]")
CLOSE = SYMBOLS + 14
IDS = {symbol: SYMBOLS + number for number, symbol in enumerate(VOCABULARY)}
NUM_TOKENS = SYMBOLS + len(VOCABULARY)
DIGIT = 0.75  # the share of digits
ARGUMENTS = (2, 10)
ROOTS = 4096  # trees that are drawn at a time
_PARENTHESES = re.compile(r"[()]")
# Eighths of the space of all trees, by the hash of their tokens.
_EIGHTHS: dict[SplitName, tuple[int, int]] = {"train": (0, 5), "validation": (6, 6), "test": (7, 7)}
_MULTIPLIERS = mix(np.arange(1, 4096, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


@dataclass(frozen=True)
class Form:
    """Which trees are kept.

    Attributes:
        depth: of the deepest node; the root has 1.
        longer, shorter: bounds of the length, both excluded.
        cut: most tokens of a row, with its end.
    """

    depth: int
    longer: int
    shorter: int
    cut: int


FORMS = {"full": Form(10, 500, 2000, 2048), "reduced": Form(5, 50, 150, 150)}


def listops_task(size: str) -> LraTask:
    return LraTask("listops", "tokens", 10, FORMS[size].cut, NUM_TOKENS, VOCABULARY)


def encode(text: str, cut: int) -> np.ndarray:
    """Returns the ids of a tree as text, uint8 [n], n <= `cut`, with the end token. Parentheses do not count."""
    symbols = _PARENTHESES.sub(" ", text).split()[: cut - 1]
    return np.array([*(IDS.get(symbol, UNKNOWN) for symbol in symbols), END], dtype=np.uint8)


def generate_listops(size: str, split: SplitName, block: int, rows: int, seed: int) -> Shard:
    """Returns the first rows of a block of a split: a pure function of its arguments. All trees of it are different."""
    form, (low, high) = FORMS[size], _EIGHTHS[split]
    shards: list[Shard] = []
    seen: set[int] = set()
    attempt = 0
    while len(seen) < rows:
        trees = _draw(Draws(seed, "listops", size, split, block, attempt), form)
        attempt += 1
        eighths = trees.hashes >> np.uint64(61)
        for place in np.flatnonzero((low <= eighths) & (eighths <= high)):
            if len(seen) < rows and (tree := int(trees.hashes[place])) not in seen:
                seen.add(tree)
                shards.append(_one(trees, int(place)))
    values, lengths, labels, hashes = (np.concatenate(parts) for parts in zip(*shards, strict=True))
    return Shard(values, lengths, labels, hashes)


def hash_rows(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns a hash of each row of tokens, uint64 [n], of rows that lie one after another."""
    starts = np.cumsum(lengths) - lengths
    place = np.arange(len(values)) - np.repeat(starts, lengths)
    terms = (values.astype(np.uint64) + np.uint64(1)) * _MULTIPLIERS[place]
    return mix(np.add.reduceat(terms, starts)) if len(lengths) else np.empty(0, dtype=np.uint64)


def _one(trees: "_Trees", place: int) -> Shard:
    end = trees.ends[place]
    values = trees.values[end - trees.lengths[place] : end]
    chosen = slice(place, place + 1)
    return Shard(values, trees.lengths[chosen], trees.labels[chosen], trees.hashes[chosen])


@dataclass
class _Trees:
    """Kept trees, in the order of their roots; `values` has their tokens one after another."""

    values: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    hashes: np.ndarray
    ends: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.ends = np.cumsum(self.lengths)


@dataclass
class _Level:
    """The nodes of one depth, int64 [n]; their children lie in their order.

    Attributes:
        root: the tree of each node. value: its value; of operators it is found later.
        arguments: number of its arguments; 0 for a digit. operator: which one it is.
    """

    root: np.ndarray
    value: np.ndarray
    arguments: np.ndarray
    operator: np.ndarray

    def only(self, kept: np.ndarray) -> "_Level":
        return _Level(self.root[kept], self.value[kept], self.arguments[kept], self.operator[kept])


def _draw(draws: Draws, form: Form) -> _Trees:
    """Draws `ROOTS` trees and returns those whose length fits."""
    levels, length = [], np.zeros(ROOTS, dtype=np.int64)
    root = np.arange(ROOTS)
    for depth in range(1, form.depth + 1):
        if not len(root):
            break
        level = _draw_level(draws, root, depth == form.depth)
        length += np.bincount(root, np.where(level.arguments > 0, 2, 1), ROOTS).astype(np.int64)
        levels.append(level)
        root = np.repeat(level.root, level.arguments)
        root = root[length[root] < form.shorter]  # a tree that is too long already is not drawn to its end
    kept = (form.longer < length) & (length < form.shorter)
    # Operators of trees that became too long have lost their children, but these trees are not kept.
    return _write([level.only(kept[level.root]) for level in levels], length[kept])


def _draw_level(draws: Draws, root: np.ndarray, digits: bool) -> _Level:
    count = len(root)
    value = draws.integers(10, count)
    arguments, operator = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    if not digits:
        operators = np.flatnonzero(draws.uniform(count) >= DIGIT)
        low, high = ARGUMENTS
        arguments[operators] = low + draws.integers(high - low + 1, len(operators))
        operator[operators] = draws.integers(len(OPERATORS), len(operators))
    return _Level(root, value, arguments, operator)


def _write(levels: list[_Level], length: np.ndarray) -> _Trees:
    """Returns the tokens and values of whole trees."""
    sizes = _sizes(levels)
    ends = np.cumsum(length + 1)  # with an end token each
    values = np.full(int(ends[-1]) if len(ends) else 0, END, dtype=np.uint8)
    starts = ends - length - 1
    for number, level in enumerate(levels):
        inner = level.arguments > 0
        values[starts] = SYMBOLS + np.where(inner, 10 + level.operator, level.value)
        values[(starts + sizes[number] - 1)[inner]] = CLOSE
        if number + 1 < len(levels):
            starts = _children_starts(level, starts, sizes[number + 1])
    lengths = (length + 1).astype(np.int32)
    return _Trees(values, lengths, _evaluate(levels).astype(np.uint8), hash_rows(values, lengths))


def _sizes(levels: list[_Level]) -> list[np.ndarray]:
    """Returns the tokens of each node with all below it, per level."""
    sizes: list[np.ndarray] = []
    for level in reversed(levels):
        size = np.ones(len(level.root), dtype=np.int64)
        inner = level.arguments > 0
        if inner.any():
            size[inner] = 2 + np.add.reduceat(sizes[-1], _first_children(level))
        sizes.append(size)
    return sizes[::-1]


def _first_children(level: _Level) -> np.ndarray:
    """Returns the place of the first child of each operator in the next level."""
    arguments = level.arguments[level.arguments > 0]
    return np.cumsum(arguments) - arguments


def _children_starts(level: _Level, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns where the children of a level start: after their operator and the children before them.

    Args:
        starts: of the nodes of the level. sizes: of the children.
    """
    inner = level.arguments > 0
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts[inner] + 1 - before[_first_children(level)], level.arguments[inner]) + before


def _evaluate(levels: list[_Level]) -> np.ndarray:
    """Returns the value of each root."""
    below = np.empty(0, dtype=np.int64)
    for level in reversed(levels):
        inner = level.arguments > 0
        if inner.any():
            first, count = _first_children(level), level.arguments[inner]
            owner = np.repeat(np.arange(len(first)), count)
            ordered = np.sort(owner * 10 + below) - owner * 10  # the arguments of each operator in order
            middle = ordered[first + (count - 1) // 2] + ordered[first + count // 2]
            results = (ordered[first], ordered[first + count - 1], middle // 2, np.add.reduceat(below, first) % 10)
            level.value[inner] = np.choose(level.operator[inner], results)
        below = level.value
    return below
