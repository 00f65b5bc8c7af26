"""Further runs of a study: chooses those that narrow an interval (design.py), and knows what they cost.

The runs are stored as `points` of the study in its study.yaml, so a study that is stopped while it trains them goes on
with them.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from linnet.config import ConfigError, grouped
from linnet.laws.fit.results import ArchitectureFit
from linnet.study.architectures import Architecture, Rung, Size, make_rungs
from linnet.study.config import Point, StudyConfig
from linnet.study.design import STAR, Answer, Place, Question, answer
from linnet.study.ladder import Plan, numbers

SEVERAL = 8
"""Every round of the greedy choice adds one copy of the best candidate per this many runs that are chosen already."""
MOST = 4000
"""Number of runs from which an interval counts as out of reach."""
SAME = 0.1
"""Largest difference in log N of two sizes that count as one."""


@dataclass(frozen=True)
class Candidate:
    """A run that could be added: its point, its place, its parameters, steps, tokens and FLOPs."""

    point: Point
    place: Place
    params: int
    steps: int
    tokens: int
    flops: float


@dataclass
class Proposal:
    """The runs that answer a question about one architecture.

    Attributes:
        now: the present estimate, or the reason why there is none.
        runs: the chosen runs in order.
        expected: expected half-width of the interval after each of them; NaN while there is no estimate.
        wanted: half-width to reach, or None.
        enough: whether the wanted half-width is expected to be reached with `runs`.
    """

    architecture: str
    now: Answer | str
    runs: list[Candidate] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    wanted: float | None = None
    enough: bool = False

    @property
    def reached(self) -> bool:
        return isinstance(self.now, Answer) and self.wanted is not None and self.now.half_width <= self.wanted

    @property
    def flops(self) -> float:
        return sum(run.flops for run in self.runs)


def propose(plan: Plan, fit: ArchitectureFit, question: Question, most: int = MOST) -> Proposal:
    """Chooses further runs of one architecture.

    Args:
        plan: the study with all of its runs so far.
        fit: their fit, by "isoflop" and "parametric".
        question: the quantity. With a half-width, runs are chosen until it is expected to be reached.
        most: largest number of runs to choose.
    """
    estimate = answer(fit, question)
    grid = _Grid(plan, fit.architecture)
    if isinstance(estimate, str):
        runs = grid.first_optima(fit)[:most]
        return Proposal(fit.architecture, estimate, runs, [math.nan] * len(runs), None)
    result = Proposal(fit.architecture, estimate, wanted=question.wanted(estimate.value))
    now = estimate.half_width
    places: list[Place] = []
    while len(result.runs) < most:
        if result.wanted is not None and now <= result.wanted:
            break
        best, gain = [], 0.0
        for bundle in grid.candidates(estimate):
            there = [run.place for run in bundle]
            here = (now - estimate.expected([*places, *there])) / sum(run.flops for run in bundle)
            if here > gain:
                best, gain = bundle, here
        if not best:
            break
        copies = 1 if len(best) > 1 else max(1, len(result.runs) // SEVERAL)
        for run in best * copies:
            run = grid.take(run)
            places.append(run.place)
            result.runs.append(run)
        now = estimate.expected(places)
        result.expected += [now] * (len(result.runs) - len(result.expected))
    result.enough = result.wanted is not None and now <= result.wanted
    return result


class _Grid:
    """The sizes and budgets at which runs of an architecture can be added, and the seeds that are left there."""

    def __init__(self, plan: Plan, name: str):
        self.config = plan.config
        self.architecture = next(a for a in self.config.architectures if a.name == name)
        runs = [run for run in plan.runs if run.architecture == name]
        self.budgets = sorted({run.budget for run in runs} | set(self.config.budgets))
        self.models = {size: model for _, size, model in _shapes(self.config, self.architecture)}
        self.known: dict[tuple[float, str], int] = {}
        for run in runs:
            key = run.budget, run.size
            self.known[key] = max(self.known.get(key, -1), run.seed)
        self.trained = grouped((run.budget, math.log(run.params_non_embedding)) for run in runs)
        self._made: dict[tuple[Size, float], Candidate] = {}

    def candidates(self, found: Answer) -> Iterator[list[Candidate]]:
        """Yields single runs at the budgets of the study, and groups of sizes at new ones and where none counts."""
        for budget in self.budgets:
            straddling = [x - math.log(found.optimum(budget)) for x in self.trained.get(budget, [])]
            if len(straddling) >= 4 and min(straddling) < 0 < max(straddling):
                runs = [run for size in self.models if (run := self.at(size, budget)) is not None]
                offsets = [run.place.log_N - math.log(found.optimum(budget)) for run in runs]
                near = sorted(filter(lambda x: x < 0, offsets))[-2:] + sorted(filter(lambda x: x >= 0, offsets))[:2]
                for run, offset in zip(runs, offsets, strict=True):
                    if offset in near or found.inside(run.place):
                        yield [run]
            elif group := self.around(found.optimum(budget), budget):
                yield group
        for budget in self.new_budgets():
            if found.method == "isoflop":
                group = self.around(found.optimum(budget), budget)
                if len(group) == len(STAR):
                    yield group
            else:
                for size in self.models:
                    run = self.at(size, budget)
                    if run is not None and found.inside(run.place):
                        yield [run]

    def new_budgets(self) -> list[float]:
        """Returns budgets between those of the study that are more than 1.5x apart, and one above all."""
        if len(self.budgets) == 1:
            return [2 * self.budgets[0], 4 * self.budgets[0]]
        pairs = list(zip(self.budgets, self.budgets[1:], strict=False))
        between = [math.sqrt(low * high) for low, high in pairs if high > 1.5 * low]
        step = (self.budgets[-1] / self.budgets[0]) ** (1 / len(pairs))
        return [float(f"{budget:.3g}") for budget in [*between, self.budgets[-1] * min(max(step, 1.5), 4.0)]]

    def around(self, optimum: float, budget: float) -> list[Candidate]:
        """Returns runs of the sizes nearest to `STAR` around an optimum, those that are not trained yet if any is."""
        nearest: dict[Size, Candidate] = {}
        for offset in STAR:
            runs = [run for size in self.models if (run := self.at(size, budget)) is not None]
            if runs:
                near = min(runs, key=lambda run: abs(run.place.log_N - math.log(optimum) - offset))
                nearest[near.point.size] = near
        new = [
            run
            for run in nearest.values()
            if all(abs(run.place.log_N - x) > SAME for x in self.trained.get(budget, []))
        ]
        return new or list(nearest.values())

    def at(self, size: Size, budget: float) -> Candidate | None:
        """Returns the run of a size at a budget with the next free seed; None if it has too few steps."""
        if (size, budget) not in self._made:
            counts = numbers(self.config, self.architecture, size, self.models[size], budget)
            params, tokens = counts["params_non_embedding"], counts["tokens"]
            self._made[size, budget] = Candidate(
                Point(architecture=self.architecture.name, budget=budget, size=size),
                Place(math.log(params), math.log(max(tokens, 1)), math.log(budget)),
                params,
                counts["steps"],
                tokens,
                counts["flops"],
            )
        run = self._made[size, budget]
        return run if run.steps >= self.config.minimum_steps else None

    def take(self, run: Candidate) -> Candidate:
        """Returns the run with a free seed, and counts it as trained."""
        point = run.point
        key = point.budget, self.config.label(point.size)
        first = min(self.config.seeds)
        self.known[key] = seed = max(self.known.get(key, first - 1) + 1, first)
        self.trained.setdefault(point.budget, []).append(run.place.log_N)
        if point.budget not in self.budgets:
            self.budgets = sorted([*self.budgets, point.budget])
        return replace(run, point=point.model_copy(update={"seed": seed}))

    def first_optima(self, fit: ArchitectureFit) -> list[Candidate]:
        """Returns runs at budgets that show no optimum yet, around the sizes where it is likely to be."""
        guesses: dict[float, float] = {}
        missing: list[float] = list(self.budgets)
        for group in fit.isoflop.groups if fit.isoflop is not None else []:
            budget = min(self.budgets, key=lambda budget: abs(math.log(budget / group.C)))
            guess = group.N_opt if group.inside and group.N_opt else group.N_lowest or group.N[0]
            if group.inside:
                missing.remove(budget)
            elif group.N_lowest in (min(group.N), max(group.N)):
                guess *= 0.5 if group.N_lowest == min(group.N) else 2.0
            guesses[budget] = guess
        if (
            not missing and len(self.budgets) >= 3
        ):  # optima are known, but the surface is not: a larger budget shows more
            self.budgets.append(self.new_budgets()[-1])
            missing.append(self.budgets[-1])
        while len(self.budgets) < 3:
            self.budgets.append(2 * self.budgets[-1])
            missing.append(self.budgets[-1])
        runs: list[Candidate] = []
        for budget in missing:
            known = min(guesses, key=lambda known: abs(math.log(known / budget)), default=None)
            if known is None:
                continue
            optimum = guesses[known] * math.sqrt(budget / known)  # N_opt grows about as C^0.5
            runs += [self.take(run) for run in self.around(optimum, budget)]
        return runs


def _shapes(config: StudyConfig, architecture: Architecture) -> list[Rung]:
    """Returns the sizes of an architecture as rungs: those of the study, widths between them, one beyond each end."""
    sizes = list(architecture.sizes or config.sizes or [])
    plain = sorted((s for s in sizes if s.d_model and s.inner is None), key=lambda s: (s.num_layers, s.d_model))
    step = math.gcd(*(size.d_model or 0 for size in plain)) if plain else 1
    for first, second in zip(plain, plain[1:], strict=False):
        if first.num_layers == second.num_layers:
            sizes.append(_widened(first, math.sqrt((second.d_model or 1) / (first.d_model or 1)), step))
    sizes += [_widened(size, 1.25, step) for size in {(s.num_layers, s.num_heads): s for s in plain}.values()]
    sizes += [_widened(size, 0.75, step) for size in {(s.num_layers, s.num_heads): s for s in plain[::-1]}.values()]
    shapes: list[Rung] = []
    unusable: list[str] = []
    for size in {size.model_dump_json(): size for size in sizes if size.d_model != 0}.values():
        alone = architecture.model_copy(update={"sizes": [size]})
        shapes += make_rungs([alone], None, config.init_std, config.base(256), unusable)
    return shapes


def _widened(size: Size, factor: float, step: int) -> Size:
    return size.model_copy(update={"d_model": round(factor * (size.d_model or 0) / step) * step})


@dataclass(frozen=True)
class Limit:
    """The largest cost of added runs: training FLOPs, or seconds on this machine."""

    flops: float = math.inf
    seconds: float = math.inf


_TIME = re.compile(r"(\d+\.?\d*)\s*(s|min|h|d|days?)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "day": 86400, "days": 86400}


def parse_limit(text: str) -> Limit:
    """Parses `2e13` (FLOPs) or `30min`. Raises ConfigError for anything else."""
    if match := _TIME.fullmatch(text.strip()):
        return Limit(seconds=float(match[1]) * _SECONDS[match[2]])
    try:
        flops = float(text)
    except ValueError:
        flops = math.nan
    if not (math.isfinite(flops) and flops > 0):
        problem = f"--at-most {text!r}: give FLOPs, such as 2e13, or a time, such as 30min or 2h"
        raise ConfigError([problem], "command line")
    return Limit(flops=flops)
