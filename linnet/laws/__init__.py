"""Scaling laws: from a table of results to laws with intervals, and to what may be said about an order.

    fit/       the laws of a table: loss, size and data against compute, the surface, held-out budgets, predictions
    further/   laws for more columns: state, share of attention, over-training, batch, repeated data, topology, ...
    orders.py  which estimates may be ranked

It reads tables and needs NumPy, SciPy and pandas, never torch.
"""

ESTIMATES: dict[str, tuple[str, ...] | None] = {
    "allocation": ("a", "b", "a difference", "b difference"),
    "joint": ("E", "alpha", "beta", "a", "a difference"),
    "efficiency": ("kappa", "drift"),
    "over-training": None,  # some names hold the compute of the table
    "gap": ("gap(-0.5)", "slope of gap(-0.5) on attention_share"),
    "state": ("c", "k difference", "state at equal P*", "FLOPs at equal P*"),
    "share": ("rho*", "state-aware rho*"),
    "topology": ("difference",),
    "batch": ("shift", "loss difference"),
    "data-constrained": ("R_D", "R_N", "D' / U at 4 passes"),
}
"""Further law -> names of its estimates; None if the table decides them. `a-b` is `fit_a_b` of `further/a_b.py`."""
