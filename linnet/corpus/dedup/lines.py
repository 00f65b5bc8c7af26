"""Removes lines that came before, in the same document or in an earlier one: menus, licences, notices.

Two lines are equal if their words are (`minhash.py` says what a word is). Lines of few words, such as
`return self` or "See also", belong to many texts and stay.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linnet.corpus.dedup.minhash import equal_runs, text_hashes
from linnet.corpus.documents import Document, Part, Samples, read_part
from linnet.corpus.stage import Progress, Stage, whole_file


def without_copied_lines(
    stage: Stage, words: int, *, workers: int, engine: str, progress: Progress | None = None
) -> dict:
    """Writes the shards of a stage without copied lines of at least `words` words. Returns its `stage.json`."""
    paths = stage.map("lines", _Lines(words), workers=workers, engine=engine, progress=progress)
    hashes = [np.fromfile(path, np.uint64) for path in paths]
    starts = tuple(np.cumsum([0, *(len(one) for one in hashes)]).tolist())
    first, again = equal_runs(np.concatenate(hashes))
    copied = np.zeros(starts[-1], bool)
    copied[again] = True
    with whole_file(stage.out / "parts" / "copied") as file:
        file.write(copied.tobytes())
    keep = _Keep(stage.out / "parts" / "copied", starts, words)
    stage.write(keep, workers=workers, engine=engine, progress=progress)
    return stage.finish(
        {"lines": len(copied), "copied lines": len(again), "texts of copied lines": len(np.unique(first))}
    )


@dataclass(frozen=True)
class _Lines:
    """The hashes of all lines of a part that have enough words."""

    words: int

    def __call__(self, part: Part) -> bytes:
        return b"".join(_compared(document, self.words)[1].tobytes() for document in read_part(part, Counter()))


@dataclass(frozen=True)
class _Keep:
    copied: Path
    starts: tuple[int, ...]
    words: int

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]:
        start, end = self.starts[part.number : part.number + 2]
        copied = np.fromfile(self.copied, bool, end - start, offset=start)
        place = 0
        for document in read_part(part, counts, samples):
            lines, hashes, numbers = _compared(document, self.words)
            if place + len(hashes) > len(copied):
                break  # the file has grown; finishing the stage names it
            gone = set(numbers[copied[place : place + len(hashes)]].tolist())
            place += len(hashes)
            if not gone:
                yield document
                continue
            removed = [lines[number] for number in sorted(gone)]
            samples.add("removed.copied line", document, text=removed[0])
            counts["removed.copied line"] += len(gone)
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
