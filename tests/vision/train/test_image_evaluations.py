"""Evaluations while classifiers and denoisers train: what they find, that they change nothing, and exact resume."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from children import Child
from safetensors.torch import load_file, save_file

from linnet.config import ConfigError
from linnet.evaluate import session
from linnet.runs import RunFolder, latest_good
from linnet.runs.model import load_model
from linnet.train import read_training, run_folder, train
from linnet.train.identity import digest_of
from linnet.vision.data import ImageDataConfig, prepare_images
from linnet.vision.evaluate.images import score_images
from linnet.vision.evaluate.samples import SampleEvaluator
from linnet.vision.sampler import SampleConfig

VARYING = {"images_per_second", "seconds", "memory_bytes", "flop_utilisation"}
IMAGES = {
    "objective": "images",
    "data": {"source": ["digits"], "max_images": 300},
    "model": {"recipe": "vit-8px", "num_layers": 1, "drop_path": 0.2},
    "augment": {"kind": "crop_flip", "padding": 1, "mixup": 0.4},
    "average": {"decay": 0.5},
    "batch_size": 16,
    "steps": 8,
    "optimizer": {"learning_rate": 3e-3},
    "run": {"device": "cpu", "log_every": 1, "checkpoint_every": 0, "keep_checkpoints": 9},
}
NOISE = IMAGES | {
    "objective": "diffusion",
    "model": {"recipe": "dit-8px", "num_layers": 1, "class_drop": 0.2},
    "augment": "flip",
    "run": IMAGES["run"] | {"pictures": 0},
}

# Kills itself when the record gets its `number`-th row of evaluations.
KILLED = """
import os, signal, sys, torch
from linnet.config import read_yaml
from linnet.train import read_training, train
torch.set_num_threads(1)
config, root, cache, number = sys.argv[1:]
left = int(number)
def watch(row):
    global left
    left -= "evaluation" in row
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
train(read_training(read_yaml(config)), root, cache, watch)
"""


@pytest.fixture(scope="module")
def noisy(tmp_path_factory, cache) -> Path:
    """The held-out digits with noise, as an array."""
    held_out = prepare_images(ImageDataConfig(), cache).validation
    images = held_out.images(slice(None)).numpy()[:, 0]
    images = np.clip(images + np.random.default_rng(0).normal(0, 50, images.shape), 0, 255).astype(np.uint8)
    path = tmp_path_factory.mktemp("noisy") / "noisy.npz"
    np.savez(path, images=images, labels=held_out.labels(slice(None)).numpy())
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, cache) -> Path:
    """The run of a classifier of digits."""
    values = IMAGES | {"augment": "none", "steps": 30, "batch_size": 64, "average": None}
    return train(read_training(values), tmp_path_factory.mktemp("classifier"), cache).path


@pytest.fixture(scope="module")
def asked(noisy, classifier) -> dict[str, dict]:
    """A training of each objective with two evaluations, which come together at steps 4 and 8."""
    return {
        "images": IMAGES
        | {
            "evaluations": [
                {"kind": "images", "name": "noisy", "source": str(noisy), "every": 2},
                {"kind": "images", "split": "test", "most_images": 100, "every": 4},
            ]
        },
        "diffusion": NOISE
        | {
            "evaluations": [
                {"kind": "samples", "extractor": str(classifier), "number": 24, "steps": 3, "guidance": 2.0,
                 "batch": 10, "every": 2},
                {"kind": "samples", "name": "few", "extractor": str(classifier), "number": 8, "steps": 2,
                 "sampler": "ddpm", "classes": [3, 8], "every": 4},
            ]
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(asked, cache, tmp_path_factory) -> dict[str, RunFolder]:
    return {name: train(read_training(values), tmp_path_factory.mktemp(name), cache) for name, values in asked.items()}


def rows(run: RunFolder, of_evaluations: bool) -> list[dict]:
    found = [row for row in run.metrics() if ("evaluation" in row) == of_evaluations]
    return [{key: value for key, value in row.items() if key not in VARYING} for row in found]


def same_training(run: RunFolder, other: RunFolder) -> None:
    assert rows(run, False) == rows(other, False)
    ours, theirs = (latest_good(one.checkpoint_folder)[1] for one in (run, other))
    assert set(ours) == set(theirs) == {"model", "average", "optimizer", "random"}
    for group in theirs:
        assert all(torch.equal(ours[group][name], tensor) for name, tensor in theirs[group].items()), group


def test_a_classifier_is_scored_on_further_images(whole, noisy, cache):
    run = whole["images"]
    found = rows(run, True)
    assert [(row["step"], row["evaluation"]) for row in found] == [
        (2, "noisy"), (4, "noisy"), (4, "images"), (6, "noisy"), (8, "noisy"), (8, "images"),
    ]  # fmt: skip
    assert run.result()["evaluations"] == {row["evaluation"]: row["metrics"] for row in found[-2:]}
    model, _ = load_model(run.path, kinds=("classifier",))  # with the averaged weights
    split = prepare_images(ImageDataConfig(source=[str(noisy)]), cache, whole=True).validation
    score = score_images(model, split, split.classes)
    values = {one.metric: one.value for one in score.results()}
    last = found[-2]
    assert last["metrics"] == {
        "accuracy": values["accuracy"], "top5_accuracy": values["top5_accuracy"], "loss": values["nll"],
    }  # fmt: skip
    assert last["shown"] == ["accuracy", "loss"] and last["chance"] == {"accuracy": 0.1, "top5_accuracy": 0.5}
    assert (last["kind"], last["questions"], last["images"]) == ("images", 297, 8 * 16)
    assert found[-1]["questions"] == 100
    raw, _ = load_model(run.path, kinds=("classifier",), weights="raw")
    assert score_images(raw, split, split.classes).scores.nll.mean() != last["metrics"]["loss"]


def test_samples_are_measured_as_those_of_the_checkpoint(whole, classifier, cache):
    run = whole["diffusion"]
    found = rows(run, True)
    assert [(row["step"], row["evaluation"]) for row in found] == [
        (2, "samples"), (4, "samples"), (4, "few"), (6, "samples"), (8, "samples"), (8, "few"),
    ]  # fmt: skip
    settings = SampleConfig(steps=3, guidance=2.0)
    evaluator = SampleEvaluator(extractor=str(classifier), count=24, settings=settings, batch=10, cache=cache)
    record = evaluator.run(session.prepare(run.path, [evaluator]))
    last = found[-2]
    assert last["metrics"] == {one.metric: one.value for one in record.results}
    fd, kd = f"fd-{classifier.name}", f"kd-{classifier.name}"
    assert last["shown"] == [fd, kd, "asked_class"] and last["chance"] == {"asked_class": 0.1}
    assert (last["kind"], last["questions"]) == ("samples", 24)
    assert len({row["metrics"][fd] for row in found}) == len(found)


@pytest.mark.parametrize("objective", ["images", "diffusion"])
def test_training_is_the_same_bit_for_bit(whole, asked, cache, tmp_path, objective):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    without = train(read_training(asked[objective] | {"evaluations": []}), tmp_path, cache)
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]
    assert not rows(without, True)
    same_training(whole[objective], without)


@pytest.mark.parametrize("objective", ["images", "diffusion"])
@pytest.mark.parametrize("number", [2, 6])  # between two evaluations of one step, after the last one
def test_after_a_kill_each_is_made_once(whole, asked, cache, tmp_path, objective, number):
    config = read_training(asked[objective])
    child = Child(KILLED, whole[objective].path / "config.yaml", tmp_path, cache, number)
    assert child.wait() == -signal.SIGKILL, child.output()
    made = [row for row in run_folder(config, tmp_path).metrics() if "evaluation" in row]
    assert len(made) == number
    run = train(config, tmp_path, cache)
    assert [row for row in run.metrics() if "evaluation" in row][:number] == made
    assert rows(run, True) == rows(whole[objective], True)
    same_training(run, whole[objective])


def test_one_that_fails_is_recorded_and_training_goes_on(whole, asked, cache, tmp_path):
    shutil.copytree(cache, tmp_path / "cache")
    for path in (tmp_path / "cache" / "features").iterdir():  # features of real images of another width
        save_file({name: tensor[..., :7].contiguous() for name, tensor in load_file(path).items()}, path)
    run = train(read_training(asked["diffusion"]), tmp_path / "runs", tmp_path / "cache")
    failed = [row for row in run.metrics() if row.get("event") == "evaluation_failed"]
    assert [row["step"] for row in failed] == [2, 4, 4, 6, 8, 8] and failed[0]["error"]
    assert run.result()["status"] == "done" and run.result()["evaluations"] == {}
    same_training(run, whole["diffusion"])


def test_no_name_changes_without_evaluations(asked):
    for values in asked.values():
        plain, with_them = (read_training(values | {"evaluations": given}) for given in ([], values["evaluations"]))
        assert "evaluations" not in plain.model_dump()
        assert digest_of(plain, None) == digest_of(
            read_training({key: value for key, value in values.items() if key != "evaluations"}), None
        )
        other = [one | {"every": 7} for one in values["evaluations"]]
        assert digest_of(with_them, None) == digest_of(read_training(values | {"evaluations": other}), None)
        assert digest_of(with_them, None) != digest_of(plain, None)
        assert read_training(with_them.model_dump(mode="json")) == with_them


def problems(values: dict, tmp_path: Path, cache: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        train(read_training(values), tmp_path / "runs", cache)
    assert not list((tmp_path / "runs").glob("*-*")), "a folder was made"
    return caught.value.problems


def test_keys_are_checked_at_once(asked, noisy):
    wrong = [
        {"kind": "text", "source": str(noisy)},
        {"kind": "images", "source": 3, "every": 0, "most_images": 0, "depth": 1},
        {"kind": "images", "name": "a b"},
    ]
    with pytest.raises(ConfigError) as caught:
        read_training(asked["images"] | {"evaluations": wrong})
    told = "\n".join(caught.value.problems)
    for key in ("0.kind", "1.source", "1.every", "1.most_images", "1.depth", "2.name"):
        assert f"evaluations.{key}" in told, (key, told)
    wrong = [{"kind": "images"}, {"kind": "samples"}, {"kind": "samples", "extractor": "x", "number": 1, "steps": 0}]
    with pytest.raises(ConfigError) as caught:
        read_training(asked["diffusion"] | {"evaluations": wrong})
    told = "\n".join(caught.value.problems)
    for key in ("0.kind", "1.extractor", "2.number", "2.steps"):
        assert f"evaluations.{key}" in told, (key, told)
    twice = [{"kind": "images", "every": 3}] * 2
    with pytest.raises(ConfigError, match="'images' is the name of several .*checkpoint_every"):
        read_training(asked["images"] | {"evaluations": twice, "guard": {"policy": "rollback"}})


def test_images_that_do_not_fit_are_told_before(asked, noisy, cache, tmp_path):
    np.savez(tmp_path / "eleven.npz", images=np.zeros((11, 8, 8), dtype=np.uint8), labels=np.arange(11))
    (tmp_path / "broken" / "3").mkdir(parents=True)
    (tmp_path / "broken" / "3" / "a.png").write_bytes(b"")
    wrong = [
        {"kind": "images", "name": "missing", "source": str(tmp_path / "missing")},
        {"kind": "images", "name": "own", "source": "digits", "split": "train"},
        {"kind": "images", "name": "part", "split": "validation"},
        {"kind": "images", "name": "eleven", "source": str(tmp_path / "eleven.npz")},
        {"kind": "images", "name": "broken", "source": [str(tmp_path / "broken")]},
    ]
    told = problems(asked["images"] | {"evaluations": wrong}, tmp_path, cache)
    starts = [line.split(":")[0] for line in told]
    assert starts == [f"evaluations.{place} ({one['name']})" for place, one in enumerate(wrong)], told
    keys = ("source: ", "source: digits (train) is trained on", "split: ", "eleven.npz", "a.png")
    assert all(key in line for key, line in zip(keys, told, strict=True)), told
    for part in ("train", "test"):
        shutil.copytree(tmp_path / "broken", tmp_path / "parts" / part)
    for source, given in (
        ("parts", {"source": str(tmp_path / "parts" / "train")}),  # by another path
        ("parts/train", {"source": str(tmp_path / "parts"), "split": "train"}),
    ):
        values = asked["images"] | {"data": {"source": str(tmp_path / source), "validation_fraction": 0.5}}
        told = problems(values | {"evaluations": [{"kind": "images"} | given]}, tmp_path, cache)
        assert any("train is trained on" in line or "(train) is trained on" in line for line in told), told
    # Those that need no data are found although the data are unusable.
    told = problems(asked["images"] | {"data": "nothing", "evaluations": wrong}, tmp_path, cache)
    assert "nothing" in told[0] and [line.split(":")[0] for line in told[1:]] == starts[:1]


def test_samples_that_cannot_be_measured_are_told_before(asked, classifier, cache, tmp_path):
    wrong = [
        {"kind": "samples", "name": "missing", "extractor": str(tmp_path / "missing"), "guidance": 2.0},
        {"kind": "samples", "name": "other", "extractor": str(classifier), "classifier": str(tmp_path),
         "classes": [0, 10], "guidance_channels": 2},
    ]  # fmt: skip
    model = NOISE["model"] | {"class_drop": 0.0}
    told = problems(asked["diffusion"] | {"model": model, "evaluations": wrong}, tmp_path, cache)
    for place, key in ((0, "guidance"), (0, "extractor"), (1, "classes"), (1, "guidance_channels")):
        start = f"evaluations.{place} ({wrong[place]['name']}): {key}: "
        assert any(line.startswith(start) for line in told), (start, told)
    assert any(line.startswith("evaluations.1") and str(tmp_path) in line for line in told)
    # An extractor of other images, and latents, which nothing here decodes.
    latents = np.random.default_rng(0).standard_normal((20, 4, 8, 8)).astype(np.float16)
    np.savez(tmp_path / "latents.npz", images=latents, labels=np.arange(20) % 10)
    values = {
        "data": {"source": str(tmp_path / "latents.npz"), "kind": "latents"},
        "model": NOISE["model"] | {"channels": 4},
        "augment": "none",
        "evaluations": [{"kind": "samples", "extractor": str(classifier)}],
    }
    told = "\n".join(problems(asked["diffusion"] | values, tmp_path, cache))
    assert "evaluations.0 (samples): data.kind: latents" in told and "images of 1 channels" in told
