"""The rule for sentences that rank: equal architectures are hardly ever ranked, and a worse one is found."""

import importlib.util
from pathlib import Path

import numpy as np

from linnet.study.orders import order

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


def test_a_higher_estimate_is_told_apart_in_any_order_of_the_names():
    values, draws = _estimates(np.random.default_rng(2), [0.0, 0.0, 0.0, 0.0, 20.0])
    told = order(values, draws)
    assert told.above("a") == ["e"] and told.above("e") == []
    turned = order(dict(reversed(values.items())), dict(reversed(draws.items())))
    assert turned.apart == told.apart


def test_estimates_without_spread_or_draws_are_not_ranked():
    values = {"a": 1.0, "b": 2.0}
    assert not order(values, {}).apart
    assert not order(values, {"a": np.ones(100), "b": np.full(100, 2.0)}).apart


def test_pages_of_simulated_studies_rank_no_equal_architectures_and_find_a_worse_one():
    pages = [" ".join(simulation.page_sentences(0.003, 0.0, seed, 100, "isoflop")) for seed in range(15)]
    assert sum(bool(simulation.CLAIM.search(page)) for page in pages) <= 3
    assert all("cannot be told apart" in page for page in pages)
    for seed in range(5):
        page = simulation.page_sentences(0.003, 0.02, seed, 300, "isoflop")
        assert "The loss of lightnet (+" in page[0] and "is higher" in page[0]
