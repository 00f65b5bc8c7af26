"""Checks, then times the Triton kernels on a GPU beside the ceilings and the peers that can be imported.

    python benchmarks/kernels.py --csv

Every row is first held against float64 on a short sequence of its shape (relative RMS error at most 0.005 for the
output, the final state and all gradients), then timed: medians of CUDA events over tensors larger than the cache where
the tokens are many, in bf16, with decay. `both_ms` is a forward and the gradients of q, k and v. The floor of a row is
the larger of its bytes (forward: q, k, v, o; backward: q, k, v, do, dq, dk, dv, each once) over the copy bandwidth and
its FLOPs (linnet's count) over the rate of a large matrix product, both measured first; `x` are times over the floor.

Peers: causal softmax attention of PyTorch (cuDNN and flash), flash-linear-attention (`chunk_simple_gla`) and
lightning_attn. `--csv` writes benchmarks/results/kernels-<gpu>.csv.
"""

import argparse
import csv
import importlib.metadata
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from linnet.ops import lightning_attention
from linnet.ops.lightning import chunked, lightning_backward_flops, lightning_flops
from linnet.ops.lightning.triton import lightning_backward, lightning_forward

RESULTS = Path(__file__).parent / "results"
HEADS = 16


class Row(NamedTuple):
    op: str
    length: int
    batch: int
    key: int = 128
    value: int = 128


def rows(softmax_up_to: int) -> list[Row]:
    lengths = (1024, 2048, 4096, 8192, 16384)
    ours = [Row("lightning", T, 65_536 // T) for T in lengths]
    ours += [Row("lightning", T, 1) for T in (2048, 8192, 32_768, 65_536, 131_072)]
    for key, value in ((64, 64), (256, 128), (256, 256)):
        ours += [Row("lightning", T, 65_536 // T, key, value) for T in (1024, 4096, 16_384)]
    peers = [Row(op, T, 65_536 // T) for op in ("cudnn", "flash") for T in lengths if T <= softmax_up_to]
    peers += [Row(op, *shape) for op in ("lightning_attn", "fla") for shape in ((1024, 64), (16_384, 4), (8192, 1))]
    peers += [Row("fla", 65_536, 1)]
    return ours + peers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--softmax-up-to", type=int, default=4096, help="longest sequence for softmax")
    parser.add_argument("--csv", action="store_true", help="write the table")
    arguments = parser.parse_args()

    gpu = torch.cuda.get_device_name()
    bandwidth, rate = measure_ceilings(arguments.repeats)
    print(f"{gpu}: copy {bandwidth / 1e12:.2f} TB/s, matrix product {rate / 1e12:.0f} TFLOP/s")
    print(
        f"{'op':<16}{'T':>8}{'B':>4}{'K':>5}{'V':>5}{'fwd ms':>10}{'x':>7}{'both ms':>10}{'x':>7}{'GiB':>7}{'error':>9}"
    )
    table = []
    for row in rows(arguments.softmax_up_to):
        if row.op not in arguments.ops:
            continue
        try:
            error = gate(row) if row.op == "lightning" else None
            forward, both, memory = time_row(row, arguments.repeats)
        except Exception as problem:  # a peer that is not there or fails must not end the others
            if row.op == "lightning":
                raise
            print(
                f"{row.op:<16}{row.length:>8}{row.batch:>4}  {type(problem).__name__}: {str(problem)[:90]}", flush=True
            )
            continue
        floors = find_floors(row, bandwidth, rate)
        print(
            f"{row.op:<16}{row.length:>8}{row.batch:>4}{row.key:>5}{row.value:>5}{forward:>10.3f}"
            f"{forward / floors[0]:>7.2f}{both:>10.3f}{both / floors[1]:>7.2f}{memory:>7.2f}"
            f"{'' if error is None else format(error, '9.4f')}",
            flush=True,
        )
        table.append(
            row._asdict()
            | {"heads": HEADS, "forward_ms": round(forward, 4), "both_ms": round(both, 4)}
            | {"forward_floor_ms": round(floors[0], 4), "both_floor_ms": round(floors[1], 4)}
            | {"memory_gib": round(memory, 3), "error": "" if error is None else round(error, 5)}
        )
        if arguments.csv:
            write(table, gpu, bandwidth, rate)


def write(table: list[dict], gpu: str, bandwidth: float, rate: float) -> None:
    constants = {"gpu": gpu, "copy_tb_s": round(bandwidth / 1e12, 3), "matmul_tflop_s": round(rate / 1e12)}
    constants |= {name: version(name) for name in ("torch", "triton", "flash-linear-attention", "lightning-attn")}
    constants["command"] = "python benchmarks/kernels.py --csv"
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"kernels-{gpu.split()[-1].lower()}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*table[0], *constants])
        writer.writeheader()
        writer.writerows(line | constants for line in table)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measure_ceilings(repeats: int) -> tuple[float, float]:
    """Bytes a second of a large copy, read and written, and FLOPs a second of a large bf16 product of random data."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), repeats)
    size = 8192
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * source.numel() / copy * 1e3, 2 * size**3 / measure(lambda: x @ x, repeats) * 1e3


def find_floors(row: Row, bandwidth: float, rate: float) -> tuple[float, float]:
    """Milliseconds under which neither a forward nor a forward with its backward can come."""
    _, T, B, K, V = row
    element = B * T * HEADS * 2 / bandwidth * 1e3
    shapes = [(B, T, HEADS, K), (B, T, HEADS, K), (B, T, HEADS, V)]
    forward = max(element * (2 * K + 2 * V), lightning_flops(*shapes) / rate * 1e3)
    return forward, forward + max(element * (4 * K + 3 * V), lightning_backward_flops(*shapes) / rate * 1e3)


def make(row: Row, length: int, batch: int) -> tuple[list[Tensor], Tensor, Tensor]:
    _, _, _, K, V = row
    q, k, v, do = (
        torch.randn(batch, length, HEADS, width, device="cuda", dtype=torch.bfloat16) for width in (K, K, V, V)
    )
    rates = -(2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1, device="cuda")))
    return [q, k, v], do, rates


def gate(row: Row) -> float:
    """The largest relative RMS error of what the kernel gives, against float64; AssertionError if over 0.005."""
    (q, k, v), do, rates = make(row, min(row.length, 4096) - 5, min(row.batch, 2))
    states = torch.randn(2, q.shape[0], HEADS, row.key, row.value, device="cuda")
    exact = [x.double() for x in (q, k, v, rates, states[0])], [do.double(), states[1].double()]
    expected = (
        chunked.lightning_forward(*exact[0], None, 0.5),
        chunked.lightning_backward(*exact[0], None, 0.5, *exact[1]),
    )
    inputs = (q, k, v, rates, states[0], None, 0.5)
    actual = lightning_forward(*inputs), lightning_backward(*inputs, do, states[1])
    errors = [
        ((a.double() - e).norm() / e.norm()).item()
        for found, wanted in zip(actual, expected, strict=True)
        for a, e in zip(found, wanted, strict=True)
    ]
    assert all(x <= 0.005 for x in errors), f"{row}: relative errors {errors}"
    return max(errors)


def time_row(row: Row, repeats: int) -> tuple[float, float, float]:
    """Milliseconds of a forward, of a forward and backward, and the peak memory of the latter in GiB."""
    inputs, do, rates = make(row, row.length, row.batch)
    run = RUNS[row.op]
    with torch.no_grad():
        forward = measure(lambda: run(*inputs, rates), repeats)
    leaves = [x.requires_grad_() for x in inputs]

    def both() -> None:
        torch.autograd.grad(run(*leaves, rates), leaves, do)

    both()
    torch.cuda.reset_peak_memory_stats()
    total = measure(both, repeats)
    return forward, total, torch.cuda.max_memory_allocated() / 2**30


def measure(run: Callable[[], object], repeats: int) -> float:
    """The median milliseconds of a call."""
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def run_lightning(q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
    return lightning_attention(q, k, v, log_decay=rates)[0]


def run_fla(q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, g_gamma=rates, scale=1.0)[0]


def run_lightning_attn(q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
    from lightning_attn.ops import lightning_attn_func

    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))  # its layout; the copies are in its time
    return lightning_attn_func(q, k, v, -rates).transpose(1, 2)


def run_softmax(backend: SDPBackend) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, rates: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    return run


RUNS = {
    "lightning": run_lightning,
    "fla": run_fla,
    "lightning_attn": run_lightning_attn,
    "cudnn": run_softmax(SDPBackend.CUDNN_ATTENTION),
    "flash": run_softmax(SDPBackend.FLASH_ATTENTION),
}


if __name__ == "__main__":
    main()
