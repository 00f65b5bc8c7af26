"""The runs of one budget: which of them a parabola is fitted to, the parabola, and the optimum by interpolation.

Near its optimum the loss of one budget is a parabola in log N. Far from it, it is not, and one diverged run bends the
parabola. So a parabola is fitted in a window around the lowest run, without the runs that the others contradict.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.interpolate import Akima1DInterpolator
from scipy.special import stdtr  # scipy.stats takes a second to import

WINDOWS = ("auto", "all", "sizes", "loss")
EACH_WAY = 3
"""Number of sizes on each side of the lowest run that a window has."""
CLOSE = 0.05
"""A window also has the runs whose loss is at most this share above the lowest."""
WIDE = 1.5
"""Decades of N that the sizes of a budget may span without a window."""
FAR = 6.0
"""Distance from the parabola of the other runs, in standard deviations, from which a run is excluded."""
CHANCE = 1e-3
"""Largest probability that a table without outliers has a run that is excluded."""
FLOOR = 1e-4
"""Smallest standard deviation of the losses, relative to the loss, in the search for outliers: the losses of two equal
runs differ by about this much. Without it, an exact table would have outliers."""
HUBER = 1.345
"""Threshold of the Huber loss in standard deviations: 95 % as efficient as least squares on normal errors."""


def window_of(log_N: np.ndarray, loss: np.ndarray, rule: str) -> np.ndarray:
    """Returns which runs of a budget lie in the window, booleans [n].

    Args:
        log_N: [n] log10 of the sizes.
        loss: [n] losses; infinite for excluded runs.
        rule: "all" has every run, "sizes" the lowest run with three sizes each way, "loss" the runs within 5 % of the
            lowest loss. "auto" has every run if the sizes span at most 1.5 decades, otherwise the runs that "sizes" or
            "loss" has.
    """
    kept = np.isfinite(loss)
    if rule == "all" or (rule == "auto" and np.ptp(log_N[kept]) <= WIDE):
        return kept
    sizes = np.unique(log_N[kept])
    steps = np.abs(np.searchsorted(sizes, log_N) - np.searchsorted(sizes, log_N[loss.argmin()]))
    near, close = kept & (steps <= EACH_WAY), kept & (loss <= (1 + CLOSE) * loss.min())
    return {"sizes": near, "loss": close, "auto": near | close}[rule]


def near_lowest(log_N: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Returns the runs within three sizes of the lowest one or within 5 % of its loss, however few sizes there are."""
    return window_of(log_N, loss, "sizes") | window_of(log_N, loss, "loss")


@dataclass(frozen=True)
class Parabola:
    """Least squares of y = c0 + c1 (x - centre) + c2 (x - centre)^2.

    Attributes:
        solver: [3, n] the matrix that gives the coefficients from the losses.
        leverage: [n] diagonal of the matrix that gives the fitted losses from the losses.
    """

    centre: float
    coefficients: np.ndarray
    fitted: np.ndarray
    solver: np.ndarray
    leverage: np.ndarray

    @property
    def plain(self) -> tuple[float, float, float]:
        """Coefficients of the powers of x itself."""
        c0, c1, c2 = map(float, self.coefficients)
        return c0 - c1 * self.centre + c2 * self.centre**2, c1 - 2 * c2 * self.centre, c2

    def vertex(self, coefficients: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns x and y of the minimum, for coefficients [..., 3]; NaN where the parabola has none.

        Ten decades from the runs, the vertex of a nearly straight line has no meaning, so it counts as none.
        """
        c0, c1, c2 = np.moveaxis(self.coefficients if coefficients is None else coefficients, -1, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            step, low = -c1 / (2 * c2), c0 - c1**2 / (4 * c2)
            minimum = (c2 > 1e-12 * np.maximum(1.0, np.abs(c0))) & (np.abs(step) < 10)
        return np.where(minimum, self.centre + step, np.nan), np.where(minimum, low, np.nan)


def fit_parabola(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> Parabola | None:
    """Fits a parabola by (weighted) least squares. Returns None if there are fewer than three different x."""
    if len(np.unique(x)) < 3:
        return None
    centre = x.mean()
    root = np.ones_like(x) if weights is None else np.sqrt(weights)
    powers = np.stack([np.ones_like(x), x - centre, (x - centre) ** 2], axis=1)
    # QR and not normal equations, so that the parabolas of data without noise are exact to the last digits.
    q, r = np.linalg.qr(powers * root[:, None])
    if np.abs(np.diagonal(r)).min() < 1e-9 * np.abs(np.diagonal(r)).max():
        return None
    solver = np.linalg.solve(r, q.T * root)
    coefficients = solver @ y
    return Parabola(float(centre), coefficients, powers @ coefficients, solver, np.einsum("ij,ij->i", q, q))


def outliers(parts: Sequence[tuple[np.ndarray, np.ndarray]], rule: str) -> tuple[list[dict[int, float]], list[bool]]:
    """Finds the runs that the other runs of their budget contradict.

    The distance of a run is its residual from the parabola fitted without it, in standard deviations of such residuals.
    The noise is taken as the same share of the loss in all budgets. Its standard deviation is estimated from Huber
    parabolas, which an outlier hardly moves, and from the other runs; the smaller counts. The farthest run is excluded
    if it is farther than `FAR` and if that has a probability below `CHANCE` without outliers. Then the search goes on.

    Args:
        parts: log10 N and losses of each budget.
        rule: see `window_of`.

    Returns:
        The excluded runs of each budget, index -> distance, and whether the budget has an outlier that cannot be found:
        among four runs, each is as far from the parabola of the other three.
    """
    excluded: list[dict[int, float]] = [{} for _ in parts]
    unclear = [False] * len(parts)
    while True:
        fits = {}
        for g, (x, y) in enumerate(parts):
            kept = np.isin(np.arange(len(y)), list(excluded[g]), invert=True)
            rows = np.flatnonzero(window_of(x, np.where(kept, y, np.inf), rule)) if kept.any() else np.zeros(0, int)
            parabola = fit_parabola(x[rows], y[rows])
            if parabola is not None and len(rows) > 3 and not unclear[g]:
                fits[g] = rows, parabola
        freedom = sum(len(rows) - 3 for rows, _ in fits.values())
        if freedom < 2:
            return excluded, unclear
        relative = {g: (parts[g][1][rows] - p.fitted) / np.abs(p.fitted) for g, (rows, p) in fits.items()}
        apart = {g: relative[g] / np.sqrt(np.maximum(1 - p.leverage, 1e-9)) for g, (_, p) in fits.items()}
        squares = sum(float(values @ values) for values in relative.values())
        g = max(apart, key=lambda g: np.abs(apart[g]).max())
        row = int(np.abs(apart[g]).argmax())
        far = float(np.abs(apart[g][row]))
        others = np.sqrt(max(squares - far**2, 0.0) / (freedom - 1))
        if far <= FAR * max(min(others, _median_scale(apart.values())), FLOOR):
            return excluded, unclear
        scale = max(min(others, _huber_scale(parts, fits, freedom)), FLOOR)
        runs = sum(len(values) for values in apart.values())
        if far <= FAR * scale or 2 * runs * stdtr(freedom - 1, -far / scale) > CHANCE:
            return excluded, unclear
        rows = fits[g][0]
        if len(rows) == 4:
            unclear[g] = True
        else:
            excluded[g][int(rows[row])] = far / scale


def _median_scale(values) -> float:
    return 1.4826 * float(np.median(np.abs(np.concatenate(list(values)))))


def _huber_scale(parts, fits: dict, freedom: int) -> float:
    """Returns the standard deviation of the relative residuals of Huber parabolas, from their median."""
    residuals = []
    for g, (rows, parabola) in fits.items():
        x, y = (values[rows] for values in parts[g])
        for _ in range(20):
            left = (y - parabola.fitted) / np.abs(parabola.fitted)
            threshold = HUBER * max(_median_scale([left]), FLOOR)
            parabola = fit_parabola(x, y, np.minimum(1, threshold / np.maximum(np.abs(left), 1e-300)))
            if parabola is None:
                break
        residuals.append(left)
    runs = sum(map(len, residuals))
    return _median_scale(residuals) * float(np.sqrt(runs / freedom))


def akima_minimum(x: np.ndarray, log_loss: np.ndarray) -> float | None:
    """Returns log10 N at the minimum of an Akima interpolation of log loss; None if the minimum is at an end.

    Runs of one size are averaged. Five sizes are needed.
    """
    sizes, rows = np.unique(x, return_inverse=True)
    if len(sizes) < 5:
        return None
    curve = Akima1DInterpolator(sizes, np.bincount(rows, log_loss) / np.bincount(rows))
    stationary = curve.derivative().roots(discontinuity=False, extrapolate=False)
    stationary = stationary[np.isfinite(stationary)]
    values = curve(stationary)
    if not len(values) or min(curve(sizes[0]), curve(sizes[-1])) <= values.min():
        return None
    return float(stationary[values.argmin()])
