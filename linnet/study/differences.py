"""Differences of loss between the architectures of a study and their bases, paired by seed, beside printed ones.

An ablation asks for the sign and size of a difference. Runs of one shape, length and seed read the same batches, so the
difference of each pair is free of the noise of data order. The interval is that of the mean over seeds (Student's t).
The signs of a study share the 5 %: p-values are adjusted by Holm's method. In half of all studies of 18 variants that
equal their base, some interval alone excludes 0.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from linnet.config import grouped
from linnet.laws.orders import LEVEL, holm, t_interval, t_test
from linnet.runs.files import write_atomic
from linnet.study.collect import as_csv, read_plan, read_table

if TYPE_CHECKING:
    from linnet.study.architectures import Architecture

DIFFERENCES = "differences.csv"


@dataclass(frozen=True)
class Difference:
    """Loss of an architecture minus that of its base, at one shape and length.

    Attributes:
        size: `<width>x<layers>`, with a planned inner width `<width>x<layers>/<inner>`; the planned label, as
            `<width>x<layers>x<heads>`, where an architecture has several sizes of these.
        target: tokens, or images, that each run read.
        seeds: number of pairs.
        bits: mean difference in bits per token; positive is worse than the base.
        low, high: its 95 % interval; None with fewer than two seeds.
        printed: difference of the printed losses in bits, None if one of the two is not given.
        verdict: what `p` says about the sign of the printed difference.
        p: p-value of no difference, adjusted over all differences of the study; None without an interval of a width.
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
    p: float | None = None


def differences(architectures: "Iterable[Architecture]", rows: Iterable[Mapping[str, Any]]) -> list[Difference]:
    """Returns the differences of all architectures that have a base, in their order.

    Args:
        rows: of the study's table (`linnet.study.collect.collect`), with the label of their planned `size` if the study
            has several models of one width and depth. A seed with several runs of one label has the mean of their
            losses.
    """
    rows = list(rows)
    labels: dict[tuple[str, str], set[str]] = {}  # of each architecture, by width, depth and inner width
    for row in rows:
        labels.setdefault((row["architecture"], _shape(row)), set()).add(str(row.get("size", "")))
    several = {shape for (_, shape), same in labels.items() if len(same) > 1}
    named = {architecture.name: architecture for architecture in architectures}
    losses: dict[tuple, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        if row["status"] == "done" and row.get("loss") is not None:
            # Not by budget: a variant may have other FLOPs per token than its base.
            read = row["tokens"] if "tokens" in row else row["images"]
            point = row["size"] if _shape(row) in several else _shape(row), row["seq_len"], read
            of_seeds = losses.setdefault(point, {}).setdefault(row["architecture"], {})
            of_seeds.setdefault(row["seed"], []).append(float(row["loss"]))
    results = []
    for name, architecture in named.items():
        if architecture.base is None:
            continue
        for (size, _, tokens), by_name in losses.items():
            variant, base = by_name.get(name, {}), by_name.get(architecture.base, {})
            seeds = [seed for seed in sorted(variant.keys() & base.keys()) if len(variant[seed]) == len(base[seed])]
            if not seeds:
                continue
            pairs = [(fmean(variant[seed]) - fmean(base[seed])) / math.log(2) for seed in seeds]
            results.append(_difference(architecture, named[architecture.base], size, tokens, pairs))
    known = [difference.p for difference in results if difference.p is not None]
    adjusted = iter(holm(known))
    results = [row if row.p is None else replace(row, p=next(adjusted)) for row in results]
    return [replace(row, verdict=_verdict(row)) for row in results]


def _shape(row: Mapping[str, Any]) -> str:
    """Returns the width, depth and planned inner width of a run, which sizes that differ in heads share."""
    return f"{row['d_model']}x{row['num_layers']}" + "".join(str(row.get("size", "")).partition("/")[1:])


def missing_pairs(
    bases: Mapping[str, str | None], rows: Iterable[Mapping[str, Any]], results: Iterable[Difference]
) -> list[str]:
    """Returns a sentence for each architecture with a base that lacks a difference, or seeds of it: runs diverge.

    Args:
        bases: architecture -> its base, None if it has none.
        rows: of the study's table.
        results: its differences.
    """
    statuses = grouped((row["architecture"], row["status"]) for row in rows)
    lost = {
        name: ", ".join(
            f"{counted.count(status)} of {len(counted)} runs of {name} {status}"
            for status in sorted({*counted} - {"done"})
        )
        for name, counted in statuses.items()
    }
    known, sentences = {difference.architecture for difference in results}, []
    for name, base in bases.items():
        why = "; ".join(filter(None, (lost.get(name), lost.get(str(base)))))
        if base is not None and name not in known:
            text = f"{name}: no difference from its base {base}, since no seed has both runs done at one length"
            sentences.append(f"{text} ({why})" if why else text)
        elif base is not None and why:
            what = f"{name}: the difference from its base {base}"
            sentences.append(f"{what} leaves out seeds without both losses ({why})")
    return sentences


def write_differences(folder: Path, architectures: "Iterable[Architecture]", rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes differences.csv of a study folder, where some architecture has a base; else removes an earlier one."""
    sizes = {run["run"]: run["size"] for run in read_plan(folder)}
    if results := differences(architectures, [{**row, "size": sizes[row["run"]]} for row in rows]):
        write_atomic(folder / DIFFERENCES, as_csv([asdict(difference) for difference in results]))
    else:
        (folder / DIFFERENCES).unlink(missing_ok=True)


def read_differences(folder: Path) -> list[Difference]:
    """Returns the rows of differences.csv of a study folder, [] if it has none. Raises ConfigError if it is cut off."""
    if not (folder / DIFFERENCES).is_file():
        return []
    rows = read_table(folder / DIFFERENCES, "linnet study")
    return [Difference(**{key: _read(key, value) for key, value in row.items()}) for row in rows]


def _read(key: str, value: str) -> Any:
    if key in ("architecture", "base", "size", "verdict"):
        return value
    return int(value) if key == "seeds" else float(value) if value else None


def _difference(
    variant: "Architecture", base: "Architecture", size: str, target: float, pairs: list[float]
) -> Difference:
    mean, count, low, high, p = math.fsum(pairs) / len(pairs), len(pairs), None, None, None
    if count > 1:
        low, high = t_interval(pairs)
        p = t_test(pairs)
    printed = None
    if variant.published is not None and base.published is not None:
        printed = round(variant.published - base.published, 6)
    return Difference(variant.name, base.name, size, target, count, mean, low, high, printed, "", p)


def _verdict(difference: Difference) -> str:
    if difference.low is None:
        return "cannot be told: one seed"
    if difference.p is None or difference.p >= LEVEL:
        return "cannot be told"
    if not difference.printed:
        return "worse" if difference.bits > 0 else "better"
    return "sign as printed" if difference.bits * difference.printed > 0 else "opposite sign"
