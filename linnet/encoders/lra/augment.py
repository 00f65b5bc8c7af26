"""The published augmentation of the Image task: images are mirrored, and cut out of images with a mirrored border."""

import torch
from torch import Tensor

from linnet.data.synthetic.draws import Draws

PADDING = 4


def augment_lra(
    images: Tensor, *, seed: int, position: int, padding: int = PADDING, first: int = 0, rows: int | None = None
) -> Tensor:
    """Mirrors half of the images, and shifts each by up to `padding` pixels; the border is mirrored, edge included.

    As the scripts of HGRN and HGRN2 do for their colour images (a random crop with symmetric padding, a random flip).

    Args:
        images: [b, C, H, W]. seed: of the training. position: of the global batch in its order.
        first, rows: the number of the first row in the global batch, and the rows of that; None if this is all of it.
    """
    rows = len(images) if rows is None else rows
    draws = Draws(seed, "augment_lra", position)
    shifts = draws.integers(2 * padding + 1, 2, rows)
    mirrored = draws.uniform(rows) < 0.5
    part = slice(first, first + len(images))
    device, (height, width) = images.device, images.shape[-2:]
    down, right = torch.from_numpy(shifts[:, part]).to(device)
    flipped = torch.from_numpy(mirrored[part]).to(device)[:, None]
    lines = _mirrored(torch.arange(height, device=device) + down[:, None] - padding, height)
    columns = _mirrored(torch.arange(width, device=device) + right[:, None] - padding, width)
    columns = torch.where(flipped, width - 1 - columns, columns)
    place = (lines[:, :, None] * width + columns[:, None, :]).flatten(1)
    return images.flatten(2).gather(2, place[:, None].expand(-1, images.shape[1], -1)).view(images.shape)


def _mirrored(place: Tensor, size: int) -> Tensor:
    """Returns places inside of 0..size - 1: -1 becomes 0, and size becomes size - 1."""
    place = torch.where(place < 0, -1 - place, place)
    return torch.where(place >= size, 2 * size - 1 - place, place)
