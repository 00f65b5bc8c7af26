"""Reads a study folder as the table and the training curves that `linnet.laws.fit` fits."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from linnet.config import ConfigError
from linnet.laws.fit.table import load_table
from linnet.runs import RunFolder
from linnet.runs.record import curve_rows


def load_study(
    path: str | Path,
    columns: dict[str, str] | None = None,
    *,
    exclude: Sequence[str] = (),
    best_of: bool = False,
    loss_unit: str | None = None,
    keep: Callable[[pd.DataFrame], tuple[pd.DataFrame, list[str]]] | None = None,
    point: Sequence[str] = (),
) -> tuple[pd.DataFrame, pd.DataFrame | None, list[str]]:
    """Reads a study folder: its table.csv and the training curves of its runs (metrics.jsonl).

    Args:
        path: the study folder.
        columns, exclude, best_of, loss_unit, keep, point: see `linnet.laws.fit.load_table`.

    Returns:
        The table, the curves and the notes. The curves have columns run, architecture, N, N_total, D, C, loss (training
        loss) and learning_rate, one row per record; None if no run has a curve.

    Raises:
        ConfigError: no such folder, no table.csv in it, or what `load_table` raises.
    """
    path = Path(path)
    if not (path / "table.csv").is_file():
        fix = "run `linnet study` to write it, or give a CSV" if path.is_dir() else "there is no such file or folder"
        raise ConfigError([f"{path}: no table.csv there; {fix}"], "study")
    table, notes = load_table(
        path / "table.csv", columns, exclude=exclude, best_of=best_of, loss_unit=loss_unit, keep=keep, point=point
    )
    parts, without, broken = [], 0, 0
    for row in table.to_dict("records"):
        folder = path / str(row.get("path") or f"runs/{row['run']}")
        if problem := RunFolder(folder).curve_problem():
            notes.append(f"training curve of {row['run']} left out: {problem}")
            continue
        records, bad = _records(folder / "metrics.jsonl")
        broken += bad
        if not records:
            without += 1
            continue
        same = {name: row[name] for name in ("run", "architecture", "N", "N_total")}
        parts.append(pd.DataFrame(records).assign(**same))
    if without:
        rows = "1 row" if without == 1 else f"{without} rows"
        notes.append(f"{rows} without a training curve (no metrics.jsonl in the run folder)")
    if broken:
        notes.append(f"{broken} unreadable lines of metrics.jsonl left out: not JSON, or not numbers")
    return table, pd.concat(parts, ignore_index=True) if parts else None, notes


def _records(path: Path) -> tuple[list[dict], int]:
    """Returns the points of one run's training curve with finite numbers, and the number of unreadable lines."""
    if not path.is_file():
        return [], 0
    rows, records, bad = [], [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            bad += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
    for row in curve_rows(rows):
        try:
            values = {
                "D": float(row["tokens"] if "tokens" in row else row["images"]),
                "C": float(row["flops"]),
                "loss": float(row["loss"]),
                "learning_rate": float(row.get("learning_rate", np.nan)),
            }
        except (KeyError, TypeError):
            continue
        except ValueError:
            bad += 1
            continue
        if all(np.isfinite(values[name]) and values[name] > 0 for name in ("D", "C", "loss")):
            records.append(values)
    return records, bad
