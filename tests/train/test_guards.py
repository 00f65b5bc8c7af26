"""What a guard takes for trouble, and what it remembers."""

import json
import math

import pytest

from linnet.train.monitor import Guard, GuardConfig


def watched(losses, **settings) -> tuple[Guard, list]:
    guard = Guard(GuardConfig(**settings))
    return guard, [guard.watch(loss, 1.0, position) for position, loss in enumerate(losses)]


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_not_finite_is_trouble_from_the_first_step(loss, norm):
    trouble = Guard(GuardConfig()).watch(loss, norm, 7)
    assert (trouble.kind, trouble.action, trouble.position) == ("non-finite", "stop", 7)


def test_a_spike_stands_out_of_the_running_median():
    falling = [5.5 - 0.05 * step for step in range(80)]
    guard, found = watched([*falling, 4.6], window=20, spike=3.0)
    assert found == [None] * 81  # 4.6 is 2.3 times the median: not a spike
    trouble = guard.watch(6.5, 1.0, 81)
    assert (trouble.kind, trouble.position, trouble.loss) == ("spike", 81, 6.5)
    assert trouble.median == pytest.approx(2.0, abs=0.1)
    assert guard.watch(1.6, 1.0, 82) is None


def test_small_losses_may_double():
    assert watched([0.01] * 50 + [0.9], spike=3.0, margin=1.0)[1] == [None] * 51
    assert watched([0.01] * 50 + [1.1], spike=3.0, margin=1.0)[1][-1].kind == "spike"


def test_needs_half_a_window_and_can_be_turned_off():
    assert watched([1.0] * 9 + [100.0], window=20)[1][-1] is None
    assert watched([1.0] * 10 + [100.0], window=20)[1][-1].kind == "spike"
    assert watched([1.0] * 50 + [100.0], window=20, spike=None)[1][-1] is None


def test_a_bad_loss_does_not_enter_the_median():
    _, found = watched([1.0] * 40 + [50.0] * 6, window=10, policy="skip", limit=9)
    assert [trouble.kind for trouble in found[40:]] == ["spike"] * 6


def test_limit_of_skips_in_a_row():
    guard, found = watched([math.nan, math.nan, 1.0, math.nan, math.nan, math.nan], policy="skip", limit=2)
    assert [trouble and trouble.action for trouble in found] == ["skip", "skip", None, "skip", "skip", "stop"]


def test_limit_of_rollbacks_over_the_whole_run():
    _, found = watched([math.nan, 1.0, math.nan, 1.0, math.nan], policy="rollback", limit=2)
    assert [trouble and trouble.action for trouble in found] == ["rollback", None, "rollback", None, "stop"]


def test_leaves_out_the_offending_batches_but_none_before_the_checkpoint():
    guard = Guard(GuardConfig(policy="rollback", skip_batches=3))
    assert guard.leave_out(guard.watch(math.nan, 1.0, 10), since=0) == [8, 9, 10]
    assert guard.leave_out(guard.watch(math.nan, 1.0, 11), since=11) == [11]
    assert guard.leave_out(guard.watch(math.nan, 1.0, 12), since=0) == [12]
    assert guard.skipped == {8, 9, 10, 11, 12}


def test_state_goes_through_json():
    guard, _ = watched([1.0 + 0.1 * step for step in range(30)] + [math.nan], window=8, policy="rollback")
    guard.leave_out(guard.watch(math.nan, 1.0, 31), since=0)
    other = Guard(guard.config)
    other.load(json.loads(json.dumps(guard.state())))
    assert other.state() == guard.state()
    assert other.watch(20.0, 1.0, 40) == guard.watch(20.0, 1.0, 40)
    # Back at the checkpoint, what was learned after it is kept, the losses are those of the checkpoint.
    other.load(Guard(guard.config).state(), rollback=True)
    assert other.skipped == {30, 31} and other.events == 3 and other.state()["losses"] == []
