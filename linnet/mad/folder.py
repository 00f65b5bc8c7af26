"""A folder of MAD runs: its plan, its lock, and the table of its results.

<folder>/
    plan.json     budget, specification, the models, and the names of the run folders
    runs/         one folder per run: config.yaml, metrics.jsonl, result.json
    mad.csv       all results, a pure function of plan.json and the run folders
    scores.csv    the scores of the architectures
"""

import contextlib
import csv
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from linnet import trust
from linnet.config import ConfigError, refuse
from linnet.layers.base import load_plugin
from linnet.mad.architectures import recorded
from linnet.mad.results import PLAN, RUNS, TABLE, TEXTS, parse_result, read_layers, read_plan
from linnet.models import ModelConfig
from linnet.runs import RunFolder
from linnet.runs.files import FULL, csv_text, write_atomic

_OPTIONS = {
    "spare_decay": "--no-weight-decay",
    "layers": "--layers",
    "training": "--training",
}  # keys of plan.json, which never change -> current options

_SORTED = ("architecture", "setting", "learning_rate", "weight_decay", "seed")
COLUMNS = (
    "architecture task setting varied learning_rate weight_decay seed accuracy macro_batch validation_accuracy loss "
    "validation_loss train_loss epoch parameters state_size status diverged_at steps budget spec decay loads run layers"
).split()


def collect(folder: Path) -> list[dict[str, Any]]:
    """Writes the results of all run folders to mad.csv, atomically, and returns them by architecture and setting."""
    rows, layers = [], read_layers(folder)
    for path in sorted((folder / RUNS).glob("*/result.json")):
        row = (run := RunFolder(path.parent)).result()
        if missing := [key for key in _SORTED if key not in row]:
            raise run.damaged_result(f"it has no {', '.join(missing)}")
        rows.append(row | {"run": path.parent.name, "layers": " ".join(layers.get(row["architecture"], ()))})
    rows.sort(key=lambda row: [row[key] for key in _SORTED])
    cells = (row | {"loads": json.dumps(row["loads"]) if row.get("loads") else ""} for row in rows)
    write_atomic(folder / TABLE, csv_text(COLUMNS, cells))
    return rows


def read_known(
    folder: str | Path, about: Mapping[str, Any], models: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Returns the results of another folder by the names of their run folders, which have digests of configurations.

    Results of a model that is another one there, or whose mixer file is another, are left out. about, models: of the
    folder that takes the results, as in `check_plan`.

    Raises:
        ConfigError: lists all problems: not a folder of `linnet mad run`, other settings (its precision for example),
            or rows that are not results.
    """
    table, plan = Path(folder) / TABLE, read_plan(Path(folder))
    if not plan or not table.is_file():
        raise ConfigError([f"known {folder}: has no {TABLE} and {PLAN}; give a folder of linnet mad run"], "MAD")
    problems = [
        f"known {folder}: its runs have {_OPTIONS.get(key, key)} {plan.get(key)}, not {value}; leave it out"
        for key, value in about.items()
        if key != "budget" and plan.get(key) != value
    ]
    known, there = {}, plan.get("models", {})
    same = {name for name, one in models.items() if name in there and not any(_changes(there[name], one))}
    try:
        with open(table, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                problems.append(f"known {table}: has no column {', '.join(missing)}; linnet mad run writes it")
            for line, row in enumerate(() if missing else reader, start=2):
                try:
                    values = {key: _value(key, row[key]) for key in COLUMNS[:-2]}
                    parse_result(values)
                    if row["architecture"] in same:
                        known[row["run"]] = values | {"known": str(folder)}
                except (TypeError, ValueError) as error:
                    problems.append(f"known {table}, line {line}: {error}; delete the line")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"known {table}: cannot be read ({error})")
    refuse(problems, "MAD", most=8)
    return known


def _value(key: str, text: str | None) -> Any:
    """A cell as a result.json has it."""
    if text is None:
        raise ValueError("it is cut off")
    return text if key in TEXTS else json.loads(text) if text else None


def adopt(root: Path, configs: Iterable[Mapping[str, Any]], known: Mapping[str, Mapping[str, Any]], budget: str) -> int:
    """Gives runs without a result the one that is known of them. Returns how many got one."""
    count = 0
    for config in configs:
        name = RunFolder.name(config)
        if name in known and not RunFolder(root / name).done:
            run = RunFolder.create(root, config)
            run.write_result({**known[name], "budget": budget})
            shutil.rmtree(run.checkpoint_folder, ignore_errors=True)
            count += 1
    return count


def designs(architectures: Mapping[str, ModelConfig], plugins: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the record of each architecture: its model, and the digests of the files of its mixers."""
    sums = {load_plugin(one): trust.plugin_digest(one)[:12] for one in plugins}
    return {
        name: recorded(model)
        | {"mixer file": {spec.mixer: sums[spec.mixer] for spec in model.blocks if spec.mixer in sums}}
        for name, model in architectures.items()
    }


def check_plan(folder: Path, about: Mapping[str, Any], models: Mapping[str, dict[str, Any]]) -> None:
    """Checks that a folder contains only runs of this budget and specification, and one model per name.

    Args:
        about: budget and other settings that all runs of the folder share. models: as `designs` returns them.

    Raises:
        ConfigError: the folder contains other runs, or is a file; lists all problems.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError([f"{folder}: is a file; choose another --out"], "MAD")
    before = read_plan(folder)
    if before:  # folders of earlier releases do not say these
        before = {"layers": "paper", "training": before.get("spec", "paper")} | before
    problems = [
        f"{folder}: has runs with {_OPTIONS.get(key, key)} {before[key]}, not {value}; give another --out"
        for key, value in about.items()
        if before.get(key, value) != value
    ]
    known = before.get("models", {})
    changed = {name: ", ".join(_changes(known[name], one)) for name, one in models.items() if name in known}
    if any(changed.values()):
        begun = _begun(folder)
        problems += [
            f"{folder}: has runs of another model named {name} ({what}); give another --out"
            for name, what in changed.items()
            if what and name in begun
        ]
    refuse(problems, "MAD")


def write_plan(
    folder: Path, about: Mapping[str, Any], models: Mapping[str, dict[str, Any]], runs: Sequence[str]
) -> None:
    """Adds models and the names of runs to the plan of a folder."""
    before = read_plan(folder)
    whole = dict(about) | {"models": before.get("models", {}) | models}
    whole["runs"] = list(dict.fromkeys([*before.get("runs", []), *runs]))
    write_atomic(folder / PLAN, json.dumps(whole, indent=1) + "\n")


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Creates the folder and locks it, so that two processes do not train the same runs."""
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ConfigError([f"{folder}: cannot be created ({error.strerror}); choose another --out"], "MAD") from None
    with RunFolder(folder).alone("linnet mad run", "MAD"):
        yield


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*old, *new]):
        one, two = old.get(key), new.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            yield from _changes(one, two, f"{at}{key}.")
        elif one != two:
            yield f"{at}{key} was {one!r} and is {two!r}"


def _begun(folder: Path) -> set[str]:
    """Returns the architectures with a result or a checkpoint."""
    every = [RunFolder(path) for path in (folder / RUNS).glob("*") if path.is_dir()]
    return {run.config["architecture"] for run in every if run.done or run.checkpoints()}
