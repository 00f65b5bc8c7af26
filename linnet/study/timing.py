"""How long a plan will take: a few steps of a small and a larger model are timed here, the rest is a straight line.

The time of a step is a fixed cost (Python, launches) and a cost in proportion to its FLOPs; both differ between
architectures, so each has its own line.
"""

import heapq
import time
from collections.abc import Sequence

import torch

from linnet.models import ModelConfig, build_model
from linnet.study.executors import worker_threads
from linnet.study.ladder import Plan, PlannedRun
from linnet.train.device import choose

TIMED_STEPS = 2
PATIENCE = 2.0  # seconds that timing one step may be expected to take


def estimate(plan: Plan) -> dict[str, float] | None:
    """Seconds of each run, by its name; None where not even the smallest model can be timed quickly on this machine."""
    executor = plan.config.executor
    if executor.throughput is not None:
        return {run.run: run.flops / executor.throughput for run in plan.runs}
    before = torch.get_num_threads()
    torch.set_num_threads(before if executor.kind == "inline" else worker_threads(executor))
    try:
        lines = {}
        for name in dict.fromkeys(run.architecture for run in plan.runs):
            lines[name] = _line([run for run in plan.runs if run.architecture == name])
            if lines[name] is None:
                return None
    finally:
        torch.set_num_threads(before)
    seconds = {}
    for run in plan.runs:
        fixed, rate = lines[run.architecture]
        seconds[run.run] = run.steps * fixed + run.flops * rate
    return seconds


def wall_seconds(seconds: Sequence[float], workers: int) -> float:
    """How long jobs of these lengths take on so many workers, started in this order."""
    free = [0.0] * max(1, workers)
    for length in seconds:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


def _line(runs: list[PlannedRun]) -> tuple[float, float] | None:
    """(seconds a step, seconds a FLOP) from the cheapest step and the dearest that does not take long."""
    shapes = {run.flops / run.steps: run for run in sorted(runs, key=lambda run: run.flops / run.steps)}
    costs = list(shapes)
    speed = 2e9 if choose("auto").type == "cpu" else 1e13  # FLOP/s that any machine reaches
    if costs[0] / speed > 10 * PATIENCE:
        return None
    first = _seconds_per_step(shapes[costs[0]])
    worth = [cost for cost in costs[1:] if first * cost / costs[0] < PATIENCE]
    if not worth:
        return 0.0, first / costs[0]
    last = _seconds_per_step(shapes[worth[-1]])
    rate = max((last - first) / (worth[-1] - costs[0]), 0.0)
    return max(first - rate * costs[0], 0.0), max(rate, 0.0)


def _seconds_per_step(run: PlannedRun) -> float:
    """The fastest of a few steps (forward, backward, AdamW) of a run's model, on random tokens."""
    device = choose("auto")
    config: ModelConfig = run.train.model
    model = build_model(config, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(config.vocab_size, (run.batch_size, run.seq_len), device=device)
    times = []
    for _ in range(1 + TIMED_STEPS):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, count = model.loss(tokens, tokens)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
