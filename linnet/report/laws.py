"""Numbers that a report takes from fitted laws: the intervals of their parameters, and the point of each budget.

With every method, a point is "inside" if the optimum of its budget lies between the trained sizes. Otherwise the point
is the lowest observed loss, which another size could lower.
"""

from linnet.laws.fit import ArchitectureFit, IsoflopGroup, Law

Interval = tuple[float, float]


def coefficient_interval(law: Law) -> Interval | None:
    return law.intervals.get(list(law.parameters)[0])


def gain_of_doubling(law: Law) -> float:
    """Returns the share by which the loss falls if the largest compute of the data is doubled."""
    now, doubled = law.predict([law.c_max, 2 * law.c_max])
    return float(1 - doubled / now)


def through_optima(fit: ArchitectureFit) -> bool:
    """Whether L(C) is fitted to optima; otherwise to the lowest observed losses, as always with `power`."""
    return not fit.N_opt.refused and fit.allocation != "power"


def loss_points(fit: ArchitectureFit) -> list[dict]:
    """Returns the points of L(C), one per budget or point of the envelope: {"C", "loss", "N", "D", "run", "inside"}."""
    return _group_points(fit) if fit.headline == "parametric" else fit.best.points


def optimum_points(fit: ArchitectureFit) -> list[dict]:
    """Returns the points of N_opt and D_opt, also if no law was fitted; see `loss_points`."""
    return _group_points(fit) if fit.headline in ("isoflop", "parametric") else fit.best.points


def _group_points(fit: ArchitectureFit) -> list[dict]:
    return [_point(group) for group in fit.isoflop.groups] if fit.isoflop is not None else []


def _point(group: IsoflopGroup) -> dict:
    if group.inside:
        found = {"loss": group.L_opt, "N": group.N_opt, "D": group.D_opt}
    else:
        found = {"loss": group.L_lowest, "N": group.N_lowest, "D": group.D[group.run.index(group.run_lowest)]}
    return {"C": group.C, **found, "run": group.run_lowest, "inside": group.inside}
