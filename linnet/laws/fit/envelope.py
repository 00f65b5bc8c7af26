"""The lower envelope of training curves: the lowest loss at each compute (Hoffmann et al. 2022, Approach 1).

Paper 000, section 4, takes the minimal loss at each number of FLOPs from the curves of all sizes. N_opt and D_opt are
those of the run with this loss. Where only one size has a curve, the envelope does not show an optimum. So a point
counts for N_opt only if both a smaller and a larger model have curves at this compute, with higher losses.
"""

import numpy as np
import pandas as pd

from linnet.config import count_of
from linnet.laws.fit import law as resampling
from linnet.laws.fit.law import Law, in_order
from linnet.laws.fit.parabola import fit_parabola, near_lowest
from linnet.laws.fit.power import add_held_out, add_reflected, count_usable, finish, law_through, log_log, refuse_mixed
from linnet.laws.fit.results import Bootstrap, EnvelopeFit, PowerFit

WARMUP = 0.002
"""Share of a curve's tokens that is dropped at its beginning. It is small: curves in warm-up are rarely the lowest."""

SIZES = 5
"""Number of sizes with a curve at one compute from which their distance from a parabola shows the noise."""


def fit_envelope(
    curves: pd.DataFrame,
    *,
    mode: str = "minimum",
    points: int = 60,
    keep_ends: bool = False,
    warmup: float = WARMUP,
    smooth: int = 1,
    bootstrap: int = 0,
    seed: int = 0,
    hold_out: float | None = None,
) -> EnvelopeFit:
    """Fits L(C), N_opt(C), D_opt(C) to the envelope of training curves.

    Args:
        curves: columns run, N, D (tokens so far), C (FLOPs so far), loss, one row per record; optionally learning_rate.
        mode: "minimum" interpolates all curves in log-log at `points` values of C, evenly spaced in log C, and takes
            the lowest (N_opt by a parabola through the lowest size and its two neighbours). "hull" takes the vertices
            of the lower convex hull of all records in log-log.
        points: number of values of C in mode "minimum".
        keep_ends: also counts the points at which no smaller or no larger model has a curve, for all laws.
        warmup: share of a curve's tokens that is dropped at its beginning. With a learning_rate, the records before it
            first reaches its maximum are dropped too.
        smooth: odd number of records in a centred moving average of log loss against log C; 1 for no smoothing.
        bootstrap: number of resamples, each with other effects of whole runs: the records of a run are not independent.
        seed: seed of the resampling.
        hold_out: see `linnet.laws.fit.law.threshold`.

    Raises:
        ValueError: unknown mode, or `smooth` or `points` out of range.
    """
    if mode not in ("minimum", "hull"):
        raise ValueError(f"mode: {mode!r} is unknown; use 'minimum' or 'hull'")
    if smooth < 1 or smooth % 2 == 0 or points < 4:
        raise ValueError(f"smooth: {smooth} must be odd and positive, and points: {points} must be at least 4")
    curves, _ = in_order(curves, np.zeros(len(curves), dtype=int))
    fit = EnvelopeFit("envelope", mode=mode)
    kept = _Curves.read(curves, warmup, smooth)
    fit.curves, fit.warmup_removed = len(kept.run), kept.removed
    fit.decays = _decays(curves)
    if len(kept.run) < 2:
        number = count_of(len(kept.run), "training curve")
        fit.refuse(f"{number} with two records or more; an envelope needs two curves")
        return fit
    hull_rows = _own_hulls(kept)
    hull = _hull(kept, hull_rows)
    fit.hull_size = len(hull)
    grid = _grid(kept, points)
    surface = kept.at(grid)
    everything = np.ones(len(kept.run), dtype=bool)
    envelope = _lowest(kept, surface, everything) if mode == "minimum" else _vertices(kept, hull)
    inside = np.ones(len(envelope["C"]), dtype=bool) if keep_ends else envelope["inside"]
    sizes = len(np.unique(envelope["best_N"][inside]))
    enough = sizes >= 3
    fit.points = [
        {**{name: float(envelope[name][i]) for name in ("C", "loss", "N", "D")},
         "run": str(kept.run[envelope["row"][i]]), "inside": bool(envelope["inside"][i]),
         "fitted": bool(inside[i] or not enough)}
        for i in range(len(inside))
    ]  # fmt: skip
    fit.runs_on_envelope = len(set(envelope["row"]))
    if not enough:
        reason = f"{count_of(sizes, 'size')} on the envelope with curves of smaller and larger models; three are needed"
        fit.refuse(reason, "N_opt", "D_opt", points=int(inside.sum()))
        fit.notes.append("L(C) is fitted to the whole envelope, including the ends, which other sizes could lower")
    elif keep_ends:
        ends = count_of(int((~envelope["inside"]).sum()), "point")
        fit.notes.append(f"{ends} at the ends of the envelope kept, which other sizes could lower")
    else:
        fit.notes.append(f"{count_of(int((~inside).sum()), 'point')} at the ends of the envelope left out")
    made = None
    if bootstrap:
        fit.bootstrap = Bootstrap("residuals of the runs", bootstrap, bootstrap, seed)
        noise = _noise(kept, surface)
        if noise is None:
            fit.bootstrap.refuse(f"no compute has curves of {SIZES} sizes, so the noise is not known")
        else:
            made = _resample(kept, surface, hull_rows, mode, (enough, keep_ends), noise, bootstrap, seed)
    chosen = inside if enough else np.ones(len(inside), dtype=bool)
    C = envelope["C"][chosen]

    def law(quantity: str, name: str, irreducible: bool = False) -> Law:
        fitted = law_through(quantity, C, envelope[name][chosen], irreducible=irreducible)
        if made is not None:
            centre, draws = made
            add_reflected(fitted, (centre["C"], centre[name]), (draws["C"], draws[name]))
        return fitted

    fit.L, fit.L_irreducible = law("L", "loss"), law("L", "loss", irreducible=True)
    if enough:
        fit.N_opt, fit.D_opt = law("N_opt", "N"), law("D_opt", "D")
    count_usable(fit)
    finish(fit)
    add_held_out(fit, hold_out)
    return fit


class _Curves:
    """Training curves after cleaning: one entry per run, in order of compute."""

    def __init__(self, removed: int):
        self.run, self.size, self.log_C, self.log_D, self.log_loss = [], [], [], [], []
        self.removed = removed

    @classmethod
    def read(cls, table: pd.DataFrame, warmup: float, smooth: int) -> "_Curves":
        kept = cls(0)
        for (run, _), rows in table.groupby(["run", "N"], sort=False):
            rows = rows.sort_values("C", kind="stable").drop_duplicates("C", keep="last")
            late = rows["D"].to_numpy(float) > warmup * rows["D"].max()
            if "learning_rate" in rows and np.isfinite(rate := rows["learning_rate"].to_numpy(float)).any():
                late &= np.arange(len(rows)) >= int(np.argmax(rate >= np.nanmax(rate) * (1 - 1e-6)))
            kept.removed += int((~late).sum())
            rows = rows[late]
            if len(rows) < 2:
                continue
            kept.run.append(run)
            kept.size.append(float(rows["N"].iloc[0]))
            logs = (np.log(rows[name].to_numpy(float)) for name in ("C", "D", "loss"))
            for curve, values in zip((kept.log_C, kept.log_D, kept.log_loss), logs, strict=True):
                curve.append(values)
            kept.log_loss[-1] = _average(kept.log_C[-1], kept.log_loss[-1], smooth)
        kept.size = np.array(kept.size)
        return kept

    def at(self, log_C: np.ndarray) -> dict[str, np.ndarray]:
        """Returns log loss and log D of every run at `log_C`, [runs, points]; NaN beyond the ends of a curve."""
        surface = {}
        for name, values in (("loss", self.log_loss), ("D", self.log_D)):
            rows = [np.interp(log_C, c, v, left=np.nan, right=np.nan) for c, v in zip(self.log_C, values, strict=True)]
            surface[name] = np.stack(rows)
        surface["log_C"] = log_C
        return surface


def _average(x: np.ndarray, y: np.ndarray, window: int) -> np.ndarray:
    """Returns a local linear fit: at each point, the line through the window around it (shorter at the ends)."""
    half = min(window // 2, (len(x) - 1) // 2)
    if not half:
        return y
    rows = np.arange(len(x))[:, None] + np.arange(-half, half + 1)
    inside = ((rows >= 0) & (rows < len(x))).astype(float)
    rows = rows.clip(0, len(x) - 1)
    line = log_log(x[rows] - x[:, None], y[rows], inside)
    return line[:, 0]


def _grid(kept: _Curves, points: int) -> np.ndarray:
    """Returns values of log C at which at least two runs have a curve, or of the whole range if there are none."""
    starts, ends = np.sort([c[0] for c in kept.log_C]), np.sort([c[-1] for c in kept.log_C])
    low, high = starts[1], ends[-2]
    return np.linspace(low, high, points) if low < high else np.linspace(starts[0], ends[-1], points)


def _lowest(kept: _Curves, surface: dict, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the lowest curve of the chosen runs at each compute, with N and D interpolated between the sizes."""
    sizes = np.unique(kept.size[chosen])
    # The best run of each size: [sizes, points]. Losses are infinite where the size has no curve.
    best_row = np.empty((len(sizes), surface["loss"].shape[1]), dtype=int)
    filled = np.where(np.isfinite(surface["loss"]), surface["loss"], np.inf)
    for s, size in enumerate(sizes):
        rows = np.flatnonzero(chosen & (kept.size == size))
        best_row[s] = rows[filled[rows].argmin(axis=0)]
    loss = np.take_along_axis(filled, best_row, axis=0)
    seen = np.isfinite(loss).any(axis=0)
    loss, best_row, log_C = loss[:, seen], best_row[:, seen], surface["log_C"][seen]
    tokens = np.take_along_axis(surface["D"][:, seen], best_row, axis=0)
    best, columns, there = loss.argmin(axis=0), np.arange(len(log_C)), np.isfinite(loss)
    index = np.arange(len(sizes))[:, None]
    left = np.where(there & (index < best), index, -1).max(axis=0)
    right = np.where(there & (index > best), index, len(sizes)).min(axis=0)
    inside = (left >= 0) & (right < len(sizes))
    log_N = np.log(sizes)
    N, D = log_N[best], tokens[best, columns]
    three = np.stack([left, best, right])[:, inside]
    where = columns[inside]
    N[inside] = _vertex(log_N[three], loss[three, where])
    D[inside] = _between(N[inside], log_N[three], tokens[three, where])
    envelope = {"C": np.exp(log_C), "loss": np.exp(loss[best, columns]), "N": np.exp(N), "D": np.exp(D)}
    return {**envelope, "row": best_row[best, columns], "best_N": sizes[best], "inside": inside}


def _vertex(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the minimum of the parabola through three points [3, n], the middle one lowest.

    If all three values are equal, returns the middle point.
    """
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    bend = np.where(right - left > 1e-15, right - left, np.inf)
    centre = np.where(np.isfinite(bend), (x[0] + x[1]) / 2, x[1])
    return centre - left * (x[2] - x[0]) / 2 / bend


def _between(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Interpolates linearly between three points [3, n] at `at` [n]."""
    lower = (y[1] - y[0]) / (x[1] - x[0])
    upper = (y[2] - y[1]) / (x[2] - x[1])
    return y[1] + np.where(at < x[1], lower, upper) * (at - x[1])


def _own_hulls(kept: _Curves) -> np.ndarray:
    """Returns the vertices of the lower convex hull of each run in log-log, rows (run index, record index).

    No other record can lie on the hull of all runs, also if the loss of each run is multiplied by a factor.
    """
    rows = []
    for r, (x, y) in enumerate(zip(kept.log_C, kept.log_loss, strict=True)):
        rows += [(r, i) for i in _chain(np.arange(len(x)), x, y)]
    return np.array(rows)


def _hull(kept: _Curves, rows: np.ndarray, factors: np.ndarray | None = None) -> np.ndarray:
    """Returns the vertices of the lower convex hull of the records `rows` in log-log, in order of falling loss.

    Args:
        rows: [n, 2] run index and record index, such as `_own_hulls`.
        factors: [runs] added to the log losses of each run.
    """
    x = np.array([kept.log_C[r][i] for r, i in rows])
    y = np.array([kept.log_loss[r][i] for r, i in rows])
    if factors is not None:
        y = y + factors[rows[:, 0]]
    stack = _chain(np.lexsort((y, x)), x, y)
    # To the right of its lowest point the hull rises: more compute with no lower loss. This part is dropped.
    return rows[stack[: int(np.argmin(y[stack])) + 1]]


def _chain(order: np.ndarray, x: np.ndarray, y: np.ndarray) -> list[int]:
    """Returns the indices of the lower convex hull of points that `order` sorts by x."""
    stack: list[int] = []
    points: list[tuple[float, float]] = []
    for p, px, py in zip(order.tolist(), x[order].tolist(), y[order].tolist(), strict=True):
        while len(stack) >= 2:
            (ax, ay), (bx, by) = points[-2:]
            if (bx - ax) * (py - ay) - (by - ay) * (px - ax) > 0:
                break
            stack.pop()
            points.pop()
        stack.append(p)
        points.append((px, py))
    return stack


def _vertices(kept: _Curves, hull: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the vertices of a hull as points of the envelope.

    A point is inside if both smaller and larger sizes have curves at its compute.
    """
    rows = hull[:, 0]
    C, D, loss = (np.array([values[r][i] for r, i in hull]) for values in (kept.log_C, kept.log_D, kept.log_loss))
    N = kept.size[rows]
    low, high = np.array([c[0] for c in kept.log_C]), np.array([c[-1] for c in kept.log_C])
    there = (low <= C[:, None]) & (C[:, None] <= high)
    smaller, larger = kept.size < N[:, None], kept.size > N[:, None]
    inside = (there & smaller).any(axis=1) & (there & larger).any(axis=1)
    envelope = {"C": np.exp(C), "loss": np.exp(loss), "N": N, "D": np.exp(D)}
    return {**envelope, "row": rows, "best_N": N, "inside": inside}


def _noise(kept: _Curves, surface: dict) -> tuple[np.ndarray, float, int] | None:
    """Returns what the runs differ by beside their size: the effect of each run, their deviation, degrees of freedom.

    At each compute, log loss is a parabola in log N near the lowest curve. A run that lies above or below it does so
    over much of its curve, so its effect is one number: the mean residual. None if no compute has enough sizes.
    """
    log_N = np.log10(kept.size)
    sums, seen, squares, freedom = np.zeros(len(log_N)), np.zeros(len(log_N)), 0.0, 0
    for column in surface["loss"].T:
        rows = np.flatnonzero(np.isfinite(column))
        if len(np.unique(log_N[rows])) < SIZES:
            continue
        rows = rows[near_lowest(log_N[rows], np.exp(column[rows]))]
        parabola = fit_parabola(log_N[rows], column[rows])
        if parabola is None or len(rows) <= 3:
            continue
        residuals = column[rows] - parabola.fitted
        sums[rows] += residuals
        seen[rows] += 1
        squares += float(residuals @ residuals)
        freedom += len(rows) - 3
    if not freedom:
        return None
    runs = int((seen > 0).sum())
    return sums / np.maximum(seen, 1), float(np.sqrt(squares / freedom)), max(1, runs - 3)


def _resample(kept, surface, rows, mode: str, counted, noise, resamples: int, seed: int) -> tuple[dict, dict]:
    """Returns the envelope without the effects of the runs, and envelopes with drawn effects, padded with NaN.

    Every run stays, and its whole curve moves by one factor. Each is C, loss, N, D as [R, m], with R = 1 for the first.
    """
    enough, keep_ends = counted
    effects, deviation, freedom = noise
    generator = np.random.default_rng(seed)
    drawn = generator.normal(0, deviation, (resamples, len(effects)))
    drawn *= np.sqrt(freedom / generator.chisquare(freedom, (resamples, 1)))
    everything = np.ones(len(effects), dtype=bool)
    envelopes = []
    for factors in np.concatenate([np.zeros((1, len(effects))), drawn]) - effects:
        if mode == "minimum":
            envelope = _lowest(kept, {**surface, "loss": surface["loss"] + factors[:, None]}, everything)
        else:
            envelope = _vertices(kept, _hull(kept, rows, factors))
        keep = envelope["inside"] if enough and not keep_ends else np.ones(len(envelope["C"]), dtype=bool)
        # One size does not determine a law of N, so such a resample counts as one without a law.
        few = enough and len(np.unique(envelope["best_N"][keep])) < 2
        envelopes.append({name: envelope[name][keep][: 0 if few else None] for name in ("C", "loss", "N", "D")})
    width = max(2, *(len(envelope["C"]) for envelope in envelopes))
    draws = {name: np.full((len(envelopes), width), np.nan) for name in ("C", "loss", "N", "D")}
    for r, envelope in enumerate(envelopes):
        for name, values in envelope.items():
            draws[name][r, : len(values)] = values
    return {name: values[:1] for name, values in draws.items()}, {name: values[1:] for name, values in draws.items()}


def _decays(curves: pd.DataFrame) -> bool:
    """Returns whether the learning rate of some run ends below half of its peak."""
    if "learning_rate" not in curves:
        return False
    rates = pd.to_numeric(curves["learning_rate"], errors="coerce")
    last = rates.loc[curves.groupby(["run", "N"])["D"].idxmax()].to_numpy()
    peak = rates.groupby([curves["run"], curves["N"]]).max().to_numpy()
    return bool((last < peak / 2).any())


# The method "power": fits a law to the lowest loss at each compute (paper 000, section 4).


def fit_frontier(
    table: pd.DataFrame, groups: np.ndarray, *, bootstrap: int = 0, seed: int = 0, hold_out: float | None = None
) -> PowerFit:
    """Fits L(C) to the lowest loss of each group of equal compute, and N_opt and D_opt to the runs with these losses.

    If the run with the lowest loss is the smallest or the largest of its group, the optimum may be outside the sizes.
    Such a run counts for L, but not for N_opt and D_opt.

    Args:
        table: columns run, N, D, C, loss.
        groups: [rows] budget label of each row, -1 for none (see `assign_budgets`). If at least half of the rows belong
            to budgets with several sizes, the other rows are left out, because the lowest of one row means nothing.
            Otherwise each row of label -1 is its own group.
        bootstrap: number of resamples of the residuals of each law, or of whole runs if a run has several rows; 0 for
            none.
        seed: seed of the resampling.
        hold_out: see `linnet.laws.fit.law.threshold`.
    """
    fit = PowerFit("power")
    table, groups = resampling.in_order(table, groups)
    sizes = table.groupby(groups)["N"].transform("nunique").to_numpy()
    several = (groups >= 0) & (sizes > 1)
    if several.mean() >= 0.5 and not several.all():
        fit.notes.append(f"{count_of(int((~several).sum()), 'row')} left out: no other size at the same compute")
        table, groups = table[several], groups[several]
    labels = np.where(groups < 0, groups.max(initial=-1) + 1 + np.arange(len(groups)), groups)
    _, labels = np.unique(labels, return_inverse=True)
    C, N, D, loss = (table[name].to_numpy(float) for name in ("C", "N", "D", "loss"))
    best, alone = [], 0
    for label in range(labels.max(initial=-1) + 1):
        rows = np.flatnonzero(labels == label)
        row = rows[loss[rows].argmin()]
        alone += len(np.unique(N[rows])) < 3
        inside = bool(N[rows].min() < N[row] < N[rows].max())
        point = {"C": C[row], "loss": loss[row], "N": N[row], "D": D[row], "run": str(table["run"].iloc[row])}
        best.append({**point, "inside": inside, "fitted": True, "step": _step(N[rows], N[row])})
    best.sort(key=lambda point: point["C"])
    fit.points = [{name: value for name, value in point.items() if name != "step"} for point in best]
    grouped = int(np.sum(np.bincount(labels) > 1)) if len(labels) else 0
    if grouped:
        fit.notes.append(f"L(C) is fitted to the lowest loss of each of {count_of(len(best), 'budget')}")
    points = pd.DataFrame(best)
    draws = {name: {} for name in ("L", "N", "D")}
    runs = resampling.runs_of(table)
    if bootstrap and len(table) > 2 and resampling.is_clustered(runs):
        # Rows of one run are not independent, and they lie in several budgets: whole runs are resampled.
        fit.bootstrap = Bootstrap("pairs, clustered by run", bootstrap, bootstrap, seed)
        if reason := resampling.few_runs(runs):
            fit.bootstrap.refuse(reason)
        else:
            counts = resampling.draw_counts(bootstrap, len(table), seed, runs)
            drawn = _draws(counts, labels, C, N, D, loss)
            draws = {name: {"draws_C": drawn["C" if name == "L" else "C_in"], "draws": drawn[name]} for name in draws}
    elif bootstrap and len(table) > 2:
        draws = dict.fromkeys(draws, {"residuals": bootstrap, "seed": seed})
        fit.bootstrap = Bootstrap("residuals of the law", bootstrap, bootstrap, seed)
    for name, irreducible in (("L", False), ("L_irreducible", True)):
        setattr(fit, name, law_through("L", points["C"], points["loss"], irreducible=irreducible, **draws["L"]))
    if np.mean([len(np.unique(N[labels == label])) == 1 for label in range(len(best))]) > 0.5:
        refuse_mixed(fit)
    inner = points[points["inside"]]
    for name, column in (("N_opt", "N"), ("D_opt", "D")):
        if len(inner) < 3:
            count = count_of(len(inner), "budget")
            reason = f"{count} with the lowest loss at a size between smaller and larger ones; three are needed"
            if alone == len(best):
                reason = "no budget has three sizes, so none shows an optimum; train more sizes per budget"
            fit.refuse(reason, name, points=len(inner))
            continue
        # The optimum lies anywhere between the neighbours of the lowest size, however well these sizes follow a law.
        rounding = {"smallest_error": inner["step"].mean() / np.sqrt(12)} if "residuals" in draws[column] else {}
        setattr(fit, name, law_through(name, inner["C"], inner[column], **draws[column], **rounding))
    count_usable(fit)
    finish(fit)
    add_held_out(fit, hold_out)
    return fit


def _step(sizes: np.ndarray, lowest: float) -> float:
    """Returns half the distance between the neighbours of a size in log N; 0 if it is the smallest or the largest."""
    smaller, larger = sizes[sizes < lowest], sizes[sizes > lowest]
    return float(np.log(larger.min() / smaller.max()) / 2) if len(smaller) and len(larger) else 0.0


def _draws(counts, labels, C, N, D, loss) -> dict:
    """Returns the lowest point of each group in each resample, arrays [R, groups].

    C_in, N and D are NaN if the lowest point is the smallest or the largest size of its group.
    """
    names = ("C", "C_in", "L", "N", "D")
    shape = (len(counts), labels.max() + 1)
    draws = {name: np.full(shape, np.nan) for name in names}
    for label in range(shape[1]):
        rows = np.flatnonzero(labels == label)
        seen = counts[:, rows] > 0
        some = seen.any(axis=1)
        row = rows[np.where(seen, loss[rows], np.inf).argmin(axis=1)]
        smallest = np.where(seen, N[rows], np.inf).min(axis=1)
        largest = np.where(seen, N[rows], -np.inf).max(axis=1)
        inside = some & (smallest < N[row]) & (N[row] < largest)
        for name, values, where in (
            ("C", C, some),
            ("L", loss, some),
            ("C_in", C, inside),
            ("N", N, inside),
            ("D", D, inside),
        ):
            draws[name][where, label] = values[row][where]
    return draws
