"""IsoFLOP parabolas: find the best size at each budget, then fit laws to the optima (Hoffmann et al. 2022, Approach 2).

At equal compute, the loss near its optimum is a parabola in log N, and in log D. N_opt and D_opt are fitted separately,
and a + b is reported: it must be 1 only if the cost is proportional to N D.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from linnet.config import count_of
from linnet.laws.fit import law as resampling
from linnet.laws.fit.parabola import (
    WIDE,
    WINDOWS,
    Parabola,
    akima_minimum,
    fit_parabola,
    near_lowest,
    outliers,
    window_of,
)
from linnet.laws.fit.power import add_held_out, count_usable, finish, law_through, refuse_mixed
from linnet.laws.fit.results import Bootstrap, IsoflopFit, IsoflopGroup

SIZES = 4
"""Number of different sizes that a budget needs. A parabola always fits three sizes, which leaves nothing to check."""
BUDGETS = 3
"""Number of optima that N_opt(C) and D_opt(C) need. Two points always lie on a line."""
EDGE = 0.05
"""Share of the range of log N, at each end, in which an optimum counts as at the edge."""
BELOW = 3.0
"""Standard deviations of the losses by which a minimum may be lower than every observed loss."""
MANY = 10_000
"""Number of runs of all budgets from which the errors of a resample are not drawn one by one."""
OFF_CURVE = (
    "1 of 4 runs does not lie on the parabola of the other runs, and four cannot show which one; train more sizes"
)


def fit_isoflop(
    table: pd.DataFrame,
    groups: np.ndarray,
    budgets: Sequence[float] | None = None,
    *,
    bootstrap: int = 0,
    seed: int = 0,
    hold_out: float | None = None,
    cost: str = "exact",
    window: str = "auto",
) -> IsoflopFit:
    """Fits a parabola of the loss in log10 N to each budget, and the three laws to the optima inside the data.

    L(C) is fitted to the minima of the parabolas. If fewer than three budgets have a minimum inside their sizes, N_opt
    and D_opt are refused, and L(C) is fitted to the lowest observed loss of each budget. Without any such minimum, no
    law has an interval.

    Args:
        table: columns run, N, D, C, loss, and `spent` if the runs of a budget share a compute other than C (see
            `apply_convention`).
        groups: [rows] budget label of each row, -1 for rows without a budget (see `assign_budgets`).
        budgets: nominal FLOPs of each label, if known.
        bootstrap: number of resamples of the residuals of all parabolas.
        seed: seed of the resampling.
        hold_out: see `linnet.laws.fit.law.threshold`.
        cost: "exact" places an optimum at the compute of its budget, "6nd" at 6 N D of the optimum, and another
            convention at its own count, interpolated in log N between the runs.
        window: which runs of a budget a parabola is fitted to; see `linnet.laws.fit.parabola.window_of`.

    Raises:
        ValueError: unknown `window`.
    """
    if window not in WINDOWS:
        raise ValueError(f"window: {window!r} is unknown; use one of {', '.join(WINDOWS)}")
    table, groups = resampling.in_order(table, groups)
    fit = IsoflopFit("isoflop", ungrouped=int((groups < 0).sum()))
    budget_fits = _fit_budgets(table, groups, budgets, window)
    fit.groups = [budget.group for budget in budget_fits]
    if fit.ungrouped:
        fit.notes.append(f"{count_of(fit.ungrouped, 'row')} left out: not at any budget")
    inside = np.array([group.inside for group in fit.groups], dtype=bool)
    enough = inside.sum() >= BUDGETS
    fit.points = [_point(group, enough, cost) for group in fit.groups]
    if not enough:
        found_of = f"{count_of(int(inside.sum()), 'budget')} of {len(inside)}"
        reason = f"{found_of} with an optimum inside the sizes; three are needed"
        fit.refuse(reason, "N_opt", "D_opt", points=int(inside.sum()))
        fit.refuse(reason, "D_check", "N_akima", "N_cubic")
        fit.notes.append("L(C) is fitted to the lowest observed loss of each budget, because the optima are not known")
    fitted = [p for p in fit.points if p["fitted"]]
    C = np.array([p["C"] for p in fitted])
    loss = [p["loss"] for p in fitted]
    draws = {}
    if bootstrap and fitted:
        fit.bootstrap = Bootstrap("residuals of the law", bootstrap, bootstrap, seed)
        runs, repeated = _runs(budget_fits)
        reason = resampling.few_runs(runs) if repeated else ""
        if enough and not reason:
            fit.bootstrap.scheme = "residuals of the parabolas" + (", runs as clusters" if repeated else "")
            noise = _Noise.of(budget_fits, bootstrap, seed)
            fit.bootstrap.resamples = noise.resamples
            draws = _resample([budget for budget in budget_fits if budget.group.inside], noise, C, cost)
        elif reason or repeated:
            fit.bootstrap.refuse(reason or "the lowest losses of one run are not independent")
        elif inside.any():
            draws["L"] = {"residuals": bootstrap, "seed": seed}
        else:
            fit.bootstrap.refuse("no budget has an optimum inside its sizes")
    fit.L = law_through("L", C, loss, **draws.get("L", {}))
    fit.L_irreducible = law_through("L", C, loss, irreducible=True, **draws.get("L", {}))
    if fit.groups and not enough and np.mean([len(set(group.N)) == 1 for group in fit.groups]) > 0.5:
        refuse_mixed(fit)
    if enough:
        fit.N_opt = law_through("N_opt", C, [p["N"] for p in fitted], **draws.get("N", {}))
        fit.D_opt = law_through("D_opt", C, [p["D"] for p in fitted], **draws.get("D", {}))
        _add_checks(fit, budget_fits, window)
    count_usable(fit)
    finish(fit)
    add_held_out(fit, hold_out)
    return fit


def fit_groups(table: pd.DataFrame, groups: np.ndarray, budgets: Sequence[float] | None = None) -> list[IsoflopGroup]:
    """Returns the budgets with their optima, in order of C, without laws; the arguments are those of `fit_isoflop`."""
    return [budget.group for budget in _fit_budgets(table, groups, budgets, "auto")]


def _fit_budgets(table, groups: np.ndarray, budgets: Sequence[float] | None, window: str) -> "list[_Budget]":
    parts = {g: table[groups == g].sort_values("N", kind="stable") for g in sorted(set(groups) - {-1})}
    order = sorted(parts, key=lambda g: parts[g]["C"].mean())
    budget_fits = [_Budget(_group(parts[g], None if budgets is None else float(budgets[g]))) for g in order]
    _exclude(budget_fits, window)
    for budget in budget_fits:
        budget.fit(window)
    for budget in budget_fits:
        noise = _noise_of(budget, budget_fits)
        budget.judge(noise)
        if window == "auto" and budget.may_be_too_wide():
            budget.fit("near")
            budget.judge(noise)
    return budget_fits


def _group(part: pd.DataFrame, budget: float | None) -> IsoflopGroup:
    # The runs of a budget have equal spent compute, even if C is counted in another way.
    spent = part["spent" if "spent" in part else "C"].astype(float)
    C = float(np.exp(np.log(spent).mean()))
    columns = {name: part[name].astype(float).tolist() for name in ("N", "D", "loss")}
    columns |= {"run": part["run"].astype(str).tolist(), "flops": spent.tolist()}
    columns |= {"counted": part["C"].astype(float).tolist()}
    return IsoflopGroup(C, **columns, budget=budget)


class _Budget:
    """One budget while it is fitted: the result, and the parabolas behind it."""

    def __init__(self, group: IsoflopGroup):
        self.group = group
        self.log_N, self.log_D = np.log10(group.N), np.log10(group.D)
        self.loss = np.array(group.loss)
        self.kept = np.ones(len(self.loss), dtype=bool)
        self.unclear = False
        self.rows = np.arange(len(self.loss))
        self.N: Parabola | None = None
        self.D: Parabola | None = None
        self._residuals: tuple[np.ndarray, np.ndarray, int] | None = None

    @property
    def margin(self) -> tuple[float, float]:
        """Smallest and largest log10 N of an optimum that counts."""
        x = self.log_N[self.rows]
        edge = EDGE * float(np.ptp(x))
        return float(x.min()) + edge, float(x.max()) - edge

    def fit(self, window: str) -> None:
        """Fits the parabolas in log N and log D to the runs of the window."""
        group = self.group
        loss = np.where(self.kept, self.loss, np.inf)
        rule = "auto" if window == "near" else window
        inside = window_of(self.log_N, loss, rule) if window != "near" else near_lowest(self.log_N, loss)
        group.used, self.rows = inside.tolist(), np.flatnonzero(inside)
        group.window = "all" if inside.sum() == self.kept.sum() else "near the lowest run"
        lowest = int(loss.argmin())
        group.N_lowest, group.L_lowest, group.run_lowest = group.N[lowest], group.loss[lowest], group.run[lowest]
        self.N = fit_parabola(self.log_N[self.rows], self.loss[self.rows])
        self.D = fit_parabola(self.log_D[self.rows], self.loss[self.rows])
        self._residuals = None

    def judge(self, noise: float | None) -> None:
        """Fills in the optimum of the group, which is refused if the data do not support it."""
        group = self.group
        group.refused, group.notes, group.inside = [], [], False
        group.parabola = group.parabola_D = group.N_opt = group.D_opt = group.D_check = group.L_opt = None
        x = self.log_N[self.rows]
        sizes = len(np.unique(x))
        if sizes < len(x):
            group.notes.append(f"{count_of(sizes, 'size')} in {count_of(len(x), 'run')}: some sizes are repeated")
        if sizes < SIZES:
            group.refused.append(f"{count_of(sizes, 'size')}; a parabola that can be checked needs {SIZES}")
        if self.N is None:
            return
        group.parabola = self.N.plain
        group.residual_sd = None if noise is None else noise * float(np.abs(self.N.fitted).mean())
        best, low = map(float, self.N.vertex())
        if not self.N.coefficients[2] > 1e-12 * max(1.0, abs(float(self.N.coefficients[0]))):
            group.refused = group.refused or ["the losses do not curve upwards, so no minimum lies between the sizes"]
            return
        if np.isfinite(best):
            group.N_opt, group.L_opt = float(10**best), low
            group.D_check = float(np.exp(_log_tokens(group, np.log(group.N_opt))))
            group.D_opt = self._tokens()
            akima = akima_minimum(x, np.log(self.loss[self.rows]))
            group.N_akima = None if akima is None else float(10**akima)
        if not group.refused:
            self._refuse(best, low)
        group.inside = not group.refused

    def _tokens(self) -> float:
        group = self.group
        if self.D is not None:
            group.parabola_D = self.D.plain
            best = float(self.D.vertex()[0])
            x = self.log_D[self.rows]
            if x.min() < best < x.max():
                return float(10**best)
        group.notes.append("the parabola in log D has no minimum inside the tokens; D_opt follows from N_opt")
        return group.D_check

    def _refuse(self, best: float, low: float) -> None:
        group, x = self.group, self.log_N[self.rows]
        if self.unclear:
            group.refused.append(OFF_CURVE)
            return
        centre, (least, most) = x.mean(), self.margin
        kept = self.log_N[self.kept]
        if not least <= best <= most:
            side, end, more = ("smallest", x.min(), "smaller") if not best > centre else ("largest", x.max(), "larger")
            where = "at the edge of" if x.min() <= best <= x.max() else "outside"
            size = f" (N = {group.N_opt:.3g})" if group.N_opt else ""
            if kept.min() < end < kept.max():
                group.refused.append(
                    f"the optimum{size} lies {where} the sizes near the lowest run ({side}: {10**end:.3g}), so the "
                    "losses there are not a parabola; repeat these runs or train sizes between them"
                )
            else:
                group.refused.append(
                    f"the optimum{size} lies {where} the sizes trained ({side}: {10**end:.3g}); "
                    f"train {more} models here"
                )
            return
        # Between two sizes a parabola may be lower than both, by at most this if it passes through them.
        right = int(np.searchsorted(np.unique(x), best).clip(1, len(np.unique(x)) - 1))
        gap = float(np.diff(np.unique(x))[right - 1])
        between = float(self.N.coefficients[2]) * (gap / 2) ** 2
        slack = BELOW * (group.residual_sd or 0.0) + 1e-9 * abs(low)
        if low < group.L_lowest - between - slack:
            group.refused.append(
                f"the minimum of the parabola ({low:.4g}) lies {group.L_lowest - low:.2g} below every observed loss, "
                "which the noise does not explain; look for a diverged run, or train sizes near the lowest one"
            )
        elif group.N_lowest in (min(group.N), max(group.N)):
            end = "smallest" if group.N_lowest == min(group.N) else "largest"
            group.notes.append(f"the lowest observed loss is at the {end} size")

    def residuals(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the residuals as shares of the loss, their leverage, and the number of fitted parameters.

        Over more than `WIDE` decades a parabola is off by more than the noise, so there the noise is what a polynomial
        of degree 4 leaves.
        """
        if self._residuals is None:  # the noise of every budget asks for those of all others
            left, basis, degree = self.residuals_and_basis()
            self._residuals = left, (basis**2).sum(axis=1), degree + 1
        return self._residuals

    def residuals_and_basis(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the residuals, orthonormal columns of the polynomial that leaves them, and its degree."""
        x, y = self.log_N[self.rows], self.loss[self.rows]
        degree = 4 if np.ptp(x) > WIDE and len(np.unique(x)) >= 7 else 2
        basis = np.linalg.qr(np.vander((x - x.mean()) / np.ptp(x), degree + 1))[0]
        return (y - basis @ (basis.T @ y)) / np.abs(self.N.fitted), basis, degree

    def may_be_too_wide(self) -> bool:
        """Whether the optimum is refused although the lowest run lies in the interior, and a window leaves runs out."""
        group = self.group
        kept = self.log_N[self.kept]
        if group.inside or self.unclear or self.N is None or not kept.min() < np.log10(group.N_lowest) < kept.max():
            return False
        near = near_lowest(self.log_N, np.where(self.kept, self.loss, np.inf))
        return len(np.unique(self.log_N[near])) >= SIZES and int(near.sum()) < len(self.rows)


def _exclude(budgets: list[_Budget], window: str) -> None:
    """Marks the runs that the other runs of their budget contradict."""
    excluded, unclear = outliers([(budget.log_N, budget.loss) for budget in budgets], window)
    for budget, rows, hidden in zip(budgets, excluded, unclear, strict=True):
        budget.kept[list(rows)], budget.unclear = False, hidden
        group = budget.group
        group.excluded = [
            {"run": group.run[row], "N": group.N[row], "loss": group.loss[row], "distance": far}
            for row, far in rows.items()
        ]


def _noise(budgets: list[_Budget]) -> tuple[float | None, np.ndarray, int]:
    """Returns the noise of the losses as shares of the loss, from the parabolas of all budgets together.

    The standard deviation (None if no budget has more than three runs), the residuals for `draw_errors`, and the
    degrees of freedom.
    """
    parts = [budget.residuals() for budget in budgets if budget.N is not None and not budget.unclear]
    freedom = sum(len(residuals) - parameters for residuals, _, parameters in parts)
    if not freedom:
        return None, np.zeros(0), 0
    residuals = np.concatenate([part[0] for part in parts])
    leverage = np.concatenate([part[1] for part in parts])
    deviation = float(np.sqrt(residuals @ residuals / freedom))
    kept = leverage < 1 - 1e-9  # a run that determines its own fitted loss has no residual
    return deviation, resampling.standardised(residuals[kept], leverage[kept], freedom), freedom


def _noise_of(budget: _Budget, budgets: list[_Budget]) -> float | None:
    """Returns the noise of one budget from the other budgets, which its own diverged runs do not raise."""
    deviation, _, freedom = _noise([other for other in budgets if other is not budget])
    return deviation if freedom > SIZES else _noise(budgets)[0]


def _log_tokens(group: IsoflopGroup, log_N: np.ndarray) -> np.ndarray:
    """Returns log D of a model with log N parameters at the budget of the group.

    The cost per parameter and token, C / (N D), is 6 if the cost is 6ND. With attention, head and embeddings it changes
    with N. So it is interpolated between the runs of the group, and constant beyond the smallest and largest size.
    """
    x, rows = np.unique(np.log(group.N), return_inverse=True)
    each = np.log(np.array(group.flops)) - np.log(group.N) - np.log(group.D)
    cost = np.bincount(rows, each) / np.bincount(rows)
    return np.log(group.C) - log_N - np.interp(log_N, x, cost)


def _compute(group: IsoflopGroup, N, D, cost: str):
    """Returns the compute of models of N parameters and D tokens at the budget of the group, as `cost` counts it."""
    if cost == "exact":
        return group.C
    if cost == "6nd":
        return 6 * N * D
    x, rows = np.unique(np.log(group.N), return_inverse=True)
    ratio = np.bincount(rows, np.log(np.array(group.counted) / np.array(group.flops))) / np.bincount(rows)
    return group.C * np.exp(np.interp(np.log(N), x, ratio))


def _point(group: IsoflopGroup, enough: bool, cost: str) -> dict:
    if group.inside and enough:
        C = float(_compute(group, group.N_opt, group.D_opt, cost))
        point = {"C": C, "loss": group.L_opt, "N": group.N_opt, "D": group.D_opt}
    else:
        row = group.run.index(group.run_lowest)
        C = float(_compute(group, group.N[row], group.D[row], cost))
        point = {"C": C, "loss": group.L_lowest, "N": group.N_lowest, "D": group.D[row]}
    return {**point, "run": group.run_lowest, "inside": group.inside, "fitted": group.inside or not enough}


def _runs(budgets: list[_Budget]) -> tuple[list[tuple[str, float]], bool]:
    """Returns the run, a name and a size, of each fitted row of all budgets, and whether a run has several rows."""
    runs = [(budget.group.run[row], budget.group.N[row]) for budget in budgets for row in budget.rows]
    return runs, resampling.is_clustered(runs)


@dataclass
class _Noise:
    """The errors of resamples: one error per run, which all its rows share, and one per row.

    Both variances come from the residuals of the parabolas by moments (a run effect adds to the square of the summed
    residuals of its run). Without repeated runs there is no effect, and the errors of rows are resampled residuals.

    Attributes:
        resamples, seed: number of resamples and seed.
        residuals: [n] residuals of rows for `draw_errors`; empty if runs are repeated.
        freedom: degrees of freedom of the errors: of the effects if runs are repeated, else of all residuals.
        row: standard deviation of the errors of rows, and its degrees of freedom.
        effects: [resamples] of each run, by its name and size.
        scale: [resamples] factors of the errors of each resample.
    """

    resamples: int
    seed: int
    residuals: np.ndarray
    freedom: float
    row: tuple[float, float] = (0.0, 1.0)
    effects: dict[tuple[str, float], np.ndarray] = field(default_factory=dict)

    @property
    def scale(self) -> np.ndarray:
        return resampling.scales(self.freedom, self.resamples, self.seed)

    @classmethod
    def of(cls, found: list[_Budget], resamples: int, seed: int) -> "_Noise":
        _, residuals, freedom = _noise(found)
        runs, repeated = _runs(found)
        if not repeated:
            return cls(resampling.enough(resamples, freedom), seed, residuals, freedom)
        place = {run: i for i, run in enumerate(dict.fromkeys(runs))}
        shared, sums, squares = np.zeros((len(place), len(place))), np.zeros(len(place)), 0.0
        for budget in found:
            if budget.N is None or budget.unclear:
                continue
            left, basis, _ = budget.residuals_and_basis()
            rows = [place[budget.group.run[row], budget.group.N[row]] for row in budget.rows]
            np.add.at(shared, np.ix_(rows, rows), np.eye(len(rows)) - basis @ basis.T)
            np.add.at(sums, rows, left)
            squares += float(left @ left)
        trace, norm = float(np.trace(shared)), float((shared**2).sum())
        many = trace**2 / norm  # degrees of freedom of the effects, as Satterthwaite counts them
        run, row = np.linalg.lstsq(np.array([[trace, freedom], [norm, trace]]), [squares, sums @ sums], rcond=None)[0]
        run = np.clip(run, 0.0, squares / trace)
        row = max(0.0, (squares - run * trace) / freedom)
        resamples, generator = resampling.enough(resamples, many), np.random.default_rng([seed, 1])
        scale = np.sqrt(run) * resampling.scales(many, resamples, seed)
        effects = {name: scale * generator.normal(size=resamples) for name in place}
        return cls(resamples, seed, np.zeros(0), many, (float(np.sqrt(row)), max(1.0, freedom - many)), effects)


def _resample(budgets: list[_Budget], noise: _Noise, C: np.ndarray, cost: str) -> dict[str, dict]:
    """Returns the optima of resampled losses as arguments of `law_through`, for "L", "N" and "D".

    A resample keeps every run and gives it another error. In a resample, an optimum counts under the same condition as
    in the data: inside the sizes, and with at least three such budgets.
    """
    shape = (noise.resamples, len(budgets))
    draws = {name: np.full(shape, np.nan) for name in ("L", "N", "D")}
    for g, (budget, (moved_N, moved_D)) in enumerate(zip(budgets, _moved(budgets, noise), strict=True)):
        group = budget.group
        best, low = budget.N.vertex(budget.N.coefficients + moved_N)
        if group.D_opt != group.D_check:
            tokens = 10 ** budget.D.vertex(budget.D.coefficients + moved_D)[0]
        else:
            tokens = np.exp(_log_tokens(group, best * np.log(10)))
        minimum = np.isfinite(best)
        if minimum.mean() < 0.975:
            group.notes.append(f"no minimum in {1 - minimum.mean():.0%} of the resamples: the curvature is uncertain")
        if minimum.mean() >= resampling.ENOUGH:
            group.N_interval = tuple(float(10**end) for end in resampling.interval(best))
            group.D_interval = resampling.interval(tokens)
        with np.errstate(invalid="ignore"):
            counts_here = minimum & (budget.margin[0] <= best) & (best <= budget.margin[1]) & (low > 0)
        for name, values in (("L", low), ("N", 10**best), ("D", tokens)):
            draws[name][:, g] = np.where(counts_here, values, np.nan)
    few = np.isfinite(draws["N"]).sum(axis=1) < BUDGETS
    for values in draws.values():
        values[few] = np.nan
    draws_C = np.broadcast_to(C, shape)
    if cost != "exact":
        pairs = zip(budgets, draws["N"].T, draws["D"].T, strict=True)
        draws_C = np.stack([_compute(budget.group, N, D, cost) for budget, N, D in pairs], axis=1)
    known = {"draws_C": draws_C, "freedom": noise.freedom, "seed": noise.seed}
    return {name: {**known, "draws": values} for name, values in draws.items()}


def _moved(budgets: list[_Budget], noise: _Noise) -> list[np.ndarray]:
    """Returns by how much resampled errors move the coefficients of both parabolas of each budget, [2, R, 3] each."""
    # Both parabolas have the same losses, so the same errors.
    solvers = [
        np.concatenate([p.solver * budget.N.fitted for p in (budget.N, budget.D or budget.N)]) for budget in budgets
    ]
    counts = [len(budget.rows) for budget in budgets]
    residuals, freedom, resamples, seed = noise.residuals, noise.freedom, noise.resamples, noise.seed
    if noise.effects:
        generator, (deviation, left) = np.random.default_rng([seed, 2]), noise.row
        scale = deviation * resampling.scales(left, resamples, seed + 1)[:, None]
        moved = []
        for budget, solver in zip(budgets, solvers, strict=True):
            errors = scale * generator.normal(size=(resamples, len(budget.rows)))
            effects = [noise.effects[budget.group.run[row], budget.group.N[row]] for row in budget.rows]
            errors += np.stack(effects, axis=1)
            moved.append(errors @ solver.T)
    elif sum(counts) <= MANY:
        errors = resampling.draw_errors(residuals, freedom, resamples, (sum(counts),), seed)
        parts = np.split(errors, np.cumsum(counts)[:-1], axis=1)
        moved = [part @ solver.T for part, solver in zip(parts, solvers, strict=True)]
    else:
        # Sums of so many errors are normal, whatever the errors are; drawing each would need gigabytes.
        normal = np.random.default_rng([seed, 1]).normal(size=(resamples, 6 * len(budgets)))
        scale = residuals.std() * noise.scale[:, None]
        roots = [np.linalg.svd(solver, full_matrices=False) for solver in solvers]
        parts = np.split(normal * scale, len(budgets), axis=1)
        moved = [part[:, : len(v)] @ (u * v).T for part, (u, v, _) in zip(parts, roots, strict=True)]
    return [part.reshape(resamples, 2, 3).swapaxes(0, 1) for part in moved]


def _add_checks(fit: IsoflopFit, budgets: list[_Budget], window: str) -> None:
    """Adds the laws by the other ways to find an optimum, and how the exponents move with windows and budgets."""
    inside = [budget.group for budget in budgets if budget.group.inside]
    C = [group.C for group in inside]
    fit.D_check = law_through("D_opt", C, [group.D_check for group in inside])
    _add_cubic(fit, [budget for budget in budgets if budget.group.inside])
    fit.L.shift = fit.L_irreducible.shift = _quartic_shift([budget for budget in budgets if budget.group.inside])
    known = [group for group in inside if group.N_akima is not None]
    if len(known) < BUDGETS:
        reason = f"{count_of(len(known), 'budget')} with five sizes and a minimum between them; three are needed"
        fit.refuse(reason, "N_akima", points=len(known))
    else:
        fit.N_akima = law_through("N_opt", [group.C for group in known], [group.N_akima for group in known])
    names = ("a", "b")
    for law, other, name, how in (
        (fit.N_opt, fit.N_akima, "a", "by Akima interpolation"),
        (fit.D_opt, fit.D_check, "b", "from N_opt and the cost of the runs"),
    ):
        if law.exponent_interval and not other.refused and _outside(other.exponent, law.exponent_interval):
            fit.notes.append(f"{name} is {other.exponent:.3f} {how}, outside its interval")
    fit.sensitivity = [_row(rule, None, _optima_in(budgets, rule)) for rule in WINDOWS[1:]]
    optima = [(group.C, group.N_opt, group.D_opt) for group in inside]
    fit.sensitivity.insert(0, _row(window, None, optima))
    for group, optimum in zip(inside, optima, strict=True) if len(optima) > BUDGETS else ():
        row = _row(window, group.at, [other for other in optima if other != optimum])
        fit.sensitivity.append(row)
        for name, law in zip(names, (fit.N_opt, fit.D_opt), strict=True):
            if law.exponent_interval and _outside(row[name], law.exponent_interval):
                fit.notes.append(f"{name} is {row[name]:.3f} without {group.at:.3g} FLOPs, outside its interval")


def _add_cubic(fit: IsoflopFit, budgets: list[_Budget]) -> None:
    """Adds N_opt(C) by cubics, and widens N_opt and D_opt beyond the data by its distance from the parabolas.

    Where losses rise faster on one side, every parabola misses the optimum by about the same factor.
    """
    optima = 10 ** _minima(budgets, 3)[:, 0]
    if not np.isfinite(optima).all():
        fit.N_cubic.refused.append("the cubic through the losses of some budget has no minimum")
        return
    fit.N_cubic = law_through("N_opt", [budget.group.C for budget in budgets], optima)
    other = replace(fit.N_cubic)
    if fit.N_cubic.refused or fit.N_opt.refused:
        return
    fit.N_opt.rival = other
    # At one compute, more parameters are fewer tokens.
    fit.D_opt.rival = replace(
        fit.D_opt,
        coefficient=fit.D_opt.coefficient * fit.N_opt.coefficient / other.coefficient,
        exponent=fit.D_opt.exponent + fit.N_opt.exponent - other.exponent,
        draws=None,
    )
    far = 10 * fit.N_opt.c_max
    for law in (fit.N_opt, fit.D_opt):
        ratio = float(law.rival.predict(far) / law.predict(far))
        what = f"at {far:.2g} FLOPs, cubics give {ratio:.2f} times what parabolas give"
        law.notes.append(f"{what}, and the interval has both")


def _quartic_shift(budgets: list[_Budget]) -> float:
    """Returns the factor by which quartics move the minima of the parabolas.

    Where losses rise more slowly far from the optimum, every parabola misses the minimum by about the same factor.
    """
    budgets = [budget for budget in budgets if len(np.unique(budget.log_N[budget.rows])) > SIZES]
    if not budgets:
        return 1.0
    move = np.mean(_minima(budgets, 4)[:, 1] / [budget.group.L_opt for budget in budgets])
    return float(np.clip(move, 0.5, 2.0)) if np.isfinite(move) else 1.0


def _minima(budgets: list[_Budget], degree: int) -> np.ndarray:
    """Returns log10 N and the loss [budgets, 2] at the minima of polynomials of `degree`; NaN where there is none.

    All budgets share the coefficients of the powers above the second, as shares of the loss, so that they follow the
    noise of no single run.
    """
    parts, left = [], []
    for budget in budgets:
        x, level = budget.log_N[budget.rows] - budget.N.centre, float(np.abs(budget.N.fitted).mean())
        powers = np.vander(x, degree + 1, increasing=True)
        basis = np.linalg.qr(powers[:, :3])[0]
        left.append(powers[:, 3:] - basis @ (basis.T @ powers[:, 3:]))
        parts.append((budget, level, powers[:, 3:], budget.loss[budget.rows] / level))
    shares = np.linalg.lstsq(np.concatenate(left), np.concatenate([part[3] for part in parts]), rcond=1e-9)[0]
    minima = []
    for budget, level, powers, _ in parts:
        higher = level * shares
        curve = np.polynomial.Polynomial([*(budget.N.coefficients - budget.N.solver @ (powers @ higher)), *higher])
        slope, bend = curve.deriv(), curve.deriv(2)
        step = float(budget.N.vertex()[0]) - budget.N.centre
        with np.errstate(all="ignore"):
            for _ in range(20):
                step -= slope(step) / bend(step)
        minimum = abs(step) < 10 and bend(step) > 0
        minima.append((budget.N.centre + step, curve(step)) if minimum else (np.nan, np.nan))
    return np.array(minima)


def _outside(value: float | None, interval: tuple[float, float]) -> bool:
    return value is not None and not interval[0] <= value <= interval[1]


def _optima_in(budgets: list[_Budget], rule: str) -> list[tuple[float, float, float]]:
    """Returns (C, N_opt, D_opt) of each budget with an optimum inside the sizes of another window."""
    optima = []
    for budget in budgets:
        group = budget.group
        other = _Budget(IsoflopGroup(group.C, group.run, group.N, group.D, group.flops, group.loss, group.budget))
        other.kept, other.unclear = budget.kept, budget.unclear
        other.fit(rule)
        other.judge(_noise_of(budget, budgets))
        if other.group.inside:
            optima.append((other.group.C, other.group.N_opt, other.group.D_opt))
    return optima


def _row(window: str, without: float | None, optima: list[tuple[float, float, float]]) -> dict:
    row = {"window": window, "without": without, "a": None, "b": None, "budgets": len(optima)}
    if len(optima) >= BUDGETS:
        C, N, D = zip(*optima, strict=True)
        row["a"], row["b"] = law_through("N_opt", C, N).exponent, law_through("D_opt", C, D).exponent
    return row
