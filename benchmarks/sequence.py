"""Ops on a span of 262,144 tokens of a row that two GPUs share, against the op alone on one.

    torchrun --standalone --nproc-per-node 2 benchmarks/sequence.py                     # 2 GPUs, about 2 minutes
    torchrun --standalone --nproc-per-node 2 benchmarks/sequence.py --ops hgrn2 lightnet
    torchrun --standalone --nproc-per-node 2 benchmarks/sequence.py --device cpu --tokens 256 --check 256

First each op in bfloat16 (scans: what they compute in) on a short row over all ranks is compared with the op on the
whole row in float64: the relative RMS errors of outputs and of the largest one of the gradients. Then a forward and
backward at width 2,048 (16 heads of 128) are timed: alone (each GPU its own row, no exchange) and on spans of one row.

`ms` is the median over the repetitions of the slowest rank. `extra` is what sequence parallelism adds to a layer, and
`of layer` an estimate of the layer's tokens per second with it over those without: a layer of a 1.3B model takes 44 ms
per 65,536 tokens on an H200, so that bars of 0.95 (TNL) and 0.93 (HGRN2, LightNet) leave 9.3 and 13.2 ms at 262,144.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from linnet import ops
from linnet.ops import sequence, use_backend

D, H, N, E = 2048, 16, 16, 64  # width, heads, states of Mamba, modes of TPE and Hyena
LAYER_MS = 44.0 / 65_536  # per token


def draw(seed: int, device: torch.device, *shape: int, dtype=torch.bfloat16) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=dtype)


def heads(length: int, seed: int, device: torch.device, names: str) -> dict[str, Tensor]:
    return {name: draw(seed + i, device, 1, length, H, D // H) for i, name in enumerate(names)}


def channels(length: int, seed: int, device: torch.device, names: str) -> dict[str, Tensor]:
    return {name: draw(seed + i, device, 1, length, D) for i, name in enumerate(names)}


class Op:
    """An op with its inputs [1, T, ...], its parameters, and how it is called with both."""

    def __init__(self, inputs, parameters, call):
        self.inputs, self.parameters, self.call = inputs, parameters, call


def tnl(device):
    rates = torch.tensor([-(2.0 ** (-8.0 * h / H)) for h in range(1, H + 1)], device=device)
    return Op(
        lambda length, seed: heads(length, seed, device, "qkv"),
        {},
        lambda x, p: ops.lightning_attention(**x, log_decay=rates.to(x["q"].dtype if wide(x) else rates.dtype))[0],
    )


def wide(x) -> bool:
    return next(iter(x.values())).dtype == torch.float64


def hgrn2(device):
    bound = {"lower_bound": torch.linspace(0.5, 0.99, D, device=device).view(H, D // H)}
    return Op(
        lambda length, seed: heads(length, seed, device, "qxv"),
        bound,
        lambda x, p: ops.forget_gated_attention(**x, lower_bound=p["lower_bound"])[0],
    )


def gla(device):
    def inputs(length, seed):
        x = heads(length, seed, device, "qkv")
        x["g"] = torch.nn.functional.logsigmoid(draw(seed + 3, device, 1, length, H, D // H).float()) / 16
        return x

    return Op(inputs, {}, lambda x, p: ops.gated_linear_attention(x["q"], x["k"], x["v"], x["g"])[0])


def lightnet(device, theta=True):
    parameters = {"theta": 10_000 ** -torch.linspace(0, 1, D, device=device).view(H, D // H)} if theta else {}
    return Op(
        lambda length, seed: heads(length, seed, device, "qkv"),
        parameters,
        lambda x, p: ops.additive_attention(**x, theta=p.get("theta"))[0],
    )


def scan(device, theta=False):
    pair = (2,) if theta else ()
    parameters = {"theta": torch.linspace(0.001, 1, D, device=device)} if theta else {}

    def inputs(length, seed):
        gate = torch.nn.functional.logsigmoid(draw(seed + 1, device, 1, length, D).float() + 4)
        return {"x": draw(seed, device, 1, length, D, *pair), "log_decay": gate}

    return Op(inputs, parameters, lambda x, p: ops.diagonal_scan(**x, **p)[0])


def mamba(device):
    parameters = {
        "A": -torch.arange(1, N + 1, device=device, dtype=torch.float32).repeat(2 * D, 1),
        "D": torch.ones(2 * D, device=device),
        "delta_bias": torch.linspace(-6, -2, 2 * D, device=device),
    }

    def inputs(length, seed):
        x = {name: draw(seed + i, device, 1, length, 2 * D) for i, name in enumerate(("x", "delta"))}
        return x | {name: draw(seed + 3 + i, device, 1, length, N) for i, name in enumerate("BC")}

    def call(x, p):
        return ops.selective_scan(x["x"], x["delta"], p["A"], x["B"], x["C"], p["D"], delta_bias=p["delta_bias"])[0]

    return Op(inputs, parameters, call)


def tpe(device):
    parameters = {
        "log_decay": -torch.linspace(0.001, 1, D * E, device=device).view(D, E),
        "weight": draw(9, device, D, E, dtype=torch.float32) / E,
    }
    return Op(
        lambda length, seed: channels(length, seed, device, "x"),
        parameters,
        lambda x, p: ops.modal_convolution(x["x"], p["log_decay"], p["weight"])[0],
    )


OPS = {
    "tnl": tnl,
    "hgrn2": hgrn2,
    "lightnet": lightnet,
    "lightnet-no-lrpe": lambda device: lightnet(device, False),
    "gla": gla,
    "mamba": mamba,
    "hgrn": scan,
    "hgrn-complex": lambda device: scan(device, True),
    "tpe": tpe,
}


def differentiate(op: Op, x: dict[str, Tensor], p: dict[str, Tensor], grad: Tensor | None = None):
    """o and the gradients of inputs and parameters."""
    leaves = [y.requires_grad_() for y in (*x.values(), *p.values())]
    o = op.call(x, p)
    return o.detach(), torch.autograd.grad(o, leaves, torch.ones_like(o) if grad is None else grad)


def error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def check(op: Op, tokens: int, rank: int, size: int, device: torch.device) -> tuple[float, float]:
    """Relative errors of o and of the worst gradient on spans of `tokens`, against float64 on the whole row."""
    whole = op.inputs(tokens * size, 1)
    with sequence.sequence_parallel(dist.group.WORLD):
        span = {name: x.chunk(size, 1)[rank].contiguous() for name, x in whole.items()}
        shape = op.call(span, op.parameters).shape
        grad = draw(5, device, 1, tokens * size, *shape[2:])
        o, grads = differentiate(
            op, span, {name: y.clone() for name, y in op.parameters.items()}, grad.chunk(size, 1)[rank].to(o_type(span))
        )
    exact = {name: x.double() for name, x in whole.items()}
    with use_backend("chunked"):
        expected, gradients = differentiate(
            op, exact, {name: y.double() for name, y in op.parameters.items()}, grad.double()
        )
    errors = []
    for i, (found, wanted) in enumerate(zip((o, *grads), (expected, *gradients), strict=True)):
        if i > len(whole):  # of a parameter: the ranks' gradients add up
            found = found.double()
            dist.all_reduce(found)
        else:
            wanted = wanted.chunk(size, 1)[rank]
        errors.append(error(found, wanted))
    errors = torch.tensor(errors, device=device)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return errors[0].item(), errors[1:].max().item()


def o_type(x: dict[str, Tensor]) -> torch.dtype:
    return x["v" if "v" in x else "x"].dtype


def time_both(op: Op, tokens: int, rank: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Median milliseconds, of the slowest rank, of forward and of forward and backward: alone and on spans."""
    x = {name: y.requires_grad_() for name, y in op.inputs(tokens, rank).items()}
    p = {name: y.clone().requires_grad_() for name, y in op.parameters.items()}
    leaves = [*x.values(), *p.values()]
    found = {}
    for name, group in (("alone", None), ("span", dist.group.WORLD)):
        forwards, both = [], []
        with sequence.sequence_parallel(group):
            for turn in range(repeats + 3):
                synchronise(device)
                dist.barrier()
                start = time.perf_counter()
                o = op.call(x, p)
                synchronise(device)
                middle = time.perf_counter()
                torch.autograd.grad(o, leaves, torch.ones_like(o))
                synchronise(device)
                if turn >= 3:
                    forwards.append(middle - start)
                    both.append(time.perf_counter() - start)
                del o
        times = torch.tensor([forwards, both], device=device, dtype=torch.float64) * 1e3
        dist.all_reduce(times, dist.ReduceOp.MAX)
        found[f"{name} forward"], found[name] = (statistics.median(row) for row in times.tolist())
    return found


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="*", choices=OPS, default=list(OPS))
    parser.add_argument("--tokens", type=int, default=262_144, help="of a rank")
    parser.add_argument("--check", type=int, default=32_768, help="tokens of a rank in the check; 0 for none")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(arguments.device, int(os.environ["LOCAL_RANK"]) if arguments.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    if rank == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        print(f"{size} x {name}, torch {torch.__version__}, {arguments.tokens:,} tokens per rank", flush=True)
    for name in arguments.ops:
        op, row = OPS[name](device), {"op": name}
        if arguments.check:
            row["error of o"], row["error of gradients"] = check(op, arguments.check, rank, size, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        row |= time_both(op, arguments.tokens, rank, device, arguments.repeats)
        row["extra"] = row["span"] - row["alone"]
        layer = LAYER_MS * arguments.tokens
        row["of layer"] = layer / (layer + row["extra"])
        if rank == 0:
            print(
                json.dumps({key: x if isinstance(x, str) else float(f"{x:.4g}") for key, x in row.items()}), flush=True
            )
        del op
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
