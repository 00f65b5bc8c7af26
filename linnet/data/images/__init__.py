"""Readers of labelled images: which files a configuration names, and the pixels and label of each image in them.

config.py   the keys    sources.py   the forms of files    decode.py   bytes -> pixels, pixels -> PNG
"""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from linnet.config import Config, in_full
from linnet.deprecation import renamed

# The keys of image data. Imports neither torch nor Pillow, so that reading a file is quick.

DIGITS = "digits"


def _as_list(value: object) -> object:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{value!r} must be a list of paths of folders and files, globs and {DIGITS!r}")
    return value


Sources = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


class ImageDataConfig(Config):
    """The images, or the latents of images, that a model is trained and validated on. A string is its `source`.

    Attributes:
        source: "digits" (scikit-learn's 1,797 images of 8 x 8), or paths of folders and files: class folders
            (`root/class/*.png`), Parquet, tar shards, IDX files, `.npz` and `.npy` arrays; `hf:NAME` for Parquet files
            of the Hub.
        split: the part of the source to train on, if the source has parts: files, folders or arrays with the word
            `train`, `validation` (`val`, `valid`, `dev`) or `test` (`testing`, `eval`, `t10k`) in their names.
        held_out: the part to hold out; None takes `validation`, or else `test`, where the source has one.
        validation: sources of held-out images. Exact copies of them are left out of training.
        validation_fraction: share of each class to hold out. None: 0.1, if the source has no part to hold out.
        kind: `images`, or `latents`: float16 arrays [N, C, S, S] that an encoder made.
        image_key: column (Parquet) or array (npz) of the images; None takes the usual names, such as `image`.
        label_key: column or array of the labels; None takes the usual names, such as `label`.
        classes: the names of labels 0, 1, ...; None takes those of the source, or else the numbers. A source that has
            these names in another order keeps its own: its labels are renumbered.
        size: side in pixels that images get: the shorter side is resized to size / crop (bicubic), then the centre is
            cut out. Images of this size already stay as they are. None: all images must be squares of one size.
        crop: share of the shorter side that remains after the cut; see `size`.
        convert: `grey` or `rgb`; None keeps the channels, of which all images must have the same number.
        store: `encoded` keeps files as they are and decodes them in each epoch; `pixels` stores decoded images of the
            final size; `auto` stores pixels if no image is resized and they need at most 1 GiB.
        skip_damaged: leaves out and counts files that are not a whole image; otherwise they are an error.
        max_images: takes this many training images in a random order; None takes all.
        seed: seed of the random choices above. The order of training samples has its own seed.
    """

    source: Sources = [DIGITS]
    split: str = "train"
    held_out: str | None = None
    validation: Sources = []
    validation_fraction: float | None = Field(None, gt=0, lt=1)
    kind: Literal["images", "latents"] = "images"
    image_key: str | None = None
    label_key: str | None = None
    classes: list[str] | None = None
    size: int | None = Field(None, ge=1, le=8192)
    crop: float = Field(0.875, gt=0, le=1)
    convert: Literal["grey", "rgb"] | None = None
    store: Literal["auto", "encoded", "pixels"] = "auto"
    skip_damaged: bool = False
    max_images: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, values: Any) -> Any:
        return in_full("data", values)

    @model_validator(mode="after")
    def _one_held_out_set(self) -> "ImageDataConfig":
        problems = []
        keys = ("validation", "validation_fraction", "held_out")
        set_keys = [key for key in keys if getattr(self, key) not in (None, [])]
        if len(set_keys) > 1:
            shown = ", ".join(f"{key}: {getattr(self, key)}" for key in set_keys)
            problems.append(f"{shown} all choose the held-out images; keep one of them")
        if self.classes is not None and len(set(self.classes)) < max(2, len(self.classes)):
            problems.append(f"classes: {self.classes} must be two or more different names; correct the list")
        if self.kind == "latents":
            wrong = {"size": None, "convert": None, "store": "auto", "skip_damaged": False}
            shown = ", ".join(
                f"{key}: {getattr(self, key)}" for key, usual in wrong.items() if getattr(self, key) != usual
            )
            if shown:
                problems.append(f"{shown}: latents are stored as they are; leave this out, or use kind: images")
        if problems:
            raise ValueError("; ".join(problems))
        return self


__all__ = ["ImageDataConfig"]
__getattr__ = partial(renamed, __name__)
