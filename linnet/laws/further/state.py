"""State-optimal scaling: perplexity as a power of the size of the state (paper 004, section 4.2, finding 8).

A point per architecture and budget: M = state_fixed + state_dynamic of the trained size nearest to N* in log N, and P*,
the exponential of the optimal loss. ln P* = k_class + c ln M is fitted with one c for all classes. M of attention is
proportional to the length of the context, so c is a statement about one context length.
"""

import numpy as np
import pandas as pd
from scipy import stats

from linnet.config import count_of
from linnet.laws.further.base import Estimate, LawFit, Options, Test, check_fit, errors, interval, lacking
from linnet.laws.further.efficiency import multiplier
from linnet.laws.further.optima import Optimum, find_optima, stack

BUDGETS, CLASSES = 3, 2


def fit_state(table: pd.DataFrame, options: Options) -> LawFit:
    """Fits the shared exponent c and the offsets of the classes."""
    at = "the context of training" if options.context is None else f"a context of {options.context:,} tokens"
    law = LawFit(
        "state",
        f"State-optimal scaling, at {at}",
        "ln P* = k_class + c ln M",
        "paper 004, section 4.2, finding 8; the F test and the multipliers at equal P* are ours",
        scheme="residuals of the parabolas, by architecture; Student's t of the points where they scatter more",
    )
    law.refused += lacking(table, "state_fixed", "state_dynamic")
    if options.context is not None:
        law.refused += lacking(table, "seq_len")
    if law.refused:
        return law
    optima, refused = find_optima(table, options)
    law.notes += refused
    kept = {}
    for name, minima in optima.items():
        if len(minima) < BUDGETS:
            what = f"{name} left out: {count_of(len(minima), 'budget')} with an optimum"
            law.notes.append(f"{what}; {BUDGETS} are needed")
        elif any(not minimum.nearest("state") > 0 for minimum in minima):
            law.notes.append(f"{name} left out: its state is empty or not known")
        else:
            kept[name] = minima
    if len(kept) < CLASSES:
        reason = f"{count_of(len(kept), 'class')} with {BUDGETS} budgets or more".replace("classs", "classes")
        law.refused.append(f"{reason}; a shared exponent needs {CLASSES} classes")
        return law
    x = {name: np.log([float(minimum.nearest("state")) for minimum in minima]) for name, minima in kept.items()}
    y = {name: np.array([minimum.value for minimum in minima]) for name, minima in kept.items()}
    if sum(np.ptp(values) for values in x.values()) < 1e-6:
        law.refused.append("the state has the same size at every optimum, so no exponent can be fitted; vary the width")
        return law
    c, offsets, rest = fit_shared(x, y)
    drawn = _draws(kept, options)
    shared, law.notes = _with_interval(c, drawn, rest, x, y, law.notes)
    law.estimates.append(shared)
    law.tests += _own_slopes(rest, x, y)
    within = np.concatenate([values - values.mean() for values in x.values()])
    classes = np.repeat(np.eye(len(x)), [len(values) for values in x.values()], axis=0)
    check_fit(law, "all classes", rest, np.column_stack([classes, within]), within)
    reference = options.reference if options.reference in kept else next(iter(kept))
    law.estimates += _offsets(offsets, drawn, c, reference)
    law.estimates += _multipliers(kept, reference, options)
    law.predictions.append(_held_out(x, y))
    for name, minima in kept.items():
        for optimum, M in zip(minima, x[name], strict=True):
            row = {"architecture": name, "budget": optimum.budget, "C": optimum.C, "M": float(np.exp(M))}
            law.points.setdefault("points", []).append(row | {"perplexity": float(np.exp(optimum.value))})
        ends = [float(x[name].min()), float(x[name].max())]
        law.points.setdefault("lines", []).extend(
            {"architecture": name, "M": float(np.exp(M)), "perplexity": float(np.exp(offsets[name] + c * M))}
            for M in ends
        )
    return law


def fit_shared(x: dict[str, np.ndarray], y: dict[str, np.ndarray]) -> tuple[float, dict[str, float], np.ndarray]:
    """Returns c, the offset of each class, and the residuals of all points, of ln P* (y) on ln M (x)."""
    above = sum(((x[name] - x[name].mean()) * (y[name] - y[name].mean())).sum() for name in x)
    c = float(above / sum(((x[name] - x[name].mean()) ** 2).sum() for name in x))
    offsets = {name: float(y[name].mean() - c * x[name].mean()) for name in x}
    return c, offsets, np.concatenate([y[name] - offsets[name] - c * x[name] for name in x])


def _draws(kept: dict[str, list[Optimum]], options: Options) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns ln M and ln P* of each class in each resample, [R, B] each; N* moves, and so may the nearest size."""
    drawn = {}
    for name, optima_of in kept.items():
        log_N, value = (stack(optima_of, key, options.bootstrap) for key in ("log_N", "value"))
        states = [optimum.nearest("state", log_N[:, i]) for i, optimum in enumerate(optima_of)]
        drawn[name] = (np.log(np.stack(states, axis=1)), np.where(np.isfinite(log_N), value, np.nan))
    return drawn


def _shared_draws(drawn) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the draws of c [R] and of each offset."""
    above = below = 0.0
    for x, y in drawn.values():
        dx = x - x.mean(axis=1, keepdims=True)
        above, below = above + (dx * y).sum(axis=1), below + (dx**2).sum(axis=1)
    c = above / np.where(below > 0, below, np.nan)
    return c, {name: y.mean(axis=1) - c * x.mean(axis=1) for name, (x, y) in drawn.items()}


def _with_interval(c, drawn, rest, x, y, notes) -> tuple[Estimate, list[str]]:
    """Returns c with the interval of the runs' noise, or of the points' scatter if that is larger."""
    draws, _ = _shared_draws(drawn)
    if not len(draws):
        return Estimate("c", c, None, note="P* is proportional to M^c in every class"), notes
    ends = interval(draws)
    degrees = len(rest) - len(x) - 1
    if ends is None or degrees < 1:
        return Estimate("c", c, ends, note="P* is proportional to M^c in every class"), notes
    scatter = float((rest**2).sum() / degrees)
    noise = float(np.mean(np.concatenate([np.nanvar(py - c * px, axis=0) for px, py in drawn.values()])))
    if noise > 0 and stats.f.sf(scatter / noise, degrees, 10 * degrees) < 0.01:
        spread = sum(((x[name] - x[name].mean()) ** 2).sum() for name in x)
        half = float(stats.t.ppf(0.975, degrees) * np.sqrt(scatter / spread))
        if 2 * half > ends[1] - ends[0]:
            ends = (c - half, c + half)
            notes = [
                *notes,
                "the points scatter about the lines more than the noise of the runs; interval by Student's t",
            ]
    return Estimate("c", c, ends, note="P* is proportional to M^c in every class"), notes


def _own_slopes(rest, x, y) -> list[Test]:
    """Returns the F test of a slope per class against one for all."""
    points, classes = len(rest), len(x)
    degrees = (classes - 1, points - 2 * classes)
    if degrees[1] < 1:
        return []
    squares = 0.0
    for name in x:
        _, _, part = fit_shared({name: x[name]}, {name: y[name]}) if np.ptp(x[name]) > 1e-9 else (0, 0, y[name] * 0)
        squares += float((part**2).sum())
    statistic = ((rest**2).sum() - squares) / degrees[0] / max(squares / degrees[1], 1e-300)
    p = float(stats.f.sf(statistic, *degrees))
    words = "the classes have different slopes; read c with care" if p < 0.05 else "one slope for all is not rejected"
    return [Test("own slopes against one", float(statistic), p, words, degrees=degrees)]


def _offsets(offsets, drawn, c, reference) -> list[Estimate]:
    """Returns the offset of each class from the reference, and its state relative to the reference at equal P*."""
    draws, offset_draws = _shared_draws(drawn)
    estimates = []
    for name in offsets:
        if name == reference:
            continue
        apart = offset_draws[name] - offset_draws[reference]
        of = f"{name} - {reference}"
        estimates.append(Estimate("k difference", offsets[name] - offsets[reference], interval(apart), of))
        with np.errstate(over="ignore", divide="ignore"):
            ratios = np.exp(-apart / draws)
        ratio = float(np.exp(-(offsets[name] - offsets[reference]) / c))
        estimates.append(Estimate("state at equal P*", ratio, interval(ratios), f"{name} / {reference}"))
    return estimates


def _multipliers(kept, reference, options) -> list[Estimate]:
    """Returns the compute of each class relative to the reference at equal P*."""
    estimates = []
    for name in kept:
        if name == reference:
            continue
        of = f"{name} / {reference}"
        factor = multiplier(kept[reference], kept[name], options)
        if factor is None:
            reason = "no P* of the two lies in the range of both"
            estimates.append(Estimate("FLOPs at equal P*", of=of, refused=f"{reason}; train more budgets"))
            continue
        _, logs, drawn = factor
        ends = interval(drawn.mean(axis=1))
        ends = None if ends is None else (float(np.exp(ends[0])), float(np.exp(ends[1])))
        estimates.append(Estimate("FLOPs at equal P*", float(np.exp(logs.mean())), ends, of))
    return estimates


def _held_out(x, y):
    """Predicts P* of each class's largest budget from the other budgets."""
    part = {name: values[:-1] for name, values in x.items()}
    if sum(np.ptp(values) for values in part.values()) < 1e-6:
        return errors("P*", 0, [1.0], [1.0])
    c, offsets, rest = fit_shared(part, {name: values[:-1] for name, values in y.items()})
    predicted = [np.exp(offsets[name] + c * x[name][-1]) for name in x]
    return errors("P* of the largest budgets from the others", len(rest), predicted, [np.exp(y[n][-1]) for n in y])
