"""Best learning rates: vertices of sweeps, the law through them with its interval, and rates.yaml in a study."""

import math

import numpy as np
import pytest

from linnet.config import ConfigError, parse
from linnet.study.config import StudyConfig
from linnet.study.ladder import plan
from linnet.study.rates import Rates, TunedRate, find_vertex, fit_rates, read_rates, write_rates

A, B, CURVE, NOISE = 0.5, -0.8, 0.02, 0.002
WIDTHS = (64, 128, 256)


def sweep(width, draw=None, exponent=B, places=range(-2, 3), seeds=2):
    """Losses around the best rate of a width, on a grid that does not have it in the middle."""
    best, centre = math.log2(A * width**exponent), -6.3
    grid = [2.0 ** (round(best - centre) + centre + place) for place in places]
    own = [0.0 if draw is None else 0.05 * draw.standard_normal() for _ in range(seeds)]
    noise = lambda: 0.0 if draw is None else NOISE * draw.standard_normal()  # noqa: E731
    return {
        rate: {seed: 3 + CURVE * (math.log2(rate) - best) ** 2 + own[seed] + noise() for seed in range(seeds)}
        for rate in grid
    }


def test_without_noise_the_vertex_and_the_law_are_exact():
    vertices = {width: find_vertex(sweep(width)) for width in WIDTHS}
    for width, vertex in vertices.items():
        assert vertex.rate == pytest.approx(A * width**B, rel=1e-9) and vertex.loss == pytest.approx(3, abs=1e-9)
    law = fit_rates(vertices)
    assert law is not None and law.fits
    assert (law.a, law.b) == (pytest.approx(A, rel=1e-6), pytest.approx(B, rel=1e-6))
    assert law.at(1024) == pytest.approx(A * 1024**B, rel=1e-3) and law.widest == 256
    assert fit_rates({64: vertices[64]}) is None


def test_the_interval_of_the_exponent_covers_it():
    """95 % intervals of 600 repetitions: 93 to 97 % of them hold the exponent."""
    draw = np.random.default_rng(5)
    held = []
    for _ in range(600):
        law = fit_rates({width: find_vertex(sweep(width, draw)) for width in WIDTHS})
        held.append(law.b_low <= B <= law.b_high)
    assert 0.93 <= np.mean(held) <= 0.97, np.mean(held)


@pytest.mark.parametrize("cubic", [0.0, 0.002, 0.004])
def test_intervals_hold_the_best_rates_of_sweeps_that_rise_faster_on_one_side(cubic):
    """95 % intervals of 200 repetitions; those of the parabolas alone hold 20 to 23 % of the rates with a cubic."""
    draw, rates, exponents = np.random.default_rng(6), [], []
    for _ in range(200):
        sweeps = {}
        for width in WIDTHS:
            off = draw.uniform(-1, 1)  # of the rates, which are a factor 2 apart
            sweeps[width] = {
                A * width**B * 2.0 ** (place - off): {
                    seed: 3 + CURVE * (place - off) ** 2 + cubic * (place - off) ** 3 + NOISE * draw.standard_normal()
                    for seed in range(2)
                }
                for place in range(-3, 4)
            }
        law = fit_rates({width: find_vertex(sweep) for width, sweep in sweeps.items()})
        exponents.append(law.b_low <= B <= law.b_high)
        rates += [tuned.low <= A * width**B <= tuned.high for width, tuned in law.widths.items()]
    assert np.mean(rates) >= 0.93 and np.mean(exponents) >= 0.93


def test_an_optimum_at_the_edge_is_refused_and_names_the_side():
    for shift, side, word in ((4, -1, "lowest rate"), (-4, 1, "highest rate")):
        losses = sweep(64, places=range(-2 + shift, 3 + shift))
        found = find_vertex(losses)
        assert found.rate is None and found.side == side and word in found.refused
    extended = find_vertex(sweep(64, places=range(-2, 7)))
    assert extended.rate == pytest.approx(A * 64**B, rel=1e-9)


def test_rates_that_diverge_are_left_out_and_bound_the_sweep():
    losses = sweep(64, places=range(-3, 4))
    highest = max(losses)
    losses[highest] = {0: math.inf, 1: 3.5}
    assert find_vertex(losses).rate == pytest.approx(A * 64**B, rel=1e-9)
    few = dict(sorted(losses.items())[2:])
    assert find_vertex(few).side == -1  # four are left, and the side on which more can train is the lower
    steep = {rate: {0: 5 - rate} for rate in (1.0, 2.0, 4.0, 5.0, 5.5)} | {11.0: {0: math.inf}}
    found = find_vertex(steep)
    assert found.rate is None and found.side == 0 and "next higher rate diverges" in found.refused
    assert find_vertex({1.0: {0: math.nan}}).refused == "no rate of the sweep trains without diverging"


def test_widths_that_contradict_a_power_law_get_the_interval_of_their_scatter():
    draw = np.random.default_rng(1)
    shifted = {width: find_vertex(sweep(width, draw, exponent=B + (0.2 if width == 128 else 0))) for width in WIDTHS}
    agreeing = {width: find_vertex(sweep(width, draw)) for width in WIDTHS}
    bent, straight = fit_rates(shifted), fit_rates(agreeing)
    assert not bent.fits and straight.fits
    assert bent.b_high - bent.b_low > 5 * (straight.b_high - straight.b_low)


def tuned(b=-1.0):
    width = {"rate": 0.01, "low": 0.005, "high": 0.02, "loss": 2.0}
    return TunedRate(a=0.64, b=b, b_low=b - 0.1, b_high=b + 0.1, widths={32: width, 64: width})


def study(path, **changes):
    values = {"name": "s", "architectures": ["tnl"], "budgets": [1e10], "sizes": [[32, 1], [64, 1], [512, 1]]}
    return parse(StudyConfig, values | {"learning_rate": {"from": str(path)}, "minimum_steps": 1} | changes)


def test_a_study_reads_its_rates_and_tells_how_far_they_reach(tmp_path):
    path = tmp_path / "rates.yaml"
    write_rates(Rates(architectures={"tnl": tuned()}), path)
    assert read_rates(path).architectures["tnl"] == tuned()
    found = plan(study(path, budgets=[1e12]), check_data=False)
    rates = {run.size: (run.learning_rate, run.train.optimizer.learning_rate) for run in found.runs}
    assert rates == {"32x1": (0.02, 0.02), "64x1": (0.01, 0.01), "512x1": (0.00125, 0.00125)}
    assert found.notes()[0] == (
        "learning rates of tnl tuned at widths 32 to 64; extrapolated to 512 (8 x); "
        "more than 4 x is a guess: tune wider"
    )
    near = plan(study(path, budgets=[1e12], sizes=[[64, 1], [128, 1]]), check_data=False)
    assert near.notes()[0] == "learning rates of tnl tuned at widths 32 to 64; extrapolated to 128 (2 x)"
    inside = plan(study(path, budgets=[1e12], sizes=[[32, 1], [64, 1]]), check_data=False)
    assert inside.notes()[0].endswith("which hold all of its sizes")


def test_missing_rates_are_told_by_name(tmp_path):
    path = tmp_path / "rates.yaml"
    with pytest.raises(
        ConfigError, match=r"learning_rate.from: the file .*rates.yaml does not exist; linnet study tune"
    ):
        plan(study(path), check_data=False)
    write_rates(Rates(architectures={"tnl": tuned()}), path)
    with pytest.raises(ConfigError, match=r"learning_rate.from: .* has no rates of llama; .*tnl"):
        plan(study(path, architectures=["llama"]), check_data=False)
    with pytest.raises(ConfigError, match="linnet study tune FILE --architectures llama,hgrn2") as error:
        plan(study(path, architectures=["llama", "tnl", "hgrn2"]), check_data=False)
    assert len(error.value.problems) == 1


def test_muP_takes_the_rules_of_a_study_at_its_base_width():  # noqa: N802
    own = [{"name": "llama", "model": {"parametrisation": "mup", "base_width": 64}}]
    values = {"name": "s", "architectures": own, "budgets": [1e12], "sizes": [[32, 1], [128, 1]], "minimum_steps": 1}
    found = plan(parse(StudyConfig, values), check_data=False)
    assert {run.learning_rate for run in found.runs} == {3e-3}
    assert len({run.train.model.init_std for run in found.runs}) == 1
