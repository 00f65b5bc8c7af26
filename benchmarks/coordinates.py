"""The coordinate check of every mixer, at widths 64 to 512: does muP keep activations at one size, and standard not?

    python benchmarks/coordinates.py --csv
    python benchmarks/coordinates.py --mixers tnl,hgrn2

Two blocks of the mixer with SwiGLU (a mixer that takes the place of the channel mixer too stands alone), 8 rows of 64
bytes of the standard library's source, AdamW at 1e-3, ten steps, three seeds. `--csv` puts a row per mixer and
parametrisation into benchmarks/results/coordinates.csv; rows of other mixers stay. docs/mixers.md has the table.
"""

import argparse
import csv
import time
from pathlib import Path

from linnet.layers.base import MIXERS
from linnet.train import read_training
from linnet.train.coordinates import check_coordinates

RESULTS = Path(__file__).parent / "results" / "coordinates.csv"
ALONE = ("mamba",)
HEADS = {"mh_hyena": 16}
COLUMNS = ("mixer", "parametrisation", "passed", "worst_ratio", "worst_module", "worst_step", "modules_that_fail")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--cache", default="runs/cache")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv", action="store_true")
    arguments = parser.parse_args()
    for mixer in arguments.mixers.split(","):
        begun, rows = time.process_time(), []
        for check in check_coordinates(training(mixer), arguments.cache, seeds=arguments.seeds):
            worst, failed = check.worst, check.failed()
            where = (f"{worst.ratio:.4g}", worst.module, worst.step, " ".join(failed[:6]))
            rows.append(dict(zip(COLUMNS, (mixer, check.parametrisation, check.passed, *where), strict=True)))
            print(f"{mixer:<14} {check.parametrisation:<9} {'passes' if check.passed else 'fails':<7}", *where)
        print(f"  {time.process_time() - begun:.0f} CPU s", flush=True)
        if arguments.csv:
            write(rows)


def write(rows: list[dict]) -> None:
    """Puts the rows of a mixer in the place of its old ones."""
    old = list(csv.DictReader(RESULTS.open())) if RESULTS.is_file() else []
    mixers = {row["mixer"] for row in rows}
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            sorted([row for row in old if row["mixer"] not in mixers] + rows, key=lambda row: row["mixer"])
        )


if __name__ == "__main__":
    main()
