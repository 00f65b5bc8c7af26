"""Which documents are used, and which are held out: decided from their sizes and content alone, before any is encoded.

A document is held out if a keyed hash of its content falls below `validation_fraction`, so it stays on its side when
other documents are added, whatever its name or place, and its exact copies stay with it. Where that misses the fraction
by more than a factor of `TOLERANCE` (few documents, or one that outweighs the rest), the documents with the smallest
hashes are held out until the fraction is reached; and where that misses too (one document, say), the last part of each
document is, as a document of its own.
"""

from dataclasses import dataclass

import numpy as np

from linnet.data.order import uniform

TOLERANCE = 4.0


@dataclass(frozen=True)
class Split:
    """What becomes of each document, in bytes: [0, cut) trains, [cut, keep) is held out, the rest is left out.

    Attributes:
        keep, cut: int64 [documents]. The places are moved to whole characters or lines (`cut_text`) when text is there.
        by: "documents", "tails" (the end of each document is held out) or "given" (the held-out text was named).
        copies: how many documents were left out of training because they are in the given held-out text.
    """

    keep: np.ndarray
    cut: np.ndarray
    by: str
    copies: int = 0


def split_documents(sizes: np.ndarray, hashes: np.ndarray, fraction: float, max_bytes: int | None, seed: int) -> Split:
    """Holds out about `fraction` of the bytes, after taking documents in a random order until `max_bytes` are there.

    Args:
        sizes: int64 [documents], bytes.
        hashes: uint64 [documents], of their content.
        fraction: share of the bytes to hold out, in (0, 1).
        max_bytes: None takes all; the document that crosses the limit is cut there.
        seed: key of both choices.
    """
    keep = take(sizes, uniform(hashes, seed, "limit"), max_bytes)
    place = uniform(hashes, seed, "held out")
    total = keep.sum()
    for held in (place < fraction, place <= _reach(keep, place, fraction * total)):
        if fraction / TOLERANCE <= keep[held].sum() / total <= min(fraction * TOLERANCE, (1 + fraction) / 2):
            return Split(keep, np.where(held, 0, keep), "documents")
    return Split(keep, np.floor(keep * (1 - fraction)).astype(np.int64), "tails")


def given_split(sizes: np.ndarray, hashes: np.ndarray, held: np.ndarray, max_bytes: int | None, seed: int) -> Split:
    """Holds out the documents where `held` is true, and keeps exact copies of them out of training."""
    copies = np.isin(hashes, hashes[held]) & ~held
    train = np.where(held | copies, 0, sizes)
    keep = np.where(held, sizes, take(train, uniform(hashes, seed, "limit"), max_bytes))
    return Split(keep, np.where(held, 0, keep), "given", int(copies.sum()))


def take(sizes: np.ndarray, place: np.ndarray, max_bytes: int | None) -> np.ndarray:
    """How many bytes of each document are used if they are taken by rising `place` until `max_bytes` are there."""
    if max_bytes is None or sizes.sum() <= max_bytes:
        return sizes
    order = np.argsort(place, kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    taken = np.empty_like(sizes)
    taken[order] = np.clip(max_bytes - before, 0, sizes[order])
    return taken


def cut_text(text: bytes, keep: int, cut: int) -> tuple[bytes, bytes]:
    """The training and the held-out part of a document, cut between characters and, if there is one near, at a line."""
    text = text[: _character(text, keep)]
    if not 0 < cut < len(text):
        return (text, b"") if cut else (b"", text)
    line = text.find(b"\n", cut, cut + (len(text) - cut) // 2)
    cut = line + 1 if line >= 0 else _character(text, cut)
    return text[:cut], text[cut:]


def _reach(sizes: np.ndarray, place: np.ndarray, target: float) -> float:
    order = np.argsort(place, kind="stable")
    return place[order[min(int(np.searchsorted(np.cumsum(sizes[order]), target)), len(order) - 1)]]


def _character(text: bytes, at: int) -> int:
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return at
