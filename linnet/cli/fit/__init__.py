"""`linnet fit`: scaling laws from a table of runs or a study."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Annotated

import typer

from linnet.config import FITS, ConfigError, check_study, gather, nearest, refuse
from linnet.laws import ESTIMATES
from linnet.options import AsJson, is_given, options, working

METHODS = ("isoflop", "envelope", "power", "parametric")
CHOICES = {
    "method": ("all", "power", "isoflop", "envelope", "parametric"),
    "count": ("non-embedding", "total"),
    "flops": ("exact", "paper", "causal", "6nd", "004"),
    "window": ("auto", "all", "sizes", "loss"),
    "envelope": ("minimum", "hull"),
    "unit": ("flops", "pf-days"),
    "objective": ("log", "raw"),
    "loss-unit": ("nats", "bits", "perplexity", "any"),
}
_PARABOLAS = {"allocation", "efficiency", "gap", "state", "share", "batch"}
USED_BY = {
    "method": {*METHODS, *ESTIMATES},
    "window": {"isoflop"},
    "envelope": {"envelope"},
    "keep-ends": {"envelope"},
    "smooth": {"envelope"},
    "full-grid": {"parametric"},
    "objective": {"parametric", "over-training"},
    "delta": {"parametric", "over-training"},
    "predict": {"parametric"},
    "unit": {*METHODS},
    "hold-out": {*METHODS, "joint", "over-training"},
    "budgets": {"isoflop", "power", *_PARABOLAS},
    "best-of": {*METHODS, *ESTIMATES},
    "count": {*METHODS, *ESTIMATES},
    "flops": {*METHODS, *ESTIMATES},
    "of": {"allocation"},
    "context": {"state", "share"},
    "reference": {"topology", "state", "efficiency"},
    "law": {*ESTIMATES},
    "chance": {"downstream"},
    "out": {"downstream"},
}
"""Option -> the methods and laws ("downstream" for `--downstream`) that it changes. All others change all of them."""

Laws = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Fit a further law in place of the methods: {', '.join(ESTIMATES)}; [bold]all[/] fits those that the "
        "table supports and says why not the others. May be given again.",
        metavar="NAME",
    ),
]


@options
def fit(
    context_of: typer.Context,
    table: Path,
    *,
    method: str = "all",
    columns: list[str] | None = None,
    max_loss: float | None = None,
    min_tokens_per_param: float | None = None,
    exclude: list[str] | None = None,
    best_of: bool = False,
    loss_unit: str | None = None,
    budgets: str | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
    count: str = "non-embedding",
    flops: str = "exact",
    hold_out: float | None = None,
    window: str = "auto",
    envelope: str = "minimum",
    keep_ends: bool = False,
    smooth: int | None = None,
    full_grid: bool = False,
    objective: str = "log",
    delta: float | None = None,
    unit: str = "flops",
    law: Laws = None,
    of: str = "loss",
    context: int | None = None,
    reference: str | None = None,
    architectures: str | None = None,
    predict: list[str] | None = None,
    downstream: bool = False,
    chance: float | None = None,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Fit scaling laws: L(C), N_opt(C), D_opt(C), with intervals and a held-out test.

    A law that the data do not support is refused with the reason, such as an
    optimum at the edge of the trained sizes, or fewer than three budgets.

    [bold]linnet fit studies/demo[/]

    [bold]linnet fit runs.csv --columns "N=Model Size,C=FLOP" --method parametric --json[/]

    [bold]linnet fit studies/demo --law all[/]

    Args:
        table (TABLE|STUDY): A CSV, JSONL or JSON file of runs (or the same with .gz), or a study folder.
        method (METHOD): [bold]isoflop[/]: a parabola in each budget.
            [bold]envelope[/]: the lower edge of training curves. [bold]power[/]: the lowest loss of each budget.
            [bold]parametric[/]: L = E + A/N^alpha + B/D^beta. [bold]all[/] of them.
        columns (NAME=COLUMN,...): Which column is what:
            N, D, C, loss, architecture, run, N_total or budget, each with its column (D or C may be absent:
            C = 6ND). Usual names are found without it; NAME= ignores the column.
        max_loss: Leave out rows with a higher loss.
        min_tokens_per_param: Leave out rows with fewer tokens per parameter.
        exclude (COLUMN=VALUE): Leave out the rows with this value of a column, such as run=NAME; * stands for any text.
            May be given again. A column `exclude` in the table does the same.
        best_of: Keep the lowest loss of each architecture, N and D (after a sweep).
        loss_unit (UNIT): Unit of the losses: nats, bits, perplexity or any. Bits and perplexity are converted to nats;
            any is not checked (default: nats).
        budgets (1e18,3e18,...): Budgets in FLOPs; without it, found from the table.
        bootstrap: Resamples for the 95 % intervals; 0 for none.
        seed: Seed of the resampling.
        count (non-embedding|total): Which parameters N counts.
        flops (COUNT): exact: C as in the table. paper: as paper 000 counts it. causal: without the pairs of tokens that
            the causal mask of attention hides. 6nd: 6ND. 004: as paper 004 counts it.
        hold_out: What the held-out test predicts: a fraction of the points (those of largest C), or everything above
            a number of FLOPs (default: 0.2).
        window (auto|all|sizes|loss): Runs of a budget that a parabola is fitted to: all, three sizes on each side of
            the lowest run, or losses within 5 %. auto: all, if the sizes span at most 1.5 decades.
        envelope (minimum|hull): The lowest curve at each compute, or the convex hull of all.
        keep_ends: Take the envelope of all records, with its ends and without smoothing, as published.
        smooth: Records averaged along a training curve (odd) (default: a 20th of the shortest).
        full_grid: Start the parametric fit from 4,500 points instead of 675.
        objective (log|raw): Fit the surface and over-training to log or raw losses.
        delta: Threshold of the Huber loss with which the surface and over-training are fitted; inf: squares (default:
            1e-3; inf for over-training).
        unit (flops|pf-days): Unit of C in the printed laws.
        of (loss|perplexity): What the parabolas of --law allocation are fitted to.
        context: Tokens of context at which --law state counts caches (default: as in training).
        reference: Architecture that laws compare the others with (default: the first by name, or of the study).
        architectures (NAME,...): Only these architectures, with commas between.
        predict (N=..,D=..): Predict the loss at N parameters and D tokens, from the surface. May be given again.
        downstream: Fit metrics of tasks: compute to loss, and loss to the column `value`; see docs/scaling-laws.md.
        chance: With --downstream: share of right answers by guessing; without it, errors are fitted.
        out: With --downstream: write a page with figures.
        as_json: Print everything as JSON, by parameter name.
    """
    settings = {"method": method, "count": count, "flops": flops, "unit": unit, "objective": objective}
    settings |= {"window": window, "envelope": envelope}
    if loss_unit is not None:
        settings["loss-unit"] = loss_unit
    nominal, problems = _check(settings, budgets, bootstrap, hold_out, smooth)
    for name, limit in (("max-loss", max_loss), ("min-tokens-per-param", min_tokens_per_param)):
        if limit is not None and not 0 <= limit < float("inf"):
            problems.append(f"--{name} {limit:g}: give a number from 0 up, or leave it out")
    if delta is not None and not delta > 0:
        problems.append(f"--delta {delta:g}: not positive; give a threshold such as 0.001, or inf for least squares")
    typed = {name for name in USED_BY if is_given(context_of, name.replace("-", "_"))}
    problems += unused(typed, law or [], method, downstream)
    with gather(problems):
        check_study(FITS, "fit")
        from linnet.cli.fit.laws import problems_of

        problems += problems_of(law or [], of, context, method)
    if chance is not None and not 0 <= chance < 1:
        problems.append(f"--chance {chance:g}: not a share; give a number from 0 to below 1, such as 0.25")
    refuse(problems, "command line")

    from linnet.laws.fit import filter_table, parse_columns, parse_points, predictions

    def keep(rows):
        rows = rows if architectures is None else keep_architectures(rows, architectures)
        return filter_table(rows, max_loss, min_tokens_per_param)

    points = parse_points(predict or [])
    if downstream:
        from linnet.cli.fit.laws import fit_points

        reading = {"exclude": exclude or (), "loss_unit": loss_unit, "keep": keep}
        fit_points(table, parse_columns(columns or []), chance, bootstrap, seed, out, as_json, reading)
        return

    from linnet.cli.fit.laws import fit_and_show
    from linnet.laws.fit import fit_study, load_table
    from linnet.laws.fit.lse import Objective
    from linnet.laws.fit.parametric import DELTA
    from linnet.laws.fit.table import POINT
    from linnet.report.findings import conclude
    from linnet.report.records import as_study, first_architecture
    from linnet.study.collect import complete_table, load_study

    mapping = parse_columns(columns or [])
    curves = None
    reading = {"exclude": exclude or (), "best_of": best_of, "loss_unit": loss_unit, "point": POINT if law else ()}
    reading["keep"] = keep
    with working(f"reading {table}"):
        if table.is_dir() or (not table.exists() and not table.suffix):
            rows, curves, notes = load_study(table, mapping, **reading)
        else:
            rows, notes = load_table(table, mapping, **reading)
    if reference is not None and reference not in set(rows["architecture"]):
        fix = nearest(reference, sorted(set(rows["architecture"])))
        raise ConfigError([f"--reference {reference!r}: not in the table; {fix}"], "command line")
    if table.is_dir() and (law or flops in ("causal", "004")):
        rows = complete_table(rows, table)
    minimised = Objective(None if delta == float("inf") else delta, objective == "raw")
    if law:
        from linnet.laws.further import Options

        settings = {"bootstrap": bootstrap, "seed": seed, "hold_out": hold_out, "budgets": nominal}
        settings |= {
            "objective": minimised,
            "of": of,
            "context": context,
            "reference": first_architecture(table, rows) if reference is None and table.is_dir() else reference,
            "flops": flops,
            "count": count,
        }
        fit_and_show(rows, table, law, Options(**settings), notes, as_json)
        return
    if curves is not None:
        curves = curves[curves["run"].isin(rows["run"])]
    with working("fitting") as show_place:
        study = fit_study(
            rows,
            curves,
            method=method,
            bootstrap=bootstrap,
            seed=seed,
            count=count,
            flops=flops,
            hold_out=hold_out,
            budgets=nominal,
            window=window,
            envelope=envelope,
            keep_ends=keep_ends,
            smooth=smooth,
            starts="full" if full_grid else "coarse",
            objective=minimised._replace(delta=DELTA) if delta is None else minimised,
            progress=show_place,
        )
    study.notes = notes + study.notes
    predicted = predictions(study, points)
    concluded = conclude(as_study(table, rows, study))
    if as_json:
        values = _as_json(study, table, method) | ({"predictions": predicted} if points else {}) | concluded
        typer.echo(json.dumps(values, allow_nan=False))
        return
    from linnet.cli.fit.page import show, show_predictions

    show(study, str(table), len(rows), unit)
    show_predictions(predicted)
    for line in ("\nWhat you may conclude", *concluded["conclusions"]):
        typer.echo(line)


def unused(given: Container[str], laws: list[str], method: str, downstream: bool) -> list[str]:
    """Returns a problem for each given option that would change nothing of what is fitted."""
    fitted = {*ESTIMATES} if "all" in laws else {*laws} if laws else {*METHODS} if method == "all" else {method}
    what = "--downstream" if downstream else f"--law {', '.join(laws)}" if laws else f"--method {method}"
    if downstream:
        fitted = {"downstream"}
    elif not fitted & {*METHODS, *ESTIMATES}:
        return []  # an unknown name is a problem of its own
    problems = []
    for name, users in USED_BY.items():
        if name in given and not users & fitted:
            ways = [f"--method {method}" for method in METHODS if method in users]
            ways = ["--method all"] if len(ways) == len(METHODS) else ways
            ways += ["--law NAME"] if users >= {*ESTIMATES} else [f"--law {law}" for law in ESTIMATES if law in users]
            ways += ["--downstream"] if "downstream" in users else []
            other = "" if name == "method" else f", or give {' or '.join(ways)}"
            problems.append(f"--{name}: changes nothing of {what}; leave it out{other}")
    return problems


def keep_architectures(rows, names: str):
    """Returns the rows of the named architectures. Raises ConfigError if one is not in the table."""
    known = list(dict.fromkeys(rows["architecture"]))
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    problems = [
        f"--architectures {name!r}: not in the table; {nearest(name, known)}" for name in chosen if name not in known
    ]
    if problems or not chosen:
        raise ConfigError(problems or ["--architectures: names none; leave it out"], "command line")
    return rows[rows["architecture"].isin(chosen)].reset_index(drop=True)


def _check(settings: dict[str, str], budgets: str | None, bootstrap: int, hold_out: float | None, smooth: int | None):
    """Returns the budgets as numbers, and all problems of the options."""
    problems = [
        f"--{name} {value!r}: unknown; {nearest(value, CHOICES[name])}"
        for name, value in settings.items()
        if value not in CHOICES[name]
    ]
    if bootstrap < 0:
        problems.append(f"--bootstrap {bootstrap}: is negative; give a number of resamples, 0 for none")
    if hold_out is not None and not 0 < hold_out < float("inf"):
        problems.append(f"--hold-out {hold_out:g}: not positive; give a fraction such as 0.2, or FLOPs such as 1e21")
    if smooth is not None and (smooth < 1 or smooth % 2 == 0):
        problems.append(f"--smooth {smooth}: not a positive odd number; give 1 for no smoothing, or 3, 5, ...")
    nominal = []
    for part in (budgets or "").split(",") if budgets else []:
        try:
            nominal.append(float(part))
        except ValueError:
            problems.append(f"--budgets {part!r}: not a number of FLOPs; write 1e18,3e18,1e19")
            continue
        if not 0 < nominal[-1] < float("inf"):
            problems.append(f"--budgets {part!r}: not positive; give FLOPs such as 1e18")
    return nominal or None, problems


def _as_json(study, table: Path, method: str) -> dict:
    """Returns the study as plain values; with one architecture and one method, its parameters are also at the top."""
    values = {"table": str(table), "method": method, **study.to_json()}
    fits = list(study.values())
    if len(fits) == 1 and method != "all":
        only = values["architectures"][fits[0].architecture]["methods"][method]
        values = {
            "parameters": only["parameters"],
            "intervals": only["intervals"],
            "refused": fits[0].refused,
            **values,
        }
    return values
