"""Images for training: sources, a corpus on disk, augmentation, and the order in which a run reads them.

config = ImageDataConfig(source=["digits"])
corpus = prepare_images(config, "cache")
batches = ImageBatches(corpus.train, batch_size=64, seed=0)
images, labels = batches.batch(position=0)

`ImageBatches` and the functions of `linnet.vision.data.augment` are imported at first use, so that the rest works
without torch.
"""

from typing import Any, Literal

from pydantic import Field, model_validator

from linnet.config import Config
from linnet.data.images import ImageDataConfig
from linnet.deprecation import lazily
from linnet.vision.data.corpus import (
    ImageCorpus,
    ImageSplit,
    check_images,
    image_content,
    open_images,
    prepare_images,
    read_sources,
)

# The keys of augmentation. Imports neither torch nor Pillow, so that reading a file is quick.


PUBLISHED = {"mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1, "repeats": 3}  # DeiT (Touvron et al. 2021), Table 9


class AugmentConfig(Config):
    """Random changes of training images.

    Attributes:
        kind: `none`; `flip` (mirror left and right with probability 1/2); `crop_flip` (also shift by up to `padding`
            pixels, black outside); `deit` (timm's RandAugment, colour jitter, random resized crop and random erasing as
            DeiT uses them).
        padding: pixels, for `crop_flip`.
        mixup: MixUp's alpha (Zhang et al. 2018): lambda ~ Beta(alpha, alpha) for the whole batch; 0 turns it off.
        cutmix: CutMix's alpha (Yun et al. 2019); 0 turns it off.
        switch: probability of CutMix rather than MixUp in a batch, if both are on.
        smoothing: label smoothing.
        repeats: times that an image is read in a row, each time augmented differently; an epoch keeps its number of
            samples (repeated augmentation, Hoffer et al. 2020).

    `deit` starts from its published values: mixup 0.8, cutmix 1, smoothing 0.1, repeats 3.
    """

    kind: Literal["none", "flip", "crop_flip", "deit"] = "none"
    padding: int = Field(4, ge=0)
    mixup: float = Field(0.0, ge=0, le=8)
    cutmix: float = Field(0.0, ge=0, le=8)
    switch: float = Field(0.5, ge=0, le=1)
    smoothing: float = Field(0.0, ge=0, lt=1)
    repeats: int = Field(1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _published(cls, values: Any) -> Any:
        values = {"kind": values} if isinstance(values, str) else values
        if isinstance(values, dict) and values.get("kind") == "deit":
            return {**PUBLISHED, **values}
        return values

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed, so that labels are soft."""
        return self.mixup > 0 or self.cutmix > 0

    def problems(self, batch_size: int, world: int = 1) -> list[str]:
        """Returns why a batch size does not fit: rows are mixed in pairs, and each rank needs both rows of a pair."""
        if not self.mixes or batch_size % (2 * world) == 0:
            return []
        keys = " and ".join(key for key in ("mixup", "cutmix") if getattr(self, key))
        ranks = f" on {world} ranks" if world > 1 else ""
        fix = f"use a multiple of {2 * world}, or set {keys} to 0"
        return [f"batch_size: {batch_size}{ranks} cannot be mixed in pairs ({keys}); {fix}"]


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
__getattr__ = lazily(
    __name__,
    {"ImageBatches": "batches"} | dict.fromkeys(("augment_batch", "crop_flip", "flip", "mix_images"), "augment"),
)
