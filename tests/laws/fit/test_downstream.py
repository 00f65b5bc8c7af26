"""Compute to loss to metric: fits recover known curves, and refuse what the points do not determine."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import curve_fit
from scipy.special import expit

from linnet.config import ConfigError
from linnet.laws.fit import filter_table
from linnet.laws.fit.downstream import fit_downstream, fit_transfer, frontier
from linnet.laws.fit.power import fit_power
from linnet.laws.fit.table import load_points

SPEC = importlib.util.spec_from_file_location(
    "benchmark_coverage", Path(__file__).parents[3] / "benchmarks" / "coverage.py"
)
coverage = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = coverage  # its dataclasses look themselves up
SPEC.loader.exec_module(coverage)


def ladder(metric, runs: int = 8, noise: float = 0.0, seed: int = 0, questions: float = np.nan) -> pd.DataFrame:
    """Returns runs of a known law. Each has three checkpoints before the last, with losses above the law."""
    generator, rows = np.random.default_rng(seed), []
    for run, C in enumerate(np.geomspace(1e15, 1e18, runs)):
        for share in (0.25, 0.5, 0.75, 1.0):
            loss = 14.0 * (share * C) ** -0.045 * (1.0 if share == 1.0 else 1.03)
            value = metric(loss) + noise * generator.normal()
            rows.append({"run": f"r{run}", "C": share * C, "loss": loss, "value": value, "last": share == 1.0})
    return pd.DataFrame(rows).assign(questions=questions)


def share(loss, chance=0.1, midpoint=2.4, steepness=4.0):
    return chance + (1 - chance) * expit(steepness * (midpoint - loss))


def test_known_curves_come_back():
    found = fit_downstream(ladder(share), 0.1, bootstrap=0)
    assert (found.law.coefficient, found.law.exponent) == pytest.approx((14.0, -0.045), rel=1e-6)
    assert found.transfer.parameters == pytest.approx({"midpoint": 2.4, "steepness": 4.0}, rel=1e-6)
    assert found.predict(3e18) == pytest.approx(share(14.0 * 3e18**-0.045), rel=1e-6)
    assert found.rms_error < 1e-7 and found.test.mean_error < 1e-6 and found.step_test.max_error < 1e-6
    assert found.transfer.formula == "0.1 + 0.9 / (1 + exp(4 (L - 2.4)))"
    last = found.curve[-1]
    assert last["beyond"] and last["C"] == pytest.approx(3e18) and last["value"] == pytest.approx(found.predict(3e18))

    bits = fit_downstream(ladder(lambda loss: 1.3 * loss**1.1), None, bootstrap=0)
    assert bits.transfer.parameters == pytest.approx({"coefficient": 1.3, "exponent": 1.1}, rel=1e-9)
    assert bits.transfer.formula == "1.3 L^1.1"


@pytest.mark.parametrize("seed", range(4))
def test_noisy_shares_are_fitted_as_by_another_solver(seed):
    points = ladder(share, noise=0.03, seed=seed)
    loss, value = points["loss"].to_numpy(), points["value"].to_numpy()
    best, _ = curve_fit(lambda x, m, k: share(x, 0.1, m, k), loss, value, p0=(2.4, 4.0), xtol=1e-13, ftol=1e-13)
    found = fit_transfer(points, 0.1)
    assert (found.first, found.second) == pytest.approx(tuple(best), rel=1e-5)
    assert found.rms_error == pytest.approx(np.sqrt(np.mean((share(loss, 0.1, *best) - value) ** 2)), rel=1e-9)


def test_intervals_cover_the_truth_and_count_runs_rather_than_checkpoints():
    covered = 0
    for seed in range(40):
        found = fit_transfer(ladder(share, runs=16, noise=0.03, seed=seed), 0.1, bootstrap=200)
        low, high = found.intervals["midpoint"]
        covered += low <= 2.4 <= high
    assert covered >= 33, "of 40 intervals of 95 %"

    points = ladder(share, noise=0.03)
    once = fit_transfer(points, 0.1, bootstrap=400).intervals["midpoint"]
    copies = pd.concat([points.assign(loss=points["loss"] + shift * 1e-5) for shift in range(6)])
    many = fit_transfer(copies, 0.1, bootstrap=400).intervals["midpoint"]
    assert np.diff(many)[0] == pytest.approx(np.diff(once)[0], rel=0.15), "copies of checkpoints narrow it"


def test_held_out_errors_are_those_of_a_fit_to_less_compute():
    points = ladder(share, noise=0.02, seed=3)
    found = fit_downstream(points, 0.1, bootstrap=0)
    last = points[points["last"]].sort_values("C")
    c_max = last["C"].iloc[-3]  # a fifth of eight runs is two
    assert found.test.c_max == c_max and found.test.tested == 2
    below, above = points[points["C"] <= c_max], last[last["C"] > c_max]
    front = below[below["last"]]
    law, step = fit_power(front["C"], front["loss"]), fit_transfer(below, 0.1)
    errors = np.abs(step.predict(law.predict(above["C"])) - above["value"])
    assert (found.test.mean_error, found.test.max_error) == pytest.approx((errors.mean(), errors.max()))


def test_what_the_points_do_not_tell_is_refused():
    def refused(points, chance):
        found = fit_downstream(points, chance, bootstrap=20)
        assert found.curve == [] and found.test is None
        with pytest.raises(ValueError, match="refused"):
            found.predict(1e16)
        return "; ".join(found.refused)

    points = ladder(share)
    told = refused(points.iloc[:4], 0.1)
    assert re.search("loss -> metric: 4 points .* 5 ", told)
    assert re.search("compute -> loss: 1 run .* 3, ", told)
    guessing = ladder(lambda loss: 0.25, noise=0.02, questions=400.0)
    assert "is at chance (0.25), within its error" in refused(guessing, 0.25)
    assert "is at chance (0)" in refused(ladder(lambda loss: 0.0), 0.0)
    assert "does not grow as the loss falls" in refused(ladder(lambda loss: share(5 - loss)), 0.1)
    assert "does not fall with the loss" in refused(ladder(lambda loss: 1 / loss), None)
    assert "not positive" in refused(ladder(lambda loss: loss - 2.5), None)
    assert "jumps" in refused(ladder(lambda loss: float(loss < 2.4)), 0.0)


def test_too_few_runs_give_no_intervals_and_a_midpoint_beyond_the_data_is_told():
    points = ladder(share)
    found = fit_transfer(points[points["run"].isin(("r0", "r7"))], 0.1, bootstrap=50)
    assert not found.refused and not found.intervals and re.search("2 runs, .* 3", found.notes[0])
    early = fit_transfer(points[points["loss"] > 2.6], 0.1)
    assert early.first == pytest.approx(2.4, rel=1e-3) and "midpoint lies outside" in early.notes[0]


def test_the_frontier_takes_the_best_of_a_budget():
    rows = [(1.00, 3.0), (1.01, 2.8), (1.10, 2.9), (2.00, 2.5), (2.02, 2.6), (4.00, 2.5), (8.00, 2.0)]
    points = pd.DataFrame(rows, columns=["C", "loss"])
    assert frontier(points)["loss"].tolist() == [2.8, 2.5, 2.5, 2.0]
    assert frontier(points.iloc[:0]).empty


def test_results_are_plain():
    found = fit_downstream(ladder(share, noise=0.02), 0.1, bootstrap=50)
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["transfer"]["parameters"].keys() == {"midpoint", "steepness"}
    low, high = found.interval_at(1e18)
    assert low < float(found.predict(1e18)) < high


def over_trained(metric) -> pd.DataFrame:
    """Returns runs of 5 to 640 tokens per parameter on the over-training law 1.8 + (140 M^.12 + 240 M^-.12) C^-.12."""
    rows = []
    for C in np.geomspace(1e17, 1e19, 4):
        for M in (5.0, 20.0, 80.0, 320.0, 640.0):
            N = (C / 6 / M) ** 0.5
            loss = 1.8 + (140 * M**0.12 + 240 * M**-0.12) * C**-0.12
            row = {"run": f"r{len(rows)}", "N": N, "D": M * N, "C": C, "loss": loss, "value": metric(loss)}
            rows.append(row | {"last": True, "questions": np.nan})
    return pd.DataFrame(rows)


def test_an_exponential_error_and_the_over_training_law_come_back():
    found = fit_downstream(over_trained(lambda loss: 0.85 - 2.08 * np.exp(-0.756 * loss)), None, bootstrap=100)
    step = found.transfer.exponential
    assert (step["E"], step["k"], step["g"]) == pytest.approx((0.85, 2.08, 0.756), rel=0.01)
    assert step["rms_error"] < found.transfer.rms_error / 20 and step["intervals"]["E"][0] < 0.851
    law = found.over_training
    assert (law["E"], law["a"], law["b"], law["eta"]) == pytest.approx((1.8, 140, 240, 0.12), rel=1e-3)
    with pytest.raises(ValueError, match="ratio"):
        fit_downstream(ladder(lambda loss: loss), None, bootstrap=0).predict(1e18, 20.0)

    right = over_trained(lambda loss: share(loss, 0.25, 3.3))
    found = fit_downstream(right, 0.25, bootstrap=0)
    loss = 1.8 + (140 * 1280**0.12 + 240 * 1280**-0.12) * 1e20**-0.12
    assert found.predict(1e20, 1280.0) == pytest.approx(share(loss, 0.25, 3.3), rel=1e-3)
    assert any("L(C, M) = 1.8 + " in note for note in found.transfer.notes)
    assert any("share of wrong answers is" in note for note in found.transfer.notes)


@pytest.mark.parametrize(
    "column, rises, chance, turned, words",
    [
        ("avg_error", True, None, False, "avg_error rises with the loss, so less is better; avg_error is fitted"),
        ("avg_error", True, 0.25, True, "avg_error rises with the loss, so less is better; 1 - avg_error is fitted"),
        ("top1", True, 0.25, True, "1 - top1 is fitted"),
        ("verra", False, 0.25, False, "verra falls with the loss, so more is better; verra is fitted"),
        ("top1", False, None, True, "top1 falls with the loss, so more is better; 1 - top1 is fitted"),
        ("top1", False, 0.25, False, ""),
        ("bits", True, None, False, ""),
    ],
)
def test_the_points_tell_whether_less_is_better(tmp_path, column, rises, chance, turned, words):
    points = over_trained(lambda loss: 0.85 - 2.08 * np.exp(-0.756 * loss))
    points[column] = points["value"] if rises else 1 - points["value"]
    points[["run", "N", "D", "loss", column]].to_csv(tmp_path / "points.csv", index=False)
    table, notes = load_points(tmp_path / "points.csv", {"value": column}, chance)
    assert table["value"].to_numpy() == pytest.approx(1 - points[column] if turned else points[column])
    assert any(words in note for note in notes) if words else not any("is better" in note for note in notes)
    found = fit_downstream(table, chance, bootstrap=0)
    assert not found.transfer.refused


def test_points_are_filtered_and_checked_as_tables_of_runs_are(tmp_path):
    C = np.geomspace(1e18, 1e20, 8)
    rows = [f"r{i},{c**0.5},{c**0.5 / 6},{20 * c**-0.05},{0.2 + 0.05 * i},done,m" for i, c in enumerate(C)]
    rows += ["bad,1e9,2e8,9.0,0.3,crashed,m", "other,1e9,2e8,8.0,0.3,done,m", "high,1e9,2e8,7.0,0.3,done,m"]
    path = tmp_path / "points.csv"
    path.write_text("\n".join(["run,N,D,loss,value,status,architecture", *rows]))
    keep = lambda table: filter_table(table, max_loss=6.5)  # noqa: E731
    table, notes = load_points(path, None, 0.1, exclude=["run=other"], keep=keep)
    assert sorted(table["run"]) == [f"r{i}" for i in range(8)]
    assert all(any(word in note for note in notes) for word in ("crashed", "run=other", "loss above 6.5"))
    path.write_text(path.read_text().replace(",loss,", ",loss_bits,"))
    with pytest.raises(ConfigError, match="--loss-unit bits"):
        load_points(path, {"loss": "loss_bits"}, 0.1)
    nats, _ = load_points(path, {"loss": "loss_bits"}, 0.1, loss_unit="bits")
    assert nats["loss"].max() == pytest.approx(8.0 * np.log(2))


def test_intervals_of_few_runs_cover_the_truth():
    covered = np.mean([coverage.downstream(4, seed, 60) for seed in range(40)], axis=0)
    assert (covered >= 0.85).all(), f"of 40 intervals of L(C) and of the metric, {covered} cover"


@pytest.mark.parametrize("method", coverage.METHODS)
def test_each_method_whose_coverage_is_measured_still_gives_its_intervals(method):
    """The benchmark reads laws by the names of their parameters, which no other test of it would miss."""
    [intervals] = coverage.simulate((method, coverage.METHODS[method].designs[0], 0, 1, 40))
    assert intervals and all(abs(low) < 10 and low <= high for _, low, high in filter(None, intervals.values()))
    assert any(intervals.values())
