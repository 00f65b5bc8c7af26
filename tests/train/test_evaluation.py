"""Evaluations while a model trains: what they find, that they change nothing, and that a kill repeats none."""

import gc
import json
import signal
import weakref

import numpy as np
import pytest
import torch
from children import Child

from linnet.config import ConfigError, parse
from linnet.evaluate.retrieval.needle import NeedleConfig, run_needle
from linnet.evaluate.texts import read_texts, score_text
from linnet.inference import Engine
from linnet.models import CausalLM
from linnet.runs import RunFolder, checkpoint, load_model
from linnet.train import TrainConfig, evaluation, run_folder, session, train
from linnet.train.evaluation import Evaluations, check_host

TIMES = {"tokens_per_second", "seconds", "memory_bytes", "flop_utilisation"}
EVERY = {"steps": 12, "log_every": 1, "checkpoint_every": 0, "keep_checkpoints": 9}

# A child for each of `numbers`, which kills itself when the record gets its `number`-th row of evaluations.
KILLED = """
import os, signal, sys, torch
from linnet.config import parse, read_yaml
from linnet.train import TrainConfig, train
torch.set_num_threads(1)
config, root, cache, *numbers = sys.argv[1:]
config = parse(TrainConfig, read_yaml(config))
for number in numbers:
    pid = os.fork()
    if pid == 0:
        left = int(number)
        def watch(row):
            global left
            left -= "evaluation" in row
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(config, os.path.join(root, number), cache, watch)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status == -signal.SIGKILL, (number, status)
"""


@pytest.fixture(scope="session")
def held(tmp_path_factory):
    """A held-out text of several documents."""
    path = tmp_path_factory.mktemp("held") / "held.jsonl"
    lines = [f"The {name} at the harbour opened at {i} and closed at {i + 9}. " * 4 for i, name in enumerate("abcdé")]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


def both(held, every: int = 6) -> list[dict]:
    return [
        {"kind": "text", "name": "held", "paths": [str(held)], "every": 4, "most_bytes": 700},
        {"kind": "needle", "every": every, "lengths": [256], "depths": [0.0, 1.0]},
    ]


@pytest.fixture
def suites(held) -> list[dict]:
    return both(held)


@pytest.fixture(scope="module")
def aligned(settings, cache, held, tmp_path_factory) -> tuple[TrainConfig, RunFolder]:
    """A configuration whose evaluations come two at a step, and its run."""
    config = settings(**EVERY, evaluations=both(held, every=4))
    return config, train(config, tmp_path_factory.mktemp("aligned"), cache)


def rows(run: RunFolder, of_evaluations: bool) -> list[dict]:
    found = [row for row in run.metrics() if ("evaluation" in row) == of_evaluations]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


def same_training(run: RunFolder, other: RunFolder) -> None:
    assert rows(run, False) == rows(other, False)
    ours, theirs = (checkpoint.load(r.checkpoints()[-1])[0] for r in (run, other))
    assert set(ours) == set(theirs) == {"model", "optimizer", "random"}
    for group in theirs:
        for name, tensor in theirs[group].items():
            assert torch.equal(ours[group][name], tensor), (group, name)


def test_results_are_in_the_record_and_those_of_the_checkpoint(settings, cache, tmp_path, suites, held):
    run = train(settings(**EVERY, evaluations=suites), tmp_path, cache)
    found = rows(run, True)
    assert [(row["step"], row["evaluation"]) for row in found] == [
        (4, "held"), (6, "needle"), (8, "held"), (12, "held"), (12, "needle"),
    ]  # fmt: skip
    for row in found:
        training = next(r for r in rows(run, False) if r["step"] == row["step"])
        assert (row["tokens"], row["flops"]) == (training["tokens"], training["flops"])
    assert [path.name for path in run.checkpoints()] == [f"step-{step:08d}" for step in (4, 6, 8, 12)]
    assert run.result()["evaluations"] == {row["evaluation"]: row["metrics"] for row in found[-2:]}

    # What anybody finds who takes the checkpoint.
    model, tokenizer = load_model(run.path)
    documents = read_texts([str(held)], tokenizer, most_bytes=700)
    assert sum(document.bytes for document in documents) == 700 and len(documents) < 5
    score = score_text(model, documents)
    assert found[3]["metrics"] == {
        name: getattr(score, name) for name in ("bits_per_byte", "loss", "perplexity", "word_perplexity")
    }
    engine = Engine(model, tokenizer, device="cpu", context_length=400)
    grid = run_needle(engine, NeedleConfig(lengths=[256], depths=[0.0, 1.0], scoring="choice"))
    assert found[4]["metrics"]["accuracy"] == grid.mean()
    assert found[4]["chance"]["accuracy"] == pytest.approx(0.1) and found[4]["questions"] == 2


@pytest.mark.parametrize("changes", [{}, {"recompute": "block"}, {"precision": "bfloat16"}])
def test_training_is_the_same_bit_for_bit(settings, cache, tmp_path, suites, changes):
    """Losses, weights, optimizer and random numbers, those of Python and NumPy as well."""
    suites = [*suites, {"kind": "needle", "name": "match", "every": 5, "scoring": "match", "lengths": [256]}]
    torch.manual_seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    with_them = train(settings(**EVERY, evaluations=suites, **changes), tmp_path / "with", cache)
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]
    without = train(settings(**EVERY, **changes), tmp_path / "without", cache)
    assert len(rows(with_them, True)) == 5 + 3 and not rows(without, True)
    same_training(with_them, without)


def test_what_a_suite_draws_or_changes_stays_with_it(settings, cache, tmp_path, suites, monkeypatch):
    """A suite that seeds everything, draws, and writes into its model and its gradients."""
    from linnet.train import suites as kinds

    def vandal(self, subject):
        def measure(model):
            torch.manual_seed(0), np.random.seed(0), torch.rand(7)
            for parameter in model.parameters():
                parameter.data.fill_(9.0)
                parameter.grad = torch.ones_like(parameter)
            return kinds.Found({"nothing": 0.0})

        return measure

    monkeypatch.setattr(kinds.TextEvaluation, "prepare", vandal)
    with_it = train(settings(**EVERY, evaluations=suites[:1]), tmp_path / "with", cache)
    assert len(rows(with_it, True)) == 3
    same_training(with_it, train(settings(**EVERY), tmp_path / "without", cache))


@pytest.mark.parametrize("scoring", ["match", "none"])
def test_nothing_is_left_of_the_copy(settings, cache, tmp_path, suites, monkeypatch, scoring):
    """Its memory is training's again at once, also where evaluation fails: no cycle waits for the collector."""
    copies, copy = [], Evaluations._copy

    def watched(self, weights):
        model = copy(self, weights)
        copies.append(weakref.ref(model))
        if scoring == "none":
            model.step = model.step  # a cycle
            raise RuntimeError("on purpose")
        return model

    left = []

    def look(row):
        if "evaluation" in row:
            left.append(copies[-1]())

    monkeypatch.setattr(Evaluations, "_copy", watched)
    suites[1]["scoring"] = "match"
    gc.disable()
    try:
        train(settings(**EVERY, evaluations=suites[1:]), tmp_path, cache, look)
    finally:
        gc.enable()
    assert left == [None, None] and gc.get_freeze_count() == 0


MOMENTS = (1, 4, 6)  # between two evaluations of one step, between two steps, behind the last of all


@pytest.fixture(scope="module")
def killed(aligned, cache, tmp_path_factory):
    """Folders of runs that SIGKILL ended right behind an evaluation, by its number."""
    root, (_, whole) = tmp_path_factory.mktemp("killed"), aligned
    child = Child(KILLED, whole.path / "config.yaml", root, cache, *MOMENTS)
    assert child.wait() == 0, child.output()
    return {number: root / str(number) for number in MOMENTS}


@pytest.mark.parametrize("number", MOMENTS)
def test_after_a_kill_none_is_made_twice_and_none_is_left_out(aligned, killed, cache, number):
    (config, whole), root = aligned, killed[number]
    made = [row for row in run_folder(config, root).metrics() if "evaluation" in row]
    assert len(made) == number
    fresh = []
    run = train(config, root, cache, lambda row: fresh.append(row) if "evaluation" in row else None)
    found = [row for row in run.metrics() if "evaluation" in row]
    assert found == made + fresh and len(found) == 6, "those that were there are there to the digit, seconds included"
    assert rows(run, True) == rows(whole, True)
    same_training(run, whole)


def test_one_that_a_kill_cut_off_is_made_again(aligned, cache, tmp_path):
    config, whole = aligned
    run = train(config, tmp_path / "cut", cache)
    record = run.path / "metrics.jsonl"
    (run.path / "result.json").unlink()
    lines = record.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"evaluation"' in line)
    record.write_text("".join(lines[:last]) + lines[last][:40])  # the last evaluation was being written
    run = train(config, tmp_path / "cut", cache)
    assert rows(run, True) == rows(whole, True)
    same_training(run, whole)
    assert run.result()["evaluations"] == whole.result()["evaluations"]


def test_a_stop_waits_for_one_evaluation_and_leaves_the_others_for_later(aligned, cache, tmp_path):
    config, whole = aligned
    for step in (4, 12):
        root = tmp_path / str(step)

        def stop(row, step=step):
            if row.get("evaluation") == "held" and row["step"] == step:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            train(config, root, cache, stop)
        run = run_folder(config, root)
        assert rows(run, True)[-1]["evaluation"] == "held" and rows(run, True)[-1]["step"] == step and not run.done
        run = train(config, root, cache)
        assert rows(run, True) == rows(whole, True)
        same_training(run, whole)


FRAGILE = """
from linnet.config import Config
from linnet.layers.base import Mixer, register_mixer


class FragileConfig(Config):
    pass


@register_mixer("fragile", FragileConfig)
class Fragile(Mixer):
    def __init__(self, config, context):
        super().__init__()

    def forward(self, x, state=None, cu_seqlens=None):
        return x, state

    def step(self, x, state):
        raise RuntimeError("no step by step\\nat all")

    def state_spec(self, batch, context_length):
        return {}
"""


def test_one_that_fails_is_told_and_does_not_end_training(settings, cache, tmp_path, suites):
    """A mixer that cannot go token by token: needles that must be generated fail, the text does not."""
    plugin = tmp_path / "fragile.py"
    plugin.write_text(FRAGILE)
    model = {"d_model": 16, "layout": "fragile+swiglu x2"}
    suites[1] |= {"scoring": "match", "every": 4}
    values = settings(**EVERY).model_dump(mode="json")
    values |= {"plugins": [f"{plugin}:Fragile"], "model": model, "architecture": "fragile", "evaluations": suites}
    seen = []
    run = train(parse(TrainConfig, values), tmp_path / "runs", cache, seen.append)
    failed = [row for row in run.metrics() if "event" in row]
    assert [row["step"] for row in failed] == [4, 8, 12]
    told = {"event": "evaluation_failed", "evaluation": "needle", "error": "RuntimeError: no step by step at all"}
    assert told.items() <= failed[0].items() and failed[0] in seen
    assert run.result()["status"] == "done" and set(run.result()["evaluations"]) == {"held"}
    without = train(parse(TrainConfig, values | {"evaluations": []}), tmp_path / "without", cache)
    same_training(run, without)


def test_without_steps_of_their_own_they_come_with_validations(settings, cache, tmp_path, suites):
    del suites[0]["every"]
    run = train(settings(**EVERY, evaluate_every=5, evaluations=suites[:1]), tmp_path / "five", cache)
    assert [row["step"] for row in rows(run, True)] == [5, 10, 12]
    run = train(settings(**EVERY, evaluations=suites[:1]), tmp_path / "end", cache)
    assert [row["step"] for row in rows(run, True)] == [12]
    assert [path.name for path in run.checkpoints()] == ["step-00000012"]


def test_a_rollback_goes_where_it_would_have_gone(settings, cache, tmp_path, suites, monkeypatch):
    """What was found at the checkpoint that training goes back to stays; what came behind it is found anew."""
    position, get, loss = [0], session.Prefetch.get, CausalLM.loss

    def watched(self, at):
        position[0] = at
        return get(self, at)

    def poisoned(self, tokens, targets, cu_seqlens=None):
        nll, count = loss(self, tokens, targets, cu_seqlens)
        return nll * (float("nan") if position[0] == 6 and nll.requires_grad else 1.0), count

    monkeypatch.setattr(session.Prefetch, "get", watched)
    monkeypatch.setattr(CausalLM, "loss", poisoned)
    own = {**EVERY, "checkpoint_every": 4, "guard": {"policy": "rollback"}}
    suites[1]["every"] = 4
    with_them = train(settings(**own, evaluations=suites), tmp_path / "with", cache)
    without = train(settings(**own), tmp_path / "without", cache)
    [event] = [row for row in without.metrics() if "event" in row]
    assert (event["to_step"], event["left_out"]) == (4, [5, 6])
    same_training(with_them, without)
    assert [row["step"] for row in rows(with_them, True)] == [4, 4, 8, 8, 12, 12]


def test_all_problems_come_at_once_and_before_any_work(settings, tmp_path, held, text, cache):
    wrong = [
        {"kind": "text", "paths": [str(tmp_path / "none.txt")], "every": 0},
        {"kind": "needel"},
        {"kind": "needle", "lengths": [512, 256], "haystack": str(tmp_path / "none.txt"), "depth": [0.0]},
        {"kind": "text", "paths": [str(held)], "window": 64, "stride": 64, "name": "a b"},
    ]
    values = settings().model_dump(mode="json")
    with pytest.raises(ConfigError) as caught:
        parse(TrainConfig, values | {"evaluations": wrong, "steps": 0})
    told = "\n".join(caught.value.problems)
    for part in ("evaluations.0.text.every", "none.txt", "evaluations.1", "'text', 'needle'",
                 "[512, 256]", "'depths'", "stride: 64",
                 "evaluations.3.text.name", "steps"):  # fmt: skip
        assert part in told, (part, told)

    twice = [{"kind": "text", "paths": [str(held)], "every": 5}] * 2
    with pytest.raises(ConfigError) as caught:
        parse(
            TrainConfig,
            values | {"evaluations": twice, "guard": {"policy": "rollback"}, "run": {"checkpoint_every": 4}},
        )
    [problem] = caught.value.problems
    assert "'text'" in problem and "checkpoint_every (4)" in problem

    # What only the tokenizer and the training text can tell comes before the first step too.
    wrong = [
        {"kind": "text", "paths": [str(text)]},
        {"kind": "needle", "lengths": [20]},
        {"kind": "text", "name": "short", "paths": [str(held)], "stride": 40},
    ]
    with pytest.raises(ConfigError) as caught:
        train(parse(TrainConfig, values | {"evaluations": wrong}), tmp_path, cache)
    first, second, third = caught.value.problems
    assert first.startswith("evaluations.0 (text): paths: ")
    assert second.startswith("evaluations.1 (needle): lengths: 20 ")
    assert third.startswith("evaluations.2 (short): stride: 40 ") and "32" in third
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_host_without_room_for_whole_weights_is_refused(monkeypatch):
    monkeypatch.setattr(evaluation, "free_memory", lambda: 1000 * 8 - 1)
    check_host([], 1000)
    check_host([object()], 999)
    with pytest.raises(ConfigError, match="linnet evaluate RUN"):
        check_host([object()], 1000)
