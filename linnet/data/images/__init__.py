"""Readers of labelled images: which files a configuration names, and the pixels and label of each image in them.

config.py   the keys    sources.py   the forms of files    decode.py   bytes -> pixels, pixels -> PNG
"""

from functools import partial

from linnet.data.images.config import ImageDataConfig
from linnet.deprecation import renamed

__all__ = ["ImageDataConfig"]
__getattr__ = partial(renamed, __name__)
