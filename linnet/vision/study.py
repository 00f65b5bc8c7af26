"""Studies of image classifiers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from linnet.data.images import ImageDataConfig
from linnet.study.architectures import Architecture, Base, Std
from linnet.study.config import StudyConfig


class ImageStudyConfig(StudyConfig):
    """A ladder of image classifiers: `train.objective: images`.

    FLOPs, budgets and laws are those of a study of texts, with images in place of tokens and the cross-entropy in nats
    per image as the loss.

    Attributes:
        data: the images, as in a training configuration.
        model: keys of every model beside its shape: `image_size`, `patch`, `channels`, `classes`, and others.
        init_std: as in a study of texts; null keeps that of each family.
    """

    OBJECTIVE: ClassVar = "images"

    data: ImageDataConfig = ImageDataConfig()  # type: ignore[assignment]
    model: dict[str, Any] = {}
    init_std: Std | None = None  # type: ignore[assignment]
    seq_len: int = Field(1, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _images_per_run(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        entries = values.get("architectures")
        named = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
        if "seq_len" in values or any(entry.get("seq_len") is not None for entry in named):
            raise ValueError("seq_len: images have no length in tokens; leave it out")
        if "images" in values and "tokens" in values:
            raise ValueError("images and tokens are both given; give `images`, the number of images per run")
        return {"tokens" if key == "images" else key: value for key, value in values.items()}

    def base(self, vocab_size: int) -> Base:
        return Base("classifier", self.model)

    def row_length(self, architecture: Architecture) -> int | None:
        return None
