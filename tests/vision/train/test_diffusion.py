"""`objective: diffusion` from start to end: what a run records, exact resume, and what does not change its result."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch

from linnet.config import ConfigError, read_yaml
from linnet.data.labelled import HeldOut
from linnet.models import count_parameters, get_recipe
from linnet.papers.verbs.base import numbers, with_derived
from linnet.runs import latest_good
from linnet.runs.model import load_model
from linnet.train import read_training, train
from linnet.train.identity import digest_of
from linnet.train.loop import result_numbers
from linnet.vision.models.diffusion import Diffusion
from linnet.vision.train import DiffusionObjective, NoisyHeldOut

MODEL = {
    "d_model": 16,
    "layout": "attention+mlp x2",
    "options": {"attention": {"num_heads": 2, "rope": False}},
    "conditioning": "adaln_zero",
    "position": "sin_cos",
    "image_size": 8,
    "channels": 1,
    "classes": 10,
    "init_std": 0.25,
}
TINY = {
    "objective": "diffusion",
    "data": {"source": ["digits"], "max_images": 300},
    "model": MODEL,
    "batch_size": 16,
    "steps": 8,
    "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.0},
    "run": {"device": "cpu", "log_every": 1, "pictures": 0},
}
EVERYTHING = {"model": MODEL | {"drop_path": 0.2, "dropout": 0.1, "class_drop": 0.3}, "augment": "flip"}


def settings(**changes):
    run = TINY["run"] | changes.pop("run", {})
    return read_training(TINY | changes | {"run": run})


def objective(cache, **changes) -> DiffusionObjective:
    return DiffusionObjective.prepare(settings(**changes), torch.device("cpu"), cache)


def losses(run) -> list[float]:
    return [row["loss"] for row in run.metrics() if "loss" in row]


def test_a_run_learns_and_records_bins_and_pictures(cache, tmp_path):
    run = train(settings(steps=40, run={"evaluate_every": 20, "pictures": 1}), tmp_path, cache)
    rows = [row for row in run.metrics() if "validation_loss" in row]
    assert [row["step"] for row in rows] == [20, 40]
    assert rows[1]["validation_loss"] < rows[0]["validation_loss"] < 0.9  # 1 is a network that predicts no noise
    bins = [rows[-1][f"validation_loss_t{start}"] for start in (0, 250, 500, 750)]
    assert rows[-1]["validation_loss"] == pytest.approx(sum(bins) / 4, rel=0.02) and bins[0] > bins[3]
    assert rows[-1]["validation_images"] == 297 and rows[-1]["images"] == 40 * 16
    result = run.result()
    assert numbers(result).keys() <= with_derived(result_numbers(settings()))
    assert result["mse"] == rows[-1]["validation_mse"] < result["loss"] and result["loss_t250"] == bins[1]
    assert result["raw_loss"] != result["loss"]  # an average of the weights is kept by default
    pictures = sorted((run.path / "pictures").iterdir())
    assert [path.name for path in pictures] == ["step-00000020.png", "step-00000040.png"]
    from PIL import Image

    assert Image.open(pictures[-1]).size == (8, 10 * 9 - 1)
    assert pictures[0].read_bytes() != pictures[1].read_bytes()
    model, _ = load_model(run.path, kinds=("denoiser",))
    out = model(torch.zeros(1, 1, 8, 8), torch.tensor([3]), torch.tensor([10]))
    assert out.shape == (1, 2, 8, 8) and out.any()
    with pytest.raises(ConfigError, match="denoiser"):
        load_model(run.path)


def test_a_killed_run_goes_on_exactly(cache, tmp_path, stop_at):
    """With flips, random steps, noise and dropped classes, dropout, drop path and the average."""
    whole = train(settings(**EVERYTHING), tmp_path / "whole", cache)
    at = int(torch.randint(2, 7, ()))

    with pytest.raises(KeyboardInterrupt):
        train(settings(**EVERYTHING), tmp_path / "stopped", cache, stop_at(at))
    resumed = train(settings(**EVERYTHING), tmp_path / "stopped", cache)
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 8, at
    expected, found = (latest_good(run.checkpoint_folder)[1] for run in (whole, resumed))
    for group in ("model", "average", "optimizer"):
        assert all(torch.equal(found[group][name], one) for name, one in expected[group].items()), (group, at)
    assert whole.result()["loss"] == resumed.result()["loss"]


def test_accumulation_changes_rounding_alone(cache, tmp_path):
    one, four = (train(settings(**EVERYTHING, accumulation=n, steps=4), tmp_path, cache) for n in (1, 4))
    assert one.path != four.path and losses(four) == pytest.approx(losses(one), rel=1e-6)


def test_random_numbers_belong_to_the_global_batch(cache):
    own = objective(cache, augment="flip")
    whole = own.augment(own.batches().batch(5), 5)
    for world in (2, 3):
        parts = [own.augment(own.batches().batch(5, rank, world), 5, rank, world) for rank in range(world)]
        for tensor, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(torch.cat(pieces), tensor)
    images, t, noise, classes = whole
    assert images.min() >= -1 and images.max() <= 1 and images.min() < -0.9
    other = own.augment(own.batches().batch(5), 6)
    assert not torch.equal(t, other[1]) and not torch.equal(noise, other[2])
    labels = own.batches().batch(5)[1]
    assert ((classes == labels) | (classes == 10)).all()


def test_dropped_classes_have_their_share(cache):
    own = objective(cache, model=MODEL | {"class_drop": 0.25}, batch_size=300)
    classes = torch.cat([own.augment(own.batches().batch(position), position)[3] for position in range(10)])
    assert 0.21 < (classes == 10).float().mean() < 0.29
    t = torch.cat([own.augment(own.batches().batch(position), position)[1] for position in range(10)])
    assert t.min() < 10 and t.max() > 990 and 480 < t.float().mean() < 520


def test_the_loss_is_that_of_the_process(cache):
    own = objective(cache)
    model = own.build(0).double()
    images, t, noise, classes = (
        x.double() if x.is_floating_point() else x for x in own.augment(own.batches().batch(0), 0)
    )
    total, count = own.loss(model)(images, t, noise, classes)
    process = Diffusion()
    square, bound = process.losses(model(process.diffuse(images, t, noise), t, classes), images, t, noise)
    assert count == 16 and total.item() == pytest.approx((square + bound).sum().item(), rel=1e-12)
    assert own.targets_per_row == 1 and own.count(images, t) == 16


def test_held_out_noise_is_fixed(cache):
    split = objective(cache).data.validation
    whole = list(NoisyHeldOut(HeldOut(split, 300), 2))
    parts = list(NoisyHeldOut(HeldOut(split, 100), 2))
    for draw in (0, 1):
        joined = [torch.cat(tensors) for tensors in zip(*parts[3 * draw : 3 * draw + 3], strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(joined, whole[draw], strict=True))
    assert not torch.equal(whole[0][2], whole[1][2]) and not torch.equal(whole[0][3], whole[1][3])
    t = torch.cat([batch[2] for batch in whole])
    counts = torch.bincount(t // 250, minlength=4)
    assert counts.max() - counts.min() <= 4  # even over time steps


def test_held_out_losses_keep_their_digits_under_autocast(cache):
    own = objective(cache)
    model = own.build(0)  # its head is zero, so that both precisions predict the same
    exact = own.validate(model, contextlib.nullcontext())
    assert own.validate(model, torch.autocast("cpu", torch.bfloat16)) == pytest.approx(exact, rel=1e-6)


def test_latents_are_scaled_and_not_clipped(cache, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "latents.npz",
        images=(5 * rng.standard_normal((40, 4, 8, 8))).astype(np.float16),
        labels=np.arange(40) % 2,
    )
    data = {"source": [str(tmp_path / "latents.npz")], "kind": "latents"}
    changes = {"data": data, "model": MODEL | {"channels": 4, "classes": 2}, "batch_size": 8}
    own = objective(tmp_path / "cache", **changes)
    images, labels = own.batches().batch(0)
    assert torch.allclose(own.augment((images, labels), 0)[0], images * 0.18215)
    run = train(settings(**changes, steps=2, run={"pictures": 2}), tmp_path / "runs", tmp_path / "cache")
    assert run.result()["loss"] > 0 and not (run.path / "pictures").exists()
    with pytest.raises(ConfigError, match="flip"):
        settings(**changes, augment="flip")


def test_digests_know_what_changes_a_result():
    first = digest_of(settings(), None)
    for changes in ({"average": None}, {"evaluate_draws": 2}, {"model": MODEL | {"class_drop": 0.2}}):
        assert digest_of(settings(**changes), None) != first
    assert digest_of(settings(run={"pictures": 3}), None) == first
    assert read_training(settings().model_dump(mode="json")) == settings()


def test_bad_settings_name_the_key(cache):
    with pytest.raises(ConfigError, match=r"augment.*none or flip"):
        settings(augment={"kind": "flip", "mixup": 0.2})
    with pytest.raises(ConfigError, match="latent_scale: 2 has no effect"):
        settings(latent_scale=2.0)
    assert read_training(settings().model_dump(mode="json")).latent_scale == 0.18215  # saved with its default
    with pytest.raises(ConfigError) as error:
        objective(cache, data={"source": "digits", "kind": "latents"})  # two parts, one problem
    assert str(error.value).count("but digits has images") == 1
    with pytest.raises(ConfigError) as error:
        objective(cache, model=MODEL | {"image_size": 16, "channels": 3, "classes": 7})
    for key in ("model.image_size: 16", "model.channels: 3", "model.classes: 7"):
        assert key in str(error.value)


CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("name", "model", "parameters"),
    [
        ("digits-dit", "lightnet-dit-8px", 257_544),
        ("cifar10-dit", "dit-32px", 14_477_336),
        ("dit-imagenet", "dit-xl", 674_834_720),
        ("lightnet-dit-imagenet", "lightnet-dit-s", 33_532_448),
    ],
)
def test_shipped_trainings(name, model, parameters):
    config = read_training(read_yaml(CONFIGS / f"{name}.yaml"), name)
    assert config.model == get_recipe(model) and count_parameters(config.model)[0] == parameters
    assert config.optimizer.weight_decay == 0 and config.average is not None
    assert config.data.kind == ("latents" if "imagenet" in name else "images")
