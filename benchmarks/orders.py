"""How often a page ranks equal architectures, and how often it finds one that is worse.

Simulates studies on the ladder of `linnet demo` from one known surface L(N, D), fits them as `linnet report` does and
reads the sentences of the page. Prints a line of JSON.

    python benchmarks/orders.py --pages 1000 --noise .003
    python benchmarks/orders.py --pages 1000 --noise .003 --worse .02
    python benchmarks/orders.py --pages 200 --off .01          # all runs of one budget of one architecture are off
    python benchmarks/orders.py --pages 200 --scatter .01      # so are those of every budget, each by its own error
"""

import argparse
import csv
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from linnet.laws.fit import fit_study
from linnet.report.findings import findings, plain
from linnet.report.records import read_study
from linnet.study.collect import load_study

NAMES = ("llama", "tnl", "hgrn2", "cosformer2", "lightnet")
BUDGETS = (1e10, 2.5e10, 6e10, 1.5e11)
SIZES = (4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
CLAIM = re.compile(r"is higher|falls faster|has the lower loss|[ab] from \d")


def write_table(
    folder: Path,
    noise: float,
    worse: float,
    generator: np.random.Generator,
    names: Sequence[str] = NAMES,
    off: float = 0.0,
    scatter: float = 0.0,
) -> None:
    """Writes table.csv of a simulated study.

    Args:
        folder: folder of the study.
        noise: standard deviation of the log of the loss of a run.
        worse: share by which the loss of the last architecture is higher than that of the others.
        generator: source of the noise.
        names: the architectures.
        off: error of the log of the loss that all runs of one budget of one architecture share, drawn anew.
        scatter: standard deviation of such an error of each budget of each architecture.
    """
    shape = len(names), len(BUDGETS)
    shared = scatter * generator.standard_normal(shape) if scatter else np.zeros(shape)
    if off:
        shared[tuple(generator.integers(shape))] += off
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow("run architecture budget params_non_embedding tokens flops loss status".split())
        for row, name in enumerate(names):
            factor = 1 + worse * (name == names[-1])
            for column, budget in enumerate(BUDGETS):
                for width in SIZES:
                    size = 12 * width**2 + 256 * width
                    tokens = budget / (6 * size)
                    if 14 <= tokens / size <= 720:
                        loss = factor * (0.6 + 14 / size**0.35 + 95 / tokens**0.37)
                        loss *= np.exp(noise * generator.standard_normal() + shared[row, column])
                        run = f"{name}-{width}-{budget:g}"
                        writer.writerow([run, name, budget, size, tokens, budget, loss, "done"])


def page_sentences(
    noise: float, worse: float, seed: int, bootstrap: int = 1000, method: str | None = None, **errors: float
) -> list[str]:
    """Returns the sentences of the page of a simulated study; see `write_table`.

    Without a method, it is chosen as `linnet report` does.
    """
    with tempfile.TemporaryDirectory() as name:
        write_table(Path(name), noise, worse, np.random.default_rng(seed), **errors)
        fit = None
        if method is not None:
            table, curves, _ = load_study(Path(name))
            fit = fit_study(table, curves, method=method, bootstrap=bootstrap, conventions=False)
        return [plain(text) for text in findings(read_study(Path(name), fit, bootstrap))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--noise", type=float, default=0.003)
    parser.add_argument("--worse", type=float, default=0.0)
    parser.add_argument("--off", type=float, default=0.0)
    parser.add_argument("--scatter", type=float, default=0.0)
    parser.add_argument("--bootstrap", type=int, default=1000)
    parser.add_argument("--method", help="fit this method alone, which is faster")
    options = parser.parse_args()
    claims = worse = 0
    for seed in range(options.pages):
        errors = {"off": options.off, "scatter": options.scatter}
        lines = page_sentences(options.noise, options.worse, seed, options.bootstrap, options.method, **errors)
        text = " ".join(lines)
        claims += bool(CLAIM.search(text))
        worse += bool(re.search(rf"The loss of [^.]*{NAMES[-1]} \(\+.*? is higher", text))
    print(json.dumps(vars(options) | {"claims": claims / options.pages, "found": worse / options.pages}))


if __name__ == "__main__":
    main()
