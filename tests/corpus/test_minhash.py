"""MinHash against a plain reading of its definition: words, shingles, similarity, and how often copies share a key."""

import random
import re

import numpy as np
import pytest

from linnet.corpus.dedup import minhash
from linnet.corpus.dedup.minhash import (
    BANDS,
    ROWS,
    band_keys,
    jaccard,
    shape_for,
    shingle_sets,
    shingles,
    word_count,
)


def plain_shingles(text: str) -> set:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + 5]) for start in range(max(len(words) - 4, 1))} if words else set()


def plain_jaccard(a: str, b: str) -> float:
    a, b = plain_shingles(a), plain_shingles(b)
    return len(a & b) / len(a | b)


def text_of(rng: random.Random, words: int, different: int = 5000) -> list[str]:
    return [f"w{rng.randrange(different)}" for _ in range(words)]


def replaced(rng: random.Random, words: list[str], count: int) -> list[str]:
    words = list(words)
    for place in rng.sample(range(len(words)), count):
        words[place] = f"x{rng.randrange(10**6)}"
    return words


def test_shingles_are_those_of_a_plain_reading():
    rng = random.Random(0)
    alphabet = "abcXYZ019_ .,-\n\tÄöéß“”п"
    for _ in range(300):
        a = "".join(rng.choices(alphabet, k=rng.randrange(80)))
        b = a[: rng.randrange(len(a) + 1)] + "".join(rng.choices(alphabet, k=rng.randrange(20)))
        assert len(shingles(a)) == len(plain_shingles(a))
        assert word_count(a) == len(re.findall(r"\w+", a))
        if plain_shingles(a) and plain_shingles(b):
            assert jaccard(shingles(a), shingles(b)) == plain_jaccard(a, b)


def test_case_punctuation_and_normal_forms_do_not_count_but_numbers_do():
    text = "Ångström said: 17 of 20 — in 1868 — were lines."
    assert (shingles(text) == shingles("ÅNGSTRÖM, said 17 of 20 in 1868 were lines")).all()
    assert not set(shingles(text)) & set(shingles(text.replace("17", "18").replace("20", "21").replace("1868", "1869")))


@pytest.mark.parametrize("text", ["文本语料库的清洗与去重", "ข้อความภาษาไทย", "これはテストです", "𠀀𠀁𠀂𠀃𠀄𠀅𠀆"])
def test_scripts_without_spaces_have_shingles_of_characters(text):
    assert word_count(text) == len(text) and len(shingles(text)) == len(text) - 4
    assert 0 < jaccard(shingles(text), shingles(text[:-1])) < 1


def test_a_short_text_is_one_shingle_of_all_words():
    assert len(shingles("two words")) == len(shingles("a b c d")) == len(shingles("a b c d e")) == 1
    different = ["a", "b", "a b", "b a", "a a", "a b c", "a b c d", "a b c d e", "b c d e"]
    assert len({int(shingles(text)[0]) for text in different}) == len(different)
    keys = band_keys(["Two words", "two words.", "", "two", "!?"])
    assert (keys[0] == keys[1]).all() and (keys[0] != keys[3]).all()
    assert keys.any(axis=1).tolist() == [True, True, False, True, False]
    assert not len(shingles("...")) and jaccard(shingles("..."), shingles("a")) == 0


def test_keys_do_not_depend_on_the_other_texts(monkeypatch):
    rng = random.Random(1)
    texts = [
        " ".join(text_of(rng, rng.choice([0, 1, 4, 5, 30, 2000]))) + rng.choice(["", "é", "文"]) for _ in range(60)
    ]
    texts += [" ".join(text_of(rng, 40_000)), "文" * 140_000, "x" * 300_000, "", "a b c " * 50_000]
    together = band_keys(texts)
    alone = np.concatenate([band_keys([text]) for text in texts])
    assert (together == alone).all()
    monkeypatch.setattr(minhash, "BLOCK", 37)
    assert (band_keys(texts[:40]) == together[:40]).all()


def test_sets_of_many_texts_are_those_of_each():
    texts = ["", "a b", "a b c d e f a b c d e f", "x " * 100_000, "..", "é a b c d e"]
    hashes, sizes = shingle_sets(texts)
    assert (hashes == np.concatenate([shingles(text) for text in texts])).all()
    assert sizes.tolist() == [len(shingles(text)) for text in texts]
    assert [len(array) for array in shingle_sets([])] == [0, 0]


def test_pieces_of_a_long_text_are_cut_between_words(monkeypatch):
    text = " ".join(text_of(random.Random(2), 3000)) + " ä"
    keys, found = band_keys([text]), shingles(text)
    monkeypatch.setattr(minhash, "PIECE", 1000)
    minhash._powers.cache_clear()
    try:
        assert (band_keys([text]) == keys).all() and (shingles(text) == found).all()
    finally:
        minhash._powers.cache_clear()


def test_values_stay_what_they_are():
    # Signatures may be kept and compared with those of a later release.
    keys = band_keys(["The quick brown fox jumps over the lazy dog", "文本语料库的清洗与去重"])
    assert [f"{key:016x}" for key in keys[:, 0]] == ["342162e3964cea21", "d0015f8444f889be"]


@pytest.mark.parametrize("similarity, pairs, tolerance", [(0.9, 2000, 0.01), (0.8, 2000, 0.03)])
def test_pairs_share_a_key_as_often_as_the_formula_says(similarity, pairs, tolerance):
    rng = random.Random(3)
    first, second, similarities = [], [], []
    while len(first) < pairs:
        a = text_of(rng, rng.randrange(100, 200))
        b = replaced(rng, a, round(len(a) * (1 - similarity) / (5 * (1 + similarity))))
        common = len(set(zip(a, a[1:], a[2:], a[3:], a[4:])) & set(zip(b, b[1:], b[2:], b[3:], b[4:])))  # noqa: B905
        found = common / (2 * (len(a) - 4) - common)
        if abs(found - similarity) < 0.03 if similarity < 0.9 else found >= similarity:
            first.append(" ".join(a)), second.append(" ".join(b)), similarities.append(found)
    recall = (band_keys(first) == band_keys(second)).any(axis=1).mean()
    expected = np.mean(1 - (1 - np.array(similarities) ** ROWS) ** BANDS)
    assert abs(recall - expected) < tolerance
    assert recall >= 0.99 or similarity < 0.9


def test_shape_for_a_threshold_finds_nine_of_ten_pairs():
    assert shape_for(0.8) == (BANDS, ROWS)
    for threshold in (0.05, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0):
        bands, rows = shape_for(threshold)
        assert 1 <= bands * rows <= BANDS * ROWS
        assert 1 - (1 - threshold**rows) ** bands >= 0.9
    keys = band_keys(["one text of a few words", "one text of a few words", "another"], shape_for(0.5))
    assert keys.shape == (3, shape_for(0.5)[0]) and (keys[0] == keys[1]).all() and not (keys[0] == keys[2]).any()
