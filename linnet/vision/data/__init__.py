"""Images for training: sources, a corpus on disk, augmentation, and the order in which a run reads them.

config = ImageDataConfig(source=["digits"])
corpus = prepare_images(config, "cache")
batches = ImageBatches(corpus.train, batch_size=64, seed=0)
images, labels = batches.batch(position=0)

`ImageBatches` and the functions of `linnet.vision.data.augment` are imported at first use, so that the rest works
without torch.
"""

import importlib

from linnet.data.images.config import ImageDataConfig
from linnet.vision.data.config import AugmentConfig
from linnet.vision.data.corpus import (
    ImageCorpus,
    ImageSplit,
    check_images,
    image_content,
    open_images,
    prepare_images,
    read_sources,
)

__all__ = [
    "AugmentConfig",
    "ImageBatches",
    "ImageCorpus",
    "ImageDataConfig",
    "ImageSplit",
    "augment_batch",
    "check_images",
    "crop_flip",
    "flip",
    "image_content",
    "mix_images",
    "open_images",
    "prepare_images",
    "read_sources",
]
_WITH_TORCH = {"ImageBatches": "batches"} | dict.fromkeys(
    ("augment_batch", "crop_flip", "flip", "mix_images"), "augment"
)


def __getattr__(name: str):
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"linnet.vision.data.{_WITH_TORCH[name]}"), name)
