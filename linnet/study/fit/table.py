"""Reads tables of runs: any CSV whose columns can be named, or a study folder with its training curves.

All problems of a file are reported at once, each with its lines: a law fitted to a table with one bad row is wrong in a
way nobody sees.
"""

import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd

from linnet.config import ConfigError, nearest
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
}
"""Names under which each canonical column is found without being told, whatever their case and spacing."""

NUMBERS = ("N", "N_total", "D", "C", "loss", "budget")
SHOWN = 30
"""Problems of one file that are listed; a further count stands for the rest."""


def parse_columns(assignments: list[str]) -> dict[str, str]:
    """Reads `N=Model Size,C=Training FLOP` (also in several parts) into {"N": "Model Size", ...}.

    Raises `ConfigError` for anything that is not NAME=COLUMN with a known NAME.
    """
    found, problems = {}, []
    for part in (part for assignment in assignments for part in assignment.split(",") if part.strip()):
        name, equals, column = part.partition("=")
        name, column = name.strip(), column.strip()
        if not equals or not column:
            problems.append(f"--columns {part!r}: write NAME=COLUMN, for example loss=final_loss")
        elif name not in ALIASES:
            problems.append(f"--columns {part!r}: unknown name {name!r}; {nearest(name, ALIASES)}")
        elif name in found:
            problems.append(f"--columns {part!r}: {name} is already {found[name]!r}")
        else:
            found[name] = column
    if problems:
        raise ConfigError(problems, "command line")
    return found


def load_table(path: str | Path, columns: dict[str, str] | None = None) -> tuple[pd.DataFrame, list[str]]:
    """Reads a CSV of runs.

    Args:
        columns: canonical name -> column of the file, for names that are not found by themselves (see `ALIASES`).

    Returns:
        A table with columns run, architecture, N, D, C, loss, line (of the file), N_total and budget (NaN where the
        file has none), and the file's other columns; and notes on what was dropped or derived. With D absent,
        D = C / (6 N); with C absent, C = 6 N D. Rows with a status that is not "done" (diverged, say) are dropped.

    Raises:
        ConfigError: listing every problem: no such file, not a CSV, missing columns, cells that are not numbers, NaN,
            zero or negative values, duplicate rows.
    """
    path = Path(path)
    raw = _read(path)
    found, problems = _find_columns(list(raw.columns), columns or {})
    if problems:
        raise ConfigError(problems, str(path))
    # A column that bears a canonical name but was mapped to nothing would stand in the way of the one that was.
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
            raise ConfigError(["no run is done; each has another status: " + "; ".join(notes)], str(path))
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

    Returns:
        The table and notes of `load_table`, and between them the curves: columns run, architecture, N, N_total, D, C,
        loss (training loss), learning_rate, one row a record; None where no run has any.

    Raises:
        ConfigError: no such folder, no table.csv in it, or what `load_table` raises.
    """
    path = Path(path)
    if not (path / "table.csv").is_file():
        fix = "collect it with `linnet study`, or give a CSV" if path.is_dir() else "there is no such file or folder"
        raise ConfigError([f"{path}: no table.csv there; {fix}"], "study")
    table, notes = load_table(path / "table.csv", columns)
    parts, without, broken = [], 0, 0
    for row in table.to_dict("records"):
        records, bad = _records(path / str(row.get("path") or f"runs/{row['run']}") / "metrics.jsonl")
        broken += bad
        if not records:
            without += 1
            continue
        same = {name: row[name] for name in ("run", "architecture", "N", "N_total")}
        parts.append(pd.DataFrame(records).assign(**same))
    if without:
        notes.append(f"{_rows(without)} without a training curve (no metrics.jsonl in the run folder)")
    if broken:
        notes.append(f"{broken} unreadable lines of metrics.jsonl left out")
    return table, pd.concat(parts, ignore_index=True) if parts else None, notes


def curves_of(table: pd.DataFrame) -> pd.DataFrame | None:
    """The table itself where it holds training curves (some run has four rows or more), else None."""
    sizes = table.groupby(["architecture", "run"]).size()
    return table if (sizes >= 4).any() else None


def filter_table(
    table: pd.DataFrame, max_loss: float | None = None, min_tokens_per_param: float | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """Drops rows with a higher loss or fewer tokens a parameter, and says how many.

    Raises `ConfigError` where none is left.
    """
    notes, kept = [], pd.Series(True, index=table.index)
    if max_loss is not None:
        high = table["loss"] > max_loss
        notes.append(f"{_rows(int(high.sum()))} left out: loss above {max_loss:g}")
        kept &= ~high
    if min_tokens_per_param is not None:
        few = table["D"] / table["N"] < min_tokens_per_param
        notes.append(f"{_rows(int(few.sum()))} left out: fewer than {min_tokens_per_param:g} tokens a parameter")
        kept &= ~few
    if not kept.any():
        raise ConfigError([f"no row is left of {len(table)}: {'; '.join(notes)}"], "filters")
    return table[kept].reset_index(drop=True), notes


def apply_convention(table: pd.DataFrame, count: str, flops: str) -> pd.DataFrame:
    """The table as counted: N with or without embeddings, C exact or 6 N D.

    The C that a group of equal compute was made by stays in column `spent`.

    Raises:
        ConfigError: total counts are asked for and missing. ValueError: unknown convention.
    """
    if count not in ("non-embedding", "total") or flops not in ("exact", "6nd"):
        raise ValueError(f"count must be non-embedding or total, flops exact or 6nd; given {count!r}, {flops!r}")
    counted = table.copy()
    counted["spent"] = table["C"]
    if count == "total":
        if table["N_total"].isna().any():
            fix = "name the column with --columns N_total=NAME, or use --count non-embedding"
            raise ConfigError([f"count total: the table lacks N_total in {_lines(_missing(table))}; {fix}"], "fit")
        counted["N"] = table["N_total"]
    if flops == "6nd":
        counted["C"] = 6 * counted["N"] * counted["D"]
    return counted


def assign_budgets(
    table: pd.DataFrame, budgets: list[float] | None = None, tolerance: float = 0.06
) -> tuple[np.ndarray, list[float] | None]:
    """Which rows were trained with equal compute.

    By `budgets` where given (the nearest, within `tolerance` of log10 C); by the column budget where every row has one;
    else by clustering: repeatedly the C with most rows within `tolerance` of it.

    Args:
        table: columns C or spent, and budget.

    Returns:
        A label for each row (-1: none), and the nominal budget of each label where there are such.
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
        # A few rows beside a much larger group are its stragglers, not a budget of their own.
        beside = [size for other, size in found if abs(log_C[centre] - other) < 3 * tolerance]
        if members.sum() >= max(beside, default=0) / 3:
            labels[members] = len(found)
            found.append((log_C[centre], members.sum()))
    return labels


def _read(path: Path) -> pd.DataFrame:
    """All cells as text; the index is the line of the file."""
    if path.is_dir():
        raise ConfigError([f"{path}: a folder, not a CSV"], "table")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{path}: there is no such file or folder"], "table") from None
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError([f"cannot be read as UTF-8 text: {error}"], str(path)) from None
    if "\0" in text:
        raise ConfigError(["holds NUL bytes: a binary file, not a CSV"], str(path))
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
        problems.append(f"{_lines(ragged)}: not {len(names)} cells, as the header has")
    if not body:
        problems.append("has a header but no rows")
    if problems:
        raise ConfigError(problems, str(path))
    return pd.DataFrame([row for _, row in body], columns=names, index=[number for number, _ in body], dtype=object)


def _find_columns(names: list[str], given: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Canonical name -> column of the file, and what is wrong."""
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
    # Case tells N from n nowhere in practice; spaces, dashes and underscores are habits.
    return re.sub(r"[\s_\-]+", "_", name.strip()).lower()


def _numbers(table: pd.DataFrame, found: dict[str, str]) -> list[str]:
    """Turns the columns of numbers into floats in place; returns what is wrong, by column, with lines."""
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
            "missing or NaN (drop the row, or say why in a column status)": blank & (not optional),
            "infinite": np.isinf(values),
            "zero or negative, must be positive": values <= 0,
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
    """Points of one run's training curve with finite numbers, and the number of unreadable lines."""
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
