"""MAD's bundles against the same models trained one after the other: milliseconds per step and model.

    python benchmarks/bundles.py --csv
    python benchmarks/bundles.py --models tnl+swiglu --members 6 --forms graph compiled --profile bundles.txt
    python benchmarks/bundles.py --members 4,6,12,24 --no-alone --csv      # how bundles of a few models compare
    python benchmarks/bundles.py --members 24 --vocab 16,32,64,144 --csv   # members of several vocabularies, padded
    python benchmarks/bundles.py --device cpu --models gla+swiglu --members 2,4 --batch 4 --length 16 --no-alone

A bundle is `--members` models of an architecture (a recipe, or a layout with MAD's options; "a x2" is two blocks),
in bfloat16 autocast on `--batch` sequences of `--length` random tokens, as `linnet mad run` trains it. Forms:

    eager      every kernel launched by the host
    graph      a step as one CUDA graph: what `linnet mad run` does
    compiled   `torch.compile`, then a CUDA graph

`alone` is one model after another without any of it, with PyTorch's fused AdamW: the time per step and model.
The first steps of a bundle are a gate: two members give the losses of their models alone in float32, or it is not
timed. With several `--vocab`, members have them in turn and are padded to the largest
(`linnet.models.synthetic.pad_vocabulary`), as `linnet mad run` pads settings of several vocabularies; the models alone
are not padded. On a CPU the gate is checked in float32 and times are CPU time, which `--csv` refuses.

`--csv` puts the rows into benchmarks/results/bundles-<gpu>.csv; `--profile FILE` appends the kernels of one step
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
from linnet.models.synthetic import pad_vocabulary
from linnet.train.together import BETAS, Ensemble

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
    parser.add_argument("--members", type=numbers, default=[24], help="with commas between")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocab", type=numbers, default=[16], help="with commas between")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--no-alone", action="store_true", help="bundles only, without the ratio")
    parser.add_argument("--profile", type=Path, help="append the kernels of a step of each form there")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    if options.device == "cpu" and (options.csv or options.profile or options.forms != ["graph"]):
        parser.error("--device cpu checks the gate alone; leave --csv, --profile and --forms out")

    constants = timing.constants(f"python benchmarks/bundles.py {shlex.join(sys.argv[1:])}")
    path = timing.RESULTS / f"bundles-{timing.short_name(constants.get('gpu', 'cpu'))}.csv"
    print(
        f"{'model':<28}{'form':>10}{'members':>8}{'first s':>9}{'ms':>9}{'alone':>9}{'ratio':>7}{'GiB':>7}", flush=True
    )
    for name in options.models:
        configs = [fit_length(mad_model(name, vocab), options.length) for vocab in options.vocab]
        alone = None if options.no_alone else time_alone(configs[0], options)
        batches = [draw(options) for _ in range(GATE_STEPS)]
        expected = [train_alone(config_of(configs, seed), seed, batches, options.device) for seed in range(2)]
        for form in options.forms:
            for size in options.members:
                try:
                    row = time_bundle(name, configs, form, size, alone, batches, expected, options)
                except (AssertionError, RuntimeError) as problem:
                    print(f"{name:<28}{form:>10}{size:>8}  {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                    continue
                finally:
                    gc.collect()
                    if options.device == "cuda":
                        torch.cuda.empty_cache()
                print(
                    f"{name:<28}{form:>10}{size:>8}{row['first_s']:>9}{row['model_step_ms']:>9.3f}"
                    f"{row['alone_ms']:>9}{row['ratio']:>7}{row['memory_gib']:>7.1f}  {row['gate']:.4f} {row['note']}",
                    flush=True,
                )
                if options.csv:
                    timing.update(path, [row | constants], KEYS)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def config_of(configs: list[ModelConfig], seed: int) -> ModelConfig:
    """The model of a member: members have the vocabularies in turn."""
    return configs[seed % len(configs)]


def member_rate(seed: int) -> float:
    return RATE * (1 + 2 * (seed % 2))


def train_alone(config: ModelConfig, seed: int, batches: list[Tensor], device: str) -> Tensor:
    """The losses of a member's model trained alone in float32."""
    step = step_alone(build_model(config, seed=seed, device=device), member_rate(seed), autocast=False)
    return torch.stack([step(*batch) for batch in batches])


def step_alone(model: torch.nn.Module, rate: float, autocast: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    """An ordinary step of one model: the mean loss, detached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=DECAY, betas=BETAS, fused=autocast)

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
    step = step_alone(build_model(config, device=options.device), RATE, autocast=options.device == "cuda")
    batch = draw(options)
    if options.device == "cuda":
        timing.warm_up(lambda: step(*batch), 5)
    return time_quietly(lambda: step(*batch), options.device)


def time_bundle(
    name: str,
    configs: list[ModelConfig],
    form: str,
    size: int,
    alone: float | None,
    batches: list[Tensor],
    expected: list[Tensor],
    options: argparse.Namespace,
) -> dict:
    """One row of the table. Raises AssertionError where the losses of the first members on `batches` are more than
    `GATE` nats from those expected."""
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    models = [build_model(config_of(configs, seed), seed=seed) for seed in range(size)]
    if len(options.vocab) > 1:
        for model in models:
            pad_vocabulary(model, max(options.vocab))
    rates = [member_rate(seed) for seed in range(size)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        precision = {"precision": "bfloat16" if on_gpu else "float32"}
        ensemble = Ensemble(models, rates, [DECAY] * size, STEPS, device=options.device, **precision, **FORMS[form])
        began = time.perf_counter()
        losses = [ensemble.step(*batches[0])]
        if on_gpu:
            torch.cuda.synchronize()
        first = time.perf_counter() - began
        losses += [ensemble.step(*batch) for batch in batches[1:]]
    found = torch.stack(losses, 1)
    worst = max((own - wanted).abs().max().item() for own, wanted in zip(found, expected, strict=False))
    assert worst <= GATE, f"a member's losses are {worst:.3f} nats from those of its model alone"
    milliseconds = time_quietly(lambda: ensemble.step(*batches[0]), options.device) / size
    memory = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0
    if options.profile is not None:
        options.profile.parent.mkdir(parents=True, exist_ok=True)
        with options.profile.open("a") as file:
            kernels = profile(lambda: ensemble.step(*batches[0]))
            file.write(f"{name}, {form}, {size} members, {milliseconds:.3f} ms per model and step\n{kernels}\n\n")
    notes = [] if ensemble.vectorised else ["one by one"]
    notes += ["not compiled"] if form == "compiled" and not ensemble.compiled else []
    notes += ["not captured"] if on_gpu and form != "eager" and not ensemble.captured else []
    if notes:
        notes += [str(warning.message)[:160] for warning in said if warning.category is UserWarning][:3]
    return {
        "model": name,
        "form": form,
        "members": size,
        "batch": options.batch,
        "length": options.length,
        "vocab": ",".join(map(str, options.vocab)),
        "first_s": round(first, 1),
        "model_step_ms": round(milliseconds, 4),
        "alone_ms": "" if alone is None else round(alone, 3),
        "ratio": "" if alone is None else round(alone / milliseconds, 2),
        "memory_gib": round(memory, 2),
        "gate": round(worst, 5),
        "note": "; ".join(notes),
    }


def time_quietly(run: Callable[[], object], device: str) -> float:
    """The lowest of three medians: another process on the GPU now and then does not count. On a CPU, CPU time."""
    if device == "cpu":
        began = time.process_time()
        run()
        return 1e3 * (time.process_time() - began)
    return min(timing.time_calls(run) for _ in range(3))


def draw(options: argparse.Namespace) -> Tensor:
    """Random tokens and targets, the same for all members: [2, B, T]."""
    return torch.randint(min(options.vocab), (2, options.batch, options.length), device=options.device)


if __name__ == "__main__":
    main()
