"""Decontamination: which documents hold an item of an evaluation set, or are a part of one.

An item is a document of the other set. A document is removed if it has at least the share `overlap` of an item's
n-grams of `WORDS` words, in any order and among any other text; or if at least that share of its own n-grams are in
the other set (Chowdhery et al., PaLM, 2022, section 8: 70 % of 8-grams). A near copy shares them too: texts with a
5-gram Jaccard similarity of 0.7 have more than 70 % of their 8-grams in common. An item of 5 to 7 words is one n-gram
of its own length. A shorter one is common language; it removes only documents that are the same words.
"""

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linnet.corpus.dedup.minhash import batches, shingles, word_count

WORDS = 8
FEWEST = 5  # words of an item that is found in longer documents
OWN = 8  # n-grams that a document must have for its own share to count: 15 words
MOST = 8 << 20  # n-grams of the other set that are kept; of a larger set, a sample of the n-grams of its long items
WHOLE = 64  # n-grams of an item of which all are kept
FREQUENT = 1000  # an n-gram of more items than this says nothing of any
BITS = 22


@dataclass(frozen=True)
class Grams:
    """The n-grams of the other set.

    Attributes:
        hashes: uint64 [n], sorted; an n-gram of several items comes once per item.
        items: int32 [n], the number of the item of each.
        totals: int32 [items], the number of its n-grams here.
        lengths: the lengths in words of the n-grams.
        shift: of long items, the n-grams are kept whose hash ends in this many zeros.
        likely: bool [2^BITS], whether a hash that starts with these bits may be in `hashes`.
    """

    hashes: np.ndarray
    items: np.ndarray
    totals: np.ndarray
    lengths: tuple[int, ...]
    shift: int
    likely: np.ndarray


def grams_of(text: str, shift: int) -> tuple[int, np.ndarray]:
    """Returns the length in words of an item's n-grams, and their hashes."""
    words = WORDS
    if len(text) < 200:  # more characters are at least 8 words, or a few that are not language
        count = word_count(text)
        words = count if FEWEST <= count < WORDS else WORDS
    hashes = shingles(text, words)
    return words, hashes if len(hashes) <= WHOLE else hashes[_sampled(hashes, shift)]


def shift_for(size: int) -> int:
    """Returns `Grams.shift` for a set of this many bytes of text."""
    return max(0, int(np.ceil(np.log2(max(size, 1) / 6 / MOST))))


def pack(words: np.ndarray, counts: np.ndarray, hashes: np.ndarray, shift: int) -> bytes:
    """Returns a file with the `Grams` of a set.

    Args:
        words, counts: int64 [items], length and number of the n-grams of each item.
        hashes: uint64, the n-grams of all items, one item's after the other's.
    """
    items = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    order = np.argsort(hashes, kind="stable")
    hashes, items = hashes[order], items[order]
    edges = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1], [True]])[: len(hashes) + 1])
    many = np.diff(edges) > FREQUENT
    kept = ~np.repeat(many, np.diff(edges))
    hashes, items = hashes[kept], items[kept]
    totals = np.bincount(items, minlength=len(counts)).astype(np.int32)
    file = io.BytesIO()
    lengths = np.unique(words[totals > 0])
    np.savez(file, hashes=hashes, items=items, totals=totals, lengths=lengths, shift=np.array(shift))
    return file.getvalue()


@functools.lru_cache(maxsize=1)
def load(path: Path, stamp: tuple) -> Grams:
    """Reads the file of `pack`. `stamp` is its size and time, so that a process does not keep an older one."""
    with np.load(path) as values:
        hashes, shift = values["hashes"], int(values["shift"])
        likely = np.zeros(1 << BITS, bool)
        likely[hashes >> np.uint64(64 - BITS)] = True
        lengths = tuple(values["lengths"].tolist())
        return Grams(hashes, values["items"], values["totals"], lengths, shift, likely)


def find(texts: Sequence[str], grams: Grams, overlap: float) -> np.ndarray:
    """Returns the number of an item that each text holds or is a part of, int64 [texts]; -1 for none."""
    totals, hits = np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64)
    owners, matches = [], []
    for words in grams.lengths:
        for members, hashes, starts in batches(texts, words):
            places = np.flatnonzero(grams.likely[hashes >> np.uint64(64 - BITS)])
            at = np.minimum(np.searchsorted(grams.hashes, hashes[places]), len(grams.hashes) - 1)
            places = places[grams.hashes[at] == hashes[places]]
            text = members[np.searchsorted(starts, places, side="right") - 1]
            owners.append(text)
            matches.append(hashes[places])
            if words == WORDS:
                sampled = np.concatenate([[0], np.cumsum(_sampled(hashes, grams.shift))])
                totals[members] += sampled[np.append(starts[1:], len(hashes))] - sampled[starts]
                hits += np.bincount(text[_sampled(hashes[places], grams.shift)], minlength=len(texts))
    return (
        _matches(np.concatenate(owners), np.concatenate(matches), totals, hits, grams, overlap)
        if owners
        else totals - 1
    )


def _matches(
    texts: np.ndarray, hashes: np.ndarray, totals: np.ndarray, hits: np.ndarray, grams: Grams, overlap: float
) -> np.ndarray:
    """Returns the item of each text, from the n-grams that were found."""
    result = np.full(len(totals), -1, np.int64)
    if not len(texts):
        return result
    order = np.lexsort((hashes, texts))
    texts, hashes = texts[order], hashes[order]
    once = np.concatenate([[True], (texts[1:] != texts[:-1]) | (hashes[1:] != hashes[:-1])])
    texts, hashes = texts[once], hashes[once]
    first, end = np.searchsorted(grams.hashes, hashes), np.searchsorted(grams.hashes, hashes, side="right")
    counts = end - first
    places = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    pairs, shared = np.unique(
        np.repeat(texts, counts) * len(grams.totals) + grams.items[places].astype(np.int64), return_counts=True
    )
    text, item = np.divmod(pairs, len(grams.totals))
    best = np.lexsort((item, -shared / grams.totals[item], text))
    text, item, shared = text[best], item[best], shared[best]
    lead = np.concatenate([[True], text[1:] != text[:-1]])  # the item of which a text holds the largest share
    text, item, shared = text[lead], item[lead], shared[lead]
    inside = (totals[text] >= OWN) & (hits[text] >= overlap * totals[text])
    chosen = (shared >= overlap * grams.totals[item]) | inside
    result[text[chosen]] = item[chosen]
    return result


def _sampled(hashes: np.ndarray, shift: int) -> np.ndarray:
    return hashes & np.uint64((1 << shift) - 1) == 0
