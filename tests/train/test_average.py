"""The moving average of the weights: its recurrence, its scores, and its place in checkpoints."""

import pytest
import torch

from linnet.config import ConfigError
from linnet.runs import checkpoint
from linnet.runs.model import load_model
from linnet.train import train
from linnet.train.optimizer import Average, AverageConfig


def test_recurrence_and_exchange():
    weights = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0]), "count": torch.tensor([3])}
    average = Average(AverageConfig(decay=0.5, warmup=True), weights)
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    for step in range(6):
        for tensor in weights.values():
            tensor += step + 1
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        for name in ("w", "b"):
            expected[name] = decay * expected[name] + (1 - decay) * weights[name]
    found = average.tensors()
    assert all(torch.allclose(found[name], expected[name], rtol=1e-6) for name in ("w", "b"))
    assert found["count"].item() == weights["count"].item()  # integers are copied
    before = {name: (weights[name].clone(), found[name].clone()) for name in weights}
    with pytest.raises(RuntimeError), average.in_place():
        assert torch.equal(weights["w"], before["w"][1]) and torch.equal(found["w"], before["w"][0])
        raise RuntimeError
    assert all(torch.equal(weights[name], own) and torch.equal(found[name], of) for name, (own, of) in before.items())
    average.restart()
    assert torch.equal(found["w"], weights["w"])


def test_it_changes_no_training_is_scored_saved_and_resumed(settings, cache, tmp_path, stop_at):
    plain = train(settings(steps=6, log_every=1), tmp_path / "plain", cache)
    own = {"average": {"decay": 0.6}, "steps": 6, "log_every": 1, "checkpoint_every": 1, "keep_checkpoints": 9}
    run = train(settings(**own), tmp_path / "whole", cache)
    assert run.path.name != plain.path.name

    def losses(folder):
        return [row["loss"] for row in folder.metrics() if "loss" in row]

    assert losses(run) == losses(plain)
    saved = [checkpoint.load(path)[0] for path in run.checkpoints()]
    average = saved[0]["average"]
    for step, tensors in enumerate(saved[1:], start=1):
        decay = min(0.6, (1 + step) / (10 + step))
        average = {name: torch.lerp(average[name], own, 1 - decay) for name, own in tensors["model"].items()}
        assert all(torch.allclose(average[name], one, atol=1e-7) for name, one in tensors["average"].items())
    result, of_plain = run.result(), plain.result()
    assert (result["raw_loss"], result["raw_bits_per_byte"]) == (of_plain["loss"], of_plain["bits_per_byte"])
    assert result["loss"] != result["raw_loss"] and "raw_loss" not in of_plain
    assert run.metrics()[-1]["raw_loss"] == result["raw_loss"]
    name = "embedding.weight"
    assert torch.equal(load_model(run.path)[0].state_dict()[name], saved[-1]["average"][name])
    assert torch.equal(load_model(run.path, weights="raw")[0].state_dict()[name], saved[-1]["model"][name])
    with pytest.raises(ConfigError, match="average"):
        load_model(plain.path, weights="average")

    with pytest.raises(KeyboardInterrupt):
        train(settings(**own), tmp_path / "stopped", cache, stop_at(3))
    resumed = train(settings(**own), tmp_path / "stopped", cache)
    again = checkpoint.load(resumed.checkpoints()[-1])[0]
    assert all(torch.equal(again["average"][name], one) for name, one in saved[-1]["average"].items())
    assert resumed.result()["loss"] == result["loss"]
