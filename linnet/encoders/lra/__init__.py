"""The Long Range Arena: six tasks of long labelled sequences, generated or read from published folders.

corpus = prepare_lra(LraDataConfig(task="listops", size="reduced"), "cache")
inputs, lengths, labels = LabelledBatches(corpus.train, batch_size=32, seed=0).batch(step=0)
"""

import importlib
from typing import Any

from linnet.encoders.lra.corpus import LraCorpus, LraSplit, check_lra, lra_content, lra_task, prepare_lra
from linnet.encoders.lra.task import END, NAMES, PADDING, UNKNOWN, LraDataConfig, LraRows, LraTask, SampleCounts

__all__ = [
    "END",
    "LraCorpus",
    "LraDataConfig",
    "LraRows",
    "LraSplit",
    "LraTask",
    "NAMES",
    "PADDING",
    "SampleCounts",
    "UNKNOWN",
    "augment_lra",
    "check_lra",
    "lra_content",
    "lra_task",
    "prepare_lra",
]


def __getattr__(name: str) -> Any:
    if name == "augment_lra":  # the only one that needs torch when it is imported
        return importlib.import_module("linnet.encoders.lra.augment").augment_lra
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
