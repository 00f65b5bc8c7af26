"""One surface for several architectures, with shared or own E and exponents: do two architectures scale differently?

L_k(N, D) = E_k + A_k N^-alpha_k + B_k D^-beta_k by least squares of log loss, which is maximum likelihood for Gaussian
errors of log loss. Four forms: all numbers own, E shared, exponents shared, E and exponents shared (A and B are always
own). A form is tested against "all own" by F = (S_0 - S_1) / d / (S_1 / (n - P)). a = beta / (alpha + beta).
"""

import numpy as np
import pandas as pd
from scipy import stats

from linnet.laws import orders
from linnet.laws.fit import fit_parametric
from linnet.laws.fit.law import threshold
from linnet.laws.further.base import (
    Estimate,
    LawFit,
    Model,
    Options,
    Prediction,
    Test,
    check_fit,
    differences,
    errors,
    generators,
    interval,
    solve,
    wild,
)

FORMS = {
    "all own": (),
    "shared E": ("E",),
    "shared exponents": ("alpha", "beta"),
    "shared E and exponents": ("E", "alpha", "beta"),
}
ROWS = 8
"""Smallest number of runs of an architecture below the held-out ones."""


def fit_joint(table: pd.DataFrame, options: Options) -> LawFit:
    """Fits the four forms, tests them, and compares the exponents of every pair of architectures."""
    law = LawFit(
        "joint",
        "Joint surfaces of the architectures",
        "L_k(N, D) = E_k + A_k N^-alpha_k + B_k D^-beta_k, with E, alpha, beta shared or own",
        "Hoffmann et al. 2022, equation 2; F tests of the shared numbers",
        scheme="wild bootstrap of the residuals, by run and architecture",
    )
    kept, starts = [], []
    for name, part in table.groupby("architecture", sort=False):
        single = fit_parametric(part)
        if not single.surface:
            law.notes.append(f"{name} left out: {'; '.join(single.refused)}")
            continue
        kept.append(name)
        surface = single.surface
        starts.append([*(np.log(surface[key]) for key in "ABE"), surface["alpha"], surface["beta"]])
    if len(kept) < 2:
        law.refused += [f"architectures with a surface of their own: {len(kept)}; two are needed", *law.notes]
        law.notes = []
        return law
    rows = table[table["architecture"].isin(kept)].reset_index(drop=True)
    surfaces = Surfaces(rows, kept)
    y = np.log(rows["loss"].to_numpy(float))
    fits = {form: surfaces.fit(np.array(starts), shared, y) for form, shared in FORMS.items()}
    random = generators(options, kept)
    law.tests = _tests(surfaces, fits, y)
    theta = fits["all own"][0]
    drawn = np.empty((0, surfaces.size(())))
    predicted, slopes = (part[0] for part in surfaces.model(())(theta[None]))
    for k, name in enumerate(kept):
        mine, columns = surfaces.of == k, surfaces.places(())[k]
        axes = surfaces.log_N[mine], surfaces.log_D[mine]
        check_fit(law, name, (y - predicted)[mine], slopes[mine][:, columns], *axes)
    if options.bootstrap:
        samples = np.empty((options.bootstrap, len(y)))
        for k, name in enumerate(kept):
            mine = surfaces.of == k
            slope = slopes[mine][:, surfaces.places(())[k]]
            samples[:, mine] = wild(predicted[mine], y[mine], slope, options.bootstrap, random[name])
        drawn = surfaces.each(theta, samples)
        drawn[(surfaces.values(drawn, ())[..., 3:] <= 1e-3).any(axis=(1, 2))] = np.nan
    _add(law, surfaces, theta, drawn)
    law.predictions = _held_out(rows, kept, np.array(starts), options)
    surfaces_of = surfaces.values(theta[None], ())[0]
    law.points["surfaces"] = [
        {"architecture": name, **dict(zip(("A", "B", "E"), map(float, np.exp(v[:3])), strict=True))}
        | {"alpha": float(v[3]), "beta": float(v[4])}
        for name, v in zip(kept, surfaces_of, strict=True)
    ]
    return law


class Surfaces:
    """The surfaces of K architectures over the rows of a table, as one problem of least squares.

    Parameters of an architecture: ln A, ln B, ln E, alpha, beta. Shared ones occur once in theta.
    """

    ORDER = ("A", "B", "E", "alpha", "beta")

    def __init__(self, rows: pd.DataFrame, names: list[str]):
        self.names = names
        self.of = rows["architecture"].map({name: k for k, name in enumerate(names)}).to_numpy()
        self.log_N, self.log_D = np.log(rows["N"].to_numpy(float)), np.log(rows["D"].to_numpy(float))

    def places(self, shared: tuple[str, ...]) -> np.ndarray:
        """Returns [K, 5]: the index in theta of each parameter of each architecture."""
        indices, K = np.empty((len(self.names), 5), dtype=int), len(self.names)
        following = 0
        for column, name in enumerate(self.ORDER):
            width = 1 if name in shared else K
            indices[:, column] = following + (0 if name in shared else np.arange(K))
            following += width
        return indices

    def size(self, shared: tuple[str, ...]) -> int:
        return int(self.places(shared).max()) + 1

    def values(self, theta: np.ndarray, shared: tuple[str, ...]) -> np.ndarray:
        """Returns the parameters of each architecture, [S, K, 5]."""
        return theta[:, self.places(shared)]

    def model(self, shared: tuple[str, ...], rows: np.ndarray | None = None) -> Model:
        """Returns the log loss of the rows (default: all) and its derivatives, as functions of theta."""
        rows = np.arange(len(self.of)) if rows is None else rows
        place, size, n = self.places(shared)[self.of[rows]], self.size(shared), np.arange(len(rows))
        x = (-self.log_N[rows], -self.log_D[rows])
        directions = np.zeros((3, len(rows), size))
        for term in range(3):
            directions[term, n, place[:, term]] = 1
            if term < 2:
                directions[term, n, place[:, 3 + term]] = x[term]

        def model(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            thetas = theta[:, place]  # [S, n, 5]
            terms = [thetas[..., 0] + thetas[..., 3] * x[0], thetas[..., 1] + thetas[..., 4] * x[1], thetas[..., 2]]
            t = np.stack(terms)
            top = t.max(axis=0)
            share = np.exp(t - top)
            total = share.sum(axis=0)
            share /= total
            slopes = sum(share[term][..., None] * directions[term] for term in range(3))
            return top + np.log(total), slopes

        return model

    def fit(self, starts: np.ndarray, shared: tuple[str, ...], y: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns theta and the sum of squares, from `starts` [K, 5]; shared parameters start at their means."""
        theta = np.zeros(self.size(shared))
        place = self.places(shared)
        for column in range(5):
            for k in range(len(self.names)):
                is_shared = self.ORDER[column] in shared
                theta[place[k, column]] = starts[:, column].mean() if is_shared else starts[k, column]
        for column, term in ((3, 0), (4, 1)):  # a shared exponent keeps the size of its term in the middle of the rows
            if self.ORDER[column] in shared:
                x = (self.log_N, self.log_D)[term]
                for k in range(len(self.names)):
                    theta[place[k, term]] += (theta[place[k, column]] - starts[k, column]) * x[self.of == k].mean()
        thetas, value = solve(self.model(shared), theta[None], y, iterations=400)
        return thetas[0], float(value[0])

    def each(self, own: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Returns theta of the form "all own" for resamples [R, n], one architecture after the other."""
        thetas = np.tile(own, (len(samples), 1))
        place = self.places(())
        for k in range(len(self.names)):
            mine = np.flatnonzero(self.of == k)
            alone = _Alone(self, k, mine)
            theta, _ = solve(alone.model, np.tile(own[place[k]], (len(samples), 1)), samples[:, mine], tolerance=1e-8)
            thetas[:, place[k]] = theta
        return thetas


class _Alone:
    """The surface of one architecture, with the five parameters in the order of `Surfaces.ORDER`."""

    def __init__(self, surfaces: Surfaces, k: int, rows: np.ndarray):
        part = pd.DataFrame({"architecture": surfaces.names[k], "N": np.exp(surfaces.log_N[rows])})
        part["D"] = np.exp(surfaces.log_D[rows])
        self.model = Surfaces(part, [surfaces.names[k]]).model(())


def _tests(surfaces: Surfaces, fits, y) -> list[Test]:
    """Returns the F tests of the smaller forms, whose conclusions share the 5 % by Holm's method."""
    size, largest = surfaces.size(()), fits["all own"][1]
    left, ratios = len(y) - size, []
    for form, shared in FORMS.items():
        if shared:
            fewer = size - surfaces.size(shared)
            ratio = max(0.0, fits[form][1] - largest) / fewer / (largest / left + 1e-16)  # losses are rounded
            ratios.append((form, float(ratio), float(stats.f.sf(ratio, fewer, left)), (fewer, left)))
    tests = []
    for (form, ratio, p, degrees), adjusted in zip(ratios, orders.holm([p for _, _, p, _ in ratios]), strict=True):
        words = "rejected: the architectures differ in it" if adjusted < orders.LEVEL else "not rejected by these runs"
        tests.append(Test(f"{form} against all own", ratio, p, words, degrees))
    return tests


def _add(law: LawFit, surfaces: Surfaces, theta: np.ndarray, drawn: np.ndarray) -> None:
    values, draws = surfaces.values(theta[None], ())[0], surfaces.values(drawn, ())
    exponents = {}
    for k, name in enumerate(surfaces.names):
        for symbol, column in (("E", 2), ("alpha", 3), ("beta", 4)):
            shown = np.exp if symbol == "E" else np.asarray
            value, ends = float(shown(values[k, column])), interval(shown(draws[:, k, column]))
            law.estimates.append(Estimate(symbol, value, ends, name))
        a, each = (part[..., 4] / (part[..., 3] + part[..., 4]) for part in (values[k], draws[:, k]))
        exponents[name] = (float(a), each)
        law.estimates.append(Estimate("a", float(a), interval(each), name))
    law.estimates += differences("a", exponents)
    what = "b = 1 - a on a surface, so b differences are minus the a differences"
    law.notes.append(f"{what}; see also `--law allocation`")


def _held_out(rows: pd.DataFrame, names: list[str], starts: np.ndarray, options: Options) -> list[Prediction]:
    """Predicts the runs of largest C by every form."""
    C, y = rows["C"].to_numpy(float), np.log(rows["loss"].to_numpy(float))
    limit = threshold(C, options.hold_out)
    seen = C <= limit if limit is not None else np.zeros(len(C), dtype=bool)
    part = rows[seen].reset_index(drop=True)
    if seen.all() or not set(names) <= set(
        part["architecture"][part.groupby("architecture")["run"].transform("size") > 7]
    ):
        return [Prediction("loss of the runs of most compute", refused="fewer than 8 runs of an architecture are left")]
    below, predictions = Surfaces(part, names), []
    above = Surfaces(rows[~seen].reset_index(drop=True), names)
    for form, shared in FORMS.items():
        theta, _ = below.fit(starts, shared, y[seen])
        predicted = np.exp(above.model(shared)(theta[None])[0][0])
        what = f"loss of the runs of most compute, {form}"
        predictions.append(errors(what, int(seen.sum()), predicted, np.exp(y[~seen])))
    return predictions
