"""Old import path of `tpe`, which is a mixer since 0.2.0."""

from linnet.deprecation import renamed

_NEW = "linnet.layers.mixers.tpe"

__getattr__ = renamed(__name__, {"Tpe": f"{_NEW}.Tpe", "TpeConfig": f"{_NEW}.TpeConfig"})
