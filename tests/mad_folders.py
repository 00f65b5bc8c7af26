"""MAD folders as `linnet mad run` leaves them: trained in this process, or with accuracies from a few rules.

Those from rules are made for tests: a level for each architecture and task, less at harder settings, plus a little
noise that depends on the run alone. They say nothing about any architecture.
"""

import csv
import json
import math
import random
from pathlib import Path

from linnet.mad.run import MadResult, prepare, train
from linnet.mad.settings import plan
from linnet.study.executors import ExecutorConfig

COLUMNS = (
    "architecture task setting varied learning_rate weight_decay seed accuracy macro_batch validation_accuracy loss "
    "parameters state_size status budget spec epoch loads"
).split()
LEVELS = {
    "mad-attention-swiglu": 0.80,
    "mad-hyena-swiglu": 0.62,
    "mad-hyena-moe": 0.64,
    "mad-hyena-attention-swiglu": 0.75,
    "mad-hyena-attention-moe": 0.78,
    "mad-mh-hyena-swiglu": 0.66,
    "mad-mh-hyena-moe": 0.67,
    "mad-mh-hyena-attention-swiglu": 0.79,
    "mad-hyena-experts-swiglu": 0.60,
    "mad-mamba": 0.70,
    "mad-mamba-attention-swiglu": 0.82,
    "mad-gla-swiglu": 0.68,
}
TASK_SHIFTS = {"in_context_recall": 0.1, "fuzzy_recall": -0.3, "noisy_recall": 0.05, "compression": -0.2}


def train_mad(models, folder: Path, *, bundle=None, console=None, **options) -> MadResult:
    """Trains what is missing of the smoke budget in this process, on the CPU; `options` are those of `prepare`."""
    here = {"budget": "smoke", "device": "cpu", "executor": ExecutorConfig(kind="inline", retries=0)}
    return train(prepare(models, folder, **here | options), bundle=bundle, console=console)


def rows(architectures=LEVELS, budget="core", seeds=(0,), spec="paper", tasks=(), settings=()) -> list[dict]:
    """One row per run. `architectures`: name -> level, or names that are in `LEVELS`."""
    levels = architectures if isinstance(architectures, dict) else {name: LEVELS[name] for name in architectures}
    runs = plan(budget, tasks=tasks, settings=settings, spec=spec)
    harder: dict[str, int] = {}
    for run in runs:
        place = sum(name.startswith(f"{run.setting.task.name}/{run.setting.varied}") for name in harder)
        harder.setdefault(run.setting.name, place if run.setting.varied else 0)
    found = []
    for name, level in levels.items():
        for seed in seeds:
            for run in runs:
                noise = random.Random(f"{name} {run.name} {seed}")
                task = run.setting.task
                mean = level + TASK_SHIFTS.get(task.name, 0.0) - 0.06 * harder[run.setting.name]
                mean -= 0.15 * abs(math.log10(run.point.learning_rate / 5e-4)) + 0.1 * run.point.weight_decay
                test, validation = (min(1.0, max(0.0, mean + noise.gauss(0, 0.01))) for _ in range(2))
                found.append(
                    {
                        "architecture": name,
                        "task": task.name,
                        "setting": run.setting.name,
                        "varied": run.setting.varied,
                        "learning_rate": run.point.learning_rate,
                        "weight_decay": run.point.weight_decay,
                        "seed": seed,
                        "accuracy": test,
                        "macro_batch": 0.95 * test,
                        "validation_accuracy": validation,
                        "loss": 3 * (1 - test),
                        "parameters": 300_000 + 1000 * len(name) + 256 * task.num_tokens,
                        "state_size": 0 if name == "mad-attention-swiglu" else 2048 if "-attention" in name else 4096,
                        "status": "done",
                        "budget": budget,
                        "spec": spec,
                        "epoch": run.epochs,
                    }
                )
    return found


def write_rows(folder: Path, found: list[dict], columns=COLUMNS) -> Path:
    """Writes mad.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "mad.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: "" if isinstance(v, float) and math.isnan(v) else v for k, v in r.items()} for r in found)
    return folder


def write_mad(folder: Path, *arguments, **options) -> Path:
    """Writes mad.csv with `rows(...)`."""
    return write_rows(folder, rows(*arguments, **options))


def write_runs(folder: Path, found: list[dict]) -> Path:
    """Writes a run folder with a result.json for each row."""
    for number, row in enumerate(found):
        run = folder / "runs" / f"run-{number:05d}"
        run.mkdir(parents=True)
        values = {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in row.items()}
        (run / "result.json").write_text(json.dumps(values))
    return folder
