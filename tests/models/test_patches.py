"""Patches: the order of their features and back, and the positions of DiT."""

import pytest
import torch
from torch.nn import functional as F

from linnet.models.patches import Patches, fold, sin_cos_2d, unfold, whole_side


def test_a_patch_is_a_strided_convolution_and_folds_back():
    images = torch.randn(2, 3, 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    patches = Patches(3, 4, 10).double()
    weight = patches.proj.weight.view(10, 3, 4, 4)
    wanted = F.conv2d(images, weight, patches.proj.bias, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(patches(images), wanted)
    assert patches.grid(images) == (2, 3)
    assert torch.equal(fold(unfold(images, 4), (2, 3), 4), images)


@pytest.mark.parametrize(
    "shape, key",
    [((1, 1, 8, 8), "channels: 3"), ((1, 3, 8, 10), "patch: 4"), ((1, 3, 8, 2), "8 x 4"), ((3, 8, 8), "height, width")],
)
def test_images_that_do_not_fit_are_named(shape, key):
    with pytest.raises(ValueError, match=key):
        Patches(3, 4, 10)(torch.zeros(shape))


def test_the_nearest_multiple():
    assert [whole_side(side, 4) for side in (1, 5, 6, 7, 8, 30)] == [4, 4, 8, 8, 8, 32]


def test_positions_are_those_of_dit():
    rows, columns, width = 3, 5, 16
    table = sin_cos_2d(rows, columns, width)
    assert table.shape == (15, 16) and table.dtype == torch.float32
    for row in range(rows):
        for column in range(columns):
            for i in range(width // 4):
                rate = torch.tensor(10000.0 ** (-i / (width / 4)), dtype=torch.float64)
                wanted = [f(place * rate) for place in (column, row) for f in (torch.sin, torch.cos)]
                got = table[row * columns + column, i :: width // 4]
                torch.testing.assert_close(got, torch.stack(wanted).float())
    with pytest.raises(ValueError, match="d_model: 18"):
        sin_cos_2d(2, 2, 18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_have_the_precision_of_the_weights_under_autocast(dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Patches(3, 4, 10).to(dtype)(torch.zeros(1, 3, 8, 8, dtype=dtype)).dtype == dtype
