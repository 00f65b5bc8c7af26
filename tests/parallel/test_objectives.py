"""Objectives besides text on two ranks: the same losses, weights and averages as on one process."""

import pytest
import torch
from chats import VOCABULARY, model_folder, turns, write_chats
from hf_models import small

from linnet.config import ConfigError
from linnet.parallel.mesh import Mesh
from linnet.runs import latest_good
from linnet.train import extend, read_training, train
from linnet.train.objectives.chat import ChatObjective
from linnet.train.preflight import check_devices
from linnet.train.session import Session, start_from
from linnet.vision.train import DiffusionObjective, ImageObjective

STEPS = 2
IMAGES = {
    "objective": "images",
    "data": {"source": ["digits"], "max_images": 60},
    "model": {
        "d_model": 16,
        "layout": "hgrn2+mlp lightnet+mlp",
        "options": {"hgrn2": {"num_heads": 2}, "lightnet": {"num_heads": 2}},
        "image_size": 8,
        "patch": 2,
        "channels": 1,
        "classes": 10,
        "pool": "mean",
        "position": "learned",
        "dropout": 0.1,
        "drop_path": 0.3,
        "init_std": 0.25,
    },
    "augment": {"kind": "crop_flip", "padding": 1, "mixup": 0.4, "cutmix": 0.5, "smoothing": 0.1},
    "average": {"decay": 0.5},
    "batch_size": 12,
    "optimizer": {"learning_rate": 0.01, "clip": 0.5},
    "steps": STEPS,
    "seed": 3,
    "evaluate_images": 37,
    "run": {"device": "cpu", "log_every": 1},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


class Double(ImageObjective):
    """The objective with a model in float64."""

    def build(self, seed, device=None):
        return super().build(seed, device).double()


def make_steps(cache: str, mesh: Mesh | None, changes: dict):
    """Losses, norms, scores, and whole weights of the model and of its average, after some steps."""
    config = read_training(IMAGES | changes)
    objective = Double(config, Double.read(config, cache), torch.device("cpu"))
    session = Session(config, objective, torch.device("cpu"), mesh)
    norms, ranks = [], {} if mesh is None else {"mesh": mesh}
    for _ in range(STEPS):
        session.gradients()
        assert session.judge() is None
        norms.append(session.grad_norm)
        session.apply()
    with session.averaged():
        averaged = objective.validate(session.model, session.autocast, **ranks)
    raw = objective.validate(session.model, session.autocast, **ranks)
    session.gradients()  # after a forward pass without a backward pass
    assert session.judge() is None
    return session.recent, norms, list(averaged.values()), list(raw.values()), dict(session.weights())


def on_ranks(cache: str, changes: dict):
    """Runs in a worker."""
    config = read_training(IMAGES | changes)
    return make_steps(cache, Mesh(config.parallel, torch.device("cpu")), changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 3, "augment": "crop_flip"},
        {"parallel": {"dp_replicate": 2}, "batch_size": 8},
        {"accumulation": 3, "batch_ramp": 2.0},
    ],
    ids=["shards", "parts", "copies", "growing"],
)
def test_two_ranks_train_images_like_one_process(pool, cache, changes):
    without = {"parallel"} if "batch_ramp" in changes else {"parallel", "accumulation"}
    expected = make_steps(str(cache), None, {key: value for key, value in changes.items() if key not in without})
    ranks = pool.run(2, on_ranks, str(cache), changes)
    rounding = 1e-7 if "batch_ramp" in changes else 1e-12  # one process adds the losses of its parts in float32
    for found in ranks:
        for one, other in zip(found[:4], expected[:4], strict=True):
            assert one == pytest.approx(other, rel=rounding)
    weights = ranks[0][4]
    assert weights.keys() == expected[4].keys() and not ranks[1][4]
    for name, own in expected[4].items():
        torch.testing.assert_close(weights[name], own, rtol=0, atol=1e-12, msg=name)


def converse(values: dict, cache: str, mesh: Mesh | None):
    """Losses and scores of a model folder that is fine-tuned for some steps."""
    config = read_training(values)
    objective = ChatObjective.prepare(config, torch.device("cpu"), cache)
    session = Session(config, objective, torch.device("cpu"), mesh)
    start_from(session, config.init_from)
    for _ in range(STEPS):
        session.gradients()
        assert session.judge() is None
        session.apply()
    return [*session.recent, *objective.validate(session.model, session.autocast, mesh=mesh).values()]


def converse_on_ranks(values: dict, cache: str):
    """Runs in a worker."""
    return converse(values, cache, Mesh(read_training(values).parallel, torch.device("cpu")))


@pytest.mark.parametrize("parallel", [{}, {"sp": 2}, {"tp": 2}], ids=["rows", "spans", "layers"])
def test_two_ranks_fine_tune_a_model_folder_like_one_process(pool, tmp_path, parallel):
    folder = model_folder(tmp_path / "model", small("tnl", VOCABULARY))
    talks = [turns(f"say {i}", f"{i}{i}", *(("again", f"{i}") if i % 2 else ())) for i in range(12)]
    values = {"objective": "chat", "init_from": str(folder), "seq_len": 96, "batch_size": 2, "steps": STEPS}
    values |= {"data": {"source": str(write_chats(tmp_path / "c.jsonl", *talks)), "validation_fraction": 0.3}}
    values |= {"run": {"device": "cpu", "log_every": 1}}
    expected = converse(values, str(tmp_path), None)
    for found in pool.run(2, converse_on_ranks, values | {"parallel": parallel}, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-5)


DENOISER = {key: IMAGES["model"][key] for key in ("d_model", "image_size", "channels", "classes", "init_std")} | {
    "layout": "attention+mlp lightnet+mlp",
    "options": {"attention": {"num_heads": 2, "rope": False}, "lightnet": {"num_heads": 2}},
    "conditioning": "adaln_zero",
    "class_drop": 0.3,
    "drop_path": 0.3,
}
NOISE = IMAGES | {"objective": "diffusion", "model": DENOISER, "augment": "flip"}
NOISE |= {"run": IMAGES["run"] | {"pictures": 1}}


class DoubleDiffusion(DiffusionObjective):
    """The objective with a model in float64."""

    def build(self, seed, device=None):
        return super().build(seed, device).double()


def denoise(cache: str, mesh: Mesh | None):
    """Losses, scores, pictures and whole weights after some steps."""
    config = read_training(NOISE)
    objective = DoubleDiffusion(config, DoubleDiffusion.read(config, cache), torch.device("cpu"))
    session = Session(config, objective, torch.device("cpu"), mesh)
    for _ in range(STEPS):
        session.gradients()
        assert session.judge() is None
        session.apply()
    with session.averaged():
        scores = objective.validate(session.model, session.autocast, mesh=mesh)
        pictures = objective.pictures(session.model, session.autocast, mesh)
    return session.recent, list(scores.values()), pictures, dict(session.weights())


def denoise_on_ranks(cache: str):
    """Runs in a worker."""
    return denoise(cache, Mesh(read_training(NOISE).parallel, torch.device("cpu")))


def test_two_ranks_train_a_denoiser_like_one_process(pool, cache):
    losses, scores, pictures, weights = denoise(str(cache), None)
    ranks = pool.run(2, denoise_on_ranks, str(cache))
    for found in ranks:
        assert found[0] == pytest.approx(losses, rel=1e-12) and found[1] == pytest.approx(scores, rel=1e-12)
        assert found[2] == pictures and list(pictures) == [".png"]
    assert ranks[0][3].keys() == weights.keys()
    for name, own in weights.items():
        torch.testing.assert_close(ranks[0][3][name], own, rtol=0, atol=1e-12, msg=name)


def lengthened(path: str, cache: str, steps: int):
    """Runs in a worker, or here: trains a run of images on to more steps."""
    return extend(path, cache, steps=steps).result()["raw_loss"]


def test_a_run_goes_on_on_another_number_of_ranks(pool, cache, tmp_path):
    evaluations = [{"kind": "images", "split": "test", "most_images": 50, "every": 2}]
    values = IMAGES | {"schedule": {"name": "constant", "warmup": 2.0}, "evaluations": evaluations}
    whole = train(read_training(values | {"steps": 6}), tmp_path / "whole", cache)
    run = train(read_training(values | {"steps": 2}), tmp_path / "moved", cache)
    first, second = pool.run(2, lengthened, str(run.path), str(cache), 4, group=False)
    assert first == second
    lengthened(str(run.path), str(cache), 6)
    rows = [[row["loss"] for row in one.metrics() if "loss" in row and "event" not in row] for one in (run, whole)]
    assert rows[0] == pytest.approx(rows[1], rel=2e-6) and len(rows[0]) == 6
    scores = [[row["metrics"]["loss"] for row in one.metrics() if "evaluation" in row] for one in (run, whole)]
    assert scores[0] == pytest.approx(scores[1], rel=2e-6) and len(scores[0]) == 3  # rank 0 alone writes each
    changed = [row["changed"] for row in run.metrics() if row.get("event") == "execution_changed"]
    assert len(changed) == 2
    ends = [latest_good(one.checkpoint_folder)[1]["average"] for one in (run, whole)]
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=2e-6, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    ("parallel", "count", "told"),
    [({"sp": 2}, 2, "parallel.sp: 2"), ({"tp": 2}, 2, "parallel.tp: 2"), ({}, 5, "batch_size: 12 on 5 ranks")],
)
def test_what_cannot_be_divided_is_refused_by_name(parallel, count, told):
    with pytest.raises(ConfigError) as caught:
        check_devices(read_training(IMAGES | {"parallel": parallel}), count)
    assert any(told in line for line in caught.value.problems), caught.value
