"""Ops without causality: one scan of additive attention against two scans of gated attention, and MD-TPE's two forms.

    python benchmarks/vision_ops.py --csv                                  on a CPU: 6 heads of 64, float32, one thread
    python benchmarks/vision_ops.py --csv --tokens 196 256 1024 4096 16384 --rows 65536      on a GPU, bfloat16

`one scan` is `additive_attention(causal=False)`, which sees every token in one pass. LRPE also rotates keys, by the
token's index, and MD-LRPE by its row and column (positions [1, T, 2]). `two scans` is `gated_linear_attention` through
`both_ways`: directions as extra rows, outputs added. `rotation` is the rotation alone, by row and column. `tpe` is the
position encoding of the whole width on the same grid, `tpe, product` with Toeplitz matrices of whole axes by PyTorch,
`tpe, modal` as a recurrence (`linnet.ops.modal.grid`).

Before anything is timed, every op but the two scans is compared with float64, gradients included, in the dtype that is
timed and for all numbers of tokens, so also for a ragged last chunk (196 = 3 x 64 + 4). Calls take turns; medians, on
one thread of a CPU those of its own seconds. On a GPU a call is timed twice: launched by the host, and as a CUDA graph
(columns `graph_*`), as `run.graph` and compiled steps run it; below 2 ms the host's launches can take longer than the
kernels. `--csv` puts the rows into benchmarks/results/vision_ops[-<gpu>].csv.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import timing
import torch
from torch import Tensor

from linnet.layers.positions import Grid
from linnet.ops import modal_grid_convolution
from linnet.ops.additive import additive_attention
from linnet.ops.gated import gated_linear_attention
from linnet.ops.modal.grid import modal_form, product_form
from linnet.ops.rotation import rotate
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
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    check(device, dtype, options)
    columns = ["forward_ms", "both_ms", *(("graph_forward_ms", "graph_both_ms") if device.type == "cuda" else ())]
    heads = "".join(f"{column.removesuffix('_ms').replace('_', ' '):>15}" for column in columns)
    print(f"{'tokens':>7}{'batch':>6}  {'op':<24}{heads}  (ms, and how many times faster than two scans)")
    for tokens in options.tokens:
        rows = measure(tokens, max(1, options.rows // tokens), device, dtype, options)
        slow = next(row for row in rows if row["op"] == "two scans")
        for row in rows:
            told = "".join(f"{row[key]:>8.3f}{slow[key] / row[key]:>6.2f}x" for key in columns)
            print(f"{tokens:>7}{row['batch']:>6}  {row['op']:<24}{told}", flush=True)
            if options.csv:
                timing.update(timing.RESULTS / name, [row | constants], KEYS)


def make(tokens: int, batch: int, device: torch.device, dtype: torch.dtype, options: argparse.Namespace):
    """Returns functions of the arguments, the arguments, and those with gradients, by the name of the op."""
    side = int(tokens**0.5)
    grid = Grid((side, tokens // side) if tokens % side == 0 else (1, tokens))
    positions, heads, width = grid.positions(device), options.heads, options.width
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int, to: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, to).requires_grad_()

    q, k, v = (normal(batch, tokens, heads, width) for _ in range(3))
    gate = torch.nn.functional.logsigmoid(normal(batch, tokens, heads, width, to=torch.float32).detach() + 3)
    theta = normal(heads, width, to=torch.float32)
    filters = (len(grid.sides), 2, heads * width, 32)
    x, weight = normal(batch, *grid.sides, heads * width), normal(*filters, to=torch.float32)
    decay = (-normal(*filters, to=torch.float32).detach().exp() / 5).requires_grad_()

    def two(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return both_ways(lambda *x, cu_seqlens=None: gated_linear_attention(*x)[0], q, k, v, gate)

    def attend(q: Tensor, k: Tensor, v: Tensor, theta: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return additive_attention(q, k, v, theta=theta, positions=positions, causal=False)[0]

    def modal(x: Tensor, decay: Tensor, weight: Tensor) -> Tensor:
        return sum(modal_form(x, decay, weight, axis) for axis in range(len(grid.sides)))

    def product(x: Tensor, decay: Tensor, weight: Tensor) -> Tensor:
        return product_form(x, decay, weight, list(range(len(grid.sides))))

    ops: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "two scans": (two, (q, k, v, gate.requires_grad_())),
        "one scan": (attend, (q, k, v)),
        "one scan, LRPE": (attend, (q, k, v, theta)),
        "one scan, MD-LRPE": (lambda *given: attend(*given, positions), (q, k, v, theta)),
        "rotation": (lambda x, theta: rotate(x, positions, theta, doubling=True), (q, theta)),
        "tpe": (modal_grid_convolution, (x, decay, weight)),
        "tpe, modal": (modal, (x, decay, weight)),
    }
    if max(grid.sides) <= 256:
        ops["tpe, product"] = (product, (x, decay, weight))
    return ops


def check(device: torch.device, dtype: torch.dtype, options: argparse.Namespace) -> None:
    """Ends the program if an op or its gradients are not those in float64."""
    for tokens in options.tokens:
        for name, (op, given) in make(tokens, 1, device, dtype, options).items():
            if name == "two scans":
                continue
            found, wanted = (differentiate(op, given), differentiate(op, [x.double() for x in given]))
            errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
            print(f"{tokens:>7}  {name:<20} against float64: " + " ".join(f"{error:.1e}" for error in errors))
            if not max(errors) < {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]:
                sys.exit(f"{name} is wrong on this machine; nothing was timed")


def differentiate(op: Callable[..., Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Returns the result of an op and the gradients of a fixed function of it."""
    given = [x.detach().requires_grad_() for x in given]
    y = op(*given)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
    return [y, *torch.autograd.grad((y * weight).sum(), given)]


def measure(tokens: int, batch: int, device: torch.device, dtype: torch.dtype, options: argparse.Namespace):
    ops = make(tokens, batch, device, dtype, options)
    times: dict[tuple[str, bool], list[float]] = {(name, both): [] for name in ops for both in (False, True)}
    for turn in range(options.repeats + 1):
        for (name, both), found in times.items():
            op, given = ops[name]
            seconds = time_once(partial(call, op, given, both), device)
            if turn:
                found.append(seconds)
    graphs = {
        (name, both): time_graph(partial(call, *ops[name], both), options.repeats)
        for name, both in (times if device.type == "cuda" else ())
    }
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
        | {
            f"graph_{'both' if both else 'forward'}_ms": round(1e3 * seconds, 4)
            for (op, both), seconds in graphs.items()
            if op == name
        }
        for name in ops
    ]


def call(op: Callable[..., Tensor], given: Sequence[Tensor], both: bool) -> None:
    """Runs a forward pass, or a forward and a backward pass in this thread, where a capture sees it."""
    with torch.set_grad_enabled(both), torch.autograd.set_multithreading_enabled(False):
        o = op(*given)
        if both:
            torch.autograd.grad(o, given, o.detach())


def time_once(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of a call.

    On a GPU between two events of its stream; on one thread of a CPU its own seconds, whatever else the machine does.
    """
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    run()
    return clock() - began


def time_graph(run: Callable[[], None], repeats: int) -> float:
    """Median seconds of a call as a CUDA graph, in ten replays after one another."""
    aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    with torch.cuda.graph(graph):
        run()

    def replay() -> None:
        for _ in range(10):
            graph.replay()

    times = [time_once(replay, torch.device("cuda")) / 10 for _ in range(repeats + 1)]
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
