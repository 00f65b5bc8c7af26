"""Safetensors files that hold slices of tensors, as each rank of a training on many devices writes them.

The header's metadata gives the offset of each slice in its whole tensor, in the form of PyTorch's distributed
checkpoints (`DCP_SHARDING_INFO`), so `torch.distributed.checkpoint.HuggingFaceStorageReader` reads these files too.
PyTorch's own writer (`HuggingFaceStorageWriter`) copies all tensors of a file twice while holding the interpreter's
lock, which would stop the training steps beside a background save. `write` streams: one copy, hashed on the way, and
the lock is free during writing and hashing.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_BLOCK = 1 << 24  # bytes that are hashed and written at once


class Slice(NamedTuple):
    """A slice of a tensor, in memory.

    Attributes:
        tensor: the slice.
        offset: its first index in the whole tensor, for each dimension.
        shape: shape of the whole tensor.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> "Slice":
        return cls(tensor, (0,) * tensor.ndim, tuple(tensor.shape))


def write(path: Path, slices: Mapping[str, Slice]) -> dict:
    """Writes slices to a file and waits until they are on the disk. Returns `sha256` and `bytes` of the file.

    Raises:
        OSError: the disk is full or fails.
    """
    header: dict = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            SHARDING: json.dumps({name: {OFFSETS: list(part.offset)} for name, part in slices.items()}),
        }
    }
    end = 0
    for name, (tensor, _, _) in slices.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    total = hashlib.sha256()
    with open(path, "wb") as file:
        for data in (memoryview(len(text).to_bytes(8, "little") + text), *map(_bytes, slices.values())):
            for start in range(0, len(data), _BLOCK):
                block = data[start : start + _BLOCK]
                file.write(block)
                total.update(block)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": total.hexdigest(), "bytes": 8 + len(text) + end}


class Reader:
    """Reads whole tensors, or any part of them, from files of slices. Files without offsets hold whole tensors.

    Attributes:
        shapes: name -> shape of the whole tensor, as far as the files cover it.
    """

    def __init__(self, files: Iterable[Path]):
        """Raises `SafetensorError`, `ValueError` or `OSError` if a file cannot be read."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._places: dict[str, list[tuple[Path, tuple[int, ...], tuple[int, ...]]]] = {}
        self._open: dict[Path, safe_open] = {}
        for path in files:
            file = self._file(path)
            offsets = _offsets((file.metadata() or {}).get(SHARDING, "{}"), path)
            for name in file.keys():  # noqa: SIM118, it is not a mapping
                part = file.get_slice(name)
                shape = tuple(part.get_shape())
                offset = offsets.get(name, (0,) * len(shape))
                before = self.shapes.get(name, (0,) * len(shape))
                self.shapes[name] = tuple(map(max, before, map(sum, zip(offset, shape, strict=True))))
                self._dtypes[name] = _TYPES[part.get_dtype()]
                self._places.setdefault(name, []).append((path, offset, shape))

    def whole(self, name: str) -> Tensor:
        """Returns a whole tensor, joined from its slices.

        Raises:
            ValueError: the files do not contain all of it.
        """
        places = self._places[name]
        if len(places) == 1 and places[0][2] == self.shapes[name]:
            return self._file(places[0][0]).get_tensor(name)
        held, needed = sum(math.prod(shape) for _, _, shape in places), math.prod(self.shapes[name])
        if held != needed:  # before memory is taken: an offset may be any number
            raise ValueError(f"{name}: the files hold {held} of {needed} numbers")
        joined = torch.empty(self.shapes[name], dtype=self._dtypes[name])
        self.fill(name, Slice.whole(joined))
        return joined

    def fill(self, name: str, into: Slice) -> None:
        """Copies the part of a tensor that `into` names into its memory.

        Raises:
            ValueError: the files do not contain all of it.
        """
        filled = 0
        for path, offset, shape in self._places[name]:
            begin = tuple(map(max, offset, into.offset))
            ends = zip(offset, shape, into.offset, into.tensor.shape, strict=True)
            end = tuple(min(o + n, to + m) for o, n, to, m in ends)
            if any(a >= b for a, b in zip(begin, end, strict=True)):
                continue
            source = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offset, strict=True))
            target = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, into.offset, strict=True))
            file = self._file(path)
            part = file.get_slice(name)[source] if source else file.get_tensor(name)
            into.tensor[target].copy_(part)
            filled += math.prod(b - a for a, b in zip(begin, end, strict=True))
        if filled != into.tensor.numel():
            raise ValueError(f"{name}: the files hold {filled} of {into.tensor.numel()} numbers")

    def _file(self, path: Path) -> safe_open:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise SafetensorError(f"{path}: {error}") from None
        return self._open[path]


def _bytes(part: Slice) -> memoryview:
    return memoryview(part.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _offsets(text: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Returns the offset of each slice of a file. Raises ValueError for a header that `write` did not make."""
    try:
        offsets = {name: tuple(entry[OFFSETS]) for name, entry in json.loads(text).items()}
        if all(type(number) is int and number >= 0 for offset in offsets.values() for number in offset):
            return offsets
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{path}: {SHARDING} of its header is damaged")
