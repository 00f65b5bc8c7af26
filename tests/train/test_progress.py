"""What a person sees while a run trains."""

import io
import time

import pytest
from rich.console import Console

from linnet.train import monitor, train
from linnet.train.monitor import TerminalProgress


def shown(rows: list[dict], terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)
    with TerminalProgress(console) as show:
        for row in rows:
            show(row)
    return console.file.getvalue()


START = {"event": "start", "step": 0, "steps": 100, "path": "runs/x"}
ROW = {"step": 25, "tokens": 2500, "loss": 3.25, "tokens_per_second": 10.0, "flop_utilisation": None}


def test_a_line_now_and_then_where_there_is_no_terminal(monkeypatch):
    assert shown([START, ROW, ROW]) == ""
    monkeypatch.setattr(monitor, "QUIET", 0.0)
    assert shown([START, ROW]) == "step 25 of 100  loss 3.2500  10 tokens/s  12 min 30 s left\n"
    # A batch that grows: the steps to come read more than those before.
    assert "12 min 30 s left" not in (text := shown([START | {"units": 20_000}, ROW])) and "29 min 10 s left" in text
    assert "41.5% of peak" in shown([START, ROW | {"flop_utilisation": 0.415}])


def test_what_takes_long_before_the_first_step_is_said(monkeypatch):
    monkeypatch.setattr("linnet.options.QUIET", 0.0)
    console, counted = Console(file=io.StringIO(), width=200, color_system=None), []

    def count(steps):
        counted.append(console.file.getvalue())
        time.sleep(0.3)  # nothing is said once training has begun

    with TerminalProgress(console, before=count) as show:
        show({"event": "data", "what": "reading text", "done": 1000, "total": None})
        show(START)
        lines = console.file.getvalue()
        time.sleep(0.3)
        show(ROW)
    assert "preparing the run: reading text, 1,000\n" in counted[0]
    assert counted[0].endswith("preparing the run: counting FLOPs\n") and console.file.getvalue() == lines


SCORING = {"event": "scoring", "step": 7, "done": 0, "total": 131072}


def test_a_score_that_held_out_data_do_not_have_is_explained():
    row = {"step": 7, "validation_loss": 5.5, "validation_bits_per_byte": float("nan")}
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with TerminalProgress(console, scores={"bits_per_byte": "bits per byte"}) as show:
        show(row)
        show(row | {"validation_bits_per_byte": 1.25})
    first, second = console.file.getvalue().splitlines()
    assert "nan" not in first and "no bits/byte (the held-out data are too few" in first
    assert second.endswith("held-out loss 5.5000  1.2500 bits/byte")


def test_slow_scoring_is_said_once(monkeypatch):
    rows = [START, SCORING, SCORING | {"done": 1000}, SCORING | {"done": 2000}]
    assert shown(rows) == ""
    monkeypatch.setattr(monitor, "SLOW", 0.0)
    assert shown(rows) == "step       7  scoring 131,072 held-out tokens, 0 s left\n"
    assert "scoring held-out text" in shown(rows, terminal=True)


def test_a_bar_on_a_terminal():
    text = shown([{"event": "data", "what": "reading", "done": 1, "total": 2}, START, ROW], terminal=True)
    assert "25/100" in text and "loss 3.2500" in text and "12 min 30 s left" in text


SPIKE = {"event": "spike", "loss": 9.5, "grad_norm": 3.0}
NAN = {"event": "non-finite", "loss": float("nan"), "grad_norm": 1.0}
BACK = {"action": "rollback", "to_step": 5, "left_out": [6, 7]}
FAILED = {"event": "evaluation_failed", "evaluation": "needle", "error": "RuntimeError: [no] step"}
DAMAGED = {"event": "damaged_checkpoint", "problems": ["a/[b]: truncated"]}


@pytest.mark.parametrize(
    "event, expected",
    [
        (SPIKE | {"action": "skip"}, "step 7: loss spike (loss 9.5, gradient 3); batch skipped"),
        (NAN | {"action": "stop"}, "loss or gradient not finite (loss nan, gradient 1); stopped"),
        (SPIKE | BACK, "back to step 5, 2 batches left out"),
        (FAILED, "step 7: evaluation needle failed (RuntimeError: [no] step)"),
        (DAMAGED, "set aside: a/[b]: truncated;"),
    ],
)
def test_events(event, expected):
    assert expected in shown([START, {"step": 7, **event}])


def test_evaluations():
    found = {"step": 7, "evaluation": "both", "metrics": {"a/acc": 0.5, "b/acc": 0.25, "b/other": 1.0}, "seconds": 1.26}
    assert "step       7  both 0.5000 a/acc, 0.2500 b/acc  (1.3 s)" in shown(
        [START, found | {"shown": ["a/acc", "b/acc"]}]
    )
    assert "both 0.5000 a/acc  (" in shown([START, found | {"shown": []}])


def test_follows_a_real_run(settings, cache, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    with TerminalProgress(console) as show:
        assert not show.started
        run = train(settings(evaluate_every=6), tmp_path, cache, show)
        assert show.started
    losses = [row["validation_loss"] for row in run.metrics() if "validation_loss" in row]
    assert [f"held-out loss {loss:.4f}" in console.file.getvalue() for loss in losses] == [True, True]
