"""Collects the run folders of a study into table.csv, which fits and reports read. Depends on the folder alone."""

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linnet.config import ConfigError, refuse
from linnet.runs import RunFolder
from linnet.runs.files import write_atomic
from linnet.study.describe import DESCRIBED, describe

PLAN, TABLE, RUNS = "plan.json", "table.csv", "runs"

COLUMNS = (
    "run",
    "architecture",
    "budget",
    "params_non_embedding",
    "params_total",
    "tokens",
    "flops",
    "flops_paper",
    "flops_causal",
    "loss",
    "bits_per_byte",
    "state_bytes",
    "unique_tokens",
    *DESCRIBED,
    "seconds",
    "status",
    "path",
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
        row |= describe(run, row["flops"])
        rows.append(row)
    refuse(problems, str(folder))
    rows.sort(key=lambda row: (row["architecture"], row["budget"], row["params_non_embedding"], row["run"]))
    write_atomic(folder / TABLE, as_csv(rows))
    return rows


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
        found = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        return found["runs"], found.get("sensitivity", [])
    except FileNotFoundError:
        raise ConfigError([f"{folder}: not a study folder (it has no {PLAN}); run linnet study first"]) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"{folder / PLAN}: is damaged ({error}); delete it and run linnet study again"]) from None


def as_csv(rows: list[dict[str, Any]]) -> str:
    """Returns rows as CSV text in full precision. Values that are None or not finite become empty cells."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        finite = {key: "" if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        writer.writerow(finite)
    return text.getvalue()
