"""`linnet sample` and `linnet evaluate samples`: files, records, and what they refuse."""

import functools
import json
import resource
import shutil
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from children import COMMAND, Child
from PIL import Image
from typer.testing import CliRunner

from linnet.cli import app
from linnet.train import read_training, train
from linnet.vision.cli.sample import read_class_list
from linnet.vision.sampler import ImageSampler, SampleConfig, spread

SMALL = {"data": {"source": "digits"}, "batch_size": 16, "run": {"device": "cpu", "checkpoint_every": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sample")


@pytest.fixture(scope="module")
def denoiser(folder):
    values = {"objective": "diffusion", "model": {"recipe": "dit-8px", "num_layers": 1}, "steps": 3}
    config = read_training(SMALL | values | {"run": SMALL["run"] | {"pictures": 0}})
    return train(config, folder / "runs", folder / "cache").path


@pytest.fixture(scope="module")
def classifier(folder):
    values = {"objective": "images", "model": {"recipe": "vit-8px", "num_layers": 1}, "steps": 3}
    return train(read_training(SMALL | values), folder / "runs", folder / "cache").path


def run(*words) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*words) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.thorough)])  # builds C++
def test_samples_are_files_with_a_record(denoiser, tmp_path, monkeypatch, backend):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    run("sample", denoiser, "--classes", "7,1-3", "--count", 6, "--steps", 4, "--guidance", 2, "--out", tmp_path / "a")
    record = json.loads((tmp_path / "a" / "samples.json").read_text())
    assert [one["class"] for one in record["samples"]] == [7, 1, 2, 3, 7, 1]
    assert record["settings"] == {
        "sampler": "ddim", "steps": 4, "guidance": 2.0, "guidance_channels": None, "seed": 0
    }  # fmt: skip
    assert record["step"] == 3 and record["weights"] == "average" and record["images_per_second"] > 0
    images = [Image.open(tmp_path / "a" / one["file"]) for one in record["samples"]]
    assert {image.size for image in images} == {(8, 8)} and record["samples"][0]["file"] == "000000-class7.png"
    assert Image.open(tmp_path / "a" / "grid.png").size == (4 * 9 - 1, 2 * 9 - 1)
    # the same seed and index give the same image, whatever else is drawn, compiled too
    torch._dynamo.utils.counters.clear()
    run("sample", denoiser, "--classes", "7,1-3", "--count", 2, "--first", 3, "--batch", 1, "--steps", 4, "--guidance",
        2, "--compile", "--out", tmp_path / "b")  # fmt: skip
    later = json.loads((tmp_path / "b" / "samples.json").read_text())
    assert later["compiled"] and not record["compiled"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [(one["index"], one["class"]) for one in later["samples"]] == [(3, 3), (4, 7)]
    for one, before in zip(later["samples"], images[3:5], strict=True):
        gap = np.asarray(Image.open(tmp_path / "b" / one["file"])).astype(int) - np.asarray(before)
        assert np.abs(gap).max() <= 1  # a batch of another size may round differently
    other = json.loads(run("sample", denoiser, "--count", 1, "--seed", 1, "--steps", 4, "--weights", "raw", "--sampler",
                           "ddpm", "--json", "--out", tmp_path / "c"))  # fmt: skip
    assert other["weights"] == "raw" and other["settings"]["guidance"] == 1.5


def test_bad_samples_are_told_at_once(denoiser, classifier, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    told = refused("sample", denoiser, "--classes", "3,12,x,5-2", "--count", 0, "--steps", 2000, "--out",
                   tmp_path / "full")  # fmt: skip
    for words in ("--count: 0", "--steps", "2000", "--out", "12 is unknown", "'x'", "'5-2'"):
        assert words in told
    assert "denoiser" in refused("sample", classifier, "--out", tmp_path / "no")
    assert "guidance_channels" not in refused("sample", denoiser, "--guidance-channels", 3, "--out", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_guidance_needs_dropped_classes(folder, tmp_path):
    model = {"recipe": "dit-8px", "num_layers": 1, "class_drop": 0.0}
    values = {"objective": "diffusion", "model": model, "steps": 1, "run": SMALL["run"] | {"pictures": 0}}
    path = train(read_training(SMALL | values), folder / "runs", folder / "cache").path
    assert "class_drop" in refused("sample", path, "--guidance", 2, "--out", tmp_path / "no")
    record = json.loads(run("sample", path, "--count", 2, "--steps", 2, "--json", "--out", tmp_path / "yes"))
    assert record["settings"]["guidance"] == 1.0


def test_lists_of_classes():
    problems = []
    assert read_class_list("1-3, 0,cat", 5, ["dog", "cat", "owl", "bee", "ant"], problems) == [1, 2, 3, 0, 1]
    assert read_class_list(None, 3, None, problems) == [0, 1, 2] and not problems
    folders = sorted(map(str, range(12)))  # 0, 1, 10, 11, 2, ...
    assert [folders[index] for index in read_class_list("2,9-11", 12, folders, problems)] == ["2", "9", "10", "11"]
    assert read_class_list("3,1-2", 3, ["1", "2", "3"], problems) == [2, 0, 1] and not problems
    read_class_list("0,3-1", 3, ["1", "2", "3"], problems)
    assert [problem.partition(" is ")[0] for problem in problems] == ["--classes: '0'", "--classes: '3-1'"]
    problems.clear()
    read_class_list("4-2,,cow", 5, None, problems)
    assert len(problems) == 3
    assert spread([4, 5], 5) == [4, 5, 4, 5, 4]


def test_latents_are_an_array(tmp_path):
    latents = np.random.default_rng(0).standard_normal((20, 4, 8, 8)).astype(np.float16)
    np.savez(tmp_path / "latents.npz", images=latents, labels=np.arange(20) % 2)
    values = {
        "objective": "diffusion",
        "data": {"source": str(tmp_path / "latents.npz"), "kind": "latents"},
        "model": {"recipe": "lightnet-dit-8px", "num_layers": 1, "channels": 4, "classes": 2},
        "steps": 1,
        "batch_size": 8,
    }
    path = train(read_training(SMALL | values), tmp_path / "runs", tmp_path / "cache").path
    run("sample", path, "--count", 3, "--steps", 2, "--out", tmp_path / "out")
    made = np.load(tmp_path / "out" / "latents.npz")
    assert made["images"].shape == (3, 4, 8, 8) and made["labels"].tolist() == [0, 1, 0]
    assert np.abs(made["images"]).max() > 2  # of the scale that the data have, and not clipped
    told = refused("evaluate", "samples", path, "--extractor", path)
    assert "latents" in told and "classifier" in told


def test_samples_are_scored_against_real_images(denoiser, classifier, folder):
    words = ["evaluate", "samples", denoiser, "--extractor", classifier, "--cache", folder / "cache", "--steps", 3]
    out = json.loads(run(*words, "--samples", 24, "--batch", 10, "--json"))["samples"]
    values = {one["metric"]: one for one in out["results"]}
    name = classifier.name
    assert list(values) == [f"fd-{name}", f"kd-{name}", "asked_class", "memorised", "precision", "recall"]
    assert values[f"fd-{name}"]["value"] > out["detail"]["real"][f"fd-{name}"] > 0
    assert values["asked_class"]["n"] == 24 and 0 <= values["memorised"]["value"] <= 1
    assert out["asked"]["steps"] == 3 and out["asked"]["extractor"] == name and out["detail"]["png"]
    assert 0 <= values["recall"]["value"] <= 1
    shown = run(*words, "--samples", 12)
    assert "asked class" in shown and "training images that lie among samples" in shown
    assert "recall" not in run(*words, "--samples", 3)  # fewer than the neighbours


@contextmanager
def files_of_at_most(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_call_that_fails_can_run_again(denoiser, tmp_path):
    words = ["sample", denoiser, "--count", 6, "--steps", 2, "--out", tmp_path / "out"]
    with files_of_at_most(700):  # of images, and less than the record has
        assert "out: cannot be written: the disk is full" in refused(*words)
    with files_of_at_most(10):
        assert "out: cannot be written: the disk is full" in refused(*words)
    assert not (tmp_path / "out").exists()
    run(*words)
    assert len(list((tmp_path / "out").iterdir())) == 8


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_is_stopped_leaves_no_images(denoiser, tmp_path, number):
    out = tmp_path / "out"
    words = ["sample", denoiser, "--count", 5000, "--batch", 8, "--steps", 2, "--out", out]
    child = Child(COMMAND, *words)
    deadline = time.monotonic() + 120
    while len(list(out.glob("*/*.png"))) < 9 and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(number)
    assert child.wait() == 128 + number, child.output()
    assert not out.exists()


def test_samples_are_scored_where_features_cannot_be_kept(denoiser, classifier, folder):
    shutil.rmtree(folder / "cache" / "features", ignore_errors=True)
    words = ["evaluate", "samples", denoiser, "--extractor", classifier, "--cache", folder / "cache", "--steps", 2]
    with files_of_at_most(50_000):
        done = CliRunner().invoke(app, [str(word) for word in [*words, "--samples", 4]])
    assert done.exit_code == 0 and "not kept" in done.stderr and "asked class" in done.stdout, done.output
    assert not list((folder / "cache" / "features").iterdir())


def test_all_problems_of_scoring_samples_come_at_once(denoiser, classifier, tmp_path):
    (tmp_path / "file").touch()
    wrong = {"--samples": 1, "--steps": 5000, "--guidance-channels": 2, "--cache": tmp_path / "file" / "cache"}
    told = refused("evaluate", "samples", denoiser, "--extractor", denoiser, "--classifier", "absent",
                   *[str(word) for pair in wrong.items() for word in pair])  # fmt: skip
    for option in (*wrong, "--extractor", "--classifier"):
        assert told.count(f"- {option}: ") == 1, (option, told)
    told = refused("evaluate", "samples", classifier, "--extractor", "absent", "--samples", 1)
    assert "a denoiser is needed" in told and "--extractor: 'absent'" in told and "--samples: 1" in told


def test_precision_of_products(denoiser):
    half, whole = (ImageSampler.of_run(denoiser, precision=name) for name in ("bfloat16", "float32"))
    one, other = (torch.cat(list(each.draw([0, 1], SampleConfig(steps=3)))) for each in (half, whole))
    assert one.dtype == torch.uint8 and (one.int() - other.int()).abs().max() < 60
