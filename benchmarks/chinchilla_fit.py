"""Fits the digitised Chinchilla points and compares with the published refit of Besiroglu et al. (2024).

    python benchmarks/chinchilla_fit.py POINTS.csv [--bootstrap 4000] [--full-grid]

POINTS.csv has Epoch AI's digitisation of Hoffmann et al.'s Figure 4 (columns "Model Size", "Training FLOP", "loss"; 245
rows, of which the five of highest loss are left out). The last line is JSON.
"""

import argparse
import json
import time

import numpy as np

from linnet.laws.fit import assign_budgets, filter_table, fit_isoflop, fit_parametric, load_table

PUBLISHED = {
    "E": (1.81686, 0.0257, (1.769, 1.871)),
    "A": (482.006, 124.5, (285.2, 743.6)),
    "B": (2085.434, 1293, (1042.4, 5810.3)),
    "alpha": (0.347813, 0.0154, (0.317, 0.373)),
    "beta": (0.365854, 0.0206, (0.331, 0.415)),
}
"""Value, standard deviation and 95 % interval of a bootstrap of 4,000 resamples."""

BUDGETS = [6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("points")
    parser.add_argument("--bootstrap", type=int, default=4000)
    parser.add_argument("--full-grid", action="store_true")
    options = parser.parse_args()
    table, _ = filter_table(load_table(options.points)[0], max_loss=3.42)

    start = time.perf_counter()
    starts = "full" if options.full_grid else "coarse"
    fit = fit_parametric(table, starts=starts, bootstrap=options.bootstrap, seed=42, hold_out=1e21)
    seconds = time.perf_counter() - start
    print(f"{fit.rows} rows, objective {fit.objective:.7e}, {fit.starts_at_optimum} of {fit.starts} starts reach it")
    print(f"{'':6} {'here':>10} {'sd':>9} {'95 %':>21}   {'published':>10} {'sd':>8} {'95 %':>20}")
    for name, (value, deviation, (low, high)) in PUBLISHED.items():
        ours = "{:.5g} to {:.5g}".format(*fit.intervals[name])
        theirs = f"{low:g} to {high:g}"
        print(
            f"{name:6} {fit.parameters[name]:10.6g} {fit.deviations[name]:9.4g} {ours:>21}   "
            f"{value:10.6g} {deviation:8.4g} {theirs:>20}"
        )
    low, high = np.percentile(fit.N_opt.draws[:, 1], [10, 90])
    print(f"a {fit.parameters['a']:.5f}, sd {fit.deviations['a']:.4f}, 80 % {low:.4f} to {high:.4f}")
    N, D = float(fit.N_opt.predict(5.76e23)), float(fit.D_opt.predict(5.76e23))
    between = "{:.3g} to {:.3g}".format(*fit.N_opt.interval_at(5.76e23))
    print(f"at 5.76e23 FLOPs: N_opt {N:.4g} (95 % {between}), D_opt {D:.5g}, {D / N:.2f} tokens per parameter")
    test = fit.held_out
    print(f"fitted to {test.trained} rows up to {test.c_max:.3g} FLOPs, {test.tested} above: mean error "
          f"{test.mean_error:.3%}, largest {test.max_error:.2%}, log-RMSE {test.rms_log_error:.5f}")  # fmt: skip

    isoflop = fit_isoflop(table, *assign_budgets(table, BUDGETS), bootstrap=1000, seed=42)
    print("IsoFLOP N_opt:", ", ".join(f"{group.N_opt:.4g}" for group in isoflop.groups))
    print(f"  {isoflop.N_opt.text()}, {isoflop.D_opt.text()}; a in [{isoflop.intervals['a'][0]:.4f}, "
          f"{isoflop.intervals['a'][1]:.4f}]")  # fmt: skip
    record = {"seconds": round(seconds, 1), "bootstrap": options.bootstrap, "objective": fit.objective}
    print(json.dumps({**record, **fit.parameters, "isoflop_a": isoflop.N_opt.exponent}))


if __name__ == "__main__":
    main()
