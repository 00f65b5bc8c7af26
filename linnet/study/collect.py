"""Collects the run folders of a study into table.csv, which fits and reports read. Depends on the folder alone."""

import contextlib
import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import yaml

from linnet.config import ConfigError, load_json, refuse
from linnet.runs import RunFolder
from linnet.runs.files import csv_text, ends_whole, read_csv, write_atomic
from linnet.runs.record import BY_WEIGHTS, curve_rows

if TYPE_CHECKING:
    import pandas as pd


DESCRIBED = tuple(
    "params_active d_model num_layers attention_share layout seq_len batch_tokens learning_rate state_fixed "
    "state_dynamic seed domain".split()
)
"""Columns that follow from the configuration, in the order of the table. Those of `CONVENTIONS` follow from it too."""

CONVENTIONS = ("flops_causal", "flops_004")

TEXTS = ("layout", "domain")


def describe(run: RunFolder, flops: float | None = None) -> dict[str, Any]:
    """Returns `DESCRIBED` and `CONVENTIONS` of a run; a column that its configuration does not determine is absent.

    Args:
        run: the run folder.
        flops: its exact training FLOPs; `flops_causal` is their part that the causal mask does not hide, `flops_004`
            the count of paper 004.
    """
    try:
        config = run.config
    except (ConfigError, OSError, yaml.YAMLError):
        return {}
    columns = _plain(config)
    with contextlib.suppress(ConfigError, ImportError, ValueError):  # without torch, or a model that cannot be read
        columns |= _counted(run, config, flops)
    return columns


def complete(rows: list[dict[str, Any]], folder: Path) -> int:
    """Adds the missing columns of `describe` to rows of a table in place. Returns the number of rows that gained some.

    Args:
        rows: mappings with `path` (relative to `folder`) or `run` (a folder in `folder`/runs), and `flops`.
        folder: the study.
    """
    gained = 0
    for row in rows:
        missing = [name for name in (*DESCRIBED, *CONVENTIONS) if _absent(row.get(name))]
        path = folder / str(row["path"] if not _absent(row.get("path")) else f"runs/{row.get('run')}")
        if not missing or not (path / "config.yaml").is_file():
            continue
        flops: Any = row.get("flops", row.get("C"))
        columns = describe(RunFolder(path), None if _absent(flops) else float(flops))
        row.update({name: columns[name] for name in missing if name in columns})
        gained += any(name in columns for name in missing)
    return gained


def complete_table(table: "pd.DataFrame", folder: Path) -> "pd.DataFrame":
    """Returns a table of `linnet.study.collect.load_study` with the missing columns of `describe`."""
    import pandas as pd

    rows = table.to_dict("records")
    if not complete(rows, folder):
        return table
    whole = pd.DataFrame(rows, index=table.index)
    whole.attrs = table.attrs
    return whole


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns that config.yaml holds as they are."""
    model, optimizer, data = (_mapping(config.get(key)) for key in ("model", "optimizer", "data"))
    columns = {"d_model": model.get("d_model"), "layout": model.get("layout"), "seq_len": config.get("seq_len")}
    columns |= {"learning_rate": optimizer.get("learning_rate"), "seed": config.get("seed")}
    batch = config.get("batch_size")
    if isinstance(batch, int) and isinstance(columns["seq_len"], int):
        columns["batch_tokens"] = batch * columns["seq_len"]
    source = data.get("source")
    names = [source] if isinstance(source, str) else source if isinstance(source, list) else []
    if names:
        columns["domain"] = "+".join(PurePath(str(name)).stem or str(name) for name in names)
    return {name: value for name, value in columns.items() if isinstance(value, int | float | str)}


def _counted(run: RunFolder, config: Mapping[str, Any], flops: float | None) -> dict[str, Any]:
    """Returns the columns that need the model's layers."""
    if "model" not in config:
        return {}
    from linnet.models import active_parameters, attention_share, flops_004, flops_causal, flops_exact, state_numbers
    from linnet.runs.model import read_config

    model = read_config(run)
    columns: dict[str, Any] = {"num_layers": model.num_layers, "params_active": active_parameters(model)}
    columns["attention_share"] = attention_share(model)
    seq_len = config.get("seq_len")
    if isinstance(seq_len, int):
        columns["state_fixed"], columns["state_dynamic"] = state_numbers(model, seq_len)
        if flops is not None:
            sequences = flops / flops_exact(model, seq_len)
            columns["flops_causal"] = sequences * flops_causal(model, seq_len)
            columns["flops_004"] = sequences * flops_004(model, seq_len)
    return {name: value for name, value in columns.items() if value is not None}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _absent(value: Any) -> bool:
    return value is None or value == "" or value != value  # NaN


PLAN, TABLE, RUNS = "plan.json", "table.csv", "runs"

COLUMNS = (
    *"run architecture budget params_non_embedding params_total tokens flops flops_paper flops_causal loss".split(),
    *("bits_per_byte", "state_bytes", "unique_tokens", *DESCRIBED, "seconds", "status", "path"),
)
IMAGE_COLUMNS = {"tokens": "images", "bits_per_byte": "accuracy", "unique_tokens": "unique_images"}
"""Columns of a study of texts -> those that a study of images has in their place."""
_FROM_RESULT = ("tokens", "flops", "flops_paper", "loss", "bits_per_byte", "state_bytes", "unique_tokens", "seconds")


def collect(folder: str | Path) -> list[dict[str, Any]]:
    """Returns one row per started run of the plan, by architecture, budget and size, and writes table.csv atomically.

    `status` is `done`, `diverged`, `failed` (error.txt in the run folder has the reason) or `unfinished`. Only `done`
    rows always have a loss. `path` is relative to the study folder.

    Raises:
        ConfigError: `folder` is not a study folder, or a result file is damaged.
    """
    folder = Path(folder)
    rows, problems = [], []
    for planned in read_plan(folder):
        path = folder / RUNS / planned["run"]
        if not path.is_dir():
            continue
        row = dict.fromkeys(columns(planned.get("units", "tokens")))
        row |= {key: planned[key] for key in ("run", "architecture", "budget", "params_non_embedding", "params_total")}
        row["path"] = f"{RUNS}/{planned['run']}"
        run = RunFolder(path)
        if run.done:
            try:
                result = run.result()
            except ConfigError as error:
                problems += error.problems
                continue
            row |= {key: result.get(key) for key in columns(planned.get("units", "tokens"), _FROM_RESULT)}
            row["status"] = result["status"]
        else:
            row["status"] = "failed" if run.error() is not None else "unfinished"
        row |= {key: value for key, value in describe(run, row["flops"]).items() if key in row}
        rows.append(row)
    refuse(problems, str(folder))
    rows.sort(key=lambda row: (row["architecture"], row["budget"], row["params_non_embedding"], row["run"]))
    write_atomic(folder / TABLE, as_csv(rows))
    return rows


def by_weights(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns a note on mixers that paper 000's count takes by their weights alone, by the results of runs in a table.

    Args:
        rows: as in `complete`.
    """
    mixers: set[str] = set()
    for row in rows:
        path = folder / str(row["path"] if not _absent(row.get("path")) else f"{RUNS}/{row.get('run')}")
        with contextlib.suppress(ConfigError, OSError, TypeError):  # a run that is not done, or a damaged result
            mixers |= set(RunFolder(path).result().get(BY_WEIGHTS, ()))
    if not mixers:
        return None
    which = f"the mixer{'s' * (len(mixers) > 1)} {', '.join(sorted(mixers))}"
    return f"the count of paper 000 takes {which} by weights alone, for lack of a flops_paper"


def renew(folder: str | Path) -> list[str]:
    """Writes table.csv of a study again if it is cut off, or if runs of the plan have ended since.

    They have while the study still runs, or if it was killed.

    Returns the problem if it cannot be written, else nothing.
    """
    folder = Path(folder)
    try:
        ended = {planned["run"] for planned in read_plan(folder) if RunFolder(folder / RUNS / planned["run"]).done}
    except (ConfigError, KeyError, TypeError):
        return []  # not a study folder, or one that was moved without its plan
    table = folder / TABLE
    text = table.read_text(encoding="utf-8", errors="replace") if table.is_file() else ""
    rows = csv.DictReader(text.splitlines())
    known = {row.get("run") for row in rows if row.get("status") not in ("unfinished", "failed")}
    if not (lacking := ended - known) and ends_whole(text):
        return []
    try:
        collect(folder)
    except (ConfigError, OSError) as error:
        reason = "; ".join(error.problems) if isinstance(error, ConfigError) else error.strerror
        what = f"lacks {len(lacking)} of {len(ended)} ended runs" if lacking else "may be cut off"
        return [f"{TABLE} {what} and cannot be written again: {reason}"]
    return []


def read_table(path: Path, command: str) -> list[dict[str, str]]:
    """Returns the rows of a table that a command wrote. Raises ConfigError if the file is damaged or cut off."""
    try:
        return list(read_csv(path))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError([f"{path}: {error}; run {command} again, which writes it anew"], "study") from None


def columns(units: str, names: Sequence[str] = COLUMNS) -> list[str]:
    """Returns the columns of a study whose data are counted in `units`, in place of those of texts."""
    return [IMAGE_COLUMNS.get(name, name) for name in names] if units == "images" else list(names)


def read_plan(folder: Path) -> list[dict[str, Any]]:
    """Returns the planned runs from plan.json. Raises ConfigError if the file is missing or damaged."""
    return _read_plan(folder)[0]


def read_rate_runs(folder: Path) -> list[dict[str, Any]]:
    """Returns the runs of `rate_sensitivity` from plan.json, [] if it has none. Raises ConfigError as `read_plan`."""
    return _read_plan(folder)[1]


def _read_plan(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        plan = load_json(folder / PLAN)
        lists = plan["runs"], plan.get("sensitivity", [])
        if not all(isinstance(rows, list) and all(isinstance(row, dict) for row in rows) for rows in lists):
            raise TypeError("its runs are not a list of mappings")
        return lists
    except FileNotFoundError:
        raise ConfigError([f"{folder}: not a study folder (it has no {PLAN}); run linnet study first"]) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{folder / PLAN}: is damaged ({error}); delete it and run linnet study again"]) from None


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Returns rows as CSV text in full precision. Values that are None or not finite become empty cells."""
    finite = [{k: "" if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows]
    return csv_text(rows[0] if rows else COLUMNS, finite)


# Reads a study folder as the table and the training curves that `linnet.laws.fit` fits.


def load_study(
    path: str | Path,
    columns: dict[str, str] | None = None,
    *,
    exclude: Sequence[str] = (),
    best_of: bool = False,
    loss_unit: str | None = None,
    keep: "Callable[[pd.DataFrame], tuple[pd.DataFrame, list[str]]] | None" = None,
    point: Sequence[str] = (),
) -> "tuple[pd.DataFrame, pd.DataFrame | None, list[str]]":
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
    import pandas as pd

    from linnet.laws.fit.table import load_table

    path = Path(path)
    stale = renew(path)
    if not (path / "table.csv").is_file():
        known = path.is_dir()
        what = "holds no table.csv; run `linnet study` to write it" if known else "there is no such file or folder"
        fix = ", or give a CSV" if known else "; give the folder of a study, or a CSV or JSONL file"
        raise ConfigError([f"{path}: {what}{fix}"], "study")
    table, notes = load_table(
        path / "table.csv", columns, exclude=exclude, best_of=best_of, loss_unit=loss_unit, keep=keep, point=point
    )
    notes = [*stale, *notes]
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
    if note := by_weights(path, table.to_dict("records")):
        notes.append(note)
    return table, pd.concat(parts, ignore_index=True) if parts else None, notes


def _records(path: Path) -> tuple[list[dict], int]:
    """Returns the points of one run's training curve with finite numbers, and the number of unreadable lines."""
    if not path.is_file():
        return [], 0
    rows, records, bad = [], [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
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
                "learning_rate": float(row.get("learning_rate", math.nan)),
            }
        except (KeyError, TypeError):
            continue
        except ValueError:
            bad += 1
            continue
        if all(math.isfinite(values[name]) and values[name] > 0 for name in ("D", "C", "loss")):
            records.append(values)
    return records, bad
