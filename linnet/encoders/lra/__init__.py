"""The Long Range Arena: six tasks of long labelled sequences, generated or read from published folders.

corpus = prepare_lra(LraDataConfig(task="listops", size="reduced"), "cache")
inputs, lengths, labels = LabelledBatches(corpus.train, batch_size=32, seed=0).batch(step=0)
"""

from functools import partial

from linnet.deprecation import renamed
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
    "check_lra",
    "lra_content",
    "lra_task",
    "prepare_lra",
]


__getattr__ = partial(renamed, __name__)
