"""Least squares of log losses by damped Gauss-Newton steps, for many problems at once, and wild resamples of runs."""

from collections.abc import Callable

import numpy as np
from scipy import stats

Model = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""theta [S, P] -> log loss [S, n] and its derivatives [S, n, P]."""

CHUNK = 4_000_000
"""Numbers of one matrix of derivatives. Larger batches are solved in parts."""


def solve(
    model: Model, start: np.ndarray, y: np.ndarray, iterations: int = 100, tolerance: float = 1e-10
) -> tuple[np.ndarray, np.ndarray]:
    """Minimises sum_i (model_i(theta) - y_i)^2 from every row of `start`.

    Args:
        model: see `Model`.
        start: [S, P].
        y: [n] or [S, n].

    Returns:
        theta [S, P] and the sums of squares [S].
    """
    y = np.broadcast_to(y, (len(start), y.shape[-1]))
    part = max(1, CHUNK // (y.shape[1] * start.shape[1]))
    found = [_solve(model, start[i : i + part], y[i : i + part], iterations, tolerance) for i in range(0, len(y), part)]
    return np.concatenate([theta for theta, _ in found]), np.concatenate([value for _, value in found])


def _solve(model: Model, start, y, iterations: int, tolerance: float):
    theta = np.array(start, dtype=float)
    damping, active = np.full(len(theta), 1e-3), np.arange(len(theta))
    final, value_of = theta.copy(), np.full(len(theta), np.inf)
    value, jacobian = np.full(len(theta), np.inf), None
    predicted, jacobian = model(theta)
    rest = predicted - y
    value = (rest**2).sum(axis=1)
    quiet = np.zeros(len(theta), dtype=int)
    for _ in range(iterations):
        transposed = jacobian.transpose(0, 2, 1)
        curvature, gradient = transposed @ jacobian, (transposed @ rest[..., None])[..., 0]
        scale = np.einsum("spp->sp", curvature)
        floor = 1e-12 * scale.max(axis=1, keepdims=True) + 1e-300
        damped = curvature + np.eye(theta.shape[1]) * (damping[:, None] * scale + floor)[:, None, :]
        step = np.clip(np.linalg.solve(damped, gradient[..., None])[..., 0], -3, 3)
        moved, slopes = model(theta - step)
        after = moved - y
        new = (after**2).sum(axis=1)
        better = new <= value
        quiet = np.where(better & (value - new <= tolerance * value), quiet + 1, 0)
        theta = np.where(better[:, None], theta - step, theta)
        rest = np.where(better[:, None], after, rest)
        jacobian = np.where(better[:, None, None], slopes, jacobian)
        value = np.where(better, new, value)
        damping = np.where(better, np.maximum(damping / 5, 1e-12), damping * 4)
        done = (quiet >= 2) | (damping > 1e10) | (value <= 1e-28)
        if done.any():
            final[active[done]], value_of[active[done]] = theta[done], value[done]
            on = ~done
            active, theta, y, rest, jacobian = active[on], theta[on], y[on], rest[on], jacobian[on]
            value, damping, quiet = value[on], damping[on], quiet[on]
            if not len(active):
                break
    final[active], value_of[active] = theta, value
    return final, value_of


def wild(predicted: np.ndarray, y: np.ndarray, slopes: np.ndarray, resamples: int, random) -> np.ndarray:
    """Returns resamples [R, n] of log losses: fitted values plus residuals with random signs.

    The wild bootstrap (Wu 1986) keeps the design and the scale of each run's residual, so it works for few runs and for
    noise that changes with size. A residual is divided by sqrt(1 - leverage), because the fit draws near to runs that
    decide it, and scaled up by Student's t, because the noise is known from few residuals.

    Args:
        predicted, y: [n] fitted and observed log losses.
        slopes: [n, P] derivatives of the fitted ones.
    """
    freedom = max(len(y) - slopes.shape[1], 1)
    leverage = (np.linalg.qr(slopes / np.maximum(np.abs(slopes).max(axis=0), 1e-300))[0] ** 2).sum(axis=1)
    scale = stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975)
    rest = (y - predicted) / np.sqrt(np.maximum(1 - leverage, 1 / len(y)))
    return predicted + scale * rest * random.choice((-1.0, 1.0), (resamples, len(y)))
