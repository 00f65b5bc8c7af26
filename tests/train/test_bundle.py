"""Runs trained in lockstep: equal to the same runs alone up to rounding, resumable, and apart where one diverges."""

import math
import os
import signal
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from linnet.config import read_yaml
from linnet.models import build_model
from linnet.runs import RunFolder
from linnet.runs.checkpoint import latest_good
from linnet.study import read_study
from linnet.study.architectures import Base, Size, make_model
from linnet.train import read_training, train
from linnet.train import together as module
from linnet.train.loop import Run
from linnet.train.together import Members, alone_because, bundles, train_together

STEPS = 8
ABLATIONS = read_study(read_yaml(Path(__file__).parents[2] / "configs" / "ablations.yaml"))


def settings(text, **changes):
    return {
        "model": {"d_model": 16, "layout": "gla+swiglu gla", "options": {"gla": {"num_heads": 2}}},
        "data": {"source": [str(text)]},
        "seq_len": 24,
        "batch_size": 3,
        "steps": STEPS,
        "evaluate_tokens": 200,
        "optimizer": {"learning_rate": 3e-3},
        "run": {"device": "cpu", "log_every": 2},
    } | changes


def configs(text, seeds=(0, 1, 2), **changes):
    return [read_training(settings(text, **changes) | {"seed": seed}) for seed in seeds]


def rows(folder: RunFolder) -> list[dict]:
    """The record without times and memory."""
    left_out = ("seconds", "tokens_per_second", "memory_bytes", "flop_utilisation")
    return [{key: value for key, value in row.items() if key not in left_out} for row in folder.metrics()]


def assert_same(alone: RunFolder, together: RunFolder, rel=2e-5):
    first, second = rows(alone), rows(together)
    assert [row.keys() for row in first] == [row.keys() for row in second] and first
    for one, other in zip(first, second, strict=True):
        for key, value in one.items():
            assert other[key] == pytest.approx(value, rel=rel), key
    own, theirs = alone.result(), together.result()
    assert own.keys() - {"bundle"} == theirs.keys() - {"bundle"} and alone.path.name == together.path.name
    assert theirs["loss"] == pytest.approx(own["loss"], rel=rel)


@pytest.mark.parametrize(
    "changes",
    [
        {"curve_every": 3, "run": {"device": "cpu", "log_every": 2, "evaluate_every": 4}},
        {"model": {"d_model": 16, "layout": "tnl+moe", "dropout": 0.2, "options": {"tnl": {"num_heads": 2}}}},
    ],
)
def test_a_run_of_a_bundle_is_the_run_alone(text, tmp_path, changes):
    together = train_together(configs(text, **changes), tmp_path / "together", tmp_path / "cache")
    for config, folder in zip(configs(text, **changes), together, strict=True):
        assert folder.result()["bundle"] == 3
        assert_same(train(config, tmp_path / "alone", tmp_path / "cache"), folder)


def test_rates_may_differ_and_weights_follow_their_own_run(text, tmp_path):
    some = [
        read_training(settings(text) | {"optimizer": {"learning_rate": rate, "weight_decay": decay}})
        for rate, decay in ((1e-3, 0.1), (1e-2, 0.0))
    ]
    assert bundles(some, 8) == [[0, 1]]
    together = train_together(some, tmp_path / "together", tmp_path / "cache")
    for config, folder in zip(some, together, strict=True):
        alone = train(config, tmp_path / "alone", tmp_path / "cache")
        assert_same(alone, folder)
        pairs = [latest_good(one.checkpoint_folder)[1] for one in (alone, folder)]
        for group in ("model", "optimizer"):
            assert pairs[0][group].keys() == pairs[1][group].keys()
            for name, tensor in pairs[0][group].items():
                torch.testing.assert_close(pairs[1][group][name], tensor, rtol=1e-3, atol=1e-5)


def test_runs_stopped_at_any_step_go_on_together_or_alone(text, tmp_path, monkeypatch):
    changes = {"run": {"device": "cpu", "log_every": 2, "checkpoint_every": 2}}
    some = configs(text, **changes)
    save = Run.save

    def killed(run):
        save(run)
        if run.session.step == 4 and run.config.seed == 1:  # the third run still has its checkpoint of step 2
            raise RuntimeError("killed")

    monkeypatch.setattr(Run, "save", killed)
    with pytest.raises(RuntimeError, match="killed"):
        train_together(some, tmp_path / "together", tmp_path / "cache")
    monkeypatch.setattr(Run, "save", save)
    groups = []
    lockstep = module._Lockstep
    monkeypatch.setattr(module, "_Lockstep", lambda runs, stop: groups.append(len(runs)) or lockstep(runs, stop))
    together = train_together(some, tmp_path / "together", tmp_path / "cache")
    assert groups == [1, 2]
    for config, folder in zip(some, together, strict=True):
        assert folder.error() is None
        assert_same(train(config, tmp_path / "alone", tmp_path / "cache"), folder)
    assert [
        folder.result()["status"] for folder in train_together(some, tmp_path / "together", tmp_path / "cache")
    ] == ["done"] * 3


def test_a_signal_saves_all_runs_at_one_step(text, tmp_path, monkeypatch):
    some = configs(text)
    take = module._Gradients.take

    def signalled(gradients, flags):
        take(gradients, flags)
        if gradients.sessions[0].step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(module._Gradients, "take", signalled)
    with pytest.raises(KeyboardInterrupt):
        train_together(some, tmp_path / "together", tmp_path / "cache")
    monkeypatch.setattr(module._Gradients, "take", take)
    folders = sorted((tmp_path / "together").iterdir())
    assert [path.name for folder in folders for path in RunFolder(folder).checkpoints()] == ["step-00000004"] * 3
    for config, folder in zip(some, train_together(some, tmp_path / "together", tmp_path / "cache"), strict=True):
        assert_same(train(config, tmp_path / "alone", tmp_path / "cache"), folder)


def test_a_run_that_diverges_leaves_and_the_others_go_on(text, tmp_path, monkeypatch):
    some = configs(text)
    take = module._Gradients.take

    def broken(gradients, flags):
        take(gradients, flags)
        for run in gradients.runs:
            if run.config.seed == 1 and run.session.step == 3:
                position, numbers = run.session._unread[-1]
                run.session._unread[-1] = position, [torch.tensor(math.nan), *numbers[1:]]

    monkeypatch.setattr(module._Gradients, "take", broken)
    together = train_together(some, tmp_path / "together", tmp_path / "cache")
    assert [folder.result()["status"] for folder in together] == ["done", "diverged", "done"]
    for config, folder in list(zip(some, together, strict=True))[::2]:
        assert_same(train(config, tmp_path / "alone", tmp_path / "cache"), folder)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"accumulation": 3}, "accumulation: 3"),
        ({"guard": {"policy": "skip"}}, "guard.policy: skip"),
        ({"average": {"decay": 0.9}}, "average"),
        ({"data": {"source": "stdlib", "packing": "reset"}}, "data.packing: reset"),
        ({"run": {"recompute": "block"}}, "run.recompute"),
        ({}, None),
    ],
)
def test_what_a_bundle_cannot_train_is_trained_alone(changes, told):
    values = [
        read_training({"model": "tnl-10m", "batch_size": 6, "steps": 2, "seed": seed} | changes) for seed in (0, 1)
    ]
    found = alone_because(values[0])
    assert found is None if told is None else found.startswith(told)
    assert bundles(values, 8) == ([[0, 1]] if told is None else [[0], [1]]) and bundles(values, 1) == [[0], [1]]


def test_bundles_hold_one_shape_and_no_more_runs_than_asked(text):
    some = [config for seq_len in (24, 25) for config in configs(text, seeds=range(5), seq_len=seq_len)]
    assert bundles(some[::2] + some[1::2], 2) == [[0, 1], [2, 5], [6], [3, 4], [7, 8], [9]]
    with pytest.raises(ValueError, match="bundle"):
        train_together(some, "nowhere", "nowhere")


@pytest.mark.parametrize("architecture", ABLATIONS.architectures, ids=lambda one: one.name)
def test_vmap_goes_through_every_variant_of_the_ablations(architecture):
    config = make_model(architecture, Size(d_model=16, num_layers=2, num_heads=2), Base.text(256))
    models = [build_model(config, seed=seed) for seed in (0, 1)]
    members = Members(models, torch.device("cpu"), "float32", attrgetter("loss"))
    rows = torch.randint(0, 256, (2, 1, 21), generator=torch.Generator().manual_seed(0))
    found = members._run(lambda: members._map_losses(rows[..., :-1], rows[..., 1:]))
    assert members.vectorised
    for model, row, loss in zip(models, rows, found, strict=True):
        total, count = model.loss(row[:, :-1], row[:, 1:])
        torch.testing.assert_close(loss, total / count, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_bundle_on_a_gpu_is_one_graph_and_equals_the_runs_alone(text, tmp_path):
    changes = {"run": {"device": "cuda", "log_every": 2, "graph": True}}
    together = train_together(configs(text, **changes), tmp_path / "together", tmp_path / "cache")
    for config, folder in zip(configs(text, **changes), together, strict=True):
        assert_same(train(config, tmp_path / "alone", tmp_path / "cache"), folder, rel=1e-3)


def test_a_bundle_of_small_models_trains_with_one_thread(text, cache, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        folders = train_together(configs(text), tmp_path, cache)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [folder.result()["environment"]["threads"] for folder in folders] == [1, 1, 1]
