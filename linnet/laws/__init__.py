"""Scaling laws: from a table of results to laws with intervals, and to what may be said about an order.

    fit/       the laws of a table: loss, size and data against compute, the surface, held-out budgets, predictions
    further/   laws for more columns: state, share of attention, over-training, batch, repeated data, topology, ...
    orders.py  which estimates may be ranked

It reads tables and needs NumPy, SciPy and pandas, never torch.
"""
