"""One training step and one decoding step by operation: where their time goes, and how far each is from its floor.

    python benchmarks/steps.py --csv

Models of about 390M parameters, as in benchmarks/models.py and benchmarks/decode.py. `train`: 32,768 random tokens in
rows of 4,096, autocast to bfloat16 over float32 weights, fused AdamW, nothing recomputed. `decode 1` and `decode 64`:
a token of 1 and of 64 rows, weights in bfloat16, with the merged projections of linnet.inference; the engine replays
these kernels as one CUDA graph. `--models` takes others too, for the kernels that these six do not reach.

A row is an operation: a kernel of Linnet by its op, as `norm.forward_kernel`, or an operation of PyTorch with all of
its kernels, of which `kernel` takes longest. `floor` is the larger of its bytes over the bandwidth of a large copy and
of its FLOPs over the rate of a large matrix product, both measured in the same run. Bytes are those of all tensors that
a kernel of Linnet gets, and of the inputs and the output of an operation of PyTorch, each once (a state that a kernel
reads and writes too); FLOPs are those of matrix products alone, so that attention has a floor of bytes only. The fused
optimizer has no floor, because a trace has no shapes of lists.

`--csv` puts the rows into benchmarks/results/steps-<gpu>.csv.
"""

import argparse
import contextlib
import gc
import json
import math
import shlex
import sys
import tempfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import models
import timing
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from linnet.inference.decoding import prepare_steps
from linnet.layers.base import layers_of, lower_precision
from linnet.models import build_model
from linnet.ops import projections
from linnet.ops.launching import Launcher

MODELS = ("tnl", "hgrn2", "gdn", "mamba2", "lightnet", "llama")
OTHERS = ("hgrn", "cosformer2", "gla", "kda", "gdn2", "delta_net", "mamba", "hyena")
STEPS = ("train", "decode 1", "decode 64")
ITEMS = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "bool": 1}
PRODUCTS = {  # which inputs are the two factors
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::bmm": (0, 1),
}
# All that they write is among their inputs.
IN_PLACE = ("aten::addmm_", "aten::copy_", "aten::fill_", "aten::_fused_adamw_")
REDUCTIONS = ("aten::sum", "aten::argmax", "aten::mean")
LOOKUPS = ("aten::embedding", "aten::index_select")  # read of a table what they return


@dataclass
class Operation:
    """What one operation did in a step: `bytes` and `flops` of all calls, and milliseconds of kernels by name."""

    calls: int = 0
    bytes: float = 0
    flops: float = 0
    kernels: Counter[str] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=(*MODELS, *OTHERS))
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
                timing.update(
                    path, [rounded(row) | constants for row in rows], ("model", "step", "operation"), ("model", "step")
                )
            del step
            gc.collect()
            torch.cuda.empty_cache()


def train_step(name: str, tokens: int = 32_768, length: int = 4096, documents: int = 1) -> Callable[[], None]:
    """A step on rows of `length` tokens; with several documents per row, on all of them packed into one row."""
    model = build_model(models.config(name), device="cuda").train()
    projections.prepare(layers_of(model))
    model.backbone.defer_sums()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (tokens // length, length) if documents == 1 else (1, tokens)
    inputs, targets = (torch.randint(models.VOCABULARY, shape, device="cuda") for _ in range(2))
    offsets = None
    if documents > 1:
        offsets = torch.arange(0, tokens + 1, length // documents, dtype=torch.int32, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            nll, count = model.loss(inputs, targets, offsets)
            loss = nll / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def decode_step(name: str, batch: int) -> Callable[[], None]:
    model = build_model(models.config(name), device="cuda").requires_grad_(False).eval()
    lower_precision(model, torch.bfloat16)
    prepare_steps(model)
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
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with started() as launches, profile(activities=activities, record_shapes=True) as record:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    rows = []
    for name, operation in operations(events, launches).items():
        rows.append(
            {
                "operation": name,
                "kernel": max(operation.kernels, key=operation.kernels.__getitem__),
                "calls": operation.calls,
                "ms": operation.kernels.total(),
                "mb": operation.bytes / 1e6,
                "gflop": operation.flops / 1e9,
                "floor_ms": max(operation.bytes / bandwidth, operation.flops / rate) * 1e3,
            }
        )
    total = {"operation": "all", "kernel": ""} | {
        key: sum(row[key] for row in rows) for key in ("calls", "ms", "mb", "gflop", "floor_ms")
    }
    rows = [row for row in sorted(rows, key=lambda row: -row["ms"]) if row["ms"] >= least * total["ms"]]
    return [row | {"share": row["ms"] / total["ms"]} for row in [*rows, total]]


@contextlib.contextmanager
def started() -> Iterator[defaultdict[str, deque[tuple[str, int]]]]:
    """Lists the kernels of Linnet that start in the block, by the profiler's name for them: name with op, bytes."""
    launches: defaultdict[str, deque[tuple[str, int]]] = defaultdict(deque)
    call = Launcher.__call__

    def noted(self: Launcher, *arguments: object) -> None:
        tensors = {x.data_ptr(): x.numel() * x.element_size() for x in arguments if isinstance(x, Tensor)}
        launches[self.name.partition(".")[2]].append((self.name, sum(tensors.values())))
        call(self, *arguments)

    Launcher.__call__ = noted
    try:
        yield launches
    finally:
        Launcher.__call__ = call


def operations(events: list[dict], launches: dict[str, deque[tuple[str, int]]]) -> dict[str, Operation]:
    """The operations of a trace; kernels of one name ran in the order in which `launches` has them."""
    callers = {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }
    table: defaultdict[str, Operation] = defaultdict(Operation)
    counted = set()
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in sorted(kernels, key=lambda event: event["ts"]):
        kernel, caller = event["name"], event["args"].get("External id")
        if launches.get(kernel):
            name, moved = launches[kernel].popleft()
            flops = 0.0
        else:
            name = callers[caller]["name"] if caller in callers else kernel
            # An operation with several kernels is counted once.
            moved, flops = traffic(callers[caller]) if caller in callers and caller not in counted else (0.0, 0.0)
            counted.add(caller)
        operation = table[name]
        operation.calls += 1
        operation.bytes += moved
        operation.flops += flops
        operation.kernels[kernel] += event["dur"] / 1e3
    return table


def traffic(event: dict) -> tuple[float, float]:
    """Bytes and FLOPs of an operation of PyTorch, from the shapes and types of its inputs."""
    name, inputs = event["name"], []
    for shape, kind in zip(event["args"].get("Input Dims", []), event["args"].get("Input type", []), strict=False):
        lists = shape and isinstance(shape[0], list)
        inputs += [(part, ITEMS.get(kind, 4)) for part in (shape if lists else [shape]) if kind in ITEMS or lists]
    sizes = [math.prod(shape) * item for shape, item in inputs if shape]
    if name in PRODUCTS:
        (left, item), (right, _) = (inputs[i] for i in PRODUCTS[name])
        output = math.prod(left[:-1]) * right[-1]
        return sum(sizes) + (0 if name in IN_PLACE else output * item), 2.0 * output * left[-1]
    if name in LOOKUPS:
        (rows, item), (index, _) = inputs[0], inputs[-1]
        return 2.0 * math.prod(index) * rows[-1] * item, 0.0
    if name in (*IN_PLACE, *REDUCTIONS) or not sizes:
        return sum(sizes), 0.0
    return sum(sizes) + max(sizes), 0.0


def rounded(row: dict) -> dict:
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


if __name__ == "__main__":
    main()
