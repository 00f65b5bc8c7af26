"""Removes documents that are copies of earlier ones, exactly or nearly, and those that hold items of evaluation sets.

The passes, each over all parts and each with its results on disk, so that the same command resumes:

1. keys: of each document a digest of its text and its MinHash keys (`minhash.py`), about 130 bytes.
2. joins: per band, documents with equal keys are linked. Only first copies take part: equal digests come first.
3. with `verify`, the shingles of linked documents are written, and a link stays if their exact similarity is at least
   the threshold. The pairs of a cluster that are not yet connected are compared, of all bands.
4. the first document of each cluster, in the order of the input, is kept; the shards are written.

With `against`, the n-grams of other sets are collected first, and pass 1 also marks the documents that hold an item of
them or are a part of one (linnet/corpus/dedup/minhash.py). These are removed before copies are searched.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from linnet.config import Config, ConfigError, refuse
from linnet.corpus.dedup import minhash, overlap
from linnet.corpus.dedup.minhash import band_keys, components, equal_runs, shape_for, text_hashes
from linnet.corpus.documents import Document, Inputs, Part, Samples, find_inputs, read_part, stamp_of
from linnet.corpus.stage import Progress, Stage, open_stage, whole_file
from linnet.data.parts import batches

# Removes lines that came before, in the same document or in an earlier one: menus, licences, notices.
#
# Two lines are equal if their words are (`minhash.py` says what a word is). Lines of few words, such as
# `return self` or "See also", belong to many texts and stay. With `near`, near copies of a line by MinHash go
# too, such as a notice with another date; the first line of a cluster stays.

LINE_REASONS = {1: "copied line", 2: "near copy of a line"}


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
        origins, other = equal_runs(keys[members])
        links = np.union1d(links, members[origins] * len(copied) + members[other])
    copied[components(len(copied), *np.divmod(links, max(1, len(copied)))) != np.arange(len(copied))] = 2
    with whole_file(stage.out / "parts" / "copied") as file:
        file.write(copied.tobytes())
    keep = _KeepLines(stage.out / "parts" / "copied", starts, words)
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
            lines, line_hashes, numbers = _compared(document, self.words)
            hashes.append(line_hashes)
            if self.shape[0] and len(numbers):
                keys.append(band_keys([lines[number] for number in numbers], self.shape).T)
        count = np.array([sum(map(len, hashes))], np.int64)
        return b"".join(array.tobytes() for array in [count, *hashes, np.concatenate(keys, axis=1)])


@dataclass(frozen=True)
class _KeepLines:
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
            for verdict, reason in LINE_REASONS.items():
                if len(copies := numbers[verdicts == verdict]):
                    samples.add(f"removed.{reason}", document, text=lines[copies[0]])
                    counts[f"removed.{reason}"] += len(copies)
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


BATCH = 1 << 20  # characters whose keys are computed together
TASKS = 16  # into which the clusters to verify are divided
MANY = 20_000  # documents or links from which a pass is worth starting workers
MOST_COMPARED = 64  # documents of one cluster and band that a document is compared with
EXAMPLES = 20  # removed documents that stage.json shows with the document they are copies of
SHOWN = 300  # characters of each
KEPT, EXACT, NEAR, AGAINST = 0, 1, 2, 3
REASONS = {EXACT: "exact copy", NEAR: "near copy", AGAINST: "evaluation item"}

Run = Callable[..., list[Path]]


class DedupConfig(Config):
    """What `linnet corpus dedup` removes.

    Attributes:
        level: `document` removes documents, `line` removes lines that came before, in the same document or another.
        near: of lines, whether near copies go too.
        threshold: similarity of near copies, above 0 to 1: the Jaccard similarity of their shingles of 5 words.
        verify: link two documents only if their exact similarity is at least `threshold`.
        overlap: share of the 8-grams of an item of `against` that a document must hold to be removed, or share of its
            own 8-grams that must be in `against`; above 0 to 1.
        line_words: lines of fewer words are never removed; at least 1.
        against: description of the other sets, with the digest of their content.
    """

    level: Literal["document", "line"] = "document"
    near: bool = Field(False, exclude_if=lambda near: not near)
    threshold: float = Field(0.8, gt=0, le=1)
    verify: bool = False
    overlap: float = Field(0.7, gt=0, le=1)
    line_words: int = Field(10, ge=1)
    against: list[dict] = []


def dedup(
    sources: list[str],
    out: Path,
    config: DedupConfig,
    *,
    against: Sequence[str] = (),
    workers: int = 1,
    engine: str = "local",
    text_key: str = "text",
    anew: bool = False,
    progress: Progress | None = None,
) -> dict:
    """Writes the documents of sources without copies to the folder `out`. Returns the content of its `stage.json`.

    Args:
        sources, against: as in `documents.find_inputs`.
        workers, engine: as in `pool.run_parts`.

    Raises:
        ConfigError: all problems of settings, sources and folder; see `stage.open_stage`.
    """
    problems: list[str] = []
    other = find_inputs(list(against), "--against", problems, text_key) if against else Inputs()
    if config.level == "line":
        problems += _line_problems(config, bool(against))
    elif config.near:
        problems.append("--near: of documents, near copies always go; leave it out, or use --level line")
    refuse(problems, "dedup")
    config = config.model_copy(update={"against": other.described})
    with open_stage("dedup", sources, out, config, text_key=text_key, anew=anew) as stage:
        if stage.done:
            return stage.finish()
        if config.level == "line":
            threshold = config.threshold if config.near else None
            return without_copied_lines(
                stage, config.line_words, threshold, workers=workers, engine=engine, progress=progress
            )

        def run(
            name: str, function: Callable[[Part], bytes], parts: Sequence[Part] | None = None, shared: bool = True
        ) -> list[Path]:
            if shared:
                return stage.map(name, function, parts=parts, workers=workers, engine=engine, progress=progress)
            return stage.map(name, function, parts=parts, progress=progress)

        table, verdicts, partners, results = _decide(stage, run, config, other)
        shown = _save_verdicts(stage.out / "parts", verdicts, partners)
        stage.write(_Keep(stage.out / "parts", table.starts), workers=workers, engine=engine, progress=progress)
        results["examples"] = _examples(stage.out / "parts", shown, partners, verdicts, other)
        if changed := other.changed():
            raise ConfigError(
                [f"{path}: changed while it was read; run again with --anew" for path in changed], "dedup"
            )
        return stage.finish(results)


def _line_problems(config: DedupConfig, against: bool) -> list[str]:
    problems = []
    if config.verify:
        problems.append("--verify: works on documents; leave it out with --level line")
    if config.threshold != DedupConfig().threshold and not config.near:
        problems.append("--threshold: lines are compared exactly; leave it out with --level line, or add --near")
    if against:
        problems.append("--against: works on documents; run `linnet corpus dedup` with --level document for it")
    return problems


def _decide(
    stage: Stage, run: Run, config: DedupConfig, other: Inputs
) -> tuple["_Table", np.ndarray, np.ndarray, dict[str, Any]]:
    """Returns the keys, a verdict per document, uint8, the document (or item) it was found with, or -1, and counts."""
    grams, items = None, 0
    if other.parts:
        shift = overlap.shift_for(sum(part.size for part in other.parts))
        grams, items = _collect_grams(stage, run("items", _Items(shift), other.parts), shift)
        if not items:
            fix = "give the key or column of the text with --text-key, or another set"
            raise ConfigError([f"--against: has no document that can be read; {fix}"], "dedup")
    shape = minhash.shape_for(config.threshold)
    table = _Table.of(run("keys", _Keys(shape, grams, config.overlap)), shape[0])
    verdicts, partners = np.zeros(table.count, np.uint8), np.full(table.count, -1)
    held = table.items()
    verdicts[held >= 0] = AGAINST
    partners[held >= 0] = held[held >= 0]
    first, other_copy = equal_runs(table.digests())
    open_ = verdicts[other_copy] == KEPT
    verdicts[other_copy[open_]] = EXACT
    partners[other_copy[open_]] = first[open_]
    exact = int(open_.sum())

    active = stage.out / "parts" / "active"
    _save(active, verdicts == KEPT)
    bands = [Part(band, ()) for band in range(shape[0])]
    pairs = _load_links(table.count, run("links", _Links(table, active), bands, table.count >= MANY))
    results: dict[str, Any] = {"documents": table.count, "linked": len(pairs[0])}
    if config.verify:
        pairs, compared = _verified(stage, run, table, pairs, config.threshold)
        results |= compared
    roots = minhash.components(table.count, *pairs)
    near = roots != np.arange(table.count)
    verdicts[near] = NEAR
    partners[near] = _neighbours(table.count, *pairs)[near]
    sizes = np.bincount(roots[near]) + 1 if near.any() else np.zeros(1, np.int64)
    results |= {
        "exact copies": exact,
        "near copies": int(near.sum()),
        "clusters of near copies": int(np.count_nonzero(sizes > 1)),
        "largest cluster": int(sizes.max()),
        "bands": shape[0],
        "rows": shape[1],
    }
    if other.parts:
        results |= {"evaluation items": items, "documents with evaluation items": int((held >= 0).sum())}
    return table, verdicts, partners, results


def _neighbours(count: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the first document that each is linked to."""
    neighbours = np.full(count, count)
    np.minimum.at(neighbours, first, second)
    np.minimum.at(neighbours, second, first)
    return neighbours


# Pass 1: keys


@dataclass(frozen=True)
class _Keys:
    """The digests, items and keys of the documents of a part, as `_Table` reads them."""

    shape: tuple[int, int]
    grams: Path | None
    overlap: float

    def __call__(self, part: Part) -> bytes:
        digests, items, keys = [], [], []
        for texts in _batches_of_texts(part):
            encoded = (text.encode("utf-8", "surrogatepass") for text in texts)
            digests += [hashlib.blake2b(text, digest_size=16).digest() for text in encoded]
            keys.append(minhash.band_keys(texts, self.shape).T)
            if self.grams is not None:
                items.append(overlap.find(texts, overlap.load(self.grams, stamp_of(self.grams)), self.overlap))
        matches = np.concatenate(items) if items else np.full(len(digests), -1)
        header = np.array([len(digests)], np.int64)
        bands = np.concatenate(keys, axis=1) if keys else np.empty((self.shape[0], 0), np.uint64)
        return header.tobytes() + b"".join(digests) + matches.tobytes() + bands.tobytes()


@dataclass(frozen=True)
class _Table:
    """The digests, items and keys of all documents, on disk.

    Attributes:
        paths: the files of `_Keys`. sizes: numbers of their documents.
    """

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]
    bands: int

    @classmethod
    def of(cls, paths: Sequence[Path], bands: int) -> "_Table":
        return cls(tuple(paths), tuple(int(np.fromfile(path, np.int64, 1)[0]) for path in paths), bands)

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """The number of the first document of each file, then the number of documents."""
        return tuple(np.concatenate([[0], np.cumsum(self.sizes)]).tolist())

    def digests(self) -> np.ndarray:
        return self._read(lambda size: 8, 2).reshape(-1, 2)

    def items(self) -> np.ndarray:
        return self._read(lambda size: 8 + 16 * size, 1).view(np.int64)

    def band(self, number: int) -> np.ndarray:
        return self._read(lambda size: 8 + 24 * size + 8 * size * number, 1)

    def _read(self, offset: Callable[[int], int], width: int) -> np.ndarray:
        pairs = zip(self.paths, self.sizes, strict=True)
        return np.concatenate([np.fromfile(path, np.uint64, n * width, offset=offset(n)) for path, n in pairs])


def _batches_of_texts(part: Part, wanted: np.ndarray | None = None) -> Iterator[list[str]]:
    """Yields the texts of a part, or those at the places where `wanted` is True, about `BATCH` characters at a time."""
    numbered = enumerate(read_part(part, Counter()))
    texts = (document.text for number, document in numbered if wanted is None or wanted[number])
    return batches(texts, BATCH, lambda text: len(text) + 1)


# Decontamination


@dataclass(frozen=True)
class _Items:
    """The n-grams of the documents of a part of the other sets."""

    shift: int

    def __call__(self, part: Part) -> bytes:
        grams = [overlap.grams_of(document.text, self.shift) for document in read_part(part, Counter())]
        words = np.array([words for words, _ in grams], np.int64)
        counts = np.array([len(hashes) for _, hashes in grams], np.int64)
        header = np.array([len(grams)], np.int64)
        return b"".join(array.tobytes() for array in [header, words, counts, *(hashes for _, hashes in grams)])


def _collect_grams(stage: Stage, paths: list[Path], shift: int) -> tuple[Path, int]:
    """Returns the file with the n-grams of all other sets, and the number of items."""
    words, counts, hashes = [], [], []
    for path in paths:
        size = int(np.fromfile(path, np.int64, 1)[0])
        words.append(np.fromfile(path, np.int64, size, offset=8))
        counts.append(np.fromfile(path, np.int64, size, offset=8 + 8 * size))
        hashes.append(np.fromfile(path, np.uint64, offset=8 + 16 * size))
    path = stage.out / "parts" / "grams"
    all_words = np.concatenate(words)
    if not path.exists():
        with whole_file(path) as file:
            file.write(overlap.pack(all_words, np.concatenate(counts), np.concatenate(hashes), shift))
    return path, len(all_words)


# Pass 2: joins


@dataclass(frozen=True)
class _Links:
    """Links each active document of a band's key to the first one. `active` is a file of a bool per document."""

    table: _Table
    active: Path

    def __call__(self, part: Part) -> bytes:
        keys = self.table.band(part.number)
        members = np.flatnonzero(np.fromfile(self.active, bool) & (keys != 0))
        first, other = equal_runs(keys[members])
        return np.stack([members[first], members[other]]).tobytes()


def _load_links(count: int, paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the links of all bands, each once."""
    pairs = np.empty(0, np.int64)
    for path in paths:
        first, second = np.fromfile(path, np.int64).reshape(2, -1)
        pairs = np.union1d(pairs, first * count + second)
    first, second = np.divmod(pairs, max(count, 1))
    return first, second


# Pass 3: exact similarities


def _verified(
    stage: Stage, run: Run, table: _Table, pairs: tuple[np.ndarray, np.ndarray], threshold: float
) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, int]]:
    """Returns the links whose documents are at least as similar as the threshold, and what was compared."""
    roots = minhash.components(table.count, *pairs)
    alone = np.ones(table.count, bool)
    alone[pairs[0]] = alone[pairs[1]] = False
    roots[alone] = -1
    clusters = stage.out / "parts" / "clusters"
    _save(clusters, roots)
    shingles = run("shingles", _Shingles(clusters, table.starts))
    verify = _Verify(table, clusters, tuple(shingles), threshold)
    links, compared, left_out = [], 0, 0
    for path in run("verified", verify, [Part(task, ()) for task in range(TASKS)], len(pairs[0]) >= MANY):
        counts = np.fromfile(path, np.int64, 2)
        compared, left_out = compared + int(counts[0]), left_out + int(counts[1])
        links.append(np.fromfile(path, np.int64, offset=16).reshape(2, -1))
    first, second = np.concatenate(links, axis=1)
    return (first, second), {"compared": compared, "not compared": left_out, "verified": len(first)}


@dataclass(frozen=True)
class _Shingles:
    """The shingles of the documents of a part that are in a cluster: number, sizes, hashes."""

    clusters: Path
    starts: tuple[int, ...]

    def __call__(self, part: Part) -> bytes:
        start, end = self.starts[part.number : part.number + 2]
        wanted = np.fromfile(self.clusters, np.int64, end - start, offset=8 * start) >= 0
        shingles, sizes = [], []
        if wanted.any():
            for texts in _batches_of_texts(part, wanted):
                hashes, numbers = minhash.shingle_sets(texts)
                shingles.append(hashes)
                sizes.append(numbers)
        header = np.array([sum(map(len, sizes))], np.int64)
        return b"".join(array.tobytes() for array in [header, *sizes, *shingles])


@dataclass(frozen=True)
class _Verify:
    """Compares the documents of a share of the clusters."""

    table: _Table
    clusters: Path
    shingles: tuple[Path, ...]
    threshold: float

    def __call__(self, part: Part) -> bytes:
        roots = np.fromfile(self.clusters, np.int64)
        members = np.flatnonzero((roots >= 0) & (roots % TASKS == part.number))
        compare = _Compare(self._places(roots, members), members, self.threshold)
        for band in range(self.table.bands):
            keys = self.table.band(band)[members]
            order = np.argsort(keys, kind="stable")
            edges = np.flatnonzero(np.diff(keys[order])) + 1
            for group in np.split(order, edges):
                if len(group) > 1:
                    compare.group(group.tolist())
        links = members[np.array(compare.links, np.int64).reshape(-1, 2).T]
        return np.array([compare.compared, compare.left_out]).tobytes() + links.tobytes()

    def _places(self, roots: np.ndarray, members: np.ndarray) -> list[np.ndarray]:
        """Returns the shingles of each member, memory-mapped."""
        sets: list[np.ndarray] = []
        for path, start, end in zip(self.shingles, self.table.starts, self.table.starts[1:], strict=False):
            here = members[(members >= start) & (members < end)]
            if not len(here):
                continue
            count = int(np.fromfile(path, np.int64, 1)[0])
            sizes = np.fromfile(path, np.int64, count, offset=8)
            ends = np.cumsum(sizes)
            hashes = np.memmap(path, np.uint64, "r", offset=8 + 8 * count)
            numbers = np.cumsum(roots[start:end] >= 0)[here - start] - 1
            sets += [hashes[ends[number] - sizes[number] : ends[number]] for number in numbers]
        return sets


class _Compare:
    """Links members whose sets are similar, and compares no pair twice nor one that is connected."""

    def __init__(self, sets: list[np.ndarray], members: np.ndarray, threshold: float):
        self.links: list[tuple[int, int]] = []
        self.compared = self.left_out = 0
        self._sets, self._threshold = sets, threshold
        self._parents = list(range(len(members)))
        self._different: set[tuple[int, int]] = set()

    def group(self, group: list[int]) -> None:
        """Compares the members of a band's key."""
        clusters: dict[int, list[int]] = {}  # the members so far, by their root
        for member in group:
            for root in list(clusters):
                if self._root(member) != self._root(root):
                    self._connect(member, clusters[root])
            merged: dict[int, list[int]] = {}
            for root, others in [*clusters.items(), (member, [member])]:
                merged.setdefault(self._root(root), []).extend(others)
            clusters = merged

    def _connect(self, member: int, others: list[int]) -> None:
        self.left_out += max(0, len(others) - MOST_COMPARED)
        for other in others[:MOST_COMPARED]:
            pair = min(member, other), max(member, other)
            if pair in self._different:
                continue
            self.compared += 1
            if minhash.jaccard(self._sets[member], self._sets[other]) >= self._threshold:
                self.links.append(pair)
                a, b = self._root(member), self._root(other)
                self._parents[max(a, b)] = min(a, b)
                return
            self._different.add(pair)

    def _root(self, node: int) -> int:
        while (parent := self._parents[node]) != node:
            self._parents[node] = parent = self._parents[parent]
            node = parent
        return node


# Pass 4: shards


def _save_verdicts(folder: Path, verdicts: np.ndarray, partners: np.ndarray) -> np.ndarray:
    """Writes verdicts and the numbers of the documents whose texts examples need. Returns the removed ones to show."""
    chosen = []
    for reason in REASONS:
        removed = np.flatnonzero(verdicts == reason)
        chosen.append(removed[np.linspace(0, len(removed) - 1, min(len(removed), EXAMPLES)).astype(int)])
    shown = np.concatenate(chosen)
    documents = shown[verdicts[shown] != AGAINST]
    _save(folder / "verdicts", verdicts)
    _save(folder / "shown", np.unique(np.concatenate([shown, partners[documents]])))
    return shown


@dataclass(frozen=True)
class _Keep:
    """Yields the documents that stay, and writes the texts that the examples need to `folder`."""

    folder: Path
    starts: tuple[int, ...]

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]:
        start, end = self.starts[part.number : part.number + 2]
        verdicts = np.fromfile(self.folder / "verdicts", np.uint8, end - start, offset=start).tolist()
        shown = set(np.fromfile(self.folder / "shown", np.int64).tolist())
        for number, document in enumerate(read_part(part, counts, samples)):
            if number >= len(verdicts):
                break  # the file has grown; finishing the stage names it
            if start + number in shown:
                values = {"text": document.text, "source": document.source, "file": document.file, "row": document.row}
                with whole_file(self.folder / f"text-{start + number}") as file:
                    file.write(json.dumps(values).encode())
            if reason := REASONS.get(verdicts[number]):
                counts[f"removed.{reason}"] += 1
                samples.add(f"removed.{reason}", document, text=document.text)
                counts[f"documents removed/{reason}/{document.source}"] += 1
                counts[f"bytes removed/{reason}/{document.source}"] += len(document.text.encode())
            else:
                yield document


def _examples(
    folder: Path, shown: np.ndarray, partners: np.ndarray, verdicts: np.ndarray, other: Inputs
) -> dict[str, list[dict]]:
    """Returns examples by reason, each with the document that it is a copy of and their exact similarity."""
    examples: dict[str, list[dict]] = {}
    items = _read_items(other, {int(partners[number]) for number in shown if verdicts[number] == AGAINST})
    for number in shown.tolist():
        document, partner = _read_text(folder / f"text-{number}"), int(partners[number])
        against = verdicts[number] == AGAINST
        original = items[partner] if against else _read_text(folder / f"text-{partner}")
        removed, kept = (minhash.shingles(text.text) for text in (document, original))
        similar = round(minhash.jaccard(removed, kept), 4)
        row = {"removed": _origin(document), "because of": _origin(original), "similarity": similar}
        examples.setdefault(REASONS[int(verdicts[number])], []).append(row)
    return examples


def _read_items(other: Inputs, wanted: set[int]) -> dict[int, Document]:
    items: dict[int, Document] = {}
    if wanted:
        documents = (document for part in other.parts for document in read_part(part, Counter()))
        for number, document in enumerate(documents):
            if number in wanted:
                items[number] = document
                if len(items) == len(wanted):
                    break
    return items


def _origin(document: Document) -> dict:
    text = document.text if len(document.text) <= SHOWN else f"{document.text[:SHOWN]}..."
    return {"source": document.source, "file": document.file, "row": document.row, "text": text}


def _read_text(path: Path) -> Document:
    return Document(**json.loads(path.read_bytes()))


def _save(path: Path, values: np.ndarray) -> None:
    with whole_file(path) as file:
        file.write(values.tobytes())
