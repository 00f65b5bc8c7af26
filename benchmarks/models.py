"""Tokens a second of whole training steps against length, as Figure 1 of paper 001, with peers in the same run.

    python benchmarks/models.py --models tnl llama llama-transformers --lengths 1024 4096 16384 --csv

Models of about 390M parameters: 26 layers, width 1,024, 8 heads of 128, GLU 2,816, 50,304 tied tokens. A step is a
forward, a backward and a fused AdamW step on `--tokens` random tokens cut into sequences of each length, in bfloat16:
autocast over float32 weights, as `linnet train` does it, or `--weights bfloat16`. `--compile`, `--graph` (forward and
backward as one CUDA graph, as `run.graph` of a training) and `--recompute` hold for all models of the run.
`llama-transformers` is transformers' Llama with SDPA, `hgrn2-fla` flash-linear-attention's HGRN2 (its first step
compiles and tunes for minutes), `gdn-fla` its Gated DeltaNet with heads as ours, `mamba2-fla` its Mamba-2, which needs
mamba_ssm and causal_conv1d (PyPI has them as source). A block of `mamba2` has no channel mixer, so it has 48 of them,
as its published model of 370M.

`product_tflops` is the rate of a large matrix product in the same run, `beside` the peers in it: a run with peers has
rows of its own, so that ratios are of one run.

`--csv` puts the rows into benchmarks/results/models-<gpu>.csv; `--profile FILE` writes the kernels of one step there.
"""

import argparse
import contextlib
import gc
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import peers
import timing
import torch
from torch import Tensor, nn

from linnet.layers.base import layers_of
from linnet.models import ModelConfig, build_model, family
from linnet.ops import capture, projections
from linnet.train import recompute

KEYS = ("model", "length", "tokens", "weights", "compiled", "graph", "recompute", "layers", "width", "beside")
LINNET = ("tnl", "hgrn2", "lightnet", "cosformer2", "llama", "gla", "hgrn", "gdn", "mamba2")
PEERS = ("llama-transformers", "hgrn2-fla", "gdn-fla", "mamba2-fla")
VOCABULARY = 50_304
WIDTH, INNER = 1024, 2816  # of the model and of its GLU
LAYERS = {"mamba2": 48}  # of the others 26


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*LINNET[:5], *PEERS[:3]], choices=[*LINNET, *PEERS])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16_384, 32_768])
    parser.add_argument("--tokens", type=int, default=32_768, help="of a step")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graph", action="store_true", help="the host launches one CUDA graph per step")
    parser.add_argument("--recompute", choices=["none", "block", "selective"], default="none")
    parser.add_argument("--layers", type=int, help="default: 26, of mamba2 48")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--inner", type=int, default=INNER)
    parser.add_argument("--separate", action="store_true", help="autograd adds the gradients of a layer's input")
    parser.add_argument("--profile", type=Path, help="write the kernels of a step of the first length there")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    if options.separate and options.csv:
        parser.error("--separate: no training can be set to it, so the table has no rows of it; leave out --csv")

    constants = timing.constants(f"python benchmarks/models.py {shlex.join(sys.argv[1:])}")
    path = timing.RESULTS / f"models-{timing.short_name(constants['gpu'])}.csv"
    _, rate = timing.measure_ceilings()
    torch.cuda.empty_cache()
    beside = " ".join(name for name in options.models if name in PEERS)
    constants |= {"product_tflops": round(rate / 1e12, 1), "beside": beside}
    print(f"{'model':<20}{'length':>8}{'first s':>9}{'ms':>9}{'tokens/s':>10}{'GiB':>7}", flush=True)
    for name in options.models:
        try:
            model, loss = build(name, options)
        except ImportError as problem:
            print(f"{name:<20}{problem}", flush=True)
            continue
        for length in options.lengths:
            try:
                row = time_step(name, model, loss, length, options)
            except (RuntimeError, ValueError) as problem:  # out of memory, or a peer that does not take the shape
                print(f"{name:<20}{length:>8}  {type(problem).__name__}: {str(problem)[:200]}", flush=True)
                continue
            print(
                f"{name:<20}{length:>8}{row['first_s']:>9.1f}{row['step_ms']:>9.1f}{row['tokens_per_second']:>10,}"
                f"{row['memory_gib']:>7.1f}",
                flush=True,
            )
            if options.csv:
                timing.update(path, [row | constants], KEYS)
        del model, loss
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def build(name: str, options: argparse.Namespace) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """A model on the GPU and its mean loss, a function of tokens and targets [B, T]. ImportError without the peer."""
    builders = {
        "llama-transformers": build_transformers_llama,
        "hgrn2-fla": build_fla_hgrn2,
        "gdn-fla": build_fla_gdn,
        "mamba2-fla": build_fla_mamba2,
    }
    if name in builders:
        model = builders[name](options)
        if options.recompute != "none":
            model.gradient_checkpointing_enable()

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            return model(input_ids=tokens, labels=targets, use_cache=False).loss

    else:
        model = build_model(config(name, options.layers, options.width, options.inner))
        if not (options.compile or options.separate):  # as in a training
            projections.prepare(layers_of(model))
            if options.recompute == "none":
                model.backbone.defer_sums()
        recompute.apply(model, options.recompute)

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            nll, count = model.loss(tokens, targets)
            return nll / count

    model.to("cuda", torch.bfloat16 if options.weights == "bfloat16" else torch.float32).train()
    return model, torch.compile(loss, dynamic=False) if options.compile else loss


def depth(name: str, layers: int | None) -> int:
    """The layers of a model: those that are asked for, or what gives about 390M parameters."""
    return layers or LAYERS.get(name, 26)


def config(name: str, layers: int | None = None, width: int = WIDTH, inner: int = INNER) -> ModelConfig:
    """The configuration of a model of ours."""
    return family(name)(width, depth(name, layers), 0, inner, vocab_size=VOCABULARY)


def build_transformers_llama(options: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=options.width,
        num_hidden_layers=depth("llama", options.layers),
        num_attention_heads=options.width // 128,
        intermediate_size=options.inner,
        vocab_size=VOCABULARY,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def build_fla_hgrn2(options: argparse.Namespace) -> nn.Module:
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    config = HGRN2Config(
        hidden_size=options.width,
        num_hidden_layers=depth("llama", options.layers),
        expand_ratio=128,
        intermediate_size=options.inner,
        vocab_size=VOCABULARY,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    return HGRN2ForCausalLM(config)


def build_fla_gdn(options: argparse.Namespace) -> nn.Module:
    """With the heads of our `gdn`: 8, all keys of 3/4 of the width, values twice as wide."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    peers.allow_backward()
    config = GatedDeltaNetConfig(
        hidden_size=options.width,
        num_hidden_layers=depth("llama", options.layers),
        num_heads=8,
        head_dim=options.width * 3 // 4 // 8,
        expand_v=2.0,
        intermediate_size=options.inner,
        vocab_size=VOCABULARY,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    return GatedDeltaNetForCausalLM(config)


def build_fla_mamba2(options: argparse.Namespace) -> nn.Module:
    """With the kernels of mamba_ssm: without them fla takes a form in PyTorch."""
    import causal_conv1d  # noqa: F401
    from fla.models import Mamba2Config, Mamba2ForCausalLM
    from mamba_ssm.ops.triton import ssd_combined  # noqa: F401

    config = Mamba2Config(
        hidden_size=options.width,
        num_hidden_layers=depth("mamba2", options.layers),
        head_dim=64,
        state_size=128,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    return Mamba2ForCausalLM(config)


def time_step(name: str, model: nn.Module, loss: Callable, length: int, options: argparse.Namespace) -> dict:
    """One row of the table."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (max(1, options.tokens // length), length)
    tokens, targets = (torch.randint(VOCABULARY, shape, device="cuda") for _ in range(2))
    autocast = options.weights == "float32"

    def gradients(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            value = loss(tokens, targets)
        value.backward()
        return value.detach()

    captured = capture.Captured(gradients, tokens.device) if options.graph else gradients

    def step() -> None:
        with torch.autograd.set_multithreading_enabled(False):  # as in a training on one GPU
            captured(tokens, targets)
        optimizer.step()

    began = time.perf_counter()
    timing.warm_up(step, 1)
    first = time.perf_counter() - began
    memory = timing.peak_memory(step)  # before a capture, whose memory PyTorch does not count
    timing.warm_up(step, capture.WARM_UP)
    if options.graph and not captured.graphs:
        raise RuntimeError("cannot be captured as one CUDA graph")
    milliseconds = timing.time_calls(step)
    if options.profile is not None and length == options.lengths[0]:
        options.profile.parent.mkdir(parents=True, exist_ok=True)
        with options.profile.open("a") as file:
            file.write(f"{name}, length {length}, {milliseconds:.1f} ms per step\n{profile(step)}\n")
    return {
        "model": name,
        "length": length,
        "tokens": tokens.numel(),
        "weights": options.weights,
        "compiled": options.compile,
        "graph": options.graph,
        "recompute": options.recompute,
        "layers": depth(name.removesuffix("-fla"), options.layers),
        "width": options.width,
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_s": round(first, 1),
        "step_ms": round(milliseconds, 2),
        "tokens_per_second": round(tokens.numel() / milliseconds * 1e3),
        "memory_gib": round(memory, 2),
    }


def profile(step: Callable[[], None], most: int = 45) -> str:
    """The kernels of one step, those first that take longest: milliseconds, share, calls, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    events = sorted(record.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    lines = [
        f"{event.self_device_time_total / 1e3:9.2f} ms {event.self_device_time_total / total:6.1%} {event.count:6d}  "
        f"{event.key[:140]}"
        for event in events[:most]
    ]
    return "\n".join([f"kernels: {total / 1e3:.1f} ms", *lines])


if __name__ == "__main__":
    main()
