"""What a bundle that is killed goes on from, exactly, in the folder of its first run.

Its checkpoint is written after an epoch, where the last one is a minute old or the bundle is asked to stop, and holds
what `Ensemble.state` and `Watch.state` give. Batches follow from seed and epoch, so this is all there is. A bundle of
other runs does not read it.

At its end the results of all its runs are written into one file, bundle.json, before each gets its own: a bundle that
is killed among them has no run to train again.
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

SECONDS = 60.0  # of training that a kill may cost
RESULTS = "bundle.json"


class BundleCheckpoint:
    """The checkpoint of the runs of `folders`, trained by `ensemble` and looked at by `watch`."""

    def __init__(self, folders: Sequence[RunFolder], ensemble: Ensemble, watch: Watch):
        self._folder, self._runs = folders[0].checkpoint_folder, [one.path.name for one in folders]
        self._foreign = False
        self._ensemble, self._watch = ensemble, watch
        self._last = time.monotonic()

    def load(self) -> int:
        """Puts back what is there; the number of epochs behind it, 0 where there is nothing for these runs."""
        checkpoint.clean(self._folder)
        _, tensors, meta, problems = checkpoint.latest_good(self._folder)
        for problem in problems:
            warnings.warn(f"{problem}; the bundle goes back behind it", stacklevel=2)
        self._foreign = bool(problems) or meta.get("runs") != self._runs
        if meta.get("runs") != self._runs:
            return 0
        self._ensemble.load_state(tensors["ensemble"])
        self._watch.load_state(tensors["watch"])
        return meta["epoch"]

    def keep(self, epoch: int, at_once: bool = False) -> None:
        """After `epoch` epochs: writes a checkpoint if it is time. Raises `CheckpointError` where the disk is full."""
        if time.monotonic() - self._last < SECONDS and not at_once:
            return
        if self._foreign:  # of more steps, perhaps, and then it would be kept in place of this one
            shutil.rmtree(self._folder, ignore_errors=True)
            self._foreign = False
        tensors = {"ensemble": self._ensemble.state(), "watch": self._watch.state()}
        meta = {"runs": self._runs, "epoch": epoch}
        checkpoint.save(self._folder, self._ensemble.step_number, tensors, meta, keep=1)
        self._last = time.monotonic()


def write_results(folders: Sequence[RunFolder], results: Sequence[Mapping[str, Any]]) -> None:
    """Writes the results of a bundle's runs; where that is cut short, `finish` writes the rest."""
    names = [folder.path.name for folder in folders]
    write_atomic(folders[0].path / RESULTS, json.dumps(plain(dict(zip(names, results, strict=True)))) + "\n")
    finish(folders[:1])


def finish(folders: Iterable[RunFolder]) -> None:
    """Gives all runs of the bundles that ended in `folders` their results, and removes their checkpoints.

    Raises:
        ConfigError: results that are damaged.
    """
    for folder in folders:
        path = folder.path / RESULTS
        if not path.is_file():
            continue
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            problem = f"{path}: is damaged ({error}); delete it, and its runs are trained again"
            raise ConfigError([problem], "MAD") from None
        for name, result in results.items():
            run = RunFolder(folder.path.parent / name)
            if run.path.is_dir() and not run.done:
                run.write_result(result)
            shutil.rmtree(run.checkpoint_folder, ignore_errors=True)  # those of other bundles of these runs, too
        path.unlink()
