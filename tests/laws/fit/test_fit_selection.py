"""The choice of the headline: method and form by held-out error, on targets that all candidates share."""

import numpy as np
import pandas as pd
import pytest

from linnet.laws.fit import ArchitectureFit, Law, MethodFit, crossing, fit_study
from linnet.laws.fit.selection import better_form, choose_allocation

BUDGETS = np.geomspace(1e18, 1e20, 5)


def noisy(table: pd.DataFrame, seed: int = 0, sd: float = 0.002) -> pd.DataFrame:
    return table.assign(loss=table["loss"] * np.exp(np.random.default_rng(seed).normal(0, sd, len(table))))


@pytest.fixture(scope="module")
def ladder(surface):
    table = noisy(surface.ladder(BUDGETS, np.linspace(-1.2, 1.2, 5)))
    return fit_study(table, bootstrap=60), surface


def test_the_headline_has_the_lowest_held_out_error(ladder):
    study, _ = ladder
    chosen = [one for one in study.candidates if one.chosen]
    assert [(one.method, one.form) for one in chosen] == [(study.headline, study.form)]
    lowest = min(study.candidates, key=lambda one: one.error)
    # The parabolas lose by less than the noise of the minimum that is predicted: 1.5 x 0.002 / root of 5.
    assert lowest.method != "isoflop" and chosen[0].method == "isoflop"
    assert 0 < chosen[0].error - lowest.error < 0.0014 * 1.5
    assert {one.method for one in study.candidates} == {"isoflop", "power", "parametric"}
    fit = study["tnl"]
    assert fit.held_out.mean_error == pytest.approx(chosen[0].error)


def test_sizes_have_a_method_of_their_own(surface):
    table = noisy(surface.ladder(np.geomspace(1e18, 1e20, 4), np.linspace(-1.0, 1.0, 4)), 2)
    study = fit_study(table, bootstrap=60)
    fit = study["tnl"]
    assert study.allocation == fit.allocation != "power" and fit.N_opt is fit.sizes.N_opt
    fit.headline = "power"
    assert choose_allocation(study.architectures, "power") == "isoflop"
    assert fit.N_opt is fit.sizes.N_opt and fit.L is not fit.sizes.L


def test_a_win_below_the_noise_of_the_prediction_does_not_count():
    """The lowest of seven noisy losses predicts a held-out minimum better by chance alone."""
    budgets, r = np.geomspace(1e18, 1e20, 5), 0.8
    C = np.repeat(budgets, 7)
    N = (r * 8.8e13**r * C / (6 * 5.4e13)) ** (1 / (1 + r)) * np.tile(np.exp(np.linspace(-1.2, 1.2, 7)), 5)
    loss = ((8.8e13 / N) ** r + 5.4e13 * 6 * N / C) ** 0.095
    table = pd.DataFrame({"run": [f"r{i}" for i in range(35)], "architecture": "one", "N": N, "D": C / 6 / N, "C": C})
    table = table.assign(N_total=np.nan, budget=C, loss=loss)
    studies = [fit_study(noisy(table, seed), bootstrap=0, conventions=False) for seed in (9, 27)]
    for study in studies:
        assert min(study.candidates, key=lambda candidate: candidate.error).method == "power"
        assert study.headline == "isoflop"


def test_all_candidates_predict_the_same_losses(ladder):
    study, surface = ladder
    tests = [test for forms in study["tnl"].tests.values() for test in forms.values()]
    assert len(tests) == 5  # two forms of isoflop and power, and the surface
    targets = {tuple((p["C"], p["loss"]) for p in test.points) for test in tests}
    assert len(targets) == 1
    ((C, loss),) = targets.pop()
    assert C == pytest.approx(BUDGETS[-1])
    assert loss == pytest.approx(surface.loss(surface.optimum(C), C / 6 / surface.optimum(C)), rel=0.005)


def test_a_surface_with_a_floor_needs_the_constant(ladder):
    study, surface = ladder
    fit, C = study["tnl"], 1e21
    assert study.form == "constant" and fit.L.constant is not None
    for name in ("isoflop", "power"):
        forms = fit.tests[name]
        assert forms["constant"].mean_error < forms["pure"].mean_error
    low, high = fit.L.interval_at(C)
    assert low <= surface.loss(surface.optimum(C), C / 6 / surface.optimum(C)) <= high


def test_pure_data_keep_the_pure_law():
    C = np.geomspace(1e18, 1e21, 7)
    loss = 30 * C**-0.05 * np.exp(np.random.default_rng(1).normal(0, 0.001, 7))
    assert better_form(C, loss) == "pure"
    assert better_form(C, 1.7 + 1000 * C**-0.15) == "constant"
    assert better_form(C[:3], (1.7 + 1000 * C**-0.15)[:3]) == "pure"  # the form cannot be tested


@pytest.mark.parametrize("sizes", [1, 2])
def test_isoflop_is_no_headline_without_a_parabola(surface, sizes):
    table = noisy(surface.ladder(BUDGETS, np.linspace(0, 0.3, sizes)))
    study = fit_study(table, bootstrap=60)
    assert study.headline != "isoflop"
    assert "isoflop" not in {one.method for one in study.candidates}


def architecture(name: str, pure: Law, constant: Law | None = None, form: str = "pure") -> ArchitectureFit:
    return ArchitectureFit(name, 4, {"power": MethodFit("power", pure, constant or Law("L"))}, "power", form)


def law(coefficient, exponent, constant=None, points=5) -> Law:
    found = Law("L", coefficient, exponent, constant, c_min=1e18, c_max=1e20, points=points)
    noise = np.random.default_rng(int(points)).normal(0, 1e-3, (200, 1))
    found.draws = np.hstack(
        [np.log(coefficient) + noise, np.full((200, 1), exponent), np.full((200, 1), constant or 0)]
    )
    found.intervals = {"alpha": (exponent, exponent)}
    return found


def test_three_budgets_give_no_interval_of_a_crossing():
    one, two = law(30, -0.05, points=3), law(30 * 1e19**0.01, -0.06, points=3)
    found = crossing(architecture("a", one), architecture("b", two))
    assert found.C == pytest.approx(1e19, rel=1e-6) and found.interval is None and "3 budgets" in found.refused[0]


@pytest.mark.parametrize("place, word", [(1e17, "outside"), (1e22, "outside"), (1e19, "")])
def test_a_crossing_outside_the_data_without_an_interval_has_no_number(place, word):
    one, two = law(30, -0.05, points=2), law(30 * place**0.01, -0.06, points=2)
    found = crossing(architecture("a", one), architecture("b", two))
    assert found.interval is None and (found.C is None) == bool(word)
    assert (word in found.refused[0]) if word else (found.C == pytest.approx(place, rel=1e-6))
    assert found.C is not None or found.lower_above is None
    # Four budgets give an interval, and the number stands with it.
    one, two = law(30, -0.05), law(30 * place**0.01, -0.06)
    found = crossing(architecture("a", one), architecture("b", two))
    assert found.interval is not None and found.C == pytest.approx(place, rel=1e-6) and found.inside != bool(word)


def test_a_crossing_of_the_other_form_outside_the_data_has_no_number():
    laws = [(law(30, -0.05), law(1000, -0.15, 1.7)), (law(30 * 1e17**0.01, -0.06), law(900, -0.15, 1.75))]
    fits = [architecture(name, *pair, form="constant") for name, pair in zip("ab", laws, strict=True)]
    found = crossing(*fits)
    assert found.other_C == pytest.approx(1e17, rel=1e-6) and not found.other_inside
    assert "without a constant cross outside the data" in found.refused[-1] and "1e+17" not in found.refused[-1]


def test_forms_that_disagree_give_no_interval_of_the_crossing():
    laws = [(law(30, -0.05), law(1000, -0.15, 1.7)), (law(30 * 1e19**0.01, -0.06), law(900, -0.15, 1.75))]
    fits = [architecture(name, *pair, form="constant") for name, pair in zip("ab", laws, strict=True)]
    found = crossing(*fits)
    assert (found.form, found.other_form) == ("constant", "pure")
    assert found.other_C == pytest.approx(1e19, rel=1e-6) and found.other_inside
    assert found.C is None, "the laws with a constant meet at 1e22 FLOPs, outside the data"
    assert found.interval is None and "without a constant cross at 1e+19" in found.refused[-1]
    alone = crossing(*(architecture(name, pair[0]) for name, pair in zip("ab", laws, strict=True)))
    assert alone.interval[0] < alone.C < alone.interval[1]


def test_laws_that_cannot_be_told_apart_have_no_interval_of_their_crossing():
    one, two = law(30, -0.05), law(30 * 1e19**0.0001, -0.0501)
    for found, seed in ((one, 1), (two, 2)):
        turn = np.random.default_rng(seed).normal(0, 1e-3, 200)  # the slopes, about the middle of the data
        found.draws[:, 0] = np.log(found.coefficient) - turn * np.log(1e19)
        found.draws[:, 1] = found.exponent + turn
    found = crossing(architecture("a", one), architecture("b", two))
    assert found.interval is None and "the other law is lower" in found.refused[0]


@pytest.mark.parametrize("final, candidate", [(1.0, True), (0.1, False)])
def test_envelopes_of_decaying_rates_are_no_candidates(surface, final, candidate):
    """In the middle of a run whose learning rate decays, the loss is higher than that of a run that ends there."""
    curves = surface.curves(np.geomspace(1e8, 1e10, 9), points=60)
    curves["learning_rate"] = 1.0 + (final - 1.0) * curves.groupby("run").cumcount() / 59
    ends = curves.loc[curves.groupby("run")["D"].idxmax()]
    study = fit_study(ends, curves, bootstrap=0)
    fit = next(iter(study.values())).envelope
    assert not fit.refused and fit.decays is not candidate
    assert ("envelope" in {one.method for one in study.candidates}) is candidate
