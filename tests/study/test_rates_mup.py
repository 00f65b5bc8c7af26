"""The committed runs of configs/rates-mup.yaml: under muP the best rate stays, of linear mixers from width 64 on."""

import csv
import math
from pathlib import Path

import pytest

from linnet.study.rates import find_vertex, fit_rates

RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "rates-mup.csv"


def losses_of(architecture: str) -> dict[int, dict[float, dict[int, float]]]:
    losses: dict[int, dict[float, dict[int, float]]] = {}
    for row in csv.DictReader(RUNS.open()):
        if row["architecture"] == architecture:
            rates = losses.setdefault(int(row["width"]), {})
            rates.setdefault(float(row["rate"]), {})[int(row["seed"])] = float(row["loss"])
    return losses


def test_the_best_rate_of_llama_stays():
    losses = losses_of("llama")
    assert set(losses) == {32, 64, 128} and all(len(rates) == 5 for rates in losses.values())
    best = [min(rates, key=lambda rate: sum(rates[rate].values())) for rates in losses.values()]
    assert math.log2(max(best) / min(best)) <= 1
    law = fit_rates({width: find_vertex(rates) for width, rates in losses.items()})
    assert law.b_low < 0 < law.b_high


@pytest.mark.parametrize(("architecture", "widths"), [("tnl", {64, 128, 512}), ("hgrn2", {64, 128, 256})])
def test_the_best_rate_of_a_linear_mixer_stays_from_width_64_on(architecture, widths):
    """At width 32 it is higher: the features of linear mixers need more dimensions than that (docs/mixers.md)."""
    losses = {width: rates for width, rates in losses_of(architecture).items() if width > 32}
    assert set(losses) == widths
    assert {min(rates, key=lambda rate: sum(rates[rate].values())) for rates in losses.values()} == {0.008}
    law = fit_rates({width: find_vertex(rates) for width, rates in losses.items()})
    assert law.b_low < 0 < law.b_high and law.b_high - law.b_low < 0.3
