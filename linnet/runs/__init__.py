"""The run folder: configuration, records and checkpoints of one training, for all packages above this one.

`load_model` and `save_model` import torch on first use, so that records can be read without it.
"""

from linnet.deprecation import lazily
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

__getattr__ = lazily(__name__, {"load_model": "model", "save_model": "model"})
