"""The test every fit should pass: fitted to the cheap end of the data, does it predict the dear end?"""

from collections.abc import Callable

import numpy as np

from linnet.study.fit.law import HeldOut, Law

FRACTION = 0.2
"""Of the points, held out by default: those of largest C."""


def threshold(C: np.ndarray, hold_out: float | None) -> float | None:
    """The largest C that a fit may see.

    Args:
        hold_out: None holds out `FRACTION` of the points, a number below 1 that fraction, one above it is Cmax (FLOPs).
            Points of equal C stay together, and at least one is held out.
    """
    if hold_out is not None and hold_out >= 1:
        return float(hold_out)
    C = np.sort(C)
    held = max(1, round((FRACTION if hold_out is None else hold_out) * len(C)))
    below = C[C < C[len(C) - held] * (1 - 1e-9)] if len(C) > held else C[:0]
    return float(below[-1]) if len(below) else None


def held_out_of(C: np.ndarray, loss: np.ndarray, hold_out: float | None, fit: Callable[..., Law]) -> HeldOut:
    """Fits L(C) to the points with C <= Cmax and compares its prediction with those above; see `threshold`."""
    c_max = threshold(C, hold_out)
    seen = C <= c_max if c_max is not None else np.zeros(len(C), dtype=bool)
    result = HeldOut(c_max, int(seen.sum()), int((~seen).sum()))
    if c_max is None or not result.tested:
        result.refused.append("no points lie above the largest C that the fit may see")
        return result
    law = fit(C[seen], loss[seen]) if result.trained else Law("L", refused=["no points below it"])
    if law.refused:
        result.refused.extend(f"below {c_max:.3g} FLOPs: {reason}" for reason in law.refused)
        return result
    return compare(result, C[~seen], loss[~seen], law.predict(C[~seen]))


def compare(result: HeldOut, C: np.ndarray, loss: np.ndarray, predicted: np.ndarray) -> HeldOut:
    """Fills the errors of a held-out test from observed and predicted losses."""
    error = predicted / loss - 1
    result.mean_error, result.max_error = float(np.abs(error).mean()), float(np.abs(error).max())
    result.rms_log_error = float(np.sqrt(np.mean(np.log(predicted / loss) ** 2)))
    rows = zip(C, loss, predicted, error, strict=True)
    names = ("C", "loss", "predicted", "relative_error")
    result.points = [dict(zip(names, map(float, row), strict=True)) for row in rows]
    return result
