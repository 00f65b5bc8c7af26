"""Times windows against full causal attention, and rows of packed documents against whole rows; forward and backward.

    python benchmarks/attention.py --csv                     # on a GPU: bfloat16, cuDNN's and flash attention as rivals
    python benchmarks/attention.py --device cpu --csv        # float32, PyTorch's SDPA as rival

A window of 512 is compared with full causal attention over the same row, by cuDNN and by flash attention on a GPU. 16
documents of T/16 in one row are compared with one row of T, for attention and for each op with a state. Both contenders
of a row take turns, so that a busy machine slows both alike; the table has medians. Every result is first held against
the rival on the part where both must agree: a window as long as the row, or the first document of a row.

`ratio` is the time of the rival over ours. A window of 512 has to reach 4 at T = 16,384 on an H200 and 3 at T = 8,192
on a CPU, and documents have to reach 1. `--csv` writes benchmarks/results/attention-<gpu or cpu>.csv.
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from linnet import ops, provenance
from linnet.ops.attention import causal_attention

HEADS, WIDTH, WINDOW, DOCUMENTS = 16, 128, 512, 16
Run = Callable[..., Tensor]
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="rows whose name has this part")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens per row; default 16384 (GPU), 8192 (CPU)")
    parser.add_argument("--repeats", type=int, default=0, help="default 20 (GPU), 3 (CPU)")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; default: PyTorch's")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="processor: on a busy CPU")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    repeats = options.repeats or (20 if gpu else 3)
    command = f"python benchmarks/attention.py {shlex.join(sys.argv[1:])}"
    device = torch.cuda.get_device_name() if gpu else provenance.cpu_name()
    constants = timing.constants(command) | {"threads": "" if gpu else torch.get_num_threads(), "clock": options.clock}
    path = timing.RESULTS / f"attention-{timing.short_name(device) if gpu else 'cpu'}.csv"
    print(f"{device}\n{'ours':<34}{'rival':<22}{'T':>8}{'ours ms':>12}{'rival ms':>12}{'ratio':>8}")
    for length in options.lengths or ([16_384] if gpu else [8192]):
        for name, ours, rivals, inputs in rows(length, gpu):
            if options.only in name:
                for rival, theirs in rivals.items():
                    ms = compare(ours, theirs, inputs(), repeats, gpu, CLOCKS[options.clock])
                    row = {"op": name, "rival": rival, "length": length, "ms": ms[0], "rival_ms": ms[1]}
                    row |= {"ratio": ms[1] / ms[0]}
                    print(
                        f"{name:<34}{rival:<22}{length:>8}{ms[0]:>12.3f}{ms[1]:>12.3f}{row['ratio']:>8.2f}", flush=True
                    )
                    if options.csv:
                        timing.update(path, [row | constants], ["op", "rival", "length"])


def rows(length: int, gpu: bool) -> list[tuple[str, Run, dict[str, Run], Callable[[], list[Tensor]]]]:
    """What is timed: a name, our call, its rivals on the same inputs, and the inputs."""
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    bounds = torch.arange(0, length + 1, length // DOCUMENTS, dtype=torch.int32, device=device)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def heads(count: int = 3) -> list[Tensor]:
        return [draw(1, length, HEADS, WIDTH) for _ in range(count)]

    channels = HEADS * WIDTH
    slopes = -(2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1, device=device)))
    rates = -torch.rand(channels, 16, device=device)

    def filters() -> list[Tensor]:
        return [draw(1, length, channels), draw(channels, length, dtype=torch.float32) / length]

    with_documents: dict[str, tuple[Run, Callable[[], list[Tensor]]]] = {
        "attention": (lambda q, k, v, cu=None: causal_attention(q, k, v, cu_seqlens=cu), heads),
        "lightning": (
            lambda q, k, v, cu=None: ops.lightning_attention(q, k, v, log_decay=slopes, cu_seqlens=cu)[0],
            heads,
        ),
        "gated": (
            lambda q, k, v, g, cu=None: ops.gated_linear_attention(q, k, v, logsigmoid(g.float() + 3), cu_seqlens=cu)[
                0
            ],
            lambda: heads(4),
        ),
        "additive": (lambda q, k, v, cu=None: ops.additive_attention(q, k, v, cu_seqlens=cu)[0], heads),
        "scan": (
            lambda x, g, cu=None: ops.diagonal_scan(x, logsigmoid(g.float()), cu_seqlens=cu)[0],
            lambda: [draw(1, length, channels) for _ in range(2)],
        ),
        "selective_scan": (
            lambda x, dt, b, c, cu=None: ops.selective_scan(x, dt.float().sigmoid(), rates, b, c, cu_seqlens=cu)[0],
            lambda: [draw(1, length, size) for size in (channels, channels, 16, 16)],
        ),
        "modal": (
            lambda x, w, cu=None: ops.modal_convolution(x, rates, w, cu_seqlens=cu)[0],
            lambda: [draw(1, length, channels), draw(channels, 16, dtype=torch.float32)],
        ),
        "long_convolution": (lambda x, h, cu=None: ops.long_convolution(x, h, cu_seqlens=cu)[0], filters),
    }
    full = {"cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION), "flash": sdpa(SDPBackend.FLASH_ATTENTION)}
    found = [
        (
            f"window {WINDOW}",
            lambda q, k, v: causal_attention(q, k, v, WINDOW),
            full if gpu else {"SDPA": sdpa(None)},
            heads,
        ),
        (
            f"window {WINDOW}, {DOCUMENTS} documents",
            lambda q, k, v: causal_attention(q, k, v, WINDOW, bounds),
            full if gpu else {"SDPA": sdpa(None)},
            heads,
        ),
    ]
    for name, (run, inputs) in with_documents.items():
        found.append((f"{name}, {DOCUMENTS} documents", lambda *x, run=run: run(*x, bounds), {"one row": run}, inputs))
    return found


def sdpa(backend: SDPBackend | None) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if backend is None:
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return run


def compare(
    ours: Run, rival: Run, inputs: list[Tensor], repeats: int, gpu: bool, clock: Callable[[], float]
) -> tuple[float, float]:
    """Median milliseconds of a forward and backward of each, in turns, after a warm-up of both.

    Raises:
        AssertionError: the two differ on the first tokens, which have the same past in both.
    """
    inputs = [x.requires_grad_() for x in inputs]
    with torch.no_grad():
        same = min(WINDOW, inputs[0].shape[1] // DOCUMENTS)
        a, b = (run(*inputs)[:, :same].float() for run in (ours, rival))
    assert (a - b).norm() <= 0.02 * b.norm(), f"they differ by {(a - b).norm() / b.norm():.1e}"
    cotangent = torch.randn_like(rival(*inputs))

    def both(run: Run) -> None:
        torch.autograd.grad(run(*inputs), inputs, cotangent)

    times: dict[Run, list[float]] = {ours: [], rival: []}
    for run in times:
        both(run)
        if gpu:
            timing.warm_up(lambda run=run: both(run))
    for _ in range(repeats if not gpu else 5):
        for run, found in times.items():
            if gpu:
                found.append(timing.time_calls(lambda run=run: both(run), repeats))
                continue
            began = clock()
            both(run)
            found.append(1e3 * (clock() - began))
    return statistics.median(times[ours]), statistics.median(times[rival])


if __name__ == "__main__":
    main()
