"""Sources of labelled images: finds their files, and reads one record per image.

digits    scikit-learn's digits; the last 297 are the part `test`
folder    class folders `root/class/.../name.png`; classes in the order of their names
parquet   a column of images (a struct with `bytes`, or bytes) and one of labels: the layout of published data sets
tar       shards of `key.jpg` and `key.cls` (a number or a name)
idx       `*-images-idx3-ubyte` beside `*-labels-idx1-ubyte`, also `.gz`: the layout of MNIST
npz, npy  arrays uint8 [N, H, W], [N, H, W, C] or [N, C, H, W]; or latents, float16 [N, C, S, S]

Where a folder holds Parquet, tar, IDX or array files, these are read; otherwise it is a folder of classes. The words
`train`, `validation` and `test` in names of files, folders and arrays make parts (`split`, `held_out`). No archive is
unpacked, and no pickle is read.
"""

import errno
import gzip
import hashlib
import importlib.util
import json
import math
import os
import re
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from linnet.config import ConfigError, first_of, load_json, nearest
from linnet.data import hub
from linnet.data.images import DIGITS, ImageDataConfig
from linnet.data.records import UNREADABLE, BadFile, SourceFile, damage, open_parquet, read_parquet
from linnet.data.sources import fingerprints, folder_digest, named_paths
from linnet.install import install_command

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
LATENTS = "latents.json"  # beside the parts that `linnet data latents` writes
HELD_DIGITS = 297  # the usual test images: the last ones, by other writers
IMAGE_NAMES = ("image", "images", "img", "x", "arr_0", "latents", "latent")
LABEL_NAMES = ("label", "labels", "fine_label", "y", "arr_1", "class", "targets")
REPORTED = 5  # most problems listed per file
USUAL_PART = ImageDataConfig.model_fields["split"].default
ROWS = 1024  # rows of Parquet that are read at a time
_IDX = re.compile(r"(?P<part>.*?)(?P<word>images)(?P<end>[-.]idx[34]-ubyte(\.gz)?)$")


@dataclass(frozen=True)
class Record:
    """One image of a source.

    Attributes:
        name: for messages: the file, and the place in it.
        label: number or name of the class.
        data: an encoded image; or pixels, uint8 [C, H, W]; or a latent, float16 [C, S, S].
    """

    name: str
    label: int | str
    data: bytes | np.ndarray


@dataclass
class ImageSource:
    """A file, or a folder of classes, that holds images.

    Attributes:
        kind: see the module's docstring.
        path: the file or folder. name: how messages call it.
        part: "train", "validation", "test", or None if nothing in its name says so.
        files: the files that identify the content, in a fixed order.
        named: whether a path or glob names it directly.
    """

    kind: str
    path: Path
    part: str | None = None
    named: bool = False
    files: list[Path] = field(default_factory=list)

    @property
    def encoded(self) -> bool:
        return self.kind in ("folder", "parquet", "tar")

    def shares(self, other: "ImageSource") -> bool:
        """Whether some image may be in both. Parts of one file or folder are distinct."""
        if self.part != other.part and None not in (self.part, other.part):
            return False
        files, others = ({path.absolute() for path in side.files} or {side.path.absolute()} for side in (self, other))
        return not files.isdisjoint(others)


def find_sources(names: list[str], key: str, problems: list[str], skipped: list[str]) -> list[ImageSource]:
    """Lists the sources that names of a configuration mean, without reading images.

    Args:
        names: "digits", paths of folders and files, globs, and names on the Hub.
        key: the configuration key, for messages.
        problems: problems are appended here.
        skipped: files in folders that are not images are appended here with the reason.
    """
    sources: list[ImageSource] = []
    for name in names:
        try:
            sources += _find(name, skipped)
        except BadFile as error:
            problems += [f"{key}: {name!r} {line}" for line in getattr(error, "lines", [str(error)])]
    if not names:
        problems.append(f"{key}: is an empty list; name a folder or file of images, or {DIGITS!r}")
    unique: dict[tuple, ImageSource] = {}
    for source in sources:
        unique.setdefault((source.path.resolve(), source.part), source)
    return list(unique.values())


def choose_parts(
    config: ImageDataConfig, train: list[ImageSource], held: list[ImageSource], problems: list[str]
) -> tuple[list[ImageSource], list[ImageSource]]:
    """Returns the sources of training and of held-out images, by the parts that the sources have."""
    held = [source for source in held if source.part != config.split] or held
    parts = sorted({source.part for source in train if source.part})
    if not parts:
        if config.held_out is not None:
            problems.append(
                f"held_out: {config.held_out!r}, but the source has no parts; use validation, or validation_fraction"
            )
        if config.split != USUAL_PART:
            problems.append(f"split: {config.split!r}, but the source has no parts; leave it out")
        return train, held
    chosen = [source for source in train if source.part in (None, config.split)]
    if not chosen:
        # a source with one part, and no choice of another: there is nothing to choose
        if len(parts) == 1 and config.held_out is None and config.split == USUAL_PART:
            return train, held
        problems.append(f"split: the source has no part {config.split!r}; {nearest(config.split, parts)}")
        return train, held
    if config.held_out is not None:
        held_out = [source for source in train if source.part == config.held_out]
        if not held_out:
            problems.append(f"held_out: the source has no part {config.held_out!r}; {nearest(config.held_out, parts)}")
        return chosen, held_out
    if config.validation or config.validation_fraction is not None:
        return chosen, held
    for name in ("validation", "test"):
        held_out = [source for source in train if source.part == name and name != config.split]
        if held_out:
            return chosen, held_out
    return chosen, []


def content(sources: list[ImageSource], cache: Path | None) -> list[list]:
    """Returns kind, part and SHA-256 of the content of each source, wherever it lies.

    Those of class folders and of large files are remembered in the folder `cache` by sizes and times of the files.
    """
    return [[source.kind, source.part, _content(source, cache)] for source in sources]


def read_records(source: ImageSource, config: ImageDataConfig, problems: list[str]) -> Iterator[Record]:
    """Yields the images of a source in their order.

    Args:
        problems: problems of files are appended here, at most about `REPORTED` per file; their images are not yielded.
    """
    readers = {
        DIGITS: _read_digits,
        "folder": _read_folder,
        "parquet": _read_parquet,
        "tar": _read_tar,
        "idx": _read_idx,
        "npz": _read_npz,
        "npy": _read_npy,
    }
    try:
        yield from readers[source.kind](source, config, problems)
    except _Unusable as error:
        problems += [f"{source.path}: {line}" for line in error.lines]
    except UNREADABLE as error:
        problems.append(f"{getattr(error, 'filename', None) or source.path}: {damage(error)}")


def class_names(source: ImageSource, config: ImageDataConfig) -> list[str] | None:
    """Returns the names of labels 0, 1, ... that metadata of a Parquet file or of latents give, None without any."""
    if source.kind == "npz" and (about := about_latents(source.path.parent)):
        return about["classes"]
    return _parquet_names(source.path, config.label_key) if source.kind == "parquet" else None


def about_latents(folder: Path) -> dict | None:
    """Returns what latents.json of a folder says; None without such a file.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        about = load_json(folder / LATENTS)
    except OSError:
        return None
    except ValueError:
        about = None
    keys = {"autoencoder", "scaling_factor", "images", "classes", "parts"}
    if not isinstance(about, dict) or not keys <= about.keys():
        message = f"{folder / LATENTS}: is damaged; delete it, and encode the images again with linnet data latents"
        raise ConfigError([message], "data")
    return about


class _Unusable(BadFile):
    def __init__(self, *lines: str):
        super().__init__("; ".join(lines))
        self.lines = lines


# --- finding


def _find(name: str, skipped: list[str]) -> list[ImageSource]:
    if name == DIGITS:
        return [ImageSource(DIGITS, Path(DIGITS), "train"), ImageSource(DIGITS, Path(DIGITS), "test")]
    paths = named_paths(name)
    if paths[0].is_dir():
        return _folder(paths[0], skipped)
    if paths == [Path(name).expanduser()]:
        return _arrays(paths[0], None) if paths[0].suffix == ".npz" else [_file(paths[0], None)]
    if not (files := [path for path in paths if not _is_labels(path)]):
        raise _Unusable("names only files of labels; name those of images, beside which labels are found")
    return [_file(path, None) for path in files]


def _file(path: Path, part: str | None) -> ImageSource:
    kind = _kind(path)
    if kind is None:
        if path.suffix.lower() in IMAGES:
            raise _Unusable(f"{path.name} is one image without a class; name the folder that holds class folders")
        raise _Unusable(f"{path.name} is of an unknown kind; give class folders, .parquet, .tar, IDX, .npz or .npy")
    if path.stat().st_size == 0:
        raise _Unusable(f"{path.name} is an empty file; replace it")
    if kind == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise _Unusable(f"needs pyarrow; install it: {install_command('data')}")
    files = [path]
    if kind == "idx":
        files.append(_idx_labels(path))
    elif kind == "npy":
        files.append(_npy_labels(path))
    return ImageSource(kind, path, part, True, files)


def _kind(path: Path) -> str | None:
    name = path.name.lower()
    if _IDX.match(name):
        return "idx"
    for kind, ends in {"parquet": (".parquet", ".pq"), "tar": (".tar",), "npz": (".npz",), "npy": (".npy",)}.items():
        if name.endswith(ends):
            return kind
    return None


def _is_labels(path: Path) -> bool:
    """Whether a file holds only the labels of another one."""
    name = path.name.lower()
    return re.search(r"labels[-.]idx1-ubyte(\.gz)?$", name) is not None or name.endswith("labels.npy")


def _folder(root: Path, skipped: list[str]) -> list[ImageSource]:
    files, unread = _walk(root)
    if unread:
        raise _Unusable(*unread)
    packed = [path for path in files if _kind(path) and not _is_labels(path)]
    if (about := about_latents(root)) and (absent := set(about["parts"]) - {path.name for path in packed}):
        lacks = f"lacks {len(absent)} of {len(about['parts'])} parts, such as {min(absent)}"
        raise _Unusable(f"{lacks}; run its linnet data latents again, which encodes what is missing")
    if packed:
        sources: list[ImageSource] = []
        lines: list[str] = []
        for path in packed:
            part = hub.split_of(path.relative_to(root).as_posix())
            try:
                sources += _arrays(path, part) if path.suffix == ".npz" else [_file(path, part)]
            except _Unusable as error:
                lines += error.lines
        if lines:
            raise _Unusable(*lines)
        for source in sources:
            source.named = False
        return sources
    return _class_folders(root, files, skipped)


def _class_folders(root: Path, files: list[Path], skipped: list[str]) -> list[ImageSource]:
    images = []
    for path in files:
        if path.suffix.lower() in IMAGES:
            images.append(path)
        else:
            skipped.append(f"{path}: is not an image ({', '.join(IMAGES)})")
    if not images:
        raise _Unusable("is a folder without images; give root/CLASS/*.png, .parquet, .tar, IDX, .npz or .npy files")
    tops = {path.relative_to(root).parts[0] for path in images if len(path.relative_to(root).parts) > 2}
    parts = {top: hub.split_of(top) for top in tops}
    # Folders such as train/ and test/ are parts if all folders are, and if they hold folders.
    has_parts = bool(parts) and all(parts.values()) and all(len(p.relative_to(root).parts) > 2 for p in images)
    groups: dict[tuple[Path, str | None], list[Path]] = {}
    for path in images:
        top = path.relative_to(root).parts[0]
        key = (root / top, parts[top]) if has_parts else (root, None)
        groups.setdefault(key, []).append(path)
    lines = []
    for (base, _), members in groups.items():
        loose = [path for path in members if len(path.relative_to(base).parts) < 2]
        if loose:
            lines.append(
                f"has {len(loose)} images outside a class folder, such as {loose[0]}; move them into root/CLASS/"
            )
        empty = [folder for folder in _subfolders(base) if not any(folder in path.parents for path in members)]
        lines += [f"has a class folder without images: {folder}; fill or remove it" for folder in empty]
    if lines:
        raise _Unusable(*lines)
    return [ImageSource("folder", base, part, False, members) for (base, part), members in groups.items()]


def _subfolders(base: Path) -> list[Path]:
    return sorted(path for path in base.iterdir() if path.is_dir() and not _hidden(path.name))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _walk(root: Path) -> tuple[list[Path], list[str]]:
    """Returns all files that are not hidden, sorted by path, and what is wrong with links, pipes and devices."""
    files: list[Path] = []
    problems: list[str] = []
    loop = "has a symbolic link that leads back to itself: {}; remove it"

    def visit(folder: Path, above: frozenset[str]) -> None:
        above = above | {os.path.realpath(folder)}
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if _hidden(entry.name):
                    continue
                path = Path(entry.path)
                try:
                    is_folder, is_file = entry.is_dir(), entry.is_file()
                except OSError as error:
                    if error.errno != errno.ELOOP:
                        raise
                    problems.append(loop.format(path))
                    continue
                if is_folder:
                    if entry.is_symlink() and os.path.realpath(path) in above:
                        problems.append(loop.format(path))
                    else:
                        visit(path, above)
                elif is_file:
                    files.append(path)
                elif not path.exists():
                    problems.append(f"has a symbolic link to nothing: {path}; correct it, or remove it")
                else:
                    problems.append(f"has a pipe, a socket or a device: {path}; remove it")

    visit(root, frozenset())
    return files, problems


# --- reading


def _read_digits(source: ImageSource, config: ImageDataConfig, problems: list[str]) -> Iterator[Record]:
    values, labels = digits()
    first = len(values) - HELD_DIGITS
    chosen = range(first) if source.part == "train" else range(first, len(values))
    for number in chosen:
        yield Record(f"{DIGITS}: image {number}", int(labels[number]), values[number][None])


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's digits: uint8 [1797, 8, 8], whose 17 levels are spread over 0 to 255, and labels.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        fix = install_command("vision")
        raise ConfigError(
            [f"source: {DIGITS!r} comes with scikit-learn, which is not installed; install it: {fix}"], "data"
        )
    # Reading its file takes milliseconds; importing scikit-learn takes seconds.
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        table = np.loadtxt(path, delimiter=",")
        values, labels = table[:, :-1], table[:, -1]
    else:
        from sklearn.datasets import load_digits

        values, labels = load_digits(return_X_y=True)
    return np.rint(values.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), labels.astype(np.int64)


def _read_folder(source: ImageSource, config: ImageDataConfig, problems: list[str]) -> Iterator[Record]:
    for path in source.files:
        yield Record(str(path), path.relative_to(source.path).parts[0], path.read_bytes())


def _read_parquet(source: ImageSource, config: ImageDataConfig, problems: list[str]) -> Iterator[Record]:
    import pyarrow as pa

    with open_parquet(source.path) as file:
        schema = file.schema_arrow
    keys = [_column(config.image_key, "image_key", IMAGE_NAMES, schema.names)]
    keys.append(_column(config.label_key, "label_key", LABEL_NAMES, schema.names))
    if lines := [key for key in keys if not key[0]]:
        raise _Unusable(*(line for _, line in lines))
    image_key, label_key = keys[0][0], keys[1][0]
    kind = schema.field(image_key).type
    packed = pa.types.is_struct(kind) and "bytes" in [part.name for part in kind]
    if not (packed or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise _Unusable(f"column {image_key!r} holds {kind}, not images; give a struct with `bytes`, or bytes")
    labels = schema.field(label_key).type
    values = labels.value_type if pa.types.is_dictionary(labels) else labels
    if not (pa.types.is_integer(values) or pa.types.is_string(values) or pa.types.is_large_string(values)):
        raise _Unusable(f"column {label_key!r} holds {labels}, not labels; give integers or names in label_key")
    for number, (value, label) in enumerate(read_parquet(source.path, [image_key, label_key])):
        name = f"{source.path}: row {number}"
        image = value["bytes"] if packed and value is not None else value
        if image is None or label is None:
            which = image_key if image is None else label_key
            if sum(line.startswith(f"{source.path}: row") for line in problems) < REPORTED:
                problems.append(f"{name}: {which!r} is null; fill it in, or remove the row")
            continue
        yield Record(name, label, image)


def _column(wanted: str | None, key: str, usual: tuple[str, ...], names: list[str]) -> tuple[str, str]:
    """Returns the name of a column and "", or "" and a problem."""
    if wanted is not None:
        return (wanted, "") if wanted in names else ("", f"has no {wanted!r} ({key}); {nearest(wanted, names)}")
    column = next((name for name in usual if name in names), "")
    return column, "" if column else f"has none of {', '.join(usual)} but {', '.join(names)}; name one in {key}"


def _parquet_names(path: Path, label_key: str | None) -> list[str] | None:
    """Returns the names of the labels in the metadata that the library `datasets` writes."""
    try:
        with open_parquet(path) as file:
            schema = file.schema_arrow
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = {key: value.get("names") for key, value in features.items() if value.get("_type") == "ClassLabel"}
    except (BadFile, ValueError, AttributeError):
        return None
    label, _ = _column(label_key, "label_key", LABEL_NAMES, schema.names)
    return names[label] if list(names) == [label] and isinstance(names[label], list) else None


def _read_tar(source: ImageSource, config: ImageDataConfig, problems: list[str]) -> Iterator[Record]:
    images: dict[str, tuple[str, bytes]] = {}
    labels: dict[str, str] = {}
    members, lines = 0, []
    with tarfile.open(source.path, "r:") as archive:
        for member in archive:
            if member.isdir():
                continue
            if member.name.startswith("/") or ".." in Path(member.name).parts:
                lines.append(f"has a member with a path outside the archive: {member.name}; make the shard again")
                continue
            if not member.isreg():
                lines.append(f"has a member that is a link or a device: {member.name}; make the shard again")
                continue
            base, _, end = os.path.basename(member.name).partition(".")
            key, end = os.path.join(os.path.dirname(member.name), base), f".{end.lower()}"
            if base == "" or end not in (".cls", *IMAGES):
                continue  # hidden files, and other fields of a sample
            members += 1
            content = archive.extractfile(member)
            data = b"" if content is None else content.read()
            if len(data) != member.size:
                raise _Unusable("is truncated: it ends in the middle of a member; make it again")
            if end == ".cls":
                labels[key] = data.decode(errors="replace").strip()
            else:
                images[key] = (member.name, data)
            if key in labels and key in images:
                name, data = images.pop(key)
                label = labels.pop(key)
                yield Record(f"{source.path}: {name}", int(label) if label.isdecimal() else label, data)
    lines += [f"has an image without a label: {name}; add {key}.cls" for key, (name, _) in images.items()]
    lines += [f"has a label without an image: {key}.cls; add the image, or remove the label" for key in labels]
    if not members:
        lines.append("has no images; give members key.jpg and key.cls")
    if lines:
        raise _Unusable(*first_of(lines, REPORTED))


def _idx_labels(path: Path) -> Path:
    match = _IDX.match(path.name)
    assert match is not None
    stem = f"{match['part']}labels"
    end = match["end"].removesuffix(".gz")
    for separator in (end[0], "-", "."):
        for more in (".gz", "") if path.suffix == ".gz" else ("", ".gz"):
            labels = path.with_name(f"{stem}{separator}idx1-ubyte{more}")
            if labels.is_file():
                return labels
    raise _Unusable(f"{path.name} has no labels beside it; add {stem}{end[0]}idx1-ubyte")


def _read_idx(source: ImageSource, config: ImageDataConfig, problems: list[str]) -> Iterator[Record]:
    path, labels_path = source.files
    labels = _idx(labels_path, (1,))
    values = _idx(path, (3, 4))
    if len(values) != len(labels):
        raise _Unusable(f"has {len(values)} images, but {labels_path.name} {len(labels)} labels; make both again")
    yield from _rows(path, _channels_first(path, values, problems), labels)


def _idx(path: Path, dimensions: tuple[int, ...]) -> np.ndarray:
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] != 8 or head[3] not in dimensions:
            wanted = " or ".join(f"0x0000080{number}" for number in dimensions)
            raise _Unusable(
                f"{path.name} starts with 0x{head.hex()}, but IDX needs {wanted}; give an IDX file of bytes"
            )
        sizes = file.read(4 * head[3])
        if len(sizes) < 4 * head[3]:
            raise _Unusable(f"{path.name} is truncated: it ends in its header; make it again")
        shape = struct.unpack(f">{head[3]}I", sizes)
        need = math.prod(shape)
        most = path.stat().st_size * (2000 if path.suffix == ".gz" else 1)  # gzip shrinks 1032 times at most
        data = file.read(need) if need <= most else b""
    if len(data) < need:
        raise _Unusable(f"{path.name} is truncated: {need:,} bytes of values announced, fewer found; make it again")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _arrays(path: Path, part: str | None) -> list[ImageSource]:
    """The sources of an `.npz` file: one for each part that its names give, such as x_train and x_test."""
    base = _file(path, part)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            parts = sorted({split for name in arrays.files if (split := hub.split_of(name))})
    except (ValueError, OSError, EOFError, zipfile.BadZipFile):
        return [base]  # reading it reports the problem
    return [ImageSource("npz", path, name, base.named, base.files) for name in parts] or [base]


def _read_npz(source: ImageSource, config: ImageDataConfig, problems: list[str]) -> Iterator[Record]:
    try:
        with np.load(source.path, allow_pickle=False) as arrays:
            names = [name for name in arrays.files if hub.split_of(name) in (None, source.part)]
            image_key = _array(config.image_key, "image_key", IMAGE_NAMES, names)
            label_key = _array(config.label_key, "label_key", LABEL_NAMES, names)
            if lines := [key[1] for key in (image_key, label_key) if not key[0]]:
                raise _Unusable(*lines)
            values, labels = arrays[image_key[0]], arrays[label_key[0]]
    except ValueError as error:
        raise _Unusable(_pickled(source.path, error)) from None
    yield from _pairs(source.path, values, labels, config, problems)


def _array(wanted: str | None, key: str, usual: tuple[str, ...], names: list[str]) -> tuple[str, str]:
    if wanted is not None or any(name in names for name in usual):
        return _column(wanted, key, usual, names)
    words = {name: set(re.split(r"[^a-z0-9]+", name.lower())) for name in names}
    matches = [name for name in names if words[name] & set(usual)]  # x_train, test_labels
    return (matches[0], "") if len(matches) == 1 else _column(wanted, key, usual, names)


def _npy_labels(path: Path) -> Path:
    for name in (f"{path.stem}.labels.npy", f"{path.stem}_labels.npy", "labels.npy"):
        if (labels := path.with_name(name)).is_file():
            return labels
    raise _Unusable(f"{path.name} has no labels beside it; add {path.stem}.labels.npy, int64 [N]")


def _read_npy(source: ImageSource, config: ImageDataConfig, problems: list[str]) -> Iterator[Record]:
    try:
        values, labels = (np.load(path, mmap_mode="r", allow_pickle=False) for path in source.files)
    except ValueError as error:
        raise _Unusable(_pickled(source.path, error)) from None
    yield from _pairs(source.path, values, labels, config, problems)


def _pickled(path: Path, error: ValueError) -> str:
    with open(path, "rb") as file:
        start = file.read(6)
    if start[:1] != b"\x80" and not start.startswith((b"PK", b"\x93NUMPY")):  # NumPy calls every other file a pickle
        return f"is not an array of NumPy (it starts with {start!r}); write it with numpy.savez or numpy.save"
    if "pickle" in str(error).lower():
        return "holds pickled Python objects, which may run code and are refused; save arrays of numbers"
    return f"is truncated or damaged ({_line(error)}); make it again, or leave it out"


def _pairs(
    path: Path, values: np.ndarray, labels: np.ndarray, config: ImageDataConfig, problems: list[str]
) -> Iterator[Record]:
    lines = []
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        lines.append(f"has labels {labels.dtype} {list(labels.shape)}; give integers or names, [N]")
    elif len(labels) != len(values):
        lines.append(f"has {len(values)} images and {len(labels)} labels; make both again")
    if config.kind == "latents":
        if values.ndim != 4 or values.shape[2] != values.shape[3] or values.dtype not in (np.float16, np.float32):
            lines.append(f"has {values.dtype} {list(values.shape)}; latents are float16 [N, C, S, S]")
    elif values.dtype != np.uint8:
        nan = " with NaN" if values.dtype.kind == "f" and np.isnan(values).any() else ""
        lines.append(f"has images {values.dtype}{nan}; give uint8 from 0 to 255, or set kind: latents")
    if lines:
        raise _Unusable(*lines)
    yield from _rows(path, values if config.kind == "latents" else _channels_first(path, values, problems), labels)


def _channels_first(path: Path, values: np.ndarray, problems: list[str]) -> np.ndarray:
    """Returns images as [N, C, H, W]."""
    if values.ndim == 3:
        return values[:, None]
    if values.ndim == 4 and values.shape[3] in (1, 3):
        return values.transpose(0, 3, 1, 2)
    if values.ndim == 4 and values.shape[1] in (1, 3):
        return values
    shape = list(values.shape)
    raise _Unusable(f"has images {shape}; give [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels")


def _rows(path: Path, values: np.ndarray, labels: np.ndarray) -> Iterator[Record]:
    label_list = labels.tolist()
    for number, label in enumerate(label_list):
        yield Record(f"{path}: image {number}", label, np.ascontiguousarray(values[number]))


# --- content


def _content(source: ImageSource, cache: Path | None) -> str:
    if source.kind == DIGITS:
        values, labels = digits()
        return hashlib.sha256(values.tobytes() + labels.tobytes()).hexdigest()
    if source.kind != "folder":
        files = [SourceFile(path, source.kind, source.named) for path in source.files]
        return hashlib.sha256("".join(fingerprints(files, cache)).encode()).hexdigest()
    return folder_digest(f"{source.path.resolve()}/{source.part}", source.path, source.files, cache)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
