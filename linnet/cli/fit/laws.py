"""`linnet fit --law`: fits the further laws of a table (`linnet.laws.further`) and prints them."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.cli.fit.page import size_column
from linnet.config import FIGURES, FITS, check_study, nearest
from linnet.laws.fit import fit_downstream
from linnet.laws.fit.law import plain
from linnet.laws.fit.table import CONVENTIONS, load_points
from linnet.options import working
from linnet.report.units import p_equals, p_value

if TYPE_CHECKING:
    from linnet.laws.further import Estimate, LawFit, Options


def problems_of(laws: list[str], of: str, context: int | None, method: str) -> list[str]:
    """Returns the problems of the options that belong to laws."""
    if not laws:
        return []
    from linnet.laws.further import LAWS

    known = [*LAWS, "all"]
    problems = [f"--law {name!r}: unknown; {nearest(name, known)}" for name in laws if name not in known]
    if of not in ("loss", "perplexity"):
        problems.append(f"--of {of!r}: unknown; use loss or perplexity")
    if context is not None and context < 1:
        problems.append(f"--context {context}: not positive; give tokens, such as 8192")
    if method != "all":
        problems.append(f"--method {method!r}: laws have methods of their own; leave out --method or --law")
    return problems


def fit_and_show(rows, source: Path, laws: list[str], options: "Options", notes: list[str], as_json: bool) -> None:
    """Fits the laws to the rows of a table, and prints them as text or JSON."""
    from linnet.laws.further import fit_laws

    with working("fitting") as show_place:
        fitted, unsupported = fit_laws(rows, laws, options, show_place)
    if as_json:
        values = {law.law: law.to_json() for law in fitted}
        shown = {"table": str(source), "flops": options.flops, "count": options.count, "notes": notes}
        shown |= {"laws": values, "not_supported": unsupported}
        typer.echo(json.dumps(shown, allow_nan=False))
        return
    console = Console(highlight=False)
    counted = f"N is {size_column(rows.attrs.get('columns', {}), options.count)}, C {CONVENTIONS[options.flops]}"
    console.print(f"[bold]{escape(str(source))}[/]: {len(rows)} rows; {counted}, in FLOPs")
    for note in notes:
        _line(console, note)
    for law in fitted:
        show(law, console)
    if unsupported:
        console.print("\n[bold yellow]Not supported by this table[/]")
        for name, reasons in unsupported.items():
            console.print(f"  {escape(name)}: {escape('; '.join(dict.fromkeys(reasons)))}", soft_wrap=True)


def show(law: "LawFit", console: Console) -> None:
    """Prints one law: its equation and source, its numbers, its tests, and what was refused."""
    console.print(f"\n[bold]{escape(law.title)}[/] ({escape(law.law)})", soft_wrap=True)
    console.print(f"  {escape(law.equation)}", soft_wrap=True)
    _line(console, law.source)
    for reason in law.refused:
        console.print(f"  [yellow]refused[/]: {escape(reason)}", soft_wrap=True)
    if law.estimates:
        console.print(estimates(law.estimates))
    for test in law.tests:
        line = f"{test.name}: {p_equals(test.p)}: {test.conclusion}"
        console.print(f"  {escape(line)}", soft_wrap=True)
    for test in law.predictions:
        error = f"mean error {test.mean_error:.2%} on {test.tested}" if test.mean_error is not None else "no test"
        why = f" ({test.refused})" if test.refused else ""
        _line(console, f"held out, {test.name}: {error}{why}")
    if law.estimates and any(estimate.interval for estimate in law.estimates):
        _line(console, f"intervals: 95 %, {law.scheme}")
    for note in law.notes:
        _line(console, note)


def estimates(rows: "list[Estimate]") -> Table:
    """Returns the numbers of a law as a table."""
    tested = any(estimate.p is not None for estimate in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), header_style="dim")
    for column in ("", "of", "value", "95 %", *(["p"] if tested else []), ""):
        table.add_column(column, overflow="fold")
    for estimate in rows:
        value = "[yellow]refused[/]" if estimate.value is None else number(estimate.value)
        ends = "" if estimate.interval is None else f"{number(estimate.interval[0])} to {number(estimate.interval[1])}"
        p = [] if not tested else ["" if estimate.p is None else p_value(estimate.p)]
        note = escape(estimate.refused or estimate.note)
        table.add_row(escape(estimate.name), escape(estimate.of), value, ends, *p, note)
    return table


def number(value: float) -> str:
    """Four digits, in a power of ten if the number is large or small."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3e}"
    return f"{value:.4g}" if math.isfinite(value) else "-"


def _line(console: Console, text: str) -> None:
    console.print(f"  [dim]{escape(text)}[/]", soft_wrap=True)


# `linnet fit --downstream`: compute to loss to the metric of a task, from a table of evaluated checkpoints.


def fit_points(
    path: Path,
    columns: dict[str, str],
    chance: float | None,
    bootstrap: int,
    seed: int,
    out: Path | None,
    as_json: bool,
    reading: dict[str, Any],
) -> None:
    """Fits every task and architecture of a table, and prints the fits as text or JSON.

    Args:
        reading: exclude, loss_unit and keep of `load_points`.

    Raises:
        ConfigError: the table cannot be read, or the page cannot be written.
    """
    from linnet.report.downstream import COLUMNS, Series, lines

    points, notes = load_points(path, columns, chance, **reading)
    points["folder"] = ""
    series = []
    for task, rows in points.groupby("task", sort=False):
        known = rows["chance"].dropna()
        guessed = float(known.iloc[0]) if len(known) else None
        metric = Series(str(task), "", guessed, rows[list(COLUMNS)].reset_index(drop=True))
        for name, group in rows.groupby("architecture", sort=False):
            metric.fits[str(name)] = fit_downstream(group, metric.chance, bootstrap=bootstrap, seed=seed)
        series.append(metric)
    page = _write(path, points, series, out) if out is not None else None
    if as_json:
        typer.echo(json.dumps({"table": str(path), "notes": notes, "tasks": _as_json(series)}, allow_nan=False))
        return
    typer.echo(f"{path}: {len(points)} points of {points['run'].nunique()} runs; L is the loss in nats, C in FLOPs")
    for line in [*notes, *lines(series), *_remarks(series)]:
        typer.echo(f"  {line}")
    if page is not None:
        typer.echo(str(page))


def _remarks(series: list) -> list[str]:
    """Returns the notes of both steps, once each."""
    notes = [
        f"{metric.title}, {name}: {note}"
        for metric in series
        for name, fit in metric.fits.items()
        for note in (*fit.law.notes, *fit.transfer.notes)
    ]
    return list(dict.fromkeys(notes))


def _as_json(series: list) -> dict[str, Any]:
    return {
        metric.evaluation: {name: {**plain(fit), "refused": fit.refused} for name, fit in metric.fits.items()}
        for metric in series
    }


def _write(path: Path, points, series: list, out: Path) -> Path:
    from linnet.report.downstream import write_points

    check_study(FIGURES + FITS, "fit")
    return write_points(path, points, series, out)
