"""The forms of training of a benchmark's runs, and the choice of the epoch that counts.

- `paper` (004, appendix B): AdamW (0.9, 0.98), a cosine to zero, no early stop. The last epoch counts.
- `mad-lab`: as in the published implementation. AdamW (0.9, 0.999) at a constant rate. The test split is scored after
  each epoch; the epoch with the lowest test loss counts, and a run ends when its accuracy there (`macro_batch`) passes
  99.9 %. (The published code takes the lowest mean over batches of the perplexity.)
- `mqar`: zoology's Figure 2. AdamW (0.9, 0.999), a cosine to zero. A run ends when its accuracy on the validation split
  passes 99 %. Only the best rate of a setting counts, so all rates of a bundle end with the first that passes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from linnet.mad.mqar import SOLVED
from linnet.train.together import Score


@dataclass(frozen=True)
class Training:
    """A form of training.

    Attributes:
        betas: betas of AdamW. constant: whether the learning rate is constant; otherwise it is a cosine to zero.
        matrices_only: whether norms, biases, embeddings and the layers' own parameters (decays, filters) are excluded
            from weight decay.
        watch: the split that is scored after each epoch, "" for none. enough: accuracy on it that ends a run.
    """

    betas: tuple[float, float] = (0.9, 0.98)
    constant: bool = False
    matrices_only: bool = False
    watch: Literal["", "validation", "test"] = ""
    enough: float = 1.0

    def scorings(self, epochs: int) -> int:
        """Returns how often a split is scored, at most, in a run of `epochs` epochs."""
        return {"": 2, "test": 2 * epochs, "validation": epochs + 1}[self.watch]

    def to_dict(self) -> dict[str, Any]:
        """Returns the form for a run's configuration. The keys never change, because folder names depend on them."""
        return {
            "betas": list(self.betas),
            "constant": self.constant,
            "spare": self.matrices_only,
            "watch": self.watch,
            "enough": self.enough,
        }

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> "Training":
        """Reads the form from a run's configuration; without a key `training` it is the paper's."""
        form = dict(run.get("training", {}))
        form |= {"betas": tuple(form.get("betas", PAPER.betas)), "matrices_only": form.pop("spare", False)}
        return cls(**form)


PAPER = Training()
MAD_LAB = Training((0.9, 0.999), constant=True, watch="test", enough=0.999)
MQAR = Training((0.9, 0.999), watch="validation", enough=SOLVED)


class Counted(NamedTuple):
    """The scores of a run on both splits after the epoch that counts, and this epoch."""

    validation: Score
    test: Score
    epoch: int


class Watch:
    """Chooses the epoch that counts for each run of a bundle.

    Args:
        runs: configurations of the members, in order.
        score: returns the scores of all members on a split, "validation" or "test".
        alive: returns which members have not diverged.
        weights: weights of all members, [M, ...], changed in place by training. If given, `put_back` restores the
            weights that count.
    """

    def __init__(
        self,
        runs: Sequence[Mapping[str, Any]],
        score: Callable[[str], list[Score]],
        alive: Callable[[], list[bool]],
        weights: Tensor | None = None,
    ):
        self.form = Training.of(runs[0])
        self._score, self._alive = score, alive
        self._groups = [(run["setting"], run["seed"]) for run in runs]
        self._open = set(range(len(runs)))
        self._counted: dict[int, Counted] = {}
        self._ended: dict[int, int] = {}  # member -> epoch that ended its training early
        self._weights = weights if self.form.watch else None  # without a watched split the last weights count
        self._best = self._weights.clone() if self._weights is not None else None

    def look(self, epoch: int) -> bool:
        """Scores the watched split after an epoch. Returns whether all runs have ended."""
        if not self.form.watch:
            return False
        return self._lowest(epoch) if self.form.watch == "test" else self._solved(epoch)

    def end(self, epoch: int) -> list[Counted | None]:
        """Returns the counted scores of each member after the last epoch; None if it diverged before one counted."""
        self._take(sorted(self._living() - self._counted.keys()), epoch)
        return self.counted()

    def put_back(self) -> None:
        """Restores the weights of each member that count, after `end`. Diverged members keep their weights."""
        if self._weights is not None:
            counted = sorted(self._counted)
            self._weights[counted] = self._best[counted]

    def state(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint: which members are still trained, and the counted scores of the others."""
        rows = [
            (index, scores.epoch, *asdict(scores.validation).values(), *asdict(scores.test).values())
            for index, scores in self._counted.items()
        ]
        counted = torch.tensor(rows, dtype=torch.float64).view(len(rows), 8)
        ended = torch.tensor(sorted(self._ended.items()), dtype=torch.int64).view(len(self._ended), 2)
        state = {"open": torch.tensor(sorted(self._open), dtype=torch.int64), "counted": counted, "ended": ended}
        return state if self._best is None else state | {"weights": self._best}

    @staticmethod
    def rows(state: Mapping[str, Tensor], members: Sequence[int]) -> dict[str, Tensor]:
        """Returns the `state` of some members, in their order."""
        new = {old: index for index, old in enumerate(members)}
        open_ = [new[old] for old in state["open"].tolist() if old in new]
        counted = [[new[int(row[0])], *row[1:]] for row in state["counted"].tolist() if int(row[0]) in new]
        ended = [[new[old], epoch] for old, epoch in state["ended"].tolist() if old in new] if "ended" in state else []
        subset = {
            "ended": torch.tensor(ended, dtype=torch.int64).view(len(ended), 2),
            "open": torch.tensor(sorted(open_), dtype=torch.int64),
            "counted": torch.tensor(counted, dtype=torch.float64).view(len(counted), 8),
        }
        return subset | ({"weights": state["weights"][list(members)]} if "weights" in state else {})

    @property
    def open(self) -> list[int]:
        """The members that are still trained and have not diverged."""
        return sorted(self._living())

    def counted(self) -> list[Counted | None]:
        """Returns the scores of each member that count so far."""
        return [self._counted.get(index) for index in range(len(self._groups))]

    def epochs(self, epoch: int) -> list[int]:
        """Returns the number of epochs of each member after `epoch` epochs: fewer for those that ended early."""
        return [self._ended.get(index, epoch) for index in range(len(self._groups))]

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores the output of `state` for the same runs."""
        self._open = set(state["open"].tolist())
        self._counted = {
            int(row[0]): Counted(Score(*row[2:5]), Score(*row[5:]), int(row[1])) for row in state["counted"].tolist()
        }
        self._ended = dict(state["ended"].tolist()) if "ended" in state else {}
        if self._best is not None:
            self._best.copy_(state["weights"])

    def _lowest(self, epoch: int) -> bool:
        living = sorted(self._living())
        if not living:
            return True
        test = self._score("test")
        better = [i for i in living if i not in self._counted or test[i].loss < self._counted[i].test.loss]
        validation = self._score("validation") if better else []
        for index in better:
            self._count(index, Counted(validation[index], test[index], epoch))
        for index in living:
            if test[index].macro_batch > self.form.enough:
                self._end_early([index], epoch)
        return not self._open

    def _solved(self, epoch: int) -> bool:
        seen = self._score("validation")
        living = self._living()
        passed = {self._groups[index] for index in living if seen[index].accuracy > self.form.enough}
        ended = [index for index in self._open if self._groups[index] in passed]
        self._take(sorted(living.intersection(ended)), epoch, seen)
        self._end_early(ended, epoch)
        return not self._open

    def _end_early(self, members: Sequence[int], epoch: int) -> None:
        self._open.difference_update(members)
        self._ended |= dict.fromkeys(members, epoch)

    def _take(self, members: Sequence[int], epoch: int, validation: list[Score] | None = None) -> None:
        if members:
            validation, test = validation or self._score("validation"), self._score("test")
            for index in members:
                self._count(index, Counted(validation[index], test[index], epoch))

    def _count(self, index: int, counted: Counted) -> None:
        self._counted[index] = counted
        if self._best is not None:
            self._best[index] = self._weights[index]

    def _living(self) -> set[int]:
        """Returns the members that are still trained and have not diverged."""
        return {index for index, lives in enumerate(self._alive()) if lives and index in self._open}
