"""What the tasks of the Long Range Arena have in common: their names, the form of their rows, and the configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
from pydantic import Field, model_validator

from linnet.config import Config

if TYPE_CHECKING:
    from torch import Tensor

PADDING, END, UNKNOWN = 0, 1, 2
SYMBOLS = 3  # the id of the first symbol of a vocabulary

TaskName = Literal["listops", "text", "retrieval", "image", "image-as-published", "pathfinder", "path-x"]
SplitName = Literal["train", "validation", "test"]
NAMES: tuple[TaskName, ...] = get_args(TaskName)
TASKS = "the Long Range Arena", NAMES
SPLITS: tuple[SplitName, ...] = get_args(SplitName)
GENERATED = ("listops", "pathfinder", "path-x")
REDUCED = ("listops", "pathfinder")
COUNTS: dict[tuple[str, str], tuple[int, int, int]] = {
    ("listops", "full"): (96_000, 2_000, 2_000),
    ("listops", "reduced"): (9_600, 1_000, 1_000),
    ("pathfinder", "full"): (160_000, 20_000, 20_000),
    ("pathfinder", "reduced"): (8_000, 1_000, 1_000),
    ("path-x", "full"): (160_000, 20_000, 20_000),
}
"""Rows of train, validation and test of the generated tasks."""


@dataclass(frozen=True)
class LraTask:
    """What a model must know about a task.

    Attributes:
        name: the name in configurations.
        kind: "tokens": one text; "pairs": two texts; "pixels": an image.
        classes: number of labels.
        max_length: most tokens of a text, its end included; or the pixels of an image.
        num_tokens: ids with padding 0, end 1 and unknown 2; 0 for pixels.
        symbols: what the ids from 3 on stand for; empty for pixels.
        grid: height and width of an image; None for texts.
        channels: channels of an image; 0 for texts.
        mean, std: per channel, of pixels from 0 to 1: a model gets (x / 255 - mean) / std.
        augment: "crop_flip" if training images are augmented (`augment_lra`).
    """

    name: TaskName
    kind: Literal["tokens", "pairs", "pixels"]
    classes: int
    max_length: int
    num_tokens: int = 0
    symbols: tuple[str, ...] = ()
    grid: tuple[int, int] | None = None
    channels: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Literal["none", "crop_flip"] = "none"


class LraRows(NamedTuple):
    """A batch of labelled sequences, b rows in each tensor.

    Attributes:
        inputs: int64 [b, L], filled up with padding; of pairs int64 [b, 2, L]; of images uint8 [b, C, H, W].
        lengths: int64 [b], of pairs [b, 2]: tokens with the end token, or pixels.
        labels: int64 [b].
    """

    inputs: "Tensor"
    lengths: "Tensor"
    labels: "Tensor"


class Shard(NamedTuple):
    """Rows of a split as they are stored.

    Attributes:
        values: tokens one after another, uint8 or uint16 [sum of lengths], both texts of a pair after each other; or
            pixels, uint8 [n, C, H, W].
        lengths: int32 [n] or [n, 2]; of images the pixels.
        labels: uint8 [n].
        hashes: uint64 [n], of the content: equal rows have equal hashes.
    """

    values: np.ndarray
    lengths: np.ndarray
    labels: np.ndarray
    hashes: np.ndarray


class SampleCounts(Config):
    """Rows of each split."""

    train: int = Field(ge=1, le=100_000_000, description="Training rows.")
    validation: int = Field(ge=1, le=100_000_000, description="Rows that choose the best epoch.")
    test: int = Field(ge=1, le=100_000_000, description="Rows that are scored.")

    def of(self, split: str) -> int:
        return getattr(self, split)


class LraDataConfig(Config):
    """A task of the Long Range Arena (Tay et al. 2020, arXiv:2011.04006) and where its data come from.

    Attributes:
        task: listops, text, retrieval, image (grey), image-as-published (colour, augmented), pathfinder or path-x.
        source: a folder that `linnet data lra` wrote, or one of the published set; None generates listops, pathfinder
            and path-x.
        size: `full`, as published; `reduced`: listops with 50 to 150 symbols, pathfinder on 16 x 16 pixels.
        samples: rows of each split: how many are generated, or the first of a folder; None takes the published counts,
            or all of the folder.
        seed: seed of generated data.
        selection: the split that chooses the best epoch. `test` is how published scores of Text were selected: then
            `validation` is the test split, and nothing is held out of train.
    """

    task: TaskName
    source: str | None = None
    size: Literal["full", "reduced"] = "full"
    samples: SampleCounts | None = None
    seed: int = Field(0, ge=0)
    selection: Literal["validation", "test"] = "validation"

    @model_validator(mode="after")
    def _fits(self) -> "LraDataConfig":
        if self.source is None and self.task not in GENERATED:
            generated = ", ".join(GENERATED)
            raise ValueError(f"source: {self.task} is not generated ({generated} are); name a folder of its files")
        if self.size == "reduced" and self.task not in REDUCED:
            raise ValueError(f"size: {self.task} has no reduced form; use full, or {' or '.join(REDUCED)}")
        return self

    def counts(self) -> SampleCounts:
        """Returns the rows that are generated of each split."""
        train, validation, test = COUNTS[self.task, self.size]
        return self.samples or SampleCounts(train=train, validation=validation, test=test)


def join_rows(rows: Sequence[np.ndarray], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of tokens one after another, and their lengths int32 [n]."""
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    return (np.concatenate(rows) if rows else np.empty(0)).astype(dtype), lengths
