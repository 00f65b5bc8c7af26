"""The run folder: configuration, records and checkpoints of one training; read and written by everything above."""

from linnet.runs.checkpoint import CheckpointError, latest_good
from linnet.runs.folder import LockedError, RunFolder
from linnet.runs.record import Record, read_rows

__all__ = ["CheckpointError", "LockedError", "Record", "RunFolder", "latest_good", "read_rows"]
