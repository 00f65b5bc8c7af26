"""How the batch size moves the optimum of a budget (paper 004, section 4.1 and figure C.1).

At a budget with runs at two batch sizes, the shift is ln N_opt(larger batch) - ln N_opt(smaller batch). The paper finds
that a batch that grows inside a budget moves the optimum to smaller models.
"""

from itertools import pairwise

import numpy as np
import pandas as pd

from linnet.laws.further.base import Estimate, LawFit, Options, holm, interval, lacking, two_sided
from linnet.laws.further.optima import Optimum, find_optima

APART = "\x1f"  # between an architecture and its batch size in a label


def fit_batch(table: pd.DataFrame, options: Options) -> LawFit:
    """Returns the shift of the optimum between neighbouring batch sizes at each architecture and budget."""
    law = LawFit(
        "batch",
        "Shift of the optimum with the batch size",
        "shift = ln N_opt(larger batch) - ln N_opt(smaller batch), at equal compute",
        "paper 004, figure C.1; the shift as a number is our definition",
        scheme="residuals of the parabolas, by architecture and batch size; shifts from joint resamples",
    )
    law.refused += lacking(table, "batch_tokens")
    if law.refused:
        return law
    known = table[table["batch_tokens"].notna()]
    split = known.assign(architecture=known["architecture"] + APART + known["batch_tokens"].map("{:.10g}".format))
    optima, refused = find_optima(split, options)
    law.notes += [line.replace(APART, ", batch of ") for line in refused]
    groups: dict[tuple[str, float], dict[float, Optimum]] = {}
    for label, optima_of in optima.items():
        name, _, batch = label.partition(APART)
        for optimum in optima_of:
            groups.setdefault((name, optimum.budget), {})[float(batch)] = optimum
    family = []
    for (name, budget), group in sorted(groups.items(), key=lambda item: item[0]):
        for tokens, optimum in sorted(group.items(), key=lambda item: item[0]):
            row = {"architecture": name, "budget": budget, "batch_tokens": tokens, "N": float(np.exp(optimum.log_N))}
            ends = interval(np.exp(optimum.draws["log_N"])) if optimum.draws else None
            low, high = ends or (None, None)
            law.points.setdefault("optima", []).append(row | {"loss": optimum.value, "low": low, "high": high})
        for small, large in pairwise(sorted(group)):
            optimum, other = group[small], group[large]
            of = f"{name} at {budget:.3g}, {small:.3g} to {large:.3g} tokens"
            drawn = other.draws["log_N"] - optimum.draws["log_N"] if optimum.draws and other.draws else np.empty(0)
            family.append(Estimate("shift", other.log_N - optimum.log_N, interval(drawn), of, two_sided(drawn), 0.0))
            drawn = other.draws["value"] - optimum.draws["value"] if len(drawn) else np.empty(0)
            law.estimates.append(Estimate("loss difference", other.value - optimum.value, interval(drawn), of))
    holm(family)
    for shift in family:
        moves = "smaller" if shift.number < 0 else "larger"
        shift.note = "" if shift.p is None else f"to {moves} models" if shift.p < 0.05 else "no shift shown"
    law.estimates = [*family, *law.estimates]
    if not family:
        what = "no budget has an optimum at two batch sizes"
        law.refused.append(f"{what}; train the sizes of a budget at two values of batch_tokens")
    return law
