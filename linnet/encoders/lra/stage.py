"""Writes a task as a folder of shards whose bytes depend only on the settings and the sources.

    OUT/train-00000.safetensors   1,000 rows: values, lengths, labels, hashes (`Shard`); written whole by rename
    OUT/stage.json                settings, digests of the sources, the task, shards and counts; written last
    OUT/parts/plan.json           while the folder is written: what it will hold

A kill costs at most the shards that were being written, and the same command resumes. Workers change no byte.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors.numpy import save

from linnet.config import ConfigError, digest, load_json, unwritable
from linnet.data.parts import WAIT, Part, clear_stage, locked, remove_halves, run_parts, whole_file, write_json
from linnet.data.sources import (
    PLAN,
    STAGE,
    changed_settings,
    fingerprint,
    may_be_left,
    of_version,
    other_version,
    read_plan,
)
from linnet.encoders.lra.task import SPLITS, LraTask, Shard, SplitName

FORMAT = 1  # increase it when the same settings give other bytes
KIND = "lra"
ROWS = 1000  # per shard
SUFFIX = ".safetensors"

PLAN_KEYS = ("format", "stage", "settings", "settings_digest", "inputs")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Unit:
    """Work for one worker: a shard that is generated (`rows` of them), or all shards of a split that is read."""

    split: SplitName
    block: int
    rows: int | None = None


class Maker(Protocol):
    """What a task brings: a picklable object.

    Attributes:
        settings: all that the shards depend on besides the content of the sources; plain values.
        inputs: names and digests of the sources.
    """

    settings: dict[str, Any]
    inputs: list[dict[str, Any]]

    def task(self) -> LraTask: ...

    def units(self) -> list[Unit]: ...

    def shards(self, unit: Unit) -> Iterable[tuple[str, Callable[[], Shard]]]:
        """Yields the name of each shard of a unit, and a function that makes it if the shard does not exist yet."""
        ...


def shard_name(split: str, block: int) -> str:
    return f"{split}-{block:05d}{SUFFIX}"


def plan_of(maker: Maker) -> dict[str, Any]:
    """Returns what identifies a folder of shards; `stage.json` starts with it."""
    return {
        "format": FORMAT,
        "stage": KIND,
        "settings": maker.settings,
        "settings_digest": digest(maker.settings),
        "inputs": maker.inputs,
    }


def write_lra(
    maker: Maker,
    out: str | Path,
    *,
    workers: int = 1,
    anew: bool = False,
    progress: Progress | None = None,
    wait: float = WAIT,
) -> dict[str, Any]:
    """Writes the shards of a task, or those that are missing. Returns the content of `stage.json`.

    Args:
        workers: processes; the result does not depend on them.
        anew: replace what `out` holds if it has other settings or sources, or was finished.
        progress: called with the name of the phase, the rows done, and all rows.
        wait: seconds to wait for another process that writes `out`.

    Raises:
        ConfigError: `out` cannot be written or holds something else; another process writes it; a worker died; or
            rows of the task are equal (of reduced images more than one in 1,000).
    """
    out = Path(out)
    if reason := unwritable(out):
        raise ConfigError([f"--out {out}: {reason}; name another folder"], KIND)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, wait):
        _check_content(out)
        plan = plan_of(maker)
        if anew and (_held(out) != of_version(plan) or (out / STAGE).exists()):
            clear_stage(out, [path for split in SPLITS for path in out.glob(f"{split}-*{SUFFIX}")], out / STAGE)
        _compare(out, plan)
        if (out / STAGE).is_file():
            return read_lra_stage(out) or {}
        remove_halves(out)
        if read_plan(out) is None:
            (out / PLAN).parent.mkdir(exist_ok=True)
            write_json(out / PLAN, of_version(plan))
        _write_units(maker, out, workers, progress)
        return _finish(maker, out, plan)


def read_lra_stage(folder: Path) -> dict[str, Any] | None:
    """Returns the content of `stage.json` if a folder holds a whole task, else None."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        values = load_json(folder / STAGE)
        if values.get("stage") == KIND:
            return values
    return None


def _write_units(maker: Maker, out: Path, workers: int, progress: Progress | None) -> None:
    units = maker.units()
    name = f"making {maker.settings['task']}"
    total, done = sum(unit.rows or 1 for unit in units), 0
    rest = []
    for number, unit in enumerate(units):
        if unit.rows is not None and (out / shard_name(unit.split, unit.block)).is_file():
            done += unit.rows
        else:
            rest.append(Part(number, ()))
    if progress:
        progress(name, done, total)
    for part, _ in run_parts(_Writes(maker, out, units), rest, workers=workers):
        done += units[part.number].rows or 1
        if progress:
            progress(name, done, total)


@dataclass(frozen=True)
class _Writes:
    maker: Maker
    out: Path
    units: list[Unit]

    def __call__(self, part: Part) -> None:
        for name, make in self.maker.shards(self.units[part.number]):
            path = self.out / name
            if not path.exists():
                with whole_file(path) as file:
                    file.write(save(make()._asdict()))


def _finish(maker: Maker, out: Path, plan: dict[str, Any]) -> dict[str, Any]:
    shards: list[dict[str, Any]] = []
    for split in SPLITS:
        for path in sorted(out.glob(f"{split}-*{SUFFIX}")):
            rows = len(open_shard(path).labels)
            entry = {"name": path.name, "split": split, "rows": rows, "bytes": path.stat().st_size}
            shards.append(entry | {"sha256": fingerprint(path)})
    empty = {unit.split for unit in maker.units()} - {shard["split"] for shard in shards}
    if empty:
        lines = [f"source: the {split} split has no rows; give it some" for split in SPLITS if split in empty]
        raise ConfigError(lines, KIND)
    _check_distinct(maker, out, shards)
    task = maker.task()
    labels = {}
    for split in SPLITS:
        counts = np.zeros(task.classes, dtype=np.int64)
        for shard in shards:
            if shard["split"] == split:
                counts += np.bincount(open_shard(out / shard["name"]).labels, minlength=task.classes)
        labels[split] = counts.tolist()
    values = {**plan, "task": asdict(task), "shards": shards, "labels": labels}
    values["rows"] = {split: sum(counts) for split, counts in labels.items()}
    write_json(out / STAGE, values)
    shutil.rmtree(out / "parts", ignore_errors=True)
    return values


def _check_distinct(maker: Maker, out: Path, shards: list[dict[str, Any]]) -> None:
    """Raises ConfigError if generated rows are equal.

    Released sets may hold copies, and of 10,000 reduced images (16 x 16 pixels) a few are equal by chance, also of two
    splits.
    """
    if maker.inputs:
        return
    hashes = np.concatenate([open_shard(out / shard["name"]).hashes for shard in shards])
    copies = len(hashes) - len(np.unique(hashes))
    small = maker.settings["size"] == "reduced" and maker.task().kind == "pixels"
    if copies > (len(hashes) // 1000 if small else 0):
        seed = maker.settings["seed"]
        raise ConfigError([f"seed: {seed} draws {copies} rows twice; use another seed, with --anew"], KIND)


def open_shard(path: Path) -> Shard:
    """Returns a shard as arrays in a memory map of its file. Raises ValueError if the file is damaged."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    size = int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8 : 8 + size].tobytes())
    types = {"U8": np.uint8, "U16": np.uint16, "I32": np.int32, "U64": np.uint64}
    arrays = {}
    for name in Shard._fields:
        start, end = (8 + size + offset for offset in header[name]["data_offsets"])
        arrays[name] = data[start:end].view(types[header[name]["dtype"]]).reshape(header[name]["shape"])
    return Shard(**arrays)


def _check_content(out: Path) -> None:
    ours = read_lra_stage(out) is not None or read_plan(out) is not None
    foreign = [] if ours else [path.name for path in out.iterdir() if not may_be_left(path)]
    if foreign:
        raise ConfigError([f"--out {out}: is not empty ({min(foreign)}); name another folder"], KIND)


def _held(out: Path) -> dict[str, Any] | None:
    """Returns the plan of what a folder holds, finished or not."""
    if (stage := read_lra_stage(out)) is not None:
        return {key: stage.get(key) for key in PLAN_KEYS}
    return read_plan(out)


def _compare(out: Path, plan: dict[str, Any]) -> None:
    """Raises ConfigError if a folder holds other settings or sources."""
    held = _held(out)
    if held is None:
        return
    if {key: held.get(key) for key in PLAN_KEYS} == plan:
        if not (out / STAGE).is_file() and (reason := other_version(held)):
            fix = "finish with that version, or delete the folder (linnet data lra --anew does) to begin again"
            raise ConfigError([f"{out}: {reason}; {fix}"], KIND)
        return
    lines = changed_settings(held.get("settings") or {}, plan["settings"])
    lines += [] if held.get("inputs") == plan["inputs"] else ["source: its content was another"]
    lines = lines or ["the folder was written by another version of Linnet"]
    raise ConfigError([f"{line}; name another --out than {out}, or give --anew to replace it" for line in lines], KIND)
