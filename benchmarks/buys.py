"""What the kernels of an op buy: a step of a recipe that reaches them, with them and with the op's PyTorch form.

    python benchmarks/buys.py --csv
    python benchmarks/buys.py --cases decode

`train`: as in benchmarks/steps.py, eager (`documents`: of 512 tokens, all in one row). `decode`: tokens of the engine,
as in benchmarks/decode.py. `mad`: a step of a bundle of 24 models, as in benchmarks/bundles.py. `images`: an eager
step of a denoiser of CIFAR-10's size, batch 256, as in benchmarks/vision_gpu.py.

Both forms are timed in turns in one process, three times each (a form that takes more than twice as long, once). `buys`
is the part of the time without the kernels that they save, from the medians; `least` and `most` are the extremes over
all pairs of those times. Where the PyTorch form does not fit into memory, `without_ms` is empty.

`--csv` puts the rows into benchmarks/results/buys-<gpu>.csv.
"""

import argparse
import contextlib
import copy
import functools
import gc
import itertools
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator

import bundles
import decode
import models
import steps
import timing
import torch
import vision_gpu

from linnet.layers.base import lower_precision
from linnet.models import build_model, get_recipe
from linnet.models.recipes.mad import fit_length, mad_model
from linnet.ops import backend

ROUNDS = 3
SLOW = 2.0
KEYS = ("ops", "step", "model")
CASES = {  # step: model and ops whose kernels are left out
    "train": (
        ("tnl", "lightning"),
        ("tnl documents", "lightning"),
        ("hgrn2", "gated"),
        ("gdn", "delta"),
        ("gdn", "shortconv"),
        ("lightnet", "additive"),
        ("lightnet", "modal"),
        ("mamba2", "ssd"),
        ("mamba2", "shortconv"),
        ("hyena", "longconv"),
        ("tnl", "cross_entropy"),
        ("tnl", "norm"),
        ("tnl", "activation"),
        ("llama", "rotation"),
        ("hgrn", "scan"),
        ("mamba", "selective_scan"),
    ),
    "decode": (
        ("tnl", "lightning"),
        ("hgrn2", "gated"),
        ("gdn", "delta"),
        ("gdn", "shortconv"),
        ("mamba2", "ssd"),
        ("mamba2", "shortconv"),
        ("lightnet", "additive"),
        ("llama", "attention"),
        ("tnl", "matvec"),
    ),
    "mad": (
        ("mad-attention-swiglu", "attention"),
        ("mad-hyena-swiglu", "longconv"),
        ("mad-hyena-experts-swiglu", "longconv"),
        ("mad-mh-hyena-swiglu", "longconv"),
    ),
    "images": (("lightnet-dit-32px", "additive"), ("lightnet-dit-32px", "modal")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--ops", nargs="+", help="only these")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    constants = timing.constants(f"python benchmarks/buys.py {shlex.join(sys.argv[1:])}")
    path = timing.RESULTS / f"buys-{timing.short_name(constants['gpu'])}.csv"
    print(f"{constants['gpu']}\n{'op':<16}{'step':<12}{'model':<26}{'ms':>9}{'without':>9}{'buys':>8}", flush=True)
    for kind in options.cases:
        for (model, op), batch in itertools.product(CASES[kind], (1, 64) if kind == "decode" else (0,)):
            if model not in (options.models or [model]) or op not in (options.ops or [op]):
                continue
            row = {"ops": op, "step": f"{kind} {batch}" if batch else kind, "model": model}
            row |= compare(TIMERS[kind], model, op, batch)
            print(
                f"{op:<16}{row['step']:<12}{model:<26}{row['with_ms']:>9}{row['without_ms']:>9}{row['buys']:>8}"
                f"  {row['least']} to {row['most']} {row['note']}",
                flush=True,
            )
            if options.csv:
                timing.update(path, [row | constants], KEYS)


@contextlib.contextmanager
def without(op: str | None) -> Iterator[None]:
    """Calls of the op take its PyTorch form."""
    use = backend.use_triton
    backend.use_triton = lambda *call: call[0] != op and use(*call)
    try:
        yield
    finally:
        backend.use_triton = use


def compare(make: Callable, model: str, op: str, batch: int) -> dict:
    """Times of both forms, in turns."""
    times: dict[str | None, list[float]] = {None: [], op: []}
    note = ""
    time = make(model, batch)
    for left_out in (None, op) * ROUNDS:
        slow = bool(times[op]) and times[op][0] > SLOW * times[None][0]
        if left_out and (note or slow):
            continue
        try:
            with without(left_out):
                times[left_out].append(time(left_out))
        except torch.OutOfMemoryError:
            assert left_out, "the form with kernels does not fit into memory"
            note = "without: out of memory"
        gc.collect()
        torch.cuda.empty_cache()
    row = {"with_ms": round(statistics.median(times[None]), 4)}
    if note:
        return row | dict.fromkeys(("without_ms", "buys", "least", "most"), "") | {"note": note}
    saved = [1 - fast / slow for fast, slow in itertools.product(*times.values())]
    shares = {"buys": 1 - row["with_ms"] / statistics.median(times[op]), "least": min(saved), "most": max(saved)}
    row |= {"without_ms": round(statistics.median(times[op]), 4)}
    return row | {name: round(share, 4) for name, share in shares.items()} | {"note": ""}


# Each makes a function of the op whose kernels are left out, called inside `without`, that gives milliseconds.


def make_training(model: str, _: int) -> Callable[[str | None], float]:
    name, _, documents = model.partition(" ")
    return time_step(steps.train_step(name, documents=8 if documents else 1))


def make_decoding(name: str, batch: int) -> Callable[[str | None], float]:
    model = build_model(models.config(name), device="cuda").requires_grad_(False).eval()
    lower_precision(model, torch.bfloat16)

    @functools.cache
    def served(left_out: str | None) -> decode.Served:  # captures a CUDA graph
        return decode.Served(copy.deepcopy(model), batch, torch.float32)

    @torch.no_grad()
    def time(left_out: str | None) -> float:
        advance, rounds = served(left_out).advance, served(left_out).write_every
        timing.warm_up(advance)
        return timing.time_calls(lambda: [advance() for _ in range(rounds)], 20) / rounds

    return time


def make_bundle(name: str, _: int) -> Callable[[str | None], float]:
    options = argparse.Namespace(batch=128, length=128, device="cuda", vocab=[16], profile=None)
    configs = [fit_length(mad_model(name, 16), options.length)]
    batches = [bundles.draw(options) for _ in range(bundles.GATE_STEPS)]
    expected = [bundles.train_alone(configs[0], seed, batches, "cuda") for seed in range(2)]

    def time(left_out: str | None) -> float:
        row = bundles.time_bundle(name, configs, "graph", 24, None, batches, expected, options)
        assert "not captured" not in row["note"], row["note"]
        return row["model_step_ms"]

    return time


def make_denoiser(recipe: str, _: int) -> Callable[[str | None], float]:
    step, inputs, _ = vision_gpu.make_step(get_recipe(recipe), 256, torch.device("cuda"), compile=False)
    return time_step(lambda: step(*inputs))


def time_step(step: Callable[[], object]) -> Callable[[str | None], float]:
    def time(left_out: str | None) -> float:
        timing.warm_up(step, 1)
        return timing.time_calls(step, 3)

    return time


TIMERS = {"train": make_training, "decode": make_decoding, "mad": make_bundle, "images": make_denoiser}

if __name__ == "__main__":
    main()
