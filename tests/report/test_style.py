"""Axes have readable ticks inside their range, and architectures can be told apart."""

import math
import re

import altair
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.report import style


@given(st.floats(1e-9, 1e12), st.floats(1.001, 1e8), st.sampled_from(["flops", "loss", "bytes", "seconds", "params"]))
def test_every_axis_has_a_few_ticks_inside_its_range(low, factor, kind):
    high = low * factor
    axis = style.axis(altair, kind, [low, high], most=7)["axis"].to_dict()
    # A range narrower than a factor of two may lie between two powers of two; then its lower end is named.
    assert 1 <= len(axis["values"]) <= 14
    assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in axis["values"])
    assert axis["labelExpr"].startswith("[") and f"{axis['values'][0]!r}" in axis["labelExpr"]


@given(st.floats(1e-9, 1e12), st.floats(1.0001, 1e8), st.sampled_from(["flops", "loss", "params", "tokens"]))
def test_ticks_can_be_told_apart_however_narrow_the_range(low, factor, kind):
    axis = style.axis(altair, kind, [low, low * factor])["axis"].to_dict()
    names = re.findall(r"'([^']*)'", axis["labelExpr"].partition("[indexof")[0])
    assert len(set(names)) == len(names) == len(axis["values"])


def test_ticks_of_times_are_times_that_people_say():
    assert style.duration_ticks(8, 2000) == [10, 20, 30, 60, 120, 300, 600, 1200, 1800][:: math.ceil(9 / 7)]


def test_padding_leaves_room_around_one_value():
    for logarithmic in (True, False):
        low, high = style.padded([5.0], logarithmic)
        assert low < 5 < high
    assert style.padded([math.nan], True) == [1.0, 10.0]


@pytest.mark.parametrize("dark", [False, True])
def test_text_and_colours_stand_out_from_the_page(dark):
    theme = style.theme(dark)
    assert _contrast(theme["background"], theme["axis"]["titleColor"]) > 7
    assert _contrast(theme["background"], theme["axis"]["labelColor"]) > 4.5
    for colour in style.PALETTE[:6]:
        assert _contrast(theme["background"], colour) > 2


def test_more_architectures_than_colours():
    names = [f"a{index}" for index in range(30)]
    assert set(style.colours(names)) == set(names) == set(style.shapes(names))
    pairs = {(style.colours(names)[name], style.shapes(names)[name]) for name in names}
    assert len(pairs) == 30


def test_nearly_equal_compute_has_readable_ticks():
    low, high = style.padded([1.0004e11, 1.0005e11], True, least=1.5)
    assert high / low == pytest.approx(1.5, rel=0.01) and low < 1.0004e11 < high
    assert style.padded([1e10, 1e12], True, least=1.5) == style.padded([1e10, 1e12], True)


def _contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
