"""The run folder: configuration, records and checkpoints of one training, for all packages above this one.

`load_model` and `save_model` import torch on first use, so that records can be read without it.
"""

import importlib

from linnet.runs.checkpoint import CheckpointError, latest_good
from linnet.runs.folder import InUseError, LockedError, RunFolder
from linnet.runs.record import Record, read_rows

__all__ = [
    "CheckpointError",
    "InUseError",
    "LockedError",
    "Record",
    "RunFolder",
    "latest_good",
    "load_model",
    "read_rows",
    "save_model",
]


def __getattr__(name: str):
    if name not in ("load_model", "save_model"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("linnet.runs.model"), name)
