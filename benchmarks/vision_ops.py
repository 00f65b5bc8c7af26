"""Ops without causality: one scan of additive attention against two scans of gated attention.

    python benchmarks/vision_ops.py --csv                                  on a CPU: 6 heads of 64, float32, one thread
    python benchmarks/vision_ops.py --csv --tokens 196 256 1024 4096 16384 --rows 65536      on a GPU, bfloat16

`one scan` is `additive_attention(causal=False)`, which sees every token in one pass; with a grid it also rotates keys
by MD-LRPE (positions [T, 2]). `two scans` is `gated_linear_attention` through `both_ways`: directions as extra rows,
outputs added. Calls take turns, so that a busy machine slows all alike; medians. Before anything is timed, the one scan
is compared with its definition in float64. `--csv` puts the rows into benchmarks/results/vision_ops[-<gpu>].csv.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable

import timing
import torch
from torch import Tensor

from linnet.layers.positions.grid import Grid
from linnet.ops.additive import additive_attention
from linnet.ops.additive.reference import reference
from linnet.ops.gated import gated_linear_attention
from linnet.ops.scans import both_ways

KEYS = ("op", "tokens", "rows", "dtype", "threads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096, 16_384], help="tokens per image")
    parser.add_argument("--rows", type=int, default=4096, help="tokens per batch; at least one image")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=64, help="channels per head")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    constants = timing.constants(f"python benchmarks/vision_ops.py {shlex.join(sys.argv[1:])}")
    name = f"vision_ops-{timing.short_name(constants['gpu'])}.csv" if "gpu" in constants else "vision_ops.csv"
    check(device)
    print(f"{'tokens':>7}{'batch':>6}  {'op':<24}{'forward ms':>11}{'both ms':>9}{'forward x':>11}{'both x':>8}")
    for tokens in options.tokens:
        rows = measure(tokens, max(1, options.rows // tokens), device, options)
        slow = next(row for row in rows if row["op"] == "two scans")
        for row in rows:
            times = [slow[key] / row[key] for key in ("forward_ms", "both_ms")]
            print(
                f"{tokens:>7}{row['batch']:>6}  {row['op']:<24}{row['forward_ms']:>11.3f}{row['both_ms']:>9.3f}"
                f"{times[0]:>11.2f}{times[1]:>8.2f}",
                flush=True,
            )
            if options.csv:
                timing.update(timing.RESULTS / name, [row | constants], KEYS)


def check(device: torch.device) -> None:
    """Ends the program if the one scan is not what its definition says, on a ragged number of tokens."""
    torch.manual_seed(0)
    tokens = 7 * 28
    q, k, v = (torch.randn(2, tokens, 2, 32, dtype=torch.float64) for _ in range(3))
    theta, positions = torch.rand(2, 32, dtype=torch.float64), Grid((7, 28)).positions("cpu")
    expected = reference(q, k, v, theta, positions, None, 1.0, False, None)[0]
    given = (x.to(device, torch.float32) for x in (q, k, v))
    found = additive_attention(
        *given, theta=theta.to(device, torch.float32), positions=positions.to(device), causal=False
    )[0]
    error = ((found.double().cpu() - expected).abs().max() / expected.abs().max()).item()
    print(f"one scan against its definition in float64: largest relative error {error:.1e}")
    if not error < 1e-3:
        sys.exit("the one scan is wrong on this machine; nothing was timed")


def measure(tokens: int, batch: int, device: torch.device, options: argparse.Namespace) -> list[dict]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    side = int(tokens**0.5)
    sides = (side, side) if side * side == tokens else (1, tokens)
    positions = Grid(sides).positions(device)
    shape = (batch, tokens, options.heads, options.width)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    decay = torch.nn.functional.logsigmoid(torch.randn(shape, device=device) + 3).requires_grad_()
    theta = torch.rand(options.heads, options.width, device=device, requires_grad=True)

    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return both_ways(lambda *x, cu_seqlens=None: gated_linear_attention(*x)[0], q, k, v, decay)

    ops: dict[str, Callable[..., Tensor]] = {
        "two scans": two,
        "one scan": lambda q, k, v: additive_attention(q, k, v, causal=False)[0],
        "one scan, MD-LRPE": lambda q, k, v: additive_attention(
            q, k, v, theta=theta, positions=positions, causal=False
        )[0],
    }
    times: dict[tuple[str, bool], list[float]] = {(name, both): [] for name in ops for both in (False, True)}
    for turn in range(options.repeats + 1):
        for (name, both), found in times.items():
            seconds = time_once(lambda op=ops[name]: op(q, k, v), both, device)
            if turn:
                found.append(seconds)
    return [
        {
            "op": name,
            "tokens": tokens,
            "batch": batch,
            "rows": options.rows,
            "heads": options.heads,
            "width": options.width,
            "dtype": str(dtype).removeprefix("torch."),
            "threads": options.threads if device.type == "cpu" else "",
            "forward_ms": round(1e3 * statistics.median(times[name, False]), 4),
            "both_ms": round(1e3 * statistics.median(times[name, True]), 4),
        }
        for name in ops
    ]


def time_once(run: Callable[[], Tensor], backward: bool, device: torch.device) -> float:
    """Seconds of a forward pass, or of a forward and a backward pass."""
    with torch.set_grad_enabled(backward):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        o = run()
        if backward:
            o.sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
