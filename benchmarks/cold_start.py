"""Seconds until the first forward and backward of each op are done, in a fresh process with an empty compile cache.

    python benchmarks/cold_start.py --csv

The clock runs from the first call to the gradients; Python, PyTorch and the GPU's context are there before (their
seconds are in `start_s`). `second_s` is the same call again. Of a peer only what is in the cache differs: its tuning is
part of its first call. `--csv` writes benchmarks/results/cold_start-<gpu>.csv.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

LENGTH = 4096
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", help="default: all of ours")
    parser.add_argument("--limit", type=int, default=300, help="seconds an op may take")
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.child)))
        return

    import timing

    constants = timing.constants(f"python benchmarks/cold_start.py {shlex.join(sys.argv[1:])}")
    print(f"{'op':<28}{'start s':>9}{'first s':>9}{'second s':>10}")
    for op in options.ops or [name for name in cases() if not name.startswith("fla")]:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {name: os.path.join(folder, name) for name in CACHES}
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--child", op],
                    env=environment, capture_output=True, text=True, timeout=options.limit,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                print(f"{op:<28} more than {options.limit} s", flush=True)
                continue
        if done.returncode:
            print(f"{op:<28} {done.stderr.strip().splitlines()[-1][:160]}", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        print(f"{op:<28}{row['start_s']:>9.1f}{row['first_s']:>9.1f}{row['second_s']:>10.4f}", flush=True)
        if options.csv:
            path = timing.RESULTS / f"cold_start-{timing.short_name(constants['gpu'])}.csv"
            timing.update(path, [{"op": op, "length": LENGTH} | row | constants], ["op", "length"])


def cases() -> dict[str, Callable]:
    """What is timed, by name: functions that give a case of groups.py."""
    import groups
    from cases import Shape

    def take(group: Iterator, op: str):
        return next(case for case in group if case.op == op)

    at = Shape.of(LENGTH)
    return {
        "lightning": lambda: groups.lightning(at),
        "gated": lambda: groups.gated(at),
        "gated, HGRN2": lambda: groups.hgrn2(at),
        "additive": lambda: groups.additive(at),
        "additive with LRPE": lambda: groups.additive(at, rotated=True),
        "additive, not causal": lambda: groups.additive(at, causal=False),
        "gated_delta_rule": lambda: groups.delta(at, at.heads),
        "gated_delta_rule, KDA": lambda: groups.delta(at, at.heads, "kda"),
        "gated_delta_rule, GDN-2": lambda: groups.delta(at, at.heads, "gdn2"),
        "diagonal_scan": lambda: groups.scan(LENGTH),
        "diagonal_scan, complex": lambda: groups.scan(LENGTH, theta=True),
        "modal_convolution": lambda: groups.modal(LENGTH),
        "srmsnorm": lambda: next(groups.srmsnorm(LENGTH, 1024, "")),
        "linear_cross_entropy": lambda: next(groups.cross_entropy_group()),
        "fla simple_gla": lambda: take(groups.lightning_peers_group(), "fla simple_gla"),
        "fla gla": lambda: take(groups.gated_peers_group(), "fla gla"),
    }


def run(op: str) -> dict[str, float]:
    began = time.perf_counter()
    import torch

    torch.randn(8, device="cuda").sum().item()
    case = cases()[op]()
    inputs = [x.requires_grad_() for x in case.inputs()]
    gradient = None
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    for _ in range(2):
        o = case.run(*inputs)
        gradient = torch.ones_like(o) if gradient is None else gradient
        torch.autograd.grad(o, inputs, gradient)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    start, first, second = (round(b - a, 4) for a, b in zip([began, *times], times, strict=False))
    return {"start_s": start, "first_s": first, "second_s": second}


if __name__ == "__main__":
    main()
