"""Adaptive ladders: which further runs narrow the 95 % interval of a quantity most per FLOP?

The design is c-optimal and greedy. With additional runs, the interval is expected to be

    half-width(with the runs) = half-width(now) * s(with the runs) / s(now),

where s^2 is the variance of the quantity in units of the noise of one loss, from the fit linearised at its estimate:

- **IsoFLOP** (a, b, N_opt(C), D_opt(C)). The optimum of a budget is the vertex of a parabola with curvature c in
  x = log(N / N_opt). Its variance is v = [(X'X)^-1]_11 / (4 c^2) with rows (1, x, x^2) of X, one per run. A law through
  the optima at z = log C has s^2 = sum_g w_g^2 v_g, with w_g = (z_g - mean z) / sum (z - mean z)^2 for an exponent, and
  with 1 / G + (z_0 - mean z) w_g for the value at z_0.
- **Surface** (E, alpha, beta, L(C), and the others where IsoFLOP has no law). s^2 = g' (J'J)^-1 g. J has a row
  d log L / d theta per run, theta = (log A, log B, log E, alpha, beta), and g is the gradient of the quantity.

Candidates are single runs at the budgets of the study, and at a new budget (between two, or above all) a group of five
sizes around its predicted optimum. The one with the largest expected decrease per FLOP is chosen, then the next, given
the first. The noise cancels in the ratio, and its size comes from the interval itself. No candidate lies below the
smallest budget: such runs cost little, but laws change at small compute.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from linnet.config import ConfigError, nearest, refuse
from linnet.laws.fit.law import Interval
from linnet.laws.fit.parametric import closed_form
from linnet.laws.fit.results import ArchitectureFit, IsoflopFit, ParametricFit

LAWS = {"a": "exponent of N_opt(C)", "b": "exponent of D_opt(C)"}
SURFACE = {"E": "irreducible loss", "alpha": "exponent of N in the surface", "beta": "exponent of D in the surface"}
VALUES = {"L": "loss", "N_opt": "best size", "D_opt": "best number of tokens"}
"""Quantities that a question can ask for; those of `VALUES` at a compute, such as `L(1e12)`."""

RAISE = 0.05
"""Candidates have a predicted loss at most this fraction above the lowest of their budget, or a size near the best."""
NEAR = math.log(2)
"""Largest difference of log N from the optimum of such a size."""
STAR = (-1.1, -0.55, 0.0, 0.55, 1.1)
"""log(N / N_opt) of the sizes of a new budget."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_QUESTION = re.compile(
    rf"\s*(?:(?P<architecture>[^:]+?)\s*:)?\s*(?P<name>\w+)\s*(?:\(\s*(?P<at>[^)]*?)\s*\))?"
    rf"\s*(?:(?:\+-|\+/-|±)\s*(?P<half>{_NUMBER})\s*(?P<percent>%?))?\s*"
)


@dataclass(frozen=True)
class Question:
    """A quantity whose interval a study narrows, and how far.

    Attributes:
        name: a key of `LAWS`, `SURFACE` or `VALUES`.
        compute: FLOPs at which a quantity of `VALUES` is asked for.
        architecture: the only architecture that is asked about; None: all.
        half_width: half the width of the interval that is wanted, or None.
        percent: whether `half_width` is in percent of the quantity.
    """

    name: str
    compute: float | None = None
    architecture: str | None = None
    half_width: float | None = None
    percent: bool = False

    @property
    def quantity(self) -> str:
        """`a`, or `L(1e+12)`."""
        return self.name if self.compute is None else f"{self.name}({self.compute:g})"

    def wanted(self, value: float) -> float | None:
        """Returns the wanted half-width in the unit of the quantity, whose estimate is `value`."""
        if self.half_width is None:
            return None
        return abs(value) * self.half_width / 100 if self.percent else self.half_width


def parse_question(text: str, architectures: Sequence[str], option: str = "--propose") -> Question:
    """Parses `a`, `tnl: a +- 0.05`, `L(1e12) +- 1%`.

    Raises:
        ConfigError: the text has another form, or names an unknown quantity or architecture.
    """
    allowed = "a, b, E, alpha, beta, L(C), N_opt(C) or D_opt(C), with C in FLOPs"
    match = _QUESTION.fullmatch(text)
    if match is None:
        raise ConfigError([f"{option} {text!r}: write [ARCHITECTURE:] QUANTITY [+- HALF-WIDTH], such as "
                           f"'tnl: a +- 0.05'; the quantity is {allowed}"], "command line")  # fmt: skip
    problems, name, at = [], match["name"], match["at"]
    compute = None
    if name not in LAWS | SURFACE | VALUES:
        known = nearest(name, LAWS | SURFACE | VALUES) if len(name) > 1 else ""
        known = f"{known} " if known.startswith("did") else ""
        problems.append(f"{option} {text!r}: unknown quantity {name!r}; {known}use {allowed}")
    elif name in VALUES:
        try:
            compute = float(at or "")
        except ValueError:
            compute = math.nan
        if not (math.isfinite(compute) and compute > 0):
            problems.append(f"{option} {text!r}: {name} needs a compute in FLOPs, such as {name}(1e12)")
    elif at is not None:
        problems.append(f"{option} {text!r}: {name} is one number; write it without a compute in brackets")
    if match["architecture"] is not None and match["architecture"] not in architectures:
        fix = nearest(match["architecture"], architectures)
        problems.append(f"{option} {text!r}: architecture {match['architecture']!r} is not in the study; {fix}")
    half = None if match["half"] is None else float(match["half"])
    if half is not None and not (half > 0 and math.isfinite(half)):
        problems.append(f"{option} {text!r}: the half-width {match['half']} must be positive")
    if option == "--until" and match["half"] is None:
        problems.append(f"{option} {text!r}: gives no interval to reach; write for example '{text.strip()} +- 0.05'")
    refuse(problems, "command line")
    return Question(name, compute, match["architecture"], half, bool(match["percent"]))


@dataclass(frozen=True)
class Answer:
    """The estimate of a quantity: value, 95 % interval, the method that gives both, and the linearised fit.

    Attributes:
        spread: function of further runs (log N, log D, log C each); s of the design with them, see above.
        optimum: function of C; the predicted best number of parameters.
        inside: function of (log N, log C); whether a run there is near enough to an optimum.
    """

    value: float
    interval: Interval
    method: str
    spread: Callable[[Sequence["Place"]], float]
    optimum: Callable[[float], float]
    inside: Callable[["Place"], bool]

    @property
    def half_width(self) -> float:
        return (self.interval[1] - self.interval[0]) / 2

    def expected(self, runs: Sequence["Place"]) -> float:
        """Returns the expected half-width with further runs."""
        return self.half_width * self.spread(runs) / self.spread(())


@dataclass(frozen=True)
class Place:
    """Where a run lies: logarithms of its parameters, tokens and (planned) FLOPs."""

    log_N: float
    log_D: float
    log_C: float


def answer(fit: ArchitectureFit, question: Question) -> Answer | str:
    """Returns the estimate of a quantity with its linearised fit, or the reason why there is none."""
    reasons = []
    if question.name in ("a", "b", "N_opt", "D_opt") and fit.isoflop is not None:
        estimate = _by_parabolas(fit.isoflop, question)
        if isinstance(estimate, Answer):
            return estimate
        reasons.append(estimate)
    if fit.parametric is not None:
        estimate = _by_surface(fit.parametric, question)
        if isinstance(estimate, Answer):
            return estimate
        reasons.append(estimate)
    return "; ".join(reasons) or "no method was fitted"


def _by_parabolas(fit: IsoflopFit, question: Question) -> Answer | str:
    law = fit.N_opt if question.name in ("a", "N_opt") else fit.D_opt
    if law.refused:
        return f"isoflop: {'; '.join(law.refused)}"
    if question.compute is None:
        value, interval = float(law.exponent or 0.0), law.exponent_interval
    else:
        value, interval = float(law.predict(question.compute)), law.interval_at(question.compute)
    if interval is None or not interval[1] > interval[0]:
        return f"isoflop: {next(iter(law.notes), 'no interval')}"
    groups = [group for group in fit.groups if group.inside]
    # The parabola is in log10 N.
    curvature = float(np.mean([group.parabola[2] for group in groups if group.parabola])) / math.log(10) ** 2
    lowest = float(np.mean([group.L_opt or group.loss[0] for group in groups]))
    best = fit.N_opt
    trained = [(math.log(group.C), np.log(group.N)[np.array(group.used, dtype=bool)]) for group in fit.groups]
    kept = {round(math.log(group.C), 3) for group in groups}

    def optimum(C: float) -> float:
        return float(best.predict(C))

    def spread(runs: Sequence[Place]) -> float:
        budgets: dict[float, list[float]] = {}
        for log_C, sizes in trained:
            budgets.setdefault(log_C, []).extend(sizes)
        for run in runs:
            near = min(budgets, key=lambda z: abs(z - run.log_C))
            budgets.setdefault(near if abs(near - run.log_C) < 0.1 else run.log_C, []).append(run.log_N)
        z, v = [], []
        for log_C, sizes in budgets.items():
            x = np.array(sizes) - math.log(optimum(math.exp(log_C)))
            if round(log_C, 3) in kept or (len(np.unique(x)) >= 4 and x.min() < -0.3 and x.max() > 0.3):
                powers = np.stack([np.ones_like(x), x, x**2], axis=1)
                z.append(log_C)
                v.append(np.linalg.pinv(powers.T @ powers)[1, 1] / (4 * curvature**2))
        centred = np.array(z) - np.mean(z)
        weights = centred / (centred**2).sum()
        if question.compute is not None:
            weights = 1 / len(z) + (math.log(question.compute) - np.mean(z)) * weights
        return float(np.sqrt((weights**2 * np.array(v)).sum()))

    def inside(run: Place) -> bool:
        x = run.log_N - math.log(optimum(math.exp(run.log_C)))
        return abs(x) <= max(math.sqrt(RAISE * lowest / curvature), NEAR)

    return Answer(value, interval, "isoflop", spread, optimum, inside)


def _by_surface(fit: ParametricFit, question: Question) -> Answer | str:
    if fit.refused or fit.N_opt.refused:
        return f"parametric: {'; '.join(fit.refused or fit.N_opt.refused)}"
    if question.compute is not None:
        law = {"L": fit.L, "N_opt": fit.N_opt, "D_opt": fit.D_opt}[question.name]
        value, interval = float(law.predict(question.compute)), law.interval_at(question.compute)
    else:
        value, interval = fit.parameters[question.name], fit.intervals.get(question.name)
    if interval is None or not interval[1] > interval[0]:
        return f"parametric: {fit.bootstrap.note or 'no interval'}"
    surface = fit.surface
    theta = np.array([*(math.log(surface[name]) for name in ("A", "B", "E")), surface["alpha"], surface["beta"]])
    gradient = _gradient(lambda t: _quantity(t, fit.flops_per_nd, question), theta)
    points = [Place(math.log(p["N"]), math.log(p["D"]), math.log(p["C"])) for p in fit.points]

    def information(runs: Sequence[Place]) -> np.ndarray:
        rows = np.array([_row(theta, run) for run in runs]).reshape(-1, len(theta))
        return rows.T @ rows

    now = information(points)
    ratios: list[float] = [place.log_D - place.log_N for place in points]

    def spread(runs: Sequence[Place]) -> float:
        total = now + information(runs)
        scale = 1 / np.sqrt(np.diag(total))  # the parameters differ by orders of magnitude
        inverse = np.linalg.pinv(total * scale * scale[:, None], rcond=1e-13)
        return math.sqrt(max(float((gradient * scale) @ inverse @ (gradient * scale)), 0.0))

    def inside(run: Place) -> bool:
        return min(ratios) - math.log(2) <= run.log_D - run.log_N <= max(ratios) + math.log(2)

    return Answer(value, interval, "parametric", spread, lambda C: float(fit.N_opt.predict(C)), inside)


def _row(theta: np.ndarray, place: Place) -> np.ndarray:
    """Returns d log L / d theta of one run."""
    log_A, log_B, log_E, alpha, beta = theta
    terms = np.array([log_A - alpha * place.log_N, log_B - beta * place.log_D, log_E])
    share = np.exp(terms - terms.max())
    share /= share.sum()
    return np.array([*share, -share[0] * place.log_N, -share[1] * place.log_D])


def _quantity(theta: np.ndarray, flops_per_nd: float, question: Question) -> float:
    """Returns the value of the quantity on a surface; N_opt and D_opt as logarithms."""
    if question.name in SURFACE:
        return float({"E": np.exp(theta[2]), "alpha": theta[3], "beta": theta[4]}[question.name])
    law = {"a": "N_opt", "b": "D_opt"}.get(question.name, question.name)
    log_coefficient, exponent, constant = closed_form(theta[None], flops_per_nd)[law][0]
    if question.compute is None:
        return float(exponent)
    log_power = log_coefficient + exponent * math.log(question.compute)
    return float(np.exp(log_power) + constant) if law == "L" else float(log_power)


def _gradient(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    moves = step * np.eye(len(at))
    return np.array([(function(at + move) - function(at - move)) / (2 * step) for move in moves])
