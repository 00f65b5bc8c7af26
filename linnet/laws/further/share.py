"""The best share of attention in a hybrid (paper 004, finding 7), also with the state taken into account.

P*(rho) is the optimal perplexity at a budget of the architecture with share rho of attention. The minimum is that of a
parabola in rho through the lowest point and its two neighbours. The state-aware form minimises P* (M / M_ref)^-c with
the shared c of the law `state`; the paper states 10 % without a definition, so this one is ours.
"""

import numpy as np
import pandas as pd

from linnet.config import count_of
from linnet.laws.further.base import Estimate, LawFit, Options, Prediction, interval, lacking
from linnet.laws.further.optima import Optimum, find_optima
from linnet.laws.further.state import fit_state

SHARES = 3


def fit_share(table: pd.DataFrame, options: Options) -> LawFit:
    """Returns the best share at each budget and over all budgets, plain and state-aware."""
    law = LawFit(
        "share",
        "Best share of attention",
        "rho* = argmin of a parabola in rho through the lowest P*(rho) and its neighbours",
        "paper 004, finding 7; the state-aware form P* (M / M_ref)^-c is our definition",
        scheme="residuals of the parabolas, by architecture; a resample with its minimum at an edge counts as the edge",
    )
    law.refused += lacking(table, "attention_share")
    if law.refused:
        return law
    shares = table.groupby("architecture", sort=False)["attention_share"].agg(["min", "max"])
    mixed = [name for name, row in shares.iterrows() if not row["min"] == row["max"]]
    law.notes += [f"{name} left out: its runs have different shares of attention, or none" for name in mixed]
    of = {name: float(row["min"]) for name, row in shares.iterrows() if name not in mixed}
    twice = sorted({share for share in of.values() if list(of.values()).count(share) > 1})
    if twice:
        names = ", ".join(name for name, share in of.items() if share in twice)
        law.refused.append(
            f"attention_share: {', '.join(f'{share:.3g}' for share in twice)} belongs to several architectures "
            f"({names}); leave one lineage with --architectures"
        )
        return law
    if len(of) < SHARES:
        what = f"{count_of(len(of), 'value')} of attention_share"
        law.refused.append(f"{what}; a minimum needs {SHARES}, such as 0, 1/4, 1")
        return law
    aware = "state_fixed" in table and table["state_fixed"].notna().any()
    state = fit_state(table, options) if aware else None
    c = None if state is None or state.refused else state.estimate("c").value
    if c is None:
        why = "; ".join(state.refused) if state is not None else "no column state_fixed"
        law.notes.append(f"no state-aware share: {why}")
    optima, refused = find_optima(table, options)
    law.notes += refused
    budgets: dict[float, dict[float, Optimum]] = {}
    for name, optima_of in optima.items():
        for optimum in optima_of if name in of else ():
            budgets.setdefault(optimum.budget, {})[of[name]] = optimum
    for kind, weight in (("rho*", 0.0), ("state-aware rho*", c)):
        if weight is not None:
            _add(law, kind, budgets, -weight, options)
    if not law.estimates:
        law.refused.append("no budget has an optimum at three shares of attention; train more sizes per budget")
    return law


def _add(law: LawFit, kind: str, budgets: dict, weight: float, options: Options) -> None:
    """Adds the minimum at each budget, over all budgets, and the held-out test of one kind."""
    columns = {}
    for budget in sorted(budgets):
        rho = sorted(budgets[budget])
        if len(rho) < SHARES:
            what = f"{kind} at {budget:.3g}: {count_of(len(rho), 'share')} with an optimum"
            law.notes.append(f"{what}; {SHARES} are needed")
            continue
        values, draws = _values([budgets[budget][share] for share in rho], weight, options)
        columns[budget] = (np.array(rho), values, draws)
        law.estimates.append(_estimate(kind, f"budget {budget:.3g}", *columns[budget]))
        for share, value in zip(rho, values, strict=True):
            row = {"kind": kind, "budget": budget, "share": share, "perplexity": float(np.exp(value))}
            law.points.setdefault("shares", []).append(row)
    if len(columns) < 2:
        return
    law.estimates.append(_estimate(kind, "all budgets", *_pooled(columns.values())))
    *below, last = sorted(columns)
    seen = best_share(*(part[None] if part.ndim == 1 else part for part in _pooled([columns[b] for b in below])[:2]))
    observed = best_share(columns[last][0][None], columns[last][1][None])
    test = Prediction(f"{kind} of the largest budget from the others, as a difference", len(below), 1)
    if np.isfinite(seen[0]) and np.isfinite(observed[0]):
        test.mean_error = test.max_error = float(abs(seen[0] - observed[0]))
    else:
        test.refused = "a minimum lies at an edge"
    law.predictions.append(test)


def _values(optima: list[Optimum], weight: float, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Returns ln P* plus weight ln M of each share, [S], and its draws [R, S]."""
    values = np.array([optimum.value for optimum in optima])
    drawn = all(optimum.draws for optimum in optima)
    draws = np.stack([optimum.draws["value"] for optimum in optima], axis=1) if drawn else np.empty((0, len(optima)))
    if weight:
        state = np.array([float(np.log(optimum.nearest("state"))) for optimum in optima])
        values, draws = values + weight * state, draws + weight * state
    return values, draws


def _pooled(columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the shares that all budgets have, and the mean over budgets of values and draws."""
    columns = list(columns)
    rho = sorted(set.intersection(*(set(column[0]) for column in columns)))
    places = [[list(column[0]).index(share) for share in rho] for column in columns]
    values = np.mean([column[1][place] for column, place in zip(columns, places, strict=True)], axis=0)
    draws = [column[2][:, place] for column, place in zip(columns, places, strict=True)]
    return np.array(rho), values, np.mean(draws, axis=0)


def _estimate(kind: str, of: str, rho: np.ndarray, values: np.ndarray, draws: np.ndarray) -> Estimate:
    if len(rho) < SHARES:
        return Estimate(kind, of=of, refused=f"{count_of(len(rho), 'share')} in common; {SHARES} are needed")
    best = float(best_share(rho[None], values[None])[0])
    if not np.isfinite(best):
        end = float(rho[np.argmin(values)])
        more = "the best share is the largest or the smallest trained" if end in (rho[0], rho[-1]) else "no minimum"
        return Estimate(kind, of=of, refused=f"{more} ({end:.3g}); train shares on both sides of it")
    drawn = best_share(np.broadcast_to(rho, draws.shape), draws)
    edge = rho[np.where(np.isfinite(draws).all(axis=1), np.nan_to_num(draws, nan=np.inf).argmin(axis=1), 0)]
    drawn = np.where(np.isfinite(drawn), drawn, np.where(np.isfinite(draws).all(axis=1), edge, np.nan))
    return Estimate(kind, best, interval(drawn), of)


def best_share(rho: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns the minimum [R] of the parabola through the lowest of values [R, S] at rho [R, S] and its neighbours.

    NaN where the lowest value is at an end.
    """
    if not len(values):
        return np.empty(0)
    lowest = np.where(np.isfinite(values), values, np.inf).argmin(axis=1)
    inner = (lowest > 0) & (lowest < values.shape[1] - 1)
    place = np.clip(lowest, 1, values.shape[1] - 2)
    rows = np.arange(len(values))
    x0, x1, x2 = (rho[rows, place + shift] for shift in (-1, 0, 1))
    y0, y1, y2 = (values[rows, place + shift] for shift in (-1, 0, 1))
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    with np.errstate(invalid="ignore", divide="ignore"):
        best = (x0 + x1) / 2 - left / (2 * bend)
    return np.where(inner & (bend > 0), best, np.nan)
