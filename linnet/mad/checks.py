"""Checks the findings of paper 004, section 3.4, on other runs: striped or uniform, heads or none, MoE or SwiGLU.

Each check is a mean over pairs of architectures that differ only in one property, on the settings that both have. So
differences between mixers cancel, which they would not in a mean over all architectures of a kind.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

from linnet.laws.orders import side, t_interval
from linnet.mad.results import ATTENTION, WITHOUT_HEADS, Design
from linnet.mad.scores import Score, Scores

NOT_ENOUGH, TOO_FEW = "not enough runs", "too few pairs to tell"
HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
PAIRS_FOR_INTERVAL = 3


@dataclass(frozen=True)
class Pair:
    """Two architectures that differ in one property, which `first` has and `second` lacks.

    Attributes:
        gain: accuracy of the first minus that of the second, mean over the tasks that both have.
        tasks: the gain per task. settings: number of settings in common.
    """

    first: str
    second: str
    gain: float
    tasks: dict[str, float]
    settings: int


@dataclass(frozen=True)
class Check:
    """One finding of the paper, checked.

    Attributes:
        claim: the finding. paper_gain: the mean gain in accuracy in the paper, as a share.
        pairs: pairs among the scored architectures. gain: mean over the pairs, None without a pair. Pairs that share an
            architecture share its noise, so they count as one, with their mean.
        interval: 95 % over pairs (Student's t); None below `PAIRS_FOR_INTERVAL` pairs.
        verdict: "holds" or "does not hold" if the interval excludes zero, else the reason why it is open.
        needed: the architectures to run, if there is no pair.
        notes: remarks for the reader.
    """

    name: str
    claim: str
    paper_gain: float
    pairs: list[Pair]
    gain: float | None
    interval: tuple[float, float] | None
    verdict: str
    needed: str = ""
    notes: list[str] = field(default_factory=list)


def checks(scores: Scores) -> list[Check]:
    """Checks the three findings. A check without enough runs says so in its verdict."""
    kinds = {name: score.design for name, score in scores.items() if score.design is not None}
    findings = [
        _check(scores, name, claim, gain, pair_up(kinds), needed) for name, claim, gain, pair_up, needed in _FINDINGS
    ]
    findings[0].notes.extend(_every_striped(scores, kinds))
    if unknown := [name for name in scores if name not in kinds]:
        note = f"{', '.join(unknown)}: in no pair, because layers are not recorded; add a column `layers` to mad.csv"
        for check in findings:
            check.notes.append(note)
    return findings


def compare(first: Score, second: Score) -> Pair | None:
    """Compares two architectures on the settings that both have. Returns None if there are none."""
    tasks, settings = {}, 0
    for task in first.tasks:
        if task not in second.tasks:
            continue
        first_settings, second_settings = first.tasks[task].settings, second.tasks[task].settings
        common = [name for name in first_settings if name in second_settings]
        if common:
            tasks[task] = fmean(first_settings[name].score - second_settings[name].score for name in common)
            settings += len(common)
    if not tasks:
        return None
    return Pair(first.architecture, second.architecture, fmean(tasks.values()), tasks, settings)


def _check(scores, name, claim, paper_gain, names, needed) -> Check:
    pairs = [pair for first, second in names if (pair := compare(scores[first], scores[second])) is not None]
    if not pairs:
        return Check(name, claim, paper_gain, [], None, None, NOT_ENOUGH, needed)
    groups = _linked(pairs)
    gains = [fmean(pair.gain for pair in group) for group in groups]
    interval, verdict = None, TOO_FEW
    if len(gains) >= PAIRS_FOR_INTERVAL:
        interval = t_interval(gains)
        verdict = {1: HOLDS, -1: FAILS, 0: OPEN}[side(*interval)]
    notes = []
    if len(groups) < len(pairs):
        notes.append(f"pairs that share an architecture count as one, which leaves {len(groups)}")
    strange = sorted({n for pair in pairs for n in (pair.first, pair.second) if not scores[n].comparable})
    if strange:
        notes.append(f"{len(strange)} of these architectures have scores that are not comparable with others")
    return Check(name, claim, paper_gain, pairs, fmean(gains), interval, verdict, notes=notes)


def _linked(pairs: list[Pair]) -> list[list[Pair]]:
    """Returns the pairs in groups that share no architecture with one another."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        names = {pair.first, pair.second}
        near = [group for group in groups if names & {name for other in group for name in (other.first, other.second)}]
        groups = [group for group in groups if group not in near] + [[*sum(near, []), pair]]
    return groups


def _striped(kinds: dict[str, Design]) -> Iterator[tuple[str, str]]:
    for first, kind in kinds.items():
        if not kind.striped:
            continue
        for second, other in kinds.items():
            # Uniform Mamba has no channel mixers; it is paired with every striped form of it.
            if other.mixers == kind.base and other.channels in (kind.channels, ()):
                yield first, second


def _heads(kinds: dict[str, Design]) -> Iterator[tuple[str, str]]:
    return _replaced(kinds, lambda name: WITHOUT_HEADS.get(name, name), "mixers")


def _sparse(kinds: dict[str, Design]) -> Iterator[tuple[str, str]]:
    return _replaced(kinds, lambda name: "swiglu" if name == "moe" else name, "channels")


def _replaced(kinds: dict[str, Design], without: Callable[[str], str], part: str) -> Iterator[tuple[str, str]]:
    """Yields pairs that are equal after `without` is applied to the names in one part of the first."""
    for first, kind in kinds.items():
        changed = tuple(sorted({without(name) for name in getattr(kind, part)}))
        if changed == getattr(kind, part):
            continue
        wanted = Design(**{"mixers": kind.mixers, "channels": kind.channels, part: changed})
        yield from ((first, second) for second, other in kinds.items() if other == wanted)


def _every_striped(scores: Scores, kinds: dict[str, Design]) -> list[str]:
    """Checks the stronger half of the first finding: striped architectures outperform all others."""
    uniform = [name for name in kinds if not kinds[name].striped]
    striped = [name for name in kinds if kinds[name].striped]
    if not uniform or not striped or len({frozenset(scores[name].settings) for name in scores}) > 1:
        return []  # nothing to compare, or scores over different settings
    best = max(uniform, key=lambda name: scores[name].score)
    above = set(scores.order().above(best))
    count = f"{len(above & set(striped))} of {len(striped)} striped architectures can be told apart"
    return [f"{count} above the highest score of a uniform one, that of {best}"]


_FINDINGS = (
    (
        "striped",
        "Striped architectures outperform uniform ones",
        0.081,
        _striped,
        f"needs a striped architecture and the same one without {ATTENTION}: mad-hyena-attention-swiglu, "
        "mad-hyena-swiglu",
    ),
    (
        "heads",
        "Heads outperform none at the same state",
        0.023,
        _heads,
        "needs an architecture with heads and the same one without: mad-mh-hyena-swiglu, mad-hyena-swiglu",
    ),
    (
        "moe",
        "Sparse mixtures of experts outperform SwiGLU",
        0.017,
        _sparse,
        "needs an architecture with moe and the same one with swiglu: mad-hyena-moe, mad-hyena-swiglu",
    ),
)
