"""Images as tokens: square patches, their linear projection, the way back, and a fixed table of positions."""

import torch
from torch import Tensor, nn


class Patches(nn.Module):
    """Cuts images into squares of `patch` pixels and projects each to `d_model` features (ViT, arXiv:2010.11929).

    The weight [D, C p p] is that of a convolution with kernel and stride p, with its last three dimensions flattened.
    """

    def __init__(
        self,
        channels: int,
        patch: int,
        d_model: int,
        mean: list[float] | None = None,
        std: list[float] | None = None,
    ):
        """
        Args:
            mean, std: of each channel of pixels from 0 to 1, for `normalise`.
        """
        super().__init__()
        self.channels, self.patch = channels, patch
        self.proj = nn.Linear(channels * patch * patch, d_model)
        for name, values in (("mean", mean), ("std", std)):
            value = None if values is None else torch.tensor(values, dtype=torch.float32)[:, None, None]
            self.register_buffer(name, value, persistent=False)

    def normalise(self, images: Tensor) -> Tensor:
        """Returns (x - mean) / std in the dtype of the weights, with uint8 divided by 255 first."""
        dtype = self.proj.weight.dtype
        if not images.is_floating_point():
            images = images.to(torch.float64 if dtype == torch.float64 else torch.float32) / 255
        images = images if self.mean is None else images - self.mean.to(images.dtype)
        images = images if self.std is None else images / self.std.to(images.dtype)
        return images.to(dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Maps [B, C, H, W] to tokens [B, T, D], row by row.

        Raises:
            ValueError: the number of channels is another, or a side is not a multiple of the patch.
        """
        self.grid(images)
        # Under autocast the product is bfloat16, but the residual stream has the precision of the weights.
        return self.proj(unfold(images, self.patch)).to(self.proj.weight.dtype)

    def grid(self, images: Tensor) -> tuple[int, int]:
        """Returns the rows and columns of patches. Raises ValueError as `forward`."""
        if images.ndim != 4:
            raise ValueError(f"images: have shape {list(images.shape)}; give [batch, channels, height, width]")
        _, channels, height, width = images.shape
        if channels != self.channels:
            fix = "convert the images to RGB" if self.channels == 3 else f"use a model with channels: {channels}"
            raise ValueError(f"images: have {channels} channels, but the model has channels: {self.channels}; {fix}")
        if not height or not width or height % self.patch or width % self.patch:
            raise ValueError(
                f"images: sides {height} x {width} are not multiples of patch: {self.patch}; resize or crop them to "
                f"{whole_side(height, self.patch)} x {whole_side(width, self.patch)}"
            )
        return height // self.patch, width // self.patch


def whole_side(side: int, patch: int) -> int:
    """Returns the multiple of `patch` that is nearest to a side, at least one patch."""
    return max(patch, (2 * side + patch) // (2 * patch) * patch)


def unfold(images: Tensor, patch: int) -> Tensor:
    """Cuts [B, C, H, W] into patches [B, (H / p) (W / p), C p p]: patches row by row, each as [C, p, p] flattened."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    x = images.reshape(batch, channels, rows, patch, columns, patch)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch * patch)


def fold(x: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Joins patches [B, rows columns, C p p] to images [B, C, rows p, columns p]; the inverse of `unfold`."""
    rows, columns = grid
    batch, _, features = x.shape
    channels = features // (patch * patch)
    x = x.reshape(batch, rows, columns, channels, patch, patch)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, rows * patch, columns * patch)


def sin_cos_2d(rows: int, columns: int, width: int) -> Tensor:
    """Returns the fixed positions [rows columns, width] of a grid, float32 computed in float64.

    The first half of the features encodes the column, the second half the row (DiT, facebookresearch/DiT: its grid puts
    the width first). Each half is [sin(n w_i), cos(n w_i)] with w_i = 10000^(-i / (width / 4)).

    Raises:
        ValueError: `width` is not a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"d_model: {width} is not a multiple of 4, which position: sin_cos needs")
    rates = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))

    def encoded(count: int) -> Tensor:
        angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], 1)

    across = encoded(columns).expand(rows, columns, width // 2)
    down = encoded(rows)[:, None].expand(rows, columns, width // 2)
    return torch.cat([across, down], -1).flatten(0, 1).float()
