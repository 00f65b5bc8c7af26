"""Checkpoints of bundles, from which a killed bundle resumes exactly. They are in the folder of the first run.

A checkpoint is written after an epoch if the last one is a minute old or the bundle is asked to stop. It contains the
states of `Ensemble` and `Watch`; batches follow from seed and epoch. A bundle of other runs ignores the checkpoint.

When a bundle ends, the results of all its runs are first written into one file, bundle.json, then into each run folder,
so that a kill in between repeats no training.
"""

import json
import shutil
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from linnet.config import ConfigError
from linnet.runs import RunFolder, checkpoint
from linnet.runs.files import write_atomic
from linnet.runs.record import plain
from linnet.study.mad.training import Watch
from linnet.train.ensemble import Ensemble

SECONDS = 60.0  # between checkpoints: the training time that a kill can lose
RESULTS = "bundle.json"


class BundleCheckpoint:
    """The checkpoint of the runs in `folders`, which `ensemble` trains and `watch` scores."""

    def __init__(self, folders: Sequence[RunFolder], ensemble: Ensemble, watch: Watch):
        self._folder, self._runs = folders[0].checkpoint_folder, [one.path.name for one in folders]
        self._foreign = False
        self._ensemble, self._watch = ensemble, watch
        self._last = time.monotonic()

    def load(self) -> int:
        """Restores the checkpoint. Returns the number of finished epochs, 0 if there is none for these runs."""
        checkpoint.clean(self._folder)
        _, tensors, meta, problems = checkpoint.latest_good(self._folder)
        for problem in problems:
            warnings.warn(f"{problem}; the bundle resumes from an earlier epoch", stacklevel=2)
        self._foreign = bool(problems) or meta.get("runs") != self._runs
        if meta.get("runs") != self._runs:
            return 0
        self._ensemble.load_state(tensors["ensemble"])
        self._watch.load_state(tensors["watch"])
        return meta["epoch"]

    def keep(self, epoch: int, at_once: bool = False) -> None:
        """Writes a checkpoint after `epoch` epochs, if one is due. Raises `CheckpointError` if the disk is full."""
        if time.monotonic() - self._last < SECONDS and not at_once:
            return
        if self._foreign:  # it may have more steps, and only the checkpoint with the most steps is kept
            shutil.rmtree(self._folder, ignore_errors=True)
            self._foreign = False
        tensors = {"ensemble": self._ensemble.state(), "watch": self._watch.state()}
        meta = {"runs": self._runs, "epoch": epoch}
        checkpoint.save(self._folder, self._ensemble.step_number, tensors, meta, keep=1)
        self._last = time.monotonic()


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
