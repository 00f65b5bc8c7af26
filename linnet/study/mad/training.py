"""How the runs of a benchmark are trained, and which of their epochs counts.

- `paper` (004, appendix B): AdamW (0.9, 0.98), a cosine to zero, no stop: the last epoch counts.
- `mad-lab`: what the published implementation does. AdamW (0.9, 0.999) at a constant rate. The test split is looked at
  after each epoch; the epoch with its lowest loss counts, and a run ends when its accuracy (`macro_batch`) there passes
  99.9 %. (There: the lowest mean over batches of the perplexity.)
- `mqar`: zoology's Figure 2. AdamW (0.9, 0.999), a cosine to zero; a run ends when its accuracy on the validation split
  passes 99 %. The best of a setting's rates counts, so here the rates of a bundle end together, with the first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from linnet.study.mad.mqar import SOLVED
from linnet.train.ensemble import Score


@dataclass(frozen=True)
class Training:
    """A form of training.

    Attributes:
        betas: of AdamW. constant: the learning rate stays as it is, in place of a cosine to zero.
        spare: weight decay acts on the matrices of linear layers alone: not on norms, biases, embeddings and the
            layers' own parameters (decays, filters).
        watch: the split that is looked at after each epoch, "" for none. enough: accuracy there that ends a run.
    """

    betas: tuple[float, float] = (0.9, 0.98)
    constant: bool = False
    spare: bool = False
    watch: Literal["", "validation", "test"] = ""
    enough: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> "Training":
        """That of a run's configuration, which names it where it is not the paper's."""
        given = run.get("training", {})
        return cls(**given | {"betas": tuple(given.get("betas", PAPER.betas))})


PAPER = Training()
MAD_LAB = Training((0.9, 0.999), constant=True, watch="test", enough=0.999)
MQAR = Training((0.9, 0.999), watch="validation", enough=SOLVED)


class Counted(NamedTuple):
    """What counts of a run: its scores on both splits, and the epoch after which they were taken."""

    validation: Score
    test: Score
    epoch: int


class Watch:
    """The epochs that count of the runs of a bundle.

    Args:
        runs: configurations of the members, in order.
        score: the scores of all members on a split, "validation" or "test".
        alive: which members have not diverged.
        weights: of all members, [M, ...], changed in place by training; where given, `put_back` brings back those that
            count.
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
        self._weights = weights if self.form.watch else None  # where no epoch is looked at, the last ones count
        self._best = self._weights.clone() if self._weights is not None else None

    def look(self, epoch: int) -> bool:
        """After an epoch; whether all runs have ended."""
        if not self.form.watch:
            return False
        return self._lowest(epoch) if self.form.watch == "test" else self._solved(epoch)

    def end(self, epoch: int) -> list[Counted | None]:
        """What counts of each member after the last epoch; None of one that diverged before anything did."""
        self._take(sorted(self._living() - self._counted.keys()), epoch)
        return [self._counted.get(index) for index in range(len(self._groups))]

    def put_back(self) -> None:
        """After `end`: gives the members the weights that count, those that have any."""
        if self._weights is not None:
            counted = sorted(self._counted)
            self._weights[counted] = self._best[counted]

    def state(self) -> dict[str, Tensor]:
        """Which members are trained on, and what counts of the others, for a checkpoint."""
        rows = [
            (index, found.epoch, *asdict(found.validation).values(), *asdict(found.test).values())
            for index, found in self._counted.items()
        ]
        counted = torch.tensor(rows, dtype=torch.float64).view(len(rows), 8)
        found = {"open": torch.tensor(sorted(self._open), dtype=torch.int64), "counted": counted}
        return found if self._best is None else found | {"weights": self._best}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` gave for the same runs."""
        self._open = set(state["open"].tolist())
        self._counted = {
            int(row[0]): Counted(Score(*row[2:5]), Score(*row[5:]), int(row[1])) for row in state["counted"].tolist()
        }
        if self._best is not None:
            self._best.copy_(state["weights"])

    def _lowest(self, epoch: int) -> bool:
        living = sorted(self._living())
        if not living:
            return True
        validation, test = self._score("validation"), self._score("test")
        for index in living:
            if index not in self._counted or test[index].loss < self._counted[index].test.loss:
                self._count(index, Counted(validation[index], test[index], epoch))
            if test[index].macro_batch > self.form.enough:
                self._open.discard(index)
        return not self._open

    def _solved(self, epoch: int) -> bool:
        seen = self._score("validation")
        living = self._living()
        passed = {self._groups[index] for index in living if seen[index].accuracy > self.form.enough}
        ended = [index for index in self._open if self._groups[index] in passed]
        self._take(sorted(living.intersection(ended)), epoch, seen)
        self._open.difference_update(ended)
        return not self._open

    def _take(self, members: Sequence[int], epoch: int, validation: list[Score] | None = None) -> None:
        if members:
            validation, test = validation or self._score("validation"), self._score("test")
            for index in members:
                self._count(index, Counted(validation[index], test[index], epoch))

    def _count(self, index: int, found: Counted) -> None:
        self._counted[index] = found
        if self._best is not None:
            self._best[index] = self._weights[index]

    def _living(self) -> set[int]:
        """Members that are still trained and have not diverged."""
        return {index for index, lives in enumerate(self._alive()) if lives and index in self._open}
