"""The lower envelope of training curves: the lowest loss at each compute (Hoffmann et al. 2022, Approach 1).

Paper 000, section 4, takes the minimal loss at each number of FLOPs from the curves of all sizes. N_opt and D_opt are
those of the run with this loss. Where only one size has a curve, the envelope does not show an optimum. So a point
counts for N_opt only if both a smaller and a larger model have curves at this compute, with higher losses.
"""

import numpy as np
import pandas as pd

from linnet.study.fit import bootstrap as resampling
from linnet.study.fit.law import Law
from linnet.study.fit.power import add_held_out, count_of, count_usable, finish, law_through, log_log
from linnet.study.fit.results import Bootstrap, EnvelopeFit

WARMUP = 0.002
"""Share of a curve's tokens that is dropped at its beginning. It is small: curves in warm-up are rarely the lowest."""


def fit_envelope(
    curves: pd.DataFrame,
    *,
    mode: str = "minimum",
    points: int = 60,
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
        warmup: share of a curve's tokens that is dropped at its beginning. With a learning_rate, the records before it
            first reaches its maximum are dropped too.
        smooth: odd number of records in a centred moving average of log loss against log C; 1 for no smoothing.
        bootstrap: number of resamples of whole runs, because the records of one run are not independent.
        seed: seed of the resampling.
        hold_out: see `linnet.study.fit.heldout.threshold`.

    Raises:
        ValueError: unknown mode, or `smooth` or `points` out of range.
    """
    if mode not in ("minimum", "hull"):
        raise ValueError(f"mode: {mode!r} is unknown; use 'minimum' or 'hull'")
    if smooth < 1 or smooth % 2 == 0 or points < 4:
        raise ValueError(f"smooth: {smooth} must be odd and positive, and points: {points} must be at least 4")
    fit = EnvelopeFit("envelope", mode=mode)
    kept = _Curves.read(curves, warmup, smooth)
    fit.curves, fit.warmup_removed = len(kept.run), kept.removed
    if len(kept.run) < 2:
        return _refuse(
            fit, f"{count_of(len(kept.run), 'training curve')} with two records or more; an envelope needs two curves"
        )
    hull = _hull(kept)
    fit.hull_size = len(hull)
    grid = _grid(kept, points)
    surface = kept.at(grid)
    everything = np.ones(len(kept.run), dtype=bool)
    found = _lowest(kept, surface, everything) if mode == "minimum" else _vertices(kept, hull, everything)
    inside = found["inside"]
    sizes = len(np.unique(found["best_N"][inside]))
    enough = sizes >= 3
    fit.points = [
        {**{name: float(found[name][i]) for name in ("C", "loss", "N", "D")},
         "run": str(kept.run[found["row"][i]]), "inside": bool(inside[i]), "fitted": bool(inside[i] or not enough)}
        for i in range(len(inside))
    ]  # fmt: skip
    fit.runs_on_envelope = len(set(found["row"]))
    if not enough:
        reason = f"{count_of(sizes, 'size')} on the envelope with curves of smaller and larger models; three are needed"
        fit.N_opt = Law("N_opt", points=int(inside.sum()), refused=[reason])
        fit.D_opt = Law("D_opt", points=int(inside.sum()), refused=[reason])
        fit.notes.append("L(C) is fitted to the whole envelope, including the ends, which other sizes could lower")
    else:
        fit.notes.append(f"{count_of(int((~inside).sum()), 'point')} at the ends of the envelope left out")
    draws = None
    if bootstrap:
        fit.bootstrap = Bootstrap("pairs, clustered by run", bootstrap, bootstrap, seed)
        draws = _resample(kept, surface, mode, enough, bootstrap, seed)
    chosen = inside if enough else np.ones(len(inside), dtype=bool)
    C = found["C"][chosen]

    def law(quantity: str, name: str, irreducible: bool = False) -> Law:
        extra = {"draws_C": draws["C"], "draws": draws[name]} if draws else {}
        return law_through(quantity, C, found[name][chosen], irreducible=irreducible, **extra)

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
        for run, rows in table.groupby("run", sort=False):
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
    found = {"C": np.exp(log_C), "loss": np.exp(loss[best, columns]), "N": np.exp(N), "D": np.exp(D)}
    return {**found, "row": best_row[best, columns], "best_N": sizes[best], "inside": inside}


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


def _hull(kept: _Curves, chosen: np.ndarray | None = None) -> np.ndarray:
    """Returns the vertices of the lower convex hull of the records in log-log, in order of falling loss.

    Rows are (run index, record index).
    """
    runs = range(len(kept.run)) if chosen is None else np.flatnonzero(chosen)
    labels = np.array([(r, i) for r in runs for i in range(len(kept.log_C[r]))])
    xy = np.array([(kept.log_C[r][i], kept.log_loss[r][i]) for r, i in labels])
    stack: list[int] = []
    for p in np.lexsort((xy[:, 1], xy[:, 0])):
        while len(stack) >= 2 and _turn(xy[stack[-2]], xy[stack[-1]], xy[p]) <= 0:
            stack.pop()
        stack.append(int(p))
    # To the right of its lowest point the hull rises: more compute with no lower loss. This part is dropped.
    lowest = int(np.argmin(xy[stack, 1]))
    return labels[stack[: lowest + 1]]


def _turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _vertices(kept: _Curves, hull: np.ndarray, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the vertices of a hull as points of the envelope.

    A point is inside if both smaller and larger sizes have curves at its compute.
    """
    rows = hull[:, 0]
    C, D, loss = (np.array([values[r][i] for r, i in hull]) for values in (kept.log_C, kept.log_D, kept.log_loss))
    N, inside = kept.size[rows], np.zeros(len(hull), dtype=bool)
    low, high = np.array([c[0] for c in kept.log_C]), np.array([c[-1] for c in kept.log_C])
    for i, x in enumerate(C):
        sizes = kept.size[chosen & (low <= x) & (x <= high)]
        inside[i] = bool((sizes < N[i]).any() and (sizes > N[i]).any())
    found = {"C": np.exp(C), "loss": np.exp(loss), "N": N, "D": np.exp(D)}
    return {**found, "row": rows, "best_N": N, "inside": inside}


def _resample(kept: _Curves, surface: dict, mode: str, enough: bool, resamples: int, seed: int) -> dict:
    """Returns the envelopes of resampled runs, padded with NaN to one length: C, loss, N, D as [R, m]."""
    counts = resampling.draw_counts(resamples, len(kept.run), seed)
    found = []
    for drawn in counts > 0:
        if mode == "minimum":
            one = _lowest(kept, surface, drawn)
        else:
            one = _vertices(kept, _hull(kept, drawn), drawn)
        keep = one["inside"] if enough else np.ones(len(one["C"]), dtype=bool)
        # One size does not determine a law of N, so such a resample counts as one without a law.
        few = enough and len(np.unique(one["best_N"][keep])) < 2
        found.append({name: one[name][keep][: 0 if few else None] for name in ("C", "loss", "N", "D")})
    width = max(2, *(len(one["C"]) for one in found))
    draws = {name: np.full((resamples, width), np.nan) for name in ("C", "loss", "N", "D")}
    for r, one in enumerate(found):
        for name, values in one.items():
            draws[name][r, : len(values)] = values
    return draws


def _refuse(fit: EnvelopeFit, reason: str) -> EnvelopeFit:
    fit.refused.append(reason)
    fit.L, fit.L_irreducible = Law("L", refused=[reason]), Law("L", refused=[reason])
    fit.N_opt, fit.D_opt = Law("N_opt", refused=[reason]), Law("D_opt", refused=[reason])
    return fit
