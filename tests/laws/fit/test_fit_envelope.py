import numpy as np
import pandas as pd
import pytest

from linnet.laws.fit import fit_envelope

SIZES = np.geomspace(1e8, 1e10, 13)


def test_minimum_recovers_the_laws(surface):
    found = fit_envelope(surface.curves(SIZES, points=400), warmup=0.0)
    assert found.N_opt.exponent == pytest.approx(surface.a, abs=2e-3)
    assert found.D_opt.exponent == pytest.approx(1 - surface.a, abs=2e-3)
    slope = surface.alpha * surface.beta / (surface.alpha + surface.beta)
    assert found.L_irreducible.constant == pytest.approx(surface.E, rel=5e-3)
    assert found.L_irreducible.exponent == pytest.approx(-slope, abs=3e-3)
    assert found.L_irreducible.held_out.max_error < 1e-3
    assert found.curves == 13 and found.hull_size > 5


def test_an_envelope_that_is_a_pure_law_is_recovered_exactly():
    # Each curve touches L = 30 C^-0.05 at C = 100 N^2 and is a parabola in log-log, so N_opt = (C / 100)^0.5.
    C = np.geomspace(1e16, 1e22, 600)
    parts = []
    for N in SIZES:
        log_loss = np.log(30 * C**-0.05) + 0.01 * np.log(C / (100 * N**2)) ** 2
        part = {"run": f"{N:.3g}", "N": N, "D": C / 6 / N, "C": C, "loss": np.exp(log_loss)}
        parts.append(pd.DataFrame(part))
    found = fit_envelope(pd.concat(parts), warmup=0.0)
    assert found.N_opt.exponent == pytest.approx(0.5, abs=1e-6)
    assert found.D_opt.exponent == pytest.approx(0.5, abs=1e-6)
    assert found.L.exponent == pytest.approx(-0.05, abs=1e-3)


def test_hull_recovers_the_exponent_roughly_and_lies_on_the_curves(surface):
    curves = surface.curves(SIZES)
    found = fit_envelope(curves, mode="hull", warmup=0.0)
    assert found.N_opt.exponent == pytest.approx(surface.a, abs=0.03)
    assert found.hull_size == len(found.points)
    records = {(row.run, round(np.log(row.C), 6)): row.loss for row in curves.itertuples()}
    for point in found.points:
        assert records[point["run"], round(np.log(point["C"]), 6)] == pytest.approx(point["loss"])
    logs = np.log([(point["C"], point["loss"]) for point in found.points])
    slopes = np.diff(logs[:, 1]) / np.diff(logs[:, 0])
    assert (np.diff(slopes) > 0).all() and (slopes < 0).all()


def test_ends_do_not_count(surface):
    found = fit_envelope(surface.curves(SIZES), warmup=0.0)
    used = [point for point in found.points if point["inside"]]
    assert {f"{SIZES[0]:.4g}", f"{SIZES[-1]:.4g}"}.isdisjoint(point["run"] for point in used)
    assert 0 < len(used) < len(found.points)


def test_a_common_limit_on_tokens_refuses_the_size(surface):
    # All sizes stop too early for a larger one to be better later: the best is always the largest with a curve.
    found = fit_envelope(surface.curves(SIZES[:3], ratios=(0.5, 4)), warmup=0.0)
    assert "smaller and larger models; three are needed" in found.N_opt.refused[0]
    assert not found.L.refused and any("whole envelope" in note for note in found.notes)


def test_warm_up_is_removed(surface):
    curves = surface.curves(SIZES, points=400)
    clean = fit_envelope(curves, warmup=0.0)
    # A dip at the beginning, as in a loss averaged since the start or in a damaged log.
    rate = curves.groupby("run")["D"].transform(lambda D: np.minimum(D / D.min(), 1.5))
    spoiled = curves.assign(learning_rate=rate, loss=np.where(rate < 1.5, 0.5, curves["loss"]))
    removed = fit_envelope(spoiled, warmup=0.0)
    assert removed.warmup_removed == (rate < 1.5).sum() > 0
    assert removed.N_opt.exponent == pytest.approx(clean.N_opt.exponent, abs=1e-3)
    shares = fit_envelope(curves, warmup=0.01).warmup_removed
    assert shares == sum((part["D"] <= 0.01 * part["D"].max()).sum() for _, part in curves.groupby("run"))


def test_smoothing_keeps_a_straight_curve_and_quietens_noise(surface):
    straight = surface.curves(SIZES).assign(loss=lambda t: 30 * t["C"] ** -0.05 * (t["N"] / 1e9) ** 0.01)
    kept = fit_envelope(straight, warmup=0.0, smooth=9)
    assert kept.L.exponent == pytest.approx(fit_envelope(straight, warmup=0.0).L.exponent, abs=1e-9)
    noisy = surface.curves(SIZES)
    noisy["loss"] *= np.exp(np.random.default_rng(0).normal(0, 0.02, len(noisy)))
    errors = [abs(fit_envelope(noisy, warmup=0.0, smooth=s).N_opt.exponent - surface.a) for s in (1, 15)]
    assert errors[1] < errors[0]


def noisy(curves, deviation=0.003, seed=0):
    """Returns the curves with one factor per run, as between seeds."""
    runs, rows = np.unique(curves["run"], return_inverse=True)
    factors = np.exp(np.random.default_rng(seed).normal(0, deviation, len(runs)))
    return curves.assign(loss=curves["loss"] * factors[rows])


@pytest.mark.parametrize("mode", ["minimum", "hull"])
def test_bootstrap_draws_the_effects_of_runs(surface, mode):
    options = {"mode": mode, "warmup": 0.0, "bootstrap": 60}
    found = fit_envelope(noisy(surface.curves(SIZES)), **options)
    assert found.bootstrap.scheme == "residuals of the runs" and found.bootstrap.usable >= 57
    low, high = found.intervals["a"]
    assert low < surface.a < high and 0.01 < high - low < 0.2
    # Ten times as many records per run must not narrow the interval, because the number of runs is the same.
    often = fit_envelope(noisy(surface.curves(SIZES, points=1200)), **options)
    assert np.subtract(*often.intervals["a"]) == pytest.approx(low - high, rel=0.5)


def test_too_few_sizes_for_an_interval_are_told(surface):
    found = fit_envelope(surface.curves(SIZES[4:8]), warmup=0.0, bootstrap=60, keep_ends=True)
    assert not found.N_opt.refused and not found.N_opt.intervals
    assert found.bootstrap.note.startswith("no interval: ") and found.bootstrap.usable == 0


def test_ends_can_be_kept(surface):
    curves = surface.curves(SIZES)
    found = fit_envelope(curves, mode="hull", warmup=0.0, keep_ends=True)
    C, N = np.array([(point["C"], point["N"]) for point in found.points]).T
    assert found.N_opt.points == len(C) > fit_envelope(curves, mode="hull", warmup=0.0).N_opt.points
    assert found.N_opt.exponent == pytest.approx(np.polyfit(np.log(C), np.log(N), 1)[0], rel=1e-9)


def test_one_curve_is_refused(surface):
    found = fit_envelope(surface.curves(SIZES[:1]))
    assert "1 training curve" in found.refused[0] and found.L.refused == found.N_opt.refused == found.refused


@pytest.mark.parametrize("options", [{"mode": "best"}, {"smooth": 2}, {"smooth": 0}, {"points": 2}])
def test_wrong_arguments(surface, options):
    with pytest.raises(ValueError):
        fit_envelope(surface.curves(SIZES[:2]), **options)


@pytest.mark.parametrize("mode", ["minimum", "hull"])
def test_predictions_lie_inside_their_intervals(surface, mode):
    for seed in range(3):
        curves = noisy(surface.curves(SIZES), 0.01, seed)
        found = fit_envelope(curves, mode=mode, warmup=0.0, bootstrap=40)
        for law in (found.L, found.L_irreducible, found.N_opt):
            for C in (
                () if law.refused or not law.intervals else (law.c_min, law.c_max, 10 * law.c_max, 1000 * law.c_max)
            ):
                low, high = law.interval_at(C)
                assert low <= law.predict(C) <= high
                assert law.quantity != "L" or high < curves["loss"].max()
