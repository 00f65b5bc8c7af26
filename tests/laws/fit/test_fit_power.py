import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import linregress
from scipy.stats import t as student

from linnet.laws.fit import PF_DAY, Law, fit_frontier, fit_power, load_table
from linnet.laws.fit.law import threshold
from linnet.laws.fit.lse import Term, huber, log_sum, solve

C = np.geomspace(1e17, 1e22, 12)


@settings(max_examples=40)
@given(
    exponent=st.floats(-0.5, 0.9).filter(lambda value: abs(value) > 1e-3),
    log_coefficient=st.floats(-20, 30),
    low=st.floats(9, 22),
    decades=st.floats(0.5, 6),
)
def test_pure_law_is_recovered_at_every_scale(exponent, log_coefficient, low, decades):
    C = np.geomspace(10**low, 10 ** (low + decades), 6)
    law = fit_power(C, np.exp(log_coefficient + exponent * np.log(C)))
    assert law.exponent == pytest.approx(exponent, abs=1e-6)
    assert np.log(law.coefficient) == pytest.approx(log_coefficient, abs=1e-5)
    assert law.rms_log_error < 1e-9


@settings(max_examples=15)
@given(E=st.floats(0.3, 3), share=st.floats(0.1, 2), exponent=st.floats(-0.4, -0.05))
def test_law_with_a_constant_is_recovered(E, share, exponent):
    loss = E * (1 + share * (C / C[0]) ** exponent)
    law = fit_power(C, loss, irreducible=True)
    assert law.constant == pytest.approx(E, rel=1e-5)
    assert law.exponent == pytest.approx(exponent, abs=1e-5)
    assert law.parameters == {"beta": law.coefficient, "alpha": law.exponent, "E": law.constant}


def test_a_pure_law_has_no_constant_to_find():
    law = fit_power(C, 30 * C**-0.05, irreducible=True)
    assert "no irreducible loss" in law.refused[0] and law.parameters == {} and law.coefficient is None
    with pytest.raises(ValueError, match="refused"):
        law.predict(1e20)


def test_too_few_budgets():
    assert "needs two" in fit_power([1e20], [2.0]).refused[0]
    assert "two budgets" in fit_power([1e20, 1e21], [2.0, 1.9]).notes[0]
    assert "at least four" in fit_power(C[:3], C[:3] ** -0.1, irreducible=True).refused[0]


@pytest.mark.parametrize("C, values", [([1, 2], [1.0]), ([1, -2], [1, 1]), ([1, 2], [1, np.nan]), ([[1.0]], [[1.0]])])
def test_wrong_arguments(C, values):
    with pytest.raises(ValueError):
        fit_power(C, values)


def test_coefficients_in_pf_days_are_those_of_table_3():
    # Paper 000, Table 3, LLaMA: L = 3.7087 C^-0.0798 with C in PF-days; at 180 PF-days the loss is 2.450.
    law = Law("L", 3.7087 * PF_DAY**0.0798, -0.0798)
    assert law.coefficient_pf_days == pytest.approx(3.7087)
    assert law.text("pf-days") == "L = 3.709 C^-0.0798"
    assert float(law.predict(180 * PF_DAY)) == pytest.approx(2.450, abs=1e-3)


def test_bootstrap_of_pairs_covers_the_truth_and_repeats():
    noise = np.random.default_rng(1).normal(0, 0.01, len(C))
    laws = [fit_power(C, 30 * C**-0.05 * np.exp(noise), bootstrap=400, seed=s) for s in (3, 3, 4)]
    low, high = laws[0].intervals["alpha"]
    assert low < -0.05 < high and high - low < 0.01
    assert laws[0].intervals == laws[1].intervals != laws[2].intervals
    band = laws[0].band
    assert band[0]["C"] == pytest.approx(C[0]) and band[-1]["C"] == pytest.approx(10 * C[-1])
    assert all(point["low"] < point["value"] < point["high"] for point in band)
    # The interval of an extrapolation is wider than in the middle of the data.
    widths = [np.log(point["high"] / point["low"]) for point in band]
    assert widths[-1] > min(widths) * 1.5


@pytest.mark.parametrize("budgets", [3, 5])
def test_single_runs_per_budget_have_the_intervals_of_student(budgets):
    x = np.linspace(40, 46, budgets)
    y = 3 - 0.05 * x + np.random.default_rng(budgets).normal(0, 0.01, budgets)
    table = pd.DataFrame(
        {"C": np.exp(x), "loss": np.exp(y), "N": 1e8, "D": 1e9, "run": [f"r{i}" for i in range(budgets)]}
    )
    fit = fit_frontier(table, np.arange(budgets), bootstrap=4000)
    line = linregress(x, y)
    half = student.ppf(0.975, budgets - 2) * line.stderr
    low, high = fit.intervals["alpha"]
    assert (low + high) / 2 == pytest.approx(line.slope, abs=0.3 * half) and 0.75 < (high - low) / (2 * half) < 1.25


def test_clustered_bootstrap_is_wider_than_pairs_for_copies_of_runs():
    generator = np.random.default_rng(0)
    runs = np.repeat(np.arange(12), 20)
    loss = 30 * C[runs] ** -0.05 * np.exp(generator.normal(0, 0.02, 12)[runs])
    plain = fit_power(C[runs], loss, bootstrap=300)
    clustered = fit_power(C[runs], loss, bootstrap=300, clusters=runs)
    width = [np.subtract(*law.intervals["alpha"][::-1]) for law in (plain, clustered)]
    assert width[1] > 2.5 * width[0]


def test_frontier_takes_the_best_run_of_each_budget(surface):
    table = surface.ladder(np.geomspace(1e18, 1e22, 5), np.linspace(-1, 1, 9))
    groups = np.repeat(np.arange(5), 9)
    fit = fit_frontier(table, groups, bootstrap=50)
    # The middle size of each budget is the optimum itself.
    assert fit.N_opt.exponent == pytest.approx(surface.a, abs=1e-6)
    assert fit.D_opt.exponent == pytest.approx(1 - surface.a, abs=1e-6)
    assert fit.a_plus_b == pytest.approx(1) and [end["ratio"] for end in fit.cost_ratio] == pytest.approx([1, 1])
    slope = -surface.alpha * surface.beta / (surface.alpha + surface.beta)
    assert fit.L_irreducible.constant == pytest.approx(surface.E, rel=1e-5)
    assert fit.L_irreducible.exponent == pytest.approx(slope, rel=1e-5)
    assert fit.L_irreducible.held_out.max_error < 1e-6 < 0.005 < fit.L.held_out.max_error
    # The lowest sizes follow a law exactly, but the optimum may lie anywhere between their neighbours.
    assert fit.bootstrap.scheme == "residuals of the law"
    assert fit.intervals["a"][0] < surface.a - 0.005 < surface.a + 0.005 < fit.intervals["a"][1]
    assert fit.extrapolation["pure"] < fit.extrapolation["irreducible"]


def test_frontier_of_lone_rows_gives_the_loss_and_refuses_the_size(tmp_path):
    loss = 30 * C**-0.05
    path = tmp_path / "runs.csv"
    path.write_text("N,C,loss\n" + "".join(f"{1e8},{c:.17g},{y:.17g}\n" for c, y in zip(C, loss, strict=True)))
    fit = fit_frontier(load_table(path)[0], np.arange(len(C)))
    assert fit.L.exponent == pytest.approx(-0.05, abs=1e-6)
    assert len(fit.N_opt.refused) == 1 and "no budget has three sizes" in fit.N_opt.refused[0]


def test_frontier_refuses_sizes_at_the_ends(surface):
    table = surface.ladder(np.geomspace(1e18, 1e22, 5), np.linspace(0.2, 1, 5))
    fit = fit_frontier(table, np.repeat(np.arange(5), 5))
    assert "0 budgets" in fit.N_opt.refused[0] and not fit.L.refused
    assert not any(point["inside"] for point in fit.points)


@pytest.mark.parametrize(
    "hold_out, expected", [(None, 8.0), (0.5, 5.0), (0.01, 9.0), (3.5, 3.5), (1e9, 1e9), (0.95, None)]
)
def test_threshold(hold_out, expected):
    assert threshold(np.arange(1.0, 11), hold_out) == expected


def test_threshold_keeps_points_of_equal_compute_together():
    assert threshold(np.array([1.0, 1, 1, 2, 2, 2]), 0.2) == 1.0
    assert threshold(np.array([1.0, 1, 1]), 0.2) is None


def test_solver_finds_weighted_least_squares_and_the_median():
    x, y = np.linspace(0, 1, 9), np.linspace(0, 2, 9)
    y[-1] = 9.0
    weights = np.array([1, 1, 2, 1, 1, 3, 1, 1, 1.0])
    line, _ = solve([Term(0, 1, x)], np.zeros((1, 2)), y, weights)
    slope, intercept = np.polyfit(x, y, 1, w=np.sqrt(weights))
    assert line[0] == pytest.approx([intercept, slope])
    # With a small delta the Huber loss ignores the outlier.
    robust, _ = solve([Term(0, 1, x)], np.zeros((1, 2)), y, delta=1e-3)
    assert robust[0] == pytest.approx([0, 2], abs=1e-3)


def test_log_sum_and_huber():
    model, share = log_sum([Term(0), Term(1, 2, np.array([0.0, 1.0]))], np.array([[0.0, 0.0, np.log(3)]]))
    assert np.exp(model[0]) == pytest.approx([2, 4]) and share[1, 0] == pytest.approx([0.5, 0.75])
    assert huber(np.array([0.5, -3.0]), 1.0) == pytest.approx([0.125, 2.5])
    assert huber(np.array([0.5, -3.0]), None) == pytest.approx([0.125, 4.5])


def test_an_interval_is_that_of_the_draws_and_moves_towards_a_rival():
    """L = 1.5 + 20 C^-0.1: draws of the coefficient alone move the power term, and beyond the data half of a rival."""
    coefficients = np.linspace(18, 22, 1001)
    draws = np.column_stack([np.log(coefficients), np.full(1001, -0.1), np.full(1001, 1.5)])
    law = Law("L", 20.0, -0.1, 1.5, c_min=1e15, c_max=1e18, draws=draws)
    ends = 1.5 + np.percentile(coefficients, [2.5, 97.5]) * 1e18**-0.1
    assert law.interval_at(1e18) == pytest.approx(ends)
    wider = np.column_stack([np.log(np.linspace(14, 26, 1001)), draws[:, 1:]])
    law.rival, law.support = Law("L", 20.0, -0.1, 1.5, c_min=1e15, c_max=1e18, draws=wider), 0.5
    assert law.interval_at(1e18) == pytest.approx(ends)
    low, high = (
        1.5 + np.percentile(own, [2.5, 97.5]) * 1e19**-0.1 for own in (coefficients, np.linspace(14, 26, 1001))
    )
    assert law.interval_at(1e19) == pytest.approx((low + high) / 2)
