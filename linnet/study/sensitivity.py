"""How much the loss of each architecture of a study depends on its learning rate (`rate_sensitivity`).

One run of each architecture, of the median size at the median budget, is trained at half and at two times its learning
rate too. The sensitivity is the largest difference between two of the three losses. If two architectures differ by
less, the rate may decide which one is better. Everything is read from plan.json and the run folders.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from linnet.config import grouped
from linnet.runs import RunFolder
from linnet.study.collect import RUNS, read_plan, read_rate_runs

FACTORS = (0.5, 2.0)
"""Learning rates of the further runs, in units of the planned one."""
UNKNOWN = "how much another learning rate changes these losses was not measured, so the rate may decide a comparison"
"""What a reader of a comparison must know if it has no such runs."""
MOST = 10
"""Pairs of architectures that are listed with their numbers."""
SETTING = "rate_sensitivity: true"
FIX = f"{SETTING} trains two further runs of each architecture"


@dataclass(frozen=True)
class Sensitivity:
    """The losses of one run at three learning rates, in nats per token (or image).

    Attributes:
        size: label of its size.
        tokens: tokens, or images, that the run reads.
        rate: its planned learning rate.
        losses: factor of the rate (0.5, 1, 2) -> loss; infinite if that run diverged, absent if it has no result yet.
    """

    architecture: str
    budget: float
    size: str
    tokens: int
    rate: float
    losses: Mapping[float, float]

    @property
    def value(self) -> float | None:
        """The largest difference between two of the losses: infinite if one diverged, None if one is absent."""
        if len(self.losses) <= len(FACTORS):
            return None
        low, high = min(self.losses.values()), max(self.losses.values())
        return high - low if math.isfinite(high) else math.inf


@dataclass(frozen=True)
class Doubt:
    """Two architectures whose losses at one budget, or number of tokens, differ by less than their sensitivity.

    Attributes:
        gap: absolute difference of their losses at the planned rates.
        sensitivity: the larger of their two.
    """

    first: str
    second: str
    gap: float
    sensitivity: float


Sensitivities = Mapping[str, Sensitivity]


def read_sensitivities(folder: str | Path) -> dict[str, Sensitivity]:
    """Returns architecture -> its losses at three rates, {} for a study without `rate_sensitivity`.

    Raises:
        ConfigError: plan.json or a result is missing or damaged.
    """
    folder = Path(folder)
    losses: dict[str, dict[float, float]] = {}
    varied = read_rate_runs(folder)
    planned = {run["run"]: run for run in read_plan(folder)} if varied else {}
    for run in varied:
        by_factor = losses.setdefault(run["of"], {})
        for factor, name in ((1.0, run["of"]), (run["factor"], run["run"])):
            if (loss := _loss(folder / RUNS / name)) is not None:
                by_factor[factor] = loss
    sensitivities = {}
    for name in losses:
        rate = next(run["learning_rate"] / run["factor"] for run in varied if run["of"] == name)
        of, by_factor = planned[name], dict(sorted(losses[name].items()))
        about = (of["architecture"], of["budget"], of["size"], of["tokens"])
        sensitivities[of["architecture"]] = Sensitivity(*about, rate, by_factor)
    return {name: sensitivities[name] for name in sorted(sensitivities)}


def _loss(path: Path) -> float | None:
    """Returns the loss of a run: infinite if it diverged, None if it is not done."""
    run = RunFolder(path)
    if not run.done:
        return None
    result = run.result()
    loss = result.get("loss")
    return float(loss) if result["status"] == "done" and loss is not None else math.inf


def larger(found: Sensitivities, *names: str) -> float:
    """Returns the largest known sensitivity of some architectures, 0 if none is known."""
    values = [found[name].value for name in names if name in found]
    return max((value for value in values if value is not None), default=0.0)


def words(found: Sensitivities, first: str, second: str, gap: float, per: float = 1.0) -> str:
    """Returns what a reader must know about a gap between two losses that is smaller than their sensitivity, or "".

    Args:
        gap: absolute difference of the losses, in units of `per` nats.
        per: nats in the unit of `gap`, such as ln 2 for bits.
    """
    bound = larger(found, first, second) / per
    if not gap < bound:
        return ""
    if math.isinf(bound):
        return "the learning rate may decide it: a run diverged at half or two times the rate"
    return f"smaller than the rate sensitivity of {bound:.4f}: the learning rate may decide it"


def doubts(found: Sensitivities, architectures: Iterable[str] | None = None) -> list[Doubt]:
    """Returns the pairs of architectures that differ by less than the larger of their sensitivities.

    Only losses at the same budget, or the same number of tokens, are compared.

    Args:
        architectures: their order; default: that of `found`.
    """
    names = [name for name in (architectures if architectures is not None else found) if name in found]
    marked = []
    for first, second in combinations(names, 2):
        left, right = found[first], found[second]
        if left.budget != right.budget and left.tokens != right.tokens:
            continue
        gap = abs(left.losses.get(1.0, math.inf) - right.losses.get(1.0, math.inf))
        if gap < (bound := larger(found, first, second)):  # False for a gap that is not a number
            marked.append(Doubt(first, second, gap, bound))
    return marked


def sentences(marked: Sequence[Doubt]) -> list[str]:
    """Returns a sentence per doubt, or a shorter one per architecture if there are more than `MOST`."""
    if len(marked) <= MOST:
        return [sentence(doubt) for doubt in marked]
    others = grouped((doubt.first, doubt.second) for doubt in marked)
    return [f"{first} and each of {', '.join(names)}" for first, names in others.items()]


def sentence(doubt: Doubt) -> str:
    """Returns a doubt in words: `tnl and gla: gap 0.0012, rate sensitivity 0.0340`."""
    bound = "infinite (a run diverged)" if math.isinf(doubt.sensitivity) else f"{doubt.sensitivity:.4f}"
    return f"{doubt.first} and {doubt.second}: gap {doubt.gap:.4f}, rate sensitivity {bound}"


def shown_loss(one: Sensitivity, factor: float) -> str:
    """Returns a loss for a table."""
    return _shown(one.losses.get(factor), "no result")


def shown_value(one: Sensitivity) -> str:
    """Returns the sensitivity for a table."""
    return _shown(one.value, "not known")


def _shown(value: float | None, absent: str) -> str:
    if value is None:
        return absent
    return "diverged" if math.isinf(value) else f"{value:.4f}"
