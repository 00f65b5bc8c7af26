"""From compute to what a model can do, in two steps: compute -> held-out loss, loss -> metric.

A metric of a task says nothing while a model guesses and everything within a decade of compute, so a law of compute is
not drawn through it. The loss follows one, and the metric follows the loss (Llama 3, arXiv:2407.21783, section 3.2.1;
A. Bhagia et al., arXiv:2412.04403):

* a share of right answers, chance + (1 - chance) / (1 + exp(steepness (L - midpoint))). Papers: floor and ceiling are
  fitted too; here: they are what guessing gives and 1, because four numbers ask for more runs than a study has.
* a metric of which less is better (bits per byte, a perplexity): coefficient L^exponent.

Checkpoints of one run are not independent, so resamples draw whole runs.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd
from scipy.special import expit

from linnet.study.fit import bootstrap as resampling
from linnet.study.fit.heldout import threshold
from linnet.study.fit.law import Interval, Law, Result
from linnet.study.fit.power import count_of, law_through, log_log

FEWEST = 5
"""Points of different loss that a step of two numbers is fitted to, so that some are left to judge it by."""

FEWEST_RUNS = 3
"""Runs at different compute that L(C) is fitted to, and runs that intervals need."""

ALIKE = 10**0.06
"""Ratio of compute up to which two runs count as of one budget, as in `assign_budgets`."""

SIGNAL = 2.0
"""Standard errors above chance that the better half of the points must be, on average."""

BAND = 41  # points of a curve that is drawn
BEYOND = 3.0  # curves over compute reach this multiple of the largest


@dataclass
class HeldOutTest(Result):
    """Fitted to the points with C <= `c_max`, how far is it from the others?

    Attributes:
        mean_error, max_error: of a share in its own unit (0.01 is a point of a hundred), of others relative.
        refused: why there is no such test; then the numbers are None.
    """

    c_max: float | None = None
    trained: int = 0
    tested: int = 0
    mean_error: float | None = None
    max_error: float | None = None
    refused: list[str] = field(default_factory=list)


@dataclass
class Transfer(Result):
    """A metric as a function of the held-out loss, in nats a token.

    Attributes:
        chance: of a share, what guessing gives; None for a metric of which less is better.
        first, second: midpoint (nats) and steepness (1 / nats) of a share; coefficient and exponent of others.
        points, runs: how many there were. loss_min, loss_max: the range of their losses.
        rms_error: of the fit on them, in the unit of the metric.
        intervals: 95 % by name (see `parameters`), over runs.
        band: {"loss", "value", "low", "high"} over the range of the losses.
        refused, notes: reasons why there is none; what to know when reading it.
        draws: [resamples, 2] of first and second; not serialised.
    """

    chance: float | None = None
    first: float | None = None
    second: float | None = None
    points: int = 0
    runs: int = 0
    loss_min: float | None = None
    loss_max: float | None = None
    rms_error: float | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)
    band: list[dict] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    draws: np.ndarray | None = field(default=None, repr=False, compare=False)

    computed = ("parameters", "formula")

    @property
    def names(self) -> tuple[str, str]:
        return ("coefficient", "exponent") if self.chance is None else ("midpoint", "steepness")

    @property
    def parameters(self) -> dict[str, float]:
        return {} if self.refused else dict(zip(self.names, (self.first, self.second), strict=True))

    @property
    def formula(self) -> str:
        """In words for people, L in nats a token; "refused" where it is."""
        if self.refused:
            return "refused"
        if self.chance is None:
            return f"{self.first:.4g} L^{self.second:.4g}"
        floor = f"{self.chance:.4g} + " if self.chance else ""
        return f"{floor}{1 - self.chance:.4g} / (1 + exp({self.second:.4g} (L - {self.first:.4g})))"

    def predict(self, loss) -> np.ndarray:
        """The metric at losses of any shape. Raises ValueError where it was refused."""
        if self.refused:
            raise ValueError(f"loss -> metric was refused: {'; '.join(self.refused)}")
        return _value(self.chance, self.first, self.second, np.asarray(loss, dtype=float))

    def interval_at(self, loss: float) -> Interval | None:
        """95 % at one loss from the bootstrap draws, or None without them."""
        if self.refused or self.draws is None or not len(self.draws):
            return None
        return resampling.interval(_value(self.chance, *self.draws.T, loss))


@dataclass
class Downstream(Result):
    """Compute -> loss -> metric of one architecture.

    Attributes:
        law: L(C); `transfer`: loss -> metric.
        curve: {"C", "value", "low", "high", "beyond"}: both together, from the smallest compute to `BEYOND` times the
            largest; empty where either is refused.
        rms_error: of both together on the last points of the runs that lie on the frontier, in the unit of the metric.
        step_test: of loss -> metric alone; test: of both together, on the frontier.
    """

    law: Law
    transfer: Transfer
    curve: list[dict] = field(default_factory=list)
    rms_error: float | None = None
    step_test: HeldOutTest | None = None
    test: HeldOutTest | None = None

    @property
    def refused(self) -> list[str]:
        return [f"compute -> loss: {r}" for r in self.law.refused] + [
            f"loss -> metric: {r}" for r in self.transfer.refused
        ]

    def predict(self, compute) -> np.ndarray:
        """The metric at `compute` FLOPs, of any shape. Raises ValueError where either step was refused."""
        return self.transfer.predict(self.law.predict(compute))

    def interval_at(self, compute: float) -> Interval | None:
        """95 % at `compute`: both steps vary, independently."""
        law, step = self.law.draws, self.transfer.draws
        if self.refused or law is None or step is None or not len(law) or not len(step):
            return None
        rows = min(len(law), len(step))
        losses = np.exp(law[:rows, 0] + law[:rows, 1] * np.log(compute)) + law[:rows, 2]
        # Both may come from one seed; a turn by half the draws makes the pairs independent.
        other = np.roll(step[:rows], rows // 2, axis=0)
        return resampling.interval(_value(self.transfer.chance, *other.T, losses))


def fit_downstream(
    points: pd.DataFrame,
    chance: float | None = None,
    *,
    law: Law | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Downstream:
    """Fits both steps to the points of one architecture.

    Args:
        points: columns run, C (FLOPs), loss (held out, nats a token), value (of the metric), last (whether the point is
            the last of its run), and questions (how many answers a share is of, NaN where not known).
        chance: of a share of right answers, what guessing gives; None for a metric of which less is better.
        law: L(C), where it is known better than from the last points; else it goes through the lowest of them.
        bootstrap: resamples for the intervals; 0 for none.
    """
    points = points[np.isfinite(points[["C", "loss", "value"]]).all(axis=1)].reset_index(drop=True)
    front = frontier(points[points["last"]])
    law = law if law is not None and not law.refused else _law(front, bootstrap, seed)
    found = Downstream(law, fit_transfer(points, chance, bootstrap=bootstrap, seed=seed))
    if not found.transfer.refused:
        found.step_test = _test_step(points, chance)
    if not found.refused:
        found.rms_error = float(np.sqrt(np.mean((found.predict(front["C"]) - front["value"]) ** 2)))
        found.test = _test_both(points, chance)
        end = law.c_max
        inside = np.geomspace(law.c_min, end, BAND)
        for C in [*inside, *np.geomspace(end, BEYOND * end, BAND // 2)]:
            low, high = found.interval_at(C) or (None, None)
            row = {"C": float(C), "value": float(found.predict(C)), "low": low, "high": high}
            found.curve.append({**row, "beyond": len(found.curve) >= BAND})
    return found


def fit_transfer(points: pd.DataFrame, chance: float | None = None, *, bootstrap: int = 0, seed: int = 0) -> Transfer:
    """Fits loss -> metric; see `fit_downstream`."""
    loss, value = (points[name].to_numpy(float) for name in ("loss", "value"))
    found = Transfer(chance, points=len(points), runs=points["run"].nunique())
    found.refused = _unfit(points, chance)
    if found.refused:
        return found
    found.loss_min, found.loss_max = float(loss.min()), float(loss.max())
    estimate = _solve(chance, loss, value, np.ones((1, len(loss))))[0]
    if not np.isfinite(estimate).all():
        found.refused.append("no curve fits: the metric jumps between two losses; evaluate at more steps")
        return found
    found.first, found.second = map(float, estimate)
    found.rms_error = float(np.sqrt(np.mean((found.predict(loss) - value) ** 2)))
    if chance is not None and not found.loss_min <= found.first <= found.loss_max:
        found.notes.append("the midpoint lies outside the losses seen, so it rests on the form of the curve")
    if bootstrap and found.runs < FEWEST_RUNS:
        found.notes.append(f"no intervals: {count_of(found.runs, 'run')}, and they need {FEWEST_RUNS}")
    elif bootstrap:
        counts = resampling.draw_counts(bootstrap, len(loss), seed, points["run"])
        draws, reason = resampling.usable(_solve(chance, loss, value, counts, estimate))
        found.draws = draws
        found.notes += [f"no intervals: {reason}"] if reason else []
        if len(draws):
            found.intervals = {
                name: resampling.interval(column) for name, column in zip(found.names, draws.T, strict=True)
            }
    for at in np.linspace(found.loss_min, found.loss_max, BAND):
        low, high = found.interval_at(at) or (None, None)
        found.band.append({"loss": float(at), "value": float(found.predict(at)), "low": low, "high": high})
    return found


def frontier(points: pd.DataFrame) -> pd.DataFrame:
    """The points than which none of as little compute, or up to `ALIKE` times as much, has a lower loss, by compute."""
    ordered = points.sort_values(["C", "loss"]).drop_duplicates(["C"])
    C, loss = (ordered[name].to_numpy(float) for name in ("C", "loss"))
    reach = np.searchsorted(C, ALIKE * C, side="right")
    lowest = np.minimum.accumulate(loss)[reach - 1] if len(ordered) else loss
    return ordered[loss <= lowest]


def _law(front: pd.DataFrame, bootstrap: int, seed: int) -> Law:
    if len(front) < FEWEST_RUNS:
        reason = f"{count_of(len(front), 'run')} with a loss that no cheaper run has; it needs {FEWEST_RUNS}"
        return Law("L", refused=[f"{reason}, at different compute"])
    # Resamples of three runs are lines through two of them, which say little about the error of the third.
    drawn = bootstrap and len(front) > FEWEST_RUNS
    counts = resampling.draw_counts(bootstrap, len(front), seed + 1) if drawn else None
    law = law_through("L", front["C"], front["loss"], weights=counts)
    if bootstrap and not drawn:
        law.notes.append(f"no intervals: {count_of(len(front), 'run')}, and they need {FEWEST_RUNS + 1}")
    return law


def _unfit(points: pd.DataFrame, chance: float | None) -> list[str]:
    """Why no curve is fitted to the points."""
    different = points["loss"].round(6).nunique()
    if different < FEWEST:
        return [f"{count_of(different, 'point')} of different loss; it needs {FEWEST}: evaluate at more steps or runs"]
    loss, value = (points[name].to_numpy(float) for name in ("loss", "value"))
    if chance is None:
        if (value <= 0).any():
            return ["a value is not positive, so no power law goes through it"]
        falls = np.corrcoef(np.log(loss), np.log(value))[0, 1] > 0 if np.ptp(value) else False
        return [] if falls else ["the metric does not fall with the loss"]
    best = points.nsmallest(max(1, len(points) // 2), "loss")
    questions = best["questions"].median()
    error = np.sqrt(chance * (1 - chance) / questions) if questions > 0 else 0.0
    if not best["value"].mean() > chance + SIGNAL * error:
        return [f"no signal: of the points the half of lowest loss is at chance ({chance:.3g}), within its error"]
    if not np.ptp(value) or np.corrcoef(loss, value)[0, 1] >= 0:
        return ["the metric does not grow as the loss falls"]
    return []


def _value(chance: float | None, first, second, loss):
    if chance is None:
        return first * np.asarray(loss) ** second
    return chance + (1 - chance) * expit(second * (first - np.asarray(loss)))


def _solve(chance, loss, value, weights, start=None) -> np.ndarray:
    """Weighted least squares, a batch at once: weights [R, n] -> [R, 2]; NaN where the points do not tell."""
    if chance is None:
        with np.errstate(over="ignore"):
            x, y = (np.broadcast_to(np.log(part), weights.shape) for part in (loss, value))
            found = log_log(x, y, weights)
        return np.stack([np.exp(np.clip(found[:, 0], -700, 700)), found[:, 1]], axis=1)
    spread = float(np.ptp(loss))
    if start is not None:
        starts = [(start[0], np.log(start[1]))]
    else:
        quantiles = np.quantile(loss, [0.1, 0.5, 0.9])
        midpoints = [*quantiles, loss.min() - spread, loss.max() + spread]
        starts = [(midpoint, np.log(k / spread)) for midpoint in midpoints for k in (2.0, 8.0)]
    tried = [_descend(chance, loss, value, weights, np.tile(one, (len(weights), 1)), spread) for one in starts]
    costs = np.stack([cost for _, cost in tried]).argmin(axis=0)
    theta = np.stack([theta for theta, _ in tried])[costs, np.arange(len(weights))]
    found = np.stack([theta[:, 0], np.exp(theta[:, 1])], axis=1)
    seen = np.where(weights > 0, loss, np.nan)
    narrow = np.nanmax(seen, axis=1) - np.nanmin(seen, axis=1) < 1e-9
    step = found[:, 1] * spread > 999  # as steep as is allowed: a step between two points
    found[narrow | step] = np.nan
    return found


def _descend(chance, loss, value, weights, theta, spread) -> tuple[np.ndarray, np.ndarray]:
    """Levenberg and Marquardt's method in (midpoint, log steepness), each row with a damping of its own."""
    low = np.array([loss.min() - 20 * spread, np.log(1e-3 / spread)])
    high = np.array([loss.max() + 20 * spread, np.log(1e3 / spread)])

    def residual(theta):
        z = np.exp(theta[:, 1:]) * (theta[:, :1] - loss)
        s = expit(z)
        r = chance + (1 - chance) * s - value
        return z, s, r, (weights * r**2).sum(axis=1)

    damping = np.full(len(theta), 1e-2)
    z, s, r, cost = residual(theta)
    for _ in range(80):
        slope = (1 - chance) * s * (1 - s)
        a, b = slope * np.exp(theta[:, 1:]), slope * z  # derivatives by midpoint and log steepness
        aa, ab, bb = (np.sum(weights * left * right, axis=1) for left, right in ((a, a), (a, b), (b, b)))
        ga, gb = np.sum(weights * a * r, axis=1), np.sum(weights * b * r, axis=1)
        aa, bb = aa * (1 + damping) + 1e-30, bb * (1 + damping) + 1e-30
        determinant = aa * bb - ab**2 + 1e-300
        move = np.stack([(bb * ga - ab * gb) / determinant, (aa * gb - ab * ga) / determinant], axis=1)
        tried = np.clip(theta - move, low, high)
        new = residual(tried)
        better = new[3] < cost
        if not (better & (cost - new[3] > 1e-12 * cost)).any() and (damping > 1e6).all():
            break
        theta = np.where(better[:, None], tried, theta)
        z, s, r = (np.where(better[:, None], n, old) for n, old in zip(new[:3], (z, s, r), strict=True))
        cost = np.where(better, new[3], cost)
        damping = np.where(better, damping / 5, np.minimum(damping * 5, 1e9))
    return theta, cost


def _test_step(points: pd.DataFrame, chance: float | None) -> HeldOutTest:
    """Loss -> metric fitted at small compute, from the true losses of the points above it."""
    return _tested(points, points, lambda below: partial(_of_loss, fit_transfer(below, chance)), chance)


def _test_both(points: pd.DataFrame, chance: float | None) -> HeldOutTest:
    """Both steps fitted at small compute, on the frontier above it."""

    def fit(below: pd.DataFrame):
        law, step = _law(frontier(below[below["last"]]), 0, 0), fit_transfer(below, chance)
        return partial(_of_compute, Downstream(law, step))

    return _tested(points, frontier(points[points["last"]]), fit, chance)


def _of_loss(step: Transfer, rows: pd.DataFrame):
    return step.refused, None if step.refused else step.predict(rows["loss"])


def _of_compute(found: Downstream, rows: pd.DataFrame):
    return found.refused, None if found.refused else found.predict(rows["C"])


def _tested(points: pd.DataFrame, judged: pd.DataFrame, fit, chance: float | None) -> HeldOutTest:
    c_max = threshold(judged["C"].to_numpy(), None) if len(judged) else None
    test = HeldOutTest(c_max)
    if c_max is None:
        test.refused.append("no points lie above the largest C that the fit may see")
        return test
    below, above = points[points["C"] <= c_max], judged[judged["C"] > c_max]
    test.trained, test.tested = len(below), len(above)
    test.refused, predicted = fit(below)(above)
    if not test.refused:
        error = np.abs(predicted - above["value"].to_numpy())
        error = error / np.abs(above["value"].to_numpy()) if chance is None else error
        test.mean_error, test.max_error = float(error.mean()), float(error.max())
    return test
