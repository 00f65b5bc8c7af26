"""Image classifiers on two CPU cores: digits, ablations of LightNet's positions, Fashion-MNIST.

    python benchmarks/vision_cpu.py digits       three mixers, three seeds, 30 epochs
    python benchmarks/vision_cpu.py smoothed     LightNet and attention again, with label smoothing of 0.1
    python benchmarks/vision_cpu.py ablations    LightNet without TPE, with one kernel for both directions, without LRPE
    python benchmarks/vision_cpu.py fashion      5 epochs of Fashion-MNIST (apt-get install dataset-fashion-mnist)
    python benchmarks/vision_cpu.py table        the rows measured so far, from the CSV file

Test images of digits are the last 297, by other writers; those of Fashion-MNIST are its 10,000. The accuracy is that
of the last weights: nothing is chosen on the test images. `--csv` puts the rows into benchmarks/results/vision-cpu.csv,
with the commit, the versions and the command. Runs that are done are not made again. Seconds are those of one thread on
this machine, whatever else it does.
"""

import argparse
import shlex
import statistics
import sys
from pathlib import Path

import timing
from vision_runs import Plan, execute, merged

from linnet.evaluate.classification import wilson

RESULTS = timing.RESULTS / "vision-cpu.csv"
KEYS = ("experiment", "variant", "seed")
FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts it

DIGITS = {
    "objective": "images",
    "data": {"source": ["digits"]},
    "batch_size": 64,
    "epochs": 30,
    "optimizer": {"learning_rate": 2e-3, "weight_decay": 0.05},
    "schedule": {"name": "cosine", "warmup": 50, "final": 0.05},
    "run": {"checkpoint_every": 0, "evaluate_every": 100, "log_every": 20, "device": "cpu"},
}
FASHION_RUN = merged(DIGITS, {"data": {"source": [str(FASHION)]}, "epochs": 5, "run": {"evaluate_every": 500}})

VARIANTS = {
    "digits": {
        "lightnet": {"model": "lightnet-vit-8px"},
        "attention, learned table": {"model": "vit-8px"},
        "hgrn2, two scans": {"model": "hgrn2-vit-8px"},
    },
    "smoothed": {
        "lightnet": {"model": "lightnet-vit-8px", "augment": {"smoothing": 0.1}},
        "attention, learned table": {"model": "vit-8px", "augment": {"smoothing": 0.1}},
    },
    "ablations": {
        "lightnet, own directions": {"model": "lightnet-vit-8px"},
        "shared directions": {"model": {"recipe": "lightnet-vit-8px", "options": {"tpe": {"directions": "shared"}}}},
        "no TPE": {"model": {"recipe": "lightnet-vit-8px", "tpe": None}},
        "no LRPE": {"model": {"recipe": "lightnet-vit-8px", "options": {"lightnet": {"lrpe": False}}}},
        "neither": {"model": {"recipe": "lightnet-vit-8px", "tpe": None, "options": {"lightnet": {"lrpe": False}}}},
    },
    "fashion": {"lightnet": {"model": "lightnet-vit-28px"}},
}
BASES = {"digits": DIGITS, "smoothed": DIGITS, "ablations": DIGITS, "fashion": FASHION_RUN}
IMAGES = {"digits": 297, "smoothed": 297, "ablations": 297, "fashion": 10_000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=[*VARIANTS, "table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", help="only those whose names contain one of these words")
    parser.add_argument("--out", type=Path, default=Path("runs/vision-cpu"))
    parser.add_argument("--workers", type=int, default=1, help="trainings at the same time, of one thread each")
    parser.add_argument("--minutes", type=float, help="start no training after so many minutes")
    parser.add_argument("--steps", type=int, help="train so many steps only, to try the script")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    rows = timing.read(RESULTS)
    if options.experiment != "table":
        made = measure(options)
        if options.csv:
            timing.update(RESULTS, made, KEYS)
            rows = timing.read(RESULTS)
        else:
            rows = [{name: str(value) for name, value in row.items()} for row in made]
    show(rows)


def measure(options: argparse.Namespace) -> list[dict]:
    experiment = options.experiment
    if experiment == "fashion" and not FASHION.is_dir():
        sys.exit(f"{FASHION}: is missing; apt-get install dataset-fashion-mnist")
    changes = {} if options.steps is None else {"steps": options.steps, "epochs": None}
    plans = [
        Plan(experiment, variant, seed, merged(merged(BASES[experiment], values), changes))
        for seed in options.seeds
        for variant, values in VARIANTS[experiment].items()
        if not options.variants or any(word in variant for word in options.variants)
    ]
    found = execute(plans, options.out, options.out / "cache", options.workers, options.minutes)
    command = f"python benchmarks/vision_cpu.py {shlex.join(sys.argv[1:])}"
    rows = []
    for plan, folder in found.items():
        result = folder.result()
        row = {"experiment": plan.experiment, "variant": plan.variant, "seed": plan.seed}
        row |= {"accuracy": round(result["accuracy"], 5), "loss": round(result["loss"], 5)}
        row |= {"images": IMAGES[experiment], "parameters": result["params_total"]}
        row |= {"steps": result["steps"], "seconds": round(result["seconds"], 1)}
        rows.append(row | timing.constants(command))
    return rows


def show(rows: list[dict[str, str]]) -> None:
    """Prints the mean accuracy over seeds of each variant, with the interval that one test set of its size leaves."""
    print(f"{'experiment':<11}{'variant':<28}{'seeds':>6}{'accuracy':>10}   95 % interval       each seed")
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault((row["experiment"], row["variant"]), []).append(row)
    for (experiment, variant), same in groups.items():
        shares = [float(row["accuracy"]) for row in same]
        mean, images = statistics.mean(shares), int(same[0]["images"])
        low, high = wilson(round(mean * images), images)
        each = " ".join(f"{share:.2%}" for share in shares)
        print(f"{experiment:<11}{variant:<28}{len(same):>6}{mean:>10.2%}   {low:.2%} to {high:.2%}    {each}")


if __name__ == "__main__":
    main()
