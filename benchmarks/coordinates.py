"""The coordinate check of every mixer: does muP keep activations at one size at every width, and standard not?

    python benchmarks/coordinates.py --csv
    python benchmarks/coordinates.py --csv --mixers tnl,hgrn2,lightnet,cosformer2 --widths 256,512,1024,2048
    python benchmarks/coordinates.py --dimensions

Two blocks of the mixer with SwiGLU (a mixer that takes the place of the channel mixer too stands alone), 8 rows of 64
bytes of the standard library's source, AdamW at 1e-3, ten steps, four seeds. `--csv` puts a row per mixer,
parametrisation and range of widths into benchmarks/results/coordinates.csv; other rows stay. `--dimensions` prints
how many dimensions the features of the 512 tokens have before the first step, at widths 64 to 2048: the participation
ratio tr(G)^2 / tr(G^2) of the matrix G of their inner products. Where it still rises with the width, a model is
narrower than its features. docs/mixers.md has the tables.
"""

import argparse
import csv
import time
from pathlib import Path

import torch

from linnet.layers.base import MIXERS
from linnet.models import build_model
from linnet.models.parametrisation import at_width
from linnet.train import read_training
from linnet.train.coordinates import WIDTHS, check_coordinates
from linnet.train.preflight import preflight

RESULTS = Path(__file__).parent / "results" / "coordinates.csv"
ALONE = ("mamba", "mamba2", "mamba3")
HEADS = {"mh_hyena": 16}
COLUMNS = ("mixer", "widths", "seeds", "parametrisation", "passed")
COLUMNS += ("worst_ratio", "worst_module", "worst_step", "worst_values", "modules_that_fail")
DIMENSIONS = (64, 128, 256, 512, 2048)  # widths of --dimensions


def training(mixer: str):
    """Returns the training whose model is checked."""
    options = {}
    if "num_heads" in MIXERS[mixer].Config.model_fields:
        options = {mixer: {"num_heads": HEADS.get(mixer, 2)}}
    layout = f"{mixer} x2" if mixer in ALONE else f"{mixer}+swiglu x2"
    if MIXERS[mixer].before_layers:
        layout, options = f"{mixer} tnl+swiglu x2", {"tnl": {"num_heads": 2}}
    model = {"d_model": 64, "layout": layout, "options": options, "parametrisation": "mup", "base_width": 64}
    rate = {"learning_rate": 1e-3}
    return read_training(
        {"model": model, "seq_len": 64, "batch_size": 8, "steps": 100, "optimizer": rate, "run": {"device": "cpu"}}
    )


def dimensions(mixer: str, cache: str) -> list[float]:
    """Returns the participation ratio of the last norm's output over the tokens of a batch, for each of DIMENSIONS."""
    config = training(mixer)
    tokens = preflight(config, cache).objective.batches().batch(0)[0]
    found = []
    for width in DIMENSIONS:
        model = build_model(at_width(config.model, width))
        with torch.no_grad():
            x = model.backbone(model.embed(tokens))[0].flatten(0, 1).double()
        products = x @ x.T
        found.append((products.trace() ** 2 / products.square().sum()).item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--cache", default="runs/cache")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--dimensions", action="store_true")
    parser.add_argument("--csv", action="store_true")
    arguments = parser.parse_args()
    widths = tuple(map(int, arguments.widths.split(",")))
    for mixer in arguments.mixers.split(","):
        if arguments.dimensions:
            print(f"{mixer:<14}", *(f"{one:5.1f}" for one in dimensions(mixer, arguments.cache)), flush=True)
            continue
        begun, rows = time.process_time(), []
        for check in check_coordinates(training(mixer), arguments.cache, widths, arguments.seeds):
            worst, failed = check.worst, check.failed()
            values = " ".join(f"{value:.3g}" for value in worst.values)
            where = (f"{worst.ratio:.4g}", worst.module, worst.step, values, " ".join(failed[:6]))
            own = (mixer, f"{widths[0]}-{widths[-1]}", arguments.seeds, check.parametrisation, check.passed, *where)
            rows.append(dict(zip(COLUMNS, own, strict=True)))
            print(f"{mixer:<14} {check.parametrisation:<9} {'passes' if check.passed else 'fails':<7}", *where)
        print(f"  {time.process_time() - begun:.0f} CPU s", flush=True)
        if arguments.csv:
            write(rows)


def write(rows: list[dict]) -> None:
    """Puts the rows of a mixer and a range of widths in the place of its old ones."""
    old = list(csv.DictReader(RESULTS.open())) if RESULTS.is_file() else []
    new = {(row["mixer"], row["widths"]) for row in rows}
    kept = [row for row in old if (row["mixer"], row["widths"]) not in new]
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(kept + rows, key=lambda row: (row["mixer"], int(row["widths"].partition("-")[0]))))


if __name__ == "__main__":
    main()
