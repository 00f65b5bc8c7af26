"""A training that was saved in one layout goes on in any other: the same state to the bit, the same losses."""

import argparse
import resource
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_shard import Random, config

from linnet.models import CausalLM
from linnet.parallel import mesh as ranks
from linnet.parallel.mesh import Mesh
from linnet.runs import CheckpointError, RunFolder, checkpoint
from linnet.runs.saver import Saver
from linnet.train import TrainConfig, train
from linnet.train.session import Prefetch, Session

STEPS = 2  # before the checkpoint, and after it
LAYOUTS = {"1": (1, {}), "3": (3, {}), "4": (4, {}), "2x2 tp": (4, {"tp": 2}), "2x2 sp": (4, {"sp": 2})}


class Plain(Random):
    """Random tokens, which need no corpus to go on with."""

    def meta(self):
        return {}

    def resume_problems(self, meta):
        return []


def session_of(world, layout):
    options = {"tnl": {"num_heads": 2}}
    model = {"layout": "tpe tnl+sglu", "options": options, "dropout": 0.1, "tie_embeddings": True}
    settings = config("tnl", model=model, batch_size=12, optimizer={"name": "muon"}, parallel=layout)
    mesh = Mesh(settings.parallel, torch.device("cpu")) if world > 1 else None
    return Session(settings, Plain(settings, torch.float32), torch.device("cpu"), mesh)


def go_on(session):
    session.recent.clear()
    for _ in range(STEPS):
        session.gradients()
        assert session.judge() is None
        session.apply()
    return list(session.recent)


def weights_of(session):
    return {name: tensor.clone() for name, tensor in session.weights().items()}


def begin(root, sessions):
    """Trains from the start in each layout, saves, and goes on. Returns the losses after the checkpoint."""
    losses = {}
    for name, session in sessions.items():
        go_on(session)
        Saver(Path(root) / name, None, session.mesh, session.split).save(STEPS, *session.state())
        weights = weights_of(session)
        losses[name] = go_on(session), weights, weights_of(session)
    return losses


def resume(root, sessions):
    """Goes on from each checkpoint in each layout. Returns the losses, and the weights before and after."""
    found = {}
    for name, session in sessions.items():
        for source in sorted(Path(root).iterdir()):
            path = checkpoint.place(source, STEPS)
            if session.mesh is None:
                session.load(*checkpoint.load(path))
            else:
                session.load(path, checkpoint.read_meta(path))
            weights = weights_of(session)
            found[source.name, name] = go_on(session), weights, weights_of(session)
    return found


def at_once(root, calls, layouts):
    """Runs in a worker: `begin`, `resume`, or both with the same sessions, because making them takes longest."""
    sessions = {name: session_of(*LAYOUTS[name]) for name in layouts}
    return [{"begin": begin, "resume": resume}[call](root, sessions) for call in calls]


def test_any_layout_goes_on_from_any_other(pool, tmp_path):
    begun, resumed = {}, {}
    plan = [(world, ["begin"]) for world in (1, 3)] + [(4, ["begin", "resume"])]
    for world, calls in plan + [(world, ["resume"]) for world in (3, 1)]:
        given = str(tmp_path), calls, [name for name, (ranks, _) in LAYOUTS.items() if ranks == world]
        ranks = pool.run(world, at_once, *given) if world > 1 else [at_once(*given)]
        for number, call in enumerate(calls):
            first = ranks[0][number]
            assert all(rank[number][key][0] == losses for rank in ranks for key, (losses, *_) in first.items())
            (begun if call == "begin" else resumed).update(first)
    assert len(resumed) == len(LAYOUTS) ** 2
    for (source, name), (losses, before, after) in resumed.items():
        expected, saved, end = begun[source]
        assert before.keys() == saved.keys() and all(torch.equal(before[key], saved[key]) for key in saved)
        if source == name:
            assert losses == expected and all(torch.equal(after[key], end[key]) for key in end)
        else:
            assert losses == pytest.approx(expected, rel=2e-6), (source, name)


def eight_steps(world, clip):
    settings = config("tnl", batch_size=12, optimizer={"clip": clip})
    mesh = Mesh(settings.parallel, torch.device("cpu")) if world > 1 else None
    session = Session(settings, Plain(settings, torch.float32), torch.device("cpu"), mesh)
    return [loss for _ in range(4) for loss in go_on(session)]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_layouts_drift_apart_by_rounding_as_steps_add_up(pool, clip):
    """docs/distributed.md has both bounds."""
    expected = eight_steps(1, clip)
    losses = pool.run(3, eight_steps, 3, clip)[0]
    gaps = [abs(a / b - 1) for a, b in zip(losses, expected, strict=True)]
    assert len(gaps) == 8 and max(gaps[:4]) <= 2e-6 and max(gaps) <= 3e-5


TINY = {
    "model": {"d_model": 16, "layout": "hgrn2+glu x2", "options": {"hgrn2": {"num_heads": 2}}},
    "data": {"source": [argparse.__file__]},
    "seq_len": 16,
    "batch_size": 4,
    "steps": 16,
    "evaluate_tokens": 64,
    "run": {"device": "cpu", "log_every": 1, "checkpoint_every": 4, "async_save": True},
}


def poisoned(root, policy, parallel, poison):
    """A whole run in which the loss of some batches is multiplied: {position: factor}, on the last rank alone."""
    guard = {"policy": policy} | ({"skip_batches": 1} if policy == "rollback" else {})
    values = TINY | {"guard": guard, "parallel": parallel}
    at, get, loss = [0], Prefetch.get, CausalLM.loss

    def watched(self, position):
        at[0] = position
        return get(self, position)

    def changed(self, *given):
        total, count = loss(self, *given)
        last = ranks.rank() == ranks.world() - 1
        return total * (poison.get(at[0], 1.0) if self.training and total.requires_grad and last else 1.0), count

    with mock.patch.object(Prefetch, "get", watched), mock.patch.object(CausalLM, "loss", changed):
        return str(train(TrainConfig.model_validate(values), Path(root) / policy, Path(root) / "cache").path)


@pytest.mark.parametrize("policy, troubles, steps", [("rollback", 4, 16), ("skip", 4, 16), ("stop", 1, 2)])
def test_one_ranks_bad_batch_is_answered_by_all(pool, tmp_path, policy, troubles, steps):
    poison = {2: float("nan"), 9: float("inf"), 13: float("nan"), 14: float("nan")}
    one = RunFolder(poisoned(tmp_path / "one", policy, {}, poison))
    paths = pool.run(2, poisoned, str(tmp_path / "two"), policy, {"dp_shard": 2}, poison, group=False)
    two = RunFolder(paths[0])
    rows = [[row for row in run.metrics()] for run in (one, two)]
    kept = ("event", "action", "step", "position", "to_step", "left_out")
    events = [[[row.get(key) for key in kept] for row in found if "event" in row] for found in rows]
    assert events[0] == events[1] and len(events[0]) == troubles
    losses = [[row["loss"] for row in found if "loss" in row and "event" not in row] for found in rows]
    assert len(losses[0]) == steps and losses[1] == pytest.approx(losses[0], rel=2e-6)
    assert one.path.name == two.path.name
    assert one.result()["status"] == two.result()["status"] == ("diverged" if policy == "stop" else "done")
    assert [path.name for path in two.checkpoints()] == [path.name for path in one.checkpoints()]


def filled(root):
    """A whole run in which rank 1 cannot write more than 300 bytes to a file from step 6 on."""
    reached, gradients = [0], Session.gradients
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self, *given):
        reached[0] = self.step
        if self.step == 6 and ranks.rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        if self.step > 8:
            time.sleep(0.05)  # a real step takes longer than the failure of a save
        gradients(self, *given)

    try:
        with mock.patch.object(Session, "gradients", limited):
            train(TrainConfig.model_validate(TINY | {"steps": 99}), root, Path(root) / "cache")
    except CheckpointError as error:
        return error.problems, reached[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_failed_background_save_stops_all_ranks_at_the_same_step(pool, tmp_path):
    first, second = pool.run(2, filled, str(tmp_path), group=False)
    assert first == second
    [problem], step = first
    assert problem.startswith("rank 1: ") and "step-00000008: the disk is full" in problem and 8 <= step < 99
    [folder] = RunFolder.all(tmp_path)
    assert [path.name for path in folder.checkpoints()] == ["step-00000004"] and "the disk is full" in folder.error()
    train(TrainConfig.model_validate(TINY | {"steps": 99}), tmp_path, tmp_path / "cache")
    assert folder.done and folder.checkpoints()[-1].name == "step-00000099"
