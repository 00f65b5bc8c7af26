"""Learning-rate schedules: where they start, peak and end, and that they are functions of the step alone."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linnet.config import ConfigError, parse
from linnet.train.optimizer import ScheduleConfig, factor, too_long, warning

NAMES = ("constant", "cosine", "wsd", "inverse_sqrt", "linear")


def curve(steps: int, **settings) -> list[float]:
    return [factor(ScheduleConfig(**settings), step, steps) for step in range(steps)]


@pytest.mark.parametrize("name", NAMES)
def test_warm_up_is_a_line_to_the_peak(name):
    assert curve(100, name=name, warmup=5)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert curve(100, name=name, warmup=0.05) == curve(100, name=name, warmup=5)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_decays_to_final(name):
    values = curve(200, name=name, warmup=10, final=0.25, decay=0.3)
    assert values[-1] == pytest.approx(0.25)
    assert max(values) == 1.0
    assert all(later <= earlier + 1e-12 for earlier, later in zip(values[9:], values[10:], strict=False))


def test_shapes_at_known_points():
    assert curve(101, name="linear", warmup=0, final=0)[50] == pytest.approx(0.5)
    assert curve(101, name="cosine", warmup=0, final=0)[25] == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    wsd = curve(100, name="wsd", warmup=0, final=0, decay=0.2)
    assert wsd[:80] == [1.0] * 80 and wsd[80] == pytest.approx(0.95) and wsd[99] == pytest.approx(0.0)
    assert curve(100, name="wsd", warmup=0, final=0, decay=20) == wsd
    assert curve(400, name="inverse_sqrt", warmup=100)[399] == pytest.approx(0.5)
    assert curve(50, name="constant", warmup=0) == [1.0] * 50


@given(
    name=st.sampled_from(NAMES),
    steps=st.integers(1, 60),
    warmup=st.one_of(st.floats(0, 1), st.integers(0, 100).map(float)),
    decay=st.one_of(st.floats(0.01, 1), st.integers(1, 100).map(float)),
    final=st.floats(0, 1),
)
def test_any_setting_stays_between_0_and_the_peak(name, steps, warmup, decay, final):
    values = curve(steps, name=name, warmup=warmup, decay=decay, final=final)
    assert all(0 <= value <= 1 for value in values)


def test_unknown_schedule_is_named():
    with pytest.raises(ConfigError, match="name: .*'cosin'"):
        parse(ScheduleConfig, {"name": "cosin"})


def test_a_triangle_goes_from_a_quarter_to_the_peak_at_three_quarters_and_to_nothing():
    values = curve(400, name="triangle")
    assert values[0] == 0.25 and values[300] == max(values) == 1.0 and values[150] == pytest.approx(0.625)
    assert values[350] == pytest.approx(0.5) and values[399] == pytest.approx(0.01)


def test_a_triangle_refuses_a_warm_up_and_reads_its_saved_configuration():
    with pytest.raises(ConfigError, match="warmup: 50 has no effect.*triangle"):
        parse(ScheduleConfig, {"name": "triangle", "warmup": 50})
    saved = parse(ScheduleConfig, {"name": "triangle"}).model_dump()
    assert saved["warmup"] == 0.02 and parse(ScheduleConfig, saved).name == "triangle"


def test_a_cosine_with_a_length_is_that_of_a_training_of_this_length_and_rises_after_it():
    settings = {"name": "cosine", "warmup": 0.1, "final": 0.0}
    whole, longer = curve(100, **settings), curve(190, **settings, length=100)
    assert longer[:100] == whole == curve(100, **settings, length=100)
    assert curve(60, **settings, length=100) == whole[:60]
    assert longer[99] == pytest.approx(0.0) and all(a < b for a, b in zip(longer[99:188], longer[100:189], strict=True))
    with pytest.raises(ConfigError, match="length: 100 .*linear"):
        parse(ScheduleConfig, {"name": "linear", "length": 100})
    with pytest.raises(ConfigError, match="length: 100 .* 99 steps .* use at least 101"):
        parse(ScheduleConfig, {"warmup": 99.0, "length": 100})
    assert "length" not in ScheduleConfig().model_dump()  # configurations of earlier releases stay as they are


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(40, "inside the warm-up of 50"), (80, "before the end"), (100, None), (180, "rises again after 100")],
)
def test_a_training_of_another_length_than_its_cosine_is_warned_about(steps, expected):
    found = warning(ScheduleConfig(warmup=50, length=100), steps)
    assert found is None if expected is None else expected in found
    assert (warning(ScheduleConfig(warmup=50), steps) is None) == (steps >= 50)


@pytest.mark.parametrize(
    ("values", "steps", "expected"),
    [
        ({"warmup": 50}, 49, "warmup: 50 .*49 steps"),
        ({"warmup": 50}, 50, None),
        ({"name": "inverse_sqrt", "warmup": 4000, "start": 0.5}, 100, "4,000 steps"),
        ({"name": "wsd", "warmup": 10, "decay": 40}, 45, "warmup: 10 .*decay: 40 .*45 steps"),
        ({"name": "wsd", "warmup": 0.5, "decay": 0.6}, 45, "decay: 0.6"),
        ({"name": "wsd", "warmup": 0.5, "decay": 0.5}, 3, None),
        ({"name": "triangle"}, 1, None),
    ],
)
def test_phases_longer_than_the_training_are_named_with_their_numbers(values, steps, expected):
    found = too_long(ScheduleConfig(**values), steps)
    assert found is None if expected is None else re.search(expected, found)


def test_a_warm_up_from_a_given_rate_is_that_of_fairseq():
    """lr_t = 1e-7 + t (5e-4 - 1e-7) / w in the warm-up, then 5e-4 sqrt(w / t), for update t = 0, 1, ..."""
    found = curve(4000, name="inverse_sqrt", warmup=100, start=1e-7 / 5e-4)
    expected = [1e-7 + t * (5e-4 - 1e-7) / 100 if t < 100 else 5e-4 * math.sqrt(100 / t) for t in range(4000)]
    assert [5e-4 * value for value in found] == pytest.approx(expected, rel=1e-12)
    assert curve(50, name="cosine", warmup=10, start=0.5)[:11:5] == pytest.approx([0.5, 0.75, 1.0])
    assert "start" not in ScheduleConfig().model_dump()


@pytest.mark.parametrize("values", [{"name": "triangle"}, {"warmup": 0}])
def test_a_start_without_a_warm_up_is_refused(values):
    with pytest.raises(ConfigError, match="start: 0.1 .*warm"):
        parse(ScheduleConfig, {"start": 0.1, **values})
