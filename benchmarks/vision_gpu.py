"""Experiments with image models and masked language models on one GPU, each below 20 minutes on an H200.

    python benchmarks/vision_gpu.py cifar  --csv          attention, LightNet, LightNet without TPE, HGRN2: 3 seeds
    python benchmarks/vision_gpu.py cifar2 --csv          ablations and further mixers, one seed
    python benchmarks/vision_gpu.py denoise --csv --extractor WEIGHTS       denoisers, scored by 10,000 samples
    python benchmarks/vision_gpu.py masked --csv          BERT against LightNet, then SST-2
    python benchmarks/vision_gpu.py sampling --csv        samples of 50 DDIM steps, with and without a CUDA graph
    python benchmarks/vision_gpu.py steps --csv           training steps of denoisers of 680 million parameters
    python benchmarks/vision_gpu.py table                 the rows measured so far, from the CSV file

CIFAR-10 is read from --data (train.parquet, test.parquet), SST-2 from --glue. Every run is a run folder in --out and a
training that is done is not made again, so the same command goes on after --minutes. Rows are put into
benchmarks/results/vision_gpu-<gpu>.csv with commit, versions and command. First a gate: two layers of each model must
give what float64 gives on the CPU. `--steps 2 --device cpu` tries a script on a CPU; these rows are not kept.
"""

import argparse
import itertools
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
from vision_runs import Plan, execute, merged

from linnet.runs import RunFolder

KEYS = ("experiment", "variant", "seed")

IMAGES = {
    "batch_size": 512,
    "precision": "bfloat16",
    "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.05},
    "schedule": {"name": "cosine", "warmup": 0.1, "final": 0.01},
    "run": {"checkpoint_every": 0, "evaluate_every": 500, "log_every": 50, "compile": True},
}
CIFAR = merged(
    IMAGES,
    {
        "objective": "images",
        "epochs": 30,
        "augment": {"kind": "crop_flip", "padding": 4, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1},
    },
)
DENOISE = merged(
    IMAGES,
    {
        "objective": "diffusion",
        "batch_size": 256,
        "steps": 4000,
        "augment": {"kind": "flip"},
        "average": {"decay": 0.9999, "warmup": True},
        "optimizer": {"learning_rate": 5e-4, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup": 200},
        "run": {"evaluate_every": 2000},
    },
)
MASKED = {
    "objective": "masked",
    "seq_len": 128,
    "batch_size": 512,
    "steps": 6000,
    "precision": "bfloat16",
    "data": {"tokenizer": {"kind": "wordpiece", "vocab_size": 8192}},
    "optimizer": {"learning_rate": 1e-3, "betas": [0.9, 0.98], "eps": 1e-12, "weight_decay": 0.01, "clip": 0.5},
    "schedule": {"name": "linear", "warmup": 0.1, "final": 0.0},
    "run": {"checkpoint_every": 0, "evaluate_every": 2000, "log_every": 100, "compile": True},
}
SENTENCES = {
    "objective": "sentences",
    "batch_size": 16,
    "epochs": 3,
    "model": {"dropout": 0.1},
    "optimizer": {"learning_rate": 4e-5, "weight_decay": 0.01},
    "schedule": {"name": "cosine", "warmup": 0.1, "final": 0.0},
    "run": {"checkpoint_every": 0, "log_every": 500},
}

LIGHTNET, NO_LRPE = "lightnet-vit-32px", {"lightnet": {"lrpe": False}}
IN_DIT_SHAPE = {"recipe": "dit-32px", "position": "none"}
OPTIONS = {"lightnet": {"num_heads": 4, "norm": "layernorm"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "cifar": {
        "lightnet": LIGHTNET,
        "attention": "vit-32px",
        "lightnet, no TPE": {"recipe": LIGHTNET, "tpe": None},
        "hgrn2, two scans": "hgrn2-vit-32px",
    },
    "cifar2": {
        "lightnet, no LRPE": {"recipe": LIGHTNET, "options": NO_LRPE},
        "lightnet, shared directions": {"recipe": LIGHTNET, "options": {"tpe": {"directions": "shared"}}},
        "hgrn2, cross scans": {"recipe": "hgrn2-vit-32px", "scan": "cross"},
        "tnl": {"recipe": "hgrn2-vit-32px", "layout": "tnl+sglu x12", "options": {"tnl": {"num_heads": 3}}},
        "gla": {"recipe": "hgrn2-vit-32px", "layout": "gla+sglu x12", "options": {"gla": {"num_heads": 3}}},
        "lightnet, base 10000": {"recipe": LIGHTNET, "options": {"lightnet": {"lrpe_base": 10000.0}}},
    },
    "denoise": {
        "dit": "dit-32px",
        "lightnet": IN_DIT_SHAPE | {"layout": "tpe lightnet+mlp x12", "options": OPTIONS},
        "lightnet, no TPE": IN_DIT_SHAPE | {"layout": "lightnet+mlp x12", "options": OPTIONS},
        "lightnet, no LRPE": IN_DIT_SHAPE
        | {"layout": "tpe lightnet+mlp x12", "options": {"lightnet": OPTIONS["lightnet"] | {"lrpe": False}}},
        "lightnet, tokens": "lightnet-dit-32px",
    },
    "masked": {"attention": "bert-4x512", "lightnet": "lightnet-bert-4x512"},
}
IN_DIT_XL_SHAPE = {"recipe": "dit-xl", "position": "none", "layout": "tpe lightnet+mlp x28"}
LARGE: dict[str, Any] = {  # of `steps`; the first is what the others are compared with
    "dit-xl": "dit-xl",
    "lightnet, shape of dit-xl": IN_DIT_XL_SHAPE | {"options": {"lightnet": {"num_heads": 18, "norm": "layernorm"}}},
    "lightnet-dit-xl": "lightnet-dit-xl",
}
BASES = {"cifar": CIFAR, "cifar2": CIFAR, "denoise": DENOISE, "masked": MASKED}
SEEDS = {"cifar": [0, 1, 2], "cifar2": [0], "denoise": [0], "masked": [0]}
WORKERS = {"cifar": 3, "cifar2": 3, "denoise": 2, "masked": 2}  # trainings that share the GPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=[*VARIANTS, "sampling", "steps", "table"])
    parser.add_argument("--data", type=Path, default=Path("shared/data/cifar10"))
    parser.add_argument("--glue", type=Path, default=Path("shared/data/sst2"), help="folder of SST-2")
    parser.add_argument("--text", nargs="+", default=["stdlib"], help="text of `masked`: about 100 MB")
    parser.add_argument("--extractor", help="of `denoise`: file of EfficientNet-Lite0 weights, or a classifier's run")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[256], help="of `sampling`: samples drawn together")
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 64], help="of `steps`: sides of the latents")
    parser.add_argument("--tokens", type=int, default=8192, help="of `steps`: patches per batch")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these, by their whole names")
    parser.add_argument("--out", type=Path, default=Path("runs/vision-gpu"))
    parser.add_argument("--workers", type=int, help="trainings at the same time")
    parser.add_argument("--minutes", type=float, default=18, help="start no training after so many minutes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, help="train so many steps only, in float32, to try the script")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    command = f"python benchmarks/vision_gpu.py {shlex.join(sys.argv[1:])}"
    known = LARGE if options.experiment == "steps" else VARIANTS.get(options.experiment, {})
    if unknown := [name for name in options.variants or [] if name not in known]:
        parser.error(f"--variants: {', '.join(unknown)} are none of {'; '.join(known) or 'any'}")
    if options.experiment == "table":
        for path in sorted(timing.RESULTS.glob("vision_gpu-*.csv")):
            show(timing.read(path))
        return
    constants = timing.constants(command)
    rows = {"sampling": sampling, "steps": steps}.get(options.experiment, measure)(options, constants)
    show([{name: str(value) for name, value in row.items()} for row in rows])


def measure(options: argparse.Namespace, constants: dict[str, str]) -> list[dict]:
    experiment, began = options.experiment, time.monotonic()
    plans = [
        Plan(experiment, variant, seed, settings(options, model))
        for seed in options.seeds or SEEDS[experiment]
        for variant, model in VARIANTS[experiment].items()
        if not options.variants or variant in options.variants
    ]
    if experiment == "denoise" and options.extractor is not None:
        check_extractor(options.extractor)
    for variant in dict.fromkeys(plan.variant for plan in plans):
        gate(variant, next(plan.values for plan in plans if plan.variant == variant), torch.device(options.device))
    cache, workers = options.out / "cache", options.workers or WORKERS[experiment]
    found = execute(plans, options.out, cache, workers, options.minutes)
    keep = options.csv and options.steps is None
    path = timing.RESULTS / f"vision_gpu-{timing.short_name(constants.get('gpu', 'cpu'))}.csv"
    rows = []
    for plan, folder in found.items():
        result = folder.result()
        row = {"experiment": plan.experiment, "variant": plan.variant, "seed": plan.seed}
        for name in ("accuracy", "loss", "mse", "masked_perplexity"):
            row[name] = round(result[name], 5) if result.get(name) is not None else ""
        row |= {"parameters": result["params_total"], "steps": result["steps"], "flops": result["flops"]}
        row |= {"seconds": round(result["seconds"], 1), "workers": workers}
        new = not any(all(old[key] == str(row[key]) for key in KEYS) for old in timing.read(path))
        if keep and new:  # before what follows, which can take longer than the training
            timing.update(path, [row | constants], KEYS)
        left = options.minutes - (time.monotonic() - began) / 60
        if experiment == "denoise" and left > 0:
            row |= score_samples(folder, options)
        if experiment == "masked" and left > 0:
            row |= fine_tune(folder, plan, options)
        rows.append(row | constants)
        if keep:  # after each row, so that an interrupted call keeps its rows
            timing.update(path, rows[-1:], KEYS)
    return rows


def sampling(options: argparse.Namespace, constants: dict[str, str]) -> list[dict]:
    """Returns the time of a batch of samples (50 DDIM steps, bfloat16, random weights) with a graph and with a graph of
    the compiled network, each beside that without a graph."""
    from linnet.models import build, get_recipe
    from linnet.vision.sampler import ImageSampler, SampleConfig

    few = options.steps is not None
    config = SampleConfig(steps=options.steps if few else 50)
    path = timing.RESULTS / f"vision_gpu-{timing.short_name(constants.get('gpu', 'cpu'))}.csv"
    rows = []
    for recipe, count in itertools.product(("dit-32px", "lightnet-dit-32px"), [2] if few else options.batches):
        model = build("denoiser", get_recipe(recipe), 0, options.device)
        seconds, images = {}, {}
        for form in ("eager", "graph", "compiled graph"):
            sampler = ImageSampler(model, precision="bfloat16", graphs="graph" in form, compile="compiled" in form)
            times = []
            for _ in range(1 if few else 4):
                began = time.perf_counter()
                # Two batches: a graph is captured in the first, and both are in the time.
                drawn = list(sampler.draw([number % 10 for number in range(2 * count)], config, batch=count))
                images[form] = torch.cat(drawn).cpu()
                times.append((time.perf_counter() - began) / 2)
            seconds[form] = min(times)
        for form in ("graph", "compiled graph"):
            of = ", compiled" if form == "compiled graph" else ""
            row = {"experiment": "sampling", "variant": f"{recipe}, batch {count}{of}", "seed": 0}
            row |= {"steps": config.number_of_steps, "form": form, "seconds": round(seconds[form], 4)}
            row |= {"eager_seconds": round(seconds["eager"], 4)}
            row |= {"speedup": round(seconds["eager"] / seconds[form], 3)}
            row |= {"equal": torch.equal(images["eager"], images[form])}
            rows.append(row | constants)
            if options.csv and not few:
                timing.update(path, rows[-1:], KEYS)
    return rows


def steps(options: argparse.Namespace, constants: dict[str, str]) -> list[dict]:
    """Returns training steps per second of large denoisers (bfloat16), each in its faster form."""
    from linnet.config import parse
    from linnet.train.objectives import read_training

    few, device = options.steps is not None, torch.device(options.device)
    path = timing.RESULTS / f"vision_gpu-{timing.short_name(constants.get('gpu', 'cpu'))}.csv"
    rows, rival = [], {}
    for side, (name, model) in itertools.product(options.sides, LARGE.items()):
        if options.variants and name not in options.variants:
            continue
        values = merged(DENOISE, {"model": model, "data": {"source": "digits"}, "run": {"device": options.device}})
        if side == options.sides[0]:
            gate(name, values, device)
        config = read_training(values | {"seed": 0}, name).model
        changes: dict[str, Any] = {"image_size": side}
        if few:
            changes["layout"] = f"{config.layout.rpartition(' x')[0]} x2"
        config = parse(type(config), config.model_dump() | changes)
        batch = 2 if few else max(1, options.tokens // (side // config.patch) ** 2)
        seconds, parameters = time_steps(config, batch, device, few)
        form = min(seconds, key=seconds.__getitem__)
        row = {"experiment": "steps", "variant": f"{name}, side {side}, batch {batch}", "seed": 0}
        row |= {"parameters": parameters, "form": form, "seconds": round(seconds[form], 4)}
        if name == "dit-xl":
            rival[side] = seconds[form]
        row["speedup"] = round(rival[side] / seconds[form], 3) if side in rival else ""
        rows.append(row | constants)
        told = ", ".join(f"{form} {1 / each:.3f} steps/s" for form, each in seconds.items())
        print(f"{row['variant']}: {told}, {row['speedup']} of dit-xl", flush=True)
        if options.csv and not few:
            timing.update(path, rows[-1:], KEYS)
    return rows


def time_steps(config: Any, batch: int, device: torch.device, few: bool) -> tuple[dict[str, float], int]:
    """Returns the median seconds of a training step by form, compiled with and without a graph, and the parameters.

    A step is a forward and backward pass of the error of the noise, and a step of AdamW. `few`: two steps, not
    compiled.
    """
    from linnet.ops.capture import WARM_UP, Captured

    torch.compiler.reset()
    run, inputs, parameters = make_step(config, batch, device, compile=not few)
    calls = {"compiled": run} if few else {"compiled": run, "compiled graph": Captured(run, device)}
    seconds = {}
    for form, call in calls.items():
        times = []
        for _ in range(2 if few else WARM_UP + 11):
            began = time.perf_counter()
            float(call(*inputs))  # waits for the device
            times.append(time.perf_counter() - began)
        seconds[form] = statistics.median(times[1 if few else WARM_UP + 1 :])
    return seconds, parameters


def make_step(config: Any, batch: int, device: torch.device, compile: bool) -> tuple[Callable, tuple, int]:
    """Returns a training step of a denoiser, its inputs, and the number of the model's parameters."""
    from linnet.models import build

    model = build("denoiser", config, 0, device)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=on_gpu, capturable=on_gpu)
    noisy = torch.randn(batch, config.channels, config.image_size, config.image_size, device=device)
    t, classes = (torch.randint(most, (batch,), device=device) for most in (1000, config.classes))

    def error(noisy: torch.Tensor, t: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(noisy, t, classes).float()[:, : noisy.shape[1]], noisy)

    error = torch.compile(error, dynamic=False) if compile else error

    def run(noisy: torch.Tensor, t: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            value = error(noisy, t, classes)
        with torch.autograd.set_multithreading_enabled(False):  # a capture must see the backward in this thread
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return run, (noisy, t, classes), sum(p.numel() for p in model.parameters())


def settings(options: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Returns the configuration of a training."""
    values = merged(BASES[options.experiment], {"model": model, "run": {"device": options.device}})
    if options.experiment == "masked":
        values["data"] = values["data"] | {"source": options.text if options.text != ["stdlib"] else "stdlib"}
    else:
        values["data"] = {"source": [str(options.data)]}
    if options.steps is not None:
        values = merged(values, {"steps": options.steps, "precision": "float32", "batch_size": 8})
        values = merged(values, {"run": {"compile": False, "evaluate_every": 0}})
        values.pop("epochs", None)
        if options.experiment == "masked":
            values |= {"evaluate_tokens": 1024}
        else:
            values |= {"evaluate_images": 16}
        if options.experiment == "denoise":  # pictures and scores of many samples take minutes on a CPU
            values = merged(values, {"run": {"pictures": 0}})
    return values


def gate(variant: str, values: dict[str, Any], device: torch.device) -> None:
    """Ends the program if two layers of a model do not give on the device what float64 gives on the CPU."""
    from linnet.models import build, kind_of
    from linnet.train.objectives import read_training

    config = read_training(values | {"seed": 0}, variant).model
    layout, _, _ = config.layout.rpartition(" x")
    config = type(config)(**config.model_dump() | {"layout": f"{layout} x2"})
    kind = kind_of(config).name
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    exact, found = build(kind, config, 0).eval(), build(kind, config, 0).eval()
    with torch.no_grad():
        for parameter in exact.parameters():  # a denoiser's head and gates start at zero, which would hide its layers
            if not parameter.any():
                parameter.normal_(std=0.02)
    found.load_state_dict(exact.state_dict())
    exact.double(), found.to(device)
    if kind == "masked_lm":
        inputs: tuple = (torch.randint(config.vocab_size, (2, 100)),)
    else:
        images = torch.rand(2, config.channels, config.image_size, config.image_size)
        inputs = (images,) if kind == "classifier" else (images, torch.tensor([3, 900]), torch.tensor([0, 1]))
    with torch.no_grad():
        expected = exact(*(x.double() if x.is_floating_point() else x for x in inputs))
        given = found(*(x.to(device) for x in inputs)).double().cpu()
    error = ((given - expected).norm() / expected.norm().clamp(min=1e-12)).item()
    print(f"gate {variant}: relative error {error:.1e}", flush=True)
    if not error < 2e-3:
        sys.exit(f"{variant} is wrong on this device; nothing was trained")


def check_extractor(extractor: str) -> None:
    """Ends the program before any training if samples cannot be scored with an extractor."""
    from linnet.config import ConfigError
    from linnet.vision.evaluate.features import find_extractor

    try:
        problems = find_extractor(extractor).problems(3, 32)
    except ConfigError as error:
        problems = error.problems
    if problems:
        sys.exit("--extractor: " + "; ".join(problems))


def score_samples(folder: RunFolder, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the distances of samples to real images, by `linnet evaluate samples`."""
    if options.extractor is None:
        return {}
    from linnet.evaluate.session import prepare
    from linnet.vision.evaluate.samples import SampleEvaluator
    from linnet.vision.sampler import SampleConfig

    count = options.samples if options.steps is None else 16
    drawn = SampleConfig(steps=options.steps)  # null: the sampler's own number
    evaluator = SampleEvaluator(
        extractor=options.extractor, count=count, settings=drawn, batch=256, cache=options.out / "cache"
    )
    session = prepare(folder.path, [evaluator], options.device)
    record = evaluator.run(session)
    record.save(folder.path)
    return {result.metric: round(result.value, 5) for result in record.results}


def fine_tune(folder: RunFolder, plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the score on SST-2's dev sentences after fine-tuning from a masked run."""
    if not options.glue.is_dir():
        print(f"{options.glue}: is missing, so nothing is fine-tuned", flush=True)
        return {}
    data = {"source": str(options.glue), "task": "sst2"}
    values = merged(SENTENCES, {"init_from": str(folder.path), "data": data})
    values = merged(values, {"run": {"device": options.device}})
    if options.steps is not None:
        values.pop("epochs")
        values |= {"steps": options.steps}
    tuned = execute(
        [Plan("sst2", plan.variant, plan.seed, values)], options.out, options.out / "cache", 1, options.minutes
    )
    for made in tuned.values():
        result = made.result()
        scores = {name: result.get(name) for name in ("accuracy", "loss", "score")}
        return {f"sst2_{name}": round(score, 5) for name, score in scores.items() if score is not None}
    return {}


def show(rows: list[dict[str, str]]) -> None:
    """Prints one line per variant: the mean over seeds of every score."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["experiment"], row["variant"]), []).append(row)
    given = {"experiment", "variant", "seed", "flops", "parameters", "steps", "workers", "command", "commit", "gpu"}
    for (experiment, variant), same in groups.items():
        words = []
        for name in same[0]:
            values = [float(row[name]) for row in same if row.get(name) and _is_number(row[name])]
            if values and name not in given:
                each = f" ({' '.join(f'{value:.4g}' for value in values)})" if len(values) > 1 else ""
                words.append(f"{name} {statistics.mean(values):.5g}{each}")
        print(f"{experiment:<9}{variant:<30}{'  '.join(words)}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
