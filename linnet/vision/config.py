"""The configurations of models of images: a stack of layers with patches before it."""

from typing import ClassVar, Literal

from pydantic import Field

from linnet.config import Factor
from linnet.models.config import EncoderConfig, Pixel, channel_problems
from linnet.models.patches import whole_side
from linnet.models.stack import class_token_problems


class VisionConfig(EncoderConfig):
    """Everything that defines an image classifier except its weights (`linnet.vision.models`)."""

    TITLE = "an image classifier"
    INPUTS = {"image_size": 32, "patch": 2, "channels": 3, "classes": 10}
    axes: ClassVar[int] = 2

    image_size: int = Field(224, ge=1, le=1 << 14, description="side of the images in pixels")
    patch: int = Field(16, ge=1, le=1 << 10, description="side of a patch in pixels; each patch is one token")
    channels: int = Field(3, ge=1, le=1 << 10, description="channels of the images: 1 grey, 3 colour")
    classes: int = Field(1000, ge=2, le=1 << 24, description="classes, the outputs of the head")
    pool: Literal["mean", "first", "last", "cls"] = Field(
        "mean", description="what the head reads: the mean of all patches, one of them, or a class token before them"
    )
    position: Literal["none", "learned", "sin_cos"] = Field(
        "none", description="table added to the patches; learned has one row per patch and fixes the image size"
    )
    mean: list[Pixel] | None = Field(None, description="of each channel, subtracted from pixels from 0 to 1")
    std: list[Factor] | None = Field(
        None, description="of each channel; pixels are divided by it after `mean` is subtracted"
    )
    head_bias: bool = Field(True, description="bias of the head")

    def problems(self) -> list[str]:
        """Returns the problems of keys that are valid one by one."""
        problems = super().problems() + image_problems(self) + channel_problems(self)
        if self.pool == "cls":
            problems += class_token_problems(self)
        return problems


class DenoiserConfig(EncoderConfig):
    """Everything that defines a denoiser except its weights (`linnet.vision.models`)."""

    TITLE = "a denoiser"

    image_size: int = Field(32, ge=1, le=1 << 14, description="side of the images, or latents, in pixels")
    patch: int = Field(2, ge=1, le=1 << 10, description="side of a patch in pixels; each patch is one token")
    channels: int = Field(3, ge=1, le=1 << 10, description="channels: 1 grey, 3 colour, 4 latents")
    classes: int = Field(1000, ge=1, le=1 << 24, description="classes that can be asked for")
    conditioning: Literal["tokens", "adaln_zero"] = Field(
        "tokens",
        description="how time step and class enter: as two tokens before the patches, or as shift, scale and gate of "
        "each layer",
    )
    position: Literal["none", "learned", "sin_cos"] = Field(
        "none", description="table added to the patches; learned has one row per patch and fixes the image size"
    )
    class_drop: float = Field(
        0.1, ge=0, lt=1, description="share of images that are trained without their class, which guidance needs"
    )
    learn_sigma: bool = Field(True, description="predict the variance of each step too")

    def problems(self) -> list[str]:
        """Returns the problems of keys that are valid one by one."""
        problems = super().problems() + image_problems(self)
        if self.conditioning == "adaln_zero" and (self.norm_after or self.residual_scale != 1 or self.residual_norm):
            problems.append(
                "conditioning: adaln_zero norms, scales and gates the layers itself; leave out norm_after, "
                "residual_scale and residual_norm, or use conditioning: tokens"
            )
        return problems


def image_problems(config: "VisionConfig | DenoiserConfig") -> list[str]:
    """Returns the problems of image_size, patch and position of a model of images."""
    lines, size, patch = [], config.image_size, config.patch
    if size % patch:
        fit = whole_side(size, patch)
        lines.append(f"image_size: {size} is not a multiple of patch: {patch}; use image_size: {fit} or another patch")
    if config.position == "sin_cos" and config.d_model % 4:
        lines.append(
            f"position: sin_cos needs a d_model that is a multiple of 4, not {config.d_model}; use "
            f"{whole_side(config.d_model, 4)}"
        )
    if config.positions != "none":
        lines.append(
            f"positions: {config.positions} counts the tokens of a text; for the patches of images use `position`: "
            "none, learned or sin_cos"
        )
    return lines
