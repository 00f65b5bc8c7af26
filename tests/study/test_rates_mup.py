"""The committed runs of configs/rates-mup.yaml: under muP the best rate of LLaMA moves at most one step."""

import csv
import math
from pathlib import Path

from linnet.study.rates import find_vertex, fit_rates

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "rates-mup.csv"


def test_the_best_rate_of_llama_stays():
    losses: dict[int, dict[float, dict[int, float]]] = {}
    for row in csv.DictReader(RUNS.open()):
        if row["architecture"] == "llama":
            rates = losses.setdefault(int(row["width"]), {})
            rates.setdefault(float(row["rate"]), {})[int(row["seed"])] = float(row["loss"])
    assert set(losses) == {32, 64, 128} and all(len(rates) == 5 for rates in losses.values())
    best = [min(rates, key=lambda rate: sum(rates[rate].values())) for rates in losses.values()]
    assert math.log2(max(best) / min(best)) <= 1
    law = fit_rates({width: find_vertex(rates) for width, rates in losses.items()})
    assert law.b_low < 0 < law.b_high
