"""DeiT's augmentation of single images, by timm.

Random resized crop, flip, RandAugment (`rand-m9-mstd0.5-inc1`), colour jitter 0.3 and random erasing: the values of
DeiT (Touvron et al. 2021, Table 9). timm is used because published numbers depend on its variant of RandAugment. It
imports torchvision, which must be built for the torch that is installed; both are imported only here.
"""

import hashlib
import random
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from linnet.config import ConfigError
from linnet.install import install_command
from linnet.vision.data.corpus import ImageSplit

if TYPE_CHECKING:
    from PIL.Image import Image

POLICY = "rand-m9-mstd0.5-inc1"
SMALL = 32  # pixels up to which an image is padded by 4 and cropped, not cropped and resized (DeiT's code)


class DeitTransform:
    """Augments images of a split; the result is a function of (seed, sample).

    Raises:
        ConfigError: timm is not installed, torchvision does not match torch, or the images are not RGB.
    """

    def __init__(self, split: ImageSplit, seed: int):
        problems = check_deit(split.channels)
        if problems:
            raise ConfigError(problems, "augment")
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
                image = self._split.image(int(index))
                self._seed_all(int(sample))
                made[row] = self._transform(image) * self._std + self._mean  # timm returns normalised pixels
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.default_generator.set_state(states[2])
        return made

    def _seed_all(self, sample: int) -> None:
        # timm draws from all three generators.
        hashed = hashlib.blake2b(f"deit {self._seed} {sample}".encode(), digest_size=8).digest()
        key = int.from_bytes(hashed, "little")
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
    try:
        found = f"torchvision {version('torchvision')}"
    except PackageNotFoundError:
        found = "torchvision"
    reason = " ".join(str(error).split())[:120]
    return f"augment.kind: deit: {found} does not work with torch {torch.__version__} ({reason}); {_fix()}"


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
