"""DeiT's augmentation by timm: exact per sample, with the generators of the process left alone."""

import importlib.util
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from linnet.config import ConfigError, parse
from linnet.vision.data import AugmentConfig, ImageBatches, ImageDataConfig, batches, prepare_images

DEIT = parse(AugmentConfig, {"kind": "deit"})


@pytest.fixture(scope="module")
def timm():
    """timm, also beside a CPU build of torch: torchvision then lacks two operators that its Python parts never call."""
    pytest.importorskip("timm", reason="timm is not installed (extra `deit`)", exc_type=ImportError)


@pytest.fixture(scope="module", autouse=True)
def operators():
    if importable("torchvision") and not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        yield library
    else:
        yield None


def importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(12):
        path = folder / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (50, 60, 3), dtype=np.uint8)).save(path)
    return prepare_images(ImageDataConfig(source=[str(folder)], size=40), tmp_path_factory.mktemp("cache"))


def test_an_image_depends_on_its_sample_alone(timm, corpus):
    batches = ImageBatches(corpus.train, 6, seed=1, augment=DEIT)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    images, labels = batches.batch(3)
    assert images.dtype == torch.float32 and images.shape == (6, 3, 40, 40) and labels.shape == (6,)
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    parts = [batches.batch(3, rank, 2)[0] for rank in range(2)]
    assert torch.equal(torch.cat(parts), images)
    workers = ImageBatches(corpus.train, 6, seed=1, augment=DEIT, workers=1)
    assert torch.equal(workers.batch(3)[0], images)
    workers.close()
    thread = ImageBatches(corpus.train, 6, seed=1, augment=DEIT)
    with ThreadPoolExecutor(1) as pool:  # as training on a GPU reads ahead: in a process of its own
        assert torch.equal(pool.submit(thread.batch, 3).result()[0], images) and thread._loader is not None
    thread.close()
    assert not torch.equal(ImageBatches(corpus.train, 6, seed=2, augment=DEIT).batch(3)[0], images)


def test_repeats_of_an_image_differ(timm, corpus):
    images, labels = ImageBatches(corpus.train, 3, seed=1, augment=DEIT).batch(0)
    assert len(labels.unique()) == 1 and not torch.equal(images[0], images[1])


def test_the_transform_is_that_of_timm(timm, corpus):
    """Under the same seeds, timm's own transform gives the same pixels."""
    from timm.data import create_transform
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    mine = batches.DeitTransform(corpus.train, 5)
    theirs = create_transform(
        40, True, color_jitter=0.3, auto_augment=batches.POLICY, interpolation="bicubic", re_prob=0.25, re_mode="pixel"
    )
    mine._seed_all(7)
    expected = theirs(corpus.train.image(2))
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
    found = mine.images(np.array([2]), np.array([7]))[0]
    torch.testing.assert_close(found, expected * std + mean)


def test_the_strongest_posterize_makes_an_image_black(timm, corpus):
    """timm asks for 0 bits there, which Pillow 13 refuses."""
    mine = batches.DeitTransform(corpus.train, 5)
    [policy] = [step for step in mine._transform.transforms if hasattr(step, "ops")]
    [op] = [op for op in policy.ops if op.name == "PosterizeIncreasing"]
    op.prob, op.magnitude, op.magnitude_std = 1.0, 10, 0
    assert not np.asarray(op(corpus.train.image(0))).any()
    op.magnitude = 9
    assert np.asarray(op(corpus.train.image(0))).any()


@pytest.mark.parametrize("side, seen", [(32, (32, 32)), (40, (60, 50))])
def test_a_small_image_is_shifted_at_the_size_at_which_it_is_scored(corpus, tmp_path, monkeypatch, side, seen):
    """A crop of 32 pixels of a photo at its own size would be another picture than the one that is scored."""
    images = []
    transform = (lambda image: images.append(image) or torch.zeros(3, side, side), (0.0,) * 3, (1.0,) * 3)
    monkeypatch.setattr(batches, "check_deit", lambda channels: [])
    monkeypatch.setattr(batches, "_transform", lambda side: transform)
    config = ImageDataConfig(source=corpus.metadata["config"]["source"], size=side)
    split = prepare_images(config, tmp_path).train
    batches.DeitTransform(split, 0).images(np.array([3]), np.array([0]))
    assert images[0].size == seen
    if side == 32:
        assert np.array_equal(np.asarray(images[0]).transpose(2, 0, 1), split.images([3])[0].numpy())


def test_grey_images_are_refused(tmp_path):
    digits = prepare_images(ImageDataConfig(), tmp_path)
    with pytest.raises(ConfigError, match="augment.kind: deit needs RGB images, but these have 1 channels"):
        ImageBatches(digits.train, 4, seed=0, augment=DEIT)


def test_what_is_not_installed_or_does_not_match_is_named(monkeypatch):
    pair = batches.torchvision_for(torch.__version__)
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.data", None)
    [problem] = batches.check_deit()
    assert problem.startswith("augment.kind: deit") and pair in problem and "whl/" in problem

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "timm":
                raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.delitem(sys.modules, "timm.data")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    [problem] = batches.check_deit()
    assert "torchvision::nms does not exist" in problem and pair in problem and "kind: crop_flip" in problem


def test_pairs_of_releases():
    assert batches.torchvision_for("2.13.0+cpu") == "torchvision==0.28.*"
    assert batches.torchvision_for("2.11.1+cu126") == "torchvision==0.26.*"
