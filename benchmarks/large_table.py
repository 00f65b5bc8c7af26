"""Times `linnet fit` on a table of many runs and on one of long curves, in CPU seconds of the whole process.

    python benchmarks/large_table.py                    a million rows each
    python benchmarks/large_table.py --rows 100000

Prints the seconds of reading the table in this process, and of the command with its imports, fits and intervals.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from linnet.laws.fit import load_table

HEADER = "run,architecture,params,tokens,flops,loss\n"


def loss(N: np.ndarray, D: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A Chinchilla surface with noise of 0.2 %."""
    return (1.7 + 400 / N**0.34 + 1800 / D**0.36) * np.exp(random.normal(0, 0.002, np.shape(D)))


def write_runs(path: Path, rows: int) -> None:
    """Final losses of `rows` runs of two architectures."""
    random = np.random.default_rng(0)
    N = np.exp(random.uniform(np.log(1e7), np.log(1e10), rows))
    D = N * np.exp(random.uniform(np.log(5), np.log(200), rows))
    _write(path, [f"r{i}" for i in range(rows)], N, D, loss(N, D, random))


def write_curves(path: Path, rows: int) -> None:
    """200 runs with rows / 200 records each."""
    random, each = np.random.default_rng(0), rows // 200
    run = np.repeat(np.arange(200), each)
    N = 10 ** (7 + (run % 20) / 8)
    D = np.tile(np.arange(1, each + 1) / each, 200) * N * 20 * 10 ** (run // 20 / 10)
    _write(path, [f"r{i}" for i in run], N, D, loss(N, D, random))


def _write(path: Path, run: list[str], N: np.ndarray, D: np.ndarray, losses: np.ndarray) -> None:
    with path.open("w") as file:
        file.write(HEADER)
        for name, n, d, value in zip(run, N, D, losses, strict=True):
            architecture = "tnl" if int(name[1:]) % 2 else "llama"
            file.write(f"{name},{architecture},{n:.6g},{d:.8g},{6 * n * d:.8g},{value:.5f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    print(f"{'table':<8}{'rows':>12}{'reading, CPU s':>16}{'linnet fit, CPU s':>19}")
    with tempfile.TemporaryDirectory() as folder:
        for name, write in (("runs", write_runs), ("curves", write_curves)):
            path = Path(folder) / f"{name}.csv"
            write(path, rows)
            start = time.process_time()
            load_table(path)
            reading = time.process_time() - start
            before = os.times()
            subprocess.run([sys.executable, "-P", "-m", "linnet", "fit", path], check=True, stdout=subprocess.DEVNULL)
            after = os.times()
            spent = after.children_user + after.children_system - before.children_user - before.children_system
            print(f"{name:<8}{rows:>12,}{reading:>16.1f}{spent:>19.1f}", flush=True)


if __name__ == "__main__":
    main()
