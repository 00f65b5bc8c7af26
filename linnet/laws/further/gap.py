"""How much a model of another size than the best one loses at equal compute (paper 004, finding 6 and appendix D.2).

At a budget with parabola f(ln N) and optimum N*, a model of N = (1 + delta) N* has D from the cost of that budget, and
gap(delta) = exp(f(ln N)) - exp(f(ln N*)), in perplexity. delta = -0.5 is half of the best size, trained for longer:
the fourth column of the result is its tokens per parameter relative to the optimum, which users call over-training.
"""

import numpy as np
import pandas as pd

from linnet.laws.further.base import Estimate, LawFit, Options, Prediction, errors, holm, interval, theil_sen, two_sided
from linnet.laws.further.optima import Optimum, find_optima

OFFSETS = (-0.9, -0.75, -0.5, -0.25, 0.0, 0.5, 1.0)
HALF = -0.5


def fit_gap(table: pd.DataFrame, options: Options) -> LawFit:
    """Returns the gap of each architecture, budget and offset, and its slope on the share of attention."""
    law = LawFit(
        "gap",
        "Gap off the optimum",
        "gap(delta) = exp(f(ln((1 + delta) N*))) - exp(f(ln N*))",
        "paper 004, finding 6 and appendix D.2; the slope is Theil and Sen's",
        scheme="residuals of the parabolas, by architecture",
    )
    optima, refused = find_optima(table, options)
    law.notes += refused
    for name, optima_of in optima.items():
        for optimum in optima_of:
            law.points.setdefault("gaps", []).extend(_gaps(name, optimum))
    if not law.points:
        law.refused.append("no budget has an optimum inside its sizes, and a gap is measured from an optimum")
        return law
    for row in law.points["gaps"]:
        if row["delta"] == HALF:
            of = f"{row['architecture']} at {row['budget']:.3g}"
            ends = None if row["low"] is None else (row["low"], row["high"])
            note = "" if row["gap"] is None else f"{row['relative']:.2%} of P*, {row['over_training']:.3g} x D / N"
            law.estimates.append(Estimate("gap(-0.5)", row["gap"], ends, of, note=note, refused=row["refused"]))
    law.estimates += _slopes(optima, law)
    left = [minimum.leave_one_out for minima in optima.values() for minimum in minima]
    predicted, observed = (np.concatenate(parts) for parts in zip(*left, strict=True))
    label, without = "loss of an inner size from the parabola of the others", "no budget has an inner size to leave out"
    test = errors(label, 0, predicted, observed) if len(observed) else Prediction(label, refused=without)
    law.predictions.append(test)
    return law


def _gaps(name: str, optimum: Optimum):
    """Yields a row per offset."""
    best = np.exp(optimum.value)
    for delta in OFFSETS:
        log_N = optimum.log_N + np.log1p(delta)
        N, D = np.exp(log_N), np.exp(optimum.log_tokens(log_N))
        ratio = float(D / N / np.exp(optimum.log_tokens(optimum.log_N) - optimum.log_N))
        row = {
            "architecture": name,
            "budget": optimum.budget,
            "C": optimum.C,
            "delta": delta,
            "N": float(N),
            "D": float(D),
        }
        row |= {"over_training": ratio, "gap": None, "relative": None, "low": None, "high": None, "refused": ""}
        if optimum.trained(log_N):
            row["relative"] = float(np.expm1(optimum.c2 * np.log1p(delta) ** 2))
            row["gap"] = float(best * row["relative"])
            if ends := interval(drawn_gap(optimum, delta)) if optimum.draws else None:
                row["low"], row["high"] = ends
        else:
            side, more = ("below", "smaller") if delta < 0 else ("above", "larger")
            row["refused"] = f"N = {N:.3g} lies {side} the sizes trained at this budget; train {more} models"
        yield row


def drawn_gap(one: Optimum, delta: float) -> np.ndarray:
    """Returns the draws of gap(delta) in perplexity."""
    return np.exp(one.draws["value"]) * np.expm1(one.draws["c2"] * np.log1p(delta) ** 2)


def _slopes(optima: dict[str, list[Optimum]], law: LawFit) -> list[Estimate]:
    """Returns the slope of gap(-0.5) on attention_share at each budget where three shares have a gap."""
    budgets: dict[float, list[tuple[float, float, Optimum]]] = {}
    known = {(row["architecture"], row["budget"]): row for row in law.points["gaps"] if row["delta"] == HALF}
    for name, optima_of in optima.items():
        for optimum in optima_of:
            share = optimum.rows["attention_share"].mean()
            row = known[name, optimum.budget]
            if np.isfinite(share) and row["gap"] is not None:
                budgets.setdefault(optimum.budget, []).append((share, row["gap"], optimum))
    estimates = []
    for budget in sorted(budgets):
        shares, gaps, at = zip(*budgets[budget], strict=True)
        of = f"budget {budget:.3g}"
        if len(set(shares)) < 3:
            continue
        slope = float(theil_sen(np.array(shares), np.array(gaps)))
        drawn = np.empty(0)
        if all(minimum.draws for minimum in at):
            drawn = theil_sen(np.array(shares), np.stack([drawn_gap(minimum, HALF) for minimum in at], axis=1))
        name = "slope of gap(-0.5) on attention_share"
        estimates.append(Estimate(name, slope, interval(drawn), of, two_sided(drawn), 0.0))
    holm(estimates)
    for estimate in estimates:
        grows = estimate.p is not None and estimate.p < 0.05 and estimate.number > 0
        estimate.note = "" if estimate.p is None else "the gap grows with the share" if grows else "no growth shown"
    if not estimates:
        law.notes.append("no slope on the share of attention: no budget has three different values of attention_share")
    return estimates
