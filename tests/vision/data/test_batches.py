"""Batches of images: a pure function of (seed, position) for any number of workers and ranks."""

import os
import pickle
import signal
import threading

import numpy as np
import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.vision.data import AugmentConfig, ImageBatches, ImageDataConfig, prepare_images
from linnet.vision.data.batches import paired


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return prepare_images(ImageDataConfig(), tmp_path_factory.mktemp("cache"))


def test_digits_hold_out_their_last_images(digits):
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    assert (len(digits.train), len(digits.validation)) == (1500, 297)
    assert (digits.channels, digits.side, digits.classes) == (1, 8, [str(n) for n in range(10)])
    images = digits.validation.images(slice(None))
    assert images.dtype == torch.uint8 and images.shape == (297, 1, 8, 8)
    assert np.array_equal(np.rint(images.numpy().reshape(297, 64) / 255 * 16), values[1500:])
    assert np.array_equal(digits.validation.labels(slice(None)), labels[1500:])
    mean = digits.train.images(slice(None)).double().mean() / 255
    assert digits.mean == pytest.approx([float(mean)], abs=1e-6)


def test_an_epoch_reads_each_image_once_and_batches_do_not_depend_on_ranks(digits):
    batches = ImageBatches(digits.train, 100, seed=3)
    seen = [batches.batch(position) for position in range(15)]
    every = torch.cat([images for images, _ in seen]).flatten(1)
    assert torch.equal(every.unique(dim=0), digits.train.images(slice(None)).flatten(1).unique(dim=0))
    assert torch.cat([labels for _, labels in seen]).bincount().equal(digits.train.labels(slice(None)).bincount())
    assert not torch.equal(batches.batch(15)[0], seen[0][0]) and batches.epoch(15) == 1
    assert torch.equal(ImageBatches(digits.train, 100, seed=3).batch(7)[0], seen[7][0])
    assert not torch.equal(ImageBatches(digits.train, 100, seed=4).batch(7)[0], seen[7][0])
    for world in (2, 3, 7):
        parts = [batches.batch(7, rank, world) for rank in range(world)]
        assert all(torch.equal(torch.cat([part[n] for part in parts]), seen[7][n]) for n in (0, 1))


def test_the_same_batches_with_workers_at_any_position(digits):
    alone = ImageBatches(digits.train, 64, seed=1)
    for workers in (1, 4):
        batches = ImageBatches(digits.train, 64, seed=1, workers=workers)
        for position in (5, 6, 7, 30, 31):  # also after a jump, as a rollback makes it
            assert all(torch.equal(a, b) for a, b in zip(batches.batch(position), alone.batch(position), strict=True))
        batches.close()


def test_workers_decode_parts_of_a_batch(layouts, tmp_path, monkeypatch):
    """Encoded images, and batches larger than what a worker makes at a time."""
    monkeypatch.setattr("linnet.vision.data.batches.PART", 3)
    split = prepare_images(parse(ImageDataConfig, {"source": str(layouts.folders()), "size": 8}), tmp_path).train
    alone, batches = ImageBatches(split, 8, seed=1), ImageBatches(split, 8, seed=1, workers=2)
    assert split.image(0).size == (6, 6)
    for position in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(batches.batch(position), alone.batch(position), strict=True))
    for rank in range(3):
        found, expected = batches.batch(4, rank, 3), alone.batch(4, rank, 3)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert len(batches.batch(0, 1, 9)[0]) + len(batches.batch(0, 0, 9)[0]) == 1  # more ranks than rows
    batches.close()


def test_a_killed_worker_is_named(digits):
    batches = ImageBatches(digits.train, 64, seed=1, workers=1)
    batches.batch(0)
    [worker] = batches._processes
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(ConfigError, match=f"workers: 1 .*process {worker.pid} was killed"):
        for position in range(1, 9):
            batches.batch(position)
    batches.batch(9)  # new workers
    batches.close()


def test_a_worker_that_is_killed_with_a_lock_holds_nobody(digits):
    batches = ImageBatches(digits.train, 64, seed=1, workers=1)
    batches.batch(0)
    batches._loader._workers_done_event._cond.acquire()  # as the process that looked at the event
    os.kill(batches._processes[0].pid, signal.SIGKILL)
    batches._processes[0].join()
    problems = []

    def read() -> None:
        try:
            for position in range(1, 9):
                batches.batch(position)
        except ConfigError as error:
            problems.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and "was killed" in problems[0]


def test_repeats_read_an_image_several_times_in_a_row(digits):
    batches = ImageBatches(digits.train, 30, seed=2, repeats=3)
    images, _ = batches.batch(4)
    inverse = np.argsort(paired(30))
    in_order = images[inverse]
    assert torch.equal(in_order[::3], in_order[1::3]) and torch.equal(in_order[::3], in_order[2::3])
    once = ImageBatches(digits.train, 10, seed=2).batch(4)[0][np.argsort(paired(10))]
    assert torch.equal(in_order[::3], once)
    # The next epoch has another order: 1,500 samples of 500 images each.
    assert not torch.equal(batches.batch(50)[0], batches.batch(0)[0])


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_rows_that_are_mixed_are_neighbours(size):
    rows = paired(size)
    assert sorted(rows) == list(range(size))
    assert all(rows[k] + rows[k + 1] == size - 1 for k in range(0, size - 1, 2))


def test_a_split_is_opened_again_rather_than_copied(digits):
    assert len(pickle.dumps(digits.train)) < 5_000
    again = pickle.loads(pickle.dumps(digits.train))
    assert torch.equal(again.images([3, 1]), digits.train.images([3, 1]))


@pytest.mark.parametrize("values", [{"batch_size": 0}, {"repeats": 0}, {"workers": -1}])
def test_sizes_are_checked(digits, values):
    with pytest.raises(ValueError, match=next(iter(values))):
        ImageBatches(digits.train, **{"batch_size": 4, "seed": 0, **values})
    with pytest.raises(ValueError, match="rank"):
        ImageBatches(digits.train, 4, seed=0).batch(0, rank=2, world=2)


def test_deit_starts_from_published_values():
    assert parse(AugmentConfig, {"kind": "deit", "mixup": 0.2}).model_dump() == {
        "kind": "deit",
        "padding": 4,
        "mixup": 0.2,
        "cutmix": 1.0,
        "switch": 0.5,
        "smoothing": 0.1,
        "repeats": 3,
    }
