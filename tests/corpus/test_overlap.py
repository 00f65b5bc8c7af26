"""Items of evaluation sets in documents, by their n-grams, against a plain reading of the rule."""

import random

import numpy as np
import pytest

from linnet.corpus.dedup import overlap


def load(items: list[str], path, shift: int = 0) -> overlap.Grams:
    found = [overlap.grams_of(item, shift) for item in items]
    words = np.array([words for words, _ in found])
    counts = np.array([len(hashes) for _, hashes in found])
    path.write_bytes(overlap.pack(words, counts, np.concatenate([hashes for _, hashes in found]), shift))
    return overlap.load(path, (path.stat().st_size, path.stat().st_mtime_ns))


def words_of(rng: random.Random, count: int, different: int = 10**6) -> list[str]:
    return [f"w{rng.randrange(different)}" for _ in range(count)]


def plain(text: list[str], item: list[str], share: float) -> bool:
    """Whether a text of at least 8 words holds `share` of the n-grams of an item, or is a part of it."""
    grams = [{tuple(one[start : start + 8]) for start in range(len(one) - 7)} for one in (text, item)]
    own = [tuple(text[start : start + 8]) in grams[1] for start in range(len(text) - 7)]
    part = len(own) >= 8 and sum(own) >= share * len(own)
    return len(grams[0] & grams[1]) >= share * len(grams[1]) or part


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_find_is_the_plain_rule(tmp_path, share):
    rng = random.Random(0)
    items = [words_of(rng, rng.randrange(8, 60)) for _ in range(40)]
    texts = []
    for number in range(300):
        item = items[number % 40]
        start, end = sorted(rng.choices(range(len(item) + 1), k=2))
        texts.append(words_of(rng, rng.randrange(8, 30)) * (number % 3 > 0) + item[start:end])
    texts = [text for text in texts if len(text) >= 8]
    found = overlap.find([" ".join(text) for text in texts], load([" ".join(i) for i in items], tmp_path / "g"), share)
    expected = [next((n for n, item in enumerate(items) if plain(text, item, share)), -1) for text in texts]
    assert found.tolist() == expected and len(set(expected)) > 10


def test_of_a_large_set_long_items_are_found_by_a_sample(tmp_path):
    rng = random.Random(1)
    long, short = [words_of(rng, 2000) for _ in range(20)], [words_of(rng, 40) for _ in range(20)]
    assert overlap.shift_for(10**6) == 0 and overlap.shift_for(8 * 6 * overlap.MOST) == 3
    grams = load([" ".join(item) for item in long + short], tmp_path / "grams", shift=3)
    assert len(grams.hashes) < 20 * 2000 / 4
    texts = [words_of(rng, 500) + item + words_of(rng, 500) for item in long + short]
    texts += [item[300:1200] for item in long] + [words_of(rng, 3000) for _ in range(50)]
    expected = [*range(40), *range(20), *[-1] * 50]
    assert overlap.find([" ".join(text) for text in texts], grams, 0.7).tolist() == expected


def test_what_many_items_share_counts_for_none(tmp_path, monkeypatch):
    monkeypatch.setattr(overlap, "FREQUENT", 10)
    rng = random.Random(2)
    prompt = words_of(rng, 30)
    items = [" ".join(prompt + words_of(rng, 12)) for _ in range(20)] + [" ".join(prompt)]
    texts = [" ".join(prompt + words_of(rng, 40)), f"before {items[3]}"]
    assert overlap.find(texts, load(items, tmp_path / "grams"), 0.7).tolist() == [-1, 3]
