"""Differences of loss between the architectures of a study and their bases, paired by seed, beside printed ones.

An ablation asks for the sign and size of a difference. Runs of one shape, length and seed read the same batches, so the
difference of each pair is free of the noise of data order. The interval is that of the mean over seeds (Student's t).
"""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linnet.laws.orders import side, t_interval
from linnet.runs.files import write_atomic
from linnet.study.collect import as_csv

if TYPE_CHECKING:
    from linnet.study.architectures import Architecture

DIFFERENCES = "differences.csv"


@dataclass(frozen=True)
class Difference:
    """Loss of an architecture minus that of its base, at one shape and length.

    Attributes:
        size: `<width>x<layers>`.
        target: tokens per run, or the budget in FLOPs.
        seeds: number of pairs.
        bits: mean difference in bits per token; positive is worse than the base.
        low, high: its 95 % interval; None with fewer than two seeds.
        printed: difference of the printed losses in bits, None if one of the two is not given.
        verdict: what the interval says about the sign of the printed difference.
    """

    architecture: str
    base: str
    size: str
    target: float
    seeds: int
    bits: float
    low: float | None
    high: float | None
    printed: float | None
    verdict: str


def differences(architectures: "Iterable[Architecture]", rows: Iterable[Mapping[str, Any]]) -> list[Difference]:
    """Returns the differences of all architectures that have a base, in their order.

    Args:
        rows: of the study's table (`linnet.study.collect.collect`).
    """
    named = {one.name: one for one in architectures}
    losses: dict[tuple, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row["status"] == "done" and row.get("loss") is not None:
            # Not by budget: a variant may have other FLOPs per token than its base.
            read = row["tokens"] if "tokens" in row else row["images"]
            point = f"{row['d_model']}x{row['num_layers']}", row["seq_len"], read
            losses.setdefault(point, {}).setdefault(row["architecture"], {})[row["seed"]] = float(row["loss"])
    found = []
    for name, one in named.items():
        if one.base is None:
            continue
        for (size, _, tokens), own in losses.items():
            seeds = sorted(own.get(name, {}).keys() & own.get(one.base, {}).keys())
            if not seeds:
                continue
            pairs = [(own[name][seed] - own[one.base][seed]) / math.log(2) for seed in seeds]
            found.append(_difference(one, named[one.base], size, tokens, pairs))
    return found


def write_differences(folder: Path, architectures: "Iterable[Architecture]", rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes differences.csv of a study folder, where some architecture has a base."""
    if found := differences(architectures, rows):
        write_atomic(folder / DIFFERENCES, as_csv([asdict(one) for one in found]))


def read_differences(folder: Path) -> list[Difference]:
    """Returns the rows of differences.csv of a study folder, [] if it has none."""
    if not (folder / DIFFERENCES).is_file():
        return []
    with (folder / DIFFERENCES).open(newline="", encoding="utf-8") as file:
        return [Difference(**{key: _read(key, value) for key, value in row.items()}) for row in csv.DictReader(file)]


def _read(key: str, value: str) -> Any:
    if key in ("architecture", "base", "size", "verdict"):
        return value
    return int(value) if key == "seeds" else float(value) if value else None


def _difference(one: "Architecture", base: "Architecture", size: str, target: float, pairs: list[float]) -> Difference:
    mean, count, low, high = math.fsum(pairs) / len(pairs), len(pairs), None, None
    if count > 1:
        low, high = t_interval(pairs)
    printed = None
    if one.published is not None and base.published is not None:
        printed = round(one.published - base.published, 6)
    told = _verdict(low, high, printed)
    return Difference(one.name, base.name, size, target, count, mean, low, high, printed, told)


def _verdict(low: float | None, high: float | None, printed: float | None) -> str:
    if low is None or high is None:
        return "cannot be told: one seed"
    worse = side(low, high)
    if not worse:
        return "cannot be told"
    if not printed:
        return "worse" if worse > 0 else "better"
    return "sign as printed" if worse * printed > 0 else "opposite sign"
