"""Reads tables of runs: a CSV with known or named columns, or a study folder with its training curves.

All problems of a file are reported together with their line numbers, because one bad row in a table can make a fitted
law wrong without any visible sign.
"""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd

from linnet.config import ConfigError, nearest
from linnet.runs import RunFolder
from linnet.runs.record import curve_rows

ALIASES = {
    "N": ("params_non_embedding", "N", "params", "parameters", "n_params", "model_size"),
    "N_total": ("params_total", "N_total"),
    "D": ("tokens", "D", "training_tokens", "train_tokens"),
    "C": ("flops", "C", "training_flops", "training_flop", "train_flops", "compute"),
    "loss": ("loss", "validation_loss", "val_loss", "final_loss"),
    "architecture": ("architecture", "arch", "model"),
    "run": ("run", "run_id", "name"),
    "budget": ("budget",),
    "status": ("status",),
    "flops_paper": ("flops_paper",),
    "flops_causal": ("flops_causal",),
    "attention_share": ("attention_share",),
    "state_fixed": ("state_fixed",),
    "state_dynamic": ("state_dynamic",),
    "seq_len": ("seq_len", "context_length"),
    "batch_tokens": ("batch_tokens",),
    "unique_tokens": ("unique_tokens",),
    "seed": ("seed",),
}
"""Canonical name -> column names that are recognised, in any case and spacing."""

NUMBERS = ("N", "N_total", "D", "C", "loss", "budget")
FLOPS = ("exact", "paper", "causal", "6nd")
"""Ways of counting C; see `linnet.models.costs`."""
CONVENTIONS = {
    "exact": "as in the table",
    "paper": "as paper 000 counts it",
    "causal": "without the pairs that attention's mask hides",
    "6nd": "as 6 N D",
}
"""The same in words."""
COUNTED = {"paper": "flops_paper", "causal": "flops_causal"}
"""Ways of counting C that have a column of their own."""
SHOWN = 30
"""Largest number of problems of one file that are listed. A count stands for the others."""


def parse_columns(assignments: list[str]) -> dict[str, str]:
    """Parses `N=Model Size,C=Training FLOP` (one or several strings) to {"N": "Model Size", ...}.

    Raises:
        ConfigError: a part is not NAME=COLUMN, or its NAME is unknown or given twice.
    """
    found, problems = {}, []
    for part in (part for assignment in assignments for part in assignment.split(",") if part.strip()):
        name, equals, column = part.partition("=")
        name, column = name.strip(), column.strip()
        if not equals or not column:
            problems.append(f"--columns {part!r}: not NAME=COLUMN; write for example loss=final_loss")
        elif name not in ALIASES:
            problems.append(f"--columns {part!r}: unknown name {name!r}; {nearest(name, ALIASES)}")
        elif name in found:
            problems.append(f"--columns {part!r}: {name} is already set to {found[name]!r}; remove one")
        else:
            found[name] = column
    if problems:
        raise ConfigError(problems, "command line")
    return found


def load_table(path: str | Path, columns: dict[str, str] | None = None) -> tuple[pd.DataFrame, list[str]]:
    """Reads a CSV of runs.

    Args:
        path: the file.
        columns: canonical name -> column of the file, for columns with other names than those in `ALIASES`.

    Returns:
        A table with columns run, architecture, N, D, C, loss, line (of the file), N_total and budget (NaN if the file
        has none), and the other columns of the file; and notes on dropped rows and derived columns. Without a column D,
        D = C / (6 N); without C, C = 6 N D. Rows with a status other than "done" (for example, diverged) are dropped.

    Raises:
        ConfigError: lists every problem: no such file, not a CSV, missing columns, cells that are not numbers, NaN,
            zero or negative values, duplicate rows.
    """
    path = Path(path)
    raw = _read(path)
    found, problems = _find_columns(list(raw.columns), columns or {})
    if problems:
        raise ConfigError(problems, str(path))
    # Drop columns that have a canonical name without being chosen for it: they would collide with the chosen ones.
    table = raw.drop(columns=[name for name in raw if name in ALIASES and name not in found.values()])
    table = table.rename(columns={column: name for name, column in found.items()})
    table["line"] = raw.index
    notes = []
    if "status" in table:
        stopped = ~table["status"].str.strip().isin(("", "done"))
        for status, rows in table[stopped].groupby("status"):
            notes.append(f"{_rows(len(rows))} left out: {status.strip()} ({_lines(rows['line'])})")
        table = table[~stopped].copy()
        if table.empty:
            raise ConfigError(["status: no run is done, so no row is left; " + "; ".join(notes)], str(path))
    problems = _numbers(table, found)
    if not problems:
        _derive(table, notes)
        table["architecture"] = table["architecture"].str.strip() if "architecture" in table else path.stem
        table["run"] = table["run"].str.strip() if "run" in table else [f"line {line}" for line in table["line"]]
        problems = _duplicates(table)
    if problems:
        rest = len(problems) - SHOWN
        raise ConfigError(problems[:SHOWN] + ([f"and {rest} more problems"] if rest > 0 else []), str(path))
    return table.reset_index(drop=True), notes


def load_study(
    path: str | Path, columns: dict[str, str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame | None, list[str]]:
    """Reads a study folder: its table.csv and the training curves of its runs (metrics.jsonl).

    Args:
        path: the study folder.
        columns: see `load_table`.

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
    table, notes = load_table(path / "table.csv", columns)
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
        notes.append(f"{_rows(without)} without a training curve (no metrics.jsonl in the run folder)")
    if broken:
        notes.append(f"{broken} unreadable lines of metrics.jsonl left out: not JSON, or not numbers")
    return table, pd.concat(parts, ignore_index=True) if parts else None, notes


def curves_of(table: pd.DataFrame) -> pd.DataFrame | None:
    """Returns the table itself if it contains training curves (some run has four rows or more), else None."""
    sizes = table.groupby(["architecture", "run"]).size()
    return table if (sizes >= 4).any() else None


def filter_table(
    table: pd.DataFrame, max_loss: float | None = None, min_tokens_per_param: float | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Drops rows with a higher loss or fewer tokens per parameter. Returns the other rows, and notes with the counts.

    Raises:
        ConfigError: no row is left.
    """
    notes, kept = [], pd.Series(True, index=table.index)
    if max_loss is not None:
        high = table["loss"] > max_loss
        notes.append(f"{_rows(int(high.sum()))} left out: loss above {max_loss:g}")
        kept &= ~high
    if min_tokens_per_param is not None:
        few = table["D"] / table["N"] < min_tokens_per_param
        notes.append(f"{_rows(int(few.sum()))} left out: fewer than {min_tokens_per_param:g} tokens per parameter")
        kept &= ~few
    if not kept.any():
        raise ConfigError([f"no row is left of {len(table)}: {'; '.join(notes)}"], "filters")
    return table[kept].reset_index(drop=True), notes


def apply_convention(table: pd.DataFrame, count: str, flops: str) -> pd.DataFrame:
    """Returns the table with N counted with or without embeddings, and C counted in one of `FLOPS`.

    "exact" is the column of C, "paper" and "causal" are the columns `COUNTED`, and "6nd" is 6 N D.

    The column `spent` keeps the exact C, which runs of one budget have in common.

    Raises:
        ConfigError: total counts, or FLOPs of another convention, are requested, but missing in the table.
        ValueError: unknown convention.
    """
    if count not in ("non-embedding", "total") or flops not in FLOPS:
        raise ValueError(
            f"count: {count!r} must be 'non-embedding' or 'total', and flops: {flops!r} one of {', '.join(FLOPS)}"
        )
    counted = table.copy()
    counted["spent"] = table["C"]
    if count == "total":
        if table["N_total"].isna().any():
            fix = "name the column with --columns N_total=NAME, or use --count non-embedding"
            raise ConfigError([f"count total: the table lacks N_total in {_lines(_missing(table))}; {fix}"], "fit")
        counted["N"] = table["N_total"]
    if flops == "6nd":
        counted["C"] = 6 * counted["N"] * counted["D"]
    elif flops in COUNTED:
        counted["C"] = counted_flops(table, flops)
        bad = ~(np.isfinite(counted["C"]) & (counted["C"] > 0))
        if bad.any():
            where = _lines(table["line"][bad]) if "line" in table else f"{int(bad.sum())} rows"
            fix = "a study writes it; in another CSV, add the column, or use --flops exact"
            raise ConfigError([f"flops {flops}: no number in column {COUNTED[flops]} in {where}; {fix}"], "fit")
    return counted


def counted_flops(table: pd.DataFrame, flops: str) -> pd.Series:
    """Returns the FLOPs of the rows in the convention "paper" or "causal"; NaN where the table has none."""
    column = COUNTED[flops]
    return pd.to_numeric(table[column], errors="coerce") if column in table else pd.Series(np.nan, table.index)


def assign_budgets(
    table: pd.DataFrame, budgets: list[float] | None = None, tolerance: float = 0.06
) -> tuple[np.ndarray, list[float] | None]:
    """Groups the rows that were trained with equal compute.

    If `budgets` are given, each row belongs to the nearest one, within `tolerance` of log10 C. Otherwise, the column
    `budget` decides if every row has one. Otherwise, rows are clustered: each cluster is centred at the C with the most
    remaining rows within `tolerance` of it.

    Args:
        table: columns C or spent, and optionally budget.
        budgets: nominal budgets in FLOPs.
        tolerance: largest distance to a budget in log10 C.

    Returns:
        One label per row (-1: no budget), and the nominal budget of each label, or None if the rows were clustered.
    """
    log_C = np.log10(table["spent" if "spent" in table else "C"].to_numpy(float))
    if budgets:
        nominal = sorted(budgets)
        distance = np.abs(log_C[:, None] - np.log10(nominal))
        return np.where(distance.min(axis=1) < tolerance, distance.argmin(axis=1), -1), nominal
    if "budget" in table and table["budget"].notna().all():
        nominal = sorted(set(table["budget"]))
        return np.searchsorted(nominal, table["budget"]), nominal
    return _cluster(log_C, tolerance), None


def _cluster(log_C: np.ndarray, tolerance: float) -> np.ndarray:
    labels, found, free = np.full(len(log_C), -1), [], np.ones(len(log_C), dtype=bool)
    near = np.abs(log_C[:, None] - log_C) < tolerance
    while free.any():
        sizes = np.where(free, (near & free).sum(axis=1), 0)
        distance = np.where(near & free, np.abs(log_C[:, None] - log_C), 0).sum(axis=1)
        centre = min(np.flatnonzero(sizes == sizes.max()), key=lambda row: distance[row])
        members = near[centre] & free
        free &= ~members
        # A few rows near a cluster with more than three times as many are outliers of it, not a separate budget.
        beside = [size for other, size in found if abs(log_C[centre] - other) < 3 * tolerance]
        if members.sum() >= max(beside, default=0) / 3:
            labels[members] = len(found)
            found.append((log_C[centre], members.sum()))
    return labels


def _read(path: Path) -> pd.DataFrame:
    """Reads all cells as text. The index is the line number in the file."""
    if path.is_dir():
        raise ConfigError([f"{path}: a folder, not a CSV"], "table")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file or folder"], "table") from None
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError([f"cannot be read as UTF-8 text: {error}"], str(path)) from None
    if "\0" in text:
        raise ConfigError(["contains NUL bytes, so it is a binary file; give a CSV"], str(path))
    header = text.partition("\n")[0]
    separator = max(",;\t", key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    rows = [(reader.line_num, row) for row in reader]
    if not rows or not any(cell.strip() for cell in rows[0][1]):
        raise ConfigError(["empty: a table needs a header line and rows"], str(path))
    names = [name.strip() for name in rows[0][1]]
    problems = [
        f"column {name!r} occurs twice; rename one" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    body = [(number, row) for number, row in rows[1:] if any(cell.strip() for cell in row)]
    ragged = [number for number, row in body if len(row) != len(names)]
    if ragged:
        problems.append(f"{_lines(ragged)}: the number of cells is not {len(names)}, as in the header")
    if not body:
        problems.append("has a header but no rows; add one row per run")
    if problems:
        raise ConfigError(problems, str(path))
    return pd.DataFrame([row for _, row in body], columns=names, index=[number for number, _ in body], dtype=object)


def _find_columns(names: list[str], given: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Returns canonical name -> column of the file, and problems."""
    found, problems = {}, []
    plain = {_plain(name): name for name in reversed(names)}
    for name, column in given.items():
        if name not in ALIASES:
            problems.append(f"columns: unknown name {name!r}; {nearest(name, ALIASES)}")
        elif column not in names:
            problems.append(f"{name}={column!r}: the table has no such column; {nearest(column, names)}")
        else:
            found[name] = column
    for name, aliases in ALIASES.items():
        if name not in given:
            known = [plain[_plain(alias)] for alias in aliases if _plain(alias) in plain]
            known = [column for column in known if column not in found.values()]
            if known:
                found[name] = known[0]
    missing = [name for name in ("N", "loss") if name not in found and name not in given]
    if not {"C", "D"} & (set(found) | set(given)):
        missing.append("C")
    for name in missing:
        also = " (or D)" if name == "C" else ""
        problems.append(
            f"no column for {name}{also}: name it with --columns {name}=COLUMN; {nearest(ALIASES[name][0], names)}"
        )
    return found, problems


def _plain(name: str) -> str:
    # Tables do not use both N and n, and they write spaces, dashes and underscores alike.
    return re.sub(r"[\s_\-]+", "_", name.strip()).lower()


def _numbers(table: pd.DataFrame, found: dict[str, str]) -> list[str]:
    """Converts the columns of numbers to floats in place. Returns the problems of each column with line numbers."""
    problems = []
    for name in NUMBERS:
        if name not in table:
            if name in ("N_total", "budget"):
                table[name] = np.nan
            continue
        cells = table[name].astype(str).str.strip()
        values = pd.to_numeric(cells, errors="coerce")
        blank = cells.str.lower().isin(("", "nan", "na", "null", "none"))
        optional = name in ("N_total", "budget")
        label = name if found[name] == name else f"{found[name]} ({name})"
        wrong = {
            "not a number": values.isna() & ~blank,
            "missing or NaN (drop the row, or give the reason in a column `status`)": blank & (not optional),
            "infinite": np.isinf(values),
            "zero or negative, but must be positive": values <= 0,
        }
        for reason, rows in wrong.items():
            if rows.any():
                given = "" if "NaN" in reason else f" (given {cells[rows].iloc[0]!r})"
                problems.append(f"{label}: {reason} in {_lines(table['line'][rows])}{given}")
        table[name] = values.astype(float)
    return problems


def _derive(table: pd.DataFrame, notes: list[str]) -> None:
    if "D" not in table:
        table["D"] = table["C"] / (6 * table["N"])
        notes.append("no column of tokens: D = C / (6 N)")
    elif "C" not in table:
        table["C"] = 6 * table["N"] * table["D"]
        notes.append("no column of FLOPs: C = 6 N D")


def _duplicates(table: pd.DataFrame) -> list[str]:
    keys = ["architecture", "N", "D", "C", "loss"]
    same = table[table.duplicated(keys, keep=False)]
    groups = [rows for _, rows in same.groupby(keys, sort=False)]
    return [f"the same row {len(rows)} times, in {_lines(rows['line'])}; keep one" for rows in groups]


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
                "D": float(row["tokens"]),
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


def _missing(table: pd.DataFrame) -> pd.Series:
    return table["line"][table["N_total"].isna()]


def _rows(number: int) -> str:
    return f"{number} row" + ("" if number == 1 else "s")


def _lines(numbers, shown: int = 12) -> str:
    numbers = list(numbers)
    listed = ", ".join(str(number) for number in numbers[:shown])
    more = f" and {len(numbers) - shown} more" if len(numbers) > shown else ""
    return ("line " if len(numbers) == 1 else "lines ") + listed + more
