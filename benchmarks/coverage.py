"""Simulates ladders of a known law, fits them, and counts how often the 95 % intervals contain the truth.

    python benchmarks/coverage.py                              # short form: 100 repetitions per design (parametric: 20)
    OMP_NUM_THREADS=1 python benchmarks/coverage.py --full --workers 32 --csv    # 1,000 repetitions (parametric: 200)
    python benchmarks/coverage.py --methods isoflop --designs "5x5;demo" --repetitions 50
    python benchmarks/coverage.py --methods headline --designs 4x4 --repetitions 1000 --csv    # this cell alone
    python benchmarks/coverage.py --stability 100              # how far intervals move with draws and seed
    python benchmarks/coverage.py --downstream 200 --runs 5    # intervals of a metric's law from few runs

A design is a set of budgets and sizes. Each repetition draws the noise of every run, with its own seed, and fits the
table by one method. The columns of the result, for every method, design and quantity:

    n         repetitions with an interval
    refused   repetitions without one
    bias      mean estimate minus truth
    sd        standard deviation of the estimates
    coverage  share of the intervals that contain the truth
    p         of the exact binomial test that the coverage is 95 %
    rejected  whether this test rejects at 1 % (Holm over all rows)
    width     mean width of the intervals over the ideal: the mean width of Student's t interval for an estimate of this
              standard deviation, with the degrees of freedom that the design leaves (at most 1.3 wanted)
    known     the same over 3.92 standard deviations, the width if the noise were known

The last line is JSON. `--csv` replaces the rows of these cells in benchmarks/results/coverage.csv, with the commit,
and writes the table of docs/scaling-laws.md.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import expit, gammaln
from scipy.stats import binomtest
from scipy.stats import t as student

from linnet import provenance
from linnet.laws.fit import fit_downstream, fit_envelope, fit_frontier, fit_isoflop, fit_parametric, fit_study
from linnet.laws.fit.results import law_of_form

HERE = Path(__file__).parent
RESULTS, PLAN = HERE / "results" / "coverage.csv", HERE / "results" / "coverage_demo.csv"
PAGE = HERE.parent / "docs" / "scaling-laws.md"
LEVEL = 0.01
CHUNK = 10
"""Repetitions per task of a worker."""


@dataclass(frozen=True)
class Surface:
    """L = E + A / N^alpha + B / D^beta with C = 6 N D."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def optimum(self, C):
        both = self.alpha + self.beta
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / both)
        return G * (C / 6) ** (self.beta / both)

    def loss(self, N, D):
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    @property
    def truth(self) -> dict[str, float]:
        both = self.alpha + self.beta
        gamma = -self.alpha * self.beta / both
        return {"a": self.beta / both, "b": self.alpha / both, "alpha": gamma, "E": self.E}


@dataclass(frozen=True)
class Kaplan:
    """L = ((Nc / N)^(alpha_N / alpha_D) + Dc / D)^alpha_D of Kaplan et al. (2020), with C = 6 N D.

    Its parabolas are asymmetric, and its L(C) is a pure power law that no surface of the form above has.
    """

    Nc: float = 8.8e13
    Dc: float = 5.4e13
    alpha_N: float = 0.076
    alpha_D: float = 0.095

    def optimum(self, C):
        r = self.alpha_N / self.alpha_D
        return (r * self.Nc**r * C / (6 * self.Dc)) ** (1 / (1 + r))

    def loss(self, N, D):
        return ((self.Nc / N) ** (self.alpha_N / self.alpha_D) + self.Dc / D) ** self.alpha_D

    @property
    def truth(self) -> dict[str, float]:
        a = self.alpha_D / (self.alpha_N + self.alpha_D)
        return {"a": a, "b": 1 - a}


CHINCHILLA = Surface(1.7, 400.0, 2000.0, 0.34, 0.37)
DEMO = {
    "cosformer2": Surface(1.675, 6.114, 232.456, 0.289, 0.468),
    "hgrn2": Surface(1.569, 5.54, 24.726, 0.302, 0.300),
    "lightnet": Surface(1.781, 8.2, 317.641, 0.356, 0.491),
    "llama": Surface(0.938, 3.908, 11.322, 0.173, 0.211),
    "tnl": Surface(1.729, 6.98, 19.708, 0.362, 0.282),
}
"""Surfaces with D = C / (6 N), fitted to the mean losses of 531 models of bytes with one to three seeds, as those of
configs/demo.yaml, from 1e10 to 1e11 FLOPs."""
DEMO_NOISE = 0.010
"""Standard deviation of log loss between seeds of one of these models (354 degrees of freedom)."""


@dataclass(frozen=True)
class Design:
    """Runs without noise.

    Attributes:
        spread: for each budget, log(N / N_opt) of its runs.
        noise: standard deviation of log loss between runs.
        diverged: added to the loss of one run, drawn anew in each repetition.
        scatter: standard deviation of the log of the cost per parameter and token, drawn anew for every run.
        curves: number of records per run if the design has training curves, each with half of the noise of its own.
        tilt: exponent by which the noise falls with the size, from that of the middle size.
        off: standard deviation of an error of log loss that all runs of a budget share.
        tail: degrees of freedom of Student's t of the noise; 0 is normal noise.
        apart: largest distance in log C of a run from its budget.
        missing: share of the runs that are missing.
        seeds: each run has one to so many seeds.
    """

    budgets: tuple[float, ...]
    spread: tuple[tuple[float, ...], ...]
    surface: Surface | Kaplan = CHINCHILLA
    noise: float = 0.002
    diverged: float = 0.0
    scatter: float = 0.0
    curves: int = 0
    tilt: float = 0.0
    off: float = 0.0
    tail: float = 0.0
    apart: float = 0.0
    missing: float = 0.0
    seeds: int = 1

    def draw(self, generator: np.random.Generator) -> tuple[pd.DataFrame, dict[str, float]]:
        """Returns a table with noise, and the truth."""
        rows = []
        for C, spread in zip(self.budgets, self.spread, strict=True):
            for step in spread:
                N = float(self.surface.optimum(C) * np.exp(step))
                rows.append({"N": N, "D": C / (6 * N), "C": C, "budget": C, "run": f"r{len(rows)}"})
        table = pd.DataFrame(rows)
        if self.missing:
            table = table[generator.random(len(table)) >= self.missing].reset_index(drop=True)
        if self.seeds > 1:
            repeats = generator.integers(1, self.seeds + 1, len(table))
            table = table.loc[table.index.repeat(repeats)].reset_index(drop=True)
            table["run"] = [f"r{row}" for row in range(len(table))]
        if self.apart:
            factor = np.exp(generator.uniform(-self.apart, self.apart, len(table)))
            table["D"], table["C"] = table["D"] * factor, table["C"] * factor
        table["D"] *= np.exp(generator.normal(0, self.scatter, len(table)))
        table["loss"] = self.surface.loss(table["N"], table["D"])
        return self.noisy(table, generator), self.surface.truth

    def noisy(self, table: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
        relative = table["N"] / np.exp(np.log(table["N"]).mean())
        drawn = generator.standard_t(self.tail, len(table)) if self.tail else generator.normal(0, 1, len(table))
        table["loss"] *= np.exp(self.noise * drawn * relative**-self.tilt)
        if self.off:
            budgets, place = np.unique(table["budget"], return_inverse=True)
            table["loss"] *= np.exp(generator.normal(0, self.off, len(budgets))[place])
        if self.diverged:
            table.loc[int(generator.integers(len(table))), "loss"] += self.diverged
        return table

    def value(self, quantity: str, times: float) -> float:
        """Returns the log of the best N, or of the loss there, at `times` the largest budget."""
        C = times * max(self.budgets)
        N = self.surface.optimum(C)
        return float(np.log(N if quantity == "N" else self.surface.loss(N, C / (6 * N))))

    @property
    def runs(self) -> int:
        return sum(map(len, self.spread))

    @property
    def left(self) -> int:
        """Degrees of freedom of the noise after a parabola in each budget."""
        return self.runs - 3 * len(self.spread)


@dataclass(frozen=True)
class Ladder(Design):
    """The runs that `linnet study configs/demo.yaml` plans for one architecture after the other.

    The loss depends on N and C as if D were C / (6 N), so that N_opt is a power law although the cost is exact.
    """

    plan: tuple[tuple[str, pd.DataFrame], ...] = field(default=(), compare=False)

    def draw(self, generator: np.random.Generator) -> tuple[pd.DataFrame, dict[str, float]]:
        name, planned = self.plan[int(generator.integers(len(self.plan)))]
        table = planned.copy()
        table["loss"] = DEMO[name].loss(table["N"], table["C"] / (6 * table["N"]))
        return self.noisy(table, generator), DEMO[name].truth

    @property
    def left(self) -> int:
        return round(np.mean([len(part) - 3 * part["budget"].nunique() for _, part in self.plan]))


@dataclass(frozen=True)
class Curves(Design):
    """Training curves of several sizes, whose runs differ by one factor over the whole curve."""

    sizes: tuple[float, ...] = ()

    def draw(self, generator: np.random.Generator) -> tuple[pd.DataFrame, dict[str, float]]:
        parts = []
        for i, N in enumerate(self.sizes):
            D = np.geomspace(0.2 * N, 1000 * N, self.curves)
            noise = generator.normal(0, self.noise) + generator.normal(0, self.noise / 2, len(D))
            loss = self.surface.loss(N, D) * np.exp(noise)
            parts.append(pd.DataFrame({"run": f"r{i}", "N": N, "D": D, "C": 6 * N * D, "loss": loss}))
        return pd.concat(parts, ignore_index=True), self.surface.truth


@dataclass(frozen=True)
class Checkpoints(Design):
    """Runs whose checkpoints at common budgets are the rows of one table. A third of their noise is their own."""

    sizes: tuple[float, ...] = ()

    def draw(self, generator: np.random.Generator) -> tuple[pd.DataFrame, dict[str, float]]:
        rows = [(f"r{i}", N, C / (6 * N), C, C) for i, N in enumerate(self.sizes) for C in self.budgets]
        table = pd.DataFrame(rows, columns=["run", "N", "D", "C", "budget"])
        effects = np.repeat(generator.normal(0, self.noise, len(self.sizes)), len(self.budgets))
        own = generator.normal(0, self.noise / 3, len(table))
        table["loss"] = self.surface.loss(table["N"], table["D"]) * np.exp(effects + own)
        return table, self.surface.truth

    @property
    def left(self) -> int:
        return len(self.sizes) - 3


@dataclass(frozen=True)
class Mixed(Design):
    """One run per size, each with another compute and another D / N; no compute has two sizes."""

    sizes: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()

    def draw(self, generator: np.random.Generator) -> tuple[pd.DataFrame, dict[str, float]]:
        table = pd.DataFrame({"N": self.sizes, "D": np.array(self.sizes) * self.ratios})
        table["C"], table["run"] = 6 * table["N"] * table["D"], [f"r{i}" for i in range(len(table))]
        table["budget"], table["loss"] = table["C"], self.surface.loss(table["N"], table["D"])
        return self.noisy(table, generator), self.surface.truth

    @property
    def runs(self) -> int:
        return len(self.sizes)


def grid(budgets: int, sizes: int, half: float = 1.0, drift: float = 0.0, **options) -> Design:
    """Returns a design with sizes between exp(-half) and exp(half) times the optimum, which drift with the budget."""
    middles = np.linspace(-drift, drift, budgets)
    spread = tuple(tuple(middle + np.linspace(-half, half, sizes)) for middle in middles)
    return Design(tuple(np.geomspace(1e18, 1e20, budgets)), spread, **options)


def line(budgets: int) -> Design:
    """Returns one run per budget with D = 20 N, the commonest table. Its losses follow a pure power law."""
    surface = Surface(0.0, 12.0, 24.0, 0.1, 0.1)
    C = np.geomspace(1e18, 1e21, budgets)
    N = np.sqrt(C / 120)
    return Design(tuple(C), tuple((float(np.log(n / surface.optimum(c))),) for n, c in zip(N, C, strict=True)), surface)


def demo() -> Ladder:
    plan = pd.read_csv(PLAN)
    parts = tuple((str(name), part.reset_index(drop=True)) for name, part in plan.groupby("architecture"))
    return Ladder((), (), noise=DEMO_NOISE, plan=parts)


def designs() -> dict[str, Design]:
    return {
        "1x5": line(5),
        "1x8": line(8),
        "5x5": grid(5, 5),
        "5x7": grid(5, 7),
        "5x9": grid(5, 9),
        "5x13 over 2.5 decades": grid(5, 13, 2.9),
        "5x9 over 3 decades": grid(5, 9, 3.45),
        "5x7, edges drift": grid(5, 7, 1.0, 0.5),
        "5x9, one diverged": grid(5, 9, diverged=0.5),
        "5x9, cost off by 5 %": grid(5, 9, scatter=0.05),
        "5x7, t of 2.5": grid(5, 7, tail=2.5),
        "5x7, t of 1.5": grid(5, 7, tail=1.5),
        "5x7, one run 2 % too high": grid(5, 7, diverged=0.05),
        "5x7, computes up to 5 % off": grid(5, 7, apart=0.05),
        "5x7, one to three seeds": grid(5, 7, seeds=3),
        "5x7, every fifth run missing": grid(5, 7, missing=0.2),
        "5x7, E = 0": grid(5, 7, surface=Surface(0.0, 400.0, 2000.0, 0.34, 0.37)),
        "5x7, budgets off by 1 %": grid(5, 7, off=0.01),
        "5x7, budgets off by 0.2 %": grid(5, 7, off=0.002),
        "5x5, budgets off by 1 %": grid(5, 5, off=0.01),
        "4x4": grid(4, 4),
        "2x4": grid(2, 4),
        "2x4, noise falls with size": grid(2, 4, tilt=0.5),
        "5x7, noise falls with size": grid(5, 7, tilt=0.5),
        "5x7, Kaplan's form": grid(5, 7, 1.2, surface=Kaplan()),
        "10 runs, 21 checkpoints": Checkpoints(
            tuple(np.geomspace(1e18, 3e19, 21)), (), noise=0.003, sizes=tuple(np.geomspace(8e7, 4e9, 10))
        ),
        "16 runs, D / N from 20 to 200": Mixed(
            (),
            (),
            sizes=tuple(np.geomspace(1e8, 3e9, 16)),
            ratios=tuple(np.geomspace(20, 200, 16)[np.arange(16) * 7 % 16]),
        ),
        "demo": demo(),
        "9 curves": Curves((), (), curves=120, sizes=tuple(np.geomspace(1e8, 1e10, 9))),
        "13 curves": Curves((), (), curves=120, sizes=tuple(np.geomspace(1e8, 1e10, 13))),
    }


def groups_of(table: pd.DataFrame) -> tuple[np.ndarray, list[float]]:
    budgets = np.unique(table["budget"])
    return np.searchsorted(budgets, table["budget"]), budgets.tolist()


def isoflop(table, resamples: int, seed: int) -> dict:
    fit = fit_isoflop(table, *groups_of(table), bootstrap=resamples, seed=seed)
    return {"a": (fit.N_opt, "a"), "b": (fit.D_opt, "b"), "alpha": (fit.L_irreducible, "alpha")}


def isoflop_loss(table, resamples: int, seed: int) -> dict:
    fit = fit_isoflop(table, *groups_of(table), bootstrap=resamples, seed=seed)
    L = fit.L if fit.L_irreducible is None or fit.L_irreducible.refused else fit.L_irreducible
    laws = {"a": (fit.N_opt, "a"), "L in the middle": (L, "middle"), "L at C": (L, 1.0), "L at 10 C": (L, 10.0)}
    return laws | {"N at 10 C": (fit.N_opt, 10.0)}


def headline(table, resamples: int, seed: int) -> dict:
    named = table.assign(architecture="one", N_total=np.nan)
    chosen = fit_study(named, bootstrap=0, conventions=False)["one"]
    # No choice depends on resamples, so only the methods that the headline takes need them.
    methods = {chosen.headline, chosen.allocation, "isoflop"}
    fits = {
        name: fit_study(named, method=name, bootstrap=resamples, seed=seed, conventions=False)["one"].best
        for name in methods
    }
    L, sizes = law_of_form(fits[chosen.headline], chosen.form), fits[chosen.allocation]
    laws = {"a": (sizes.N_opt, "a"), "b": (sizes.D_opt, "b"), "L in the middle": (L, "middle")}
    laws |= {"L at 10 C": (L, 10.0), "N at 10 C": (sizes.N_opt, 10.0)}
    return laws | {"alpha": (fits["isoflop"].L_irreducible, "alpha")}


def surface(table, resamples: int, seed: int) -> dict:
    fit = fit_parametric(table, bootstrap=resamples, seed=seed)
    N = 3 * table["N"].max()
    return {"L at 3 N": (fit, (N, 60 * N))}


def few(table, resamples: int, seed: int) -> dict:
    fit = fit_parametric(table, bootstrap=resamples, seed=seed)
    return {"L at C": (fit.L, 1.0), "L in the middle": (fit.L, "middle"), "L at 10 C": (fit.L, 10.0)}


def power(table, resamples: int, seed: int) -> dict:
    fit = fit_frontier(table, groups_of(table)[0], bootstrap=resamples, seed=seed)
    return {"alpha": (fit.L, "alpha")}


def parametric(table, resamples: int, seed: int) -> dict:
    fit = fit_parametric(table, bootstrap=resamples, seed=seed)
    return {"a": (fit.N_opt, "a"), "alpha": (fit.L, "gamma"), "E": (fit.L, "E")}


def envelope(table, resamples: int, seed: int) -> dict:
    fit = fit_envelope(table, warmup=0.0, smooth=5, bootstrap=resamples, seed=seed)
    return {"a": (fit.N_opt, "a"), "b": (fit.D_opt, "b")}


def hull(table, resamples: int, seed: int) -> dict:
    fit = fit_envelope(table, mode="hull", warmup=0.0, smooth=5, bootstrap=resamples, seed=seed)
    return {"a": (fit.N_opt, "a"), "b": (fit.D_opt, "b")}


@dataclass(frozen=True)
class Method:
    """A method with its designs, and the degrees of freedom that are left for the noise."""

    fit: Callable
    designs: tuple[str, ...]
    freedom: Callable[[Design], int]
    slow: bool = False


NEW = ("4x4", "5x7, noise falls with size", "5x7, Kaplan's form", "10 runs, 21 checkpoints")
GRIDS = ("5x5", "5x7", "5x9", "5x13 over 2.5 decades", "5x9 over 3 decades", "5x7, edges drift", "5x9, one diverged")
HARD = tuple(name for name in designs() if name.startswith("5x7, ") and name not in (*NEW, *GRIDS))
METHODS = {
    "isoflop": Method(isoflop, (*GRIDS, "5x9, cost off by 5 %", "demo"), lambda d: d.left),
    "isoflop, loss": Method(isoflop_loss, ("5x7", *HARD), lambda d: d.left),
    "headline": Method(headline, NEW, lambda d: d.left, slow=True),
    "surface": Method(surface, ("16 runs, D / N from 20 to 200",), lambda d: d.runs - 5, slow=True),
    "surface, few runs": Method(
        few, ("2x4", "2x4, noise falls with size", "5x5, budgets off by 1 %"), lambda d: d.runs - 5, slow=True
    ),
    "power": Method(power, ("1x5", "1x8"), lambda d: len(d.spread) - 2),
    "parametric": Method(parametric, ("5x5", "5x9"), lambda d: d.runs - 5, slow=True),
    "envelope": Method(envelope, ("9 curves", "13 curves"), lambda d: len(d.sizes) - 3),
    "envelope, hull": Method(hull, ("9 curves", "13 curves"), lambda d: len(d.sizes) - 3),
}


def simulate(task: tuple) -> list[dict]:
    """Fits some repetitions of one design by one method.

    Returns:
        {quantity: (estimate, low, high), all minus the truth, or None without an interval} of each repetition.
    """
    method, name, first, count, resamples = task
    design, results = designs()[name], []
    for repetition in range(first, first + count):
        table, truth = design.draw(np.random.default_rng([repetition, sum(map(ord, name))]))
        intervals = {}
        for quantity, (law, where) in METHODS[method].fit(table, resamples, repetition).items():
            if quantity == "alpha" and quantity not in truth:
                continue
            if not isinstance(where, str) or where == "middle":
                where = _middle(design) if where == "middle" else where
                times = where if isinstance(where, float) else 1.0
            if isinstance(where, str):
                interval = None if law.refused else law.intervals.get(where)
                numbers = None if interval is None else np.array([law.parameters[where], *interval])
                right = truth[quantity]
            elif isinstance(where, tuple):
                interval = None if not law.surface else law.interval_at(*where)
                numbers = None if interval is None else np.log([law.predict(*where), *interval])
                right = float(np.log(design.surface.loss(*where)))
            else:
                C = times * max(design.budgets)
                interval = None if law.refused else law.interval_at(C)
                numbers = None if interval is None else np.log([float(law.predict(C)), *interval])
                right = design.value(quantity[0], times)
            intervals[quantity] = None if numbers is None else tuple(numbers - right)
        results.append(intervals)
    return results


def _middle(design: Design) -> float:
    """Returns the geometric middle of the budgets over the largest."""
    return float(np.sqrt(min(design.budgets) / max(design.budgets)))


def summary(method: str, name: str, quantity: str, found: list) -> dict:
    design = designs()[name]
    kept = np.array([row for row in found if row is not None])
    row = {"method": method, "design": name, "quantity": quantity, "n": len(kept), "refused": len(found) - len(kept)}
    if len(kept) < 2:
        return row | dict.fromkeys(("bias", "sd", "coverage", "p", "width", "known"))
    estimate, low, high = kept.T
    inside = (low <= 0) & (high >= 0)
    deviation = float(estimate.std(ddof=1))
    freedom = METHODS[method].freedom(design)
    # The mean of the root of a chi-squared over its degrees of freedom.
    shrink = np.sqrt(2 / freedom) * np.exp(gammaln((freedom + 1) / 2) - gammaln(freedom / 2))
    ideal = 2 * student.ppf(0.975, freedom) * shrink * deviation
    return row | {
        "bias": float(estimate.mean()),
        "sd": deviation,
        "coverage": float(inside.mean()),
        "p": float(binomtest(int(inside.sum()), len(inside), 0.95).pvalue),
        "width": float((high - low).mean() / ideal),
        "known": float((high - low).mean() / (3.92 * deviation)),
    }


def reject(rows: list[dict]) -> None:
    """Marks the rows whose coverage is not 95 %, by Holm's procedure."""
    tested = sorted((row for row in rows if row["p"] is not None), key=lambda row: row["p"])
    going = True
    for rank, row in enumerate(tested):
        going = going and row["p"] < LEVEL / (len(tested) - rank)
        row["rejected"] = going
    for row in rows:
        row.setdefault("rejected", None)


def write_plan() -> None:
    """Writes the runs that configs/demo.yaml plans, so that a machine without torch can simulate them."""
    from linnet.config import parse, read_yaml
    from linnet.study.config import StudyConfig
    from linnet.study.ladder import plan

    config = parse(StudyConfig, read_yaml(HERE.parent / "configs" / "demo.yaml"))
    runs = plan(config, check_data=False).runs
    rows = [(run.architecture, run.size, run.budget, run.params_non_embedding, run.tokens, run.flops) for run in runs]
    table = pd.DataFrame(rows, columns=["architecture", "run", "budget", "N", "D", "C"])
    table.sort_values(["architecture", "budget", "N"]).to_csv(PLAN, index=False, lineterminator="\n")


def shown(row: dict) -> list[str]:
    if row["coverage"] is None:
        return [row["method"], row["design"], row["quantity"], str(row["n"]), str(row["refused"]), *["-"] * 6]
    numbers = [f"{row['bias']:+.4f}", f"{row['sd']:.4f}", f"{row['coverage']:.1%}", "no" if row["rejected"] else "yes"]
    numbers += [f"{row['width']:.2f}", f"{row['known']:.2f}"]
    return [row["method"], row["design"], row["quantity"], str(row["n"]), str(row["refused"]), *numbers]


def write_results(new: pd.DataFrame) -> None:
    """Replaces the rows of some cells in the results, and writes the table of the docs."""
    cell = ["method", "design"]
    old = pd.read_csv(RESULTS)
    kept = ~old[cell].apply(tuple, axis=1).isin(set(new[cell].apply(tuple, axis=1)))
    table = pd.concat([old[kept], new], ignore_index=True)
    places = {name: i for i, name in enumerate([*METHODS, *designs()])}
    table = table.sort_values(cell, key=lambda column: column.map(places), kind="stable")
    rows = table.replace({np.nan: None}).to_dict("records")
    reject(rows)
    pd.DataFrame(rows).to_csv(RESULTS, index=False, lineterminator="\n")
    write_page(rows)


HEADER = ["method", "design", "", "n", "refused", "bias", "sd", "coverage", "95 %?", "width", "known"]


def write_page(rows: list[dict]) -> None:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(shown(row)) + " |" for row in rows]
    block = "<!-- coverage -->\n" + "\n".join(lines) + "\n<!-- /coverage -->"
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(r"<!-- coverage -->.*?<!-- /coverage -->", lambda _: block, text, flags=re.S)
    PAGE.write_text(text, encoding="utf-8")


def chosen(options) -> list[tuple[str, str]]:
    """Returns the pairs of method and design to simulate."""
    methods = options.methods.split(";") if options.methods else list(METHODS)
    names = options.designs.split(";") if options.designs else list(designs())
    unknown = [*set(methods) - set(METHODS), *set(names) - set(designs())]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; methods: {'; '.join(METHODS)}; designs: {'; '.join(designs())}")
    return [(method, name) for method in methods for name in METHODS[method].designs if name in names]


def run(cells: list[tuple[str, str]], options) -> dict[tuple[str, str], list[dict]]:
    tasks = []
    for method, name in cells:
        slow = METHODS[method].slow
        count = options.repetitions or ((200 if slow else 1000) if options.full else (20 if slow else 100))
        step = 2 if slow else CHUNK
        tasks += [(method, name, i, min(step, count - i), options.bootstrap) for i in range(0, count, step)]
    tasks.sort(key=lambda task: not METHODS[task[0]].slow)  # slow tasks first, so that no worker ends with one
    results: dict[tuple[str, str], list[dict]] = {cell: [] for cell in cells}
    with ProcessPoolExecutor(options.workers) as pool:
        for done, (task, part) in enumerate(zip(tasks, pool.map(simulate, tasks), strict=True), 1):
            results[task[:2]] += part
            print(f"\r{done}/{len(tasks)} tasks", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def unstable(repetition: int) -> float:
    """Returns how far the ends of a table's intervals of a, b and alpha move, as a share of their width.

    Intervals of 1,000 draws are compared with those of 4,000 draws and with those of another seed.
    """
    names = ("4x4", "5x5", "5x7", "5x9, one diverged", "10 runs, 21 checkpoints")
    table, _ = designs()[names[repetition % len(names)]].draw(np.random.default_rng([repetition, 7]))
    ends = []
    for resamples, seed in ((1000, 0), (4000, 0), (1000, 1)):
        laws = isoflop(table, resamples, seed).values()
        ends.append([law.intervals.get(name, (np.nan, np.nan)) for law, name in laws])
    first, *others = np.array(ends)
    return float(np.nanmax(np.abs(np.array(others) - first) / np.ptp(first, axis=1)[:, None]))


def metric_at(loss):
    """The metric of `downstream`: a sigmoid of the loss above the chance of a quarter."""
    return 0.25 + 0.75 * expit(4 * (2.6 - loss))


def downstream(runs: int, repetition: int, resamples: int) -> tuple[bool, bool]:
    """Whether the intervals of L(C) at 3e19 FLOPs and of the metric at a loss of 2.9 hold the truth.

    Runs of 1e18 to 1e21 FLOPs have four checkpoints each; the loss of a run is off by 0.3 %, its metric by 0.01.
    """
    generator, rows = np.random.default_rng(repetition), []
    for run, compute in enumerate(np.geomspace(1e18, 1e21, runs)):
        law, shift = 57 * compute**-0.0675 * np.exp(0.003 * generator.normal()), 0.01 * generator.normal()
        for share in (0.4, 0.6, 0.8, 1.0):
            row = {
                "run": run,
                "C": compute * share,
                "loss": law * share**-0.05,
                "last": share == 1,
                "questions": np.nan,
            }
            rows.append(row | {"value": metric_at(row["loss"]) + shift})
    fit = fit_downstream(pd.DataFrame(rows), 0.25, bootstrap=resamples, seed=repetition)
    law, metric = fit.law.interval_at(3e19), fit.transfer.interval_at(2.9)
    return law[0] < 57 * 3e19**-0.0675 < law[1], metric[0] < metric_at(2.9) < metric[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="1,000 repetitions (parametric: 200)")
    parser.add_argument("--repetitions", type=int, help="per design")
    parser.add_argument("--bootstrap", type=int, default=400, help="resamples per fit")
    parser.add_argument("--methods", default="", help="with semicolons between")
    parser.add_argument("--designs", default="", help="with semicolons between")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--csv", action="store_true", help=f"update {RESULTS.name} and the table in docs")
    parser.add_argument("--plan", action="store_true", help=f"only write {PLAN.name} from configs/demo.yaml")
    parser.add_argument("--stability", type=int, help="number of tables whose intervals are made three times")
    parser.add_argument("--downstream", type=int, help="number of tables of a metric")
    parser.add_argument("--runs", type=int, default=5, help="runs of each of these tables")
    options = parser.parse_args()
    if options.plan:
        return write_plan()
    if options.downstream:
        covered = [downstream(options.runs, table, options.bootstrap) for table in range(options.downstream)]
        law, metric = np.mean(covered, axis=0)
        return print(json.dumps({"tables": len(covered), "runs": options.runs, "L(C)": law, "metric": metric}))
    if options.stability:
        with ProcessPoolExecutor(options.workers) as pool:
            moves = np.array(list(pool.map(unstable, range(options.stability))))
        return print(
            json.dumps({"tables": len(moves), "within 10 %": float((moves < 0.1).mean()), "most": moves.max()})
        )
    start = time.perf_counter()
    rows = []
    for (method, name), found in run(chosen(options), options).items():
        quantities = ["a"] if name == "demo" else found[0]
        rows += [summary(method, name, quantity, [one[quantity] for one in found]) for quantity in quantities]
    reject(rows)
    table = [HEADER, *map(shown, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if options.csv:
        write_results(pd.DataFrame(rows).assign(commit=provenance.commit()))
    times = os.times()
    record = {
        "rows": len(rows),
        "rejected": sum(bool(row["rejected"]) for row in rows),
        "wider_than_1.3": sum(row["width"] is not None and row["width"] > 1.3 for row in rows),
        "seconds": round(time.perf_counter() - start),
        "cpu_seconds": round(times.user + times.children_user),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
