"""Sweeps the learning rate of every architecture of a study at several widths and fits how the best one scales.

    <out>/<study>/tune/
        study.yaml, plan.json, runs/, table.csv   as in a study: the run folders are the state
        rates.yaml                                the result, for `learning_rate: {from: ...}`; other architectures
                                                  that it has from earlier calls keep their rates

The rates of a sweep are a factor 2 apart, around the rate that the study has at that width. A sweep whose lowest loss
is at its edge gets two more rates on that side, until the optimum lies inside.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from linnet.config import ConfigError, refuse
from linnet.study.architectures import Architecture, LearningRate, Size, make_rungs
from linnet.study.collect import RUNS
from linnet.study.config import Bounds, StudyConfig
from linnet.study.ladder import Plan, PlannedRun, rate_of
from linnet.study.ladder import plan as make_plan
from linnet.study.rates import FEWEST, TUNE, Rates, TunedRate, Vertex, fit_rates, read_rates, read_vertices, write_rates
from linnet.study.runner import CACHE, run_study

RATES = "rates.yaml"
EXTENSIONS = 4  # times that a sweep is extended before it is given up
STEP = 2  # rates of an extension


@dataclass(frozen=True)
class Sweep:
    """One architecture at one width.

    Attributes:
        centre: rate in the middle of the first sweep.
    """

    architecture: Architecture
    size: Size
    width: int
    centre: float

    def rate(self, place: int) -> float:
        """Returns the rate that is `place` factors of 2 above the centre."""
        return float(f"{self.centre * 2.0**place:.6g}")


@dataclass(frozen=True)
class Tuned:
    """The result of tuning: the vertices of each architecture by width, and the laws of those that have two.

    Attributes:
        before: the laws that rates.yaml had before. Those of architectures without a new law stay in it.
        failed: folders of runs without a result.
    """

    folder: Path
    vertices: dict[str, dict[int, Vertex]]
    laws: dict[str, TunedRate]
    before: dict[str, TunedRate]
    failed: tuple[Path, ...]

    @property
    def refused(self) -> list[str]:
        return [
            f"{name} at width {width}: {vertex.refused}"
            for name, widths in self.vertices.items()
            for width, vertex in widths.items()
            if vertex.rate is None
        ]


def make_sweeps(config: StudyConfig, widths: Sequence[int] | None) -> list[Sweep]:
    """Returns the sweeps of a study.

    A width that the study has keeps the shape of its first size there; another gets the number of layers of the size
    that is nearest in width.

    Args:
        widths: by default the three smallest of the study's sizes.

    Raises:
        ConfigError: a model cannot have one of the widths, or there is only one width.
    """
    problems: list[str] = []
    base = config.base(256)
    rungs = make_rungs(config.architectures, config.sizes, config.init_std, base, problems)
    chosen = sorted(set(widths or sorted({model.d_model for _, _, model in rungs})[:3]))
    if not problems and len(chosen) < 2:
        problems.append(f"--widths: {chosen} is one width, and a law needs two; give at least two, such as 64,128,256")
    problems += [f"--widths: {width} is not a width; give numbers above 0, such as 64" for width in chosen if width < 1]
    sweeps = []
    for architecture in config.architectures if not problems else ():
        pairs = [(size, model) for owner, size, model in rungs if owner is architecture]
        for width in chosen:
            size, model = min(pairs, key=lambda pair: abs(math.log(pair[1].d_model / width)))
            if model.d_model != width:
                size = Size(d_model=width, num_layers=size.num_layers or model.num_layers)
            alone = architecture.model_copy(update={"sizes": [size]})
            for _, _, built in make_rungs([alone], None, config.init_std, base, problems):
                centre = _centre(config, architecture, size, built)
                sweeps.append(Sweep(alone, size, width, centre))
    refuse(problems, "study")
    return sweeps


def tune(
    config: StudyConfig,
    out: str | Path = "studies",
    *,
    widths: Sequence[int] | None = None,
    rates: int = FEWEST,
    seeds: int = 2,
    target: float | None = None,
    console: Console | None = None,
    tell: Callable[[str], None] | None = None,
) -> Tuned:
    """Trains the sweeps of a study, extends those whose optimum is at the edge, and writes rates.yaml.

    Runs that are done already are not trained again.

    Args:
        out: folder of studies.
        widths: see `make_sweeps`.
        rates: rates of the first sweep, an odd number of at least 5.
        seeds: seeds 0, 1, ... of each rate.
        target: training FLOPs (or tokens) of each run; by default the smallest of the study.
        tell: is called with a line for each extension.

    Raises:
        ConfigError: the study or an argument is wrong, rates.yaml is damaged, or another process works in the folder.
    """
    check_rates(rates)
    _laws_in(Path(out) / config.name / TUNE)
    sweeps = make_sweeps(config, widths)
    folder, places = Path(out) / config.name, {}
    for sweep in sweeps:
        places[_key(sweep)] = list(range(-(rates // 2), rates // 2 + 1))
    for _ in range(EXTENSIONS + 1):
        plan = plan_sweeps(config, sweeps, places, seeds, target, folder)
        trained = run_study(plan.config, folder, Path(out) / CACHE, plan=plan, console=console)
        vertices = read_vertices(folder / TUNE)
        waiting = [sweep for sweep in sweeps if vertices[sweep.architecture.name][sweep.width].side]
        for sweep in waiting:
            side, grid = vertices[sweep.architecture.name][sweep.width].side, places[_key(sweep)]
            new = range(max(grid) + 1, max(grid) + 1 + STEP) if side > 0 else range(min(grid) - STEP, min(grid))
            grid += new
            if tell is not None:
                new_rates = ", ".join(f"{sweep.rate(place):.3g}" for place in sorted(new))
                reason = vertices[sweep.architecture.name][sweep.width].refused
                tell(f"{sweep.architecture.name} at width {sweep.width}: {reason}; adding {new_rates}")
        if not waiting:
            break
    return _write(folder / TUNE, config, plan, trained.failed)


def check_rates(rates: int) -> None:
    """Raises ConfigError unless a sweep can have this number of rates."""
    if rates < FEWEST or rates % 2 == 0:
        raise ConfigError([f"--rates: {rates} must be an odd number of at least {FEWEST}; use {FEWEST} or 7"], "study")


def plan_sweeps(
    config: StudyConfig,
    sweeps: Iterable[Sweep],
    places: dict[tuple[str, int], list[int]],
    seeds: int,
    target: float | None,
    folder: Path,
) -> Plan:
    """Returns the runs of sweeps as the plan of a study named `tune`."""
    target = target or min(config.targets)
    changes: dict[str, Any] = {"name": TUNE, "seeds": list(range(seeds)), "points": [], "tokens_per_param": Bounds()}
    changes["rate_sensitivity"] = False
    changes |= {"budgets": [target]} if config.budgets else {"tokens": [target]}
    if isinstance(config.batch_size, list):
        nearest = min(range(len(config.targets)), key=lambda i: abs(math.log(config.targets[i] / target)))
        changes["batch_size"] = config.batch_size[nearest]
    runs: list[PlannedRun] = []
    plan = None
    for sweep in sweeps:
        for place in places[_key(sweep)]:
            rate = sweep.rate(place)
            rule = LearningRate(value=rate, width=1, exponent=0.0, maximum=rate)
            alone = sweep.architecture.model_copy(update={"learning_rate": rule})
            study = config.model_copy(update=changes | {"architectures": [alone]})
            plan = make_plan(study, check_data=plan is None, cache=folder.parent / CACHE, root=folder / TUNE / RUNS)
            runs += plan.runs
    whole = config.model_copy(update=changes)
    runs.sort(key=lambda run: (-run.flops, run.architecture, run.learning_rate, run.seed))
    return Plan(whole, tuple(runs), ())


def _write(folder: Path, config: StudyConfig, plan: Plan, failed: tuple[Path, ...]) -> Tuned:
    vertices, before = read_vertices(folder), _laws_in(folder)
    laws = {name: law for name, widths in vertices.items() if (law := fit_rates(widths)) is not None}
    if laws:
        spent = {"target": f"{plan.config.targets[0]:g} {'FLOPs' if plan.config.budgets else 'tokens'} per run"}
        laws = {name: law.model_copy(update=spent) for name, law in laws.items()}
        write_rates(Rates(study=config.name, architectures=before | laws), folder / RATES)
    return Tuned(folder, vertices, laws, before, failed)


def _laws_in(folder: Path) -> dict[str, TunedRate]:
    """Returns the laws of earlier calls from the rates.yaml of a tuning folder."""
    if not (folder / RATES).is_file():
        return {}
    rates = read_rates(folder / RATES)
    return {
        name: law if law.target else law.model_copy(update={"target": rates.target})
        for name, law in rates.architectures.items()
    }


def _key(sweep: Sweep) -> tuple[str, int]:
    return sweep.architecture.name, sweep.width


def _centre(config: StudyConfig, architecture: Architecture, size: Size, model) -> float:
    """Returns the study's own rate of a model; that of the default rule if it comes from a table or a file."""
    rule = architecture.learning_rate or config.learning_rate
    if rule.table or rule.file is not None:
        config = config.model_copy(update={"learning_rate": LearningRate()})
        architecture = architecture.model_copy(update={"learning_rate": None})
    return rate_of(config, architecture, size, model)
