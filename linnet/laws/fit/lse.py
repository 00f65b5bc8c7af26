"""Fits log y = log sum_k exp(t_k) to a batch of problems, where t_k is an offset plus a slope times a known variable.

An irreducible term plus power laws is such a sum: L = E + beta C^alpha has t = (e, b + alpha log C), and the Chinchilla
surface (Hoffmann et al. 2022, equation 10, with the log-sum-exp of their section D.2) has t = (e, a - alpha log N,
b - beta log D). The starts of a grid and the resamples of a bootstrap are rows of one batch, so a thousand fits cost
about as much as ten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_CHUNK = 200_000
"""Rows of a batch times points that are solved together. This size stays in the cache of the CPU."""


@dataclass(frozen=True)
class Term:
    """The term exp(theta[offset] + theta[slope] x). Without a slope, the term is constant.

    Attributes:
        offset, slope: indices into the parameters.
        x: [n], or [S, n] with one row per problem.
    """

    offset: int
    slope: int | None = None
    x: np.ndarray | None = None


class Objective(NamedTuple):
    """What is minimised: the Huber loss with threshold `delta` (None: squares) of log residuals, or of raw ones."""

    delta: float | None = None
    raw: bool = False


def log_sum(terms: Sequence[Term], theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log of the sum of K terms, [S, n], and each term's share of the sum, [K, S, n], for theta [S, P]."""
    t = np.stack(np.broadcast_arrays(*(_term(term, theta) for term in terms)))
    top = t.max(axis=0)
    share = np.exp(t - top)
    total = share.sum(axis=0)
    return top + np.log(total), share / total


def _term(term: Term, theta: np.ndarray) -> np.ndarray:
    value = theta[:, term.offset, None]
    return value if term.slope is None else value + theta[:, term.slope, None] * term.x


def residuals(terms: Sequence[Term], theta: np.ndarray, y: np.ndarray, raw: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns the residuals [S, n] of log or raw values, and their derivatives [K, S, n] by the terms."""
    model, share = log_sum(terms, theta)
    if not raw:
        return model - y, share
    value = np.exp(np.minimum(model, 300))  # a start may be far from any value whose square is finite
    return value - np.exp(y), share * value


def huber(residual: np.ndarray, delta: float | None) -> np.ndarray:
    """Returns the Huber loss: r^2/2 up to |r| = `delta`, then delta (|r| - delta/2). Without delta, r^2/2."""
    if delta is None:
        return 0.5 * residual**2
    inner = np.clip(residual, -delta, delta)
    return inner * (residual - 0.5 * inner)


def solve(
    terms: Sequence[Term],
    start: np.ndarray,
    y: np.ndarray,
    weights: np.ndarray | None = None,
    delta: float | None = None,
    raw: bool = False,
    iterations: int = 300,
    tolerance: float = 1e-11,
) -> tuple[np.ndarray, np.ndarray]:
    """Minimises sum_i w_i huber(log_sum_i(theta) - y_i) from every start, by damped Gauss-Newton steps.

    With `raw`, the residuals are those of the values, exp(log_sum_i(theta)) - exp(y_i).

    The weights min(1, delta / |r|) replace the Huber loss by a quadratic that lies above it and touches it. A step is
    accepted only if it does not increase the objective.

    Args:
        terms: the K terms of the sum.
        start: [S, P] starting parameters.
        y: [n] or [S, n] logarithms of the observed values.
        weights: [n] or [S, n] counts of a resample; default 1.
        delta, raw: see `Objective`.
        iterations: largest number of steps.
        tolerance: a row stops where a step promises a relative decrease of at most this, or after three that had one.

    Returns:
        theta [S, P] and the objective [S], in the order of `start`.
    """
    start = np.array(start, dtype=float)
    rows = max(1, _CHUNK // np.shape(y)[-1])
    weights = np.ones(np.shape(y)[-1]) if weights is None else np.asarray(weights, dtype=float)
    parts = []
    for first in range(0, len(start), rows):
        part = slice(first, first + rows)
        chosen = [Term(t.offset, t.slope, _rows(t.x, part)) for t in terms]
        parts.append(
            _solve(chosen, start[part], _rows(y, part), _rows(weights, part), delta, raw, iterations, tolerance)
        )
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def _rows(values: np.ndarray | None, part) -> np.ndarray | None:
    return values[part] if values is not None and np.ndim(values) == 2 else values


def _solve(terms, theta, y, weights, delta, raw, iterations, tolerance):
    final, objective = theta.copy(), np.full(len(theta), np.inf)
    active = np.arange(len(theta))
    damping, quiet = np.full(len(theta), 1e-2), np.zeros(len(theta), dtype=int)
    residual, share = residuals(terms, theta, y, raw)
    value = (weights * huber(residual, delta)).sum(axis=-1)
    for _ in range(iterations):
        gradient, curvature = _normal_equations(terms, theta.shape[1], residual, share, weights, delta)
        scale = np.einsum("spp->sp", curvature)
        floor = 1e-14 * scale.max(axis=1, keepdims=True) + 1e-300
        damped = curvature + np.eye(theta.shape[1]) * (damping[:, None] * scale + floor)[:, None, :]
        step = np.clip(np.linalg.solve(damped, gradient[..., None])[..., 0], -3, 3)
        new_residual, new_share = residuals(terms, theta - step, y, raw)
        new_value = (weights * huber(new_residual, delta)).sum(axis=-1)
        better = new_value <= value
        # A row stops where an almost undamped step promises no gain, after three accepted steps without gain, or if not
        # even the smallest step decreases `value`.
        promised = np.where(damping <= 1e-2, (gradient * step).sum(axis=1), np.inf)
        still = better & (value - new_value <= tolerance * value)
        quiet = np.where(still, quiet + 1, 0)
        theta = np.where(better[:, None], theta - step, theta)
        value = np.where(better, new_value, value)
        residual = np.where(better[:, None], new_residual, residual)
        share = np.where(better[:, None], new_share, share)
        damping = np.where(better, np.maximum(damping / 5, 1e-12), damping * 4)
        stopped = (better & (promised <= tolerance * value)) | (quiet >= 3) | (damping > 1e12) | (value <= 1e-30)
        if stopped.any():
            final[active[stopped]], objective[active[stopped]] = theta[stopped], value[stopped]
            on = ~stopped
            active, theta, value, damping, quiet = active[on], theta[on], value[on], damping[on], quiet[on]
            residual, share, y, weights = residual[on], share[:, on], _rows(y, on), _rows(weights, on)
            terms = [Term(t.offset, t.slope, _rows(t.x, on)) for t in terms]
            if not len(active):
                break
    final[active], objective[active] = theta, value
    return final, objective


def _normal_equations(terms, size, residual, share, weights, delta):
    jacobian = np.zeros((*residual.shape, size))
    for term, part in zip(terms, share, strict=True):
        jacobian[..., term.offset] += part
        if term.slope is not None:
            jacobian[..., term.slope] += part * term.x
    pull = weights if delta is None else weights * np.minimum(1, delta / np.maximum(np.abs(residual), 1e-300))
    pulled = jacobian * np.broadcast_to(pull, residual.shape)[..., None]
    gradient = np.matmul(residual[:, None, :], pulled)[:, 0]
    return gradient, np.matmul(pulled.transpose(0, 2, 1), jacobian)
