"""The checkpoint of a bundle, in the folder of its first run: a bundle that was killed goes on from it, exactly.

It is written after an epoch, where the last one is a minute old or the bundle is asked to stop, and holds what
`Ensemble.state` and `Watch.state` give. Batches follow from seed and epoch, so this is all there is. A bundle of other
runs does not read it.
"""

import shutil
import time
import warnings
from collections.abc import Sequence

from linnet.runs import RunFolder, checkpoint
from linnet.study.mad.training import Watch
from linnet.train.ensemble import Ensemble

SECONDS = 60.0  # of training that a kill may cost


class BundleCheckpoint:
    """The checkpoint of the runs of `folders`, trained by `ensemble` and looked at by `watch`."""

    def __init__(self, folders: Sequence[RunFolder], ensemble: Ensemble, watch: Watch):
        self._folders, self._runs = [one.checkpoint_folder for one in folders], [one.path.name for one in folders]
        self._folder, self._foreign = self._folders[0], False
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

    def remove(self) -> None:
        """The runs are done; what bundles of others of them have left goes, too."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
