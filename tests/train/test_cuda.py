"""The same training on a GPU."""

import threading

import pytest
import torch

from linnet.models import family
from linnet.ops.capture import Captured
from linnet.runs import RunFolder, latest_good
from linnet.train import device, train
from linnet.train.objectives import TextObjective
from linnet.train.session import Session

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def losses(run: RunFolder) -> list[float]:
    return [row["loss"] for row in run.metrics() if "loss" in row]


def test_losses_are_those_of_the_cpu(settings, cache, tmp_path):
    """Rows, validation and the way they are read (only when a row is due) agree with the CPU."""
    cpu = train(settings(), tmp_path, cache)
    gpu = train(settings(device="cuda"), tmp_path, cache)
    assert losses(gpu) == pytest.approx(losses(cpu), rel=1e-3)
    assert gpu.result()["loss"] == pytest.approx(cpu.result()["loss"], rel=1e-3)
    norms = [[row["grad_norm"] for row in run.metrics() if "loss" in row] for run in (cpu, gpu)]
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_backward_stays_in_its_thread(settings, cache, accumulation):
    config, threads = settings(device="cuda", accumulation=accumulation), []
    gpu = torch.device("cuda")
    run = Session(config, TextObjective.prepare(config, gpu, cache), gpu)
    parameter = next(run.model.parameters())
    parameter.register_hook(lambda gradient: threads.append(threading.get_ident()))
    run.gradients()
    assert threads == [threading.get_ident()] * accumulation and parameter.grad.isfinite().all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_evaluations_change_nothing(settings, cache, tmp_path, precision):
    """Generation by CUDA graphs among them: losses and weights are the same bit for bit."""
    needle = {"kind": "needle", "lengths": [256], "depths": [0.5], "every": 4}
    suites = [needle, needle | {"name": "match", "scoring": "match"}, {"kind": "recall", "lengths": [64], "every": 6}]
    # Losses are read for evaluations, too: then the gradient is clipped by a norm that is a number.
    own = {"device": "cuda", "precision": precision, "optimizer": {"clip": 0.3}, "log_every": 5}
    runs = [train(settings(**own, evaluations=some), tmp_path / str(len(some)), cache) for some in (suites, [])]
    made = [row for row in runs[0].metrics() if "evaluation" in row]
    assert len(made) == 8 and not [row for row in made if "event" in row]
    assert losses(runs[0]) == losses(runs[1])
    models = [latest_good(run.checkpoint_folder)[1]["model"] for run in runs]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


@pytest.mark.parametrize("changes", [
    {"precision": "bfloat16"},
    {"model": family("tnl")(16, 2, num_heads=2).model_dump() | {"dropout": 0.1}, "optimizer": {"clip": 0.3}},
    {"data": {"packing": "reset"}, "guard": {"policy": "skip"}},
    {"compile": True},
])  # fmt: skip
def test_a_step_as_one_graph_has_the_bits_of_its_kernels(settings, cache, tmp_path, changes, monkeypatch):
    captured, call = [], Captured._capture
    monkeypatch.setattr(Captured, "_capture", lambda self, inputs: captured.append(1) or call(self, inputs))
    runs = [
        train(settings(**changes, device="cuda", graph=graph, steps=12, log_every=1), tmp_path / str(graph), cache)
        for graph in (False, True)
    ]
    assert captured
    if "compile" in changes:  # inductor adds up the gradient of the embedding in no fixed order
        assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)
        return
    assert losses(runs[0]) == losses(runs[1])
    models = [latest_good(run.checkpoint_folder)[1]["model"] for run in runs]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_interrupted_and_resumed(settings, cache, tmp_path, policy, stop_at):
    config = settings(device="cuda", checkpoint_every=4, guard={"policy": policy})
    whole = losses(train(config, tmp_path / "whole", cache))

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", cache, stop_at(6))
    assert losses(train(config, tmp_path / "stopped", cache)) == pytest.approx(whole, rel=1e-4)


def test_divergence_is_noticed_when_losses_are_read_later(settings, cache, tmp_path):
    """With losses read every 5 steps the offending batch is still named, and nothing bad is checkpointed."""
    changes = {"log_every": 5, "checkpoint_every": 10, "steps": 40}
    run = train(settings(device="cuda", **changes, optimizer={"learning_rate": 1e30, "clip": None}), tmp_path, cache)
    [event] = [row for row in run.metrics() if "event" in row]
    assert run.result()["status"] == "diverged" and event["position"] < event["step"] <= 10


@pytest.mark.parametrize("changes", [{"compile": True}, {"recompute": "selective"}, {"optimizer": {"name": "muon"}}])
def test_options_in_bfloat16(settings, cache, tmp_path, changes):
    run = train(settings(device="cuda", precision="bfloat16", **changes), tmp_path, cache)
    assert run.result()["status"] == "done" and losses(run)[-1] < losses(run)[0] - 0.5


def test_utilisation_is_known_for_known_devices(settings, cache, tmp_path):
    run = train(settings(device="cuda"), tmp_path, cache)
    known = device.peak_flops(torch.device("cuda"))
    assert all((row["flop_utilisation"] is None) == (known is None) for row in run.metrics() if "loss" in row)
