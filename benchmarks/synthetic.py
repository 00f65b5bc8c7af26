"""Times how long each of the 66 settings of MAD, and MQAR, take to generate, in one process.

    python benchmarks/synthetic.py --csv

The mean number of targets in a test sample stands beside it. The last line is JSON. `--csv` writes
benchmarks/results/synthetic.csv.
"""

import argparse
import csv
import json
import time
from pathlib import Path

import timing

from linnet.data.synthetic import IGNORE, generate
from linnet.mad.settings import MQAR_SETTINGS, mad_settings

RESULTS = Path(__file__).parent / "results" / "synthetic.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3000, help="of a split and setting")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()

    rows = []
    for spec in ("paper", "mad-lab"):
        for setting in mad_settings(spec) + (MQAR_SETTINGS if spec == "paper" else ()):
            name = setting.name + (f",num_pairs={setting.task.num_pairs}" if setting.task.name == "mqar" else "")
            row = {"spec": spec, "setting": name, "tokens": setting.task.num_tokens}
            for split in ("train", "test"):
                began = time.perf_counter()
                samples = generate(setting.task, split, arguments.samples)
                row[f"{split}_seconds"] = round(time.perf_counter() - began, 3)
            row["test_targets"] = round(float((samples.targets != IGNORE).sum(axis=1).mean()), 2)
            rows.append(row)
            print(f"{spec:<8}{name:<38}{row['train_seconds']:>8.2f} s{row['test_seconds']:>8.2f} s", flush=True)
    if arguments.csv:
        rows = [row | {"commit": timing.commit()} for row in rows]
        with open(RESULTS, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    slowest = max(rows, key=lambda row: max(row["train_seconds"], row["test_seconds"]))
    print(json.dumps({"samples": arguments.samples, "settings": len(rows), "slowest": slowest}))


if __name__ == "__main__":
    main()
