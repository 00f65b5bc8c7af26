"""`linnet mad agreement` and `linnet mad waterfall`: how far scores repeat, and what separates them from others."""

from pathlib import Path

import typer
from rich.console import Console

from linnet.config import grouped
from linnet.options import RULED, AsJson, echo_json, make_table, options


@options
def agreement(
    folder: Path,
    *,
    full: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Print whether scores discriminate and repeat: best and worst of each task, and the orders that seeds give.

    With --full, also the rank correlation with the scores of another folder. Nothing is trained.

    [bold]linnet mad agreement mad/screen --full mad/full[/]

    Args:
        folder: The folder that linnet mad run made.
        full: A folder of another budget, such as full, for the rank correlation.
        as_json: Print one JSON object, in full precision.
    """
    import dataclasses
    import math

    from linnet.mad.page.figures import bare_score
    from linnet.mad.results import read_results
    from linnet.mad.scores import folder_agreement, number_of_results, score, seed_agreement, spreads

    results = read_results(folder)
    scores = score(results, **number_of_results(results))
    task_spreads, seeds, other = spreads(scores), seed_agreement(results), None
    if full is not None:
        against = read_results(full)
        other = folder_agreement(scores, score(against, **number_of_results(against)))
    if as_json:
        values = {
            "tasks": [dataclasses.asdict(spread) | {"discriminates": spread.discriminates} for spread in task_spreads],
            "seeds": [dataclasses.asdict(pair) for pair in seeds],
            "full": None if other is None else dataclasses.asdict(other),
            "labels": scores.labels,
        }
        echo_json(values)
        return
    whole = ", ".join(scores.whole) or "none"
    for spread in task_spreads:
        ends = f"from {spread.worst} to {spread.best}" if spread.apart else "between scores that cannot be told apart"
        typer.echo(f"{spread.task:<18} {100 * spread.gap:5.1f} points {ends}")
    good = sum(spread.discriminates for spread in task_spreads)
    if task_spreads and len({result.seed for result in results}) > 1:
        typer.echo(f"{good} of {len(task_spreads)} tasks tell two architectures apart by 10 points or more")
    elif not task_spreads:
        typer.echo(f"no comparison: it needs two architectures with every setting, and here are {whole}")
    for pair in seeds:
        typer.echo(
            f"seeds {pair.seeds[0]} and {pair.seeds[1]}: {pair.swaps} of {math.comb(len(pair.orders[0]), 2)} pairs of "
            f"architectures in another order, rank correlation "
            f"{'-' if pair.spearman is None else format(pair.spearman, '.3f')}"
        )
    by_seed: dict[int, dict[str, float]] = {}
    for seed, by_name in (item for pair in seeds for item in pair.scores.items()):
        by_seed.setdefault(seed, {}).update(by_name)  # another seed may lack an architecture
    for seed, of_seed in by_seed.items():
        shown = ", ".join(f"{name} {bare_score(of_seed[name], scores.metric)}" for name in sorted(of_seed))
        typer.echo(f"  seed {seed}: {shown}")  # an order by one seed would be a ranking
    if not seeds and task_spreads:
        typer.echo("no agreement of seeds: it needs two architectures with every setting and two seeds; run --seed 0,1")
    if other is not None:
        typer.echo(f"rank correlation with {full} over {len(other.architectures)} architectures:")
        for task, value in other.spearman.items():
            typer.echo(f"  {task:<18} {'-' if value is None else f'{value:+.3f}'}")
    for label in scores.labels:
        typer.echo(label)


@options
def waterfall(
    layouts: list[str] | None = None,
    *,
    out: Path = Path("mad/waterfall"),
    published: Path | None = None,
    budget: str = "core",
    tasks: str = "",
    set_: list[str] | None = None,
    device: str = "auto",
    executor: str = "local",
    known: Path | None = None,
    run: bool = True,
    as_json: AsJson = False,
) -> None:
    """Show what separates a core score from a published one, one cause at a time.

    Tasks, training, layers, number and selection of the published
    implementation are put in one after the other, at the six baselines. The
    same command resumes.

    [bold]linnet mad waterfall --device cuda[/]

    Args:
        layouts (LAYOUT...): Recipes or layouts. Default: attention and GLA.
        out: Folder of the steps.
        published: Folder of --budget published, for the last step (default: published in --out).
        budget (core|smoke): core, or smoke to try it out.
        tasks (TASK,...): Only these tasks, with commas between (default: all).
        set_ (KEY=VALUE): Change every model, such as d_model=64; may be given again.
        device (auto|cpu|cuda): auto is the GPU if there is one.
        executor (inline|local): inline: this process; local: one process per GPU or core.
        known: Folder of another waterfall, whose finished runs are not trained again.
        run: Train what is missing; else only print.
        as_json: Print the rows as JSON, in full precision.
    """
    from linnet.config import gather, override, parse, refuse
    from linnet.mad.waterfall import (
        ARCHITECTURES,
        prepare_waterfall,
        state_notes,
        train_waterfall,
        waterfall_rows,
    )
    from linnet.study.executors import ExecutorConfig

    problems: list[str] = []
    changes: dict = {}
    works = []
    with gather(problems):
        changes = override({}, set_ or [])
    if device not in ("auto", "cpu", "cuda"):
        problems.append(f"--device {device!r} is unknown; use auto, cpu or cuda")
    if executor not in ("inline", "local"):
        problems.append(f"--executor {executor!r} is unknown; use inline or local")
    if budget not in ("core", "smoke"):
        problems.append(f"--budget {budget!r}: the steps are at the baselines; use core or smoke")
    with gather(problems):
        if run:
            works = prepare_waterfall(
                out,
                layouts or ARCHITECTURES,
                device="cuda" if device == "cuda" else "cpu" if device == "cpu" else "auto",
                tasks=[name.strip() for name in tasks.split(",") if name.strip()],
                budget=budget if budget in ("core", "smoke") else "core",
                changes=changes,
                known=known,
                published=published,
                executor=parse(ExecutorConfig, {"kind": "inline" if problems else executor, "retries": 1}),
            )
    refuse(problems, "command line")
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    for note in state_notes(layouts or ARCHITECTURES, changes) if run else ():
        console.print(f"note: {note}", markup=False)
    failed = train_waterfall(works, console)
    rows = waterfall_rows(out, published)
    if as_json:
        echo_json(rows)
    else:
        print_steps(rows)
    if failed:
        typer.echo(f"{len(failed)} runs failed; run again to retry")
        raise typer.Exit(1)


def print_steps(rows: list[dict]) -> None:
    """Prints the rows of `linnet.mad.waterfall.waterfall_rows` as a table."""
    from linnet.mad.cli.run import SHORT

    tasks = [task for task in SHORT if any(task in row for row in rows)]
    console = Console(soft_wrap=True, highlight=False)
    for name in dict.fromkeys(row["architecture"] for row in rows):
        columns = ("step", "#score", "#change", *(f"#{SHORT[task]}" for task in tasks))
        style = RULED | {"collapse_padding": True, "title": name, "title_style": ""}
        table = make_table(*columns, no_wrap=True, style=style)
        for row in (row for row in rows if row["architecture"] == name):
            change = "" if row["change"] is None else f"{row['change']:+.1f}"
            cells = [f"{row[task]:.1f}" if task in row else "-" for task in tasks]
            table.add_row(row["step"], f"{row['score']:.1f}", change, *cells)
        console.print(table)
    notes = grouped(((row["architecture"], row["note"]), row["step"]) for row in rows if "note" in row)
    for (name, note), steps in notes.items():
        every = len(steps) == sum(row["architecture"] == name for row in rows if row["step"] != "as printed")
        where = name if every else f"{name}, {', '.join(steps)}"
        console.print(f"not comparable ({where}): {note}", markup=False)
    for step, cause in dict.fromkeys((row["step"], row["cause"]) for row in rows):
        console.print(f"{step}: {cause}", markup=False)
