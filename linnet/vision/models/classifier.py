"""An image classifier: patches, an optional class token and position table, a backbone that sees all tokens, a head.

With `attention+mlp`, `pool: cls` and `position: learned` it is a ViT or DeiT (arXiv:2010.11929, 2012.12877); with
LightNet's layers it is the model of paper 003, Table 1.
"""

import math

import torch
from torch import Tensor, nn

from linnet.layers.positions.grid import Grid
from linnet.models.backbone import Backbone
from linnet.models.kinds import Kind
from linnet.models.labelled import labelled_loss
from linnet.models.patches import Patches, sin_cos_2d
from linnet.vision.config import VisionConfig


class ImageClassifier(nn.Module):
    """Maps images to the logits of classes.

    Attributes:
        grid: of the tokens of an image of `image_size`.
        prefix: tokens before the grid: 1 with a class token, else 0.
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        side = config.image_size // config.patch
        self.prefix = int(config.pool == "cls")
        self.grid = Grid((side, side), self.prefix)
        self.patches = Patches(config.channels, config.patch, config.d_model, config.mean, config.std)
        # Pixels of unit variance make tokens of unit variance. Beside them a learned table, which starts at init_std,
        # would be lost: accuracy on digits falls from 94 to 92 %. With a table, both start at init_std.
        self.patches.proj.fan_in = config.position != "learned"
        self.class_token = nn.Embedding(1, config.d_model) if self.prefix else None
        self.position = None
        if config.position == "learned":
            self.position = nn.Embedding(self.prefix + side * side, config.d_model)
        elif config.position == "sin_cos":
            self.register_buffer("sin_cos", sin_cos_2d(side, side, config.d_model), persistent=False)
        self.backbone = Backbone(config, causal=False, axes=2, prefix=self.prefix, side=side)
        self.head = nn.Linear(config.d_model, config.classes, bias=config.head_bias)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits [B, classes] of images [B, C, H, W], uint8 or floating point from 0 to 1.

        Raises:
            ValueError: another number of channels than the model's, a side that is not a multiple of the patch, or
                another size than `image_size` with `position: learned`.
        """
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        """Returns the pooled output of the backbone, [B, D], after its norm. Arguments and errors as `forward`."""
        rows, columns = self.patches.grid(images)
        x = self.patches(self.normalise(images))
        if self.position is not None:
            self._check_size(images, rows, columns)
            x = x + self.position.weight[self.prefix :].to(x.dtype)
        elif self.config.position == "sin_cos":
            x = x + self._sin_cos(rows, columns).to(x)
        if self.class_token is not None:
            first = self.class_token.weight.to(x.dtype)
            if self.position is not None:
                first = first + self.position.weight[:1].to(x.dtype)
            x = torch.cat([first.expand(x.shape[0], 1, -1), x], 1)
        x, _ = self.backbone(x, grid=Grid((rows, columns), self.prefix))
        match self.config.pool:
            case "mean":
                return x[:, self.prefix :].mean(1)
            case "last":
                return x[:, -1]
        return x[:, 0]  # the first patch, or the class token

    def loss(self, images: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy (nats, at least float32) and the number of images.

        Args:
            images: as in `forward`.
            labels: int64 [B], or the probabilities of each class, [B, classes].
            smoothing: label smoothing: this share of the target is spread evenly over all classes.
        """
        return labelled_loss(self.forward(images), labels, smoothing)

    def normalise(self, images: Tensor) -> Tensor:
        """Returns (x - mean) / std in the dtype of the weights, with uint8 divided by 255 first."""
        return self.patches.normalise(images)

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the head for one image; they do not depend on `seq_len`."""
        return 2.0 * self.config.d_model * self.config.classes

    def input_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the projection of patches for one image of `seq_len` tokens."""
        return 2.0 * (seq_len - self.prefix) * math.prod(self.patches.proj.weight.shape)

    def _sin_cos(self, rows: int, columns: int) -> Tensor:
        if (rows, columns) == self.grid.sides:
            return self.sin_cos
        return sin_cos_2d(rows, columns, self.config.d_model).to(self.sin_cos.device)

    def _check_size(self, images: Tensor, rows: int, columns: int) -> None:
        side = self.config.image_size
        if images.shape[-2:] != (side, side):
            given = " x ".join(str(number) for number in images.shape[-2:])
            raise ValueError(
                f"images: {given} pixels, but position: learned has a table for {side} x {side} (image_size); resize "
                "the images, or use a model with position: none or sin_cos and a mixer that knows places (LRPE)"
            )


KIND = Kind("classifier", VisionConfig, ImageClassifier, "linnet evaluate images")
