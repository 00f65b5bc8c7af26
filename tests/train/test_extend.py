"""`linnet train --extend`: the folder goes on, with the losses of a run that had all the steps from the start."""

import json

import pytest
import torch

from linnet.config import ConfigError, read_yaml
from linnet.runs import RunFolder, checkpoint
from linnet.train import extend, train
from linnet.train.optimizer import ScheduleConfig, factor

KEEP = {"log_every": 1, "keep_checkpoints": 9, "evaluate_every": 4}


def losses(run: RunFolder) -> list[tuple]:
    rows = [row for row in run.metrics() if "loss" in row and "event" not in row]
    return [(row["step"], row["loss"], row["learning_rate"]) for row in rows]


def contents(run: RunFolder) -> dict[str, bytes]:
    names = [path for path in run.path.iterdir() if path.is_file() and path.name not in ("lock", "error.txt")]
    return {path.name: path.read_bytes() for path in names}


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt"])
def test_an_extended_run_is_one_of_so_many_steps_from_the_start(settings, cache, tmp_path, name):
    schedule = {"name": name, "warmup": 4}
    run = train(settings(**KEEP, steps=8, schedule=schedule), tmp_path, cache)
    first, before = run.result(), run.digest
    assert extend(run.path, cache, steps=14).path == run.path
    whole = train(settings(**KEEP, steps=14, schedule=schedule), tmp_path / "whole", cache)
    assert losses(run) == losses(whole)
    assert run.result()["loss"] == whole.result()["loss"] and run.result()["steps"] == 14
    last = [checkpoint.load(one.checkpoints()[-1])[0]["model"] for one in (run, whole)]
    assert all(last[0][key].equal(last[1][key]) for key in last[1])
    [event] = [row for row in run.metrics() if "event" in row]
    assert (event["event"], event["step"], event["from_steps"], event["steps"]) == ("extended", 8, 8, 14)
    assert event["from_digest"] == before and event["digest"] == run.digest == whole.digest != before
    assert json.loads((run.path / "result-00000008.json").read_text()) == first
    # The training of 14 steps is found there; that of 8 steps is refused by name.
    assert train(settings(**KEEP, steps=14, schedule=schedule), tmp_path, cache).path == run.path
    with pytest.raises(ConfigError) as caught:
        train(settings(**KEEP, steps=8, schedule=schedule), tmp_path, cache)
    assert run.path.name in str(caught.value) and "14" in str(caught.value)


def test_a_warm_up_that_is_a_share_keeps_its_length(settings, cache, tmp_path):
    run = train(settings(steps=8, schedule={"name": "constant", "warmup": 0.5}, log_every=1), tmp_path, cache)
    extend(run.path, cache, tokens=12 * 4 * 32)
    assert run.config["schedule"]["warmup"] == 4 and run.config["tokens"] == 12 * 4 * 32
    rates = [rate for _, _, rate in losses(run)]
    assert rates == [1e-2 * factor(ScheduleConfig(name="constant", warmup=4), step, 12) for step in range(12)]


def test_twice_and_stopped_in_between(settings, cache, tmp_path, stop_at):
    schedule = {"name": "constant", "warmup": 0.0}
    run = train(settings(**KEEP, steps=4, schedule=schedule), tmp_path, cache)

    with pytest.raises(KeyboardInterrupt):
        extend(run.path, cache, steps=8, progress=stop_at(6))
    assert not run.done
    assert train(settings(**KEEP, steps=8, schedule=schedule), tmp_path, cache).path == run.path
    extend(run.path, cache, steps=10, run={"log_every": 1, "checkpoint_every": 1})
    whole = train(settings(**KEEP, steps=10, schedule=schedule), tmp_path / "whole", cache)
    assert losses(run) == losses(whole)
    events = [row for row in run.metrics() if "event" in row]
    assert [(row["step"], row["from_steps"], row["steps"]) for row in events] == [(4, 4, 8), (8, 8, 10)]
    assert [one["steps"] for one in run.extended] == [4, 8]


def test_wsd_before_its_decay(settings, cache, tmp_path):
    schedule = {"name": "wsd", "warmup": 2, "decay": 4}
    own = {**KEEP, "checkpoint_every": 5}
    run = train(settings(**own, steps=12, schedule=schedule), tmp_path, cache)
    with pytest.raises(ConfigError) as caught:
        extend(run.path, cache, steps=20)
    assert "step 8" in str(caught.value) and "schedule.name" in str(caught.value)
    assert run.done and run.extended == []
    for path in run.checkpoints():  # back to before the decay
        if checkpoint.step_of(path) > 8:
            path.rename(tmp_path / path.name)
    extend(run.path, cache, steps=20)
    whole = train(settings(**own, steps=20, schedule=schedule), tmp_path / "whole", cache)
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("name", ["cosine", "linear", "triangle"])
def test_schedules_that_reach_their_end_are_refused_with_the_fix(settings, cache, tmp_path, name):
    run = train(settings(steps=4, schedule={"name": name}), tmp_path, cache)
    before = (run.path / "config.yaml").read_text()
    with pytest.raises(ConfigError) as caught:
        extend(run.path, cache, steps=8)
    assert "schedule.name" in str(caught.value) and "init_from" in str(caught.value)
    assert run.done and (run.path / "config.yaml").read_text() == before


def test_what_else_is_refused(settings, cache, tmp_path):
    run = train(settings(steps=4, schedule={"name": "constant"}), tmp_path, cache)
    for arguments, word in (({"steps": 4}, "steps"), ({}, "--set steps=N"), ({"steps": 8, "tokens": 9}, "steps=N")):
        with pytest.raises(ConfigError) as caught:
            extend(run.path, cache, **arguments)
        assert word in str(caught.value)
    with pytest.raises(ConfigError, match="not a run folder"):
        extend(tmp_path, cache, steps=8)
    assert run.done


def test_a_run_that_cannot_go_on_stays_as_it_was(settings, cache, tmp_path, monkeypatch):
    source = tmp_path / "text.txt"
    source.write_text("one of many words " * 400)
    run = train(settings(steps=4, data={"source": str(source)}, schedule={"name": "constant"}), tmp_path, cache)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for unfinished in (False, True):
        if unfinished:
            (run.path / "result.json").unlink()
        before = contents(run)
        source.write_text("other words " * 600)
        for error, arguments in (("changed", {}), ("cuda", {"run": {"device": "cuda"}})):
            with pytest.raises(ConfigError, match=error):
                extend(run.path, cache, steps=8, **arguments)
            assert contents(run) == before
        source.write_text("one of many words " * 400)
    assert extend(run.path, cache, steps=8).result()["steps"] == 8


def test_a_run_of_0_1_0_is_extended(tmp_path, monkeypatch):
    import shutil
    from pathlib import Path

    fixtures = Path(__file__).parents[1] / "fixtures" / "v0.1"
    shutil.copytree(fixtures, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    [folder] = Path("runs").glob("constant-*")
    name = folder.name
    run = extend(folder, "cache", steps=16)
    assert run.path.name == name and run.result()["steps"] == 16
    stored = read_yaml(run.path / "config.yaml")
    assert stored["format"] == 2 and stored["steps"] == 16 and stored["schedule"]["warmup"] == 3
    [event] = [row for row in run.metrics() if "event" in row]
    assert event["from_digest"] == name[-12:] and event["step"] == 7
    expected = json.loads((fixtures / "expected.json").read_text())[name]["rows"]
    old = [row["loss"] for row in expected if "loss" in row]
    assert [loss for _, loss, _ in losses(run)][: len(old)] == pytest.approx(old, rel=1e-5)
