"""Numbers read as a person would write them."""

import math

import pytest

from linnet.laws.orders import Order
from linnet.report import units


@pytest.mark.parametrize(
    "value, text",
    [(1.5e11, "1.5×10¹¹"), (1e12, "10¹²"), (5.9949e11, "5.99×10¹¹"), (2e-3, "2×10⁻³"), (-3e4, "−3×10⁴"), (0, "0")],
)
def test_scientific(value, text):
    assert units.scientific(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(950, "950"), (12345, "12.3k"), (2.6e6, "2.6M"), (7e9, "7B"), (999_999, "1M"), (1.5e12, "1.5T"), (0.5, "0.5")],
)
def test_count(value, text):
    assert units.count(value) == text


@pytest.mark.parametrize("value, text", [(100, "100 B"), (49152, "48 KiB"), (3 * 2**20, "3 MiB"), (1100, "1.07 KiB")])
def test_size(value, text):
    assert units.size(value) == text.replace(" ", units.SPACE)


@pytest.mark.parametrize(
    "value, text",
    [
        (0.4213, "0.421 s"),
        (12.34, "12.3 s"),
        (59.99, "1 min"),
        (200, "3 min 20 s"),
        (120, "2 min"),
        (3599.8, "1 h"),
        (18720, "5 h 12 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_duration(value, text):
    assert units.duration(value) == text


@pytest.mark.parametrize(
    "value, text", [(0.012345, "0.0123"), (-0.0798, "−0.0798"), (0.9999, "1.00"), (12345, "12,300")]
)
def test_significant(value, text):
    assert units.significant(value) == text


@pytest.mark.parametrize("shown", [units.scientific, units.count, units.size, units.duration, units.significant])
@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_unknown_is_a_dash(shown, value):
    assert shown(value) == units.MISSING


@pytest.mark.parametrize("names", ["badc", "dcba"])
def test_names_that_are_not_told_apart_stand_in_their_own_order(names):
    known = {"a": 0.3, "b": 0.7, "c": 0.4, "d": 0.65}
    values = {name: known[name] for name in names}

    def sentence(*apart):
        text = units.ranked(Order(values, apart=frozenset(apart)), "score", lambda name: f"{values[name]}")
        return text.replace("<b>", "").replace("</b>", "")

    shown = [f"{name} ({values[name]})" for name in names]
    assert sentence() == f"{units.listed(shown)} cannot be told apart by their score."
    one, two, three = (name for name in names if name != "b")
    assert f"that of {one} and {two} is lower, that of {three} cannot" in sentence((one, "b"), (two, "b"))
    assert f"that of {one} is lower, that of {two} and {three} cannot" in sentence((one, "b"))


def test_numbers_in_reasons_are_written_as_on_the_page():
    assert (
        units.powers("a-1e+10 at 2.5e+10 FLOPs, p = 1.1e-07, x1e+3") == "a-1e+10 at 2.5×10¹⁰ FLOPs, p = 1.1×10⁻⁷, x1e+3"
    )
    assert units.prose("a <b> at 1e+10", "c") == "a &lt;b&gt; at 10¹⁰; c"
    assert [units.p_value(p) for p in (0.26, 0.0011, 2e-51)] == ["0.26", "0.0011", "<0.001"]
    assert [units.p_equals(p) for p in (0.26, 2e-51)] == ["p = 0.26", "p < 0.001"]


def test_words():
    assert units.listed(["a", "b", "c"]) == "a, b and c"
    assert units.listed(["a"]) == "a" and units.listed([]) == ""
    assert units.plural(1, "run") == "1 run" and units.plural(1200, "run") == "1,200 runs"
    assert units.percent(0.0123) == "1.2\N{NO-BREAK SPACE}%" and units.percent(2e-16) == "0\N{NO-BREAK SPACE}%"
