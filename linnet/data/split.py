"""Decides which documents are used and which are held out, from their sizes and content, before they are encoded.

A document is held out if a keyed hash of its content is below `validation_fraction`. So it stays in its split when
other documents are added, whatever its name or place, and its exact copies are in the same split. If this misses the
fraction by more than a factor of `TOLERANCE` (few documents, or one much larger than the rest), the documents with the
smallest hashes are held out until the fraction is reached. If this misses it too (a single document, for example), the
last part of each document is held out, as a separate document.
"""

from dataclasses import dataclass

import numpy as np

from linnet.data.order import uniform

TOLERANCE = 4.0


@dataclass(frozen=True)
class Split:
    """The use of each document, by bytes: [0, cut) is for training, [cut, keep) is held out, the rest is not used.

    Attributes:
        keep, cut: int64 [documents]. `cut_text` later moves these places to whole characters or lines.
        by: "documents", "tails" (the end of each document is held out) or "given" (the held-out text was named).
        copies: number of documents left out of training because the given held-out text contains them.
    """

    keep: np.ndarray
    cut: np.ndarray
    by: str
    copies: int = 0


def split_documents(sizes: np.ndarray, hashes: np.ndarray, fraction: float, max_bytes: int | None, seed: int) -> Split:
    """Takes documents in a random order until they have `max_bytes` bytes, and holds out about `fraction` of these.

    Args:
        sizes: int64 [documents], in bytes.
        hashes: uint64 [documents], of their content.
        fraction: share of the bytes to hold out, in (0, 1).
        max_bytes: None takes all; the document that crosses the limit is cut there.
        seed: seed of both choices.
    """
    keep = take(sizes, uniform(hashes, seed, "limit"), max_bytes)
    place = uniform(hashes, seed, "held out")
    total = keep.sum()
    for held in (place < fraction, place <= _reach(keep, place, fraction * total)):
        if fraction / TOLERANCE <= keep[held].sum() / total <= min(fraction * TOLERANCE, (1 + fraction) / 2):
            return Split(keep, np.where(held, 0, keep), "documents")
    return Split(keep, np.floor(keep * (1 - fraction)).astype(np.int64), "tails")


def given_split(sizes: np.ndarray, hashes: np.ndarray, held: np.ndarray, max_bytes: int | None, seed: int) -> Split:
    """Holds out the documents for which `held` is True, and leaves exact copies of them out of training."""
    copies = np.isin(hashes, hashes[held]) & ~held
    train = np.where(held | copies, 0, sizes)
    keep = np.where(held, sizes, take(train, uniform(hashes, seed, "limit"), max_bytes))
    return Split(keep, np.where(held, 0, keep), "given", int(copies.sum()))


def take(sizes: np.ndarray, place: np.ndarray, max_bytes: int | None) -> np.ndarray:
    """Returns the used bytes of each document if documents are taken by ascending `place` up to `max_bytes` bytes."""
    if max_bytes is None or sizes.sum() <= max_bytes:
        return sizes
    order = np.argsort(place, kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    taken = np.empty_like(sizes)
    taken[order] = np.clip(max_bytes - before, 0, sizes[order])
    return taken


def cut_text(text: bytes, keep: int, cut: int) -> tuple[bytes, bytes]:
    """Returns the training part and the held-out part of a document.

    The cut is at the end of a line if one is near, else between two characters.
    """
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
