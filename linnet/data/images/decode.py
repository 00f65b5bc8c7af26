"""Decodes images with Pillow and brings them to one number of channels and one size.

EXIF orientation is ignored, as torchvision does. Every image is decoded once while a corpus is prepared, so a damaged
file is found before training.
"""

import io
from typing import TYPE_CHECKING

import numpy as np

from linnet.config import ConfigError, not_installed
from linnet.install import install_command

if TYPE_CHECKING:
    from PIL.Image import Image


GREY = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16L", "I;16B", "I;16N"})
WIDE = frozenset({"I", "I;16", "I;16L", "I;16B", "I;16N"})  # 16 bits per pixel
CHANNELS = {"grey": 1, "rgb": 3}


class Damaged(Exception):
    """An image cannot be used; the text says why and what to do."""


def check_pillow() -> None:
    """Raises ConfigError if Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError(
            [f"source: images are decoded by Pillow, which is not installed; install it: {install_command('vision')}"],
            "data",
        ) from None


def decode(data: bytes, convert: str | None = None) -> "Image":
    """Decodes one image.

    Args:
        data: the bytes of a file that Pillow reads.
        convert: "grey" or "rgb"; None keeps grey images grey (16 bits become 8) and converts all others to RGB.

    Returns:
        An image of mode L or RGB.

    Raises:
        Damaged: not a whole still image, more pixels than `PIL.Image.MAX_IMAGE_PIXELS`, or pixels that are floats.
    """
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise Damaged("is empty (0 bytes); replace the file")
    try:
        image: Image.Image = Image.open(io.BytesIO(data))
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and image.width * image.height > limit:
            raise Damaged(_bomb(f"{image.width} x {image.height} pixels", limit))
        if getattr(image, "is_animated", False):
            raise Damaged(f"is animated ({getattr(image, 'n_frames', 2)} frames); give a still image")
        image.load()
        return _converted(image, convert)
    except Image.DecompressionBombError:
        raise Damaged(_bomb("too many pixels", Image.MAX_IMAGE_PIXELS)) from None
    except UnidentifiedImageError:
        raise Damaged("is not an image that Pillow can read; replace the file") from None
    except Damaged:
        raise
    except MemoryError:
        raise Damaged("does not fit into memory when decoded; make it smaller") from None
    except (
        Exception
    ) as error:  # Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error, ... for bad files
        raise Damaged(f"is truncated or damaged ({error}); replace the file") from None


def resized(image: "Image", size: int | None, crop: float) -> "Image":
    """Returns the centre of an image, with sides of `size` pixels; the image itself if it has them or `size` is None.

    As published test crops do (DeiT, timm): the shorter side becomes floor(size / crop), bicubic.
    """
    if size is None or image.size == (size, size):
        return image
    from PIL import Image

    short = max(size, int(size / crop))
    width, height = image.size
    if width <= height:
        target = (short, max(size, int(short * height / width)))
    else:
        target = (max(size, int(short * width / height)), short)
    image = image.resize(target, Image.Resampling.BICUBIC)
    left, top = round((target[0] - size) / 2), round((target[1] - size) / 2)
    return image.crop((left, top, left + size, top + size))


def pixels(image: "Image") -> np.ndarray:
    """Returns the pixels of an image of mode L or RGB, uint8 [C, H, W]."""
    values = np.asarray(image)
    return values[None] if values.ndim == 2 else np.ascontiguousarray(values.transpose(2, 0, 1))


def from_pixels(values: np.ndarray) -> "Image":
    """Returns the image with pixels uint8 [C, H, W], C 1 or 3."""
    from PIL import Image

    return Image.fromarray(values[0] if len(values) == 1 else np.ascontiguousarray(values.transpose(1, 2, 0)))


def _converted(image: "Image", convert: str | None) -> "Image":
    if image.mode == "F":
        raise Damaged("has pixels that are floats; save it with 8 or 16 bits per channel")
    if image.mode in WIDE:
        from PIL import Image

        # Pillow's own conversion clips 16 bits to 255.
        values = np.asarray(image).astype(np.int64)
        if values.size and not 0 <= values.min() <= values.max() < 1 << 16:
            raise Damaged("has pixels outside 16 bits; save it with 8 or 16 bits per channel")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # otherwise Pillow warns
    grey = convert == "grey" or (convert is None and image.mode in GREY)
    mode = "L" if grey else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _bomb(what: str, limit: int | None) -> str:
    return f"has {what}, above {limit:,} (PIL.Image.MAX_IMAGE_PIXELS); make it smaller, or leave it out"


# Writes images as PNG, for pages and folders of samples.


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
