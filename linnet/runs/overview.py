"""Finds run folders, describes each in one row, and removes them. Needs no torch and imports no plugin."""

import contextlib
import datetime
import fnmatch
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from linnet.config import ConfigError, digest, gather, nearest, parse_yaml, refuse
from linnet.runs.folder import RunFolder
from linnet.runs.record import last_rows

COLUMNS = (
    "run path status architecture params_non_embedding step steps tokens flops loss bits_per_byte train_loss seconds "
    "changed bytes"
).split()
"""Keys of every row of `describe`. `changed` is the time of the last change, `bytes` the size on the disk."""

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}
_CONDITION = re.compile(r"([\w.+-]+?)\s*(!=|<=|>=|=|<|>)\s*(.*)", re.DOTALL)
_WRITTEN = re.compile(
    r"config\.yaml|plugins|tokenizer\.json|metrics\.jsonl|progress|checkpoints|result(-\d+)?\.json|error\.txt|errors|"
    r"\.lock|evaluations|chat_template\.jinja|classes\.json|prompts\.json|tensorboard|wandb|bundle\.json|"
    r"pictures|report|samples|\..*\.tmp"
)


def find_runs(places: Iterable[str | Path]) -> list[RunFolder]:
    """Returns the runs in folders: each a run, a folder of runs, a study (or MAD folder), or a folder of studies.

    Model folders, which contain weights and no training, are left out.

    Raises:
        ConfigError: lists the places that do not exist or are files.
    """
    runs: dict[Path, RunFolder] = {}
    problems = []
    for place in map(Path, places):
        if not place.is_dir():
            reason = "is a file" if place.exists() else "there is no such folder"
            problems.append(f"{place}: {reason}; name a run or a folder of runs")
            continue
        inside = [place, *(path.parent for pattern in _PLACES for path in sorted(place.glob(pattern)))]
        for path in inside:
            run = RunFolder(path)
            if run.exists and not (path / "model.safetensors").exists():
                runs.setdefault(path.resolve(), run)
    refuse(problems, "runs")
    return list(runs.values())


_PLACES = ("*/config.yaml", "runs/*/config.yaml", "*/runs/*/config.yaml")


def describe(run: RunFolder) -> dict[str, Any]:
    """Returns one row about a run: the keys of `COLUMNS`, None where the folder does not tell.

    `status` is that of the result (`done`, `diverged`), or `running`, `failed`, `unfinished` or `damaged`.
    """
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {
        "run": run.path.resolve().name,
        "path": str(run.path),
        "bytes": size(run.path),
        "changed": _changed(run.path),
    }
    try:
        result = run.result() if run.done else {}
    except ConfigError:
        return row | {"status": "damaged"}
    if result:
        row |= {key: result[key] for key in COLUMNS if key in result and row[key] is None}  # `run` has another meaning
        return row | {"step": result.get("steps")}
    state = "running" if run.owner() is not None else "failed" if run.error() is not None else "unfinished"
    row["status"] = state
    with contextlib.suppress(ConfigError):
        config = run.config
        row |= {"architecture": config.get("architecture"), "steps": _steps(config)}
    for record in last_rows(run.path / "metrics.jsonl", 100):
        row |= {key: record[key] for key in ("step", "tokens", "flops", "seconds") if key in record}
        row |= {"train_loss": record["loss"]} if "loss" in record and "event" not in record else {}
        if "validation_loss" in record:
            row |= {"loss": record["validation_loss"], "bits_per_byte": record.get("validation_bits_per_byte")}
    return row


def value_of(run: RunFolder, row: Mapping[str, Any], key: str) -> Any:
    """Returns a value of a run: a column, a key of its result, or a key of its configuration with dots; else None."""
    if key in row:
        return row[key]
    value: Any = None
    with contextlib.suppress(ConfigError):
        if run.done and key in (result := run.result()):
            return result[key]
        value = run.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def select(
    runs: Sequence[RunFolder],
    where: Sequence[str] = (),
    sort: str = "changed",
    reverse: bool = False,
    columns: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Returns a row per run that meets all conditions, sorted.

    Args:
        where: conditions `KEY=VALUE`, `KEY!=VALUE`, `KEY<NUMBER` and so on; * and ? in VALUE are wildcards.
        sort: key to sort by; runs without it come last.
        reverse: largest first.
        columns: keys that are added to the rows.

    Raises:
        ConfigError: lists conditions that cannot be read and keys that no run has.
    """
    problems: list[str] = []
    conditions = []
    for text in where:
        with gather(problems):
            conditions.append(_condition(text))
    rows = [describe(run) for run in runs]
    wanted = list(dict.fromkeys([*(key for key, _ in conditions), sort, *columns]))
    for run, row in zip(runs, rows, strict=True):
        row |= {key: value_of(run, row, key) for key in wanted}
    for key in wanted:
        if key not in COLUMNS and rows and all(row[key] is None for row in rows):
            problems.append(f"{key}: no run has this key; {nearest(key, COLUMNS)}, or a key of config.yaml")
    refuse(problems, "runs")
    rows = [row for row in rows if all(holds(row[key]) for key, holds in conditions)]
    known = [row for row in rows if row[sort] is not None]
    known.sort(key=lambda row: _order(row[sort]), reverse=reverse)
    return known + [row for row in rows if row[sort] is None]


def refusals(path: Path) -> list[str]:
    """Returns why a folder must not be removed as a run; [] if it may be."""
    if path.is_symlink():
        return [f"{path}: is a link; name the folder that it leads to, {os.readlink(path)}"]
    try:
        run = RunFolder.open(path)
    except ConfigError as error:
        return list(error.problems)
    if not _is_run(run):
        return [f"{path}: is not a run folder (its config.yaml states no digest of a run); delete it by other means"]
    below = (file.parent for file in path.glob("**/config.yaml") if file.parent != path)  # wandb writes such a file too
    if inside := [folder for folder in below if _is_run(RunFolder(folder))]:
        return [f"{path}: contains other runs ({inside[0]}); remove these first"]
    if Path.cwd().is_relative_to(path.resolve()):
        return [f"{path}: is the folder that you are in; change to another one"]
    owners = {path: run.owner()}
    if path.resolve().parent.name == "runs":  # of a study, which may start any of its runs next
        owners[path.resolve().parents[1]] = RunFolder(path.resolve().parents[1]).owner()
    return [
        f"{place}: is in use (process {owner or 'unknown'}); wait for it or stop it"
        for place, owner in owners.items()
        if owner is not None
    ]


def foreign(path: Path) -> list[str]:
    """Returns the names in a run folder that Linnet did not write."""
    return sorted(child.name for child in path.iterdir() if not _WRITTEN.fullmatch(child.name))


def remove(path: Path) -> None:
    """Removes a run folder; links in it are removed, not followed. config.yaml goes last.

    So after a kill the folder is still a run, and the same call removes the rest.

    Raises:
        ConfigError: as `refusals`, or another process has begun to train the run.
    """
    refuse(refusals(path), "runs")
    with RunFolder(path).lock():
        last = ("", ".lock", "config.yaml")
        entries = sorted(os.scandir(path), key=lambda entry: last.index(entry.name) if entry.name in last else 0)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    path.rmdir()


def size(path: Path) -> int:
    """Returns the bytes of all files in a folder, without following links."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):  # removed in the meantime
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _is_run(run: RunFolder) -> bool:
    """Returns whether config.yaml is that of a run: it states its digest, or the folder's name ends with it."""
    with contextlib.suppress(ConfigError, ValueError, TypeError):
        return run.digest is not None or run.path.resolve().name.endswith(digest(run.config))
    return False


def _steps(config: Mapping[str, Any]) -> int | None:
    with contextlib.suppress(TypeError, ZeroDivisionError, KeyError):
        steps = config.get("steps") or config.get("epochs")
        steps = steps if type(steps) in (int, float) else None
        return steps or -(-config["tokens"] // (config["batch_size"] * config["seq_len"]))
    return None


def _changed(path: Path) -> str:
    files = [path / name for name in ("result.json", "metrics.jsonl", "config.yaml")]
    latest = max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)
    return datetime.datetime.fromtimestamp(latest).isoformat(" ", "seconds")


def _condition(text: str) -> tuple[str, Callable[[Any], bool]]:
    """Parses `KEY=VALUE` into the key and a function that says whether a value meets the condition."""
    match = _CONDITION.fullmatch(text.strip())
    if not match:
        raise ConfigError([f"--where {text!r}: write KEY=VALUE, KEY!=VALUE or KEY<NUMBER, such as status=done"], "runs")
    key, operator, value = match.groups()
    try:
        wanted = parse_yaml(value)
    except yaml.YAMLError:
        wanted = value
    if operator in _OPERATORS:
        if not isinstance(wanted, int | float) or isinstance(wanted, bool):
            raise ConfigError([f"--where {text!r}: {value!r} is not a number, which {operator} needs"], "runs")
        compare = _OPERATORS[operator]
        return key, lambda number: isinstance(number, int | float) and compare(number, wanted)

    def equal(setting: Any) -> bool:
        return setting == wanted or (setting is not None and fnmatch.fnmatchcase(str(setting), value))

    return key, equal if operator == "=" else lambda setting: not equal(setting)


def _order(value: Any) -> tuple[int, float, str]:
    """Sorts numbers before texts."""
    if isinstance(value, int | float):
        return 0, value, ""
    return 1, 0.0, str(value)
