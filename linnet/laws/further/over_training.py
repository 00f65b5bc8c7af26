"""Loss by compute and tokens per parameter, for models that are trained longer than the optimum (Gadre et al. 2024).

L(C, M) = E + (a M^eta + b M^-eta) C^-eta with M = D / N: the Chinchilla surface with tied exponents, alpha = beta =
2 eta, and C = k N D. Four numbers, from five runs or more.
"""

import numpy as np
import pandas as pd

from linnet.laws.fit.law import threshold
from linnet.laws.fit.lse import Objective, Term, log_sum
from linnet.laws.fit.lse import solve as solve_lse
from linnet.laws.further.base import (
    Estimate,
    LawFit,
    Options,
    Prediction,
    check_fit,
    count_of,
    errors,
    generators,
    interval,
    wild,
)

ROWS = 5
ROWS_FOR_INTERVALS = 8
NAMES = ("E", "a", "b", "eta")
SQUARES = Objective()
RATIOS = (20.0, 100.0, 500.0)


def fit_over_training(table: pd.DataFrame, options: Options) -> LawFit:
    """Fits the law to every architecture."""
    law = LawFit(
        "over-training",
        "Over-training",
        "L(C, M) = E + (a M^eta + b M^-eta) C^-eta, M = D / N",
        "Gadre et al. 2024, equation 4; least squares of log loss",
        scheme="wild bootstrap of the residuals, by run",
    )
    random = generators(options, list(dict.fromkeys(table["architecture"])))
    for name, part in table.groupby("architecture", sort=False):
        C, M, y = (part[key].to_numpy(float) for key in ("C", "D", "loss"))
        M, y = M / part["N"].to_numpy(float), np.log(y)
        if reason := unfit(C, M):
            law.notes.append(f"{name} left out: {reason}")
            continue
        theta, _ = fit(C, M, y, objective=options.objective)
        if reason := degenerate(theta, C, M):
            law.notes.append(f"{name} left out: {reason}")
            continue
        drawn, slopes = np.empty((0, 4)), _slopes(theta, C, M)
        if options.bootstrap and len(y) >= ROWS_FOR_INTERVALS:
            drawn = _draws(theta, C, M, y, slopes, options, random[name])
        elif options.bootstrap:
            law.notes.append(f"{name}: no intervals from {len(y)} runs; they need {ROWS_FOR_INTERVALS}")
        check_fit(law, name, y - predict(theta[None], C, M)[0], slopes, np.log(C), np.log(M))
        _add(law, name, theta, drawn, C, M)
        law.predictions += _held_out(name, theta, C, M, y, options)
        for c, m, n, loss, run in zip(C, M, part["N"], part["loss"], part["run"], strict=True):
            row = {"architecture": name, "run": str(run), "C": float(c), "M": float(m), "N": float(n)}
            fitted = float(np.exp(predict(theta[None], np.array([c]), np.array([m]))[0, 0]))
            law.points.setdefault("runs", []).append(row | {"loss": float(loss), "fitted": fitted})
    if not law.estimates:
        law.refused += [*law.notes] or ["the table has no rows"]
        law.notes = []
    return law


def fit(C, M, y, start: np.ndarray | None = None, objective: Objective = SQUARES) -> tuple[np.ndarray, float]:
    """Returns (ln a, ln b, ln E, eta) and the sum of squares of residuals, by default of log losses."""
    if start is None:
        floor = y.min()
        grid = [
            (np.log(part * np.exp(floor)) + eta * np.log(C).mean(), np.log(1 - share) + floor + eta * np.log(C).mean())
            + (np.log(share) + floor, eta)
            for share in (0.3, 0.6, 0.9)
            for eta in (0.05, 0.1, 0.2, 0.3)
            for part in (0.1, 0.5)
        ]
        thetas, values = solve_lse(_terms(C, M), np.array(grid), y, None, *objective, iterations=40, tolerance=1e-4)
        start = thetas[np.argsort(values)[:3]]
    thetas, values = solve_lse(_terms(C, M), np.atleast_2d(start), y, None, *objective)
    best = int(np.nanargmin(values))
    return thetas[best], float(2 * values[best])


def predict(theta: np.ndarray, C: np.ndarray, M: np.ndarray) -> np.ndarray:
    """Returns log losses [S, n] of parameters [S, 4]."""
    return log_sum(_terms(C, M), theta)[0]


def _terms(C, M) -> list[Term]:
    log_C, log_M = np.log(C), np.log(M)
    return [Term(0, 3, log_M - log_C), Term(1, 3, -log_M - log_C), Term(2)]


def unfit(C: np.ndarray, M: np.ndarray) -> str:
    """Returns the reason why runs at C and M do not determine the law, or ""."""
    if len(C) < ROWS:
        return f"{count_of(len(C), 'run')}; four numbers need {ROWS}"
    if np.ptp(np.log(M)) < np.log(2):
        return "tokens per parameter vary by less than a factor of 2; train some models longer"
    if np.ptp(np.log(C)) < np.log(2):
        return "compute varies by less than a factor of 2; train two budgets or more"
    return ""


def degenerate(theta: np.ndarray, C: np.ndarray, M: np.ndarray) -> str:
    """Returns the reason why a fitted law is none, or ""."""
    shares = log_sum(_terms(C, M), theta[None])[1][:, 0].max(axis=1)
    gone = [name for name, share in zip(("a M^eta", "b M^-eta", "E"), shares, strict=True) if share < 1e-3]
    if theta[3] * np.ptp(np.log(C)) < 0.01:
        return f"eta = {theta[3]:.2g}: the loss does not fall with compute in these runs"
    return f"{' and '.join(gone)} vanishes in the best fit, so these runs do not determine four numbers" if gone else ""


def _slopes(theta: np.ndarray, C, M) -> np.ndarray:
    """Returns the derivatives [n, 4] of the log losses."""
    terms = _terms(C, M)
    a, b, E = log_sum(terms, theta[None])[1][:, 0]
    return np.stack([a, b, E, a * terms[0].x + b * terms[1].x], axis=1)


def _draws(theta, C, M, y, slopes, options: Options, random) -> np.ndarray:
    drawn = wild(predict(theta[None], C, M)[0], y, slopes, options.bootstrap, random)
    fits, _ = solve_lse(_terms(C, M), np.tile(theta, (len(drawn), 1)), drawn, None, *options.objective, tolerance=1e-9)
    fits[(fits[:, 3] <= 1e-3) | (np.abs(fits[:, :3]) > 200).any(axis=1)] = np.nan
    return fits


def _add(law: LawFit, name: str, theta, drawn, C, M) -> None:
    values = {"E": theta[2], "a": theta[0], "b": theta[1]}
    columns = {"E": drawn[:, 2], "a": drawn[:, 0], "b": drawn[:, 1]}
    with np.errstate(over="ignore"):
        for symbol, value in values.items():
            law.estimates.append(Estimate(symbol, float(np.exp(value)), interval(np.exp(columns[symbol])), name))
        law.estimates.append(Estimate("eta", float(theta[3]), interval(drawn[:, 3]), name))
        best = float(np.exp((theta[1] - theta[0]) / (2 * theta[3])))
        at = np.exp((drawn[:, 1] - drawn[:, 0]) / (2 * drawn[:, 3]))
    note = "" if M.min() <= best <= M.max() else "outside the ratios trained"
    law.estimates.append(Estimate("M of lowest loss", best, interval(at), name, note=note))
    top = np.array([C.max()])
    for ratio in (ratio for ratio in RATIOS if M.min() <= ratio <= M.max()):
        price = np.expm1(predict(theta[None], top, np.array([ratio])) - predict(theta[None], top, np.array([best])))
        prices = np.empty(0)
        if len(drawn):
            each = [log_sum(_terms(top[:, None], m[:, None]), drawn)[0][:, 0] for m in (np.full(len(at), ratio), at)]
            prices = np.expm1(each[0] - each[1])
        label = f"loss at M = {ratio:g} over the lowest, at {top[0]:.3g} FLOPs"
        law.estimates.append(Estimate(label, float(price[0, 0]), interval(prices), name))


def _held_out(name: str, start: np.ndarray, C, M, y, options: Options) -> list[Prediction]:
    """Predicts the runs of most compute from the others, and the runs of most tokens per parameter from the others."""
    predictions = []
    for what, values, hold_out in (("most compute", C, options.hold_out), ("most tokens per parameter", M, None)):
        label = f"{name}: loss of the runs of {what}"
        limit = threshold(values, hold_out)
        seen = values <= limit if limit is not None else np.zeros(len(values), dtype=bool)
        if seen.all() or (reason := unfit(C[seen], M[seen])):
            predictions.append(Prediction(label, refused="none are left" if seen.all() else f"of the others, {reason}"))
            continue
        theta, _ = fit(C[seen], M[seen], y[seen], start, options.objective)
        predicted = np.exp(predict(theta[None], C[~seen], M[~seen])[0])
        predictions.append(errors(label, int(seen.sum()), predicted, np.exp(y[~seen])))
    return predictions
