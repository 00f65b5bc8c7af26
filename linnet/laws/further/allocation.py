"""How compute is divided between parameters and tokens, and whether two architectures divide it differently.

N_opt = k_N C^a and D_opt = k_D C^b through the optima of the parabolas (Hoffmann et al. 2022, Approach 2), of the loss
or, as in paper 004, of the perplexity. Paper 004, finding 5, compares a and b of striped and Transformer models; here
the differences a_i - a_j and b_i - b_j have intervals from joint resamples and p-values adjusted over all pairs.
"""

import numpy as np
import pandas as pd

from linnet.config import count_of
from linnet.laws.further.base import Estimate, LawFit, Options, differences, errors, interval
from linnet.laws.further.optima import Optimum, find_optima, slopes, stack, with_scatter

BUDGETS = 3


def fit_allocation(table: pd.DataFrame, options: Options) -> LawFit:
    """Fits a and b of each architecture, and their differences."""
    law = LawFit(
        "allocation",
        f"Division of compute, from parabolas of the {options.of}",
        "N_opt = k_N C^a, D_opt = k_D C^b",
        "Hoffmann et al. 2022, Approach 2; paper 004, finding 5 (differences of a and b)",
        scheme="residuals of the parabolas, scatter about the law, by architecture; differences from joint resamples",
    )
    value = np.exp if options.of == "perplexity" else None
    optima, refused = find_optima(table, options, value)
    law.notes += refused
    values: dict[str, dict[str, tuple[float, np.ndarray]]] = {"a": {}, "b": {}}
    for name, optima_of in optima.items():
        if len(optima_of) < BUDGETS:
            what = f"{name} left out: {count_of(len(optima_of), 'budget')} with an optimum"
            law.notes.append(f"{what}; {BUDGETS} are needed")
            continue
        for symbol, exponent, drawn in _exponents(optima_of, options, options.seed + 1000 * sorted(optima).index(name)):
            values[symbol][name] = exponent, drawn
            law.estimates.append(Estimate(symbol, exponent, interval(drawn), name))
        law.predictions.append(_held_out(name, optima_of))
        law.points.setdefault("optima", []).extend(
            {
                "architecture": name,
                "C": optimum.C,
                "N": np.exp(optimum.log_N),
                "D": np.exp(optimum.log_tokens(optimum.log_N)),
            }
            for optimum in optima_of
        )
    if not values["a"]:
        reason = f"no architecture has an optimum inside its sizes at {BUDGETS} budgets"
        law.refused.append(f"{reason}; train smaller or larger models where an optimum lies at the edge")
        return law
    law.estimates += differences("a", values["a"]) + differences("b", values["b"])
    return law


def _exponents(optima: list[Optimum], options: Options, seed: int):
    """Yields (symbol, exponent, draws) of N_opt and D_opt."""
    x = np.log([optimum.C for optimum in optima])
    log_N = np.array([optimum.log_N for optimum in optima])
    drawn_N = stack(optima, "log_N", options.bootstrap)
    log_D = np.array([optimum.log_tokens(optimum.log_N) for optimum in optima])
    drawn_D = np.stack([optimum.log_tokens(drawn_N[:, i]) for i, optimum in enumerate(optima)], axis=1)
    for symbol, y, drawn in (("a", log_N, drawn_N), ("b", log_D, drawn_D)):
        yield symbol, float(slopes(x, y)), slopes(x, with_scatter(x, y, drawn, seed))


def _held_out(name: str, optima: list[Optimum]):
    """Predicts N_opt of the largest budget from the others."""
    x, y = np.log([optimum.C for optimum in optima]), np.array([optimum.log_N for optimum in optima])
    slope = slopes(x[:-1], y[:-1])
    predicted = np.exp(y[:-1].mean() + slope * (x[-1] - x[:-1].mean()))
    return errors(f"{name}: N_opt of the largest budget from the others", len(x) - 1, [predicted], [np.exp(y[-1])])
