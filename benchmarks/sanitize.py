"""The ops once, forward and backward, at small shapes that reach their kernels, and steps: for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1  # so that each tensor has bounds of its own
    compute-sanitizer --tool memcheck python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py gated norm

racecheck may report nvjet kernels: those are cuBLAS.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from linnet import ops
from linnet.inference.decoding import add_pending, prepare_steps
from linnet.layers.base import lower_precision
from linnet.models import build_model, family
from linnet.ops.attention import causal_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DOCUMENTS = torch.tensor([0, 0, 5, 70, 200], dtype=torch.int32, device=DEVICE)  # the first is empty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", nargs="*", default=list(OPS), help=", ".join(OPS))
    names = parser.parse_args().op
    if unknown := sorted(set(names) - set(OPS)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(OPS)}")
    torch.manual_seed(0)
    for name in names:
        OPS[name]()
        print(f"{name} ran on {DEVICE}", flush=True)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_()


def decays(*shape: int, strength: float = 1.0) -> Tensor:
    return (-strength * torch.rand(*shape, device=DEVICE)).requires_grad_()


def differentiate(outputs: Tensor | tuple[Tensor | None, ...], *inputs: Tensor) -> None:
    found = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o is not None]
    torch.autograd.grad(sum(o.float().square().sum() for o in found), inputs)


def heads(B: int, T: int, K: int, V: int, H: int, documents: bool = False) -> tuple[Tensor, ...]:
    """q, k, v and an initial state, in float32, of each sequence or document."""
    sequences = len(DOCUMENTS) - 1 if documents else B
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    return q, k, v, normal(sequences, H, K, V, dtype=torch.float32)


def lightning() -> None:
    def run(B: int, T: int, K: int, V: int, H: int = 2, documents: bool = False) -> None:
        q, k, v, state = heads(B, T, K, V, H, documents)
        options = {"log_decay": torch.full((H,), -0.1, device=DEVICE), "cu_seqlens": DOCUMENTS if documents else None}
        out = ops.lightning_attention(q, k, v, initial_state=state, output_final_state=True, **options)
        differentiate(out, q, k, v, state)

    run(1, 192, 128, 128), run(1, 192, 64, 64), run(1, 192, 256, 256), run(1, 2048, 128, 128, 1)
    run(70, 128, 128, 128, 1), run(60, 128, 64, 64, 1), run(200, 64, 256, 256, 1)  # many heads; few of 64; many of 256
    run(1, 200, 64, 64, documents=True), run(1, 130, 96, 72)


def gated() -> None:
    def run(B: int, T: int, K: int, V: int, H: int = 2, documents: bool = False) -> None:
        q, k, v, state = heads(B, T, K, V, H, documents)
        bound = torch.full((H, K), 0.3, device=DEVICE).requires_grad_()
        options = {"cu_seqlens": DOCUMENTS if documents else None, "output_final_state": True}
        out = ops.forget_gated_attention(q, k, v, lower_bound=bound, initial_state=state, **options)
        differentiate(out, q, k, v, bound, state)

    run(1, 100, 128, 128), run(1, 200, 128, 128, documents=True), run(1, 100, 64, 64)
    run(1, 1200, 64, 64, 1), run(1, 40, 24, 72)
    for strength in (1.0, 40.0):  # 40: the chunks are halved
        (q, k, v, state), g = heads(1, 64, 128, 128, 2), decays(1, 64, 2, 128, strength=strength)
        out = ops.gated_linear_attention(q, k, v, g, initial_state=state, output_final_state=True)
        differentiate(out, q, k, v, g, state)


def delta() -> None:
    def run(B: int, T: int, K: int, V: int, op: str = "delta", documents: bool = False, **options) -> None:
        q, k, v, state = heads(B, T, K, V, 2, documents)
        k = torch.nn.functional.normalize(k, dim=-1)
        g = decays(B, T, 2, *[K] * (op != "delta"), **options)
        widths = [(K,), (V,)] if op == "gdn2" else [()]
        gates = [torch.rand(B, T, 2, *width, device=DEVICE).requires_grad_() for width in widths]
        states = {"initial_state": state, "output_final_state": True, "cu_seqlens": DOCUMENTS if documents else None}
        out = ops.gated_delta_rule(q, k, v, g, *gates, **states)
        differentiate(out, q, k, v, g, *gates, state)

    for op in ("delta", "kda", "gdn2"):
        run(1, 192, 128, 128, op), run(1, 100, 40, 72, op), run(1, 200, 64, 64, op, documents=True)
        run(2, 192, 96, 128, op)  # keys that TMA fills up with zeros
    run(1, 64, 64, 64, "kda", strength=40.0)  # pairs in blocks of fewer tokens
    run(1, 32_832, 64, 64)  # in parts, swept beside one another


def additive() -> None:
    def run(B: int, T: int, K: int, V: int, documents: bool = False, causal: bool = True, turn: bool = False) -> None:
        q, k, v, _ = heads(B, T, K, V, 2)
        theta = torch.rand(2, K, device=DEVICE) if turn else None
        options = {"causal": causal, "cu_seqlens": DOCUMENTS if documents else None}
        differentiate(ops.additive_attention(q, k, v, theta=theta, **options)[0], q, k, v)

    run(1, 192, 128, 128), run(1, 192, 128, 128, turn=True), run(1, 200, 64, 64, documents=True)
    run(40, 128, 128, 128), run(40, 128, 128, 128, turn=True)  # heads enough for the kernels of Hopper GPUs
    run(1, 100, 64, 64, causal=False), run(2, 70, 96, 64)


def scan() -> None:
    x, g = normal(2, 300, 64), decays(2, 300, 64)
    differentiate(ops.diagonal_scan(x, g)[0], x, g)
    x, g = normal(1, 200, 96), decays(1, 200, 96)
    differentiate(ops.diagonal_scan(x, g, cu_seqlens=DOCUMENTS)[0], x, g)


def selective() -> None:
    x, delta, B, C = normal(2, 100, 64), normal(2, 100, 64), normal(2, 100, 16), normal(2, 100, 16)
    A = decays(64, 16)
    differentiate(ops.selective_scan(x, delta, A, B, C)[0], x, delta, A, B, C)


def norm() -> None:
    for width in (64, 1000, 4096):
        x, residual, gate = (normal(33, width) for _ in range(3))
        weight = normal(width, dtype=torch.float32)
        differentiate(ops.rms_norm(x, weight, gate=gate, residual=residual), x, residual, gate, weight)
        differentiate(ops.rms_norm(x, weight), x, weight)


def rest() -> None:
    x, weight, bias = normal(2, 100, 96), normal(96, 4, dtype=torch.float32), normal(96, dtype=torch.float32)
    differentiate(ops.short_convolution(x, weight, bias, silu=True), x, weight, bias)
    gate, x = normal(3, 1001), normal(3, 1001)
    differentiate(ops.gated_activation(gate, x, "silu"), gate, x)
    x, weight = normal(100, 64), normal(5000, 64)
    labels = torch.randint(0, 5000, (100,), device=DEVICE)
    differentiate(ops.linear_cross_entropy(x, weight, labels), x, weight)
    q, k, v = (normal(2, 100, 4, 16) for _ in range(3))
    differentiate(causal_attention(q, k, v), q, k, v)


def ssd() -> None:
    for K, V in ((128, 64), (64, 128), (40, 72)):
        q, k, v, state = normal(1, 200, 1, K), normal(1, 200, 1, K), normal(1, 200, 4, V), normal(1, 4, K, V).float()
        g = decays(1, 200, 4)
        differentiate(ops.ssd(q, k, v, g), q, k, v, g)
        options = {"initial_state": state.repeat(len(DOCUMENTS) - 1, 1, 1, 1), "output_final_state": True}
        differentiate(ops.ssd(q, k, v, g, cu_seqlens=DOCUMENTS, **options), q, k, v, g)
    for K in (64, 128):  # whole chunks: on Hopper kernels of their own
        q, k, v, g = normal(2, 192, 2, K), normal(2, 192, 2, K), normal(2, 192, 8, 64), decays(2, 192, 8)
        differentiate(ops.ssd(q, k, v, g), q, k, v, g)
    q, k, v, g = normal(1, 2048, 1, 128), normal(1, 2048, 1, 128), normal(1, 2048, 2, 128), decays(1, 2048, 2)
    differentiate(ops.ssd(q, k, v, g), q, k, v, g)  # in segments


def long() -> None:
    x, g, weight = normal(2, 150, 64), decays(64, 8), normal(64, 8, dtype=torch.float32)
    differentiate(ops.modal_convolution(x, g, weight), x, g, weight)
    filters = normal(64, 150, dtype=torch.float32)
    differentiate(ops.long_convolution(x, filters), x, filters)


@torch.no_grad()
def steps() -> None:
    """Tokens of small models: steps, products of few rows, and states that are written every second token."""
    for name in ("tnl", "hgrn2", "gla", "gdn", "kda", "gdn2", "mamba2", "lightnet", "llama", "mamba", "hyena"):
        model = build_model(family(name)(256, 2, 0, 512, vocab_size=1000)).to(DEVICE).requires_grad_(False).eval()
        lower_precision(model, torch.bfloat16)
        prepare_steps(model)
        for rows in (1, 5):
            tokens, states = torch.arange(rows, device=DEVICE), model.init_state(rows, 64, DEVICE)
            for _ in range(2):
                model.step(tokens, states)
            pending = add_pending(model, states, rows, 2)
            for _ in range(0 if pending is None else 3):
                model.step(tokens, states)
                pending.add_(1).remainder_(2)


OPS = {f.__name__: f for f in (lightning, gated, delta, additive, scan, selective, norm, rest, ssd, long, steps)}

if __name__ == "__main__":
    main()
