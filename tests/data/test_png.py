"""PNG files hold the pixels they were given."""

import numpy as np
import pytest

from linnet.data.images import decode
from linnet.data.images.decode import encode_png


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_come_back(channels):
    image = np.random.default_rng(0).integers(0, 256, (channels, 5, 7), dtype=np.uint8)
    assert np.array_equal(decode.pixels(decode.decode(encode_png(image))), image)


def test_other_arrays_are_refused():
    for image in (np.zeros((2, 3, 3), np.uint8), np.zeros((3, 3), np.uint8), np.zeros((1, 3, 3))):
        with pytest.raises(ValueError, match="image: "):
            encode_png(image)
