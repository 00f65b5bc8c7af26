import io
import json

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from linnet.cli.fit.page import show_summary
from linnet.config import ConfigError
from linnet.laws.fit import ArchitectureFit, Law, MethodFit, crossing, fit_study, parse_points, predictions

BUDGETS = np.geomspace(1e18, 1e21, 4)


@pytest.fixture
def ladder(surface):
    """Two architectures: one with optima inside its sizes, and one with sizes that are all too small."""
    small = surface.ladder(BUDGETS, np.linspace(-2, -0.4, 6), architecture="hgrn2")
    small["loss"] *= 1.02
    return pd.concat([surface.ladder(BUDGETS), small], ignore_index=True)


def test_every_architecture_by_every_method(ladder, surface):
    lines = []
    study = fit_study(ladder, bootstrap=40, progress=lines.append)
    assert list(study) == ["tnl", "hgrn2"] and len(study) == 2 and study.headline == "isoflop"
    tnl, hgrn2 = study["tnl"], study["hgrn2"]
    assert list(tnl.methods) == ["isoflop", "envelope", "power", "parametric"] and "tnl: isoflop" in lines
    assert tnl.N_opt is tnl.isoflop.N_opt and tnl.parametric.surface["alpha"] == pytest.approx(surface.alpha, rel=1e-6)
    assert len(tnl.refused) == 1 and tnl.refused[0].startswith("envelope: no training curves")
    # Refusals name each budget, and the loss still has its law.
    assert any("train larger models here" in line for line in hgrn2.refused)
    assert any(line.startswith("isoflop N_opt and D_opt: 0 budgets of 4") for line in hgrn2.refused)
    assert not hgrn2.L.refused and hgrn2.N_opt.refused
    assert not hgrn2.parametric.refused
    assert json.loads(json.dumps(study.to_json(), allow_nan=False))["architectures"]["tnl"]["headline"] == "isoflop"


def test_a_comparison_at_one_size_is_not_told_what_each_law_lacks(surface):
    told = []
    for sizes in ([0.0], [-0.3, 0.3]):
        ladders = [surface.ladder(BUDGETS[:1], np.array(sizes), architecture=name) for name in ("tnl", "hgrn2")]
        console = Console(record=True, width=200, file=io.StringIO())
        show_summary(console, fit_study(pd.concat(ladders, ignore_index=True), bootstrap=0))
        told.append(console.export_text())
    assert "no law to fit" in told[0] and "Refused" not in told[0]
    assert "no law to fit" not in told[1] and "Refused" in told[1]


def test_every_fit_has_a_held_out_test(ladder):
    study = fit_study(ladder, bootstrap=0)
    for fit in study.values():
        for name, method in fit.methods.items():
            if name != "envelope":
                # A surface has its own test, which remains even if its laws of compute are refused.
                test = method.held_out if name == "parametric" else method.L.held_out
                assert test.mean_error is not None, (fit.architecture, name)
                assert test.tested >= 1


def test_conventions_move_the_exponents(surface):
    table = surface.ladder(BUDGETS, np.linspace(-0.4, 0.4, 7))
    # Embeddings are a large part of small models; C in the table is 6ND of the total count.
    table["N_total"] = table["N"] + 3000 * table["N"] ** (1 / 2)
    table["D"] = table["C"] / (6 * table["N_total"])
    table["loss"] = surface.loss(table["N"], table["D"])
    fit = fit_study(table, method="isoflop", bootstrap=0)["tnl"]
    found = {(law.count, law.flops): law for law in fit.conventions}
    # With embeddings counted, C is 6 N D already.
    assert set(found) == {("non-embedding", "exact"), ("non-embedding", "6nd"), ("total", "exact")}
    assert found["total", "exact"].a < found["non-embedding", "exact"].a
    assert found["non-embedding", "exact"].a + found["non-embedding", "exact"].b > 1.005
    assert found["non-embedding", "6nd"].a + found["non-embedding", "6nd"].b == pytest.approx(1)
    total = fit_study(table, method="isoflop", bootstrap=0, count="total")["tnl"]
    assert total.N_opt.exponent == pytest.approx(found["total", "exact"].a)


def test_curves_in_the_table_or_beside_it(surface):
    curves = surface.curves(np.geomspace(1e8, 1e10, 9), points=60)
    study = fit_study(curves, method="envelope", bootstrap=0)
    assert study["tnl"].envelope.curves == 9 and not study["tnl"].L.refused
    beside = fit_study(surface.ladder(BUDGETS), curves, method="all", bootstrap=0, smooth=1)
    assert beside["tnl"].envelope.N_opt.exponent == pytest.approx(surface.a, abs=0.02)


def test_one_method_is_its_own_headline(ladder):
    study = fit_study(ladder, method="power", bootstrap=0)
    assert study.headline == "power" and list(study["tnl"].methods) == ["power"]


def test_unknown_method_names_the_nearest(ladder):
    with pytest.raises(ConfigError, match="did you mean 'isoflop'"):
        fit_study(ladder, method="isoflops")


def law(beta, alpha, E=None, spread=0.0):
    found = Law("L", beta, alpha, E, c_min=1e18, c_max=1e21, points=4)
    if spread:
        noise = np.random.default_rng(0).normal(0, spread, (200, 1))
        found.draws = np.hstack([np.log(beta) + noise, np.full((200, 1), alpha), np.full((200, 1), E or 0.0)])
        found.intervals = {"alpha": (alpha, alpha)}
    return found


def fitted(name, L) -> ArchitectureFit:
    return ArchitectureFit(name, 4, {"power": MethodFit("power", L=L)}, "power")


def test_pure_laws_cross_where_they_are_equal():
    one, two = law(30, -0.05, spread=0.001), law(30 * 1e20**0.01, -0.06, spread=0.002)
    found = crossing(fitted("tnl", one), fitted("llama", two))
    assert found.C == pytest.approx(1e20) and found.inside
    assert (found.lower_below, found.lower_above) == ("tnl", "llama")
    assert found.interval[0] < 1e20 < found.interval[1] and found.refused == []


def test_laws_with_constants_cross():
    one, two = law(1000, -0.15, 1.7), law(900, -0.15, 1.8)
    found = crossing(fitted("a", one), fitted("b", two))
    assert float(one.predict(found.C)) == pytest.approx(float(two.predict(found.C)), rel=1e-9)
    assert found.lower_above is None and found.interval is None, "no draws tell their slopes apart"
    one, two = law(1000, -0.15, 1.7, spread=0.001), law(900, -0.15, 1.8, spread=0.001)
    assert crossing(fitted("a", one), fitted("b", two)).lower_above == "a"


def test_laws_that_do_not_cross_say_so():
    for spread, words in ((0.001, "; a is lower"), (0.1, "cannot be told apart"), (0.0, "cannot be told apart")):
        found = crossing(fitted("a", law(30, -0.05, spread=spread)), fitted("b", law(31, -0.05, spread=spread)))
        assert found.C is None and "do not meet" in found.refused[0] and words in found.refused[0]
    refused = Law("L", refused=["one budget"])
    assert "b has no L(C): one budget" in crossing(fitted("a", law(30, -0.05)), fitted("b", refused)).refused[0]


def test_a_doubtful_crossing_has_no_interval():
    found = crossing(fitted("a", law(30, -0.05, spread=0.5)), fitted("b", law(30 * 1e20**0.001, -0.051, spread=0.5)))
    assert found.C == pytest.approx(1e20) and found.interval is None and "do not meet" in found.refused[0]


@pytest.mark.parametrize("seed", range(8))
def test_any_table_gives_numbers_or_reasons(seed):
    generator = np.random.default_rng(seed)
    rows = int(generator.integers(1, 20))
    C = 10 ** (generator.choice(np.arange(17, 20, 0.5), rows) if seed % 2 else generator.uniform(16, 20, rows))
    N = 10 ** generator.choice(np.linspace(6, 8, 5), rows)
    loss = np.exp(generator.normal(1, 0.3, rows)) if seed < 6 else np.full(rows, 2.5)
    table = pd.DataFrame({"N": N, "N_total": np.nan, "D": C / 6 / N, "C": C, "loss": loss, "budget": np.nan})
    table["run"] = [f"run {i // (1 + 4 * (seed % 3 == 0))}" for i in range(rows)]
    study = fit_study(table.assign(architecture="tnl"), bootstrap=25, hold_out=[None, 0.5, 1e18][seed % 3])
    json.dumps(study.to_json(), allow_nan=False)
    for method in study["tnl"].methods.values():
        for found in (method.L, method.L_irreducible, method.N_opt, method.D_opt):
            assert bool(found.refused) == (found.coefficient is None) == (found.parameters == {})


def test_exponents_under_the_count_of_paper_000_and_without_hidden_pairs():
    """With counts C' = C N^k and N_opt = C^0.5, N_opt = C'^(0.5 / (1 + k/2))."""
    rows = []
    for C in np.geomspace(1e18, 1e21, 4):
        for N in C**0.5 * np.geomspace(0.3, 3, 7):
            loss = 20 * C**-0.05 + 0.3 * np.log10(N / C**0.5) ** 2
            row = {"run": f"run {len(rows)}", "architecture": "one", "N": N, "D": C / 6 / N, "C": C, "loss": loss}
            rows.append(
                row
                | {
                    "flops_paper": C * (N / 1e9) ** 0.04,
                    "flops_causal": C * (N / 1e9) ** -0.02,
                    "flops_004": C * (N / 1e9) ** 0.1,
                }
            )
    table = pd.DataFrame(rows).assign(N_total=np.nan)
    for flops, k in (("exact", 0.0), ("paper", 0.04), ("causal", -0.02), ("004", 0.1)):
        fit = fit_study(table, method="isoflop", bootstrap=20, flops=flops)["one"]
        assert fit.N_opt.exponent == pytest.approx(0.5 / (1 + k / 2), rel=1e-9)
        assert fit.L.exponent == pytest.approx(-0.05 / (1 + k / 2), rel=1e-9)
        assert {c.flops: c.a for c in fit.conventions}["paper"] == pytest.approx(0.5 / 1.02, rel=1e-9)
    with pytest.raises(ConfigError, match="flops_causal"):
        fit_study(table.drop(columns="flops_causal"), method="isoflop", bootstrap=0, flops="causal")


def lone(ratios, name: str = "ours") -> pd.DataFrame:
    """Single runs of eight sizes, all with one text in the column run."""
    N = np.geomspace(1e8, 3e9, 8)
    D = N * np.asarray(ratios)
    loss = (1.7 + 400 / N**0.34 + 2000 / D**0.37) * np.exp(np.random.default_rng(0).normal(0, 0.002, 8))
    return pd.DataFrame({"run": name, "architecture": "tnl", "N": N, "N_total": np.nan, "D": D, "C": 6 * N * D}).assign(
        loss=loss
    )


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_order_of_the_rows_changes_nothing(surface):
    other = surface.ladder(BUDGETS, np.linspace(-1, 1, 5), architecture="hgrn2")
    ladders = pd.concat([surface.ladder(BUDGETS, np.linspace(-1, 1, 5)), other], ignore_index=True)
    ladders["loss"] *= np.exp(np.random.default_rng(1).normal(0, 0.002, len(ladders)))
    for table in (lone([20.0] * 8), ladders, surface.curves(np.geomspace(1e8, 1e10, 6), points=9)):
        texts = []
        for seed in (None, 3):
            rows = table if seed is None else table.sample(frac=1, random_state=seed)
            texts.append(json.dumps(fit_study(rows.reset_index(drop=True), bootstrap=20, conventions=False).to_json()))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["ours", ["a", "b"] * 4])
def test_one_text_for_every_run_is_not_one_run(name):
    fit = fit_study(lone([20.0] * 8, name), method="power", bootstrap=200)["tnl"]
    assert fit.best.bootstrap.scheme == "residuals of the law"
    low, high = fit.best.L.intervals["alpha"]
    assert low < fit.best.L.exponent < high and high - low > 1e-4


def test_checkpoints_of_one_run_have_no_interval():
    D = np.geomspace(1e9, 1e11, 8)
    rows = pd.DataFrame({"run": "r", "architecture": "tnl", "N": 1e8, "N_total": np.nan, "D": D, "C": 6e8 * D})
    fit = fit_study(rows.assign(loss=1.7 + 2000 / D**0.37), method="power", bootstrap=200)["tnl"]
    assert not fit.L.refused and not fit.L.intervals and "runs" in fit.best.bootstrap.note


def test_single_runs_of_mixed_tokens_per_parameter_have_a_surface_and_no_law_of_compute():
    mixed = lone([20, 200, 60, 30, 150, 90, 40, 120], [f"r{i}" for i in range(8)])
    study = fit_study(mixed, bootstrap=60)
    fit = study["tnl"]
    assert "D / N goes from 20 to " in fit.power.L.refused[0] == fit.isoflop.L.refused[0]
    (row,) = predictions(study, [(1e9, 6e10)])
    assert row["inside"] and row["interval"][0] < row["loss"] < row["interval"][1]
    assert row["loss"] == pytest.approx(1.7 + 400 / 1e9**0.34 + 2000 / 6e10**0.37, rel=0.01)
    close = fit_study(lone([20, 35, 20, 30, 25, 20, 38, 20], [f"r{i}" for i in range(8)]), bootstrap=0)["tnl"]
    assert not close.power.L.refused
    with pytest.raises(ConfigError, match="two positive numbers"):
        parse_points(["N=1e9"])
