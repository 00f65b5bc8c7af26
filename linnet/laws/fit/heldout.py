"""The held-out test: fits a law to the runs of small compute and predicts the runs of large compute."""

from collections.abc import Callable

import numpy as np

from linnet.laws.fit.law import HeldOut, Law

FRACTION = 0.2
"""Fraction of the points, those of largest C, that is held out by default."""


def threshold(C: np.ndarray, hold_out: float | None) -> float | None:
    """Returns the largest C in FLOPs that the fit of a held-out test uses, or None if no point is left to fit.

    Args:
        C: [n] FLOPs of the points.
        hold_out: None holds out `FRACTION` of the points, and a number below 1 holds out that fraction. A number of 1
            or more is the result itself, in FLOPs. Points of equal C stay together, and at least one is held out.
    """
    if hold_out is not None and hold_out >= 1:
        return float(hold_out)
    C = np.sort(C)
    held = max(1, round((FRACTION if hold_out is None else hold_out) * len(C)))
    below = C[C < C[len(C) - held] * (1 - 1e-9)] if len(C) > held else C[:0]
    return float(below[-1]) if len(below) else None


def held_out_of(C: np.ndarray, loss: np.ndarray, hold_out: float | None, fit: Callable[..., Law]) -> HeldOut:
    """Fits L(C) to the points up to `threshold(C, hold_out)` and compares its prediction with the points above."""
    c_max = threshold(C, hold_out)
    seen = C <= c_max if c_max is not None else np.zeros(len(C), dtype=bool)
    result = HeldOut(c_max, int(seen.sum()), int((~seen).sum()))
    if c_max is None or not result.tested:
        result.refused.append("no points have a larger C than the fitted ones")
        return result
    law = fit(C[seen], loss[seen]) if result.trained else Law("L", refused=["no points below it"])
    if law.refused:
        result.refused.extend(f"below {c_max:.3g} FLOPs: {reason}" for reason in law.refused)
        return result
    return compare(result, C[~seen], loss[~seen], law.predict(C[~seen]))


def compare(result: HeldOut, C: np.ndarray, loss: np.ndarray, predicted: np.ndarray) -> HeldOut:
    """Fills in the errors of a held-out test from observed and predicted losses, and returns it."""
    error = predicted / loss - 1
    result.mean_error, result.max_error = float(np.abs(error).mean()), float(np.abs(error).max())
    result.rms_log_error = float(np.sqrt(np.mean(np.log(predicted / loss) ** 2)))
    rows = zip(C, loss, predicted, error, strict=True)
    names = ("C", "loss", "predicted", "relative_error")
    result.points = [dict(zip(names, map(float, row), strict=True)) for row in rows]
    return result
