"""Models of images: classifiers and denoisers."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.block import Block, ModulatedBlock, modulate
from linnet.layers.positions import Grid
from linnet.models.backbone import Backbone
from linnet.models.kinds import Kind, labelled_loss
from linnet.models.patches import Patches, fold, sin_cos_2d
from linnet.vision.config import DenoiserConfig, VisionConfig

# An image classifier: patches, an optional class token and position table, a backbone that sees all tokens, a head.
#
# With `attention+mlp`, `pool: cls` and `position: learned` it is a ViT or DeiT (arXiv:2010.11929, 2012.12877); with
# LightNet's layers it is the model of paper 003, Table 1.


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
            size = " x ".join(str(number) for number in images.shape[-2:])
            raise ValueError(
                f"images: {size} pixels, but position: learned has a table for {side} x {side} (image_size); resize "
                "the images, or use a model with position: none or sin_cos and a mixer that knows places (LRPE)"
            )


CLASSIFIER = Kind("classifier", VisionConfig, ImageClassifier, "linnet evaluate images")


# A denoiser of images: patches, the time step and the class, a backbone that sees all tokens, a linear head.
#
# With `attention+mlp` and `conditioning: adaln_zero` it is DiT (arXiv:2212.09748). With LightNet's layers and
# `conditioning: tokens` it is the model of paper 003, Table 11, whose parameter counts leave no room for more.


FREQUENCIES = 256  # features of a time step


class Denoiser(nn.Module):
    """Predicts the noise in images, and with `learn_sigma` where the variance of the reverse step lies.

    Attributes:
        grid: of the tokens of an image of `image_size`.
        prefix: tokens before the grid: 2, the time step and the class, with `conditioning: tokens`, else 0.
        none: class index that stands for no class.
    """

    def __init__(self, config: DenoiserConfig):
        super().__init__()
        self.config, width = config, config.d_model
        tokens = config.conditioning == "tokens"
        side = config.image_size // config.patch
        self.prefix, self.none = 2 if tokens else 0, config.classes
        self.grid = Grid((side, side), self.prefix)
        self.out_channels = config.channels * (2 if config.learn_sigma else 1)
        self.patches = Patches(config.channels, config.patch, width)
        self.time = TimeEmbedding(width)
        self.classes = nn.Embedding(config.classes + 1, width)
        if config.position == "sin_cos":
            self.register_buffer("sin_cos", sin_cos_2d(side, side, width), persistent=False)
        elif config.position == "learned":
            self.position = nn.Embedding(side * side, width)
        block = Block if tokens else ModulatedBlock
        self.backbone = Backbone(config, causal=False, axes=2, prefix=self.prefix, side=side, block=block)
        self.modulation = None if tokens else nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, config.patch**2 * self.out_channels)
        for layer in (self.modulation, self.head):
            if layer is not None:
                layer.starts_zero = True

    def forward(self, noisy: Tensor, t: Tensor, classes: Tensor) -> Tensor:
        """Returns the noise [B, C, S, S], or noise and v [B, 2C, S, S] with `learn_sigma`.

        Args:
            noisy: x_t [B, C, S, S]. t: time step of each image, int64 [B], 0 to 999.
            classes: int64 [B]; `none` for no class.

        Raises:
            ValueError: another number of channels than the model's, a side that is not a multiple of the patch, or
                another size than `image_size` with `position: learned`.
        """
        rows, columns = self.patches.grid(noisy)
        x = self.patches(noisy.to(self.patches.proj.weight.dtype))
        x = self._add_positions(x, rows, columns)
        time, label = self.time(t, x.dtype), self.classes(classes).to(x.dtype)
        if self.modulation is None:
            x = torch.cat([time[:, None], label[:, None], x], 1)
            x, _ = self.backbone(x, grid=Grid((rows, columns), self.prefix))
            x = x[:, self.prefix :]
        else:
            condition = time + label
            x, _ = self.backbone(x, grid=Grid((rows, columns)), condition=condition)
            shift, scale = self.modulation(F.silu(condition)).chunk(2, -1)
            x = modulate(x, shift, scale)
        return fold(self.head(x), (rows, columns), self.config.patch)

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of head and condition for one image of `seq_len` tokens."""
        patches = 2.0 * (seq_len - self.prefix) * math.prod(self.head.weight.shape)
        once = [self.time.output] if self.modulation is None else [self.time.output, self.modulation]
        return patches + 2.0 * sum(math.prod(layer.weight.shape) for layer in once)

    def input_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the first layers, on patches and on the features of the time step."""
        patches = 2.0 * (seq_len - self.prefix) * math.prod(self.patches.proj.weight.shape)
        return patches + 2.0 * math.prod(self.time.hidden.weight.shape)

    def _add_positions(self, x: Tensor, rows: int, columns: int) -> Tensor:
        side = self.config.image_size // self.config.patch
        match self.config.position:
            case "sin_cos":
                square = rows == columns == side
                return x + (self.sin_cos if square else sin_cos_2d(rows, columns, x.shape[-1])).to(x)
            case "learned":
                if not rows == columns == side:
                    size, patch = self.config.image_size, self.config.patch
                    raise ValueError(
                        f"images: {rows * patch} x {columns * patch} pixels, but position: learned has a table for "
                        f"{size} x {size} (image_size); use this size, or a model with position: none or sin_cos"
                    )
                return x + self.position.weight.to(x.dtype)
        return x


class TimeEmbedding(nn.Module):
    """The time step as `d_model` features: cosines and sines of 128 frequencies, then two linear layers."""

    def __init__(self, d_model: int):
        super().__init__()
        self.hidden, self.output = nn.Linear(FREQUENCIES, d_model), nn.Linear(d_model, d_model)
        for layer in (self.hidden, self.output):
            layer.init = "normal"

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """Maps time steps [B] to [B, D]; the cosines and sines are computed at least in float32, then in `dtype`."""
        exact = dtype if dtype == torch.float64 else torch.float32
        return self.output(F.silu(self.hidden(time_features(t, exact).to(dtype))))


def time_features(t: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns [cos(t w_i), sin(t w_i)] with w_i = 10000^(-i / 128), i = 0..127: [B] -> [B, 256]."""
    half = FREQUENCIES // 2
    rates = torch.exp(torch.arange(half, dtype=dtype, device=t.device) * (-math.log(10000.0) / half))
    angles = t.to(dtype)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


DENOISER = Kind("denoiser", DenoiserConfig, Denoiser, "linnet sample, linnet evaluate samples")
