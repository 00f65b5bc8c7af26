"""Reads the published folders of the tasks.

    listops      basic_train.tsv, basic_val.tsv, basic_test.tsv            columns Source and Target
    text         {train,test}/{pos,neg}/*.txt (IMDB), or train and test as .tsv or .parquet, columns text and label
    retrieval    new_aan_pairs.{train,eval,test}.tsv                       label, two names, two texts; no header
    image        CIFAR-10 in any form that `linnet data images` reads, with parts train and test
    pathfinder   imgs/N/*.png and metadata/N.npy (text), in curv_contour_length_14 or given directly

The files may lie in the named folder, or in the folder of the release below it. Text is read as characters: those that
occur at least 15 times in the training texts are symbols of `text`, all of them are symbols of `retrieval`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linnet.config import ConfigError, refuse, shown
from linnet.data.images import ImageDataConfig, decode
from linnet.data.images.sources import find_sources, read_records
from linnet.data.order import hash64
from linnet.data.records import UNREADABLE, damage, open_parquet, read_parquet, read_table
from linnet.data.sources import folder_digest
from linnet.encoders.lra.listops import FORMS as LISTOPS_FORMS
from linnet.encoders.lra.listops import encode, listops_task
from linnet.encoders.lra.pathfinder import hash_images, pathfinder_task
from linnet.encoders.lra.stage import ROWS, Unit, shard_name
from linnet.encoders.lra.task import END, SPLITS, SYMBOLS, UNKNOWN, LraDataConfig, LraTask, Shard, SplitName, join_rows

HELD_OUT = 0.1
RARE = 15  # characters of Text that occur less often are unknown
CUT = {"listops": LISTOPS_FORMS["full"].cut, "text": 4096, "retrieval": 4000}  # tokens with the end
CIFAR_CLASSES = 10
LEVEL = "curv_contour_length_14"  # the hard images of Pathfinder, which scores are for
BELOW = {  # folders of the releases, below the named one
    "listops": ("listops-1000", "listops"),
    "text": ("aclImdb", "imdb"),
    "retrieval": ("tsv_data", "aan", "retrieval"),
    "pathfinder": ("pathfinder32",),
    "path-x": ("pathfinder128",),
}
COLUMNS = {"listops": ("Source", "Target"), "text": ("text", "label"), "retrieval": ("first", "second", "label")}
PAIR = ["label", "first name", "second name", "first", "second"]  # columns of `retrieval`, which has no header
SPLIT_SEED = 42  # of Pathfinder's splits, as in the code of S4
GREY = ((122.6 / 255,), (61.0 / 255,))
COLOUR = ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261))

Row = tuple[Any, int]  # what is read of a row: texts or pixels, and its label

# Within a process: vocabularies by task and content.
_vocabularies: dict[tuple[str, str], str] = {}


@dataclass
class Folder:
    """The rows of a published folder. Attributes: see `Maker`; files: of each split, or of all rows under ""."""

    settings: dict[str, Any]
    inputs: list[dict[str, Any]]
    root: Path
    files: dict[str, list[Path]]

    def task(self) -> LraTask:
        name = self.settings["task"]
        if name == "listops":
            return listops_task("full")
        if name in ("pathfinder", "path-x"):
            return pathfinder_task(name, "full")
        if name in ("text", "retrieval"):
            symbols = tuple(self.vocabulary())
            kind = "tokens" if name == "text" else "pairs"
            return LraTask(name, kind, 2, CUT[name], SYMBOLS + len(symbols), symbols)  # type: ignore[arg-type]
        grey = name == "image"
        mean, std = GREY if grey else COLOUR
        augment = "none" if grey else "crop_flip"
        values = {"grid": (32, 32), "channels": len(mean), "mean": mean, "std": std, "augment": augment}
        return LraTask(name, "pixels", CIFAR_CLASSES, 32 * 32, **values)  # type: ignore[arg-type]

    def units(self) -> list[Unit]:
        return [Unit(split, 0) for split in SPLITS if split != "validation" or self.settings.get("held_out", True)]

    def shards(self, unit: Unit) -> Iterable[tuple[str, Callable[[], Shard]]]:
        rows: list[Row] = []
        block = 0
        for row in self.rows(unit.split):
            rows.append(row)
            if len(rows) == ROWS:
                yield shard_name(unit.split, block), lambda rows=rows: self.shard(rows)  # type: ignore[misc]
                rows, block = [], block + 1
        if rows:
            yield shard_name(unit.split, block), lambda: self.shard(rows)

    def rows(self, split: SplitName) -> Iterator[Row]:
        """Yields the rows of a split in the order of the files."""
        name = self.settings["task"]
        if name in ("pathfinder", "path-x"):
            every = _pathfinder_list(self.files[""])
            for number in _random_split(len(every), split):
                path, label = every[number]
                yield _pixels(path.read_bytes(), str(path), "grey", 32 if name == "pathfinder" else 128), label
            return
        if split == "test" or name in ("listops", "retrieval"):
            yield from self._read(split)
            return
        if not self.settings["held_out"]:
            yield from self._read("train")
            return
        held = _held_out(np.array([_content_hash(row) for row, _ in self._read("train")], dtype=np.uint64))
        for number, row in enumerate(self._read("train")):
            if (number in held) == (split == "validation"):
                yield row

    def shard(self, rows: list[Row]) -> Shard:
        name = self.settings["task"]
        labels = np.array([label for _, label in rows], dtype=np.uint8)
        contents = [content for content, _ in rows]
        if name in ("text", "retrieval"):
            known = np.array([ord(symbol) for symbol in self.vocabulary()], dtype=np.uint32)
            texts = [_encode(text, known, CUT[name]) for content in contents for text in content]
        elif name == "listops":
            texts = [encode(text, CUT[name]) for (text,) in contents]
        else:
            images = np.stack(contents)
            return Shard(images, np.full(len(rows), images[0, 0].size, dtype=np.int32), labels, hash_images(images))
        few = name == "listops" or SYMBOLS + len(self.vocabulary()) <= 256
        values, lengths = join_rows(texts, np.uint8 if few else np.uint16)
        hashes = np.array([_content_hash(content) for content in contents], dtype=np.uint64)
        return Shard(values, lengths.reshape(-1, 2) if name == "retrieval" else lengths, labels, hashes)

    def vocabulary(self) -> str:
        """Returns the characters that are symbols, in the order of their code points."""
        name = self.settings["task"]
        key = (name, self.inputs[0]["digest"])
        if key not in _vocabularies:
            counts = Counter[str]()
            for texts, _ in self._read("train"):
                for text in texts:
                    counts.update(text[: CUT[name] - 1])
            least = RARE if name == "text" else 1
            _vocabularies[key] = "".join(sorted(symbol for symbol, count in counts.items() if count >= least))
        return _vocabularies[key]

    def _read(self, split: str) -> Iterator[Row]:
        """Yields the rows of a published split."""
        name = self.settings["task"]
        if name in ("image", "image-as-published"):
            yield from _read_images(self.root, split, "grey" if name == "image" else "rgb")
            return
        for path in self.files.get(split, []):
            try:
                yield from _read_texts(path, name)
            except UNREADABLE as error:
                raise ConfigError([f"{path}: {damage(error)}"], "data") from None


def open_folder(config: LraDataConfig, cache: Path | None) -> Folder:
    """Finds the files of a task in a published folder.

    Raises:
        ConfigError: lists all missing splits and columns.
    """
    assert config.source is not None
    source = Path(config.source).expanduser()
    if not source.is_dir():
        fix = f"name the folder of the published files, or of linnet data lra {config.task} FOLDER --out NAME"
        raise ConfigError([f"source: {config.source!r} is not a folder; {fix}"], "data")
    wrong = [] if config.size == "full" else [f"size: {config.size}, but published folders are full; leave it out"]
    if config.task in ("image", "image-as-published"):
        root, files, problems = source, *_image_files(source)
    else:
        root = next((source / name for name in BELOW[config.task] if (source / name).is_dir()), source)
        find = {"listops": _listops_files, "text": _text_files, "retrieval": _pair_files}
        files, problems = find.get(config.task, _pathfinder_files)(root)
    if problems or wrong:
        raise ConfigError([*wrong, *(f"source: {line}" for line in problems)], "data")
    settings: dict[str, Any] = {"task": config.task, "size": "full"}
    if config.task in ("text", "image", "image-as-published"):
        settings["held_out"] = config.selection == "validation"
    every = sorted(path for group in files.values() for path in group)
    digest = folder_digest(str(root.resolve()), root, every, cache)
    return Folder(settings, [{"label": config.task, "files": len(every), "digest": digest}], root, files)


# --- finding: each returns the files of each split, and problems


def _listops_files(root: Path) -> tuple[dict[str, list[Path]], list[str]]:
    names = zip(SPLITS, ("train", "val", "test"), strict=True)
    files: dict[str, list[Path]] = {split: [root / f"basic_{name}.tsv"] for split, name in names}
    return files, [line for split, [path] in files.items() for line in _table_problems(path, split, "listops")]


def _table_problems(path: Path, split: str, task: str) -> list[str]:
    if not path.is_file():
        return [f"{path}: no such file; the {split} split is read from it"]
    try:
        if path.suffix == ".parquet":
            with open_parquet(path) as file:
                header = file.schema_arrow.names
        else:
            header = next(read_table(path, task == "retrieval"), (1, []))[1]
    except UNREADABLE as error:
        return [f"{path}: {damage(error)}"]
    if task == "retrieval":  # without a header
        what = f"its first line has {len(header)} columns, not 5 (label, two names, two texts)"
        return [] if len(header) == len(PAIR) else [f"{path}: {what}"]
    absent = [name for name in COLUMNS[task] if name not in header]
    return [f"{path}: has no column {name!r} (it has {shown(header)}); give the header" for name in absent]


def _text_files(root: Path) -> tuple[dict[str, list[Path]], list[str]]:
    files: dict[str, list[Path]] = {}
    problems = []
    for split in ("train", "test"):
        if (root / split).is_dir() and (root / split / "pos").exists() | (root / split / "neg").exists():
            folders = [root / split / label for label in ("neg", "pos")]
            files[split] = [path for folder in folders for path in sorted(folder.glob("*.txt"))]
            problems += [
                f"{folder}: has no .txt files; give the reviews" for folder in folders if not any(folder.glob("*.txt"))
            ]
        elif tables := [root / f"{split}.tsv"] if (root / f"{split}.tsv").is_file() else _parquet_files(root, split):
            files[split] = tables
            problems += [line for path in tables for line in _table_problems(path, split, "text")]
        else:
            problems.append(f"{root}: has no {split} split; give {split}/pos and {split}/neg, {split}.tsv or .parquet")
    return files, problems


def _parquet_files(root: Path, split: str) -> list[Path]:
    return sorted(path for path in root.rglob("*.parquet") if path.name.startswith(split))


def _pair_files(root: Path) -> tuple[dict[str, list[Path]], list[str]]:
    files: dict[str, list[Path]] = {
        split: [root / f"new_aan_pairs.{name}.tsv"]
        for split, name in zip(SPLITS, ("train", "eval", "test"), strict=True)
    }
    return files, [line for split, [path] in files.items() for line in _table_problems(path, split, "retrieval")]


def _pathfinder_files(root: Path) -> tuple[dict[str, list[Path]], list[str]]:
    root = root / LEVEL if (root / LEVEL).is_dir() else root
    tables = sorted((root / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem))
    problems = (
        [] if tables else [f"{root}: has no metadata/*.npy; name the folder of {LEVEL}, with imgs/ and metadata/"]
    )
    problems += [] if (root / "imgs").is_dir() else [f"{root}: has no folder imgs; name the folder of {LEVEL}"]
    images = [] if problems else [path for path, _ in _pathfinder_list(tables)]
    if images:
        missing = [path for path in images if not path.is_file()]
        problems += [f"{path}: no such image, but metadata names it" for path in missing[:5]]
        problems += [f"{root}: {len(missing)} images of metadata are missing"] if len(missing) > 5 else []
    return {"": tables, "imgs": images}, problems


def _image_files(root: Path) -> tuple[dict[str, list[Path]], list[str]]:
    problems: list[str] = []
    sources = find_sources([str(root)], "source", problems, [])
    problems = [line.removeprefix("source: ") for line in problems]
    parts = {source.part for source in sources}
    problems += [
        f"{root}: has no part {part}; give files or folders of that name"
        for part in ("train", "test")
        if part not in parts
    ]
    return {
        str(part): [path for source in sources if source.part == part for path in source.files] for part in parts
    }, problems


# --- reading


def _read_texts(path: Path, task: str) -> Iterator[Row]:
    """Yields the texts and labels of a file."""
    if path.suffix == ".txt":
        yield (path.read_text(encoding="utf-8"),), int(path.parent.name == "pos")
        return
    rows: Iterator[tuple[int, Any]]
    if path.suffix == ".parquet":
        header = list(COLUMNS[task])
        rows = enumerate(read_parquet(path, header), 1)
    else:
        rows = read_table(path, task == "retrieval")
        header = PAIR if task == "retrieval" else next(rows)[1]
    *texts, label = (header.index(name) for name in COLUMNS[task])
    for number, fields in rows:
        if len(fields) != len(header):
            raise _bad(path, number, f"has {len(fields)} columns, not {len(header)}")
        contents = tuple(fields[column] for column in texts)
        if not all(isinstance(text, str) for text in contents):
            raise _bad(path, number, "has no text")
        yield contents, _label(path, number, str(fields[label]), 10 if task == "listops" else 2)


def _label(path: Path, number: int, value: str, classes: int) -> int:
    try:
        label = float(value)  # AAN writes 0.0 and 1.0
    except ValueError:
        label = -1
    if label not in range(classes):
        raise _bad(path, number, f"the label {shown(value)} is not a number from 0 to {classes - 1}")
    return int(label)


def _bad(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError([f"{path}: line {number}: {problem}; fix the line"], "data")


def _read_images(root: Path, part: str, convert: str) -> Iterator[Row]:
    problems: list[str] = []
    config = ImageDataConfig(source=[str(root)])
    for source in find_sources([str(root)], "source", problems, []):
        if source.part == part:
            for record in read_records(source, config, problems):
                if isinstance(record.label, str) or record.label not in range(CIFAR_CLASSES):
                    fix = f"give labels 0 to {CIFAR_CLASSES - 1}"
                    raise ConfigError([f"{record.name}: has the class {record.label!r}; {fix}"], "data")
                yield _pixels(record.data, record.name, convert, 32), record.label
    refuse(problems, "data")


def _pixels(data: bytes | np.ndarray, name: str, convert: str, side: int) -> np.ndarray:
    """Returns an image as uint8 [C, side, side]."""
    decode.check_pillow()
    try:
        image = decode.from_pixels(data) if isinstance(data, np.ndarray) else decode.decode(data)
    except decode.Damaged as error:
        raise ConfigError([f"{name}: {error}"], "data") from None
    if image.size != (side, side):
        raise ConfigError([f"{name}: has {image.width} x {image.height} pixels, not {side} x {side}"], "data")
    return decode.pixels(image.convert("L" if convert == "grey" else "RGB"))


def _pathfinder_list(tables: list[Path]) -> list[tuple[Path, int]]:
    """Returns path and label of every image that the metadata name: as text, or as an array of text."""
    images = []
    for table in tables:
        data = table.read_bytes()
        if data.startswith(b"\x93NUMPY"):
            rows = [[str(value) for value in row] for row in np.load(table, allow_pickle=False)]
        else:
            rows = [line.split() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
        for number, row in enumerate(rows, 1):
            if len(row) < 4:
                raise _bad(table, number, f"has {len(row)} columns, not at least 4 (folder, name, number, label)")
            images.append((table.parents[1] / row[0] / row[1], _label(table, number, row[3], 2)))
    return images


def _random_split(rows: int, split: SplitName) -> list[int]:
    """Returns the rows of a split of Pathfinder: 80, 10 and 10 %, by PyTorch's permutation, as in the code of S4."""
    import torch

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    tenth = int(0.1 * rows)
    train = rows - 2 * tenth
    return {"train": order[:train], "validation": order[train : train + tenth], "test": order[train + tenth :]}[split]


def _held_out(hashes: np.ndarray) -> set[int]:
    """Returns the rows that are held out of train: a tenth, by their content."""
    return set(np.argsort(hashes, kind="stable")[: round(HELD_OUT * len(hashes))].tolist())


def _content_hash(content: Any) -> int:
    data = content.tobytes() if isinstance(content, np.ndarray) else "\0".join(content).encode()
    return hash64(data)


def _encode(text: str, known: np.ndarray, cut: int) -> np.ndarray:
    """Returns the ids of a text, with its end; characters outside of `known` are unknown."""
    points = np.frombuffer(text[: cut - 1].encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    place = np.minimum(np.searchsorted(known, points), max(len(known) - 1, 0))
    ids = np.where(known[place] == points, SYMBOLS + place, UNKNOWN) if len(known) else np.full(len(points), UNKNOWN)
    return np.append(ids, END)
