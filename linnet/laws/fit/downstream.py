"""Predicts the metric of a task from compute in two steps: compute -> held-out loss, loss -> metric.

A task's metric stays at chance for small models and then rises to its ceiling within about a decade of compute. So no
law of compute is fitted to it directly. The loss follows a law of compute, and the metric follows the loss (Llama 3,
arXiv:2407.21783, section 3.2.1; A. Bhagia et al., arXiv:2412.04403):

* A share of correct answers is chance + (1 - chance) / (1 + exp(steepness (L - midpoint))). The papers also fit floor
  and ceiling. Here the floor is chance and the ceiling is 1, because four numbers need more runs than a study has.
* A metric that is better when lower (bits per byte, perplexity) is coefficient L^exponent.
* Beside both, an error (1 - share, or the metric that is better when lower) is E - k exp(-g L), with a free floor E
  (S. Gadre et al., arXiv:2403.08540, equation 5).

The loss of runs of different tokens per parameter M = D / N also has the over-training law L(C, M) of Gadre et al.

Checkpoints of one run are not independent, so resamples of loss -> metric draw whole runs. L(C) has one point per run,
and its residuals are resampled.
"""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import stats
from scipy.special import expit

from linnet.config import count_of
from linnet.laws.fit import law as resampling
from linnet.laws.fit.law import Interval, Law, Result, around, threshold
from linnet.laws.fit.power import law_through, log_log
from linnet.laws.fit.selection import FORMS, better_form

FEWEST = 5
"""Smallest number of points of different loss for a fit of two numbers, so that the fit can be checked."""

FEWEST_RUNS = 3
"""Smallest number of runs at different compute for a fit of L(C), and of runs for intervals."""

ALIKE = 10**0.06
"""Largest ratio of compute between two runs of one budget, as in `assign_budgets`."""

SIGNAL = 2.0
"""Number of standard errors by which the mean of the points of lower loss must exceed chance."""

BAND = 41  # points per drawn curve
BEYOND = 3.0  # curves over compute end at this multiple of the largest compute


@dataclass
class HeldOutTest(Result):
    """Held-out test: the errors at points with C > `c_max` of a fit to the points with C <= `c_max`.

    Attributes:
        c_max: largest C in FLOPs that the fit uses.
        trained, tested: numbers of points with C <= `c_max` and above.
        mean_error, max_error: absolute errors of a share (0.01 is one percentage point), relative errors of others.
        refused: reasons why there is no test; the numbers are then None.
    """

    c_max: float | None = None
    trained: int = 0
    tested: int = 0
    mean_error: float | None = None
    max_error: float | None = None
    refused: list[str] = field(default_factory=list)


@dataclass
class Transfer(Result):
    """A metric as a function of the held-out loss in nats per token.

    Attributes:
        chance: value of a share of correct answers by guessing; None for a metric that is better when lower.
        first, second: midpoint (nats) and steepness (1 / nats) of a share; coefficient and exponent of other metrics.
        points, runs: numbers of points and runs.
        loss_min, loss_max: range of the losses of the points.
        rms_error: root mean square error of the fit at the points, in the unit of the metric.
        intervals: parameter name (see `parameters`) -> 95 % interval, by resampling runs.
        band: {"loss", "value", "low", "high"} over the range of the losses.
        exponential: E, k and g of the error E - k exp(-g L), their "intervals" and "rms_error"; empty if the points do
            not bend.
        refused: reasons why there is no fit.
        notes: remarks for the reader of the fit.
        draws: [resamples, 2] bootstrap draws of first and second; not serialised.
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
    exponential: dict = field(default_factory=dict)
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
        """The fit as text with L in nats per token, or "refused"."""
        if self.refused:
            return "refused"
        if self.chance is None:
            return f"{self.first:.4g} L^{self.second:.4g}"
        floor = f"{self.chance:.4g} + " if self.chance else ""
        return f"{floor}{1 - self.chance:.4g} / (1 + exp({self.second:.4g} (L - {self.first:.4g})))"

    def predict(self, loss) -> np.ndarray:
        """Returns the metric at `loss` (any shape). Raises ValueError if the fit was refused."""
        if self.refused:
            raise ValueError(f"loss -> metric was refused: {'; '.join(self.refused)}")
        return _value(self.chance, self.first, self.second, np.asarray(loss, dtype=float))

    def interval_at(self, loss: float) -> Interval | None:
        """Returns the 95 % interval of the metric at one loss, or None without bootstrap draws."""
        if self.refused or self.draws is None or not len(self.draws):
            return None
        return around(float(self.predict(loss)), _value(self.chance, *self.draws.T, loss))


@dataclass
class Downstream(Result):
    """Compute -> loss -> metric of one architecture.

    Attributes:
        law: L(C).
        transfer: loss -> metric.
        curve: {"C", "value", "low", "high", "beyond"} of both steps together, from the smallest compute to `BEYOND`
            times the largest; empty if either step is refused. `beyond` is True at more than the largest compute.
        rms_error: root mean square error of both steps together at the last points of the runs on the frontier, in the
            unit of the metric.
        over_training: E, a, b and eta of L(C, M) through the last points of all runs, and "rms_error" of both steps by
            it; empty if the runs do not determine it.
        step_test: held-out test of loss -> metric alone.
        test: held-out test of both steps together, on the frontier.
    """

    law: Law
    transfer: Transfer
    curve: list[dict] = field(default_factory=list)
    rms_error: float | None = None
    over_training: dict = field(default_factory=dict)
    step_test: HeldOutTest | None = None
    test: HeldOutTest | None = None

    @property
    def refused(self) -> list[str]:
        reasons = [f"compute -> loss: {reason}" for reason in self.law.refused]
        return reasons + [f"loss -> metric: {reason}" for reason in self.transfer.refused]

    def predict(self, compute, ratio=None) -> np.ndarray:
        """Returns the metric at `compute` (FLOPs, any shape), on the frontier or at `ratio` tokens per parameter.

        Raises:
            ValueError: a step was refused, or `ratio` is given without an over-training law.
        """
        if ratio is None:
            return self.transfer.predict(self.law.predict(compute))
        if not self.over_training:
            raise ValueError("ratio: these runs have no over-training law; leave it out")
        E, a, b, eta = (self.over_training[name] for name in ("E", "a", "b", "eta"))
        return self.transfer.predict(E + (a * ratio**eta + b * ratio**-eta) * compute**-eta)

    def interval_at(self, compute: float) -> Interval | None:
        """Returns the 95 % interval of the metric at `compute` FLOPs, with independent draws of both steps, or None."""
        step, spans = self.transfer.draws, []
        for law in () if self.refused or step is None else (self.law, self.law.rival_at(compute)):
            if law is None or law.draws is None or not len(law.draws) or not len(step):
                continue
            rows = min(len(law.draws), len(step))
            losses = law.draws[:rows, 2] + np.exp(law.draws[:rows, 0] + law.draws[:rows, 1] * np.log(compute))
            # Both steps may use the same seed. Shifting one by half of the draws makes the pairs independent.
            other = np.roll(step[:rows], rows // 2, axis=0)
            spans.append(around(float(self.predict(compute)), _value(self.transfer.chance, *other.T, losses)))
        return (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None


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
        points: columns run, C (FLOPs), loss (held out, nats per token), value (of the metric), last (whether the point
            is the last of its run), and questions (number of answers behind a share, NaN if not known).
        chance: value of a share of correct answers by guessing; None for a metric that is better when lower.
        law: a known L(C). By default, or if it is refused, L(C) is fitted to the last points on the frontier. From four
            points on, its form (with or without a constant) is the one with the lower held-out error.
        bootstrap: number of resamples for the intervals; 0 for none.
        seed: seed of the resampling.
    """
    points = points[np.isfinite(points[["C", "loss", "value"]]).all(axis=1)]
    points = points.sort_values(["C", "loss", "value", "run"], ignore_index=True)  # draws are made in this order
    front = frontier(points[points["last"]])
    law = law if law is not None and not law.refused else _law(front, bootstrap, seed)
    fit = Downstream(law, fit_transfer(points, chance, bootstrap=bootstrap, seed=seed))
    if not fit.transfer.refused:
        fit.step_test = _tested(points, points, lambda below: fit_transfer(below, chance), "loss", chance)
        _add_over_training(fit, points[points["last"]])
    if not fit.refused:
        fit.rms_error = float(np.sqrt(np.mean((fit.predict(front["C"]) - front["value"]) ** 2)))
        fit.test = _tested(points, front, lambda below: _both_steps(below, chance), "C", chance)
        end = law.c_max
        inside = np.geomspace(law.c_min, end, BAND)
        for C in [*inside, *np.geomspace(end, BEYOND * end, BAND // 2)]:
            low, high = fit.interval_at(C) or (None, None)
            row = {"C": float(C), "value": float(fit.predict(C)), "low": low, "high": high}
            fit.curve.append({**row, "beyond": len(fit.curve) >= BAND})
    return fit


def fit_transfer(points: pd.DataFrame, chance: float | None = None, *, bootstrap: int = 0, seed: int = 0) -> Transfer:
    """Fits loss -> metric; see `fit_downstream`."""
    loss, value = (points[name].to_numpy(float) for name in ("loss", "value"))
    fit = Transfer(chance, points=len(points), runs=points["run"].nunique())
    fit.refused = _unfit(points, chance)
    if fit.refused:
        return fit
    fit.loss_min, fit.loss_max = float(loss.min()), float(loss.max())
    estimate = _solve(chance, loss, value, np.ones((1, len(loss))))[0]
    if not np.isfinite(estimate).all():
        fit.refused.append("no curve fits, because the metric jumps between two losses; evaluate at more steps")
        return fit
    fit.first, fit.second = map(float, estimate)
    fit.rms_error = float(np.sqrt(np.mean((fit.predict(loss) - value) ** 2)))
    if chance is not None and not fit.loss_min <= fit.first <= fit.loss_max:
        fit.notes.append("the midpoint lies outside the observed losses, so it depends on the form of the curve")
    if bootstrap and fit.runs < FEWEST_RUNS:
        fit.notes.append(f"no intervals: {count_of(fit.runs, 'run')}, but intervals need {FEWEST_RUNS}")
    elif bootstrap:
        counts = resampling.draw_counts(bootstrap, len(loss), seed, points["run"])
        draws, reason = resampling.usable(_solve(chance, loss, value, counts, estimate))
        fit.draws = draws = _widened(draws, estimate, fit.runs, chance is not None)
        fit.notes += [f"no intervals: {reason}"] if reason else []
        if len(draws):
            fit.intervals = {
                name: around(centre, column)
                for name, centre, column in zip(fit.names, estimate.tolist(), fit.draws.T, strict=True)
            }
    _add_exponential(fit, loss, value if chance is None else 1 - value, counts if len(fit.intervals) else None)
    for at in np.linspace(fit.loss_min, fit.loss_max, BAND):
        low, high = fit.interval_at(at) or (None, None)
        fit.band.append({"loss": float(at), "value": float(fit.predict(at)), "low": low, "high": high})
    return fit


def _widened(draws: np.ndarray, estimate: np.ndarray, runs: int, share: bool) -> np.ndarray:
    """Returns draws [R, 2] as far from the estimate as two numbers fitted to few runs are from the truth.

    Resamples of n runs repeat some of them, and their fits differ by less than those of n other runs: by the root of
    (n - 2) / n, and by the normal quantile over Student's.
    """
    freedom = max(runs - 2, 1)
    factor = np.sqrt(runs / freedom) * stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975)
    logs = [False, True] if share else [True, False]  # steepness, coefficient: positive numbers move in logarithm
    columns = [
        centre * (column / centre) ** factor if log else centre + factor * (column - centre)
        for centre, column, log in zip(estimate, draws.T, logs, strict=True)
    ]
    return np.stack(columns, axis=1)


def _add_exponential(fit: Transfer, loss: np.ndarray, error: np.ndarray, counts: np.ndarray | None) -> None:
    """Adds E - k exp(-g L) of the error: for each g of a grid, E and k follow from linear least squares."""
    middle, g = loss.mean(), np.geomspace(0.02, 50, 2000) / np.ptp(loss)

    def solve(weights: np.ndarray, g: np.ndarray) -> np.ndarray:  # [R, n] -> [R, 3]
        x, wy, w = np.exp(-np.outer(loss - middle, g)), weights * error, weights.sum(axis=1, keepdims=True)
        mean_x, mean_y = weights @ x / w, wy.sum(axis=1, keepdims=True) / w
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = (wy @ x - w * mean_x * mean_y) / (weights @ x**2 - w * mean_x**2)
        gain = np.nan_to_num(slope * (wy @ x - w * mean_x * mean_y))
        best, row = gain.argmax(axis=1), np.arange(len(gain))
        slope = np.where((best > 0) & (best < len(g) - 1), slope[row, best], np.nan)
        return np.stack([mean_y[:, 0] - slope * mean_x[row, best], -slope * np.exp(g[best] * middle), g[best]], axis=1)

    E, k, rate = map(float, solve(np.ones((1, len(loss))), g)[0])
    if not k > 0:
        return
    rms = float(np.sqrt(np.mean((E - k * np.exp(-rate * loss) - error) ** 2)))
    draws = np.empty((0, 3)) if counts is None else resampling.usable(solve(counts, g[::8]))[0]
    ends = {name: resampling.interval(column) for name, column in zip("Ekg", draws.T, strict=True) if len(column)}
    fit.exponential = {"E": E, "k": k, "g": rate, "rms_error": rms, "intervals": ends}
    what = "the metric" if fit.chance is None else "the share of wrong answers"
    form = f"{E:.4g} - {k:.4g} exp(-{rate:.4g} L)"
    fit.notes.append(f"beside it, {what} is {form}: error {rms:.3g} at the points, {fit.rms_error:.3g} of the curve")


def _add_over_training(fit: Downstream, last: pd.DataFrame) -> None:
    """Adds the over-training law through the last points of all runs, whether or not they are on the frontier."""
    from linnet.laws.further import over_training

    if not {"N", "D"} <= set(last):
        return
    C, M, loss = (column.to_numpy(float) for column in (last["C"], last["D"] / last["N"], last["loss"]))
    if over_training.unfit(C, M):
        return
    theta, _ = over_training.fit(C, M, np.log(loss))
    if over_training.degenerate(theta, C, M):
        return
    fit.over_training = dict(zip("abE", map(float, np.exp(theta[:3])), strict=True)) | {"eta": float(theta[3])}
    rms = float(np.sqrt(np.mean((fit.predict(C, M) - last["value"]) ** 2)))
    fit.over_training["rms_error"] = rms
    E, a, b, eta = (fit.over_training[name] for name in ("E", "a", "b", "eta"))
    law = f"L(C, M) = {E:.4g} + ({a:.4g} M^{eta:.4g} + {b:.4g} M^-{eta:.4g}) C^-{eta:.4g}, M = D / N"
    fit.transfer.notes.append(f"{law}, through all {len(C)} runs: error {rms:.3g} of both steps at their ends")


def frontier(points: pd.DataFrame) -> pd.DataFrame:
    """Returns the points with the lowest loss up to their compute, in order of compute.

    A point is left out if another one has a lower loss at no more than `ALIKE` times its compute.
    """
    ordered = points.sort_values(["C", "loss"]).drop_duplicates(["C"])
    C, loss = (ordered[name].to_numpy(float) for name in ("C", "loss"))
    reach = np.searchsorted(C, ALIKE * C, side="right")
    lowest = np.minimum.accumulate(loss)[reach - 1] if len(ordered) else loss
    return ordered[loss <= lowest]


def _law(front: pd.DataFrame, bootstrap: int, seed: int) -> Law:
    if len(front) < FEWEST_RUNS:
        reason = f"{count_of(len(front), 'run')} with a lower loss than all cheaper runs; L(C) needs {FEWEST_RUNS}"
        return Law("L", refused=[f"{reason}, at different compute"])
    # The residuals of three runs have one degree of freedom, which shows little of the error.
    drawn = bootstrap if len(front) > FEWEST_RUNS else 0
    C, loss = front["C"].to_numpy(float), front["loss"].to_numpy(float)
    made = {"residuals": drawn, "seed": seed + 1}
    laws = {form: law_through("L", C, loss, irreducible=form == "constant", **made) for form in FORMS}
    chosen = better_form(C, loss)
    law, other = laws[chosen], laws[FORMS[chosen == FORMS[0]]]
    far = BEYOND * law.c_max
    span = law.interval_at(far)
    if span is not None and not other.refused and not span[0] <= float(other.predict(far)) <= span[1]:
        how = "with a constant" if chosen == "pure" else "without a constant"
        law.notes.append(
            f"the law {how} gives {float(other.predict(far)):.4g} at {far:.2g} FLOPs, outside the interval "
            f"{span[0]:.4g} to {span[1]:.4g}"
        )
    if law.draws is not None and other.draws is not None:
        law.rival, law.by_chance = other, True
    if bootstrap and not drawn:
        law.notes.append(f"no intervals: {count_of(len(front), 'run')}, but intervals need {FEWEST_RUNS + 1}")
    return law


def _unfit(points: pd.DataFrame, chance: float | None) -> list[str]:
    """Returns the reasons why no curve can be fitted to the points."""
    different = points["loss"].round(6).nunique()
    if different < FEWEST:
        return [f"{count_of(different, 'point')} of different loss, not {FEWEST} or more; evaluate more steps or runs"]
    loss, value = (points[name].to_numpy(float) for name in ("loss", "value"))
    if chance is None:
        if (value <= 0).any():
            return ["a value of the metric is not positive, so no power law fits it"]
        falls = np.corrcoef(np.log(loss), np.log(value))[0, 1] > 0 if np.ptp(value) else False
        return [] if falls else ["the metric does not fall with the loss; give shares from 0 to 1, or --chance"]
    best = points.nsmallest(max(1, len(points) // 2), "loss")
    questions = best["questions"].median()
    error = np.sqrt(chance * (1 - chance) / questions) if questions > 0 else 0.0
    if not best["value"].mean() > chance + SIGNAL * error:
        return [f"no signal: the half of the points with the lowest loss is at chance ({chance:.3g}), within its error"]
    if not np.ptp(value) or np.corrcoef(loss, value)[0, 1] >= 0:
        return ["the metric does not grow as the loss falls"]
    return []


def _value(chance: float | None, first, second, loss):
    if chance is None:
        return first * np.asarray(loss) ** second
    return chance + (1 - chance) * expit(second * (first - np.asarray(loss)))


def _solve(chance, loss, value, weights, start=None) -> np.ndarray:
    """Solves weighted least squares for a batch: weights [R, n] -> [R, 2].

    Rows whose points do not determine the two numbers give NaN.
    """
    if chance is None:
        with np.errstate(over="ignore"):
            x, y = (np.broadcast_to(np.log(part), weights.shape) for part in (loss, value))
            estimates = log_log(x, y, weights)
        return np.stack([np.exp(np.clip(estimates[:, 0], -700, 700)), estimates[:, 1]], axis=1)
    spread = float(np.ptp(loss))
    if start is not None:
        starts = [(start[0], np.log(start[1]))]
    else:
        quantiles = np.quantile(loss, [0.1, 0.5, 0.9])
        midpoints = [*quantiles, loss.min() - spread, loss.max() + spread]
        starts = [(midpoint, np.log(k / spread)) for midpoint in midpoints for k in (2.0, 8.0)]
    thetas, costs = _descend(chance, loss, value, weights, np.array(starts), spread)
    theta = thetas[costs.argmin(axis=0), np.arange(len(weights))]
    estimates = np.stack([theta[:, 0], np.exp(theta[:, 1])], axis=1)
    seen = np.where(weights > 0, loss, np.nan)
    narrow = np.nanmax(seen, axis=1) - np.nanmin(seen, axis=1) < 1e-9
    step = estimates[:, 1] * spread > 999  # at the largest steepness allowed: a jump between two points
    estimates[narrow | step] = np.nan
    return estimates


def _descend(chance, loss, value, weights, starts, spread) -> tuple[np.ndarray, np.ndarray]:
    """Minimises by Levenberg-Marquardt steps in (midpoint, log steepness), with one damping per row.

    Every row of weights [R, n] descends from every start [S, 2]. The rows of a start stop together.

    Returns:
        theta [S, R, 2] and the cost [S, R].
    """
    shape = len(starts), len(weights)
    theta, weights = np.repeat(starts, shape[1], axis=0), np.tile(weights, (shape[0], 1))
    stopped = np.zeros(len(theta), dtype=bool)
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
        better = (new[3] < cost) & ~stopped
        still = ~(better & (cost - new[3] > 1e-12 * cost)).reshape(shape).any(axis=1)
        stopped |= np.repeat(still & (damping > 1e6).reshape(shape).all(axis=1), shape[1])
        if stopped.all():
            break
        better &= ~stopped
        theta = np.where(better[:, None], tried, theta)
        z, s, r = (np.where(better[:, None], n, old) for n, old in zip(new[:3], (z, s, r), strict=True))
        cost = np.where(better, new[3], cost)
        damping = np.where(better, damping / 5, np.minimum(damping * 5, 1e9))
    return theta.reshape(*shape, 2), cost.reshape(shape)


def _both_steps(points: pd.DataFrame, chance: float | None) -> Downstream:
    return Downstream(_law(frontier(points[points["last"]]), 0, 0), fit_transfer(points, chance))


def _tested(points: pd.DataFrame, judged: pd.DataFrame, fit, column: str, chance: float | None) -> HeldOutTest:
    """Fits `points` of small compute, and predicts the values of `judged` ones of larger compute from a column."""
    c_max = threshold(judged["C"].to_numpy(), None) if len(judged) else None
    test = HeldOutTest(c_max)
    if c_max is None:
        test.refused.append("no points have a larger C than the fitted ones")
        return test
    below, above = points[points["C"] <= c_max], judged[judged["C"] > c_max]
    test.trained, test.tested = len(below), len(above)
    model = fit(below)
    test.refused = model.refused
    if not test.refused:
        error = np.abs(model.predict(above[column]) - above["value"].to_numpy())
        error = error / np.abs(above["value"].to_numpy()) if chance is None else error
        test.mean_error, test.max_error = float(error.mean()), float(error.max())
    return test
