"""Pathfinder: its distribution, its labels against the drawing, and images that depend on nothing but their place."""

import dataclasses

import numpy as np
import pytest
import torch

from linnet.data.synthetic.base import Draws
from linnet.encoders.lra import LraDataConfig, SampleCounts, prepare_lra
from linnet.encoders.lra.corpus import find_maker
from linnet.encoders.lra.pathfinder import (
    FORMS,
    GROUP,
    Drawing,
    draw_group,
    generate_pathfinder,
    hash_images,
    make_marker,
    make_stamps,
)
from linnet.encoders.lra.stage import write_lra

FULL, REDUCED, PATH_X = FORMS["pathfinder", "full"], FORMS["pathfinder", "reduced"], FORMS["path-x", "full"]


def drawn(form, groups: int, seed: int = 0) -> Drawing:
    parts = [draw_group(form, Draws(seed, "test", number)) for number in range(groups)]
    return Drawing(*(np.concatenate(found) for found in zip(*(vars(part).values() for part in parts), strict=True)))


@pytest.fixture(scope="module")
def full() -> Drawing:
    return drawn(FULL, 16)


def test_brightness(full):
    # The public generator, run for 800 images: mean 19.0 of 255, share above half 0.075; one image varies by 2.2.
    assert abs(full.images.mean() - 19.0) < 0.5
    assert abs((full.images > 127.5).mean() - 0.0755) < 0.002
    assert (full.images.min(axis=(1, 2)) == 0).all() and (full.images.max(axis=(1, 2)) == 255).all()
    assert abs(full.labels.mean() - 0.5) < 0.05


@pytest.mark.parametrize(
    "form",
    [FULL, REDUCED, pytest.param(PATH_X, marks=pytest.mark.thorough)],
    ids=["full", "reduced", "path-x"],
)
def test_discs_mark_ends_of_one_snake_or_of_two(form):
    found = drawn(form, 1)
    first, last = (
        (ends == found.marked[:, place, None]).all(axis=2) for place, ends in enumerate((found.origins, found.ends))
    )
    for one, other, label in zip(first, last, found.labels, strict=True):
        [snake] = np.flatnonzero(one)
        assert other[snake if label else 1 - snake]  # both snakes may end at the same pixel
    assert (first == last).all(axis=1).sum() >= found.labels.sum() - 5
    places = np.arange(len(found.images))[:, None]
    bright = found.images[places, found.marked[..., 0], found.marked[..., 1]]
    assert (bright > 0.8 * 255).all()


def test_long_snakes_start_at_their_distance_and_do_not_touch(full):
    away = np.linalg.norm(full.origins[:, 0] - full.origins[:, 1], axis=1)
    assert (abs(away - FULL.distance) < 1).all()
    assert (full.marked >= 0).all() and (full.marked < 32).all()


def test_the_histogram_of_pixels_does_not_tell_the_label(full):
    def features(images):
        counts = np.stack([np.bincount(image.reshape(-1) // 16, minlength=16) for image in images])
        return np.concatenate([counts, np.ones((len(images), 1))], axis=1).astype(float)

    half = len(full.labels) // 2
    known, new = features(full.images[:half]), features(full.images[half:])
    weights = np.linalg.lstsq(known.T @ known + np.eye(17), known.T @ (full.labels[:half] - 0.5), rcond=None)[0]
    right = ((new @ weights > 0) == full.labels[half:]).mean()
    assert right < 0.5 + 3 * 0.5 / half**0.5


def test_a_segment_is_drawn_between_its_ends():
    stamps = make_stamps(FULL.segments[0], 100)
    for degree in (0, 45, 90, 200):
        one = stamps.forward[degree]
        y, x = np.divmod(stamps.line.offset[one] + 50 * 100 + 50, 100)
        weight = stamps.line.value[one] / stamps.line.value[one].sum()
        centre = np.array([(y * weight).sum(), (x * weight).sum()]) - 50
        angle = (degree - 180) * np.pi / 180
        assert np.abs(centre - [np.sin(angle), np.cos(angle)]).max() < 0.6
    marker = make_marker(1.5, 100)
    y, x = np.divmod(marker.offset + 50 * 100 + 50, 100)
    assert marker.value.max() > 1  # the filter overshoots
    assert np.abs(np.stack([y, x]) - 50)[:, marker.value > 0.5].max() <= 2


def test_stamps_are_those_of_pillow():
    """Lines of one pixel, against Pillow's line and Lanczos filter, which the public generator uses."""
    image, draw = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageDraw")
    from linnet.encoders.lra import pathfinder

    segment = FULL.segments[0]
    centre, side = 2 * segment.reach, 2 * segment.reach + 1
    ends = np.unique(pathfinder._end(np.arange(360) * np.pi / 180, 2 * segment.length), axis=0)
    for y, x in ends.tolist():
        picture = image.new("F", (2 * centre + 1, 2 * centre + 1))
        draw.Draw(picture).line([(centre, centre), (centre + x, centre + y)], fill=1.0, width=1)
        expected = np.asarray(picture.resize((side, side), image.Resampling.LANCZOS))
        assert np.abs(pathfinder._picture(segment, y, x)[0] - expected).max() < 1e-6


def test_images_do_not_depend_on_how_many_are_drawn():
    few, many = (generate_pathfinder("pathfinder", "reduced", "test", 1, rows, 0) for rows in (7, GROUP + 5))
    assert few.values.shape == (7, 1, 16, 16)
    assert np.array_equal(few.values, many.values[:7]) and np.array_equal(few.labels, many.labels[:7])
    assert len(np.unique(many.hashes)) == GROUP + 5
    assert np.array_equal(hash_images(many.values), many.hashes)


def test_workers_change_no_pixel_and_splits_differ(tmp_path):
    config = LraDataConfig(
        task="pathfinder", size="reduced", samples=SampleCounts(train=60, validation=60, test=60), seed=3
    )
    corpus = prepare_lra(config, tmp_path / "one")
    write_lra(find_maker(config, None), tmp_path / "two", workers=2)
    for path in corpus.folder.iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    rows = corpus.train.rows(np.array([0, 59]))
    assert rows.inputs.dtype == torch.uint8 and rows.inputs.shape == (2, 1, 16, 16)
    assert rows.lengths.tolist() == [256, 256] and corpus.task.grid == (16, 16)
    assert not torch.equal(rows.inputs, corpus.test.rows(np.array([0, 59])).inputs)


def test_short_snakes_are_added_where_they_fit():
    with_short, without = drawn(FULL, 2), drawn(dataclasses.replace(FULL, short=0), 2)
    assert np.array_equal(with_short.origins[:5], without.origins[:5])
    more = (with_short.images > 0).sum() - (without.images > 0).sum()
    assert more > 100
