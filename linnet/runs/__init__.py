"""The run folder: configuration, records and checkpoints of one training; read and written by everything above."""

from linnet.runs.checkpoint import CheckpointError, latest_good
from linnet.runs.folder import LockedError, RunFolder
from linnet.runs.model import load_model, save_model
from linnet.runs.record import Record, read_rows

__all__ = [
    "CheckpointError",
    "LockedError",
    "Record",
    "RunFolder",
    "latest_good",
    "load_model",
    "read_rows",
    "save_model",
]
