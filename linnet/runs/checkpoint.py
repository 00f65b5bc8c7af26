"""Checkpoints: safetensors and JSON, written atomically, verified by SHA-256 when read. Nothing is unpickled.

    checkpoints/step-00000100/
        model.safetensors, optimizer.safetensors, ...   one file per group of tensors
        state.json                                      step, plain values, the SHA-256 of the other files and of itself

This is format 1, which one process writes. A training on many devices writes format 2, a folder of shards for each
group (`linnet.runs.sharded`). Its last checkpoint also has one `model.safetensors`. `load` reads both formats in one
process and joins shards; no reader needs to know who wrote a checkpoint.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field
from safetensors import SafetensorError

from linnet.config import Config, ConfigError, load_json, parse
from linnet.runs.files import is_full, remove_path, save_tensors, sync_file, sync_folder, write_atomic

if TYPE_CHECKING:  # reading a run folder often needs no tensor, and importing torch takes seconds
    from torch import Tensor

Tensors = dict[str, dict[str, "Tensor"]]

_NAME = re.compile(r"step-(\d{8,})")
_WHOLE, _SHARDED = 1, 2  # formats


_Loss = Annotated[float, Field(allow_inf_nan=True)]  # as it was: losses of a diverging run have no bound


class _Sum(Config):
    sha256: str
    bytes: int = Field(ge=0)


class _Guard(Config):
    losses: list[_Loss]
    skipped: list[int]
    events: int


class _Meta(Config):
    """The values of a training among `meta`. A checkpoint may lack any of them, and have others."""

    model_config = ConfigDict(extra="allow")

    step: int = Field(0, ge=0)
    position: int = Field(0, ge=0)
    rows: int = Field(0, ge=0)
    row_step: float = Field(0, ge=0)
    rows_read: int = Field(0, ge=0)
    rows_sha256: str | None = None
    recent: list[_Loss] = []
    since_point: list[_Loss] = []
    recent_auxiliary: list[_Loss] = []
    clock: list[float] = Field([0.0] * 3, min_length=3, max_length=3)
    guard: _Guard = _Guard(losses=[], skipped=[], events=0)
    execution: dict[str, Any] = {}
    documents: int | None = None


class _State(Config):
    format: int
    step: int = Field(ge=0)
    sha256: dict[Annotated[str, Field(pattern=r"^\w+(/[\w-]+)?\.safetensors$")], _Sum]
    meta: _Meta
    layout: dict[str, int] | None = None


class CheckpointError(ConfigError):
    """A checkpoint cannot be written, or its files differ from the written ones."""

    def __init__(self, problems: list[str]):
        super().__init__(problems, "checkpoint")


def save(
    folder: Path, step: int, tensors: Tensors, meta: dict, keep: int | None = None, best: int | None = None
) -> Path:
    """Writes the checkpoint of `step` into `folder` (the run's `checkpoints`), then deletes all but the last `keep`.

    Args:
        tensors: group -> name -> tensor; a group is one safetensors file.
        meta: values that JSON holds exactly.
        best: step of an older checkpoint that stays.

    Raises:
        CheckpointError: the disk is full or fails; earlier checkpoints in `folder` are untouched.
    """
    target = place(folder, step)
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sums = _write(temporary, tensors)
        complete(temporary, target, step, sums, meta)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError([cannot_write(target, error, tensors)]) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    keep_last(folder, keep, best)
    return target


def load(path: Path, groups: list[str] | None = None) -> tuple[Tensors, dict]:
    """Reads and verifies a checkpoint: (tensors, meta). `groups` limits which groups are read and verified; None is
    all.

    Raises:
        CheckpointError: the folder, a file or a checksum differs from the written one; the message names it.
    """
    from safetensors.torch import load_file

    state = read_state(path)
    tensors = {}
    for group in dict.fromkeys(map(group_of, state["sha256"])):
        if groups is not None and group not in groups:
            continue
        files = files_of(state, group)
        for name in files:
            verify(path / name, state["sha256"][name])
        try:
            if files == [f"{group}.safetensors"]:
                tensors[group] = load_file(path / files[0])
            else:
                tensors[group] = _joined([path / name for name in files])
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError([f"{path}: {group} cannot be read ({error})"]) from None
    if "random" in tensors and state["format"] == _SHARDED:
        tensors["random"] = random_of(tensors["random"], 0)
    if groups is not None and (missing := set(groups) - set(tensors)):
        raise CheckpointError([f"{path}: has no {', '.join(sorted(missing))}"])
    return tensors, state["meta"]


def groups(path: Path) -> set[str]:
    """Returns the names of the groups of a checkpoint. Raises CheckpointError as `load`."""
    return set(map(group_of, read_state(path)["sha256"]))


def verify(file: Path, expected: Mapping) -> None:
    """Compares a file with the `bytes` and `sha256` that were recorded. Raises CheckpointError if it differs."""
    if not file.is_file():
        raise CheckpointError([f"{file}: the file is missing"])
    try:
        if (size := file.stat().st_size) != expected["bytes"]:
            raise CheckpointError([f"{file}: {size} bytes, but {expected['bytes']} were written"])
        if sha256(file) != expected["sha256"]:
            raise CheckpointError([f"{file}: the contents changed since they were written (SHA-256 differs)"])
    except OSError as error:
        raise CheckpointError([f"{file}: cannot be read ({error.strerror})"]) from None


def group_of(name: str) -> str:
    """Returns the group of tensors in a file: `model` for `model.safetensors` and `model/shard-00003.safetensors`."""
    return name.partition("/")[0].removesuffix(".safetensors")


def files_of(state: Mapping, group: str) -> list[str]:
    """Returns the names of the files that contain a group: the one with whole tensors if there is one, or all shards.

    Args:
        state: as `read_state` returns it.
    """
    if (whole := f"{group}.safetensors") in state["sha256"]:
        return [whole]
    return [name for name in state["sha256"] if group_of(name) == group]


def random_of(named: Mapping[str, "Tensor"], rank: int) -> dict[str, "Tensor"]:
    """Returns the random states of a rank, by device.

    Args:
        named: `<rank>.<device>` -> state, as many ranks save them, or `<device>` -> state, as one process does.
        rank: with fewer ranks in `named`, counting starts again at rank 0.
    """
    by_rank: dict[int, dict[str, Tensor]] = {}
    for name, state in named.items():
        number, _, device = name.rpartition(".")
        by_rank.setdefault(int(number or 0), {})[device] = state
    return by_rank[rank % len(by_rank)] if by_rank else {}


def listed(folder: Path) -> list[Path]:
    """Returns the checkpoints in `folder`, oldest first, without unfinished and damaged ones.

    Raises:
        CheckpointError: `folder` is a file.
    """
    if not folder.is_dir():
        if folder.exists():
            raise CheckpointError([f"{folder}: is a file, not a folder of checkpoints; move it away"])
        return []
    checkpoints = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=step_of)


def place(folder: Path, step: int) -> Path:
    """Returns the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name).group(1))


def content(folder: Path) -> str | None:
    """Returns the stored SHA-256 of the model's weights in the newest checkpoint; None if there is no checkpoint.

    The last checkpoint of a run on many devices has the weights as one file, so the sum does not depend on how many.
    Until it is written, the sum is one of the sums of the shards.
    """
    for path in reversed(listed(folder)):
        with contextlib.suppress(CheckpointError):
            state = read_state(path)
            if sums := [state["sha256"][name]["sha256"] for name in files_of(state, "model")]:
                return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()
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
    return read_state(path)["meta"]


def layout(path: Path) -> dict[str, int] | None:
    """Returns the degrees of parallelism (`world`, `dp_shard`, `tp`, ...) of a checkpoint; None for one process."""
    return read_state(path).get("layout")


def clean(folder: Path) -> None:
    """Removes what killed processes left of checkpoints. Call it only while holding the run's lock."""
    if folder.is_dir():
        for path in folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)
        for path in folder.glob("step-*/.*.tmp"):
            remove_path(path)


def set_aside_after(folder: Path, good: Path | None) -> list[Path]:
    """Renames the checkpoints newer than `good` to `*.bad`, so that they are neither counted nor read again."""
    moved = []
    for path in listed(folder):
        if good is None or step_of(path) > step_of(good):
            bad = path.with_name(path.name + ".bad")
            remove(bad)
            moved.append(path.rename(bad))
    return moved


def remove(path: Path) -> None:
    """Removes a checkpoint, or the file or link that is in its place.

    It is renamed first: after a kill, a folder that lacks some of its files must not have the name of a checkpoint.
    `clean` removes the rest.
    """
    if path.is_dir() and not path.is_symlink():
        removed = path.with_name(f".{path.name}.removed.tmp")
        shutil.rmtree(removed, ignore_errors=True)
        with contextlib.suppress(OSError):
            path = path.rename(removed)
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def complete(
    temporary: Path, target: Path, step: int, sums: dict[str, dict], meta: dict, layout: dict[str, int] | None = None
) -> None:
    """Writes state.json into a folder that has all other files, waits for the disk, and renames the folder to `target`.

    Args:
        sums: `sha256` and `bytes` of each file, by its path in the folder.
        layout: degrees of parallelism of shards; None for whole tensors.
    """
    state: dict = {"format": _WHOLE if layout is None else _SHARDED, "step": step, "sha256": sums, "meta": meta}
    if layout is not None:
        state["layout"] = layout
    file = temporary / "state.json"
    file.write_text(_state_text(state), encoding="utf-8")
    sync_file(file)
    sync_folder(temporary)
    remove(target)  # it exists only after a fallback to an older checkpoint
    os.rename(temporary, target)
    sync_folder(target.parent)


def add_whole(path: Path, group: str, tensors: Mapping[str, "Tensor"]) -> None:
    """Adds a file with whole tensors of a group to a checkpoint of shards. It then has both, and `load` takes the file.

    Raises:
        OSError, SafetensorError: it cannot be written; the checkpoint is as before.
    """
    file = path / f"{group}.safetensors"
    save_tensors(file, tensors)
    total = {"sha256": sha256(file), "bytes": file.stat().st_size}
    state = read_state(path)
    state["sha256"][file.name] = total
    write_atomic(path / "state.json", _state_text(state))


def keep_last(folder: Path, keep: int | None, best: int | None = None) -> None:
    """Deletes all but the last `keep` checkpoints and that of the step `best`; `keep` None keeps all."""
    if keep is not None:
        for old in listed(folder)[:-keep]:
            if step_of(old) != best:
                remove(old)


def _write(temporary: Path, tensors: Tensors) -> dict[str, dict]:
    """Writes one file for each group and returns their sums."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    sums = {}
    for group, named in tensors.items():
        file = temporary / f"{group}.safetensors"
        save_tensors(file, named)
        sums[file.name] = {"sha256": sha256(file), "bytes": file.stat().st_size}
    return sums


def _joined(files: list[Path]) -> dict[str, "Tensor"]:
    from linnet.runs.slices import Reader

    reader = Reader(files)
    return {name: reader.whole(name) for name in reader.shapes}


def read_state(path: Path) -> dict:
    """Returns the content of state.json: `format`, `step`, `meta`, `layout` of format 2, and `sha256`, which has
    `sha256` and `bytes` of each file. Raises CheckpointError if it is damaged."""
    file = path / "state.json"
    try:
        state = load_json(file)
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
    if "format" in state and state["format"] not in (_WHOLE, _SHARDED):
        message = f"{file}: format {state['format']}, but this version of Linnet reads {_WHOLE} and {_SHARDED}"
        raise CheckpointError([f"{message}; use a newer release"])
    try:
        parse(_State, state)
    except ConfigError as error:  # a file with its own sum that no training wrote
        raise CheckpointError([f"{file}: is damaged: {error.problems[0]}"]) from None
    return state


def _state_text(state: dict) -> str:
    return json.dumps(state | {"self": _own_sum(state)}, indent=1, allow_nan=False)


def _own_sum(state: dict) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cannot_write(target: Path, error: Exception, tensors: Tensors | None = None) -> str:
    """Returns the message about a checkpoint that cannot be written, with the one that is left and the size in MB."""
    previous = [path for path in listed(target.parent) if path != target]
    kept = f"the checkpoint before it is intact: {previous[-1]}" if previous else "there is no earlier checkpoint"
    if not is_full(error):
        return f"{target}: cannot be written ({error}); {kept}"
    sizes = [t.numel() * t.element_size() for named in (tensors or {}).values() for t in named.values()]
    size = f" ({sum(sizes) / 1e6:.1f} MB to write)" if tensors else ""
    return f"{target}: the disk is full{size}; {kept}. Free some space and run the same command again to continue"
