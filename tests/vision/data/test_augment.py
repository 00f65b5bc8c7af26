"""Augmentation of batches: crops and flips against single images, MixUp and CutMix against their definition."""

import math

import numpy as np
import pytest
import torch

from linnet.config import parse
from linnet.data.synthetic.base import Draws
from linnet.vision.data import AugmentConfig
from linnet.vision.data.augment import _beta, augment_batch, crop_flip, flip, mix_images, mixing

GIVEN = {"seed": 5, "position": 11}


@pytest.fixture
def images():
    return torch.randint(0, 256, (16, 3, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_crop_flip_is_a_shifted_and_perhaps_mirrored_image(images):
    found = crop_flip(images, padding=2, **GIVEN)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for row, image in enumerate(found):
        cases = {
            (down, right, mirrored): padded[row, :, down : down + 6, right : right + 8]
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
        }
        [case] = [key for key, crop in cases.items() if torch.equal(crop.flip(2) if key[2] else crop, image)]
        seen.add(case)
    assert len(seen) > 8 and {mirrored for *_, mirrored in seen} == {False, True}
    assert found.dtype == torch.uint8 and found.is_contiguous()


def test_flip_mirrors_half_of_the_images(images):
    many = images.repeat(64, 1, 1, 1)
    same = (flip(many, **GIVEN) == many).flatten(1).all(1)
    assert torch.equal(flip(many, **GIVEN)[~same], many[~same].flip(3)) and 0.45 < same.float().mean() < 0.55


@pytest.mark.parametrize("kind", ["flip", "crop_flip"])
@pytest.mark.parametrize("mixed", [{}, {"mixup": 0.4, "cutmix": 1.0, "smoothing": 0.1}])
def test_ranks_take_their_rows_of_the_global_batch(images, kind, mixed):
    config = parse(AugmentConfig, {"kind": kind, **mixed})
    labels = torch.arange(16) % 5
    whole = augment_batch(config, (images, labels), classes=5, **GIVEN)
    for world in (2, 4):
        size = 16 // world
        for rank in range(world):
            rows = slice(rank * size, rank * size + size)
            part = augment_batch(
                config, (images[rows], labels[rows]), classes=5, rank=rank, world=world, batch_size=16, **GIVEN
            )
            assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])
    assert not torch.equal(augment_batch(config, (images, labels), classes=5, seed=5, position=12)[0], whole[0])


def test_nothing_is_changed_without_augmentation(images):
    labels = torch.zeros(16, dtype=torch.int64)
    found = augment_batch(AugmentConfig(smoothing=0.1), (images, labels), classes=2, **GIVEN)
    assert found[0] is images and found[1] is labels


def test_mixup_is_the_weighted_mean_of_two_images_and_of_their_labels(images):
    labels = torch.arange(16) % 5
    found, soft = mix_images(images, labels, classes=5, mixup=0.8, smoothing=0.1, **GIVEN)
    cut, share, _ = mixing(6, 8, 5, 11, 0.8, 0.0, 0.5)
    assert not cut and 0 < share < 1
    hot = torch.nn.functional.one_hot(labels, 5) * 0.9 + 0.02
    for row in range(16):
        other = row ^ 1
        torch.testing.assert_close(found[row], (share * images[row] + (1 - share) * images[other].float()) / 255)
        torch.testing.assert_close(soft[row], share * hot[row] + (1 - share) * hot[other])


def test_cutmix_takes_a_box_from_the_other_image(images):
    labels = torch.arange(16) % 5
    found, soft = mix_images(images, labels, classes=5, cutmix=1.0, **GIVEN)
    cut, share, (top, bottom, left, right) = mixing(6, 8, 5, 11, 0.0, 1.0, 0.5)
    assert cut and share == 1 - (bottom - top) * (right - left) / 48 and share < 1
    expected = images.float() / 255
    box = expected.unflatten(0, (8, 2)).flip(1).flatten(0, 1)[..., top:bottom, left:right]
    expected[..., top:bottom, left:right] = box
    assert torch.equal(found, expected)
    torch.testing.assert_close(soft.sum(1), torch.ones(16))
    assert soft[0, labels[0]] == pytest.approx(share)


def test_the_law_of_lambda_and_of_the_switch():
    draws = [mixing(32, 32, 0, position, 0.8, 1.0, 0.5) for position in range(1500)]
    cut = np.array([cut for cut, _, _ in draws])
    assert abs(cut.mean() - 0.5) < 0.04
    plain = np.array([share for is_cut, share, _ in draws if not is_cut])
    # Beta(a, a): mean 1/2, variance 1 / (4 (2a + 1)).
    assert abs(plain.mean() - 0.5) < 0.04 and abs(plain.var() - 1 / (4 * 2.6)) < 0.01
    for alpha in (0.001, 0.2, 4.0):
        stream = Draws(1, "test")
        values = np.array([_beta(stream, alpha) for _ in range(800)])
        assert abs(values.mean() - 0.5) < 5 / math.sqrt(4 * (2 * alpha + 1) * 800)
        assert values.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.15)


def test_boxes_are_those_of_timm():
    """The same size and centre give the box of timm's `rand_bbox` with its default arguments."""
    for position in range(200):
        cut, share, (top, bottom, left, right) = mixing(12, 10, 7, position, 0.0, 1.0, 0.5)
        draws = Draws(7, "mix", position)
        draws.uniform(1)
        ratio = math.sqrt(1 - _beta(draws, 1.0))
        tall, wide = int(12 * ratio), int(10 * ratio)
        y, x = int(draws.integers(12, 1)[0]), int(draws.integers(10, 1)[0])
        lows, highs = (
            np.clip([y - tall // 2, x - wide // 2], 0, [12, 10]),
            np.clip([y + tall // 2, x + wide // 2], 0, [12, 10]),
        )
        assert cut and [top, left] == list(lows) and [bottom, right] == list(highs)
        assert share == 1 - np.prod(highs - lows) / 120


def test_odd_batches_cannot_be_mixed(images):
    with pytest.raises(ValueError, match="batch_size: 15"):
        mix_images(images[:15], torch.zeros(15, dtype=torch.int64), classes=2, mixup=1.0, **GIVEN)
    config = parse(AugmentConfig, {"mixup": 0.8})
    assert config.problems(16, 4) == [] and AugmentConfig().problems(1) == []
    for size, world in ((1, 1), (15, 1), (6, 2)):
        [problem] = config.problems(size, world)
        assert problem.startswith(f"batch_size: {size}") and "mixup" in problem
