"""Reads tables of runs: a CSV with known or named columns, or a study folder with its training curves.

All problems of a file are reported together with their line numbers, because one bad row in a table can make a fitted
law wrong without any visible sign.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from linnet.config import ConfigError, count_of, nearest, printable, refuse
from linnet.laws.fit.reading import lines_of, read_cells

ALIASES = {
    "N": (
        "params_non_embedding",
        "N",
        "params",
        "parameters",
        "n_params",
        "num_params",
        "num_parameters",
        "model_size",
    ),
    "N_total": ("params_total", "total_params", "N_total"),
    "D": ("tokens", "images", "D", "training_tokens", "train_tokens", "num_tokens", "n_tokens", "tokens_seen"),
    "C": ("flops", "C", "training_flops", "training_flop", "train_flops", "total_flops", "flop", "compute"),
    "loss": ("loss", "validation_loss", "val_loss", "valid_loss", "final_loss", "eval_loss", "test_loss"),
    "architecture": ("architecture", "arch", "model", "model_name"),
    "run": ("run", "run_id", "run_name", "name"),
    "budget": ("budget",),
    "status": ("status", "state", "run_state"),
    "exclude": ("exclude", "excluded"),
    "learning_rate": ("learning_rate", "lr", "peak_lr", "peak_learning_rate", "max_lr", "max_learning_rate", "base_lr"),
    "value": ("value", "accuracy", "acc", "score"),
    "task": ("task", "metric", "evaluation"),
    "chance": ("chance",),
    "questions": ("questions", "num_questions"),
    "flops_paper": ("flops_paper",),
    "flops_causal": ("flops_causal",),
    "flops_004": ("flops_004",),
    "attention_share": ("attention_share",),
    "state_fixed": ("state_fixed",),
    "state_dynamic": ("state_dynamic",),
    "seq_len": ("seq_len", "context_length"),
    "batch_tokens": ("batch_tokens",),
    "unique_tokens": ("unique_tokens", "unique_images"),
    "seed": ("seed", "random_seed"),
}
"""Canonical name -> column names that are recognised, in any case and spacing, and as W&B writes them."""

POSITIVE, ANY = (5e-324, np.inf), (-np.inf, np.inf)
NUMBERS = {name: POSITIVE for name in ("N", "N_total", "D", "C", "loss", "budget")}
"""Column -> the range of its values."""
NEEDED = ("N", "D", "C", "loss", "value")
"""Those that no row may lack; D or C may be absent as a column. Other columns may be absent, and cells empty."""
COLUMNS_OF_LAWS = {"attention_share": (0.0, 1.0), "state_fixed": (0.0, np.inf), "state_dynamic": (0.0, np.inf)}
COLUMNS_OF_LAWS |= {name: (1.0, np.inf) for name in ("seq_len", "batch_tokens", "unique_tokens")} | {"seed": ANY}
"""Columns that further laws read beside `NUMBERS`."""
FLOPS = ("exact", "paper", "causal", "6nd", "004")
"""Ways of counting C; see `linnet.models.costs`."""
CONVENTIONS = {
    "exact": "as in the table",
    "paper": "as paper 000 counts it",
    "causal": "without the pairs that attention's mask hides",
    "6nd": "as 6 N D",
    "004": "as paper 004 counts it",
}
"""The same in words."""
COUNTED = {"paper": "flops_paper", "causal": "flops_causal", "004": "flops_004"}
"""Ways of counting C that have a column of their own."""
DONE = ("", "done", "finished", "completed", "complete", "success", "succeeded", "ok")
"""Words in the column `status`, in any case, of runs that count."""
POINT = ("unique_tokens", "batch_tokens")
"""Columns of laws that tell runs of one N and D apart."""
SIZE = re.compile(
    r"(?i)(?<![\d.])\d+([.p]\d+)?\s*([kmbt]|million|billion)(?![a-z\d])|(?<![a-z\d])"
    r"(x*[sl]|m|nano|micro|mini|tiny|small|base|medium|large|huge|giant)(?![a-z\d])"
)
"""A part of a label that names a size, such as 70m or large."""
KEEP = ("", "0", "0.0", "false", "no", "n", "nan", "none", "null")
"""Words in the column `exclude`, in any case, of runs that count. Any other text is the reason to leave a run out."""
CLEAR = 0.01
"""Largest p-value of Kendall's tau between loss and metric at which the points tell whether less is better."""
IMAGES = "images"
"""The column of D in a study of image classifiers."""
ENTROPY = 0.4
"""Smallest plausible loss in nats per token; the best models of text in bytes are near it."""
UNIFORM = 12.0
"""Largest plausible loss in nats per token: a uniform choice among 160,000 tokens."""
RATIO = (0.1, 100.0)
"""Plausible C / (6 N D), with N without embeddings at the lower end and with them at the upper one."""
BITS_PER_BYTE = "bits_per_byte"
SAME_TOKENS = 0.04  # bytes per token that differ by less may be those of other held-out windows
FAR_BUDGET = (0.1, 10.0)
"""Plausible C / budget: other ways of counting C differ from a plan by less."""
FEWEST, MOST = 1e3, 1e7
"""Smallest plausible N and D, and largest D / N, of a table that lacks C or D."""
REPEATS = 0.03
"""Largest difference between losses of repeated runs, as a share. Seeds of small models differ by 0.2 to 1 %."""
SWEPT = 0.005
"""The same for runs of different learning rates."""
LARGE, KEPT = 20_000, 2_000
"""A table with more rows is thinned to about this number: a fit does not need every record of long curves."""
SHOWN = 30
"""Largest number of problems of one file that are listed. A count stands for the others."""


def parse_columns(assignments: list[str]) -> dict[str, str]:
    """Parses `N=Model Size,C=Training FLOP` (one or several strings) to {"N": "Model Size", ...}.

    `architecture=` without a column gives "": the table is then read as if it had no column of that name.

    Raises:
        ConfigError: a part is not NAME=COLUMN, or its NAME is unknown or given twice.
    """
    columns, problems = {}, []
    for part in (part for assignment in assignments for part in assignment.split(",") if part.strip()):
        name, equals, column = part.partition("=")
        name, column = name.strip(), column.strip()
        if not equals:
            problems.append(f"--columns {part!r}: not NAME=COLUMN; write for example loss=final_loss")
        elif name not in ALIASES:
            problems.append(f"--columns {part!r}: unknown name {name!r}; {nearest(name, ALIASES)}")
        elif name in columns:
            problems.append(f"--columns {part!r}: {name} is already set to {columns[name]!r}; remove one")
        else:
            columns[name] = column
    refuse(problems, "command line")
    return columns


def load_table(
    path: str | Path,
    columns: dict[str, str] | None = None,
    *,
    exclude: Sequence[str] = (),
    best_of: bool = False,
    loss_unit: str | None = None,
    keep: Callable[[pd.DataFrame], tuple[pd.DataFrame, list[str]]] | None = None,
    point: Sequence[str] = (),
) -> tuple[pd.DataFrame, list[str]]:
    """Reads a table of runs: CSV, TSV, JSONL or a JSON array of objects, plain or gzipped.

    Args:
        path: the file.
        columns: canonical name -> column of the file, for columns with other names than those in `ALIASES`; "" for a
            column that the file lacks, whatever its names.
        exclude: COLUMN=VALUE of rows to leave out; COLUMN is a canonical name or a column of the file, and VALUE may
            contain `*`.
        best_of: keeps the lowest loss of each architecture, N and D, as after a sweep of learning rates.
        loss_unit: "nats"; "bits" or "perplexity", which are converted to nats; or "any", which is not checked. None
            means nats, and refuses losses that cannot be.
        keep: filters the rows, and returns notes as `filter_table` does. Rows that it drops are not checked.
        point: further columns whose values `best_of` does not choose between, such as `POINT`.

    Returns:
        A table with columns run, architecture, N, D, C, loss, line (of the file), N_total and budget (NaN if the file
        has none), and the other columns of the file; and notes on dropped rows and derived columns. Without a column D,
        D = C / (6 N); without C, C = 6 N D. Rows whose status is not one of `DONE` (for example, diverged) and rows
        with something in the column `exclude` are dropped. `table.attrs` has "columns", canonical name -> column of
        the file, and "excluded", the rows left out by request: {"run", "architecture", "loss", "reason"}.
        Architectures of one size each whose labels name sizes (70m, 160m) are sizes of one architecture, unless
        `columns` names their column.

    Raises:
        ConfigError: lists every problem: no such file, not a table, missing columns, cells that are not numbers, NaN,
            zero or negative values, duplicate rows, columns in another unit, runs of one N and D (and one value of each
            of `POINT`) whose losses differ by more than repeats do.
    """
    path, notes = Path(path), []
    table, header, excluded = _kept(path, columns or {}, exclude, notes, "loss")
    unit = _in_nats(table, header, NUMBERS, loss_unit, str(path), notes)
    if "architecture" not in (columns or {}) and header["N"] != "params_non_embedding":  # a study names them itself
        _sizes(table, path.stem, header, notes)
    table, dropped = (table, []) if keep is None else keep(table)
    notes += dropped
    refuse(_duplicates(table) or _implausible(table, unit) + _scale(table, header), str(path), SHOWN)
    if "run" in header:
        table["run"] = _of_one_size(table)
    table, problems = _one_per_point(table, best_of, point, notes)
    refuse(problems, str(path), SHOWN)
    if "run" not in header:
        table["run"] = _names(table)
    table = _thin(table, notes).reset_index(drop=True)
    table.attrs = {"columns": header, "excluded": excluded}
    if reason := other_tokens(table):
        fix = "fit `--columns loss=bits_per_byte --loss-unit bits`, or one tokenizer and text at a time"
        notes.append(f"losses per token do not compare: {reason}; {fix}")
    return table, notes


def other_tokens(table: pd.DataFrame) -> str:
    """Returns why the losses per token of a table of `load_table` do not compare between its rows, or ""."""
    if table.attrs["columns"].get("loss") == BITS_PER_BYTE:
        return ""
    if "tokenizer" in table and (names := sorted(table["tokenizer"].dropna().astype(str).unique()))[1:]:
        return f"the rows have {len(names)} tokenizers, {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    if BITS_PER_BYTE not in table:
        return ""
    sizes = table["loss"] / pd.to_numeric(table[BITS_PER_BYTE], errors="coerce") / math.log(2)
    sizes = sizes[(sizes > 0) & (sizes < math.inf)]
    if sizes.empty or sizes.max() <= (1 + SAME_TOKENS) * sizes.min():
        return ""
    ends = f"{sizes.min():.3g} to {sizes.max():.3g} bytes"
    return f"by loss and {BITS_PER_BYTE}, a token has {ends}, so the tokenizers or texts differ"


def load_points(
    path: str | Path,
    columns: dict[str, str] | None = None,
    chance: float | None = None,
    *,
    exclude: Sequence[str] = (),
    loss_unit: str | None = None,
    keep: Callable[[pd.DataFrame], tuple[pd.DataFrame, list[str]]] | None = None,
) -> tuple[pd.DataFrame, list[str]]:
    """Reads a table of evaluated checkpoints for `fit_downstream`: one row per checkpoint and task.

    Args:
        path: CSV or JSONL file with N and D (or C), loss and value, and optionally run, architecture, task, chance and
            questions. Whether more or less is better follows from the points of each task: values that rise with the
            loss are errors. Only where they show no trend does a name that contains `err` decide. With chance, shares
            of wrong answers are turned round; without it, shares of right ones are.
        columns: see `load_table`.
        chance: share of right answers by guessing, where the table has no column `chance`.
        exclude, loss_unit, keep: see `load_table`. Rows whose status is not one of `DONE` are dropped too.

    Returns:
        A table with columns run, architecture, task, N, D, C, loss, value, chance (NaN where less is better),
        questions and last (whether the row is the last of its run and task); and notes.

    Raises:
        ConfigError: lists every problem.
    """
    path, notes = Path(path), []
    table, header, left_out = _kept(path, columns or {}, exclude, notes, "loss", "value")
    notes += [f"run {row['run']} left out: {row['reason']}" for row in left_out]
    numbers = NUMBERS | dict.fromkeys(("value", "chance", "questions"), ANY)
    unit = _in_nats(table, header, numbers, loss_unit, str(path), notes)
    table, dropped = (table, []) if keep is None else keep(table)
    notes += dropped
    refuse(_implausible(table, unit) + _scale(table, header), str(path))
    table["run"] = _of_one_size(table) if "run" in header else _names(table)
    table["chance"] = table["chance"].fillna(np.nan if chance is None else chance)
    for task, rows in table.groupby("task", sort=False):
        turned, note = _turned(rows, header["value"])
        table.loc[rows.index, "value"] = 1 - rows["value"] if turned else rows["value"]
        notes += [f"{task}: {note}"] if note else []
    share = table["chance"].notna()
    bad = share & ~(table["value"].between(0, 1) & table["chance"].between(0, 1, inclusive="left"))
    if bad.any():
        reason = "with chance, values are shares from 0 to 1; divide percentages by 100"
        raise ConfigError([f"{header['value']} (value): {reason} ({lines_of(table['line'][bad])})"], str(path))
    end = table.groupby(["architecture", "task", "run"])["C"].transform("max")
    table["last"] = table["C"] == end
    return table.reset_index(drop=True), notes


def _kept(path: Path, columns: dict[str, str], exclude: Sequence[str], notes: list[str], *needed: str):
    """Returns the rows of a file whose status counts and that are not excluded, the header, and those excluded."""
    table, header = _read(path, columns, notes, *needed)
    table["architecture"] = labels(table["architecture"]) if "architecture" in table else path.stem
    if "value" in needed:
        table["task"] = labels(table["task"]) if "task" in table else header["value"]
    table["run"] = labels(table["run"]) if "run" in table else [f"line {line}" for line in table["line"]]
    # A column `state` of numbers has sizes of the models' state.
    if "status" in table and pd.to_numeric(table["status"], errors="coerce").isna().any():
        stopped = ~table["status"].str.strip().str.lower().isin(DONE)
        for status, rows in table[stopped].groupby("status"):
            notes.append(f"{_left_out(len(rows))}: {status.strip()} ({lines_of(rows['line'])})")
        table = table[~stopped].copy()
        if table.empty:
            raise ConfigError(["status: no run is done, so no row is left; " + "; ".join(notes)], str(path))
    table, excluded, problems = _exclude(table, header, exclude)
    refuse(problems, str(path))
    return table, header, excluded


def _in_nats(table: pd.DataFrame, header: dict[str, str], numbers: dict, unit: str | None, path: str, notes: list[str]):
    """Reads the numbers of a table in place, adds C or D, turns losses into nats, and returns their unit."""
    refuse(read_numbers(table, numbers, header), path, SHOWN)
    _derive(table, notes)
    # The cross-entropy of images may be near 0, and is in nats.
    unit = "any" if unit is None and header.get("D") == IMAGES else unit
    refuse(_unit(table, header["loss"], unit, notes), path, SHOWN)
    return unit


def _names(table: pd.DataFrame) -> list[str]:
    """Returns names of runs that have none, from their values: the same in another order of the rows."""
    known = [name for name in ("N", "D") if name in table and table[name].notna().all()] or ["C"]
    labels = table[known].apply(lambda row: ", ".join(f"{name} {row[name]:.4g}" for name in known), axis=1)
    keys = [table[name] for name in ("architecture", "task") if name in table]
    number = table["loss"].groupby([*keys, labels]).rank(method="first").astype(int)
    return [label if count == 1 else f"{label} ({count})" for label, count in zip(labels, number, strict=True)]


def _of_one_size(table: pd.DataFrame) -> pd.Series:
    """Returns the names of runs, with N where runs of several sizes have one name: a training has one size."""
    several = table.groupby(["architecture", "run"], sort=False)["N"].transform("nunique") > 1
    sized = table["run"] + ", N " + table["N"].map("{:.6g}".format)
    return table["run"].where(~several, sized)


def _turned(rows: pd.DataFrame, column: str) -> tuple[bool, str]:
    """Returns whether the values of a task are fitted as 1 - value, and the reason."""
    known, named = bool(rows["chance"].notna().all()), "err" in column.lower()
    trend, p = stats.kendalltau(rows["loss"], rows["value"]) if len(rows) > 2 else (0.0, 1.0)
    clear = p < CLEAR
    rises = trend > 0 if clear else named or not known
    turned = rises == known and bool(rows["value"].between(0, 1).all())
    if not (turned or named):
        return False, ""
    why = f"{'rises' if rises else 'falls'} with the loss" if clear else "shows no trend with the loss; by its name"
    way = f"{column} {why}, so {'less' if rises else 'more'} is better"
    return turned, f"{way}; {f'1 - {column}' if turned else column} is fitted"


def curves_of(table: pd.DataFrame) -> pd.DataFrame | None:
    """Returns the table itself if it contains training curves (four numbers of tokens of a run), else None."""
    numbers = table.groupby(["architecture", "run", "N"], sort=False)["D"].nunique()
    return table if (numbers >= 4).any() else None


def ends_of(table: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of most tokens of each run. Several of equal D are repeats."""
    return table[table["D"] == table.groupby(["architecture", "run", "N"], sort=False)["D"].transform("max")]


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
        notes.append(f"{_left_out(high.sum())}: loss above {max_loss:g}")
        kept &= ~high
    if min_tokens_per_param is not None:
        few = table["D"] / table["N"] < min_tokens_per_param
        notes.append(f"{_left_out(few.sum())}: fewer than {min_tokens_per_param:g} tokens per parameter")
        kept &= ~few
    if not kept.any():
        raise ConfigError([f"no row is left of {len(table)}: {'; '.join(notes)}"], "filters")
    return table[kept].reset_index(drop=True), notes


def apply_convention(table: pd.DataFrame, count: str, flops: str) -> pd.DataFrame:
    """Returns the table with N counted with or without embeddings, and C counted in one of `FLOPS`.

    "exact" is the column of C, those of `COUNTED` are columns of their own, and "6nd" is 6 N D.

    The column `spent` keeps the exact C, which runs of one budget have in common.

    Raises:
        ConfigError: total counts, or FLOPs of another convention, are requested, but missing in the table.
        ValueError: unknown convention.
    """
    if count not in ("non-embedding", "total") or flops not in FLOPS:
        known = f"'non-embedding' or 'total', and flops: {flops!r} one of {', '.join(FLOPS)}"
        raise ValueError(f"count: {count!r} must be {known}")
    counted = table.copy()
    counted["spent"] = table["C"]
    if count == "total":
        if (lacking := table["N_total"].isna()).any():
            fix = "name the column with --columns N_total=NAME, or use --count non-embedding"
            raise ConfigError([f"count total: the table lacks N_total in {_where(table, lacking)}; {fix}"], "fit")
        counted["N"] = table["N_total"]
    if flops == "6nd":
        counted["C"] = 6 * counted["N"] * counted["D"]
    elif flops in COUNTED:
        counted["C"] = counted_flops(table, flops)
        bad = ~(np.isfinite(counted["C"]) & (counted["C"] > 0))
        if bad.any():
            fix = "the folder of a study has it; in another CSV, add the column, or use --flops exact"
            where = f"column {COUNTED[flops]} in {_where(table, bad)}"
            raise ConfigError([f"flops {flops}: no number in {where}; {fix}"], "fit")
    return counted


def counted_flops(table: pd.DataFrame, flops: str) -> pd.Series:
    """Returns the FLOPs of the rows in a convention of `COUNTED`; NaN where the table has none."""
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
    labels, clusters = np.full(len(log_C), -1), []
    order = np.argsort(log_C, kind="stable")
    x, free = log_C[order], np.ones(len(log_C), dtype=bool)
    # Rows near each row are a range of the sorted rows, so sums over them are differences of running sums.
    left, right = np.searchsorted(x, x - tolerance, "right"), np.searchsorted(x, x + tolerance, "left")
    shifted = x - x.mean() if len(x) else x
    while free.any():
        count, total = (np.concatenate([[0], np.cumsum(np.where(free, part, 0))]) for part in (1, shifted))
        middle = np.arange(len(x))
        below = shifted * (count[middle] - count[left]) - (total[middle] - total[left])
        above = (total[right] - total[middle]) - shifted * (count[right] - count[middle])
        sizes = np.where(free, count[right] - count[left], 0)
        ties = np.flatnonzero(sizes == sizes.max())
        distance = np.round((below + above)[ties], 9)
        centre = min(ties[distance == distance.min()], key=lambda row: order[row])
        members = np.flatnonzero(free[left[centre] : right[centre]]) + left[centre]
        free[members] = False
        # A few rows near a cluster with more than three times as many are outliers of it, not a separate budget.
        beside = [size for other, size in clusters if abs(x[centre] - other) < 3 * tolerance]
        if len(members) >= max(beside, default=0) / 3:
            labels[order[members]] = len(clusters)
            clusters.append((x[centre], len(members)))
    return labels


def _read(path: Path, columns: dict[str, str], notes: list[str], *needed: str) -> tuple[pd.DataFrame, dict[str, str]]:
    """Returns the cells of a file by canonical name, and canonical name -> column. `needed` names columns beside N."""
    raw = read_cells(path)
    notes += filter(None, [raw.attrs.pop("note", "")])
    header, problems = _find_columns(list(raw.columns), columns, needed)
    refuse(problems, str(path))
    # Drop columns that have a canonical name without being chosen for it: they would collide with the chosen ones.
    table = raw.drop(columns=[name for name in raw if name in ALIASES and name not in header.values()])
    table = table.rename(columns={column: name for name, column in header.items()})
    table["line"] = raw.index
    return table, header


def _find_columns(names: list[str], columns: dict[str, str], needed: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns canonical name -> column of the file, and problems."""
    header, problems = {}, []
    plain = {_plain(name): name for name in reversed(names)}
    for name, column in columns.items():
        if name not in ALIASES:
            problems.append(f"columns: unknown name {name!r}; {nearest(name, ALIASES)}")
        elif not column:
            continue
        elif column not in names:
            problems.append(f"{name}={column!r}: the table has no such column; {nearest(column, names)}")
        elif column in header.values():
            other = next(known for known in header if header[known] == column)
            problems.append(f"{name}={column!r}: the column is {other} already; give each name its own column")
        else:
            header[name] = column
    for name, aliases in ALIASES.items():
        if name not in columns:
            known = [plain[_plain(alias)] for alias in aliases if _plain(alias) in plain]
            known = [column for column in known if column not in header.values()]
            if known:
                header[name] = known[0]
    named = {*header, *(name for name, column in columns.items() if column)}
    missing = [name for name in ("N", *needed) if name not in named]
    if not {"C", "D"} & named:
        missing.append("C")
    for name in missing:
        what = f"no column for {name}{' (or D)' if name == 'C' else ''}"
        problems.append(f"{what}: name it with --columns {name}=COLUMN; {nearest(ALIASES[name][0], names)}")
    return header, problems


def labels(cells: pd.Series) -> list[str]:
    """Returns names without white space around them, with control characters spelled out."""
    return [printable(cell.strip(), lines=False) for cell in cells]  # faster than `Series.str` for a million cells


def _plain(name: str) -> str:
    # Tables do not use both N and n, and they write spaces, dashes, underscores, slashes and dots alike.
    return re.sub(r"[\s_\-/.]+", "_", name.strip()).lower()


def _sizes(table: pd.DataFrame, stem: str, header: dict[str, str], notes: list[str]) -> None:
    """Takes the sizes out of the architectures' labels in place, if each label names a size and has one N."""
    sizes = table.groupby("architecture")["N"].agg(["min", "max"])
    rest = {label: _without_size(label) for label in sizes.index}
    merged = list(rest.values())
    named = all(rest[label] != label or merged.count(label) > 1 for label in rest)
    apart = not pd.DataFrame({"rest": rest, "N": sizes["min"]}).duplicated().any()
    if len(set(merged)) < len(merged) and named and apart and (sizes["max"] <= 1.01 * sizes["min"]).all():
        table["architecture"] = table["architecture"].map(lambda label: rest[label] or stem)
        column, whole = header["architecture"], ", ".join(dict.fromkeys(table["architecture"]))
        fix = f"--columns architecture={column} makes each label an architecture"
        notes.append(f"column {column}: {len(rest)} labels of one N each are sizes of {whole}; {fix}")


def _without_size(label: str) -> str:
    """Returns a label without the parts that name a size: mamba of mamba-130m, and nothing of 70m or of a number."""
    return "" if _number(label) is not None else re.sub(r"[\s_\-/]+", "-", SIZE.sub("", label)).strip("-")


def read_numbers(
    table: pd.DataFrame, ranges: Mapping[str, tuple[float, float]], found: Mapping[str, str] | None = None
) -> list[str]:
    """Converts columns to floats in place; empty cells and absent columns that are not `NEEDED` become NaN.

    Args:
        ranges: column -> lowest and highest value.
        found: column -> its name in the file; default: the same.

    Returns:
        The problems of each column with line numbers, a value and what to do.
    """
    problems = []
    for name, (low, high) in ranges.items():
        needed, column = name in NEEDED, (found or {}).get(name, name)
        if name not in table:
            if not needed:
                table[name] = np.nan
            continue
        values = pd.to_numeric(table[name], errors="coerce").astype(float)
        if not (np.isfinite(values) & (values >= low)).all() or (values > high).any():
            cells = table[name].astype(str).str.strip()
            values = pd.to_numeric(cells, errors="coerce").astype(float)
            blank = cells.str.lower().isin(("", "nan", "na", "null", "none"))
            outside = "zero or negative, but must be positive"
            if low != POSITIVE[0]:
                outside = f"not from {low:g} {'up' if high == np.inf else f'to {high:g}'}"
            wrong = {
                "not a number": values.isna() & ~blank,
                "missing or NaN (drop the row, or give the reason in a column `status`)": blank & needed,
                "infinite": np.isinf(values),
                outside: (values < low) | (values > high),
            }
            for reason, rows in wrong.items():
                if rows.any():
                    example = "" if "NaN" in reason else f" (given {cells[rows].iloc[0][:40]!r})"
                    label = name if column == name else f"{column} ({name})"
                    fix = f"; correct it, or {'drop the row' if needed else 'leave the cell empty'}" if example else ""
                    problems.append(f"{label}: {reason} in {_where(table, rows)}{example}{fix}")
        table[name] = values
    return problems


def _derive(table: pd.DataFrame, notes: list[str]) -> None:
    if "D" not in table:
        table["D"] = table["C"] / (6 * table["N"])
        notes.append("no column of tokens: D = C / (6 N)")
    elif "C" not in table:
        table["C"] = 6 * table["N"] * table["D"]
        notes.append("no column of FLOPs: C = 6 N D")


def _duplicates(table: pd.DataFrame) -> list[str]:
    keys = ["architecture", "N", "D", "C", "loss", *(name for name in POINT if name in table)]
    same = table[table.duplicated(keys, keep=False)]
    groups = [rows for _, rows in same.groupby(keys, sort=False)]
    return [f"the same row {len(rows)} times, in {lines_of(rows['line'])}; keep one" for rows in groups]


def _exclude(table: pd.DataFrame, header: dict[str, str], requests: Sequence[str]):
    """Returns the other rows, those left out by the column `exclude` or by request, and problems."""
    reason, problems = pd.Series("", index=table.index), []
    if "exclude" in table:
        marks = table["exclude"].astype(str).str.strip()
        out = ~marks.str.lower().isin(KEEP)
        plain = marks.str.lower().isin(("1", "1.0", "true", "yes", "y", "x"))
        reason[out] = np.where(plain[out], f"column {header['exclude']}", f"column {header['exclude']}: " + marks[out])
    for request in requests:
        name, equals, value = (part.strip() for part in request.partition("="))
        name = next((known for known, column in header.items() if column == name), name)
        if not equals or not value:
            problems.append(f"--exclude {request!r}: not COLUMN=VALUE; write for example run=NAME")
        elif name not in table:
            problems.append(f"--exclude {request!r}: the table has no column {name!r}; {nearest(name, list(table))}")
        else:
            cells = table[name].astype(str).str.strip()
            pattern = re.compile(fnmatch.translate(value))
            hit = cells.map(lambda cell, pattern=pattern: pattern.match(cell) is not None)
            if not hit.any():
                problems.append(f"--exclude {request!r}: no row has it; {nearest(value, sorted(set(cells))[:2000])}")
            reason[hit] = f"--exclude {request}"
    out = reason != ""
    rows = table[out]
    columns = zip(rows["run"], rows["architecture"], rows["loss"], reason[out], strict=True)
    excluded = [
        {"run": run, "architecture": architecture, "loss": _number(loss), "reason": why}
        for run, architecture, loss, why in columns
    ]
    if out.all() and not problems:
        problems.append(f"exclude: leaves no row of {len(table)}; leave fewer out")
    return table[~out].copy(), excluded, problems


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def _unit(table: pd.DataFrame, column: str, unit: str | None, notes: list[str]) -> list[str]:
    """Converts losses in bits, or perplexities, to nats in place. Returns a problem if the column's name says them."""
    if unit in ("bits", "perplexity"):
        table["loss"] = table["loss"] * np.log(2) if unit == "bits" else np.log(table["loss"])
        how = "is in bits; times ln 2 it" if unit == "bits" else "is a perplexity; its logarithm"
        notes.append(f"loss: {column} {how} is in nats")
    named = re.search(r"(?:^|_)((bits?|bpb|bpc|bpw)|perplexity|ppl)(?:_|$)", _plain(column))
    if unit is not None or named is None:
        return []
    other = "bits" if named[2] else "perplexity"
    fix = f"give --loss-unit {other} to convert it to nats, or --loss-unit any to fit it as it is"
    return [f"loss: by its name, column {column!r} is in {other}, and laws of loss are in nats; {fix}"]


def _implausible(table: pd.DataFrame, unit: str | None) -> list[str]:
    """Returns a problem if the losses cannot be nats."""
    low, high = table["loss"].idxmin(), table["loss"].idxmax()
    if unit == "any" or table["loss"][low] >= ENTROPY and table["loss"][high] <= UNIFORM:
        return []
    line = high if table["loss"][high] > UNIFORM else low
    reason = f"below a plausible entropy of text ({ENTROPY} nats per token); give --loss-unit bits"
    if line == high:
        reason = f"above {UNIFORM:g} nats per token, so it looks like a perplexity or bits; leave runs that diverged "
        reason += "out with --max-loss, or give --loss-unit perplexity or bits"
    value = f"{table['loss'][line]:.4g} nats in line {table['line'][line]}"
    return [f"loss: {value} is {reason} to convert it to nats, or --loss-unit any to fit it as it is"]


def _scale(table: pd.DataFrame, header: dict[str, str]) -> list[str]:
    """Returns a problem if N, D and C cannot be parameters, tokens and FLOPs."""
    N, D, C = (table[name] for name in "NDC")
    shift = C / table["budget"] if "budget" in header else pd.Series(1.0, table.index)
    if (far := (shift < FAR_BUDGET[0]) | (shift > FAR_BUDGET[1])).any():
        row = far.idxmax()
        what = f"{header['budget']} (budget): {table['budget'][row]:.3g} in {lines_of(table['line'][far])}"
        return [
            f"{what} is not the compute of its run, C = {C[row]:.3g} FLOPs; give FLOPs, or --columns budget= to find "
            "the budgets from C"
        ]
    ratio = C / (6 * N * D)
    bad = (ratio < RATIO[0]) | (C / (6 * D * table[["N", "N_total"]].max(axis=1)) > RATIO[1])
    if not {"C", "D"} <= set(header):
        bad = (N < FEWEST) | (D < FEWEST) | (D > MOST * N)
    # An image is many tokens. A study counts its FLOPs itself, and long contexts or experts move them far from 6 N D.
    if header.get("D") == IMAGES or "flops_paper" in table or not bad.any():
        return []
    row = bad.idxmax()
    what = f"N = {N[row]:.3g}, D = {D[row]:.3g} and C = {C[row]:.3g} in {lines_of(table['line'][bad])}"
    return [
        f"{what} cannot be parameters, tokens and FLOPs: C / (6 N D) is {ratio[row]:.2g}, and {RATIO[0]:g} to "
        f"{RATIO[1]:g} is plausible; it looks like C in PF-days, N in millions or D in billions; convert the column, "
        "or leave C out with --columns C= (then C = 6 N D)"
    ]


def _one_per_point(
    table: pd.DataFrame, best_of: bool, point: Sequence[str], notes: list[str]
) -> tuple[pd.DataFrame, list[str]]:
    """Keeps the best run of each architecture, N, D and `point` with `best_of`; else refuses runs that differ."""
    ends = table
    if curves_of(table) is not None:  # records of one run are not repeats; runs are compared by their last one
        ends = ends_of(table)
    keys = [ends["architecture"], *(np.log10(ends[name]).round(4) for name in "ND")]
    keys += [ends[name].astype(str) for name in (point if best_of else POINT) if name in ends]
    same = ends.groupby(keys, sort=False)["loss"]
    if best_of:
        best = ends.loc[same.idxmin()]
        if len(ends) > len(best):
            notes.append(f"{_left_out(len(ends) - len(best))}: a lower loss at the same architecture, N and D")
        if ends is table:
            return table.loc[sorted(best.index)], []
        kept = pd.MultiIndex.from_frame(table[["architecture", "run"]]).isin(
            pd.MultiIndex.from_frame(best[["architecture", "run"]])
        )
        return table[kept], []
    spread = same.transform("max") / same.transform("min") - 1
    bad, why = spread > REPEATS, "more than repeats do"
    if "seed" in ends:  # runs of different seeds are repeats, however much they differ
        seeds = pd.to_numeric(ends["seed"], errors="coerce").groupby(keys, sort=False)
        bad &= seeds.transform("nunique") < seeds.transform("size")
    if "learning_rate" in ends:
        rates = pd.to_numeric(ends["learning_rate"], errors="coerce")
        swept = (rates.groupby(keys, sort=False).transform("nunique") > 1) & (spread > SWEPT)
        bad, why = (swept, "and learning_rate differs") if swept.any() else (bad, why)
    if not bad.any():
        means = same.mean().groupby(level=[0, 1, 2], sort=False)  # repeats of one point tell nothing about the points
        apart = (means.max() / means.min()).max() - 1
        if apart > REPEATS and len(keys) > 3 and not point:
            how = "--best-of keeps the lowest, and --law batch or data-constrained compares them"
            notes.append(f"runs at one N and D that differ in {' or '.join(POINT)} differ by up to {apart:.1%}; {how}")
        return table, []
    groups = [rows for _, rows in ends[bad].groupby([key[bad] for key in keys], sort=False)]
    first = groups[0]
    where = f"{lines_of(first['line'])}: losses {first['loss'].min():.4g} to {first['loss'].max():.4g}"
    more = f", and so at {len(groups) - 1} more" if len(groups) > 1 else ""
    fix = (
        "give --best-of to keep the lowest after a sweep of settings; for different data or losses, name the column "
        "that tells them apart with --columns architecture=COLUMN, or leave rows out with --exclude COLUMN=VALUE"
    )
    return table, [f"{where} at one N and D differ by {spread[first.index[0]]:.1%}, {why}{more}; {fix}"]


def _thin(table: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Returns about `KEPT` rows of a table with more than `LARGE`: records of each run, evenly spaced in C."""
    if len(table) <= LARGE:
        return table
    keys = ["architecture", "run"] if curves_of(table) is not None else ["architecture"]
    ordered = table.sort_values([*keys, "C"] if "run" in keys else [*keys, "N", "D"], kind="stable")
    groups = ordered.groupby(keys, sort=False)
    place, size = groups.cumcount(), groups["line"].transform("size")
    each = np.minimum(size, max(8, KEPT // groups.ngroups))
    kept = (place + 1) * each // size > place * each // size  # the last of each group is kept
    notes.append(f"{len(table):,} rows: {int(kept.sum()):,} of them, evenly spaced, are fitted")
    return ordered[kept].sort_index()


def _left_out(rows: int) -> str:
    return f"{count_of(int(rows), 'row')} left out"


def _where(table: pd.DataFrame, rows: pd.Series) -> str:
    """Returns the lines of some rows; their number if the table is not that of a file."""
    return lines_of(table["line"][rows]) if "line" in table else count_of(int(rows.sum()), "row")
