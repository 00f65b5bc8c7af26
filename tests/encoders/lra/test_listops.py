"""ListOps: its distribution, its labels against the definition, and splits that never share a tree."""

import re
import statistics

import numpy as np
import pytest
from listops_text import decode

from linnet.data.synthetic.base import Draws
from linnet.encoders.lra import END, UNKNOWN, listops
from linnet.encoders.lra.listops import FORMS, ROOTS, encode, generate_listops

OPERATORS = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: sum(x) % 10}


def evaluate_text(text: str) -> int:
    """The value of a tree as text, read symbol by symbol: the definition of the labels."""
    stack: list[list] = [[]]
    for symbol in re.sub(r"[()]", " ", text).split():
        if symbol == "]":
            operator, *arguments = stack.pop()
            stack[-1].append(OPERATORS[operator](arguments))
        elif symbol.isdigit():
            stack[-1].append(int(symbol))
        else:
            stack.append([symbol])
    [[value]] = stack
    return value


def texts(shard) -> list[str]:
    ends = np.cumsum(shard.lengths)
    return [decode(shard.values[end - length : end]) for end, length in zip(ends, shard.lengths, strict=True)]


def depth(text: str) -> int:
    here = deepest = 1
    for symbol in text.split():
        here += symbol.startswith("[") - (symbol == "]")
        deepest = max(deepest, here)
    return deepest


@pytest.fixture(scope="module")
def full():
    return [generate_listops("full", "train", block, 1000, 0) for block in (0, 1)]


def test_the_distribution_is_the_published_one(full):
    lengths = np.concatenate([shard.lengths for shard in full]) - 1  # without the end token
    labels = np.bincount(np.concatenate([shard.labels for shard in full])) / len(lengths)
    # Measured on 2,000 trees of the published program: mean 1,051, sd 394; the standard error of either mean is 9.
    assert abs(lengths.mean() - 1051) < 40
    assert abs(lengths.std() - 394) < 30
    assert abs(np.percentile(lengths, [25, 50, 75]) - [721, 985, 1330]).max() < 70
    assert (500 < lengths).all() and (lengths < 2000).all()
    assert abs(labels[[0, 9]] - [0.165, 0.168]).max() < 0.03
    assert (0.05 < labels[1:9]).all() and (labels[1:9] < 0.12).all()


def test_one_tree_of_twelve_is_kept():
    kept = sum(len(listops._draw(Draws(1, "share", number), FORMS["full"]).labels) for number in range(4))
    assert abs(kept / (4 * ROOTS) - 0.084) < 0.008


@pytest.mark.parametrize(("size", "deepest"), [("full", 10), ("reduced", 5)])
def test_labels_are_the_values_of_the_trees(size, deepest):
    shard = generate_listops(size, "train", 0, 200, 3)
    found = texts(shard)
    assert [evaluate_text(text) for text in found] == shard.labels.tolist()
    assert max(map(depth, found)) == deepest
    rows = [encode(text, FORMS[size].cut) for text in found]
    assert np.array_equal(np.concatenate(rows), shard.values)
    assert {symbol for text in found for symbol in text.split()} == set(listops.VOCABULARY)


def test_operators_have_two_to_ten_arguments_and_each_digit_is_as_likely():
    counts, digits = [], []
    for text in texts(generate_listops("reduced", "train", 0, 1000, 0)):
        stack = []
        for symbol in text.split():
            if symbol == "]":
                counts.append(stack.pop())
            if symbol.isdigit():
                digits.append(int(symbol))
            if stack and not symbol.startswith("["):
                stack[-1] += 1
            if symbol.startswith("["):
                stack.append(0)
    assert set(counts) == set(range(2, 11))
    assert abs(np.bincount(digits) / len(digits) - 0.1).max() < 0.005


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]", 5),
        ("( ( ( [MED 1 ) 4 ) ] )", 2),
        ("[SM 9 8 7 ]", 4),
        ("[MED 9 1 2 ]", 2),
        ("7", 7),
    ],
)
def test_known_values(text, value):
    assert evaluate_text(text) == value


def test_parentheses_do_not_count_and_long_text_is_cut():
    plain = encode("[MAX 2 9 [MIN 4 7 ] 0 ]", 2048)
    released = encode("( ( ( ( ( [MAX 2 ) 9 ) ( ( ( [MIN 4 ) 7 ) ] ) ) 0 ) ] )", 2048)
    assert np.array_equal(plain, released) and plain[-1] == END
    assert encode("[MAX 1 2 ]", 3).tolist() == [*encode("[MAX 1", 9)[:2], END]
    assert encode("[AVG 1 ]", 9)[0] == UNKNOWN
    assert listops.NUM_TOKENS == 18


def test_splits_share_no_tree_whatever_the_seeds():
    hashes = {}
    for split in ("train", "validation", "test"):
        drawn = [generate_listops("reduced", split, 0, 300, seed) for seed in (0, 1)]
        hashes[split] = np.concatenate([shard.hashes for shard in drawn])
        eighths = {"train": range(6), "validation": [6], "test": [7]}[split]
        assert set((hashes[split] >> np.uint64(61)).tolist()) == set(eighths)
        assert len(np.unique(hashes[split])) == 600
        for shard in drawn:
            assert np.array_equal(listops.hash_rows(shard.values, shard.lengths), shard.hashes)


def test_rows_do_not_depend_on_how_many_are_drawn():
    few, many = (generate_listops("reduced", "test", 2, rows, 0) for rows in (10, 300))
    assert np.array_equal(few.values, many.values[: len(few.values)])
    assert np.array_equal(few.labels, many.labels[:10])
    assert not np.array_equal(generate_listops("reduced", "test", 3, 10, 0).labels, few.labels)
