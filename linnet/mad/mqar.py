"""Results of MQAR: accuracy by length, pairs and width, and whether HGRN2 recalls more than HGRN.

Section 4.1 and Figure 4 of paper 002: the expanded state of HGRN2 recalls pairs that HGRN, with one number per channel,
cannot.
"""

import re
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from linnet.laws.orders import LEVEL, holm, t_test
from linnet.mad.checks import FAILS, HOLDS, NOT_ENOUGH
from linnet.mad.checks import OPEN as UNTOLD
from linnet.mad.scores import Scores, SettingScore
from linnet.mad.settings import BUDGETS, MQAR_SETTINGS, MQAR_WIDTHS

TASK = "mqar"
SOLVED = 0.99  # accuracy at which training ends; higher ones count as equal
OPEN = 0.95  # below this accuracy another model can be clearly better
HARDER = tuple((setting.task.seq_len, setting.task.num_pairs) for setting in MQAR_SETTINGS)
_NAME = re.compile(r"mqar/(\d+)x(\d+),width=(\d+)")


class Place(NamedTuple):
    """A setting of MQAR."""

    width: int
    length: int
    pairs: int

    def __str__(self) -> str:
        return f"{self.length} with {self.pairs} pairs at width {self.width}"


@dataclass(frozen=True)
class Comparison:
    """Compares `first` with `second` at the settings where both have runs.

    Differences are paired by seed and tested by Student's t over the seeds, since two trainings of one model differ by
    far more than chance in its questions. "holds" needs every setting, so each is tested at 5 %; one setting is enough
    for "does not hold", so there the settings share the 5 % (Holm).

    Attributes:
        verdict: "does not hold" if a setting has the first below the second; "not enough runs" if a setting lacks one
            of the two, or some of its learning rates; "cannot be told" if a setting is close; else "holds".
        accuracies: setting -> means over the seeds that both have.
        wrong: setting -> problem there. missing: settings without all runs of both.
        close: settings where the seeds do not tell the first above the second, if the second is under `OPEN` or the
            mean of the first is lower.
        seeds: smallest number of seeds that both have at a setting; one tells no difference.
    """

    first: str
    second: str
    verdict: str
    accuracies: dict[Place, tuple[float, float]]
    wrong: dict[Place, str] = field(default_factory=dict)
    missing: tuple[Place, ...] = ()
    close: tuple[Place, ...] = ()
    seeds: int = 0

    @property
    def claim(self) -> str:
        return f"{self.first} never below {self.second}, and above it wherever that stays under {OPEN:.0%}"

    @property
    def told(self) -> str:
        """Returns the rest of the sentence that begins with the verdict."""
        if self.wrong:
            return ": " + ", ".join(f"{what} at {self._at(place)}" for place, what in self.wrong.items())
        text = "" if self.close else f" in all {len(self.accuracies)} settings"
        if self.missing:
            settled = f"{len(self.accuracies) - len(self.close)} of " if self.close else ""
            have = f"it holds in {settled}the {len(self.accuracies)} settings that both have, and "
            have = have if self.accuracies else ""
            text = f": {have}both are needed at {', '.join(map(str, self.missing))}"
        if self.close:
            text += f"; the difference may be chance at {', '.join(map(self._at, self.close))}"
            text += "" if self.seeds > 1 else "; one seed tells no difference, run --seed 0,1,2"
        return text

    def _at(self, place: Place) -> str:
        high, low = self.accuracies[place]
        return f"{place} ({100 * high:.2f} and {100 * low:.2f} %)"


def is_mqar(scores: Scores) -> bool:
    """Whether all scores are of MQAR."""
    return scores.tasks == [TASK]


def settings_of(scores: Scores, architecture: str) -> dict[Place, SettingScore]:
    """Returns the settings that an architecture has, by width, then from easy to hard."""
    task = scores[architecture].tasks.get(TASK)
    settings = {place_of(setting.name): setting for setting in task.settings.values()} if task is not None else {}
    return dict(sorted(settings.items()))


def place_of(name: str) -> Place:
    """Reads the name of a setting. Raises ValueError if it is not one of MQAR."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a setting of MQAR such as mqar/64x4,width=64")
    length, pairs, width = map(int, match.groups())
    return Place(width, length, pairs)


def compare(scores: Scores, first: str = "hgrn2", second: str = "hgrn") -> Comparison:
    """Checks paper 002's claim, as `Comparison` says. Accuracies that both pass `SOLVED` count as equal."""
    first_settings, second_settings = (_whole(scores, name) if name in scores else {} for name in (first, second))
    every = [Place(width, *shape) for width in MQAR_WIDTHS for shape in HARDER]
    pairs = {
        setting: _pairs(first_settings[setting], second_settings[setting], scores.metric)
        for setting in sorted(first_settings.keys() & second_settings.keys())
    }
    pairs = {setting: of_seeds for setting, of_seeds in pairs.items() if of_seeds}
    accuracies = {setting: tuple(map(fmean, zip(*of_seeds, strict=True))) for setting, of_seeds in pairs.items()}
    compared = [setting for setting, levels in accuracies.items() if min(levels) < SOLVED]
    p = [t_test([high - low for high, low in pairs[setting]]) for setting in compared]
    alone = dict(zip(compared, (1.0 if value is None else value for value in p), strict=True))
    together = dict(zip(compared, holm(list(alone.values())), strict=True))
    wrong, close = {}, []
    for setting in compared:
        high, low = accuracies[setting]
        if high < low and together[setting] < LEVEL:
            wrong[setting] = "below"
        elif high < low or ((low < OPEN or len(pairs[setting]) < 2) and alone[setting] >= LEVEL):
            close.append(setting)
    missing = tuple(setting for setting in every if setting not in pairs)
    verdict = FAILS if wrong else NOT_ENOUGH if missing else UNTOLD if close else HOLDS
    seeds = min(map(len, pairs.values()), default=0)
    return Comparison(first, second, verdict, accuracies, wrong, missing, tuple(close), seeds)


def _pairs(first: SettingScore, second: SettingScore, metric: str) -> list[tuple[float, float]]:
    """Returns the numbers of two models, seed by seed; [] without a seed that both have."""
    seeds = sorted(first.best.keys() & second.best.keys())
    return [(getattr(first.best[seed], metric), getattr(second.best[seed], metric)) for seed in seeds]


def _whole(scores: Scores, architecture: str) -> dict[Place, SettingScore]:
    """Returns the settings for which all learning rates were tried; in others the best rate may be missing."""
    budget = BUDGETS.get(scores[architecture].budget)
    rates = len(budget.grid) if budget is not None else 1
    settings = settings_of(scores, architecture)
    return {place: setting for place, setting in settings.items() if setting.runs >= rates * len(setting.best)}
