"""A denoiser of images: patches, the time step and the class, a backbone that sees all tokens, a linear head.

With `attention+mlp` and `conditioning: adaln_zero` it is DiT (arXiv:2212.09748). With LightNet's layers and
`conditioning: tokens` it is the model of paper 003, Table 11, whose parameter counts leave no room for more.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.block import Block
from linnet.layers.modulated import ModulatedBlock, modulate
from linnet.layers.positions.grid import Grid
from linnet.models.backbone import Backbone
from linnet.models.kinds import Kind
from linnet.models.patches import Patches, fold, sin_cos_2d
from linnet.vision.config import DenoiserConfig

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
                own = rows == columns == side
                return x + (self.sin_cos if own else sin_cos_2d(rows, columns, x.shape[-1])).to(x)
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


KIND = Kind("denoiser", DenoiserConfig, Denoiser, "linnet sample, linnet evaluate samples")
