"""Do MAD scores discriminate, and do they repeat? The spread of each task, and how seeds and folders agree.

Everything follows from scores; nothing is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from linnet.mad.results import Result
from linnet.mad.scores import Scores, number_of_results, score

GAP = 0.10  # a task discriminates if its best and worst architecture differ by as much


@dataclass(frozen=True)
class Spread:
    """The architectures with the highest and the lowest score of a task, and whether the seeds tell them apart."""

    task: str
    best: str
    worst: str
    gap: float
    apart: bool

    @property
    def discriminates(self) -> bool:
        return self.apart and self.gap >= GAP


@dataclass(frozen=True)
class SeedAgreement:
    """The architectures in the order of their scores, by each of two seeds.

    Attributes:
        swaps: pairs of architectures that the seeds order differently.
        spearman: rank correlation of the two orders, None below three architectures or where all scores are equal.
    """

    seeds: tuple[int, int]
    orders: tuple[tuple[str, ...], tuple[str, ...]]
    swaps: int
    spearman: float | None


@dataclass(frozen=True)
class FolderAgreement:
    """Rank correlation of the scores of two folders, over all tasks ("all") and by task.

    Attributes:
        architectures: those with a score in both. spearman: task -> correlation, None below three architectures or
            where all scores are equal.
    """

    architectures: tuple[str, ...]
    spearman: dict[str, float | None]


def spreads(scores: Scores) -> list[Spread]:
    """Returns the spread of each task over the architectures that have every setting. Below two there is none."""
    found = []
    for task in scores.tasks:
        known = {name: one.tasks[task].score for name, one in scores.whole.items() if task in one.tasks}
        if len(known) > 1:
            best, worst = max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])
            apart = scores.order(task).lower(best, worst) is not None
            found.append(Spread(task, best, worst, known[best] - known[worst], apart))
    return found


def seed_agreement(results: Sequence[Result]) -> list[SeedAgreement]:
    """Returns the agreement of each pair of seeds on the architectures that have every setting with both seeds."""
    number = number_of_results(results)
    by_seed = {}
    for seed in sorted({result.seed for result in results}):
        scores = score([result for result in results if result.seed == seed], **number)
        by_seed[seed] = {name: one.score for name, one in scores.whole.items()}
    found = []
    for first, second in combinations(by_seed, 2):
        names = [name for name in by_seed[first] if name in by_seed[second]]
        if len(names) < 2:
            continue
        one, two = (({name: by_seed[seed][name] for name in names}) for seed in (first, second))
        found.append(
            SeedAgreement(
                (first, second),
                (_order(one), _order(two)),
                sum((one[a] - one[b]) * (two[a] - two[b]) < 0 for a, b in combinations(names, 2)),
                rank_correlation(one, two),
            )
        )
    return found


def folder_agreement(scores: Scores, other: Scores) -> FolderAgreement:
    """Returns the rank correlation of two sets of scores, such as those of `screen` and `full`."""
    names = tuple(name for name in scores.whole if name in other.whole)
    found = {"all": rank_correlation(*({name: own[name].score for name in names} for own in (scores, other)))}
    for task in scores.tasks:
        if all(task in own[name].tasks for own in (scores, other) for name in names):
            found[task] = rank_correlation(
                *({name: own[name].tasks[task].score for name in names} for own in (scores, other))
            )
    return FolderAgreement(names, found)


def rank_correlation(one: Mapping[str, float], two: Mapping[str, float]) -> float | None:
    """Returns Spearman's rank correlation over equal keys, ties with mean ranks; None if it is not defined."""
    if len(one) < 3:
        return None
    first, second = (_ranks([values[name] for name in one]) for values in (one, two))
    mean = (len(one) - 1) / 2
    top = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    below = sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)
    return top / below**0.5 if below else None


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]


def _order(scores: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(sorted(scores, key=lambda name: (-scores[name], name)))
