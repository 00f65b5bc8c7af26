"""Checkpoints of bundles, from which a killed bundle resumes exactly. They are in the folder of the first run.

A checkpoint is written after an epoch if the last one is a minute old or the bundle is asked to stop. It contains the
states of `Ensemble` and `Watch`; batches follow from seed and epoch. A bundle of some of its runs resumes from it, too;
one with other runs ignores it.

When a bundle ends, the results of all its runs are first written into one file, bundle.json, then into each run folder,
so that a kill in between repeats no training.
"""

import json
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from linnet.config import ConfigError
from linnet.mad.training import Watch
from linnet.runs import RunFolder, checkpoint
from linnet.runs.files import write_atomic
from linnet.runs.record import plain
from linnet.train.together.ensemble import Ensemble

SECONDS = 60.0  # between checkpoints: the training time that a kill can lose
RESULTS = "bundle.json"


class Found(NamedTuple):
    """The checkpoint that the runs of a bundle resume from.

    Attributes:
        epoch: number of finished epochs. vocabulary: to which the embeddings of the models are padded, None if they are
            not. ensemble, watch: states of these runs. problems: files that are damaged.
        foreign: whether files of other checkpoints are in the folder.
    """

    epoch: int = 0
    vocabulary: int | None = None
    ensemble: Mapping[str, Tensor] | None = None
    watch: Mapping[str, Tensor] | None = None
    foreign: bool = False


def find_checkpoint(folders: Sequence[RunFolder]) -> Found:
    """Returns the checkpoint for the runs in `folders`: of their bundle, or of a larger one with all of them."""
    folder, runs = folders[0].checkpoint_folder, [one.path.name for one in folders]
    checkpoint.clean(folder)
    _, tensors, meta, problems = checkpoint.latest_good(folder)
    for problem in problems:
        warnings.warn(f"{problem}; the bundle resumes from an earlier epoch", stacklevel=2)
    known = meta.get("runs", [])
    foreign = bool(problems) or known != runs
    if not known or not set(runs) <= set(known):
        return Found(foreign=foreign)
    ensemble, watch = tensors["ensemble"], tensors["watch"]
    if known != runs:
        places = [known.index(name) for name in runs]
        ensemble = {name: x[places] if x.ndim else x for name, x in ensemble.items()}
        watch = Watch.rows(watch, places)
    return Found(meta["epoch"], meta.get("vocabulary"), ensemble, watch, foreign)


class BundleCheckpoint:
    """The checkpoint of the runs in `folders`, which `ensemble` trains and `watch` scores.

    Args:
        found: where the runs begin. vocabulary: to which the embeddings are padded, None if they are not.
    """

    def __init__(
        self, folders: Sequence[RunFolder], ensemble: Ensemble, watch: Watch, found: Found, vocabulary: int | None
    ):
        self._folder, self._runs = folders[0].checkpoint_folder, [one.path.name for one in folders]
        self._ensemble, self._watch = ensemble, watch
        self._found, self._foreign, self._vocabulary = found, found.foreign, vocabulary
        self._last = time.monotonic()

    def load(self) -> int:
        """Restores the checkpoint. Returns the number of finished epochs, 0 if there is none for these runs."""
        if self._found.ensemble is not None and self._found.watch is not None:
            self._ensemble.load_state(self._found.ensemble)
            self._watch.load_state(self._found.watch)
        return self._found.epoch

    def keep(self, epoch: int, at_once: bool = False) -> None:
        """Writes a checkpoint after `epoch` epochs, if one is due. Raises `CheckpointError` if the disk is full."""
        if time.monotonic() - self._last < SECONDS and not at_once:
            return
        if self._foreign:  # it may have more steps, and only the checkpoint with the most steps is kept
            shutil.rmtree(self._folder, ignore_errors=True)
            self._foreign = False
        self._save(self._folder, epoch)
        self._last = time.monotonic()

    def keep_for(self, run: RunFolder, epoch: int) -> None:
        """Writes a checkpoint of the whole bundle for a bundle of some of its runs, of which `run` is the first."""
        self.keep(epoch, at_once=True)
        if run.checkpoint_folder != self._folder:
            shutil.rmtree(run.checkpoint_folder, ignore_errors=True)
            self._save(run.checkpoint_folder, epoch)

    def _save(self, folder: Path, epoch: int) -> None:
        tensors = {"ensemble": self._ensemble.state(), "watch": self._watch.state()}
        meta = {"runs": self._runs, "epoch": epoch, "vocabulary": self._vocabulary}
        checkpoint.save(folder, self._ensemble.step_number, tensors, meta, keep=1)


def write_results(folders: Sequence[RunFolder], results: Sequence[Mapping[str, Any]]) -> None:
    """Writes the results of a bundle's runs. After a kill in between, `finish` writes the rest."""
    names = [folder.path.name for folder in folders]
    write_atomic(folders[0].path / RESULTS, json.dumps(plain(dict(zip(names, results, strict=True)))) + "\n")
    finish(folders[:1])


def finish(folders: Iterable[RunFolder]) -> None:
    """Writes the results of finished bundles in `folders` to their runs, and removes their checkpoints.

    Raises:
        ConfigError: a file of results is damaged.
    """
    for folder in folders:
        path = folder.path / RESULTS
        if not path.is_file():
            continue
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            problem = f"{path}: is damaged ({error}); delete it to train its runs again"
            raise ConfigError([problem], "MAD") from None
        for name, result in results.items():
            run = RunFolder(folder.path.parent / name)
            if run.path.is_dir() and not run.done:
                run.write_result(result)
            shutil.rmtree(run.checkpoint_folder, ignore_errors=True)  # including those of other bundles of these runs
        path.unlink()
