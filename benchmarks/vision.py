"""Images per second of whole vision models against the side of the images, with peers in the same run.

    python benchmarks/vision.py --csv --minutes 18          an H200: gates, then rows in order of importance, then bars
    python benchmarks/vision.py --gates                     only the gates
    python benchmarks/vision.py --device cpu --models lightnet-vit-8px --peer vit-8px --sides 8 --tokens 256

First the gates: on the device, every model must give the logits and the gradient that float64 gives on the CPU. Then
training steps (AdamW, autocast over float32 weights) and inference (weights in bfloat16), with the same number of
patches per batch at every side: paper 003, Figure 1, at the level of models. The peer is transformers' ViT with SDPA,
eager and compiled; its faster form is the rival. Rows go into benchmarks/results/vision-<gpu>.csv after each
measurement, and a row of the same commit is not measured again, so a second call goes on. Not run, because they have no
wheels and need nvcc: the extensions of Vim and VMamba.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator

import timing
import torch

from linnet.models import get_recipe, kind_of_recipe
from linnet.vision.throughput import (
    FORMS,
    MODEL_COLUMNS,
    MODES,
    Case,
    Linnet,
    System,
    Transformers,
    at_side,
    measure,
    rivals,
)

KEYS = (*MODEL_COLUMNS, "dtype")
PEER_FORMS = ("eager graph", "eager")  # those that keep transformers' flash attention
FLAT = (384, 2048)  # sides between which pixels per second of a linear model should stay within FLAT_SHARE
FLAT_SHARE = 0.1
BARS = {224: 1.0, 1024: 2.2, 2048: 5.5}  # side: images per second relative to the rival, in training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["lightnet-vit-s", "hgrn2-vit-s", "deit-s"])
    parser.add_argument("--peer", default="deit-s", help="recipe whose shape transformers' ViT gets")
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 1024, 2048, 384, 512, 768, 1536])
    parser.add_argument("--tokens", type=int, default=65_536, help="patches per batch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=18, help="start no measurement after so many minutes")
    parser.add_argument("--forms", nargs="+", default=["compiled graph", "compiled", "eager"], choices=FORMS)
    parser.add_argument(
        "--recompute", choices=("selective", "block"), help="activations of Linnet's models that are computed again"
    )
    parser.add_argument("--all", action="store_true", help="every form of every model at every side")
    parser.add_argument("--gates", action="store_true", help="check the models, time nothing")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    unknown = [name for name in (*options.models, options.peer) if kind_of_recipe(name) != "classifier"]
    if unknown:
        sys.exit(f"no recipes of image classifiers: {', '.join(unknown)}")
    device = torch.device(options.device)
    for name in options.models:
        gate(name, device)
    if options.gates:
        return
    began = time.monotonic()
    constants = timing.constants(f"python benchmarks/vision.py {shlex.join(sys.argv[1:])}")
    path = timing.RESULTS / f"vision-{timing.short_name(constants.get('gpu', 'cpu'))}.csv"
    known = {tuple(row[key] for key in KEYS): row for row in timing.read(path) if row["commit"] == constants["commit"]}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    for name, system, case in plan(options):
        tokens = (case.side // system.config.patch) ** 2
        ids = (name, system.name, case.form, case.mode, case.side, tokens, max(1, case.tokens // tokens))
        found = known.get((*map(str, ids), str(dtype).removeprefix("torch.")))
        if found is not None:
            rows.append(typed(found))
            continue
        if time.monotonic() - began > 60 * options.minutes:
            print(f"{name} {system.name} {case.form} {case.mode} {case.side}: no time left; run again", flush=True)
            continue
        for row in measure(system, name, [case], device, dtype):
            told = row["error"] or f"{row['images_per_second']:,.1f} images/s, first call {row['first_s']} s"
            print(f"{name:<20}{system.name:<13}{case.form:<16}{case.mode:<10}{case.side:>5}  {told}", flush=True)
            rows.append(row)
            if options.csv:
                timing.update(path, [row | constants], KEYS)
    summary(rows)


def plan(options: argparse.Namespace) -> Iterator[tuple[str, System, Case]]:
    """Yields what to measure, the bars first: training before inference, the sides in the order given.

    Compiled transformers loses its flash attention, and is measured at the first side alone unless `--all` is given;
    likewise the further forms of Linnet's models. All models get the patches of the peer's recipe.
    """
    patch = get_recipe(options.peer).patch
    mode = options.recompute or "none"
    ours: list[tuple[str, System]] = [
        (
            name if mode == "none" else f"{name}, recompute {mode}",
            Linnet(get_recipe(name).model_copy(update={"patch": patch}), mode),
        )
        for name in options.models
    ]
    peer: tuple[str, System] = (options.peer, Transformers(get_recipe(options.peer), options.peer))
    for mode in MODES if options.recompute is None else MODES[:1]:
        for side in options.sides:
            for name, system in (ours[0], peer, *ours[1:]):
                own = options.forms if system is not peer[1] else [*PEER_FORMS, *options.forms]
                first = side == options.sides[0]
                usual = PEER_FORMS if system is peer[1] else options.forms[:1]
                forms = dict.fromkeys(own) if options.all or first else usual
                for form in forms:
                    yield name, system, Case(side, options.tokens, mode, form)


def gate(name: str, device: torch.device) -> None:
    """Ends the program if a model's logits or gradient on the device are not those of float64 on the CPU.

    The first two layers are checked, at a side whose number of patches a kernel's chunk does not divide.
    """
    config = get_recipe(name)
    layout, _, _ = config.layout.rpartition(" x")
    config = type(config)(**config.model_dump() | {"layout": f"{layout} x2"})
    system = Linnet(at_side(config, 7 * config.patch))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    exact, _ = system.build(7 * config.patch)
    images = torch.randint(256, (2, config.channels, 7 * config.patch, 7 * config.patch), dtype=torch.uint8)
    labels = torch.tensor([0, 1])
    found, _ = system.build(7 * config.patch)
    found.load_state_dict(exact.state_dict())
    exact.double(), found.to(device)
    results = []
    for model in (exact, found):
        where = next(model.parameters()).device
        logits = model(images.to(where))
        torch.nn.functional.cross_entropy(logits, labels.to(where)).backward()
        results.append((logits.detach().double().cpu(), model.patches.proj.weight.grad.double().cpu()))
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]
    print(
        f"gate {name}: relative error of logits {errors[0]:.1e}, of the patches' gradient {errors[1]:.1e}", flush=True
    )
    if not max(errors) < 2e-3:
        sys.exit(f"{name} is wrong on this device; nothing was timed")


def typed(row: dict[str, str]) -> dict:
    """Returns a row of the CSV file with its numbers as numbers."""
    whole = ("side", "tokens_per_image", "batch", "parameters", "pixels_per_second")
    real = ("images_per_second", "milliseconds", "memory_per_image_mib", "first_s")
    found: dict = dict(row)
    found |= {key: int(row[key]) for key in whole if row.get(key)}
    return found | {key: float(row[key]) for key in real if row.get(key)}


def summary(rows: list[dict]) -> None:
    """Prints the short table: every model against the rival, and the bars."""
    print(f"\n{'model':<20}{'mode':<11}{'side':>5}{'form':>16}{'images/s':>11}{'Mpixels/s':>11}{'x rival':>9}  rival")
    found = rivals(rows)
    for row in found:
        times = "" if row["times"] is None else f"{row['times']:.2f}"
        print(
            f"{row['model']:<20}{row['mode']:<11}{row['side']:>5}{row['form']:>16}{row['images_per_second']:>11,.1f}"
            f"{row['pixels_per_second'] / 1e6:>11,.1f}{times:>9}  {row['rival'] or ''}"
        )
    for row in found:
        if row["model"].startswith("lightnet") and row["mode"] == "training" and row["side"] in BARS and row["times"]:
            bar = BARS[row["side"]]
            print(
                f"bar {row['side']}: {row['times']:.2f} of at least {bar}: {'met' if row['times'] >= bar else 'MISSED'}"
            )
    for mode in ("training", "inference"):
        flat = [
            row["pixels_per_second"]
            for row in found
            if row["model"].startswith("lightnet") and row["mode"] == mode and FLAT[0] <= row["side"] <= FLAT[1]
        ]
        if len(flat) > 1:
            spread = max(flat) / min(flat) - 1
            verdict = "met" if spread <= FLAT_SHARE else "MISSED"
            print(f"bar flat, {mode}: pixels per second vary by {spread:.1%} of at most {FLAT_SHARE:.0%}: {verdict}")
    at = [row for row in rows if row["side"] == 2048 and row["mode"] == "training" and row.get("memory_per_image_mib")]
    ours = [row["memory_per_image_mib"] for row in at if row["model"].startswith("lightnet")]
    theirs = [row["memory_per_image_mib"] for row in at if row["system"] == Transformers.name]
    if ours and theirs:
        verdict = "met" if min(ours) <= min(theirs) else "MISSED"
        print(f"bar memory of a training image at 2048: {min(ours):,.0f} of {min(theirs):,.0f} MiB: {verdict}")


if __name__ == "__main__":
    main()
