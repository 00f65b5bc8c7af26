"""Checkpoints: safetensors and JSON, written atomically, verified by SHA-256 when read. Nothing is unpickled.

    checkpoints/step-00000100/
        model.safetensors, optimizer.safetensors, ...   one file per group of tensors
        state.json                                      step, plain values, the SHA-256 of the other files and of itself

A folder of that name is always complete: it is written under another name, synced to the disk and then renamed. Loading
detects later damage (a bad disk, a bad copy), names the damaged file, and renames the checkpoint to
`step-00000100.bad`.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from linnet.config import ConfigError
from linnet.runs.files import FULL, sync_file, sync_folder

if TYPE_CHECKING:  # reading a run folder often needs no tensor, and importing torch takes seconds
    from torch import Tensor

Tensors = dict[str, dict[str, "Tensor"]]

_NAME = re.compile(r"step-(\d{8,})")
_FORMAT = 1


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, or its files differ from the written ones."""

    def __init__(self, problems: list[str]):
        super().__init__(problems, "checkpoint")


def save(folder: Path, step: int, tensors: Tensors, meta: dict, keep: int | None = None) -> Path:
    """Writes the checkpoint of `step` into `folder` (the run's `checkpoints`), then deletes all but the last `keep`.

    Args:
        tensors: group -> name -> tensor; a group is one safetensors file.
        meta: values that JSON holds exactly.

    Raises:
        CheckpointError: the disk is full or fails; earlier checkpoints in `folder` are untouched.
    """
    target = folder / f"step-{step:08d}"
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(temporary, step, tensors, meta)
        _remove(target)  # it exists only after a fallback to an older checkpoint
        os.rename(temporary, target)
        sync_folder(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError([_cannot_write(target, tensors, error)]) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if keep is not None:
        for old in listed(folder)[:-keep]:
            _remove(old)
    return target


def load(path: Path, groups: list[str] | None = None) -> tuple[Tensors, dict]:
    """Reads and verifies a checkpoint: (tensors, meta). `groups` limits which groups are read and verified; None is
    all.

    Raises:
        CheckpointError: the folder, a file or a checksum differs from the written one; the message names it.
    """
    from safetensors.torch import load_file

    state = _read_state(path)
    tensors = {}
    for name, expected in state["sha256"].items():
        group = name.removesuffix(".safetensors")
        if groups is not None and group not in groups:
            continue
        file = path / name
        if not file.is_file():
            raise CheckpointError([f"{file}: the file is missing"])
        try:
            if (size := file.stat().st_size) != expected["bytes"]:
                raise CheckpointError([f"{file}: {size} bytes, but {expected['bytes']} were written"])
            if sha256(file) != expected["sha256"]:
                raise CheckpointError([f"{file}: the contents changed since they were written (SHA-256 differs)"])
            tensors[group] = load_file(file)
        except OSError as error:
            raise CheckpointError([f"{file}: cannot be read ({error.strerror})"]) from None
    if groups is not None and (missing := set(groups) - set(tensors)):
        raise CheckpointError([f"{path}: has no {', '.join(sorted(missing))}"])
    return tensors, state["meta"]


def listed(folder: Path) -> list[Path]:
    """Returns the checkpoints in `folder`, oldest first, without unfinished and damaged ones.

    Raises:
        CheckpointError: `folder` is a file.
    """
    if not folder.is_dir():
        if folder.exists():
            raise CheckpointError([f"{folder}: is a file, not a folder of checkpoints; move it away"])
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name).group(1))


def content(folder: Path) -> str | None:
    """Returns the stored SHA-256 of the model's weights in the newest checkpoint; None if there is no checkpoint."""
    for path in reversed(listed(folder)):
        try:
            return _read_state(path)["sha256"]["model.safetensors"]["sha256"]
        except (CheckpointError, KeyError):
            continue
    return None


def latest_good(
    folder: Path, refuse: Callable[[dict], str | None] = lambda meta: None
) -> tuple[Path | None, Tensors, dict, list[str]]:
    """Returns the newest checkpoint that verifies: (path, tensors, meta, problems); path is None if none verifies.

    Args:
        refuse: why a checkpoint with these plain values should not be used, or None. If all that verify are refused,
            the newest of them is returned.

    `problems` names each newer checkpoint that does not verify or is refused, and why.
    """
    problems: list[str] = []
    for path in reversed(listed(folder)):
        try:
            if reason := refuse(read_meta(path)):
                problems.append(f"{path.name}: {reason}")
                continue
            return path, *load(path), problems
        except CheckpointError as error:
            problems.extend(error.problems)
    for path in reversed(listed(folder)):
        with contextlib.suppress(CheckpointError):
            return path, *load(path), problems
    return None, {}, {}, problems


def read_meta(path: Path) -> dict:
    """Returns the plain values of a checkpoint without reading its tensors. Raises CheckpointError as `load` does."""
    return _read_state(path)["meta"]


def clean(folder: Path) -> None:
    """Removes unfinished checkpoints of killed processes. Call it only while holding the run's lock."""
    if folder.is_dir():
        for path in folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)


def set_aside_after(folder: Path, good: Path | None) -> list[Path]:
    """Renames the checkpoints newer than `good` to `*.bad`, so that they are neither counted nor read again."""
    moved = []
    for path in listed(folder):
        if good is None or step_of(path) > step_of(good):
            bad = path.with_name(path.name + ".bad")
            _remove(bad)
            moved.append(path.rename(bad))
    return moved


def _remove(path: Path) -> None:
    """Removes a checkpoint, or the file or link that is in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write(temporary: Path, step: int, tensors: Tensors, meta: dict) -> None:
    from safetensors.torch import save_file

    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    sums = {}
    for group, named in tensors.items():
        file = temporary / f"{group}.safetensors"
        save_file({name: tensor.detach().contiguous() for name, tensor in named.items()}, file)
        sync_file(file)
        sums[file.name] = {"sha256": sha256(file), "bytes": file.stat().st_size}
    state = {"format": _FORMAT, "step": step, "sha256": sums, "meta": meta}
    state["self"] = _own_sum(state)
    file = temporary / "state.json"
    file.write_text(json.dumps(state, indent=1, allow_nan=False), encoding="utf-8")
    sync_file(file)
    sync_folder(temporary)


def _read_state(path: Path) -> dict:
    file = path / "state.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        expected = state.pop("self")
    except FileNotFoundError:
        raise CheckpointError([f"{file}: the file is missing"]) from None
    except NotADirectoryError:
        raise CheckpointError([f"{path}: is a file, but a checkpoint is a folder"]) from None
    except OSError as error:
        raise CheckpointError([f"{file}: cannot be read ({error.strerror})"]) from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CheckpointError([f"{file}: is damaged: its JSON cannot be read"]) from None
    if _own_sum(state) != expected:
        raise CheckpointError([f"{file}: the contents changed since they were written (SHA-256 differs)"])
    if state["format"] != _FORMAT:
        raise CheckpointError([f"{file}: format {state['format']}, but this version of Linnet reads {_FORMAT}"])
    return state


def _own_sum(state: dict) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cannot_write(target: Path, tensors: Tensors, error: Exception) -> str:
    previous = [path for path in listed(target.parent) if path != target]
    kept = f"the checkpoint before it is intact: {previous[-1]}" if previous else "there is no earlier checkpoint"
    if getattr(error, "errno", None) in FULL or re.search(r"os error (28|27|122)\b", str(error)):
        size = sum(t.numel() * t.element_size() for named in tensors.values() for t in named.values())
        return (
            f"{target}: the disk is full ({size / 1e6:.1f} MB to write); {kept}. "
            "Free some space and run the same command again to continue"
        )
    return f"{target}: cannot be written ({error}); {kept}"
