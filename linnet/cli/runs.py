"""`linnet runs`: lists the runs on this disk, shows the last rows of one, removes some."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from linnet.config import ConfigError
from linnet.options import RULED, AsJson, Count, default_verb, echo_json, make_table, options

USUAL = ("runs", "studies")  # where train and study put their runs
SHOWN = "run status params_non_embedding step tokens loss seconds changed".split()
OPTIONAL = "changed seconds tokens params_non_embedding step".split()  # left out, in this order, of narrow terminals
HEADS = {"params_non_embedding": "params", "bits_per_byte": "bits/byte", "seconds": "time"}


runs = typer.Typer(
    cls=default_verb("list", keep_help=True),
    rich_markup_mode="rich",
    help="List the runs on this disk (the default), show the last rows of one, or remove some.",
    epilog="[bold]linnet runs[/] alone is [bold]linnet runs list[/].",
)


@runs.command(name="list")
@options
def list_runs(
    places: list[Path] | None = None,
    *,
    where: list[str] | None = None,
    sort: str = "changed",
    reverse: bool = False,
    columns: str | None = None,
    limit: Count | None = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv")] = False,
) -> None:
    """List runs: status, size, steps, losses, time. Reads the folders alone and imports none of their plugins.

    status is done, diverged, running, failed (error.txt says why), unfinished or damaged.

    [bold]linnet runs list --where status=done --where architecture=tnl --sort loss[/]

    [bold]linnet runs list studies/demo --columns run,loss,optimizer.learning_rate --csv > runs.csv[/]

    Args:
        places (PATH): Runs, folders of runs, studies, or folders of studies. Default: runs and studies.
        where (CONDITION): Only runs with status=done, architecture=tnl*, loss<4 or any key of config.yaml, such as
            optimizer.learning_rate>=1e-3; may be given again.
        sort: Key to sort by; runs without it come last.
        reverse: Largest first.
        columns: Keys to show, with commas: run,loss,seed.
        limit: Show only the last N (default: all).
        as_json: Print a list of objects in full precision.
        as_csv: Print CSV in full precision.
    """
    from linnet.runs.overview import COLUMNS, find_runs, select

    if as_json and as_csv:
        raise ConfigError(["--json, --csv: both are given; drop one"], "command line")
    named = [key.strip() for key in (columns or "").split(",") if key.strip()]
    usual = [Path(name) for name in USUAL if Path(name).is_dir()]
    folders = find_runs(places or usual)
    rows = select(folders, where or [], sort, reverse, named)
    rows = rows if limit is None else rows[-limit:]
    keys = named or list(COLUMNS)
    if as_json:
        echo_json([{key: row[key] for key in keys} for row in rows])
    elif as_csv:
        from linnet.runs.files import csv_text

        typer.echo(csv_text(keys, rows), nl=False)
    elif rows:
        shown = list(SHOWN)
        if _tokens_differ(rows):  # losses per token of such runs do not compare
            shown.insert(shown.index("loss") + 1, "bits_per_byte")
        _table(rows, named or shown, Console(soft_wrap=False), () if named else OPTIONAL)
    if not rows:
        searched = ", ".join(map(str, places or usual)) or "this folder (it has neither runs nor studies)"
        what = "no run meets all conditions" if folders else "no runs; linnet train and linnet study make some"
        Console(stderr=True, soft_wrap=True).print(f"{searched}: {what}", highlight=False, markup=False)


@runs.command()
@options
def tail(
    run: Path,
    *,
    rows: Annotated[int, typer.Option("--rows", "-n", min=1)] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the last rows of a run's record: steps, losses, evaluations and events.

    [bold]linnet runs tail runs/tnl-10m-0123456789ab --follow[/]

    Args:
        run: A run folder.
        rows: How many of the last rows.
        follow: Continue with new rows until the run ends; stop with Ctrl-C.
        as_json: Print the rows as they are in metrics.jsonl.
    """
    from linnet.runs import RunFolder
    from linnet.runs.record import last_rows

    folder = RunFolder.open(run)
    file, console = folder.path / "metrics.jsonl", Console(soft_wrap=True, highlight=False)

    def show(records: list[dict]) -> None:
        for row in records:
            typer.echo(json.dumps(row)) if as_json else console.print(_line(row), markup=False)

    read = _number_of_rows(file)
    show(last_rows(file, rows))
    while follow and not folder.done:
        time.sleep(0.2)
        now = _number_of_rows(file)
        if now > read:
            show(last_rows(file, now - read))
        read = now  # fewer rows than before: the run went back to a checkpoint


@runs.command()
@options
def remove(
    paths: list[Path],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False,
) -> None:
    """Remove run folders with their checkpoints, records and results, for good. Asks first.

    Refuses folders that are not runs, runs that a process trains, and links; links inside a run are not followed.

    [bold]linnet runs remove runs/tnl-10m-0123456789ab[/]

    Args:
        paths (RUN): Run folders.
        yes: Do not ask.
    """
    from linnet.report import units
    from linnet.runs import RunFolder, overview

    paths = list(dict.fromkeys(Path(str(path).rstrip("/") or "/") for path in paths))
    if problems := [line for path in paths for line in overview.refusals(path)]:
        raise ConfigError(problems, "runs remove, which removed nothing")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for path in paths:
        row, other = overview.describe(RunFolder(path)), overview.foreign(path)
        beside = f", and {', '.join(other)}, which Linnet did not write" if other else ""
        console.print(f"{path}: {row['status']}, {units.size(row['bytes'])}{beside}", markup=False)
    what = "this run" if len(paths) == 1 else f"these {len(paths)} runs"
    if not yes and not typer.confirm(f"Remove {what} for good?", err=True):
        console.print("nothing was removed")
        raise typer.Exit(1)
    for path in paths:
        overview.remove(path)
        typer.echo(path)


def _tokens_differ(rows: list[dict[str, Any]]) -> bool:
    """Returns whether the tokens of some runs have another mean length than those of others, as of two tokenizers."""
    lengths = [row["loss"] / row["bits_per_byte"] for row in rows if row["loss"] and row["bits_per_byte"]]
    return bool(lengths) and max(lengths) > 1.01 * min(lengths)


def _table(rows: list[dict[str, Any]], keys: list[str], console: Console, optional: Sequence[str] = ()) -> None:
    """Prints a table with whole names, which the next command needs: a terminal gets fewer columns, a file long lines.

    Args:
        optional: keys that may be left out, the first first.
    """
    from rich.markup import escape

    def table(keys: list[str]) -> tuple[Table, int]:
        numbers = {key for key in keys if any(isinstance(row[key], int | float) for row in rows)}
        columns = ("#" * (key in numbers) + HEADS.get(key, key) for key in keys)
        cells = ((escape(_cell(key, row)) for key in keys) for row in rows)
        made = make_table(*columns, rows=cells, no_wrap=True, style=RULED | {"padding": (0, 1, 0, 0)})
        return made, console.measure(made, options=console.options.update(max_width=1 << 16)).maximum

    made, width = table(keys)
    left_out = 0
    while console.is_terminal and width > console.width and left_out < len(optional):
        left_out += 1
        made, width = table([key for key in keys if key not in optional[:left_out]])
    console.width = max(console.width, width)
    console.print(made)
    if left_out:
        lacking = ", ".join(HEADS.get(key, key) for key in optional[:left_out])
        console.print(f"no room for {lacking}: --columns, --json and --csv have them", style="dim")


def _cell(key: str, row: dict[str, Any]) -> str:
    from linnet.report import units

    value = row[key]
    if value is None:
        return units.MISSING
    if key == "step" and row["steps"] is not None and row["steps"] != value:
        return f"{value:,}/{row['steps']:,}"
    if key == "bytes":
        return units.size(value)
    if key == "seconds":
        return units.duration(value)
    if key in ("params_non_embedding", "params_total", "tokens", "flops"):
        return units.count(value)
    if key == "changed":
        return str(value)[5:16]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4f}" if key in ("loss", "train_loss", "bits_per_byte") else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _line(row: dict[str, Any]) -> str:
    """Returns one line about a row of metrics.jsonl: its step, and its numbers or its event."""
    rest = {key: value for key, value in row.items() if key not in ("step", "tokens", "flops", "curve")}
    if "event" in rest:
        rest = {rest.pop("event"): "", **rest}
    parts = [f"{key} {_short(value)}".strip() for key, value in rest.items() if value is not None]
    return f"step {row.get('step', '?'):>8}  " + "  ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def _number_of_rows(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0
