"""`linnet fit --downstream`: compute to loss to the metric of a task, from a table of evaluated checkpoints."""

import json
from pathlib import Path
from typing import Any

import typer

from linnet.laws.fit import fit_downstream
from linnet.laws.fit.law import plain
from linnet.laws.fit.table import load_points


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
        one = Series(
            str(task), "", float(known.iloc[0]) if len(known) else None, rows[list(COLUMNS)].reset_index(drop=True)
        )
        for name, own in rows.groupby("architecture", sort=False):
            one.fits[str(name)] = fit_downstream(own, one.chance, bootstrap=bootstrap, seed=seed)
        series.append(one)
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
    found = [
        f"{one.title}, {name}: {note}"
        for one in series
        for name, fit in one.fits.items()
        for note in (*fit.law.notes, *fit.transfer.notes)
    ]
    return list(dict.fromkeys(found))


def _as_json(series: list) -> dict[str, Any]:
    return {
        one.evaluation: {name: {**plain(fit), "refused": fit.refused} for name, fit in one.fits.items()}
        for one in series
    }


def _write(path: Path, points, series: list, out: Path) -> Path:
    from linnet.config import FIGURES, FITS, check_study
    from linnet.report.downstream.figures import write_points

    check_study(FIGURES + FITS, "fit")
    return write_points(path, points, series, out)
