"""Batches of images: a pure function of (seed, position), so there is no loader state to save.

Sample g = position * batch_size + j (in batches that grow, all rows before the position + j) is at place p = g % N of
epoch g // N, and reads the image that `linnet.data.order` gives to place p // repeats of this epoch. So an epoch has N
samples also if each image is repeated.

Row 2k of a batch is sample k and row 2k + 1 is sample B - 1 - k: rows that MixUp and CutMix combine are neighbours, and
a rank that takes an even number of rows has both.
"""

import itertools
import multiprocessing
import random
import signal
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from linnet.config import ConfigError, refuse
from linnet.data.images import decode
from linnet.data.labelled import LabelledBatches
from linnet.data.order import hash64, shuffled
from linnet.data.sizes import BatchSizes
from linnet.install import install_command
from linnet.ops.compat_torch import abandon_workers
from linnet.provenance import installed_version
from linnet.trust import safe_path
from linnet.vision.data import AugmentConfig
from linnet.vision.data.corpus import ImageSplit

if TYPE_CHECKING:
    from PIL.Image import Image

Key = tuple[int, int, int]  # position, first row, end of the rows
AHEAD = 2  # parts of batches that each worker process prepares in advance
PART = 64  # rows that a worker process prepares at a time: they pass through shared memory, which is small


class ImageBatches(LabelledBatches):
    """The training batches of a run.

    Args:
        split: the images, usually `corpus.train`.
        batch_size: rows per step, over all ranks; or those of each step.
        seed: seed of the order, and of augmentation that works on single images (`deit`).
        augment: augmentation. Crops, flips and mixing are applied later, on the device, by `augment_batch`.
        workers: processes that decode; 0 decodes in the calling process (`deit` outside the main thread uses one).
            Batches do not depend on it.
        repeats: times that an image is read in a row; None takes `augment.repeats`.

    Raises:
        ValueError: a size is below 1, or `workers` is negative.
        ConfigError: `deit` without timm or a torchvision that matches torch.
    """

    def __init__(
        self,
        split: ImageSplit,
        batch_size: int | BatchSizes,
        seed: int,
        augment: AugmentConfig | None = None,
        workers: int = 0,
        repeats: int | None = None,
    ):
        augment = augment or AugmentConfig()
        self.repeats = augment.repeats if repeats is None else repeats
        if (isinstance(batch_size, int) and batch_size < 1) or self.repeats < 1 or workers < 0:
            raise ValueError(
                f"batch_size {batch_size} and repeats {self.repeats} must be at least 1, workers {workers} at least 0"
            )
        super().__init__(split, batch_size, seed)
        self.workers = workers
        self._rows = _Rows(split, self.sizes, seed, augment, self.repeats)
        self._loader: Iterator[tuple[Tensor, Tensor]] | None = None
        self._next: Key | None = None
        self._processes: list[BaseProcess] = []

    def batch(self, position: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """Returns the rows of one rank of the global batch at a position; arguments as in `LabelledBatches`.

        Returns:
            Images uint8 [b, C, S, S] (float32 for latents and `deit`) and labels int64 [b].

        Raises:
            ConfigError: a worker process was killed.
        """
        start, end = self.sizes.share(position, rank, world)
        workers = self.workers
        if (
            workers == 0
            and self._rows.augment.kind == "deit"
            and threading.current_thread() is not threading.main_thread()
        ):
            workers = 1  # timm draws from the process's generators, which the main thread may use at the same time
        if workers == 0:
            return self._rows[position, start, end]
        if self._loader is None or self._next != (position, start, end):  # the first batch, or a jump
            self.close()
            positions = _Positions(self.sizes, position, rank, world)
            self._loader, self._processes = _start(self._rows, positions, workers)
        self._next = (position + 1, *self.sizes.share(position + 1, rank, world))
        self._check_processes()
        try:
            parts = [next(self._loader) for _ in _parts(start, end)]
        except RuntimeError:  # of torch, if a process dies during the wait
            self._check_processes()
            raise
        return parts[0] if len(parts) == 1 else (torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts]))

    def epoch(self, position: int) -> float:
        """Returns how many times the training images have been read before this position."""
        return self.sizes.first(position) / len(self.split)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._loader is not None and not all(process.is_alive() for process in self._processes):
            for process in self._processes:
                process.kill()
            abandon_workers(self._loader)
        self._loader = self._next = None
        self._processes = []

    def _check_processes(self) -> None:
        dead = [str(process.pid) for process in self._processes if not process.is_alive()]
        if dead:
            count = len(self._processes)
            self.close()
            problem = f"workers: {count} processes decode images, and process {', '.join(dead)} was killed"
            fix = "perhaps for lack of memory; use fewer workers and resume the run"
            raise ConfigError([f"{problem}, {fix}"], "data")


class _Rows(Dataset):
    """Maps a position and a range of rows to these rows of the batch, for this process or for a worker."""

    def __init__(self, split: ImageSplit, sizes: BatchSizes, seed: int, augment: AugmentConfig, repeats: int):
        self.split, self.sizes, self.seed, self.augment, self.repeats = split, sizes, seed, augment, repeats
        self._transform: Any = None
        if augment.kind == "deit":
            self._transform = DeitTransform(split, seed)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor]:
        position, start, end = key
        samples = self.sizes.first(position) + paired(self.sizes.rows(position))[start:end]
        epoch, place = np.divmod(samples, len(self.split))
        indices = shuffled(epoch * len(self.split) + place // self.repeats, len(self.split), self.seed)
        images = self.split.images(indices) if self._transform is None else self._transform.images(indices, samples)
        return images, self.split.labels(indices)


def paired(batch_size: int) -> np.ndarray:
    """Returns the sample of each row of a batch, int64 [B]: 0, B - 1, 1, B - 2, ..."""
    rows = np.arange(batch_size, dtype=np.int64)
    return np.where(rows % 2 == 0, rows // 2, batch_size - 1 - rows // 2)


def _parts(start: int, end: int) -> list[tuple[int, int]]:
    """Cuts rows into parts of `PART`; no rows are one empty part."""
    return [(first, min(first + PART, end)) for first in range(start, max(end, start + 1), PART)]


class _Positions(Sampler):
    """The keys of the parts of all batches from a position on; it has no end and no state."""

    def __init__(self, sizes: BatchSizes, first: int, rank: int, world: int):
        self._sizes, self._first, self._share = sizes, first, (rank, world)

    def __iter__(self) -> Iterator[Key]:
        for position in itertools.count(self._first):
            for part in _parts(*self._sizes.share(position, *self._share)):
                yield (position, *part)


def _start(
    rows: _Rows, positions: _Positions, workers: int
) -> tuple[Iterator[tuple[Tensor, Tensor]], list[BaseProcess]]:
    """Starts worker processes; returns the parts that they make, in order, and the processes."""
    others = set(multiprocessing.active_children())
    handler = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    with safe_path(), warnings.catch_warnings():  # of more workers than cores, which is the user's choice
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader: Iterator[tuple[Tensor, Tensor]] = iter(
            DataLoader(
                rows,
                batch_size=None,
                sampler=positions,
                num_workers=workers,
                prefetch_factor=AHEAD,
                worker_init_fn=_ignore_interrupts,
            )
        )
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, handler)  # torch's raises an error wherever the main thread is when a worker dies
    return loader, [process for process in multiprocessing.active_children() if process not in others]


def _ignore_interrupts(number: int) -> None:
    # Ctrl-C reaches all processes of a terminal; the training process stops, and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# DeiT's augmentation of single images, by timm.
#
# Random resized crop, flip, RandAugment (`rand-m9-mstd0.5-inc1`), colour jitter 0.3 and random erasing: the values of
# DeiT (Touvron et al. 2021, Table 9). timm is used because published numbers depend on its variant of RandAugment. It
# imports torchvision, which must be built for the torch that is installed; both are imported only here.

POLICY = "rand-m9-mstd0.5-inc1"
SMALL = 32  # side up to which an image of this side is padded by 4 and cropped, not cropped and resized (DeiT's code)


class DeitTransform:
    """Augments images of a split; the result is a function of (seed, sample).

    Raises:
        ConfigError: timm is not installed, torchvision does not match torch, or the images are not RGB.
    """

    def __init__(self, split: ImageSplit, seed: int):
        problems = check_deit(split.channels)
        refuse(problems, "augment")
        self._split, self._seed = split, seed
        self._transform, mean, std = _transform(split.side)
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))

    def images(self, indices: np.ndarray, samples: np.ndarray) -> Tensor:
        """Returns images float32 [n, 3, S, S].

        Pixels are between 0 and 1, except erased ones: their noise is normal, with ImageNet's mean and deviation.

        Args:
            indices: the places of the images in the split. samples: their numbers in the run, the augmentation's key.
        """
        states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
        made = torch.empty(len(indices), 3, self._split.side, self._split.side)
        try:
            for row, (index, sample) in enumerate(zip(indices, samples, strict=True)):
                image = self._image(int(index))
                self._seed_all(int(sample))
                made[row] = self._transform(image) * self._std + self._mean  # timm returns normalised pixels
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])
        return made

    def _image(self, index: int) -> "Image":
        """Returns an image at its own size, of which a crop is resized; a small one as it is scored, for a shift."""
        if self._split.side > SMALL:
            return self._split.image(index)
        return decode.from_pixels(self._split.images([index])[0].numpy())

    def _seed_all(self, sample: int) -> None:
        # timm draws from all three generators.
        key = hash64(f"deit {self._seed} {sample}".encode())
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)
        torch.default_generator.manual_seed(key >> 1)  # torch.manual_seed would also seed the GPUs


def check_deit(channels: int = 3) -> list[str]:
    """Returns why images with these channels cannot be augmented by `deit` on this machine; imports timm."""
    problems = []
    if channels != 3:
        problems.append(f"augment.kind: deit needs RGB images, but these have {channels} channels; use convert: rgb")
    try:
        import timm.data  # noqa: F401
        import torchvision.transforms  # noqa: F401
    except ImportError as error:
        if error.name in ("timm", "torchvision"):
            problems.append(f"augment.kind: deit needs {error.name}, which is not installed; {_fix()}")
        else:
            problems.append(_unusable(error))
    except (RuntimeError, OSError, AttributeError) as error:  # built for another torch
        problems.append(_unusable(error))
    return problems


def torchvision_for(torch_version: str) -> str:
    """Returns the requirement of the torchvision that is released with a torch: 2.13 goes with 0.28."""
    major, minor = torch_version.partition("+")[0].split(".")[:2]
    return f"torchvision==0.{int(minor) + 15}.*" if major == "2" else "the torchvision of the same release"


def _unusable(error: Exception) -> str:
    package = f"torchvision {installed_version('torchvision')}".strip()
    reason = " ".join(str(error).split())[:120]
    return f"augment.kind: deit: {package} does not work with torch {torch.__version__} ({reason}); {_fix()}"


def _fix() -> str:
    cuda = torch.version.cuda
    index = "cpu" if cuda is None else f"cu{cuda.replace('.', '')}"
    pair = f"'{torchvision_for(torch.__version__)}' --index-url https://download.pytorch.org/whl/{index}"
    return f"for torch {torch.__version__}: pip install {pair} and {install_command('deit')}, or use kind: crop_flip"


def _transform(side: int) -> tuple[Any, tuple[float, ...], tuple[float, ...]]:
    from timm.data import create_transform
    from timm.data.auto_augment import posterize
    from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    from torchvision import transforms

    def _posterize(image: "Image", bits: int, **options: Any) -> "Image":
        # At magnitude 10 timm 1.0.31 keeps 0 bits: a black image up to Pillow 12, an error since Pillow 13.
        return posterize(image, bits, **options) if bits > 0 else image.point(lambda _: 0)

    transform = create_transform(
        input_size=side,
        is_training=True,
        color_jitter=0.3,  # without effect beside RandAugment, as in DeiT
        auto_augment=POLICY,
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
    )
    if side <= SMALL:
        transform.transforms[0] = transforms.RandomCrop(side, padding=4)
    for step in transform.transforms:
        for op in getattr(step, "ops", ()):
            if op.aug_fn is posterize:
                op.aug_fn = _posterize
    return transform, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
