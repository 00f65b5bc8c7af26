"""Repeated data: how much a further pass over the same tokens is worth (Muennighoff et al. 2023).

L = E + A / N'^alpha + B / D'^beta with D' = U + U R_D (1 - exp(-r_D / R_D)): U unique tokens, r_D = D / U - 1 repeats,
and N' alike with U_N = min(N, best size for U tokens), r_N = N / U_N - 1. R_D is the number of repeats after which the
value of repeating is used up by 1 - 1/e. The best size for U tokens is that of the surface. All numbers are fitted
together, from a start at the surface of the runs of at most one pass; the paper fits that surface first and keeps it.
R_N is fitted only where models beyond U_N were trained.
"""

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from linnet.laws.fit import fit_parametric
from linnet.laws.fit.parametric import DELTA
from linnet.laws.further.base import (
    Estimate,
    LawFit,
    Options,
    Prediction,
    check_fit,
    errors,
    generators,
    interval,
    lacking,
    wild,
)

REPEATED = 4
"""Smallest number of runs with more than one pass."""
MOST = 1.5
"""Smallest number of passes that the longest run must have."""
LIMITS = (1e-2, 1e4)
RESAMPLES = 300
ROBUST = {"loss": "huber", "f_scale": DELTA}
"""The loss of the surface: a failed run moves the law no farther than a run that is 0.1 % off."""


def fit_data_constrained(table: pd.DataFrame, options: Options) -> LawFit:
    """Fits R_D, and R_N where it can be, to every architecture."""
    law = LawFit(
        "data-constrained",
        "Repeated data",
        "L = E + A / N'^alpha + B / D'^beta, D' = U + U R_D (1 - exp(-r_D / R_D)), r_D = D / U - 1",
        "Muennighoff et al. 2023, equations 5 and 6; Huber loss of log loss, as of the surface",
        scheme=f"wild bootstrap of the residuals, by run; at most {RESAMPLES} resamples",
    )
    law.refused += lacking(table, "unique_tokens")
    if law.refused:
        return law
    random = generators(options, list(dict.fromkeys(table["architecture"])))
    for name, part in table[table["unique_tokens"].notna()].groupby("architecture", sort=False):
        if reason := _fit_one(law, name, part.reset_index(drop=True), options, random[name]):
            law.notes.append(f"{name} left out: {reason}")
    if not law.estimates:
        law.refused += law.notes or ["no run has a number of unique tokens"]
        law.notes = []
    return law


def _fit_one(law: LawFit, name: str, part: pd.DataFrame, options: Options, random) -> str:
    """Adds one architecture. Returns the reason if it cannot be fitted."""
    passes = (part["D"] / part["unique_tokens"]).to_numpy()
    repeated = passes > 1 + 1e-6
    if repeated.sum() < REPEATED or passes.max() < MOST:
        return f"{int(repeated.sum())} runs with more than one pass, at most {passes.max():.2g}; {REPEATED} are needed"
    base = fit_parametric(part[~repeated])
    if not base.surface:
        return f"runs of at most one pass: {'; '.join(base.refused)}"
    model = Repeats(part, base.surface)
    y = np.log(part["loss"].to_numpy(float))
    theta = model.fit(y)
    inside = [LIMITS[0] * 1.01 < value < LIMITS[1] * 0.99 for value in np.exp(theta[5:])]
    drawn = np.empty((0, len(theta)))
    if options.bootstrap:
        samples = wild(model.predict(theta), y, model.slopes(theta), min(options.bootstrap, RESAMPLES), random)
        drawn = np.stack([model.fit(sample, theta) for sample in samples])
    for symbol, value, draws, known in zip(("R_D", "R_N"), theta[5:], drawn.T[5:], inside, strict=False):
        if not known:
            far = "these runs show no cost of repeating" if value > 0 else "repeating is worth nothing"
            law.estimates.append(Estimate(symbol, of=name, refused=f"at a limit of the search: {far}"))
            continue
        law.estimates.append(Estimate(symbol, float(np.exp(value)), interval(np.exp(draws)), name))
    if len(theta) == 6:
        why = "no model is larger than the best size for its unique tokens"
        law.notes.append(f"{name}: R_N is not fitted, because {why}")
    if inside[0]:
        four = 1 + np.exp(theta[5]) * -np.expm1(-3 / np.exp(theta[5]))
        each = 1 + np.exp(drawn[:, 5]) * -np.expm1(-3 / np.exp(drawn[:, 5]))
        note = "new data that four passes over the same data are worth"
        law.estimates.append(Estimate("D' / U at 4 passes", float(four), interval(each), name, note=note))
    axes = (np.log(part[key].to_numpy(float)) for key in ("N", "D", "unique_tokens"))
    check_fit(law, name, y - model.predict(theta), model.slopes(theta), *axes)
    law.predictions.append(_held_out(name, part, base.surface, passes, y))
    for row, times, fitted in zip(part.to_dict("records"), passes, np.exp(model.predict(theta)), strict=True):
        point = {"architecture": name, "run": str(row["run"]), "passes": float(times), "loss": float(row["loss"])}
        point |= {"N": float(row["N"]), "unique_tokens": float(row["unique_tokens"]), "fitted": float(fitted)}
        law.points.setdefault("runs", []).append(point)
    return ""


class Repeats:
    """ln L of the rows as a function of (ln A, ln B, ln E, alpha, beta, ln R_D[, ln R_N])."""

    def __init__(self, part: pd.DataFrame, surface: dict[str, float]):
        self.N, self.D, self.U = (part[key].to_numpy(float) for key in ("N", "D", "unique_tokens"))
        self.U = np.minimum(self.U, self.D)
        self.base = np.array([*(np.log(surface[key]) for key in "ABE"), surface["alpha"], surface["beta"]])
        self.two = bool((self._excess(self.base) > 1e-6).sum() >= REPEATED)

    def _excess(self, theta: np.ndarray) -> np.ndarray:
        """Returns r_N = N / U_N - 1: D of the best division of compute is U at N = U_N."""
        log_A, log_B, _, alpha, beta = theta[:5]
        log_G = (np.log(alpha / beta) + log_A - log_B) / (alpha + beta)
        # On a surface with C = k N D, N_opt / G = (C/k)^a and G D_opt = (C/k)^b, so N_opt = G (G D_opt)^(a / b).
        # The search also tries extreme exponents. Best sizes from 1 to e^700 parameters keep its numbers finite.
        best = np.exp(np.clip(log_G + (beta / alpha) * (log_G + np.log(self.U)), 0.0, 700.0))
        return self.N / np.minimum(self.N, best) - 1

    def predict(self, theta: np.ndarray) -> np.ndarray:
        log_A, log_B, log_E, alpha, beta = theta[:5]
        R_D = np.exp(theta[5])
        D = self.U + self.U * R_D * -np.expm1(-(self.D / self.U - 1) / R_D)
        N = self.N
        if self.two:
            excess, R_N = self._excess(theta), np.exp(theta[6])
            unique = self.N / (1 + excess)
            N = unique + unique * R_N * -np.expm1(-excess / R_N)
        terms = np.stack([log_A - alpha * np.log(N), log_B - beta * np.log(D), np.full(len(D), log_E)])
        return np.logaddexp.reduce(terms, axis=0)

    def slopes(self, theta: np.ndarray) -> np.ndarray:
        """Returns the derivatives of `predict`, [n, P], by central differences."""
        steps = 1e-5 * np.eye(len(theta))
        return np.stack([(self.predict(theta + step) - self.predict(theta - step)) / 2e-5 for step in steps], axis=1)

    def fit(self, y: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
        """Returns theta. The surface moves with R_D and R_N: all runs count, those of one pass included."""
        low, high = np.log(LIMITS)
        size = 7 if self.two else 6
        limits = ([-np.inf] * 3 + [1e-3] * 2 + [low] * (size - 5), [np.inf] * 5 + [high] * (size - 5))
        starts = [start] if start is not None else [np.append(self.base, [np.log(r)] * (size - 5)) for r in (2, 15, 60)]
        fits = [
            least_squares(
                lambda theta: self.predict(theta) - y, guess, bounds=limits, x_scale="jac", max_nfev=200, **ROBUST
            )
            for guess in starts
        ]
        return min(fits, key=lambda fit: fit.cost).x


def _held_out(name: str, part: pd.DataFrame, surface, passes: np.ndarray, y: np.ndarray) -> Prediction:
    """Predicts the fifth of the repeated runs with most passes from the others."""
    label = f"{name}: loss of the runs of most passes"
    order = np.sort(passes[passes > 1 + 1e-6])
    limit = order[-max(1, len(order) // 5)]
    seen = passes < limit * (1 - 1e-9)
    if (passes[seen] > 1 + 1e-6).sum() < 2:
        return Prediction(label, refused="fewer than 2 repeated runs are left to fit")
    below, above = (Repeats(part[rows].reset_index(drop=True), surface) for rows in (seen, ~seen))
    below.two = above.two = below.two and above.two
    theta = below.fit(y[seen])
    return errors(label, int(seen.sum()), np.exp(above.predict(theta)), np.exp(y[~seen]))
