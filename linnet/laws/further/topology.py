"""Which order of two kinds of block is best (paper 004, appendix D.1, table D.1).

Models of the same N, D and seeds differ in the order of their blocks alone. A difference to the reference is paired by
seed. Three seeds are too few to resample, so intervals and p-values are Student's, over the seeds of each pair, and
p-values are adjusted by Holm's method. One variance of all topologies together would be wrong if they scatter by
different amounts: where one has four times the deviation of eleven others, it ranks equal ones in 16 to 30 % of tables.
"""

import numpy as np
import pandas as pd

from linnet.config import count_of
from linnet.laws.further.base import Estimate, LawFit, Options, holm, lacking
from linnet.laws.orders import t_interval, t_test

TOPOLOGIES = {
    "(1H:1A) x12": "(H A) x12",
    "(2H:2A) x6": "(H H A A) x6",
    "(3H:3A) x4": "(H x3 A x3) x4",
    "(4H:4A) x3": "(H x4 A x4) x3",
    "(6H:6A) x2": "(H x6 A x6) x2",
    "12H:12A": "H x12 A x12",
    "(2H:4A:4H:2A) x2": "(H x2 A x4 H x4 A x2) x2",
    "(H:5A:5H:A) x2": "(H A x5 H x5 A) x2",
    "4H:10A:8H:2A": "H x4 A x10 H x8 A x2",
    "4H:12A:8H": "H x4 A x12 H x8",
    "6H:12A:6H": "H x6 A x12 H x6",
    "8H:12A:4H": "H x8 A x12 H x4",
}
"""Name in table D.1 -> layout for `aliases: {H: hyena+swiglu, A: attention+swiglu}`, 12 blocks of each.

The last row of the table, 8H:12A:4A, is read as 8H:12A:4H: with 4A it would have 16 blocks of attention.
"""

NONE = 1e-9
"""Largest range of a difference over seeds, as a share of the loss, that is rounding."""
SAME = 0.02
"""Largest relative difference of N, and of D, between models that count as the same."""


def fit_topology(table: pd.DataFrame, options: Options) -> LawFit:
    """Returns the difference of each architecture's loss to the reference, paired by seed."""
    law = LawFit(
        "topology",
        "Topology at equal N, D and seeds",
        "difference = mean over seeds of L(topology, seed) - L(reference, seed)",
        "paper 004, table D.1; pairing and Holm's adjustment are ours",
        scheme="Student's t over the seeds of each pair; p-values by Holm's method",
    )
    law.refused += lacking(table, "seed")
    if law.refused:
        return law
    for name in ("N", "D"):
        spread = table[name].max() / table[name].min() - 1
        if spread > SAME:
            what = f"{name} differs by {spread:.0%} between the runs, so order is not all that differs"
            fix = "give a table of models of one size trained on the same tokens"
            law.refused.append(f"{what}; {fix}")
    if law.refused:
        return law
    losses = table.pivot_table(index="architecture", columns="seed", values="loss", aggfunc="mean", sort=False)
    whole = losses.dropna(axis=1)
    if losses.shape[1] > whole.shape[1]:
        law.notes.append(f"seeds that some topology lacks are left out: {losses.shape[1] - whole.shape[1]}")
    if whole.shape[0] < 2 or whole.shape[1] < 2:
        seeds = ", ".join(f"{seed:g}" for seed in whole.columns) or "none"
        law.refused.append(
            f"topologies with seeds in common: {whole.shape[0]}, their seeds: {seeds}; two of each are needed, "
            "three seeds are better"
        )
        return law
    reference = options.reference if options.reference in whole.index else whole.index[0]
    base = whole.loc[reference].to_numpy(float)
    family, silent = [], []
    for name, row in whole.iterrows():
        pairs = row.to_numpy(float) - base
        difference, perplexity = float(pairs.mean()), float(np.exp(row.mean()))
        point = {"architecture": name, "loss": float(row.mean()), "perplexity": perplexity, "difference": difference}
        point |= {"low": None, "high": None, "reference": reference}
        if name != reference:
            known = np.ptp(pairs) > NONE * float(np.abs(base).mean())
            ends, p = (t_interval(pairs.tolist()), t_test(pairs.tolist())) if known else (None, None)
            point |= {"low": ends[0], "high": ends[1]} if ends else {}
            silent += [] if known else [name]
            family.append(Estimate("difference", difference, ends, f"{name} - {reference}", p, 0.0))
        law.points.setdefault("topologies", []).append(point)
    holm(family)
    for estimate in family:
        different = estimate.p is not None and estimate.p < 0.05
        estimate.note = "cannot be told apart" if not different else "better" if estimate.number < 0 else "worse"
    law.estimates = family
    if silent:
        why = "the difference is the same with every seed, so these losses show no noise"
        law.notes.append(f"no interval of {', '.join(silent)}: {why}")
    law.notes.append(f"{count_of(whole.shape[1], 'seed')} of each pair")
    return law
