"""Token mixers: one file each, in folders by their recurrence. Importing this package registers all of them."""

from linnet.layers.mixers import convolution, delta, diagonal, linear, parallel, softmax

__all__ = ["convolution", "delta", "diagonal", "linear", "parallel", "softmax"]
