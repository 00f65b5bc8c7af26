"""Removes lines that came before, in the same document or in an earlier one: menus, licences, notices.

Two lines are equal if their words are (`minhash.py` says what a word is). Lines of few words, such as
`return self` or "See also", belong to many texts and stay. With `near`, near copies of a line by MinHash go
too, such as a notice with another date; the first line of a cluster stays.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linnet.corpus.dedup.minhash import band_keys, components, equal_runs, shape_for, text_hashes
from linnet.corpus.documents import Document, Part, Samples, read_part
from linnet.corpus.stage import Progress, Stage, whole_file

REASONS = {1: "copied line", 2: "near copy of a line"}


def without_copied_lines(
    stage: Stage,
    words: int,
    threshold: float | None = None,
    *,
    workers: int,
    engine: str,
    progress: Progress | None = None,
) -> dict:
    """Writes the shards of a stage without copied lines of at least `words` words. Returns its `stage.json`.

    Args:
        threshold: similarity from which lines are near copies, which go too; None keeps them.
    """
    shape = (0, 0) if threshold is None else shape_for(threshold)
    paths = stage.map("lines", _Lines(words, shape), workers=workers, engine=engine, progress=progress)
    sizes = [int(np.fromfile(path, np.int64, 1)[0]) for path in paths]
    starts = tuple(np.cumsum([0, *sizes]).tolist())

    def column(number: int) -> np.ndarray:
        pairs = zip(paths, sizes, strict=True)
        return np.concatenate([np.fromfile(path, np.uint64, n, offset=8 + 8 * n * number) for path, n in pairs])

    first, again = equal_runs(column(0))
    copied = np.zeros(starts[-1], np.uint8)
    copied[again] = 1
    links = np.empty(0, np.int64)
    for band in range(1, 1 + shape[0]):
        keys = column(band)
        members = np.flatnonzero((copied == 0) & (keys != 0))
        one, other = equal_runs(keys[members])
        links = np.union1d(links, members[one] * len(copied) + members[other])
    copied[components(len(copied), *np.divmod(links, max(1, len(copied)))) != np.arange(len(copied))] = 2
    with whole_file(stage.out / "parts" / "copied") as file:
        file.write(copied.tobytes())
    keep = _Keep(stage.out / "parts" / "copied", starts, words)
    stage.write(keep, workers=workers, engine=engine, progress=progress)
    results = {"lines": len(copied), "copied lines": len(again), "texts of copied lines": len(np.unique(first))}
    if threshold is not None:
        results |= {"near copies of lines": int((copied == 2).sum()), "bands": shape[0], "rows": shape[1]}
    return stage.finish(results)


@dataclass(frozen=True)
class _Lines:
    """The number of lines of a part that have enough words, their hashes, and their keys by band."""

    words: int
    shape: tuple[int, int]

    def __call__(self, part: Part) -> bytes:
        hashes, keys = [np.empty(0, np.uint64)], [np.empty((self.shape[0], 0), np.uint64)]
        for document in read_part(part, Counter()):
            lines, own, numbers = _compared(document, self.words)
            hashes.append(own)
            if self.shape[0] and len(numbers):
                keys.append(band_keys([lines[number] for number in numbers], self.shape).T)
        count = np.array([sum(map(len, hashes))], np.int64)
        return b"".join(array.tobytes() for array in [count, *hashes, np.concatenate(keys, axis=1)])


@dataclass(frozen=True)
class _Keep:
    copied: Path
    starts: tuple[int, ...]
    words: int

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]:
        start, end = self.starts[part.number : part.number + 2]
        copied = np.fromfile(self.copied, np.uint8, end - start, offset=start)
        place = 0
        for document in read_part(part, counts, samples):
            lines, hashes, numbers = _compared(document, self.words)
            if place + len(hashes) > len(copied):
                break  # the file has grown; finishing the stage names it
            verdicts = copied[place : place + len(hashes)]
            gone = set(numbers[verdicts > 0].tolist())
            place += len(hashes)
            if not gone:
                yield document
                continue
            removed = [lines[number] for number in sorted(gone)]
            for verdict, reason in REASONS.items():
                if len(own := numbers[verdicts == verdict]):
                    samples.add(f"removed.{reason}", document, text=lines[own[0]])
                    counts[f"removed.{reason}"] += len(own)
            counts[f"lines removed/{document.source}"] += len(gone)
            counts[f"bytes of lines removed/{document.source}"] += sum(len(line.encode()) + 1 for line in removed)
            text = "\n".join(line for number, line in enumerate(lines) if number not in gone)
            if text.strip():
                yield Document(text, document.source, document.file, document.row, document.extra)
            else:
                counts["removed.all lines copied"] += 1
                counts[f"documents removed/all lines copied/{document.source}"] += 1


def _compared(document: Document, words: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Returns all lines of a document, the hashes of those with enough words, and the numbers of these."""
    lines = document.text.split("\n")
    hashes, counts = text_hashes(lines)
    numbers = np.flatnonzero(counts >= words)
    return lines, hashes[numbers], numbers
