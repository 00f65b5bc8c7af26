"""Times linear attention on a CPU beside causal softmax attention: forward and backward, float32, medians.

    python benchmarks/cpu_attention.py --csv

Repeats are interleaved, so that a busy machine slows all contenders alike, and each timed call follows an untimed one
of its kind, so that none pays for memory that the one before gave back. Softmax is timed at the shortest length only
(its time grows with the square). The last line is JSON. `--csv` writes benchmarks/results/cpu_attention.csv.
"""

import argparse
import csv
import json
import statistics
import time
from pathlib import Path

import timing
import torch
from torch.nn.functional import scaled_dot_product_attention

from linnet.ops import gated_delta_rule, ssd
from linnet.ops.gated import gated_linear_attention
from linnet.ops.lightning import lightning_attention

RESULTS = Path(__file__).parent / "results" / "cpu_attention.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768], help="tokens per sequence, ascending")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="channels per head")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    contenders = {}
    for length in arguments.lengths:
        inputs = make_inputs(arguments.batch, length, arguments.heads, arguments.width)
        for name in RUNS:
            if name != "softmax" or length == arguments.lengths[0]:
                contenders[name, length] = (RUNS[name], inputs)

    times = {key: [] for key in contenders}
    for _ in range(arguments.repeats):
        for key, (run, inputs) in contenders.items():
            time_once(run, inputs)
            times[key].append(time_once(run, inputs))

    rows = []
    for (name, length), samples in times.items():
        forward, backward, total = (
            1e3 * statistics.median(x) for x in zip(*((f, b, f + b) for f, b in samples), strict=True)
        )
        rows.append(
            {
                "op": name,
                "length": length,
                "forward_ms": round(forward, 2),
                "backward_ms": round(backward, 2),
                "total_ms": round(total, 2),
                "tokens_per_second": round(arguments.batch * length / total * 1e3),
            }
        )
    totals = {(row["op"], row["length"]): row["total_ms"] for row in rows}
    first, last = arguments.lengths[0], arguments.lengths[-1]
    summary = {
        "torch": torch.__version__,
        "threads": arguments.threads,
        "shape": {"batch": arguments.batch, "heads": arguments.heads, "width": arguments.width},
        "repeats": arguments.repeats,
    }
    for name in LINEAR:
        summary[f"{name}_speedup_over_softmax_at_{first}"] = round(totals["softmax", first] / totals[name, first], 2)
        summary[f"{name}_time_{last}_over_{first}"] = round(totals[name, last] / totals[name, first], 2)

    print(f"{'op':<10}{'length':>8}{'forward ms':>12}{'backward ms':>13}{'total ms':>11}{'tokens/s':>12}")
    for row in rows:
        print(
            f"{row['op']:<10}{row['length']:>8}{row['forward_ms']:>12.1f}{row['backward_ms']:>13.1f}"
            f"{row['total_ms']:>11.1f}{row['tokens_per_second']:>12,}"
        )
    if arguments.csv:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], "threads", "torch", "commit"])
            writer.writeheader()
            made = {"threads": arguments.threads, "torch": torch.__version__, "commit": timing.commit()}
            writer.writerows(row | made for row in rows)
    print(json.dumps({**summary, "rows": rows}))


def make_inputs(batch: int, length: int, heads: int, width: int) -> dict[str, torch.Tensor]:
    q, k, v, do = (torch.randn(batch, length, heads, width) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    strengths = torch.rand(batch, length, heads)
    gates = torch.nn.functional.logsigmoid(torch.randn(batch, length, heads, width) + 3)
    slopes = -(2.0 ** (-8 / heads * torch.arange(1, heads + 1)))
    decays = gates[..., 0].clone()
    leaves = {"q": q, "k": k, "v": v, "gates": gates, "decays": decays, "strengths": strengths}
    for x in leaves.values():
        x.requires_grad_()
    return {**leaves, "do": do, "slopes": slopes}


def run_lightning(x: dict) -> torch.Tensor:
    return lightning_attention(x["q"], x["k"], x["v"], log_decay=x["slopes"])[0]


def run_gated(x: dict) -> torch.Tensor:
    return gated_linear_attention(x["q"], x["k"], x["v"], x["gates"])[0]


def run_delta(x: dict) -> torch.Tensor:
    return gated_delta_rule(x["q"], x["k"], x["v"], x["decays"], x["strengths"])[0]


def run_ssd(x: dict) -> torch.Tensor:
    return ssd(x["q"], x["k"], x["v"], x["decays"])[0]


def run_softmax(x: dict) -> torch.Tensor:
    q, k, v = (x[name].transpose(1, 2) for name in "qkv")
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


LINEAR = {"lightning": run_lightning, "gated": run_gated, "delta": run_delta, "ssd": run_ssd}
RUNS = LINEAR | {"softmax": run_softmax}


def time_once(run, inputs: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds of one forward and of one backward."""
    for x in inputs.values():
        x.grad = None
    start = time.perf_counter()
    o = run(inputs)
    middle = time.perf_counter()
    o.backward(inputs["do"])
    return middle - start, time.perf_counter() - middle


if __name__ == "__main__":
    main()
