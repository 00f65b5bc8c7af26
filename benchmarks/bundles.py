"""MAD's bundles against the same models trained one after the other: milliseconds per step and model.

    python benchmarks/bundles.py --csv
    python benchmarks/bundles.py --models tnl+swiglu --members 6 --forms graph compiled --profile bundles.txt

A bundle is `--members` models of an architecture (a recipe, or a layout with MAD's options; "a x2" is two blocks),
in bfloat16 autocast on `--batch` sequences of `--length` random tokens, as `linnet mad run` trains it. Forms:

    eager      every kernel launched by the host
    graph      a step as one CUDA graph: what `linnet mad run` does
    compiled   `torch.compile`, then a CUDA graph

`alone` is one model after another without any of it, with PyTorch's fused AdamW: the time per step and model.
The first steps of a bundle are a gate: two members give the losses of their models alone in float32, or it is not
timed. `--csv` puts the rows into benchmarks/results/bundles-<gpu>.csv; `--profile FILE` appends the kernels of one step
of each form.
"""

import argparse
import gc
import shlex
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import timing
import torch
from models import profile
from torch import Tensor

from linnet.models import ModelConfig, build_model
from linnet.models.recipes.mad import fit_length, mad_model
from linnet.train.ensemble import BETAS, Ensemble

MODELS = (
    "mad-attention-swiglu",
    "tnl+swiglu x2",
    "hgrn2+swiglu x2",
    "mad-gla-swiglu",
    "mad-hyena-swiglu",
    "mad-mh-hyena-swiglu",
    "mad-mamba",
    "mad-hyena-experts-swiglu",
    "mad-attention-moe",
    "mad-hyena-attention-swiglu",
)
FORMS = {
    "eager": {"capture": False},
    "graph": {},
    "compiled": {"compile": True},
}
KEYS = ("model", "form", "members", "batch", "length", "vocab")
STEPS, RATE, DECAY = 1_000_000, 1e-3, 0.1
GATE_STEPS, GATE = 8, 0.03  # nats: the losses start near 3, and bfloat16 moves them by some thousandths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--forms", nargs="+", default=["graph"], choices=FORMS)
    parser.add_argument("--members", type=int, nargs="+", default=[24])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=16)
    parser.add_argument("--no-alone", action="store_true", help="bundles only, without the ratio")
    parser.add_argument("--profile", type=Path, help="append the kernels of a step of each form there")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()

    constants = timing.constants(f"python benchmarks/bundles.py {shlex.join(sys.argv[1:])}")
    path = timing.RESULTS / f"bundles-{timing.short_name(constants['gpu'])}.csv"
    print(
        f"{'model':<28}{'form':>10}{'members':>8}{'first s':>9}{'ms':>9}{'alone':>9}{'ratio':>7}{'GiB':>7}", flush=True
    )
    for name in options.models:
        config = fit_length(mad_model(name, options.vocab), options.length)
        alone = None if options.no_alone else time_alone(config, options)
        batches = [draw(options) for _ in range(GATE_STEPS)]
        expected = [train_alone(config, seed, batches) for seed in range(2)]
        for form in options.forms:
            for size in options.members:
                try:
                    row = time_bundle(name, config, form, size, alone, batches, expected, options)
                except (AssertionError, RuntimeError) as problem:
                    print(f"{name:<28}{form:>10}{size:>8}  {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                    continue
                finally:
                    gc.collect()
                    torch.cuda.empty_cache()
                print(
                    f"{name:<28}{form:>10}{size:>8}{row['first_s']:>9}{row['model_step_ms']:>9.3f}"
                    f"{row['alone_ms']:>9}{row['ratio']:>7}{row['memory_gib']:>7.1f}  {row['gate']:.4f} {row['note']}",
                    flush=True,
                )
                if options.csv:
                    timing.update(path, [row | constants], KEYS)


def member_rate(seed: int) -> float:
    return RATE * (1 + 2 * (seed % 2))


def train_alone(config: ModelConfig, seed: int, batches: list[Tensor]) -> Tensor:
    """The losses of a member's model trained alone in float32."""
    step = step_alone(build_model(config, seed=seed, device="cuda"), member_rate(seed), autocast=False)
    return torch.stack([step(*batch) for batch in batches])


def step_alone(model: torch.nn.Module, rate: float, autocast: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    """An ordinary step of one model: the mean loss, detached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=DECAY, betas=BETAS, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
            total, count = model.loss(tokens, targets)
        loss = total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def time_alone(config: ModelConfig, options: argparse.Namespace) -> float:
    """Milliseconds of a step of one model without a bundle: of calls in a row, so the host's where it is slower."""
    step = step_alone(build_model(config, device="cuda"), RATE)
    batch = draw(options)
    timing.warm_up(lambda: step(*batch), 5)
    return time_quietly(lambda: step(*batch))


def time_bundle(
    name: str,
    config: ModelConfig,
    form: str,
    size: int,
    alone: float | None,
    batches: list[Tensor],
    expected: list[Tensor],
    options: argparse.Namespace,
) -> dict:
    """One row of the table. Raises AssertionError where the losses of the first members on `batches` are more than
    `GATE` nats from those expected."""
    torch.cuda.reset_peak_memory_stats()
    models = [build_model(config, seed=seed) for seed in range(size)]
    rates = [member_rate(seed) for seed in range(size)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ensemble = Ensemble(models, rates, [DECAY] * size, STEPS, device="cuda", precision="bfloat16", **FORMS[form])
        began = time.perf_counter()
        losses = [ensemble.step(*batches[0])]
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        losses += [ensemble.step(*batch) for batch in batches[1:]]
    found = torch.stack(losses, 1)
    worst = max((own - wanted).abs().max().item() for own, wanted in zip(found, expected, strict=False))
    assert worst <= GATE, f"a member's losses are {worst:.3f} nats from those of its model alone"
    milliseconds = time_quietly(lambda: ensemble.step(*batches[0])) / size
    memory = torch.cuda.max_memory_reserved() / 2**30
    if options.profile is not None:
        options.profile.parent.mkdir(parents=True, exist_ok=True)
        with options.profile.open("a") as file:
            kernels = profile(lambda: ensemble.step(*batches[0]))
            file.write(f"{name}, {form}, {size} members, {milliseconds:.3f} ms per model and step\n{kernels}\n\n")
    notes = [] if ensemble.vectorised else ["one by one"]
    notes += ["not compiled"] if form == "compiled" and not ensemble.compiled else []
    notes += ["not captured"] if form != "eager" and not ensemble.captured else []
    if notes:
        notes += [str(warning.message)[:160] for warning in said if warning.category is UserWarning][:3]
    return {
        "model": name,
        "form": form,
        "members": size,
        "batch": options.batch,
        "length": options.length,
        "vocab": options.vocab,
        "first_s": round(first, 1),
        "model_step_ms": round(milliseconds, 4),
        "alone_ms": "" if alone is None else round(alone, 3),
        "ratio": "" if alone is None else round(alone / milliseconds, 2),
        "memory_gib": round(memory, 2),
        "gate": round(worst, 5),
        "note": "; ".join(notes),
    }


def time_quietly(run: Callable[[], object]) -> float:
    """The lowest of three medians: another process on the GPU now and then does not count."""
    return min(timing.time_calls(run) for _ in range(3))


def draw(options: argparse.Namespace) -> Tensor:
    """Random tokens and targets, the same for all members: [2, B, T]."""
    return torch.randint(options.vocab, (2, options.batch, options.length), device="cuda")


if __name__ == "__main__":
    main()
