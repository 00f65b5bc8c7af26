"""The rule for sentences that rank: equal architectures are hardly ever ranked, and a worse one is found."""

import functools
import importlib.util
import math
import tracemalloc
import warnings
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from page_claims import contradictions

from linnet.laws.fit import StudyFit, crossing, fit_study, load_table
from linnet.laws.fit.law import Law
from linnet.laws.fit.parametric import fit_parametric
from linnet.laws.fit.power import law_through
from linnet.laws.orders import order, order_of_means, orders, side, t_interval, t_test
from linnet.report.findings import conclude, findings, plain
from linnet.report.page import _page
from linnet.report.records import Study, check_table

SPEC = importlib.util.spec_from_file_location("orders", Path(__file__).parents[2] / "benchmarks" / "orders.py")
simulation = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(simulation)
NAMES = "abcde"


def _estimates(generator, truths):
    """Estimates with unit error, and draws that share their noise as fits of one seed do."""
    values = {name: truth + generator.standard_normal() for name, truth in zip(NAMES, truths, strict=True)}
    noise = np.random.default_rng(0).standard_normal(1000)
    return values, {name: value + noise for name, value in values.items()}


def test_equal_estimates_are_ranked_in_one_of_twenty_families():
    generator = np.random.default_rng(1)
    ranked = sum(bool(order(*_estimates(generator, [0.0] * 5)).apart) for _ in range(400))
    assert 5 <= ranked <= 32  # 5 %: 20 of 400, with three standard errors


def _laws(generator):
    """Laws of one architecture, as of a study: loss exp(a + b ln C), N_opt and D_opt of exponents that sum to 1."""
    noise = generator.standard_normal(2), np.random.default_rng(0).standard_normal((400, 2))
    a, b = (noise[0] + np.vstack([np.zeros(2), noise[1]])).T / 100  # [401]: the estimate, then its draws
    columns = {"L": (a, b - 0.1), "N_opt": (0 * a, 0.5 + a / 2 + b), "D_opt": (0 * a, 0.5 - a / 2 - b)}
    laws = {}
    for name, (log, exponent) in columns.items():
        draws = np.stack([log, exponent, 0 * a], axis=1)[1:]
        law = {"coefficient": float(np.exp(log[0])), "exponent": float(exponent[0]), "constant": 0.0, "draws": draws}
        laws[name] = SimpleNamespace(**law, refused=None, c_max=10.0, rival=None)
    return SimpleNamespace(**laws)


def test_the_quantities_of_a_study_rank_equal_architectures_in_one_of_twenty_together():
    generator = np.random.default_rng(3)
    families = [orders({name: _laws(generator) for name in NAMES}).values() for _ in range(400)]
    ranked = sum(any(quantity.apart for quantity in family) for family in families)
    assert 11 <= ranked <= 28  # four fifths of 5 % is 16; with a limit for each quantity it would be 9


BUDGETS = np.geomspace(1e10, 1.5e11, 6)
FOUR = np.geomspace(1e10, 1.5e11, 4)


def _fit_through(off, worse=0.0, start=0, C=FOUR):
    """Laws through the optima of budgets: a known surface, noise of 0.1 %, and an error of each budget."""
    generator = np.random.default_rng(start)
    log = np.log(0.6 + 40 * C**-0.12) + 0.001 * generator.standard_normal(len(C)) + worse + np.array(off)
    draws = np.exp(log + 0.001 * np.random.default_rng(7).standard_normal((400, len(C))))
    law = law_through("L", C, np.exp(log), irreducible=True, draws=draws, draws_C=np.tile(C, (400, 1)), freedom=24)
    assert not law.refused
    none = Law("N_opt", refused=["not fitted"])
    return SimpleNamespace(L=law, N_opt=none, D_opt=none)


def _bare(fits):
    """The same laws without their points: their draws alone tell them apart."""
    return {name: SimpleNamespace(**vars(fit) | {"L": replace(fit.L, seen=None)}) for name, fit in fits.items()}


def test_one_budget_with_an_error_of_all_its_runs_orders_nothing():
    """The law goes through the optimum that is off, so its residuals show little of the error."""
    off = {"a": _fit_through([0] * 4, start=1), "b": _fit_through([0, 0, 0, 0.01], start=2)}
    assert orders(_bare(off))["L"].apart == {("a", "b")}, "which the draws alone tell apart"
    assert not any(order.apart for order in orders(off).values())
    worse = {"a": _fit_through([0] * 4, start=1), "b": _fit_through([0] * 4, worse=0.02, start=2)}
    assert orders(worse)["L"].apart == {("a", "b")}
    slower = {"a": off["a"], "b": _fit_through([0, 0.02, 0.04, 0.06], start=2)}
    assert orders(slower)["L"].apart == {("a", "b")}, "a smooth difference is at every budget"


@pytest.mark.parametrize("other", [BUDGETS[[0, 1, 4, 5]], BUDGETS[[0, 2, 3, 5]] * 1.5, np.geomspace(1e9, 4e12, 8)])
def test_laws_of_other_budgets_hang_on_no_budget_either(other):
    """Two of four budgets in common, none, and twice as many over more compute."""
    C = BUDGETS[[0, 2, 3, 5]]
    first = _fit_through([0, 0, 0, 0.01], start=1, C=C)
    off = {"a": first, "b": _fit_through(0, start=2, C=other)}
    assert orders(_bare(off))["L"].apart == {("b", "a")}
    assert not any(order.apart for order in orders(off).values())
    worse = {"a": _fit_through(0, start=1, C=C), "b": _fit_through(0, worse=0.02, start=2, C=other)}
    assert orders(worse)["L"].apart == {("a", "b")}


def test_seeds_of_one_budget_are_left_out_together():
    """Three runs of a budget, 1 % apart in C, share the error."""
    C = np.repeat(FOUR, 3) * np.tile([0.99, 1, 1.01], 4)
    off = {"a": _fit_through(0, start=1, C=C), "b": _fit_through(9 * [0] + 3 * [0.01], start=2, C=C)}
    assert orders(_bare(off))["L"].apart == {("a", "b")}
    assert not any(order.apart for order in orders(off).values())


@functools.cache
def _surface(off=(0.0,) * 4, worse=0.0, slope=0.0, start=1):
    """Laws of the surface through eight sizes at each of four budgets, with noise of 0.1 % and errors of budgets."""
    generator, rows = np.random.default_rng(start), []
    for C, shared in zip(FOUR, off, strict=True):
        N = np.array([12 * width**2 + 256 * width for width in (8, 10, 12, 14, 16, 20, 24, 28)], dtype=float)
        D = C / (6 * N)
        log = np.log(0.6 + 14 / N**0.35 + 95 / D**0.37) + 0.001 * generator.standard_normal(len(N))
        loss = np.exp(log + shared + worse + slope * np.log(C / FOUR[0]))
        rows.append(pd.DataFrame({"N": N, "D": D, "C": C, "loss": loss}))
    table = pd.concat(rows, ignore_index=True)
    fit = fit_parametric(table.assign(run=table.index.astype(str)), bootstrap=60)
    assert not fit.L.refused
    return SimpleNamespace(L=fit.L, N_opt=fit.N_opt, D_opt=fit.D_opt)


def _certain(fit):
    """The same laws with draws ten thousand times as near: those of a table that shows no error of budgets."""
    row = np.array([np.log(fit.L.coefficient), fit.L.exponent, fit.L.constant])
    return SimpleNamespace(**vars(fit) | {"L": replace(fit.L, draws=row + (fit.L.draws - row) / 10_000)})


def _alone(fits):
    return {name: SimpleNamespace(**vars(fit) | {"L": replace(fit.L, rows=None)}) for name, fit in fits.items()}


@pytest.mark.parametrize("off", [(0, 0, 0, 0.01), (0, 0.01, 0, 0), (0.004, -0.006, 0.01, -0.002)])
def test_surfaces_with_an_error_of_all_runs_of_a_budget_are_not_ordered(off):
    fits = {"a": _certain(_surface()), "b": _certain(_surface(off, start=2))}
    assert orders(_alone(fits))["L"].apart, "which the draws alone tell apart"
    assert not orders(fits)["L"].apart and not orders(fits)["gain"].apart


def test_surfaces_that_differ_at_every_budget_are_ordered():
    for worse in (0.005, 0.02):
        assert orders({"a": _surface(), "b": _surface(worse=worse, start=2)})["L"].apart == {("a", "b")}
    slower = orders({"a": _surface(), "b": _surface(slope=0.01, start=2)})
    assert slower["L"].apart == {("a", "b")}, "at the largest compute, not in the mean of the budgets"
    assert slower["gain"].apart == {("b", "a")}


def test_equal_values_but_for_rounding_show_no_noise():
    pairs = [0.9 - 0.8, 0.8 - 0.7, 0.7 - 0.6]
    low, high = t_interval(pairs)
    assert max(pairs) > min(pairs) and t_test(pairs) is None and low == high == pytest.approx(0.1)


def test_a_higher_estimate_is_told_apart_in_any_order_of_the_names():
    values, draws = _estimates(np.random.default_rng(2), [0.0, 0.0, 0.0, 0.0, 20.0])
    told = order(values, draws)
    assert told.above("a") == ["e"] and told.above("e") == []
    turned = order(dict(reversed(values.items())), dict(reversed(draws.items())))
    assert turned.apart == told.apart


def test_many_names_are_ordered_without_the_draws_of_all_pairs_at_once():
    generator = np.random.default_rng(4)
    values = {f"n{number}": float(generator.standard_normal()) for number in range(80)}
    draws = {name: value + generator.standard_normal(4000) for name, value in values.items()}
    tracemalloc.start()
    told = order(values | {"high": 20.0}, draws | {"high": 20 + generator.standard_normal(4000)})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(told.apart) >= 80 and len(told.above("n0")) >= 1
    assert peak < 30e6  # 3,240 pairs of 4,000 draws have 104 MB


def test_estimates_without_spread_or_draws_are_not_ranked():
    values = {"a": 1.0, "b": 2.0}
    assert not order(values, {}).apart
    assert not order(values, {"a": np.ones(100), "b": np.full(100, 2.0)}).apart


def test_resamples_whose_law_overflows_order_nothing_and_say_nothing():
    laws = {name: _laws(np.random.default_rng(seed)) for seed, name in enumerate("ab")}
    for law in laws.values():
        law.L.draws[::2, 0] = 800.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not orders(laws)["L"].apart


def test_means_are_told_apart_by_their_errors_and_zero_width_tells_nothing():
    values = {"a": 1.0, "b": 2.0, "c": 5.0}
    assert not order_of_means(values, {}).apart
    assert order_of_means(values, {name: (0.4, math.inf) for name in values}).apart == {("a", "c"), ("b", "c")}
    assert not order_of_means(values, {name: (0.3, 1) for name in values}).apart, "two seeds each"
    told = order_of_means(values, {"a": (0.0, 2), "b": (0.0, 2), "c": (0.01, 9)})
    assert told.apart == {("a", "c"), ("b", "c")} and told.lower("a", "b") is None and told.level("a") == ["b"]
    assert [side(*ends) for ends in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1), (0.3, 0.3), (0.0, 0.1))] == [1, -1, 0, 0, 0]


def test_pages_of_simulated_studies_rank_no_equal_architectures_and_find_a_worse_one():
    pages = [" ".join(simulation.page_sentences(0.003, 0.0, seed, 60, "isoflop")) for seed in range(8)]
    assert sum(bool(simulation.CLAIM.search(page)) for page in pages) <= 2
    assert all("cannot be told apart" in page for page in pages)
    for seed in range(2):
        page = simulation.page_sentences(0.003, 0.02, seed, 60, "isoflop")
        assert "The loss of lightnet (+" in page[0] and "is higher" in page[0]


def simulated(name: str, seed: int, folder: Path) -> tuple[pd.DataFrame, StudyFit]:
    """Runs and laws of one architecture; a share of them lack budgets or sizes, or have runs that went wrong."""
    generator = np.random.default_rng(seed)
    noise, worse = (0.0005, 0.003, 0.01, 0.03)[seed % 4], (0.0, 0.02, 0.1)[seed % 3]
    simulation.write_table(folder, noise, worse, generator, (name,))
    rows = pd.read_csv(folder / "table.csv")[:: 1 + (seed % 10 != 8)]
    if seed % 7 == 2:  # a law that falls faster, and crosses the others
        rows["loss"] *= (rows["loss"] / rows["loss"].median()) ** 0.5
    if seed % 10 == 3:
        rows = rows[rows["budget"] > 5e10]  # no law
    if seed % 10 == 6:
        rows = rows[rows["params_non_embedding"] < 9e3]  # optima at the edge of the sizes
    rows["seconds"] = rows["flops"] / generator.uniform(1e9, 2e9) * generator.lognormal(0, 0.1, len(rows))
    rows["state_bytes"] = 2 ** int(generator.integers(10, 14)) * rows["params_non_embedding"] // 4096
    if seed % 10 in (4, 5):
        rows.loc[rows.index[2 : seed % 10], ["status", "loss"]] = "diverged", math.nan
    if seed % 10 == 8:
        rows.loc[rows.index[len(rows) // 2], "loss"] *= 0.8  # contradicted by its neighbours
    rows.to_csv(folder / "table.csv", index=False)
    table, _ = load_table(folder / "table.csv")
    return check_table(rows.to_dict("records")), fit_study(table, method="isoflop", bootstrap=60, conventions=False)


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.thorough)])
def test_no_sentence_of_simulated_pages_contradicts_its_tables(tmp_path, count):
    """The pages draw two or three of twelve architectures, each fitted once."""
    names = [f"arch-{n}" for n in range(12)]
    pool = {name: simulated(name, seed, tmp_path) for seed, name in enumerate(names)}
    generator, wrong, kinds = np.random.default_rng(0), [], set()
    for _ in range(count):
        chosen = [str(name) for name in generator.choice(names, generator.integers(2, 4), replace=False)]
        form = ("pure", "constant")[generator.integers(2)]
        fits = {name: replace(pool[name][1][name], form=form) for name in chosen}
        laws = StudyFit(fits, "isoflop", form, "isoflop")
        told = orders(fits)
        laws.crossings = [crossing(fits[one], fits[two], told) for one, two in combinations(chosen, 2)]
        table = pd.concat([pool[name][0] for name in chosen], ignore_index=True)
        study = Study(tmp_path, {}, table, None, fit=laws)
        sentences = findings(study)
        page = _page(study, [], ([], []), sentences, [], tmp_path, "linnet")
        wrong += contradictions(page)
        kinds |= {kind for kind in KINDS if kind in page}
    assert wrong == []
    assert kinds == set(KINDS), f"not one page says: {set(KINDS) - kinds}"


KINDS = (
    "is higher",
    "cannot be told apart (the intervals of all differences together hold 0): the lowest",
    "cannot be told apart from it",
    "falls faster",
    "How fast the loss falls",
    "cross at",
    "is unknown",
    "Refused laws",
    "No law of the headline",
    "times as long",
    "The speeds of",
    "1 excluded",
    "2 diverged",
)


def test_a_false_sentence_is_found(tmp_path):
    pool = {name: simulated(name, seed, tmp_path) for seed, name in ((9, "steep"), (8, "flat"))}
    fits = {name: laws[name] for name, (_, laws) in pool.items()}
    laws = StudyFit(fits, "isoflop", "pure", "isoflop", crossings=[crossing(*fits.values(), orders(fits))])
    table = pd.concat([rows for rows, _ in pool.values()], ignore_index=True)
    study = Study(tmp_path, {}, table, None, fit=laws)
    sentences, found = findings(study), conclude(study)
    assert found["conclusions"] == [plain(sentence) for sentence in sentences]
    assert found["orders"]["gain"] == [["flat", "steep"]] and found["orders"]["a"] == []
    assert contradictions(_page(study, [], ([], []), sentences, [], tmp_path, "linnet")) == []
    for number, sentence in enumerate(sentences):
        for false in {sentence.replace("steep", "flat"), sentence.replace("2", "3").replace("1", "2")} - {sentence}:
            changed = [*sentences[:number], false, *sentences[number + 1 :]]
            assert contradictions(_page(study, [], ([], []), changed, [], tmp_path, "linnet")), false
