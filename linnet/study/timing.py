"""Estimates how long a plan takes, from a few timed steps of a small and a larger model of each architecture.

The time of a step is modelled as a fixed cost (Python, kernel launches) plus a cost proportional to its FLOPs. Both
costs differ between architectures, so each architecture has its own line.
"""

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from linnet.models import build, kind_of
from linnet.study.executors import worker_threads
from linnet.study.ladder import Plan, PlannedRun
from linnet.train.device import choose, threads, use_threads
from linnet.train.objectives import find_objective

T = TypeVar("T")
TIMED_STEPS = 2
LONG = 0.3  # seconds on a CPU after which the first step, which is slower by little, is enough
PATIENCE = 2.0  # longest expected time in seconds of a step that is timed


StepCosts = dict[str, tuple[float, float]]
"""Architecture -> (seconds per step, seconds per FLOP)."""


def estimate(plan: Plan, progress: Callable[[str], None] | None = None) -> dict[str, float] | None:
    """Returns run name -> seconds, or None if this machine cannot time even the smallest model quickly.

    Args:
        progress: is called with the name of the architecture that is timed.
    """
    costs = step_costs(plan, progress)
    if costs is None:
        return None
    return {run.run: seconds_of(costs[run.architecture], run.steps, run.flops) for run in plan.all_runs}


def step_costs(plan: Plan, progress: Callable[[str], None] | None = None) -> StepCosts | None:
    """Returns the cost of a step of each architecture on a worker of this machine, or None as `estimate` does."""
    executor = plan.config.executor
    names = list(dict.fromkeys(run.architecture for run in plan.runs))
    if executor.throughput is not None:
        return {name: (0.0, 1 / executor.throughput) for name in names}
    most, chosen = (None, False) if executor.kind == "inline" else worker_threads(executor, plan.config.devices)
    costs: StepCosts = {}
    with use_threads(most):
        for number, name in enumerate(names, 1):
            if progress is not None:
                progress(f"timing a few steps of architecture {number} of {len(names)}")
            shapes = {run.flops / run.steps: run for run in plan.runs if run.architecture == name}
            line = fit_line(shapes, partial(_seconds_per_step, chosen=chosen))
            if line is None:
                return None
            costs[name] = line
    return costs


def seconds_of(cost: tuple[float, float], steps: int, flops: float) -> float:
    """Returns the seconds of a run from the cost of a step."""
    fixed, rate = cost
    return steps * fixed + flops * rate


def wall_seconds(seconds: Sequence[float], workers: int) -> float:
    """Returns the seconds that jobs of the given lengths take on `workers` workers if they start in this order."""
    free = [0.0] * max(1, workers)
    for length in seconds:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


def fit_line(shapes: Mapping[float, T], measure: Callable[[T], float]) -> tuple[float, float] | None:
    """Returns (seconds per step, seconds per FLOP) of the line through two timed steps.

    The two are the cheapest step and the most expensive one that is expected to take less than `PATIENCE`. Returns None
    if even the cheapest step takes too long.

    Args:
        shapes: FLOPs of a step -> what has such steps. measure: returns the seconds of such a step.
    """
    costs = sorted(shapes)
    speed = 2e9 if choose("auto").type == "cpu" else 1e13  # FLOP/s that every machine reaches
    if costs[0] / speed > 10 * PATIENCE:
        return None
    first = measure(shapes[costs[0]])
    worth = [cost for cost in costs[1:] if first * cost / costs[0] < PATIENCE]
    if not worth:
        return 0.0, first / costs[0]
    last = measure(shapes[worth[-1]])
    rate = max((last - first) / (worth[-1] - costs[0]), 0.0)
    return max(first - rate * costs[0], 0.0), max(rate, 0.0)


def _seconds_per_step(run: PlannedRun, chosen: bool) -> float:
    """Returns the seconds of the fastest of a few steps (forward, backward, AdamW) of a model on random data.

    Args:
        chosen: whether the user chose the number of CPU threads.
    """
    device, objective = choose("auto"), find_objective(run.train)
    tokens = objective.row_tokens(run.train) * run.batch_size // run.train.parts
    with nullcontext() if chosen else threads(device, run.train.model.d_model, tokens):
        return _fastest_step(run, device)


def _fastest_step(run: PlannedRun, device: torch.device) -> float:
    config: Any = run.train.model
    model = build(kind_of(config).name, config, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if run.seq_len is None:
        shape = (run.batch_size, config.channels, config.image_size, config.image_size)
        batch = (torch.rand(shape, device=device), torch.randint(config.classes, (run.batch_size,), device=device))
    else:
        tokens = torch.randint(config.vocab_size, (run.batch_size, run.seq_len), device=device)
        batch = (tokens, tokens)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, count = model.loss(*batch)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return fastest(step, device)


def fastest(step: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the fastest of a few steps; on a CPU, of the first one if it takes long.

    Several threads wait for each other: where another process takes a core for a moment, one step may take 20 times as
    long as the next. So a second step is timed with them.
    """
    times = []
    for _ in range(1 + TIMED_STEPS):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        if device.type == "cpu" and times[0] > LONG and len(times) >= min(torch.get_num_threads(), 2):
            break
    return min(times)
