"""What a report asks of fitted laws: the intervals of their numbers, and the points that stand for each budget.

Whatever method is the headline, a point is "inside" where the optimum of its budget was located between the sizes that
were trained; else it is the lowest loss seen, which a better size could lower.
"""

from linnet.study.fit import ArchitectureFit, IsoflopGroup, Law

Interval = tuple[float, float]


def coefficient_interval(law: Law) -> Interval | None:
    return law.intervals.get(list(law.parameters)[0])


def exponent_interval(law: Law) -> Interval | None:
    return law.intervals.get(list(law.parameters)[1])


def gain_of_doubling(law: Law) -> float:
    """The share by which the loss falls with twice the compute, from the largest compute of the data on."""
    now, doubled = law.predict([law.c_max, 2 * law.c_max])
    return float(1 - doubled / now)


def through_optima(fit: ArchitectureFit) -> bool:
    """Whether L(C) runs through optima, rather than through the lowest losses seen (as those of `power` always do)."""
    return not fit.N_opt.refused and fit.headline != "power"


def loss_points(fit: ArchitectureFit) -> list[dict]:
    """What L(C) stands for: {"C", "loss", "N", "D", "run", "inside"}, one a budget or a point of the envelope."""
    return _group_points(fit) if fit.headline == "parametric" else fit.best.points


def optimum_points(fit: ArchitectureFit) -> list[dict]:
    """The same for N_opt and D_opt: each budget's own optimum where it was located, also where no law was drawn."""
    return _group_points(fit) if fit.headline in ("isoflop", "parametric") else fit.best.points


def _group_points(fit: ArchitectureFit) -> list[dict]:
    return [_point(group) for group in fit.isoflop.groups] if fit.isoflop is not None else []


def _point(group: IsoflopGroup) -> dict:
    if group.inside:
        found = {"loss": group.L_opt, "N": group.N_opt, "D": group.D_opt}
    else:
        found = {"loss": group.L_lowest, "N": group.N_lowest, "D": group.D[group.run.index(group.run_lowest)]}
    return {"C": group.C, **found, "run": group.run_lowest, "inside": group.inside}
