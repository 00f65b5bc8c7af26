"""Reads checkpoint folders of other projects: config.json, and the tensors one by one.

safetensors files contain only tensors. Pickles can contain code: they are refused unless the caller allows them, and
are then read by PyTorch's restricted unpickler (`weights_only`).
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from linnet.config import ConfigError, load_json, refuse, shown
from linnet.runs.model import BYTES

AUTHOR = "blocks.0.att.r_k"  # a tensor of RWKV-7 with its author's names
POINTER = b"version https://git-lfs"
LONGEST_NAME = 255  # bytes of the name of a file
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


@dataclass
class Source:
    """A checkpoint folder whose files have been scanned.

    Attributes:
        path: the folder.
        config: content of config.json.
        shapes: shapes of all tensors, by name.
        integers: names of tensors whose dtype is not floating point.
        dtypes: dtypes of the others, as safetensors calls them.
    """

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    integers: set[str] = field(default_factory=set)
    dtypes: dict[str, str] = field(default_factory=dict)
    _files: dict[str, Path] = field(default_factory=dict)
    _loaded: dict[str, Tensor] = field(default_factory=dict)
    _cuts: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)

    def cut_at(self, sizes: dict[str, int]) -> None:
        """Cuts some tensors, joined by rows, at other rows: each has as many as `sizes` says, if the sum is theirs."""
        stored = [self.shapes.get(name, ()) for name in sizes]
        if all(stored) and len({shape[1:] for shape in stored}) == 1:
            if sum(shape[0] for shape in stored) == sum(sizes.values()):
                start = 0
                for name, size in sizes.items():
                    self._cuts[name], self.shapes[name] = (tuple(sizes), start), (size, *stored[0][1:])
                    start += size

    def read(self, name: str) -> Tensor:
        """Returns one tensor, on the CPU and in its stored dtype."""
        if name in self._cuts:
            names, start = self._cuts[name]
            joined = torch.cat([self._read(part) for part in names])
            return joined[start : start + self.shapes[name][0]]
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        if name in self._loaded:
            return self._loaded[name].clone()  # tensors of a pickle may share memory
        try:
            with safe_open(self._files[name], "pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            problem = f"{self._files[name]}: changed while it was read ({error}); convert again when it is whole"
            raise ConfigError([problem], "convert") from None


def open_source(path: str | Path, allow_pickle: bool = False) -> Source:
    """Scans a folder with config.json and weights in one file or several (`*.index.json`).

    RWKV-7 with its author's names needs no config.json, because the shapes of its tensors say all.

    Raises:
        ConfigError: names all files that are missing or damaged, and pickles if `allow_pickle` is not set.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConfigError([f"{path}: is not a folder; give the folder with config.json and the weights"], "convert")
    described = (path / "config.json").is_file()
    source = Source(path, read_json(path / "config.json"))
    problems: list[str] = []
    files = _weight_files(path, SAFE, problems)
    if files:
        for file in files:
            _scan(source, file, problems)
    else:
        files = _weight_files(path, PICKLED, problems)
        if files and not allow_pickle:
            problems.append(
                f"{files[0]}: is a pickle, which can run code when it is read; use safetensors, or pass "
                "--allow-pickle if you trust its source"
            )
        elif not files and not problems:
            problems.append(f"{path}: has neither {SAFE} nor {SAFE}.index.json; {_instead(path)}")
        for file in files if allow_pickle else []:
            _unpickle(source, file, problems)
    if not described and AUTHOR not in source.shapes:
        raise ConfigError([f"{path / 'config.json'}: is missing; copy it from the checkpoint"], "convert")
    refuse(problems, str(path))
    return source


def _weight_files(path: Path, name: str, problems: list[str]) -> list[Path]:
    """Returns the weight files: the single file, or those that the index names; an empty list if neither exists."""
    if (path / name).is_file():
        return [path / name]
    index = path / f"{name}.index.json"
    if not index.is_file():
        return []
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        problem = f"{index}: weight_map must map names of tensors to names of files (given {shown(names)})"
        problems.append(f"{problem}; copy the index of the checkpoint again")
        return []
    files = sorted(set(names.values()))
    outside = [file for file in files if not _is_name(file)]
    missing = [file for file in files if file not in outside and not (path / file).is_file()]
    problems += [
        f"{index}: names {shown(file)}, which is not a file of this folder; put the file there and name it alone"
        for file in outside
    ]
    problems += [f"{path / file}: is missing, though {index.name} names it; {_fetch(path / file)}" for file in missing]
    return [path / file for file in files if file not in outside + missing]


def _is_name(file: str) -> bool:
    """Whether this can be the name of a file, without a folder: NUL, half a character or 300 letters cannot."""
    return (
        file not in ("", "..") and Path(file).name == file and file.isprintable() and len(file.encode()) <= LONGEST_NAME
    )


def _scan(source: Source, file: Path, problems: list[str]) -> None:
    try:
        with safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
            _refuse_again(source, file, names, problems)
            for name in names:
                view = tensors.get_slice(name)
                source.shapes[name], source._files[name] = tuple(view.get_shape()), file
                source.dtypes[name] = view.get_dtype()
                if source.dtypes[name] not in BYTES:
                    source.integers.add(name)
    except (OSError, SafetensorError) as error:
        problems.append(f"{file}: is damaged, or not a safetensors file ({error}); {_fetch(file)}")


def _instead(path: Path) -> str:
    """Returns how to get weights into a folder that has none with a name that is read."""
    if (path / SAFE).is_symlink():
        return _fetch(path / SAFE)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if len(files) == 1:
        return f"rename {files[0]} to {SAFE} if it is the whole checkpoint"
    return f"copy the index of {files[0]} and the others too" if files else "give a folder with weights"


def _fetch(file: Path) -> str:
    """Returns how to get the content of a file that is missing or damaged."""
    if file.is_symlink() and not file.exists():
        return f"it is a link to {str(file.readlink())!r}, which does not exist; download the checkpoint again"
    with contextlib.suppress(OSError), open(file, "rb") as start:
        if start.read(len(POINTER)) == POINTER:
            return "it is a pointer of Git LFS; run `git lfs pull` in that folder"
    return "copy or download it again"


def _refuse_again(source: Source, file: Path, names: Iterable[str], problems: list[str]) -> None:
    """Adds a problem if files before have some of a file's tensors too: which of the two is meant is not known."""
    if again := [name for name in names if name in source.shapes]:
        more = f" and {len(again) - 1} more" if len(again) > 1 else ""
        problems.append(
            f"{file}: holds {again[0]}{more}, as a file before does; copy the shards of one checkpoint again"
        )


def _unpickle(source: Source, file: Path, problems: list[str]) -> None:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise any exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        problems.append(f"{file}: is damaged, or contains more than tensors ({reason})")
        return
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        problems.append(f"{file}: must contain an object of tensors by name")
        return
    _refuse_again(source, file, tensors, problems)
    for name, tensor in tensors.items():
        source.shapes[name], source._loaded[name] = tuple(tensor.shape), tensor
        names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        source.dtypes[name] = names.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        if tensor.dtype not in names:
            source.integers.add(name)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the content of a file, {} without the file. Raises ConfigError if it is damaged."""
    if not file.is_file():
        return {}
    try:
        values = load_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{file}: is not JSON ({error}); copy it again, or remove it"], "convert") from None
    if not isinstance(values, dict):
        problem = f"{file}: must contain a JSON object, not {type(values).__name__}; copy it again, or remove it"
        raise ConfigError([problem], "convert")
    return values
