"""A task of the Long Range Arena for training: prepared once in a folder, memory-mapped, and cut into batches."""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from linnet.config import ConfigError, digest, refuse, unwritable
from linnet.data import shards
from linnet.encoders.lra.listops import generate_listops, listops_task
from linnet.encoders.lra.pathfinder import generate_pathfinder, pathfinder_task
from linnet.encoders.lra.stage import (
    PLAN_KEYS,
    ROWS,
    Maker,
    Progress,
    Unit,
    open_shard,
    plan_of,
    read_lra_stage,
    shard_name,
    write_lra,
)
from linnet.encoders.lra.task import PADDING, SPLITS, LraDataConfig, LraRows, LraTask, Shard

# Finds what makes the rows of a configuration: a generator, or a reader of a published folder.

# By task: what it is, and the first `rows` rows of a block: (size, split, block, rows, seed) -> Shard.
Generate = Callable[[str, Any, int, int, int], Shard]
GENERATORS: dict[str, tuple[Callable[[str], LraTask], Generate]] = {
    "listops": (listops_task, generate_listops),
    "pathfinder": (partial(pathfinder_task, "pathfinder"), partial(generate_pathfinder, "pathfinder")),
    "path-x": (partial(pathfinder_task, "path-x"), partial(generate_pathfinder, "path-x")),
}


@dataclass
class Generated:
    """Rows that are a pure function of (task, size, seed, split, row)."""

    settings: dict[str, Any]
    inputs: list[dict[str, Any]] = field(default_factory=list)

    def task(self) -> LraTask:
        return GENERATORS[self.settings["task"]][0](self.settings["size"])

    def units(self) -> list[Unit]:
        counts = self.settings["samples"]
        return [
            Unit(split, block, min(ROWS, counts[split] - block * ROWS))
            for split in SPLITS
            for block in range(-(-counts[split] // ROWS))
        ]

    def shards(self, unit: Unit) -> Iterable[tuple[str, Callable[[], Shard]]]:
        generate = GENERATORS[self.settings["task"]][1]
        size, seed, rows = self.settings["size"], self.settings["seed"], unit.rows
        assert rows is not None
        yield shard_name(unit.split, unit.block), lambda: generate(size, unit.split, unit.block, rows, seed)


def find_maker(config: LraDataConfig, cache: Path | None) -> Maker:
    """Returns what makes the rows of a configuration.

    Args:
        cache: the folder where digests of large sources are remembered; None remembers nothing.

    Raises:
        ConfigError: lists all problems of the source.
    """
    if config.source is None:
        settings = {"task": config.task, "size": config.size, "seed": config.seed}
        return Generated(settings | {"samples": config.counts().model_dump()})
    from linnet.encoders.lra.folders import open_folder  # not at the top: workers that generate do without

    return open_folder(config, cache)


class LraSplit:
    """The rows of a split, in their order.

    Attributes:
        task: the task.
        labels: int64 [n]. lengths: int64 [n], of pairs [n, 2]: tokens with the end token; of images the pixels.
    """

    def __init__(self, task: LraTask, folder: Path, names: list[str], rows: int | None = None):
        self.task, self._source = task, (folder, names, rows)
        opened = [open_shard(folder / name) for name in names]
        self._shards = [shard.values for shard in opened]
        self._ends = np.cumsum([len(shard.labels) for shard in opened])
        self.labels = np.concatenate([shard.labels for shard in opened])[:rows].astype(np.int64)
        self.lengths = np.concatenate([shard.lengths for shard in opened])[:rows].astype(np.int64)
        if task.kind != "pixels":
            sizes = [shard.lengths.astype(np.int64).reshape(len(shard.labels), -1).sum(axis=1) for shard in opened]
            self._starts = [np.cumsum(size) - size for size in sizes]

    def __reduce__(self) -> tuple:
        return LraSplit, (self.task, *self._source)  # a memory map would be pickled as a copy

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, numbers: np.ndarray) -> LraRows:
        """Returns rows by their place in the split; see `LraRows`."""
        import torch  # not at the top: workers that make shards do without

        numbers = np.asarray(numbers, dtype=np.int64)
        lengths = self.lengths[numbers]
        at = np.searchsorted(self._ends, numbers, side="right")
        if self.task.kind == "pixels":
            assert self.task.grid is not None
            inputs = np.empty((len(numbers), self.task.channels, *self.task.grid), dtype=np.uint8)
            for row, (shard, number) in enumerate(zip(at, numbers, strict=True)):
                inputs[row] = self._shards[shard][number - self._ends[shard]]  # counted from the end of its shard
        else:
            inputs = np.full((*lengths.shape, int(lengths.max(initial=1))), PADDING, dtype=np.int64)
            for row, (shard, number) in enumerate(zip(at, numbers, strict=True)):
                start = self._starts[shard][number - self._ends[shard]]
                for text, length in zip(np.atleast_2d(inputs[row]), np.atleast_1d(lengths[row]), strict=True):
                    text[:length] = self._shards[shard][start : start + length]
                    start += length
        return LraRows(*map(torch.from_numpy, (inputs, lengths, self.labels[numbers])))


class LraCorpus:
    """A prepared task.

    Attributes:
        folder: where its shards lie. digest: 12 hexadecimal digits of its content and of the keys that choose rows.
        task: what a model must know.
        train, validation, test: the splits. With `selection: test`, `validation` is the test split.
        metadata: the content of `stage.json`.
    """

    def __init__(self, folder: Path, config: LraDataConfig):
        stage = read_lra_stage(folder)
        if stage is None:
            raise ConfigError([f"source: {str(folder)!r} holds no whole task; make it with linnet data lra"], "data")
        self.folder, self.metadata = folder, stage
        self.task = _task(stage["task"])
        files = {folder / file["name"]: {"size": file["bytes"], "sha256": file["sha256"]} for file in stage["shards"]}
        shards.verify_files(folder, files, _remake(folder, stage["settings"]))
        if problems := _sample_problems(config, stage):
            raise ConfigError(problems, "data")
        self.digest = digest([_plan(stage), config.samples and config.samples.model_dump(), config.selection])
        self.train, self.test = self._open("train", config), self._open("test", config)
        self.validation = self.test if config.selection == "test" else self._open("validation", config)

    def _open(self, split: str, config: LraDataConfig) -> LraSplit:
        names = [shard["name"] for shard in self.metadata["shards"] if shard["split"] == split]
        return LraSplit(self.task, self.folder, names, config.samples.of(split) if config.samples else None)

    def split(self, name: str) -> LraSplit:
        """Returns the split "train", "validation" or "test". Raises ValueError for another name."""
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is unknown; use {', '.join(SPLITS)}")
        return getattr(self, name)


def prepare_lra(config: LraDataConfig, cache_dir: str | Path, *, progress: Progress | None = None) -> LraCorpus:
    """Opens the task of a configuration; generates or reads it first if the cache does not hold it.

    Args:
        cache_dir: folder of prepared tasks; created if it does not exist. A folder of `linnet data lra` is opened where
            it lies.
        progress: as in `write_lra`.

    Raises:
        ConfigError: lists all problems of the configuration and its source, before anything is written.
    """
    if (folder := _made(config)) is not None:
        return LraCorpus(folder, config)
    cache = Path(cache_dir)
    maker = find_maker(config, cache)
    folder = cache / digest(plan_of(maker))
    if read_lra_stage(folder) is None:
        # Trainings that begin together need the same task: one makes it, and the others wait.
        write_lra(maker, folder, progress=progress, wait=float("inf"))
    return LraCorpus(folder, config)


def check_lra(config: LraDataConfig, cache_dir: str | Path) -> None:
    """Raises ConfigError with all problems of a configuration and its source; writes nothing."""
    if (folder := _made(config)) is not None:
        LraCorpus(folder, config)
        return
    problems = []
    if reason := unwritable(cache_dir):
        problems.append(f"{cache_dir}: {reason}; choose another cache folder")
    try:
        find_maker(config, None)
    except ConfigError as error:
        problems += error.problems
    refuse(problems, "data")


def lra_task(config: LraDataConfig) -> LraTask:
    """Returns what a model must know about the task of a configuration, without making or reading its rows.

    Raises:
        ConfigError: a source does not exist or does not fit.
    """
    if (folder := _made(config)) is not None:
        return _task((read_lra_stage(folder) or {})["task"])
    return find_maker(config, None).task()


def lra_content(config: LraDataConfig, cache_dir: str | Path | None = None) -> dict[str, str]:
    """Returns a digest of the content that a configuration names, wherever it lies; `source` is its key.

    Raises:
        ConfigError: a source does not exist or does not fit.
    """
    if (folder := _made(config)) is not None:
        return {"source": digest(_plan(read_lra_stage(folder) or {}))}
    maker = find_maker(config, None if cache_dir is None else Path(cache_dir))
    return {"source": digest(plan_of(maker))}


def _made(config: LraDataConfig) -> Path | None:
    """Returns the folder of a configuration if `linnet data lra` wrote it. Raises ConfigError if it does not fit."""
    if config.source is None:
        return None
    folder = Path(config.source).expanduser()
    stage = read_lra_stage(folder)
    if stage is None:
        return None
    settings = stage["settings"]
    problems = [
        f"{key}: {getattr(config, key)}, but {folder} holds {settings.get(key)}; name another folder or {key}"
        for key in ("task", "size")
        if settings.get(key) != getattr(config, key)
    ]
    if settings.get("held_out") is not None and settings["held_out"] != (config.selection == "validation"):
        fix = f"make it again with --selection {config.selection}"
        problems.append(f"selection: {config.selection}, but {folder} was made for the other one; {fix}")
    refuse(problems, "data")
    return folder


def _sample_problems(config: LraDataConfig, stage: dict[str, Any]) -> list[str]:
    if config.samples is None:
        return []
    return [
        f"samples.{split}: {wanted}, but the {split} split has {there} rows; use at most {there}"
        for split in SPLITS
        if (wanted := config.samples.of(split)) > (there := stage["rows"][split])
    ]


def _remake(folder: Path, settings: dict[str, Any]) -> str:
    """Returns the command that makes a folder again, for the end of a message."""
    task, out = settings["task"], f"--out {shlex.quote(str(folder))} --anew"
    if "samples" not in settings:
        return f"run linnet data lra {task} FOLDER {out} with the published files and the options that made it"
    rows = ",".join(str(settings["samples"][split]) for split in SPLITS)
    return f"run linnet data lra {task} --size {settings['size']} --seed {settings['seed']} --samples {rows} {out}"


def _plan(stage: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of `stage.json` that determines the content of the shards."""
    return {key: stage.get(key) for key in PLAN_KEYS}


def _task(values: dict[str, Any]) -> LraTask:
    """Returns a task from the values of `stage.json`, where tuples became lists."""
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return LraTask(**fields)
