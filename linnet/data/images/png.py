"""Writes images as PNG, for pages and folders of samples."""

import io

import numpy as np

from linnet.config import ConfigError, not_installed
from linnet.data.images.decode import from_pixels
from linnet.install import install_command


def check_png() -> None:
    """Raises ConfigError if Pillow, which writes PNG files, is not installed. Call it before work that ends in one."""
    if not_installed(["PIL"]):
        problem = f"Pillow: not installed; it writes PNG files; install it: {install_command('vision')}"
        raise ConfigError([problem], "png")


def encode_png(image: np.ndarray) -> bytes:
    """Returns an image as the bytes of a PNG file.

    Args:
        image: uint8 [C, H, W], C 1 (grey) or 3 (RGB); an array, or a tensor on the CPU.

    Raises:
        ValueError: another type or shape.
        ConfigError: Pillow is not installed.
    """
    values = np.asarray(image)
    if values.dtype != np.uint8 or values.ndim != 3 or len(values) not in (1, 3):
        raise ValueError(f"image: {values.dtype} {list(values.shape)} must be uint8 [1, H, W] or [3, H, W]")
    check_png()
    file = io.BytesIO()
    from_pixels(values).save(file, "PNG")
    return file.getvalue()


def picture_grid(images: np.ndarray, columns: int) -> np.ndarray:
    """Returns images uint8 [n, C, H, W] as one picture [C, ...], row by row, with a white pixel between them."""
    count, channels, height, width = images.shape
    rows = -(-count // columns)
    whole = np.full((channels, rows * (height + 1) - 1, columns * (width + 1) - 1), 255, dtype=np.uint8)
    for number, image in enumerate(images):
        top, left = (number // columns) * (height + 1), (number % columns) * (width + 1)
        whole[:, top : top + height, left : left + width] = image
    return whole
