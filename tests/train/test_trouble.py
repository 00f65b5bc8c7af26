"""Losses that are not finite or spike, in whole runs: what each policy does, and that a kill does not change it."""

import signal

import pytest

from linnet.models import CausalLM
from linnet.runs import RunFolder
from linnet.train import run_folder, session, train

LONG = {"steps": 40, "log_every": 1, "checkpoint_every": 5}
SPIKE = {"spike": 1.5, "margin": 0.5, "window": 4}


@pytest.fixture
def poison(monkeypatch):
    """poison({position: factor}): the loss of the batch at a position of the data order is multiplied."""
    factors: dict[int, float] = {}
    seen: list[int] = []
    at = [0]
    get, load = session.Prefetch.get, CausalLM.loss

    def watched(self, position):
        at[0] = position
        seen.append(position)
        return get(self, position)

    def loss(self, tokens, targets, cu_seqlens=None):
        nll, count = load(self, tokens, targets, cu_seqlens)
        return nll * (factors.get(at[0], 1.0) if self.training and nll.requires_grad else 1.0), count

    monkeypatch.setattr(session.Prefetch, "get", watched)
    monkeypatch.setattr(CausalLM, "loss", loss)
    factors_and_seen = factors, seen
    return factors_and_seen


def events(run: RunFolder) -> list[dict]:
    return [row for row in run.metrics() if "event" in row]


def steps(run: RunFolder) -> list[int]:
    return [row["step"] for row in run.metrics() if "loss" in row and "event" not in row]


@pytest.mark.parametrize("factor, kind", [(float("nan"), "non-finite"), (float("inf"), "non-finite"), (4.0, "spike")])
def test_stop(settings, cache, tmp_path, poison, factor, kind):
    poison[0][20] = factor
    config = settings(**LONG, guard={"policy": "stop", **SPIKE})
    run = train(config, tmp_path, cache)
    [event] = events(run)
    assert (event["event"], event["action"], event["step"], event["position"]) == (kind, "stop", 21, 20)
    assert (event["loss"] is None) == (kind == "non-finite")
    assert steps(run) == list(range(1, 21))
    result = run.result()
    assert (result["status"], result["steps"], result["loss"]) == ("diverged", 20, None)
    assert result["train_loss"] == run.metrics()[-2]["loss"]
    assert train(config, tmp_path, cache).result() == result, "diverged is done"


def test_skip(settings, cache, tmp_path, poison):
    poison[0].update({7: float("nan"), 20: 5.0})
    run = train(settings(**LONG, guard={"policy": "skip", **SPIKE}), tmp_path, cache)
    assert [(event["event"], event["step"], event["position"]) for event in events(run)] == [
        ("non-finite", 8, 7),
        ("spike", 20, 20),
    ]
    assert steps(run) == list(range(1, 41)) and run.result()["status"] == "done"
    assert poison[1] == list(range(42))


def test_skip_gives_the_losses_of_a_run_that_never_saw_the_batch(settings, cache, tmp_path, poison, monkeypatch):
    poison[0][7] = float("nan")
    skipped = train(settings(**LONG, guard={"policy": "skip"}), tmp_path / "a", cache)
    poison[0].clear()
    get = session.Prefetch.get
    monkeypatch.setattr(session.Prefetch, "get", lambda self, position: get(self, position + (position >= 7)))
    without = train(settings(**LONG, guard={"policy": "skip"}), tmp_path / "b", cache)
    assert [row["loss"] for row in skipped.metrics() if "event" not in row and "loss" in row] == [
        row["loss"] for row in without.metrics() if "loss" in row
    ]


def test_skipping_has_a_limit(settings, cache, tmp_path, poison):
    poison[0].update({position: float("nan") for position in range(10, 99)})
    run = train(settings(**LONG, guard={"policy": "skip", "limit": 3}), tmp_path, cache)
    assert [event["action"] for event in events(run)] == ["skip", "skip", "skip", "stop"]
    assert (run.result()["status"], run.result()["steps"]) == ("diverged", 10)


def test_rollback(settings, cache, tmp_path, poison):
    poison[0].update({3: float("nan"), 22: 5.0})
    run = train(settings(**LONG, guard={"policy": "rollback", "skip_batches": 2, **SPIKE}), tmp_path, cache)
    first, second = events(run)
    assert (first["event"], first["step"], first["to_step"], first["left_out"]) == ("non-finite", 4, 0, [2, 3])
    assert (second["event"], second["step"], second["to_step"], second["left_out"]) == ("spike", 21, 20, [22])
    assert steps(run) == list(range(1, 41)) and run.result()["status"] == "done"
    assert poison[1] == [0, 1, 2, 3, 0, 1, *range(4, 23), *range(23, 43)]


def test_rollback_goes_further_back_if_that_did_not_help_and_has_a_limit(settings, cache, tmp_path, poison):
    poison[0].update({position: float("nan") for position in range(12, 99)})
    config = settings(**LONG, guard={"policy": "rollback", "limit": 3, "skip_batches": 1})
    run = train(config, tmp_path, cache)
    assert [(event["action"], event.get("to_step")) for event in events(run)] == [
        ("rollback", 10),
        ("rollback", 5),
        ("rollback", 10),
        ("stop", None),
    ]
    assert (run.result()["status"], run.result()["steps"]) == ("diverged", 12)


@pytest.mark.parametrize("stop", [6, 21, 24, 31])
def test_a_stop_between_troubles_changes_nothing(settings, cache, tmp_path, poison, stop):
    poison[0].update({3: float("nan"), 22: 5.0, 30: float("inf")})
    config = settings(**LONG, guard={"policy": "rollback", **SPIKE})

    def losses(run):
        return [(row["step"], row.get("loss"), row.get("event")) for row in run.metrics()]

    expected = losses(train(config, tmp_path / "whole", cache))

    def progress(row):
        if row.get("step") == stop and "loss" in row and "event" not in row:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", cache, progress)
    assert not run_folder(config, tmp_path / "stopped").done
    assert losses(train(config, tmp_path / "stopped", cache)) == expected
