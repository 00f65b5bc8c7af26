"""Finds what makes the rows of a configuration: a generator, or a reader of a published folder."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linnet.encoders.lra.listops import generate_listops, listops_task
from linnet.encoders.lra.pathfinder import generate_path_x, generate_pathfinder, path_x_task, pathfinder_task
from linnet.encoders.lra.stage import ROWS, Maker, Unit, shard_name
from linnet.encoders.lra.task import SPLITS, LraDataConfig, LraTask, Shard

# By task: what it is, and the first `rows` rows of a block: (size, split, block, rows, seed) -> Shard.
Generate = Callable[[str, Any, int, int, int], Shard]
GENERATORS: dict[str, tuple[Callable[[str], LraTask], Generate]] = {
    "listops": (listops_task, generate_listops),
    "pathfinder": (pathfinder_task, generate_pathfinder),
    "path-x": (path_x_task, generate_path_x),
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
