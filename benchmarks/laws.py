"""Checks the further laws on tables made from known ones: are the numbers found, and do intervals cover them?

    python benchmarks/laws.py                       200 repetitions, about 15 minutes on one core
    python benchmarks/laws.py --repetitions 20      the short form, whose bars allow for so few repetitions

Prints a row per check with its seed, what was found and the bar. The exit status is 1 if a bar is not met.
"""

import argparse
import math
import sys
import time

import numpy as np
import pandas as pd
from scipy import stats

from linnet.laws.further import Options, fit_laws

C_STATE = -0.28
CLASSES = {  # class: (ln of its offset k, state numbers of a model of 1e8 parameters, share of attention)
    "attention": (7.56, 2.4e7, 1.0),
    "half": (7.36, 1.2e7, 1 / 2),
    "quarter": (7.14, 6.0e6, 1 / 4),
    "twelfth": (6.82, 2.0e6, 1 / 12),
    "recurrent": (6.46, 4.0e5, 0.0),
}
BUDGETS = (4e18, 8e18, 2e19, 4e19, 8e19)
SPREADS = (-1.4, -0.9, -0.45, 0.0, 0.45, 0.9, 1.4)


def state_table(seed: int, noise: float = 0.003, slopes: dict[str, float] | None = None) -> pd.DataFrame:
    """A table with ln P* = k + c ln M for five classes, c shared unless `slopes` gives one to a class.

    M is proportional to N^0.6 in each class. Sizes are centred on N*, and ln P is a parabola in ln N around it whose
    curvature grows with the share of attention.
    """
    random, rows = np.random.default_rng(seed), []
    for name, (_, state, share) in CLASSES.items():
        for C in BUDGETS:
            best, centre = 0.09 * C**0.5, optimal_loss(name, C, (slopes or {}).get(name, C_STATE))
            for spread in SPREADS:
                N = best * math.exp(spread)
                M = state * (N / 1e8) ** 0.6
                loss = (centre + curvature(share) * spread**2) * (1 + noise * random.standard_normal())
                row = {"run": f"run-{len(rows)}", "architecture": name, "budget": C, "N": N, "D": C / 6 / N, "C": C}
                row |= {"loss": loss, "attention_share": share, "seq_len": 8192.0, "N_total": math.nan}
                rows.append(row | {"state_fixed": M * (1 - share), "state_dynamic": M * share})
    return pd.DataFrame(rows)


def optimal_loss(name: str, C: float, c: float = C_STATE) -> float:
    """The true ln P* of a class at a budget: k + c ln M, with slopes that meet at N = 5e8."""
    k, state, _ = CLASSES[name]
    return k + C_STATE * math.log(state * 5.0**0.6) + c * 0.6 * math.log(0.09 * C**0.5 / 5e8)


def curvature(share: float) -> float:
    """Curvature of ln P in ln N at a share of attention."""
    return 0.05 + 0.03 * share


def share_table(seed: int, best: float = 0.25, noise: float = 0.003) -> pd.DataFrame:
    """A table whose P*(rho) is a parabola with its minimum at `best`, at every budget."""
    random, rows = np.random.default_rng(seed), []
    for share in (0.0, 1 / 12, 1 / 4, 1 / 2, 1.0):
        for C in BUDGETS:
            size = 0.09 * C**0.5
            centre = 2.4 - 0.05 * math.log(C / 4e18) + math.log1p(0.6 * (share - best) ** 2)
            for spread in SPREADS:
                N = size * math.exp(spread)
                loss = (centre + 0.06 * spread**2) * (1 + noise * random.standard_normal())
                row = {"run": f"run-{len(rows)}", "architecture": f"share-{share:.2f}", "budget": C, "N": N}
                row |= {"D": C / 6 / N, "C": C, "loss": loss, "attention_share": share, "N_total": math.nan}
                rows.append(row)
    return pd.DataFrame(rows)


def surface_table(seed: int, noise: float = 0.003, **changes: tuple[float, ...]) -> pd.DataFrame:
    """A ladder of two architectures with given surfaces (E, A, B, alpha, beta); by default both the same exponents."""
    surfaces = {"one": (1.8, 480.0, 2100.0, 0.35, 0.37), "two": (1.8, 520.0, 2000.0, 0.35, 0.37)} | changes
    random, rows = np.random.default_rng(seed), []
    for name, (E, A, B, alpha, beta) in surfaces.items():
        for C in np.geomspace(1e18, 1e20, 5):
            G = (alpha * A / beta / B) ** (1 / (alpha + beta))
            best = G * (C / 6) ** (beta / (alpha + beta))
            for spread in SPREADS:
                N = best * math.exp(spread)
                D = C / 6 / N
                loss = (E + A / N**alpha + B / D**beta) * (1 + noise * random.standard_normal())
                row = {"run": f"run-{len(rows)}", "architecture": name, "budget": C, "N": N, "D": D, "C": C}
                rows.append(row | {"loss": loss, "N_total": math.nan})
    return pd.DataFrame(rows)


def passes_table(seed: int, R_D: float = 15.4, noise: float = 0.003) -> pd.DataFrame:
    """Runs of a known surface on 1 to 40 passes over three texts; sizes stay at or below the best for the text."""
    random, rows = np.random.default_rng(seed), []
    E, A, B, alpha, beta = 1.8, 480.0, 2100.0, 0.35, 0.37
    for U in (1e8, 3e8, 1e9):
        for N in (2e6, 6e6, 2e7):
            for passes in (0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 40.0):
                D = passes * U
                unique = min(U, D)
                worth = unique + unique * R_D * (1 - math.exp(-(D / unique - 1) / R_D))
                loss = (E + A / N**alpha + B / worth**beta) * (1 + noise * random.standard_normal())
                row = {"run": f"run-{len(rows)}", "architecture": "one", "budget": math.nan, "N": N, "D": D}
                rows.append(row | {"C": 6 * N * D, "loss": loss, "unique_tokens": U, "N_total": math.nan})
    return pd.DataFrame(rows)


def over_training_table(seed: int, noise: float = 0.003) -> pd.DataFrame:
    """Runs of L = E + (a M^eta + b M^-eta) C^-eta at four budgets and five ratios M."""
    random, rows = np.random.default_rng(seed), []
    E, a, b, eta = OVER_TRAINED
    for C in np.geomspace(1e17, 1e19, 4):
        for M in (5.0, 20.0, 80.0, 320.0, 640.0):
            N = math.sqrt(C / 6 / M)
            loss = (E + (a * M**eta + b * M**-eta) * C**-eta) * (1 + noise * random.standard_normal())
            row = {"run": f"run-{len(rows)}", "architecture": "one", "budget": C, "N": N, "D": M * N, "C": C}
            rows.append(row | {"loss": loss, "N_total": math.nan})
    return pd.DataFrame(rows)


OVER_TRAINED = (1.8, 140.0, 240.0, 0.12)


def fit_one(table: pd.DataFrame, law: str, bootstrap: int, **options):
    """Returns one law of a table."""
    (found,), _ = fit_laws(table, [law], Options(bootstrap=bootstrap, **options))
    if found.refused:
        raise SystemExit(f"{law} was refused: {found.refused}")
    return found


def covered(estimates, truth: float) -> int:
    return sum(low <= truth <= high for low, high in (one.interval for one in estimates))


def exact(successes: int, trials: int, rate: float = 0.95) -> float:
    """Two-sided p-value of "the coverage is `rate`"."""
    return float(stats.binomtest(successes, trials, rate).pvalue)


def reaches(hits: int, trials: int, rate: float) -> bool:
    """Whether a share of successes is at least `rate`; in the short form, whether it does not contradict that."""
    few = trials < 50 and stats.binomtest(hits, trials, rate, "less").pvalue > 0.01
    return hits / trials >= rate or few


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--bootstrap", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.repetitions)
    begun, ok = time.process_time(), True
    print(f"{given.repetitions} repetitions, seeds {seeds[0]} to {seeds[-1]}, {given.bootstrap} resamples each")

    def row(check: str, found: str, bar: str, met: bool) -> None:
        nonlocal ok
        ok &= met
        print(f"{check:<44} {found:<46} bar: {bar:<26} {'met' if met else 'NOT MET'}", flush=True)

    def coverage(check: str, estimates, truth: float, bar: str = "") -> None:
        hits, n = covered(estimates, truth), len(estimates)
        if bar:
            row(
                check,
                f"{hits} of {n}, {hits / n:.1%}",
                bar,
                0.93 <= hits / n <= 0.97 or (n < 200 and exact(hits, n) > 0.01),
            )
        else:
            row(check, f"{hits} of {n}, {hits / n:.1%}", "95 %, exact test at 1 %", exact(hits, n) > 0.01)

    c = [fit_one(state_table(seed), "state", given.bootstrap, seed=seed) for seed in seeds]
    values = np.array([law.estimate("c").value for law in c])
    mean = values.mean()
    row("state: mean c (truth -0.28)", f"{mean:.4f}, sd {values.std():.4f}", "within 0.01", abs(mean - C_STATE) <= 0.01)
    near = (np.abs(values - C_STATE) <= 0.01).mean()
    row("state: c of one table within 0.01", f"{near:.1%}", "95 %", near >= 0.95)
    coverage("state: intervals of c", [law.estimate("c") for law in c], C_STATE, "93 to 97 % of 200")
    false = np.mean([law.tests[0].p < 0.05 for law in c])
    row("state: equal slopes flagged", f"{false:.1%}", "at most 10 %", false <= 0.10)
    steep = {"recurrent": -0.36, "twelfth": -0.34}
    flagged = [fit_one(state_table(seed, slopes=steep), "state", 0).tests[0].p < 0.05 for seed in seeds]
    row("state: unequal slopes flagged", f"{np.mean(flagged):.1%}", "90 %", reaches(sum(flagged), len(flagged), 0.9))

    best = [
        fit_one(share_table(seed), "share", given.bootstrap, seed=seed).estimate("rho*", "all budgets")
        for seed in seeds
    ]
    off = np.array([abs(one.value - 0.25) for one in best])
    row(
        "share: all budgets, |rho* - 0.25|",
        f"mean {off.mean():.4f}, largest {off.max():.4f}",
        "within 0.03",
        off.max() <= 0.03,
    )
    coverage("share: intervals of rho*", best, 0.25)

    # The truth of gap(-0.5): P* (exp(c2 ln(0.5)^2) - 1), with the true P* of the class and budget.
    found, truths = [], []
    for seed in seeds:
        law = fit_one(state_table(seed), "gap", given.bootstrap, seed=seed)
        for point in law.points["gaps"]:
            if point["delta"] == -0.5:
                found.append(point)
                bend = math.expm1(curvature(CLASSES[point["architecture"]][2]) * math.log(0.5) ** 2)
                truths.append(math.exp(optimal_loss(point["architecture"], point["C"])) * bend)
    ratios = np.array([point["gap"] for point in found]) / truths
    bias = abs(np.mean(ratios) - 1)
    row("gap: mean gap(-0.5) over the truth", f"{np.mean(ratios):.4f}", "within 2 %", bias <= 0.02)
    print(
        f"{'gap: one gap(-0.5), without a bar':<44} typically off by {np.median(np.abs(ratios - 1)):.1%} at this noise"
    )
    hits = np.mean([point["low"] <= truth <= point["high"] for point, truth in zip(found, truths, strict=True)])
    row(
        "gap: intervals of gap(-0.5)",
        f"{hits:.1%} of {len(found)} (one table: dependent)",
        "93 to 97 %",
        0.93 <= hits <= 0.97 or len(seeds) < 50,
    )

    laws = [fit_one(surface_table(seed), "joint", given.bootstrap, seed=seed) for seed in seeds]
    coverage("joint: a difference of equal exponents", [law.estimate("a difference", "one - two") for law in laws], 0.0)
    false = np.mean([next(t for t in law.tests if t.name.startswith("shared exp")).p < 0.05 for law in laws])
    row(
        "joint: equal exponents rejected",
        f"{false:.1%}",
        "at most 5 %",
        reaches(len(laws) - round(false * len(laws)), len(laws), 0.95),
    )
    other = {"two": (1.8, 480.0, 2100.0, 0.35, 0.33)}
    found = [
        fit_one(surface_table(seed, **other), "joint", given.bootstrap, seed=seed)
        for seed in seeds[: max(20, len(seeds) // 4)]
    ]
    power = np.mean([next(t for t in law.tests if t.name.startswith("shared exp")).p < 0.05 for law in found])
    row(
        "joint: beta 0.37 against 0.33 rejected",
        f"{power:.1%}",
        "90 %",
        reaches(round(power * len(found)), len(found), 0.9),
    )

    law = [fit_one(surface_table(seed), "allocation", given.bootstrap, seed=seed) for seed in seeds]
    coverage("allocation: a difference", [one.estimate("a difference", "one - two") for one in law], 0.0)

    law = [fit_one(over_training_table(seed), "over-training", given.bootstrap, seed=seed) for seed in seeds]
    coverage("over-training: intervals of eta", [one.estimate("eta", "one") for one in law], OVER_TRAINED[3])
    few = seeds[: max(20, len(seeds) // 10)]
    law = [fit_one(passes_table(seed), "data-constrained", given.bootstrap, seed=seed) for seed in few]
    coverage("data-constrained: intervals of R_D", [one.estimate("R_D", "one") for one in law], 15.4)

    print(f"{time.process_time() - begun:.0f} CPU seconds")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
