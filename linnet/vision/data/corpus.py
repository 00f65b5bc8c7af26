"""A corpus of images: sources that are read, checked and stored once in a folder of the cache.

The folder's name is a digest of the configuration and of the content of the sources, as for text. It has:

images.bin    the images one after another: encoded as they were found, or pixels uint8 [C, S, S], or latents float16
offsets.npy   int64 [N + 1]: where each image starts (encoded images only)
labels.npy    int64 [N]: the classes
splits.npy    int64: the numbers of the training images, then those of the held-out images
corpus.json   classes, sizes, configuration, digest of the content, and SHA-256 of each file
"""

import errno
import hashlib
import io
import itertools
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from linnet.config import ConfigError, digest, gather, nearest, refuse, unwritable
from linnet.data import hub, shards
from linnet.data.images import ImageDataConfig, decode, sources
from linnet.data.images.sources import ImageSource, Record
from linnet.data.order import hash64, uniform

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

FORMAT = 1  # increase it when the same inputs give other files
FRACTION = 0.1  # held out of each class if nothing else says what is
MOST_PIXELS = 1 << 30  # bytes of pixels up to which `store: auto` stores decoded images
MOST_CLASSES = 1 << 16  # without names of classes; a larger label is a mistake
LISTED = 100  # most skipped files that corpus.json names
BLOCK = 256  # images that are decoded at a time
DECODED = 1 << 28  # bytes of sources up to which all images are decoded for a report of problems
# Bytes of an image from which threads are faster than one: Pillow decodes without the interpreter's lock.
LARGE = 16 << 10
NAMED = 5  # most images or classes that one problem names
IMAGES, OFFSETS, LABELS, SPLITS = "images.bin", "offsets.npy", "labels.npy", "splits.npy"

Progress = Callable[[str, int, int], None]


class ImageSplit:
    """The training or the held-out images of a corpus. Memory-mapped; other processes open their own map.

    Attributes:
        indices: int64 [len(self)], the numbers of its images in the corpus.
        classes: the names of the classes.
        channels, side: channels of an image, and its height and width.
    """

    def __init__(self, folder: Path, name: str, metadata: dict):
        self.folder, self.name, self._metadata = Path(folder), name, metadata
        self.classes: list[str] = metadata["classes"]
        self.channels, self.side = metadata["channels"], metadata["side"]
        self._stored: str = metadata["stored"]
        self._open()

    def _open(self) -> None:
        first, end = self._metadata["splits"][self.name]
        self.indices = np.load(self.folder / SPLITS)[first:end]
        self._labels = np.load(self.folder / LABELS)
        if self._stored == "encoded":
            self._offsets = np.load(self.folder / OFFSETS)
            self._bytes = np.memmap(self.folder / IMAGES, dtype=np.uint8, mode="r")
        else:
            dtype = np.uint8 if self._stored == "pixels" else np.float16
            shape = (self._metadata["images"], self.channels, self.side, self.side)
            self._values = np.memmap(self.folder / IMAGES, dtype=dtype, mode="r", shape=shape)

    def __reduce__(self) -> tuple:
        return ImageSplit, (self.folder, self.name, self._metadata)  # a memory map would be pickled as a copy

    def __len__(self) -> int:
        return len(self.indices)

    def labels(self, indices: Sequence[int] | np.ndarray | slice) -> "Tensor":
        """Returns the classes of images, int64 [n]."""
        import torch

        return torch.from_numpy(self._labels[self._numbers(indices)])

    def images(self, indices: Sequence[int] | np.ndarray | slice) -> "Tensor":
        """Returns images by their place in the split: uint8 [n, C, S, S]; latents float32 [n, C, S, S]."""
        import torch

        numbers = self._numbers(indices)
        if self._stored != "encoded":
            values = torch.from_numpy(self._values[numbers])
            return values.float() if self._stored == "latents" else values
        made = np.empty((len(numbers), self.channels, self.side, self.side), dtype=np.uint8)
        config = self._metadata["config"]
        for row, number in enumerate(numbers):
            image = decode.resized(self._decoded(number), config["size"], config["crop"])
            made[row] = decode.pixels(image)
        return torch.from_numpy(made)

    def rows(self, numbers: np.ndarray) -> "tuple[Tensor, Tensor]":
        """Returns images and labels, as `linnet.data.labelled.Labelled` does."""
        return self.images(numbers), self.labels(numbers)

    def image(self, index: int) -> "Image":
        """Returns an image as Pillow's: at its own size if it is stored encoded."""
        number = self.indices[index]
        if self._stored == "encoded":
            return self._decoded(number)
        return decode.from_pixels(self._values[number])

    def spread(self, most: int | None = None) -> np.ndarray:
        """Returns the places of at most so many images, spread evenly over the split, int64 [n]; None is all."""
        count = len(self) if most is None else min(most, len(self))
        return np.arange(count) * len(self) // max(1, count)

    def _numbers(self, indices: Sequence[int] | np.ndarray | slice) -> np.ndarray:
        return self.indices[indices if isinstance(indices, slice) else np.asarray(indices, dtype=np.int64)]

    def _decoded(self, number: int) -> "Image":
        start, end = self._offsets[number : number + 2]
        try:
            return decode.decode(self._bytes[start:end].tobytes(), self._metadata["convert"])
        except decode.Damaged as error:  # it was whole when the corpus was prepared
            raise shards.damaged(self.folder, [f"{self.folder / IMAGES}: image {number} {error}"]) from None


class ImageCorpus:
    """A prepared corpus of images, as `prepare_images` and `open_images` return it.

    Attributes:
        folder, digest: the folder, and its name: 12 hexadecimal digits computed from configuration and content.
        train, validation: the `ImageSplit`s.
        classes: the names of labels 0, 1, ...
        channels, side: channels of an image, and its height and width.
        mean, std: of the training pixels from 0 to 1, per channel; None for latents.
        metadata: the content of corpus.json.
    """

    def __init__(self, folder: Path, metadata: dict):
        self.folder, self.metadata = folder, metadata
        self.digest: str = metadata["digest"]
        self.classes: list[str] = metadata["classes"]
        self.channels: int = metadata["channels"]
        self.side: int = metadata["side"]
        self.mean: list[float] | None = metadata["mean"]
        self.std: list[float] | None = metadata["std"]
        files = {folder / name: entry for name, entry in metadata["files"].items()}
        if problems := [problem for path, entry in files.items() if (problem := shards.size_problem(path, entry))]:
            raise shards.damaged(folder, problems)
        shards.verify_files(folder, files)
        self.train, self.validation = (ImageSplit(folder, name, metadata) for name in ("train", "validation"))

    def split(self, name: str) -> ImageSplit:
        """Returns the split "train" or "validation". Raises ValueError for another name."""
        if name not in ("train", "validation"):
            raise ValueError(f"split {name!r} is unknown; use train or validation")
        return getattr(self, name)


def prepare_images(
    config: ImageDataConfig,
    cache_dir: str | Path,
    progress: Progress | None = None,
    rebuild: bool = False,
    whole: bool = False,
) -> ImageCorpus:
    """Opens the corpus of a configuration, and builds it first if it is not in the cache.

    Args:
        cache_dir: folder of corpora; created if it does not exist.
        progress: called with the current phase, the bytes done and the bytes in total.
        rebuild: build a damaged corpus again. Without it, damage is an error, so that it is noticed.
        whole: for evaluation: all images of the source (of its part `split`, if it has parts) are in `validation`, and
            `train` is empty. Copies stay, and classes may be missing.

    Raises:
        ConfigError: lists all problems of configuration and sources; or names a damaged file of the corpus
            (`CorpusDamaged`); or says that the disk is full. No corpus is left half-written.
    """
    cache = Path(cache_dir)
    skipped: list[str] = []
    train, held = _find(config, skipped, whole, images=True)
    try:
        identity = _identity(config, train, held, cache)
        name = digest(identity)
        folder = cache / name
        if exists := folder.exists():
            try:
                return open_images(folder)
            except shards.CorpusDamaged:
                if not rebuild:
                    raise
        if reason := unwritable(cache):
            raise ConfigError([f"{cache}: {reason}; choose another cache folder"], "data")
        with shards.new_folder(folder, replace=exists) as temporary:
            values = _build(temporary, config, train, held, skipped, progress)
            if _identity(config, *_find(config, [], whole), cache) != identity:
                raise ConfigError(
                    ["source: files changed while they were read; run again when nothing writes to them"], "data"
                )
            if revisions := hub.revisions([*config.source, *config.validation], "dataset"):
                values["revisions"] = revisions
            shards.write_metadata(temporary, {"digest": name, **values})
    except OSError as error:
        free = "" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else "free disk space, or "
        problem = f"{cache}: cannot prepare the corpus: {error}; {free}choose another cache folder"
        raise ConfigError([problem], "data") from None
    return open_images(folder)


def check_images(config: ImageDataConfig, cache_dir: str | Path, most_bytes: int | None = None) -> None:
    """Checks images without writing anything; decodes all of them unless the cache has their corpus.

    Args:
        most_bytes: images of larger sources are not decoded; None decodes all.

    Raises:
        ConfigError: lists all problems of the sources.
    """
    cache = Path(cache_dir)
    skipped: list[str] = []
    train, held = _find(config, skipped, images=True)
    if most_bytes is not None and _size([*train, *held]) > most_bytes:
        return
    if cache.is_dir() and (folder := cache / digest(_identity(config, train, held, cache))).exists():
        open_images(folder)
    else:
        _build(None, config, train, held, skipped, None)


def read_sources(config: ImageDataConfig, whole: bool = False) -> list[ImageSource]:
    """Returns the sources of the training images; with `whole`, those of all images, as `prepare_images` says.

    Raises:
        ConfigError: lists all problems of the sources.
    """
    train, held = _find(config, [], whole)
    return held if whole else train


def open_images(folder: str | Path) -> ImageCorpus:
    """Opens a prepared corpus. Checks file sizes every time, and SHA-256 once per process.

    Raises:
        CorpusDamaged: a file is missing, truncated or changed since it was written.
    """
    folder = Path(folder)
    return ImageCorpus(folder, shards.read_metadata(folder))


def image_content(config: ImageDataConfig, cache_dir: str | Path | None = None) -> dict[str, str]:
    """Returns digests of the content of all sources, independent of their location, as `corpus.content` does for text.

    Returns:
        `source`, and `validation` if held-out images have their own source: 12 hexadecimal digits each.

    Raises:
        ConfigError: a source does not exist. OSError: a file cannot be read.
    """
    train, held = _find(config, [])
    cache = None if cache_dir is None else Path(cache_dir)
    digests = {"source": digest(sources.content(train, cache))}
    if held:
        digests["validation"] = digest(sources.content(held, cache))
    return digests


def _find(
    config: ImageDataConfig, skipped: list[str], whole: bool = False, images: bool = False
) -> tuple[list[ImageSource], list[ImageSource]]:
    """Returns the sources of training and of held-out images; the second may be empty. If `whole`, the first is.

    Args:
        images: an error about sources also lists the damaged images of the others, unless these are large.
    """
    problems: list[str] = []
    train = sources.find_sources(config.source, "source", problems, skipped)
    held = sources.find_sources(config.validation, "validation", problems, skipped) if config.validation else []
    if whole:
        train, _ = sources.choose_parts(config.model_copy(update={"held_out": None}), train, [], problems)
        train, held = [], train
    else:
        train, held = sources.choose_parts(config, train, held, problems)
    every = [*train, *held]
    if config.kind == "latents":
        wrong = [source for source in every if source.kind not in ("npz", "npy")]
        paths = dict.fromkeys(str(source.path) for source in wrong)
        problems += [f"kind: latents, but {path} has images; give .npz or .npy files of latents" for path in paths]
    elif config.store == "encoded" and (plain := [source for source in every if not source.encoded]):
        problems.append(f"store: encoded, but {plain[0].path} holds pixels; use store: auto or pixels")
    if problems:
        if images:
            right = [source for source in every if config.kind == "images" or source.kind in ("npz", "npy")]
            problems += _image_problems(config, right)
        raise ConfigError(problems, "data")
    if any(source.encoded for source in every) or config.size is not None:
        decode.check_pillow()
    return train, held


def _image_problems(config: ImageDataConfig, every: list[ImageSource]) -> list[str]:
    """Returns what is wrong with the images of sources, for an error about other sources; [] if they are large."""
    if _size(every) > DECODED:
        return []
    problems: list[str] = []
    with gather(problems):
        if any(source.encoded for source in every) or config.size is not None:
            decode.check_pillow()
        table = _Table()
        with _Files(None, "latents" if config.kind == "latents" else "pixels") as files:
            _read_all(table, files, config, every, [], problems, None)
        problems += _shape_problems(config, table)
    return problems


def _size(every: list[ImageSource]) -> int:
    return sum(path.stat().st_size for source in every for path in source.files)


def _identity(config: ImageDataConfig, train: list[ImageSource], held: list[ImageSource], cache: Path) -> dict:
    values = config.model_dump(mode="json", exclude={"split", "held_out"})
    if held:
        del values["validation_fraction"]
    values["source"], values["validation"] = sources.content(train, cache), sources.content(held, cache)
    # Only corpora whose labels are renumbered have this key: the others keep the names of their folders.
    orders = _orders(config, [*train, *held], whole=not train)
    return {"images": FORMAT, **values} | ({"label_names": orders} if any(orders) else {})


# --- building


@dataclass
class _Found:
    """One usable image while a corpus is built: what will be stored, and what the checks need."""

    name: str
    label: int | str
    hash: int
    channels: int
    own: tuple[int, int]  # height and width as found
    data: bytes  # encoded; or the array
    pixels: np.ndarray | None  # of the final size


@dataclass
class _Table:
    """Columns over all images of a corpus."""

    labels: list[int | str] = field(default_factory=list)
    hashes: "array[int]" = field(default_factory=lambda: array("Q"))
    names: list[str] = field(default_factory=list)
    sums: "array[int]" = field(default_factory=lambda: array("q"))  # of the pixels of each channel
    squares: "array[int]" = field(default_factory=lambda: array("q"))
    shapes: dict[tuple[int, int], str] = field(default_factory=dict)  # first image of each height and width
    channels: dict[int, str] = field(default_factory=dict)


def _build(
    folder: Path | None,
    config: ImageDataConfig,
    train: list[ImageSource],
    held: list[ImageSource],
    skipped: list[str],
    progress: Progress | None,
) -> dict[str, Any]:
    """Reads and checks all images, and writes them into a folder unless it is None. Returns values of corpus.json."""
    problems: list[str] = []
    every = [*train, *held]
    auto = "encoded and pixels" if all(source.encoded for source in every) else "pixels"
    store = "latents" if config.kind == "latents" else auto if config.store == "auto" else config.store
    table = _Table()
    with _Files(folder, store) as files:
        counts, damaged = _read_all(table, files, config, every, skipped, problems, progress)
        if not table.labels and not problems:
            problems.append(f"source: all of its {damaged} images are damaged, such as {skipped[-1]}")
        problems += _shape_problems(config, table)
        classes, labels = _classes(config, every, counts, table, problems, whole=not train)
        is_held = np.arange(len(labels)) >= sum(counts[: len(train)]) if held else None
        refuse(problems, "data")
        split = _split(config, labels, np.array(table.hashes, dtype=np.uint64), is_held)
        if train:
            problems += _split_problems(config, classes, labels, split, bool(held))
        refuse(problems, "data")
        entries = files.finish(labels, split)
    shape = next(iter(table.shapes))
    mean, std = None, None
    if train and store != "latents":
        mean, std = _statistics(table, split.train, (config.size or shape[0]) ** 2)
    return {
        "config": config.model_dump(mode="json"),
        "kind": config.kind,
        "stored": files.stored,
        "images": len(labels),
        "channels": next(iter(table.channels)),
        "side": config.size or shape[0],
        "convert": {1: "grey", 3: "rgb"}.get(next(iter(table.channels))),
        "classes": classes,
        "splits": {
            "train": [0, len(split.train)],
            "validation": [len(split.train), len(split.train) + len(split.held)],
        },
        "split": "whole" if not train else "given" if held else "fraction",
        "copies_left_out": split.copies,
        "damaged": damaged,
        "skipped": len(skipped),
        "skipped_files": skipped[:LISTED],
        "mean": mean,
        "std": std,
        "files": entries,
    }


def _read_all(
    table: _Table,
    files: "_Files",
    config: ImageDataConfig,
    every: list[ImageSource],
    skipped: list[str],
    problems: list[str],
    progress: Progress | None,
) -> tuple[list[int], int]:
    """Reads all images of sources into `table` and `files`.

    Returns:
        The number of usable images of each source, and that of all damaged ones.
    """
    counts: list[int] = []
    damaged, total, done = 0, _size(every), 0
    for source in every:
        bad: list[str] = []
        lines: list[str] = []
        before, read, size = len(table.labels), 0, _size([source])
        for number, result in enumerate(_decoded(sources.read_records(source, config, lines), config)):
            if progress and number % BLOCK == 0:
                progress("reading", done + min(read, size), total)
            if isinstance(result, str):
                bad.append(result)
                continue
            _enter(table, result)
            files.add(result, config)
            read += len(result.data)
        counts.append(len(table.labels) - before)
        damaged += len(bad)
        if config.skip_damaged:
            skipped += bad
        else:
            skip = "" if config.kind == "latents" else ", or set skip_damaged: true"
            problems += [line + skip for line in bad[:NAMED]]
            if len(bad) > NAMED:
                problems.append(f"{source.path}: {len(bad) - NAMED} more damaged images; replace them too")
        if not counts[-1] and not bad and not lines:
            lines.append(f"{source.path}: has no images; give some, or leave it out")
        problems += lines
        done += size
        if progress:
            progress("reading", done, total)
    return counts, damaged


def _decoded(records: Iterable[Record], config: ImageDataConfig) -> Iterator[_Found | str]:
    """Yields each record decoded, in order, or why it cannot be; decodes on several threads (Pillow lets them run)."""

    def read(record: Record) -> _Found | str:
        try:
            return _read(record, config)
        except decode.Damaged as error:
            return f"{record.name}: {error}"

    threads = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    records = iter(records)
    with ThreadPoolExecutor(threads, "linnet-images") as pool:
        while block := list(itertools.islice(records, BLOCK)):
            size = sum(len(record.data) for record in block) / len(block) if isinstance(block[0].data, bytes) else 0
            yield from pool.map(read, block) if threads > 1 and size > LARGE else map(read, block)


def _read(record: Record, config: ImageDataConfig) -> _Found:
    data = record.data
    if config.kind == "latents":
        assert isinstance(data, np.ndarray)
        values = data.astype(np.float16)
        if not np.isfinite(values).all():
            raise decode.Damaged("has values that are not finite in float16; encode it again")
        channels, *sides = values.shape
        raw = values.tobytes()
        return _Found(record.name, record.label, _hash(raw, values.shape), channels, (sides[0], sides[1]), raw, None)
    image: Image | None
    if isinstance(data, bytes):
        image = decode.decode(data, config.convert)
        grid = decode.pixels(image)
    else:
        grid, image = _converted_array(data, config.convert)
        data = b""
    channels, height, width = grid.shape
    final: np.ndarray | None = grid
    if config.size is not None and grid.shape[1:] != (config.size, config.size):
        final = decode.pixels(decode.resized(image or decode.from_pixels(grid), config.size, config.crop))
    return _Found(record.name, record.label, _hash(grid.tobytes(), grid.shape), channels, (height, width), data, final)


def _converted_array(values: np.ndarray, convert: str | None) -> tuple[np.ndarray, "Image | None"]:
    wanted = decode.CHANNELS.get(convert or "", len(values))
    if wanted == len(values):
        return values, None
    image = decode.from_pixels(values).convert("L" if wanted == 1 else "RGB")
    return decode.pixels(image), image


def _hash(data: bytes, shape: tuple[int, ...]) -> int:
    """Hashes pixels, not files: the same picture in two formats without loss is one image."""
    return hash64(repr(tuple(shape)).encode() + data)


def _enter(table: _Table, found: _Found) -> None:
    table.labels.append(found.label)
    table.hashes.append(found.hash)
    table.names.append(found.name)
    table.shapes.setdefault(found.own, found.name)
    table.channels.setdefault(found.channels, found.name)
    if found.pixels is not None:
        values = found.pixels.reshape(len(found.pixels), -1).astype(np.int64)
        table.sums.extend(values.sum(1).tolist())
        table.squares.extend((values * values).sum(1).tolist())


def _statistics(table: _Table, train: np.ndarray, pixels: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the training pixels between 0 and 1, per channel."""
    count, images = len(train) * pixels, len(table.labels)
    mean, square = (np.array(sums).reshape(images, -1)[train].sum(0) / count for sums in (table.sums, table.squares))
    std = np.sqrt(np.maximum(square - mean * mean, 0))
    return [round(float(value) / 255, 6) for value in mean], [round(float(value) / 255, 6) for value in std]


def _shape_problems(config: ImageDataConfig, table: _Table) -> list[str]:
    problems = []
    if len(table.channels) > 1:
        shown = " and ".join(f"{count} ({name})" for count, name in list(table.channels.items())[:2])
        fix = "give convert: grey or rgb" if config.kind == "images" else "give latents of one encoder"
        problems.append(f"convert: images have different numbers of channels, {shown}; {fix}")
    if config.size is None and table.shapes:
        shown = " and ".join(f"{h} x {w} ({name})" for (h, w), name in list(table.shapes.items())[:2])
        height, width = next(iter(table.shapes))
        if len(table.shapes) > 1:
            problems.append(
                f"size: images have different sizes, {shown}; give size: {min(min(table.shapes))}, or another"
            )
        elif height != width:
            problems.append(f"size: images are not square, {shown}; give size: {min(height, width)}, or another")
    return problems


def _given_names(config: ImageDataConfig, every: list[ImageSource]) -> list[str] | None:
    """Returns the names of the classes that the configuration gives, or else the first source that has names."""
    lists = (sources.class_names(source, config) for source in every)
    return config.classes or next((names for names in lists if names), None)


def _orders(config: ImageDataConfig, every: list[ImageSource], whole: bool) -> list[list[str] | None]:
    """Returns what labels 0, 1, ... mean in each source where they are not the numbers of the corpus's classes.

    A source that names its labels may have the same classes in another order. So may numbers as names: class folders
    `0` to `11` are sorted as words, and a classifier that learned them is scored on numbers, whatever they are called.
    """
    names = _given_names(config, every)
    if names is None:
        return [None] * len(every)
    numbers = [str(number) for number in range(len(names))]
    orders: list[list[str] | None] = []
    for source in every:
        labels = sources.class_names(source, config)
        if whole and sorted(names) == sorted(numbers) and not set(labels or ()) & set(names):
            labels = numbers
        # Names of which none is at another place are those of the corpus, or other words for them (`classes`).
        moved = labels is not None and any(name in names and names.index(name) != n for n, name in enumerate(labels))
        others = labels is not None and config.classes is None and labels != names
        orders.append(labels if moved or others else None)
    return orders


def _classes(
    config: ImageDataConfig,
    every: list[ImageSource],
    counts: list[int],
    table: _Table,
    problems: list[str],
    whole: bool,
) -> tuple[list[str], np.ndarray]:
    """Returns the names of the classes, and the class of each image (int64).

    Args:
        counts: images of each source; `table` has them one source after another.
    """
    labels = table.labels
    if not labels:
        return [], np.empty(0, dtype=np.int64)
    numbers = [isinstance(label, int) for label in labels]
    if any(numbers) and not all(numbers):
        name, number = table.names[numbers.index(False)], table.names[numbers.index(True)]
        problems.append(f"label_key: some labels are numbers ({number}), others names ({name}); use one of both")
        return [], np.empty(0, dtype=np.int64)
    if all(numbers):
        most = max(2, min(max(labels) + 1, MOST_CLASSES))  # type: ignore[type-var, operator]
        names = _given_names(config, every) or [str(number) for number in range(most)]
        orders = _orders(config, every, whole)
        meaning = [order or names for order, count in zip(orders, counts, strict=True) for _ in range(count)]
        outside = [image for image, label in enumerate(labels) if not 0 <= label < len(meaning[image])]  # type: ignore[operator]
        if outside:
            first = outside[0]
            problems.append(
                f"{table.names[first]}: label {labels[first]} is outside the classes 0 to {len(meaning[first]) - 1} "
                f"({len(outside)} such images); correct the labels, or give all names in classes"
            )
            return names, np.zeros(len(labels), dtype=np.int64)
        for source, order in zip(every, orders, strict=True):
            if order and (unknown := [name for name in order if name not in names]):
                stated, known = (", ".join(words[:NAMED]) for words in (order, names))
                fix = "give the names of all its labels in classes, or leave it out"
                problems.append(
                    f"classes: {source.path} names its labels {stated}, and {unknown[0]!r} is not one of {known}; {fix}"
                )
                return names, np.zeros(len(labels), dtype=np.int64)
        class_of = {name: number for number, name in enumerate(names)}
        classes = [
            label if meant is names else class_of[meant[label]]  # type: ignore[index]
            for meant, label in zip(meaning, labels, strict=True)
        ]
        return names, np.array(classes, dtype=np.int64)
    names = config.classes or sorted({str(label) for label in labels})
    place = {name: number for number, name in enumerate(names)}
    unknown = sorted({str(label) for label in labels} - set(names))
    problems += [
        f"classes: label {name!r} is not one of the classes; {nearest(name, names)}" for name in unknown[:NAMED]
    ]
    if len(names) < 2 and not whole:
        problems.append(f"source: has one class, {names[0]!r}; give images of two or more classes")
    return names, np.array([place.get(str(label), 0) for label in labels], dtype=np.int64)


@dataclass(frozen=True)
class _Split:
    train: np.ndarray
    held: np.ndarray
    copies: int


def _split(config: ImageDataConfig, labels: np.ndarray, hashes: np.ndarray, is_held: np.ndarray | None) -> _Split:
    """Returns which images are used for what; copies of held-out images are used for nothing."""
    if is_held is None:
        fraction = FRACTION if config.validation_fraction is None else config.validation_fraction
        place = uniform(hashes, config.seed, "held out")
        is_held = np.zeros(len(labels), dtype=bool)
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            count = min(max(1, round(fraction * len(members))), len(members) - 1)
            is_held[members[np.argsort(place[members], kind="stable")[:count]]] = True
    copies = np.isin(hashes, hashes[is_held]) & ~is_held
    train = np.flatnonzero(~is_held & ~copies)
    if config.max_images is not None and len(train) > config.max_images:
        chosen = np.argsort(uniform(hashes[train], config.seed, "limit"), kind="stable")[: config.max_images]
        train = np.sort(train[chosen])
    return _Split(train, np.flatnonzero(is_held), int(copies.sum()))


def _split_problems(
    config: ImageDataConfig, classes: list[str], labels: np.ndarray, split: _Split, given: bool
) -> list[str]:
    if not len(split.train):
        return ["source: all of its images are also held-out images; name other validation images, or give more"]
    problems = []
    held_fix = "add images of them to the held-out images" if given else "give more images of them"
    train_fix = "raise max_images" if config.max_images is not None else "give images of them, or correct classes"
    for key, numbers, fix in (("validation", split.held, held_fix), ("source", split.train, train_fix)):
        missing = [classes[n] for n in np.setdiff1d(np.arange(len(classes)), labels[numbers])]
        if missing:
            shown = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
            which = "held-out" if key == "validation" else "training"
            problems.append(f"{key}: no {which} images of {len(missing)} of {len(classes)} classes ({shown}); {fix}")
    return problems


class _Files:
    """Writes the files of a corpus. With a folder of None it only follows what would be stored."""

    def __init__(self, folder: Path | None, store: str):
        self.folder = folder
        self._encoded = _Growing(folder, "encoded") if "encoded" in store else None
        self._pixels = _Growing(folder, "pixels") if store != "encoded" else None
        self._store = store
        self.stored = store

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._encoded, self._pixels):
            if file is not None:
                file.close()

    def add(self, found: _Found, config: ImageDataConfig) -> None:
        if self._encoded is not None:
            self._encoded.add(found.data)
        if self._pixels is None:
            return
        if found.pixels is None:
            self._pixels.add(found.data)
            return
        changed = config.size is not None and found.own != (config.size, config.size)
        self._pixels.add(found.pixels.tobytes())
        if self._encoded is not None and (changed or self._pixels.size > MOST_PIXELS):
            self._pixels.drop()
            self._pixels = None

    def finish(self, labels: np.ndarray, split: _Split) -> dict[str, dict]:
        """Writes labels and splits; returns the entries of all files for corpus.json."""
        kept, other = (self._pixels, self._encoded) if self._pixels is not None else (self._encoded, None)
        assert kept is not None
        self.stored = "encoded" if kept is self._encoded else "latents" if self._store == "latents" else "pixels"
        if other is not None:
            other.drop()
        if self.folder is None:
            return {}
        entries = {IMAGES: kept.finish(self.folder / IMAGES)}
        arrays = {LABELS: labels, SPLITS: np.concatenate([split.train, split.held])}
        if self.stored == "encoded":
            arrays[OFFSETS] = np.cumsum([0, *kept.lengths], dtype=np.int64)
        for name, values in arrays.items():
            buffer = io.BytesIO()  # NumPy writes to files without the number of an error, such as that of a full disk
            np.save(buffer, values, allow_pickle=False)
            with open(self.folder / name, "wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            entries[name] = shards.file_entry(self.folder / name)
        return entries


class _Growing:
    """A file that is written image by image, with its SHA-256."""

    def __init__(self, folder: Path | None, name: str):
        self._path = None if folder is None else folder / f".{name}"
        self._file = None if self._path is None else open(self._path, "wb")
        self._hash, self.size = hashlib.sha256(), 0
        self.lengths: list[int] = []

    def add(self, data: bytes) -> None:
        self.lengths.append(len(data))
        self.size += len(data)
        if self._file is not None:
            self._hash.update(data)
            self._file.write(data)

    def finish(self, path: Path) -> dict:
        assert self._file is not None and self._path is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._path, path)
        return {"size": self.size, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def drop(self) -> None:
        self.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
