"""MinHash signatures of texts in numpy: words, shingles of words, and keys by which near copies find each other.

A text is read as its lower-case words: runs of letters, marks, digits and `_`. Numbers stay what they are, so that two
tables that differ in their numbers only are not copies. In scripts that are written without spaces, such as Chinese,
Japanese and Thai, each character is a word. A shingle is `SHINGLE` words that follow each other; a shorter text has one
shingle of all its words. The Jaccard similarity of two texts is that of their sets of shingles.

For each of `BANDS` x `ROWS` permutations h of the shingles' hashes, two texts have the same smallest h with the
probability of their similarity s. A band's key stands for the smallest values of its `ROWS` permutations. So two
texts share a key of at least one band with probability 1 - (1 - s^ROWS)^BANDS (Broder 1997; Leskovec, Rajaraman and
Ullman, Mining of Massive Datasets, section 3.4).

All hashes are of 64 bits and come from constants of this file. They are the same in every process and on every machine.
Words are hashed without a loop over them: the hash of a word is a polynomial in the values of its characters, and the
differences of one cumulative sum give the polynomials of all words of a batch.
"""

import functools
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

BANDS, ROWS = 14, 8
PERMUTATIONS = BANDS * ROWS
FOUND, MOST_ROWS = 0.9, 16
SHINGLE = 5  # words
PIECE = 1 << 17  # characters that are hashed at a time; the temporary arrays of a piece fit in a cache
BLOCK = 1 << 10  # shingles that are permuted at a time, for the same reason

# Scripts that do not put spaces between words: the first and last code point of their blocks.
UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19DF),  # Tai Le, New Tai Lue
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x2E80, 0x2FDF),  # radicals of Han
    (0x3005, 0x3007),
    (0x3041, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xA980, 0xA9DF),  # Javanese
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),  # half-width Katakana
)
BASE = 0x9E3779B97F4A7C15  # of the polynomials; odd, so that it has an inverse modulo 2^64
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]
BETWEEN, INSIDE, ALONE = 0, 1, 2  # a character between words, one of a word, one that is a word


def shape_for(threshold: float) -> tuple[int, int]:
    """Returns the bands and rows for pairs of at least this similarity: 14 and 8 for 0.8.

    Of `PERMUTATIONS`, the most rows with which at least `FOUND` of the pairs at the threshold share a key: more rows
    give fewer pairs that are less similar.
    """
    for rows in range(MOST_ROWS, 1, -1):
        bands = PERMUTATIONS // rows
        if 1 - (1 - threshold**rows) ** bands >= FOUND:
            return bands, rows
    return PERMUTATIONS, 1


def band_keys(texts: Sequence[str], shape: tuple[int, int] = (BANDS, ROWS)) -> np.ndarray:
    """Returns the keys of texts, uint64 [texts, bands]; those of a text without a word are 0.

    Args:
        shape: numbers of bands and rows.
    """
    bands, rows = shape
    lowest = np.full((bands * rows, len(texts)), 0xFFFFFFFF, np.uint32)
    has_words = np.zeros(len(texts), bool)
    for members, hashes, starts in batches(texts, SHINGLE):
        has_words[members] = True
        _permute(lowest, members, (hashes >> np.uint64(32)).astype(np.uint32), starts)
    keys = np.zeros((bands, len(texts)), np.uint64)
    for band, values in enumerate(lowest.reshape(bands, rows, len(texts))):
        keys[band] = _mixed((values * _constants(3, rows)[:, None]).sum(axis=0, dtype=np.uint64))
    return np.where(has_words, keys, np.uint64(0)).T


def text_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns one hash of all words of each text, uint64 [texts], and the number of its words, int64 [texts]."""
    hashes, counts = np.zeros(len(texts), np.uint64), np.zeros(len(texts), np.int64)
    powers = _powers()[0]
    for members, values, starts in batches(texts, 1):
        lengths = np.diff(np.append(starts, len(values)))
        places = np.arange(len(values)) - np.repeat(starts, lengths)
        sums = np.add.reduceat(values * powers[places], starts)
        if counts[members[0]]:  # another piece of a long text
            sums *= np.uint64(pow(BASE, int(counts[members[0]]), 1 << 64))
        hashes[members] += sums
        counts[members] += lengths
    return _mixed(hashes), counts


def shingles(text: str, words: int = SHINGLE) -> np.ndarray:
    """Returns the hashes of a text's shingles of `words` words, uint64, sorted and each once."""
    parts = [hashes for _, hashes, _ in batches([text], words)]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def shingle_sets(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `shingles` returns for each text, one after the other, and their sizes, int64 [texts]."""
    owners, parts = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    for members, hashes, starts in batches(texts, SHINGLE):
        owners.append(np.repeat(members, np.diff(np.append(starts, len(hashes)))))
        parts.append(hashes)
    texts_of, hashes = np.concatenate(owners), np.concatenate(parts)
    order = np.lexsort((hashes, texts_of))
    texts_of, hashes = texts_of[order], hashes[order]
    once = np.ones(len(hashes), bool)
    once[1:] = (texts_of[1:] != texts_of[:-1]) | (hashes[1:] != hashes[:-1])
    return hashes[once], np.bincount(texts_of[once], minlength=len(texts))


def word_count(text: str) -> int:
    """Returns the number of words of a text."""
    return sum(len(hashes) for _, hashes, _ in batches([text], 1))


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the size of the intersection of two sets over that of their union; 0 if one is empty.

    Args:
        a, b: sorted arrays without repetition, from `shingles`.
    """
    if not len(a) or not len(b):
        return 0.0
    if len(a) > len(b):
        a, b = b, a
    places = np.searchsorted(b, a)
    both = int(np.count_nonzero(b[np.minimum(places, len(b) - 1)] == a))
    return both / (len(a) + len(b) - both)


def batches(texts: Sequence[str], words: int) -> Iterator[Batch]:
    """Yields the hashes of the shingles of all texts, several short texts or a piece of a long one at a time.

    Yields:
        members: int [n], numbers of texts that have shingles here, in order.
        hashes: uint64, the hashes of their shingles, one text's after the other's.
        starts: int [n], where in `hashes` the shingles of each member start.
    """
    group: list[tuple[int, str]] = []
    size = 0
    for number, text in enumerate(texts):
        text = text if text.isascii() else unicodedata.normalize("NFC", text)
        if len(text) >= PIECE:
            yield from _long(number, text, words)
            continue
        if size + len(text) >= PIECE:
            yield from _together(group, words)
            group, size = [], 0
        group.append((number, text))
        size += len(text) + 1
    yield from _together(group, words)


def _together(group: list[tuple[int, str]], words: int) -> Iterator[Batch]:
    """Yields the batches of several short texts: those that are ASCII, which take a faster path, and the others."""
    for ascii_ in (True, False):
        chosen = [(number, text) for number, text in group if text.isascii() is ascii_]
        if not chosen:
            continue
        values, places = _words("\n".join(text for _, text in chosen))
        lengths = np.array([len(text) + 1 for _, text in chosen])
        edges = np.searchsorted(places, np.concatenate([[0], np.cumsum(lengths)]))
        counts = np.diff(edges)  # words per text
        if len(places):
            here = np.flatnonzero(counts)
            members = np.array([number for number, _ in chosen])[here]
            yield members, *_join(values, edges[:-1][here], counts[here], words)


def _long(number: int, text: str, words: int) -> Iterator[Batch]:
    """Yields the batches of one long text, piece by piece."""
    carried = np.empty(0, np.uint64)
    start, yielded = 0, False
    member, first = np.array([number]), np.array([0])
    while start < len(text):
        end = min(start + PIECE - 1, len(text))
        if end < len(text):
            space = max(text.rfind(" ", start, end), text.rfind("\n", start, end))
            end = space + 1 if space > start else end
        values = np.concatenate([carried, _words(text[start:end])[0]])
        if len(values) >= words:
            yield member, _sums(values, words), first
            yielded = True
            carried = values[len(values) - words + 1 :]
        else:
            carried = values
        start = end
    if not yielded and len(carried):
        yield member, *_join(carried, first, np.array([len(carried)]), words)


def _join(values: np.ndarray, starts: np.ndarray, counts: np.ndarray, words: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of the shingles of texts, and where those of each text start.

    Args:
        values: uint64 [words of all texts], the hashes of their words. starts, counts: where each text's words start
            in `values`, and their number, at least 1.
    """
    sums = _sums(values, words)  # also of shingles that reach from one text into the next
    kept = np.maximum(counts - words + 1, 1)
    first = np.cumsum(kept) - kept
    if len(counts) == 1 and counts[0] >= words:
        return sums, first
    places = np.arange(kept.sum()) + np.repeat(starts - first, kept)
    hashes = sums[np.minimum(places, len(sums) - 1)] if len(sums) else np.empty(len(places), np.uint64)
    for text in np.flatnonzero(counts < words):  # one shingle of all words, and of their number
        start, count = starts[text], counts[text]
        whole = values[start : start + count] * _constants(1, words)[:count]
        hashes[first[text]] = _mixed(whole.sum(dtype=np.uint64, keepdims=True) + np.uint64(count))[0]
    return hashes, first


def _sums(values: np.ndarray, words: int) -> np.ndarray:
    """Returns the hash of each `words` values that follow each other, uint64 [len(values) - words + 1]."""
    count = max(len(values) - words + 1, 0)
    factors = _constants(1, words)
    result = np.zeros(count, np.uint64)
    for place in range(words):
        result += values[place : place + count] * factors[place]
    return _mixed(result)


def _words(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the hashes of the words of at most `PIECE` characters, uint64, and where each starts, int64."""
    if text.isascii():
        codes = np.frombuffer(text.encode("ascii"), np.uint8)
        kinds, characters = _ascii_tables()
        kind, values = kinds[codes], characters[codes]
    else:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        kinds, characters = _tables()
        low = np.minimum(codes, len(kinds) - 1)
        kind, values = kinds[low], characters[low]
        high = np.flatnonzero(codes >= len(kinds))
        kind[high], values[high] = _kinds_beyond(codes[high]), _values(codes[high])
    powers, inverses = _powers()
    sums = np.empty(len(codes) + 1, np.uint64)
    sums[0] = 0
    np.cumsum(values * powers[: len(codes)], out=sums[1:])
    inside = np.zeros(len(codes) + 2, np.int8)
    inside[1:-1] = kind == INSIDE
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[::2], edges[1::2]
    alone = np.flatnonzero(kind == ALONE)
    if len(alone):
        starts, ends = np.concatenate([starts, alone]), np.concatenate([ends, alone + 1])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    return _mixed((sums[ends] - sums[starts]) * inverses[starts]), starts


def _permute(lowest: np.ndarray, members: np.ndarray, hashes: np.ndarray, starts: np.ndarray) -> None:
    """Lowers `lowest`, uint32 [permutations, texts], by the smallest permuted hashes of the member texts.

    A permutation is (a x + b) mod 2^32 with an odd a.
    """
    factors, offsets = (values[: len(lowest)] for values in _permutations())
    for start in range(0, len(hashes), BLOCK):
        block = hashes[start : start + BLOCK]
        first = int(np.searchsorted(starts, start, side="right")) - 1  # the text that the block starts in
        last = int(np.searchsorted(starts, start + len(block)))
        permuted = factors * block
        permuted += offsets
        if last - first == 1:
            minima = permuted.min(axis=1, keepdims=True)
        else:
            minima = np.minimum.reduceat(permuted, np.maximum(starts[first:last] - start, 0), axis=1)
        here = members[first:last]
        lowest[:, here] = np.minimum(lowest[:, here], minima)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Returns a permutation of 64-bit values that spreads each bit over all (the end of splitmix64; Steele 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@functools.cache
def _constants(stream: int, count: int) -> np.ndarray:
    """Returns odd numbers of 64 bits; each use has a stream of its own."""
    return _mixed(np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)) | np.uint64(1)


@functools.cache
def _permutations() -> tuple[np.ndarray, np.ndarray]:
    values = _mixed(np.arange(1, PERMUTATIONS + 1, dtype=np.uint64) + np.uint64(2 << 40))[:, None]
    return (values >> np.uint64(32)).astype(np.uint32) | np.uint32(1), values.astype(np.uint32)


@functools.cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Returns the powers of an odd base modulo 2^64, and of its inverse, uint64 [PIECE]."""
    tables = []
    for factor in (BASE, pow(BASE, -1, 1 << 64)):
        powers = np.full(PIECE, factor, np.uint64)
        powers[0] = 1
        tables.append(np.cumprod(powers))
    return tables[0], tables[1]


def _values(codes: np.ndarray) -> np.ndarray:
    return _mixed(codes.astype(np.uint64) + np.uint64(4 << 40))


@functools.cache
def _ascii_tables() -> tuple[np.ndarray, np.ndarray]:
    """Returns the kind of each ASCII character, uint8 [128], and the value of its lower-case form, uint64 [128]."""
    characters = [chr(code) for code in range(128)]
    kinds = np.array([INSIDE if c.isalnum() or c == "_" else BETWEEN for c in characters], np.uint8)
    return kinds, _values(np.array([ord(c.lower()) for c in characters]))


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Returns the same for the first 65,536 code points."""
    count = 1 << 16
    characters = [chr(code) for code in range(count)]
    small = [character.lower() for character in characters]
    letters = [unicodedata.category(character)[0] in "LMN" or character == "_" for character in characters]
    kinds = np.where(letters, INSIDE, BETWEEN).astype(np.uint8)
    for first, last in UNSPACED:
        block = kinds[first : last + 1]
        block[block == INSIDE] = ALONE
    return kinds, _values(np.array([ord(s) if len(s) == 1 else code for code, s in enumerate(small)]))


def _kinds_beyond(codes: np.ndarray) -> np.ndarray:
    """Returns the kinds of code points from 65,536 on: Han from 0x20000 on, pictures from 0x1F000 on, else letters."""
    han, pictures = (codes >= 0x20000) & (codes < 0x40000), (codes >= 0x1F000) & (codes < 0x20000)
    return np.select([han, pictures | (codes >= 0x40000)], [ALONE, BETWEEN], INSIDE).astype(np.uint8)


def components(count: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the smallest member of each node's connected component, int64 [count].

    Each round hooks the larger of two linked roots to the smaller one and shortens all paths to length 1 (Shiloach and
    Vishkin, 1982), so that the number of rounds grows with the logarithm of the longest path.

    Args:
        first, second: int64 [links], the two nodes of each link.
    """
    roots = np.arange(count)
    while len(first):
        a, b = roots[first], roots[second]
        open_ = a != b
        first, second, a, b = first[open_], second[open_], a[open_], b[open_]
        np.minimum.at(roots, np.maximum(a, b), np.minimum(a, b))
        while (shorter := roots[roots]).tobytes() != roots.tobytes():
            roots = shorter
    return roots


def equal_runs(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds equal values.

    Args:
        keys: [count], or [count, 2] for values of two numbers.

    Returns:
        first, other: int64, for each value that comes again: where it came first, and where it comes again.
    """
    order = np.argsort(keys, kind="stable") if keys.ndim == 1 else np.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    again = ordered[1:] == ordered[:-1]
    if keys.ndim == 2:
        again = again.all(axis=1)
    del ordered
    starts = np.concatenate([[True], ~again])[: len(keys)]
    places = np.flatnonzero(~starts)
    heads = np.flatnonzero(starts)
    return order[heads[np.searchsorted(heads, places) - 1]], order[places]
