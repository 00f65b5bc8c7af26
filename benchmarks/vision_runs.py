"""Runs of the vision benchmarks: trains what is not done yet, in order, and reads what is.

Every run is a run folder of `linnet train`, so a second call goes on where the first stopped.
"""

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linnet.config import ConfigError
from linnet.runs import RunFolder


@dataclass(frozen=True, eq=False)
class Plan:
    """One training.

    Attributes:
        experiment: the table that it belongs to. variant: its row. seed: seed of weights and order.
        values: configuration of `linnet train`, without the seed.
    """

    experiment: str
    variant: str
    seed: int
    values: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.experiment} {self.variant} seed {self.seed}"


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` with `changes`, mapping by mapping."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def execute(
    plans: Sequence[Plan], out: Path, cache: Path, workers: int = 1, minutes: float | None = None, threads: int = 1
) -> dict[Plan, RunFolder]:
    """Trains all plans that are not done, and returns the folders of those that are.

    Args:
        workers: trainings at the same time, each in a process of its own.
        minutes: start no training after so many minutes; None starts all.
        threads: threads of PyTorch per training.
    """
    began, found = time.monotonic(), {}
    waiting = list(plans)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future, Plan] = {}
        while waiting or running:
            late = minutes is not None and time.monotonic() - began > 60 * minutes
            while waiting and len(running) < workers and not late:
                plan = waiting.pop(0)
                running[pool.submit(_train, plan, out, cache, threads)] = plan
            if not running:
                break
            done, _ = wait(running, timeout=5, return_when=FIRST_COMPLETED)
            for future in done:
                plan = running.pop(future)
                try:
                    found[plan] = RunFolder(future.result())
                    print(f"{plan.label}: {_summary(found[plan])}", flush=True)
                except (ConfigError, RuntimeError) as error:
                    print(f"{plan.label}: {type(error).__name__}: {error}", flush=True)
    for plan in waiting:
        print(f"{plan.label}: no time left; run the same command again", flush=True)
    return found


def _train(plan: Plan, out: Path, cache: Path, threads: int) -> Path:
    import torch

    from linnet.train import train
    from linnet.train.objectives import read_training

    torch.set_num_threads(threads)
    config = read_training(plan.values | {"seed": plan.seed}, plan.label)
    return train(config, out, cache).path


def _summary(folder: RunFolder) -> str:
    result = folder.result()
    if result["loss"] is None:
        return f"{result['status']} at step {result['steps']}"
    accuracy = result.get("accuracy")
    shown = f"loss {result['loss']:.4f}"
    return shown if accuracy is None else f"{shown}, accuracy {accuracy:.2%}"
