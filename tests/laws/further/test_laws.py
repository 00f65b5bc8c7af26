"""Each law on a table made from a known one: its numbers, its interval, and what it refuses."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import least_squares

from linnet.config import ConfigError
from linnet.laws.fit import parametric
from linnet.laws.fit.lse import Objective
from linnet.laws.further import ESTIMATES, LAWS, TOPOLOGIES, Options, fit_laws, joint
from linnet.laws.further.base import Estimate, holm, theil_sen, two_sided
from linnet.laws.further.data_constrained import Repeats
from linnet.laws.further.share import best_share


def one(table, name, bootstrap=60, **options):
    (law,), _ = fit_laws(table, [name], Options(bootstrap=bootstrap, **options))
    assert ESTIMATES[name] is None or {estimate.name for estimate in law.estimates} <= set(ESTIMATES[name])
    return law


def test_every_law_names_its_estimates():
    assert ESTIMATES.keys() == LAWS.keys()


def test_state_finds_the_shared_exponent_and_the_offsets(tables):
    law = one(tables.state_table(0), "state")
    c = law.estimate("c")
    assert c.value == pytest.approx(-0.28, abs=0.01) and c.interval[0] < -0.28 < c.interval[1]
    apart = tables.CLASSES["recurrent"][0] - tables.CLASSES["attention"][0]
    of = "recurrent - attention"
    assert law.estimate("k difference", of).value == pytest.approx(apart, abs=0.05)
    assert law.estimate("state at equal P*", "recurrent / attention").value == pytest.approx(
        np.exp(apart / 0.28), rel=0.1
    )
    assert law.tests[0].p > 0.05 and law.predictions[0].mean_error < 0.02 and len(law.points["points"]) == 25


def test_context_scales_the_caches_alone(tables):
    table = tables.state_table(0, noise=0.0)
    near, far = (one(table, "state", 0, context=context) for context in (None, 4 * 8192))
    assert near.estimate("c").value == pytest.approx(-0.28, abs=1e-9)
    M = [{(p["architecture"], p["budget"]): p["M"] for p in law.points["points"]} for law in (near, far)]
    ratio = {name: M[1][name, 4e18] / M[0][name, 4e18] for name in ("attention", "recurrent", "half")}
    assert ratio == {"attention": pytest.approx(4), "recurrent": pytest.approx(1), "half": pytest.approx(2.5)}


def test_state_flags_unequal_slopes(tables):
    law = one(tables.state_table(1, slopes={"recurrent": -0.36, "twelfth": -0.34}), "state", 0)
    assert law.tests[0].p < 0.05 and "different slopes" in law.tests[0].conclusion


def test_best_share_by_budget_and_over_all(tables):
    law = one(tables.share_table(0), "share")
    best = law.estimate("rho*", "all budgets")
    assert best.value == pytest.approx(0.25, abs=0.03) and best.interval[0] < 0.25 < best.interval[1]
    assert len(law.estimates) == 6  # one per budget, and all of them
    edge = one(tables.share_table(0, best=-0.5), "share", 0).estimate("rho*", "all budgets")
    assert edge.value is None and "both sides" in edge.refused


def test_the_state_aware_share_minimises_what_its_definition_says(tables):
    """The state grows as e^(rho / 5), so ln P* (M / M_ref)^-c adds -c rho / 5 and the minimum moves down."""
    table = tables.share_table(0, noise=0.0)
    M = 1e6 * np.exp(table["attention_share"] / 5) * (table["N"] / 1e8) ** 0.6
    table = table.assign(state_fixed=M, state_dynamic=0.0, seq_len=8192.0)
    law, c = one(table, "share", 0), one(table, "state", 0).estimate("c").value
    rho = np.array(sorted(set(table["attention_share"])))
    values = np.log1p(0.6 * (rho - 0.25) ** 2) - c * rho / 5
    expected = best_share(rho[None], values[None])[0]
    assert 0.1 < expected < 0.24
    assert law.estimate("state-aware rho*", "budget 4e+18").value == pytest.approx(expected, abs=1e-6)


def test_two_lineages_of_one_share_are_refused(tables):
    table = tables.share_table(0)
    other = table[table["attention_share"] == 0].assign(architecture="other")
    assert "--architectures" in one(pd.concat([table, other], ignore_index=True), "share", 0).refused[0]


def test_gaps_follow_their_definition(tables, monkeypatch):
    law = one(tables.state_table(0, noise=0.0), "gap", 0)
    rows = {(row["architecture"], row["budget"], row["delta"]): row for row in law.points["gaps"]}
    row = rows["half", 4e18, -0.5]
    truth = np.exp(tables.optimal_loss("half", 4e18)) * np.expm1(tables.curvature(0.5) * np.log(0.5) ** 2)
    assert row["gap"] == pytest.approx(truth, rel=1e-6) and row["over_training"] == pytest.approx(4)
    assert row["N"] * row["D"] * 6 == pytest.approx(row["C"])  # D from the cost of the budget
    below = rows["half", 4e18, -0.9]  # a tenth of N* lies below the sizes, which begin at e^-1.4 N*
    assert below["gap"] is None and "train smaller models" in below["refused"]
    slopes = [e for e in law.estimates if e.name.startswith("slope")]
    assert len(slopes) == 5 and all(slope.value > 0 for slope in slopes)
    monkeypatch.setattr("linnet.laws.further.gap.two_sided", lambda drawn: 0.02)
    slopes = [e for e in one(tables.state_table(0), "gap", 40).estimates if e.name.startswith("slope")]
    assert {(slope.p, slope.note) for slope in slopes} == {(0.1, "no growth shown")}, "one of five budgets by chance"


def test_joint_surfaces_tell_exponents_apart(tables):
    same = one(tables.surface_table(3), "joint", 100)
    p = {test.name: test.p for test in same.tests}
    assert p["shared exponents against all own"] > 0.05
    difference = same.estimate("a difference", "one - two")
    assert difference.interval[0] < 0 < difference.interval[1] and difference.note == "cannot be told apart"
    other = one(tables.surface_table(3, two=(1.8, 480.0, 2100.0, 0.35, 0.31)), "joint", 100)
    p = {test.name: test.p for test in other.tests}
    assert p["shared exponents against all own"] < 0.05
    a = other.estimate("a difference", "one - two")
    assert a.value == pytest.approx(0.37 / 0.72 - 0.31 / 0.66, abs=0.03) and a.note == "differ"
    assert len(other.predictions) == 4


def test_tests_of_joint_surfaces_keep_their_level(monkeypatch, tables):
    """The chi-squared p-value of the likelihood ratio is below 0.05 in 7 % of tables of equal surfaces."""
    near, found = np.array([np.log(500.0), np.log(2050.0), np.log(1.8), 0.35, 0.37]), []
    best = parametric._best
    monkeypatch.setattr(parametric, "_best", lambda N, D, loss, *_, **k: best(N, D, loss, "", near, **k))
    monkeypatch.setattr(joint, "_held_out", lambda *_: [])
    for seed in range(40):
        tests = one(tables.surface_table(seed), "joint", 0).tests
        found.append([test for test in tests if "against all own" in test.name])
    assert np.mean([test.p < 0.05 for tests in found for test in tests]) <= 0.06
    assert np.mean([any(test.conclusion.startswith("rejected") for test in tests) for tests in found]) <= 0.1
    assert {test.degrees for tests in found for test in tests} == {(1, 60), (2, 60), (3, 60)}


def test_joint_without_noise_finds_both_surfaces(tables):
    law = one(tables.surface_table(0, noise=0.0), "joint", 0)
    for name, A in (("one", 480.0), ("two", 520.0)):
        found = next(row for row in law.points["surfaces"] if row["architecture"] == name)
        assert (found["A"], found["alpha"], found["E"]) == pytest.approx((A, 0.35, 1.8), rel=1e-3)


def test_efficiency_is_the_horizontal_distance(tables):
    table = tables.share_table(0, noise=0.0)
    table = table[table["attention_share"].isin((0.25, 1.0))]
    reference = "share-0.25"
    far = one(table, "efficiency", 0, reference=reference).estimates[0]
    assert far.value is None and "train more budgets" in far.refused
    # The optimal losses are 2.4 - 0.05 ln C + g, so the compute at equal loss is exp(difference of g / 0.05).
    g = np.log1p(0.6 * 0.75**2)
    near = table.assign(loss=table["loss"] - 0.9 * g * (table["attention_share"] == 1.0))
    kappa = one(near, "efficiency", 0, reference=reference).estimate("kappa", "share-1.00 for the loss of share-0.25")
    assert kappa.value == pytest.approx(np.exp(0.1 * g / 0.05), rel=2e-3)


def test_allocation_of_loss_and_of_perplexity(tables):
    table = tables.surface_table(0)
    law, other = one(table, "allocation"), one(table, "allocation", of="perplexity")
    truth = 0.37 / 0.72
    assert law.estimate("a", "one").value == pytest.approx(truth, abs=0.02)
    low, high = law.estimate("a difference", "one - two").interval
    assert low < 0 < high and len(law.predictions) == 2
    assert other.estimate("a", "one").value != law.estimate("a", "one").value
    assert other.estimate("a", "one").value == pytest.approx(truth, abs=0.04)


def test_allocation_has_the_scatter_of_the_optima_about_their_law():
    covered = []
    for seed in range(20):
        draw, rows = np.random.default_rng(seed), []
        for name in ("one", "two"):
            for C in np.geomspace(1e17, 1e19, 6):
                best = np.log(np.sqrt(C / 120)) + 0.2 * draw.normal()
                for N in np.exp(best + np.linspace(-1, 1, 7)):
                    loss = 3 + 0.1 * (np.log(N) - best) ** 2 + 1e-4 * draw.normal()
                    row = {"run": f"{len(rows)}", "N": N, "D": C / (6 * N), "C": C, "budget": C, "loss": loss}
                    rows.append(row | {"architecture": name})
        law = one(pd.DataFrame(rows), "allocation", 200)
        ends = [law.estimate("a", "one").interval, law.estimate("b", "two").interval]
        ends += [tuple(end + 0.5 for end in law.estimate("a difference", "one - two").interval)]
        covered += [low < 0.5 < high for low, high in ends]
    assert np.mean(covered) >= 0.85


def test_efficiency_has_the_scatter_of_the_factors():
    covered = []
    for seed in range(20):
        draw, rows = np.random.default_rng(seed), []
        for name in ("one", "two"):
            for C in np.geomspace(1e17, 1e19, 7):
                lowest = 10 - 0.15 * np.log(C) + 0.01 * draw.normal()  # a budget is better or worse as a whole
                for N in np.sqrt(C / 120) * np.exp(np.linspace(-1, 1, 7)):
                    loss = lowest + 0.1 * np.log(N / np.sqrt(C / 120)) ** 2 + 1e-4 * draw.normal()
                    row = {"run": f"{len(rows)}", "N": N, "D": C / (6 * N), "C": C, "budget": C, "loss": loss}
                    rows.append(row | {"architecture": name})
        estimate = one(pd.DataFrame(rows), "efficiency", 200).estimate("kappa", "two for the loss of one")
        covered.append(estimate.interval[0] < 1 < estimate.interval[1])
    assert np.mean(covered) >= 0.8


def test_over_training_from_twenty_runs_and_from_five(tables):
    E, a, b, eta = tables.OVER_TRAINED
    table = tables.over_training_table(0, noise=0.0)
    law = one(table, "over-training")
    assert law.estimate("eta", "one").value == pytest.approx(eta, rel=1e-3)
    assert law.estimate("E", "one").value == pytest.approx(E, rel=1e-3)
    assert law.estimate("M of lowest loss", "one").value == pytest.approx((b / a) ** (1 / (2 * eta)), rel=1e-3)
    assert [test.mean_error < 1e-3 for test in law.predictions] == [True, True]
    five = one(table.iloc[[0, 4, 7, 13, 16]], "over-training")
    assert five.estimate("eta", "one").value == pytest.approx(eta, rel=0.05)
    assert five.estimate("eta", "one").interval is None and "no intervals" in five.notes[0]
    assert one(table.iloc[:4], "over-training").refused


def test_data_constrained_finds_the_worth_of_a_pass(tables):
    table = tables.passes_table(0)
    law = one(table, "data-constrained", 20)
    R = law.estimate("R_D", "one")
    assert R.value == pytest.approx(15.4, rel=0.15) and R.interval[0] < 15.4 < R.interval[1]
    assert law.estimate("D' / U at 4 passes", "one").value == pytest.approx(1 + 15.4 * -np.expm1(-3 / 15.4), rel=0.02)
    assert law.predictions[0].mean_error < 0.02
    assert one(table[table["D"] <= table["unique_tokens"]], "data-constrained").refused


def test_the_search_for_the_worth_of_a_pass_stays_finite(tables):
    """At exponents far from any model too: a warning of numpy would be printed above the report."""
    surface = {"A": 400.0, "B": 2000.0, "E": 1.7, "alpha": 0.34, "beta": 0.28}
    model = Repeats(tables.passes_table(0), surface)
    model.two = True
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        for alpha, beta, log_A in ((1e-3, 30.0, 50.0), (30.0, 1e-3, 50.0), (1e-3, 30.0, -50.0), (1e-3, 1e-3, -50.0)):
            found = model.predict(np.array([log_A, 7.0, 0.5, alpha, beta, 2.0, 2.0]))
            assert np.isfinite(found).all(), (alpha, beta, log_A)


def test_batch_shift_of_the_optimum(tables):
    table = tables.surface_table(0)
    table = table[table["architecture"] == "one"]
    larger = table.assign(N=table["N"] * np.exp(-0.3), D=table["D"] * np.exp(0.3), run=table["run"] + "b")
    both = pd.concat([table.assign(batch_tokens=5e5), larger.assign(batch_tokens=1e6)], ignore_index=True)
    shifts = [e for e in one(both, "batch").estimates if e.name == "shift"]
    assert [e.value for e in shifts] == pytest.approx([-0.3] * 5, abs=0.02)
    assert {e.note for e in shifts} == {"to smaller models"}
    assert one(table.assign(batch_tokens=5e5), "batch").refused


def topologies(seeds=3, noise=None, better=0.03, start=0):
    """Losses of all topologies; `noise` is the standard deviation of each, if not 0.002."""
    random, rows = np.random.default_rng(start), []
    per_seed = random.normal(0, 0.01, seeds)  # what a paired test takes out
    for index, name in enumerate(TOPOLOGIES):
        for seed in range(seeds):
            loss = 2.2 - better * (index == 3) + per_seed[seed]
            loss += (0.002 if noise is None else noise[index]) * random.standard_normal()
            row = {"run": f"{name}-{seed}", "architecture": name, "N": 7.5e8, "D": 1e9, "C": 4.5e18, "loss": loss}
            rows.append(row | {"seed": seed, "N_total": np.nan})
    return pd.DataFrame(rows)


def test_topologies_are_paired_by_seed():
    law = one(topologies(seeds=5), "topology")
    assert len(law.estimates) == 11 and all(e.of.endswith(" - (1H:1A) x12") for e in law.estimates)
    assert [e.of.split(" - ")[0] for e in law.estimates if e.note == "better"] == ["(4H:4A) x3"]
    low, high = law.estimate("difference", "(4H:4A) x3 - (1H:1A) x12").interval
    assert low < -0.03 < high < 0
    assert one(topologies(), "topology", reference="12H:12A").estimates[0].of.endswith("- 12H:12A")


def test_a_reference_that_scatters_more_than_the_others_ranks_no_equal_topologies():
    """With one variance for all topologies it ranks some in 29 % of the tables."""
    noise, names = [0.02] + 11 * [0.005], list(TOPOLOGIES)
    tables = (topologies(noise=noise, better=0, start=start) for start in range(60))
    laws = [one(table, "topology", reference=names[0]) for table in tables]
    assert sum(any(e.note in ("better", "worse") for e in law.estimates) for law in laws) <= 8


def test_topology_refuses_models_of_different_size_or_without_seeds_in_common():
    table = topologies()
    table.loc[0, "N"] = 8.5e8
    assert "N differs by 13%" in one(table, "topology").refused[0]
    assert one(topologies(seeds=1), "topology").refused


def test_all_fits_what_the_table_supports_and_says_why_not_the_others(tables):
    found, unsupported = fit_laws(tables.surface_table(0), ["all"], Options(bootstrap=0))
    assert {law.law for law in found} | set(unsupported) == set(LAWS)
    assert set(unsupported) == {"state", "share", "topology", "batch", "data-constrained"}
    for law in found:
        assert law.flops == "exact" and json.dumps(law.to_json(), allow_nan=False)
    named, _ = fit_laws(tables.surface_table(0), ["state"], Options(bootstrap=0))
    assert "state_fixed" in named[0].refused[0]


def test_two_budgets_are_too_few(tables):
    table = tables.state_table(0)
    _, unsupported = fit_laws(table[table["budget"] < 1e19], ["all"], Options(bootstrap=0))
    assert "needs 2 classes" in unsupported["state"][0] and "3 budgets" in unsupported["allocation"][0]


def test_wrong_cells_and_names_are_listed_together(tables):
    table = tables.share_table(0).assign(seed="x", batch_tokens="-3", line=range(2, 177))
    with pytest.raises(ConfigError) as error:
        fit_laws(table, ["share"])
    assert [line.split(":")[0] for line in error.value.problems] == ["batch_tokens", "seed"]
    with pytest.raises(ConfigError, match="'state'"):
        fit_laws(table, ["stat"])


def test_shared_statistics():
    family = [Estimate("x", p=0.01), Estimate("y", p=0.04), Estimate("z", p=0.03), Estimate("none")]
    holm(family)
    assert [e.p for e in family[:3]] == pytest.approx([0.03, 0.06, 0.06]) and family[3].p is None
    assert theil_sen(np.array([0.0, 1.0, 2.0]), np.array([[0.0, 1.0, 5.0]]))[0] == pytest.approx(2.5)
    rho = np.array([[0.0, 0.25, 1.0]])
    assert best_share(rho, (rho - 0.4) ** 2)[0] == pytest.approx(0.4)
    assert np.isnan(best_share(rho, np.array([[0.1, 0.5, 2.0]]))[0])
    draws = np.random.default_rng(0).normal(3, 1, 4000)
    assert two_sided(draws) == pytest.approx(0.0027, abs=0.002) and two_sided(draws - 30) < 1e-100


def test_a_failed_run_does_not_move_the_value_of_repeated_data(tables):
    table = tables.passes_table(0, noise=0.001)
    repeated = np.flatnonzero(table["D"] > 3 * table["unique_tokens"])
    table.loc[repeated[:2], "loss"] *= 1.2
    assert one(table, "data-constrained", 0).estimate("R_D", "one").value == pytest.approx(15.4, rel=0.05)


def misfit(table, name):
    return [test for test in one(table, name, 0).tests if test.name.endswith("lack of fit")]


def test_a_law_that_misses_its_points_in_an_arch_says_so(tables):
    table = tables.over_training_table(0)
    ratio = np.log(table["D"] / table["N"])
    place = (ratio - ratio.mean()) / np.ptp(ratio)
    (test,) = misfit(table.assign(loss=table["loss"] * np.exp(0.1 * place**2 * (1 - 3 * place))), "over-training")
    assert test.p < 0.01 and "misses its points in a pattern, by up to 2" in test.conclusion
    repeated = tables.passes_table(0)
    arch = np.log(repeated["D"] / repeated["D"].median()) ** 3 / 3000
    assert misfit(repeated.assign(loss=repeated["loss"] * np.exp(arch)), "data-constrained")[0].p < 0.01


@pytest.mark.parametrize("name", ["over-training", "state", "data-constrained", "joint"])
def test_a_law_that_made_the_points_shows_no_lack_of_fit(tables, name):
    makers = {"over-training": tables.over_training_table, "state": tables.state_table}
    makers |= {"data-constrained": tables.passes_table, "joint": tables.surface_table}
    for noise in (0.0, 0.003):
        found = misfit(makers[name](1, noise=noise), name)
        assert found and all(test.p > 0.01 and "no pattern" in test.conclusion for test in found), name
    if name == "over-training":
        law = one(makers[name](1).iloc[[0, 4, 7, 13, 16]], name)
        assert not law.tests and any("lack of fit is not tested: 5 points for 4 numbers" in note for note in law.notes)


def test_over_training_of_raw_losses_is_fitted_as_by_another_solver(tables):
    table = tables.over_training_table(0, 0.01)
    C, M, loss = table["C"].to_numpy(), (table["D"] / table["N"]).to_numpy(), table["loss"].to_numpy()

    def residuals(theta):
        return theta[2] + (np.exp(theta[0]) * M ** theta[3] + np.exp(theta[1]) * M ** -theta[3]) * C ** -theta[3] - loss

    best = least_squares(residuals, [4.7, 5.2, 1.6, 0.12], x_scale="jac", xtol=1e-14, ftol=1e-14).x
    law = one(table, "over-training", 0, objective=Objective(None, True))
    assert law.estimate("eta", "one").value == pytest.approx(best[3], rel=1e-3)
    assert law.estimate("E", "one").value == pytest.approx(best[2], rel=1e-3)
    assert law.estimate("eta", "one").value != one(table, "over-training", 0).estimate("eta", "one").value


def test_the_order_of_the_architectures_in_a_file_changes_nothing(tables):
    table = tables.state_table(0)
    found = [
        [law.to_json() for law in fit_laws(part, ["allocation", "efficiency", "state"], Options(bootstrap=30))[0]]
        for part in (table, table.iloc[::-1])
    ]
    assert found[0] == found[1]


def test_runs_of_several_sizes_or_budgets_with_one_name_all_count(tables):
    table = tables.state_table(0)
    named = fit_laws(table, ["allocation", "gap"], Options(bootstrap=30))[0]
    for name in ("one", table.groupby(["architecture", "budget"]).cumcount().astype(str)):
        found = fit_laws(table.assign(run=name), ["allocation", "gap"], Options(bootstrap=30))[0]
        assert [law.to_json() for law in found] == [law.to_json() for law in named]


def test_rows_before_the_last_of_a_run_are_counted_in_a_note(tables):
    table = tables.state_table(0)
    earlier = table.assign(D=table["D"] / 2, C=table["C"] / 2, loss=table["loss"] * 1.1, budget=np.nan)
    law = one(pd.concat([table, earlier]), "allocation")
    assert law.notes[-1].startswith(f"{len(table)} earlier rows of the runs left out")


def test_losses_without_noise_tell_no_topologies_apart():
    rows = [
        (name, seed, round(3 + 0.01 * seed + more, 2)) for name, more in (("x", 0), ("y", 0.01)) for seed in (1, 2, 3)
    ]
    table = pd.DataFrame(rows, columns=["architecture", "seed", "loss"]).assign(N=1e7, D=1e9, C=6e16, N_total=np.nan)
    law = one(table.assign(run=[str(i) for i in range(6)]), "topology")
    (difference,) = law.estimates
    assert difference.interval is None and difference.p is None and difference.note == "cannot be told apart"
    assert "no noise" in law.notes[-2]
    assert two_sided(np.full(100, 0.3)) is None
