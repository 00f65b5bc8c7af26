"""How many times more compute one architecture needs for the loss of another: the companion of a crossing.

kappa(C) = C_second(L_first(C)) / C, with the optimal losses of both at their budgets. The compute of the second is
interpolated in log C over log loss between its own budgets, so no form of L(C) is assumed, and losses outside its
budgets give no factor. This definition is ours; it is the horizontal distance of two loss curves.
"""

from itertools import combinations

import numpy as np
import pandas as pd

from linnet.laws.further.base import Estimate, LawFit, Options, holm, interval, two_sided
from linnet.laws.further.optima import Optimum, find_optima, slopes, stack, with_scatter


def fit_efficiency(table: pd.DataFrame, options: Options) -> LawFit:
    """Returns the factor of each pair of architectures at each budget, its mean, and its drift with compute."""
    law = LawFit(
        "efficiency",
        "Compute at equal loss",
        "kappa(C) = C_second(L_first(C)) / C",
        "our definition: the horizontal distance of two curves of optimal loss, interpolated between budgets",
        scheme="residuals of the parabolas, scatter of the factors, by architecture; factors from joint resamples",
    )
    optima, refused = find_optima(table, options)
    law.notes += refused
    names = [name for name, optima_of in optima.items() if len(optima_of) >= 2]
    law.notes += [f"{name} left out: fewer than 2 budgets with an optimum" for name in optima if name not in names]
    if options.reference in names:
        names.sort(key=lambda name: name != options.reference)
    if len(names) < 2:
        law.refused.append("fewer than 2 architectures have an optimum inside their sizes at 2 budgets")
        return law
    family = []
    for first, second in combinations(names, 2):
        pair = f"{second} for the loss of {first}"
        factor = multiplier(optima[first], optima[second], options)
        if factor is None:
            reason = "no optimal loss of the first lies between those of the second, or they do not fall with compute"
            law.estimates.append(Estimate("kappa", of=pair, refused=f"{reason}; train more budgets"))
            continue
        C, logs, drawn = factor
        mean = np.nanmean(logs)
        number = sorted(names).index(first) * len(names) + sorted(names).index(second)
        scattered = with_scatter(np.log(C), logs, drawn, options.seed + 1000 * number)
        averaged = scattered.mean(axis=1)
        ends = interval(averaged)
        estimate = Estimate("kappa", float(np.exp(mean)), _exp(ends), pair, two_sided(averaged), 1.0)
        family.append(estimate)
        law.estimates.append(estimate)
        if len(C) >= 2:
            drift = slopes(np.log(C), logs), slopes(np.log(C), scattered)
            note = "how the logarithm of kappa grows with ln C"
            law.estimates.append(Estimate("drift", float(drift[0]), interval(drift[1]), pair, note=note))
        for index, at in enumerate(C):
            ends = interval(drawn[:, index]) if len(drawn) else None
            low, high = _exp(ends) or (None, None)
            row = {"first": first, "second": second, "C": at, "kappa": float(np.exp(logs[index]))}
            law.points.setdefault("factors", []).append(row | {"low": low, "high": high})
    holm(family, "differs from 1", "compatible with 1")
    return law


def multiplier(first: list[Optimum], second: list[Optimum], options: Options):
    """Returns (C [B], log kappa [B], draws [R, B]) at the budgets of the first that the second reaches, or None."""
    C = np.log([optimum.C for optimum in first]), np.log([optimum.C for optimum in second])
    losses = np.array([optimum.value for optimum in first]), np.array([optimum.value for optimum in second])
    if (np.diff(losses[1]) >= 0).any() or (losses[1] <= 0).any() or (losses[0] <= 0).any():
        return None
    inside = (losses[0] <= losses[1].max()) & (losses[0] >= losses[1].min())
    if not inside.any():
        return None
    drawn = [stack(part, "value", options.bootstrap) for part in (first, second)]
    rows = min(map(len, drawn))
    logs = _log_compute(losses[0][None, inside], losses[1][None], C[1])[0] - C[0][inside]
    draws = _log_compute(drawn[0][:rows, inside], drawn[1][:rows], C[1]) - C[0][inside]
    return np.exp(C[0][inside]), logs, draws


def _log_compute(wanted: np.ndarray, losses: np.ndarray, log_C: np.ndarray) -> np.ndarray:
    """Returns ln C at which the second architecture has the losses `wanted` [R, W], from its `losses` [R, B].

    Linear in log loss, with the outer segments continued. A resample whose losses do not fall gives NaN.
    """
    with np.errstate(invalid="ignore"):
        x, y = np.log(losses), np.log(wanted)
    falls = (np.diff(x, axis=1) < 0).all(axis=1)
    segment = np.clip((x[:, None, 1:] > y[:, :, None]).sum(axis=2), 0, x.shape[1] - 2)
    rows = np.arange(len(x))[:, None]
    x0, x1 = x[rows, segment], x[rows, segment + 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        log_compute = log_C[segment] + (y - x0) / (x1 - x0) * (log_C[segment + 1] - log_C[segment])
    return np.where(falls[:, None], log_compute, np.nan)


def _exp(ends):
    return None if ends is None else (float(np.exp(ends[0])), float(np.exp(ends[1])))
