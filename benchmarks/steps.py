"""One training step and one decoding step by operation: where their time goes, and how far each is from its floor.

    python benchmarks/steps.py --csv

Models of about 390M parameters, as in benchmarks/models.py and benchmarks/decode.py. `train`: 32,768 random tokens in
rows of 4,096, autocast to bfloat16 over float32 weights, fused AdamW, nothing recomputed. `decode 1` and `decode 64`:
a token of 1 and of 64 rows, weights in bfloat16, with the merged projections of linnet.inference; the engine replays
these kernels as one CUDA graph.

An operation is what PyTorch's dispatcher sees: an op of Linnet, or one of PyTorch. `ms` is the time of its kernels, and
`kernel` the one that takes longest. `floor` is the larger of its bytes (inputs read once, outputs written once) over
the bandwidth of a large copy and its FLOPs over the rate of a large matrix product, both measured in the same run. The
floor of `all` is the sum over operations: what would remain if each ran at its limit and none were fused with another.

`--csv` puts the rows into benchmarks/results/steps-<gpu>.csv.
"""

import argparse
import gc
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import models
import timing
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent, Kernel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from linnet.inference.decoding.merging import merge_projections, serve_rows
from linnet.inference.engine import lower_precision
from linnet.models import build_model

MODELS = ("tnl", "hgrn2", "gdn", "mamba2", "lightnet", "llama")
STEPS = ("train", "decode 1", "decode 64")
MARK = "dispatched "
LOOKUPS = ("aten::embedding", "aten::index_select", "aten::gather")  # read of their first input what they return


@dataclass
class Operation:
    """What one operation did in a step: `bytes` and `flops` of all calls, and milliseconds of kernels by name."""

    calls: int = 0
    bytes: int = 0
    flops: int = 0
    kernels: Counter[str] = field(default_factory=Counter)


class Operations(TorchDispatchMode):
    """Marks each dispatched operation for the profiler and counts its bytes and FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.table: defaultdict[str, Operation] = defaultdict(Operation)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        with record_function(MARK + name):
            results = func(*args, **kwargs)
        operation = self.table[name]
        operation.calls += 1
        inputs = tree_leaves((args, kwargs))[name in LOOKUPS :]
        written = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += tree_leaves(value)
        tensors = {id(x): x for x in inputs if isinstance(x, Tensor)}
        outputs = {id(x): x for x in written if isinstance(x, Tensor)}
        operation.bytes += sum(map(size, [*tensors.values(), *outputs.values()]))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            operation.flops += formula(*args, **kwargs, out_val=results)
        return results


def size(x: Tensor) -> int:
    """Bytes of a tensor in memory, what an expanded one repeats counted once."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--least", type=float, default=0.01, help="share of a step under which an operation has no row")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()

    constants = timing.constants(f"python benchmarks/steps.py {shlex.join(sys.argv[1:])}")
    path = timing.RESULTS / f"steps-{timing.short_name(constants['gpu'])}.csv"
    bandwidth, rate = timing.measure_ceilings()
    print(f"{constants['gpu']}: copy {bandwidth / 1e12:.2f} TB/s, product {rate / 1e12:.0f} TFLOP/s", flush=True)
    for name in options.models:
        for kind in options.steps:
            step = train_step(name) if kind == "train" else decode_step(name, int(kind.split()[1]))
            rows = [{"model": name, "step": kind} | row for row in measure(step, bandwidth, rate, options.least)]
            print(f"\n{name}, {kind:<24}{'calls':>7}{'ms':>9}{'share':>8}{'floor ms':>10}{'x':>7}  kernel")
            for row in rows:
                print(
                    f"{row['operation'][:34]:<34}{row['calls']:>7}{row['ms']:>9.3f}{row['share']:>8.1%}{row['floor_ms']:>10.3f}"
                    f"{row['ms'] / row['floor_ms'] if row['floor_ms'] else 0:>7.2f}  {row['kernel'][:60]}",
                    flush=True,
                )
            if options.csv:
                timing.update(path, [rounded(row) | constants for row in rows], ("model", "step", "operation"))
            del step
            gc.collect()
            torch.cuda.empty_cache()


def train_step(name: str, tokens: int = 32_768, length: int = 4096) -> Callable[[], None]:
    model = build_model(models.config(name)).to("cuda").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = (torch.randint(models.VOCABULARY, (tokens // length, length), device="cuda") for _ in range(2))

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            nll, count = model.loss(inputs, targets)
            loss = nll / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def decode_step(name: str, batch: int) -> Callable[[], None]:
    model = build_model(models.config(name)).to("cuda").requires_grad_(False).eval()
    lower_precision(model, torch.bfloat16)
    merge_projections(model)
    serve_rows(model)
    tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
    states = model.init_state(batch, 4096, "cuda")

    @torch.no_grad()
    def step() -> None:
        logits, _ = model.step(tokens, states)
        tokens.copy_(logits.argmax(-1))

    return step


def measure(step: Callable[[], None], bandwidth: float, rate: float, least: float) -> list[dict]:
    """Rows of the operations of a step, those first that take longest, then `all`."""
    timing.warm_up(step)
    with Operations():
        step()  # what the mode makes PyTorch or Triton compile
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record, Operations() as operations:
        step()
        torch.cuda.synchronize()
    for event in record.events():
        if event.name.startswith(MARK):
            kernels = operations.table[event.name.removeprefix(MARK)].kernels
            for kernel in launched(event):
                kernels[kernel.name] += kernel.duration / 1e3
    rows = []
    for name, operation in operations.table.items():
        rows.append(
            {
                "operation": name,
                "kernel": max(operation.kernels, key=operation.kernels.__getitem__, default=""),
                "calls": operation.calls,
                "ms": operation.kernels.total(),
                "mb": operation.bytes / 1e6,
                "gflop": operation.flops / 1e9,
                "floor_ms": max(operation.bytes / bandwidth, operation.flops / rate) * 1e3,
            }
        )
    rows = [row for row in rows if row["ms"] > 0]
    total = {"operation": "all", "kernel": ""} | {
        key: sum(row[key] for row in rows) for key in ("calls", "ms", "mb", "gflop", "floor_ms")
    }
    rows = [row for row in sorted(rows, key=lambda row: -row["ms"]) if row["ms"] >= least * total["ms"]]
    return [row | {"share": row["ms"] / total["ms"]} for row in [*rows, total]]


def rounded(row: dict) -> dict:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def launched(event: FunctionEvent) -> list[Kernel]:
    """The kernels that an event of the profiler and those within it launched."""
    return [*event.kernels, *(kernel for child in event.cpu_children for kernel in launched(child))]


if __name__ == "__main__":
    main()
