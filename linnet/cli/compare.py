"""`linnet compare`: models side by side on the evaluations that they share."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linnet.config import FIGURES, FITS, ConfigError, check_study, gather, refuse
from linnet.options import BOLD, AsJson, echo_json, make_table, open_page, options

if TYPE_CHECKING:
    from linnet.report.compare import Constants

OUT = Path("comparison/index.html")


@options
def compare(
    runs: list[Path],
    *,
    out: Path = OUT,
    page: bool = True,
    depth_ratio: float = 1.01,
    length_ratio: float = 1.01,
    threshold: Annotated[float, typer.Option(min=0, max=1)] = 0.5,
    as_json: AsJson = False,
    open_: bool = False,
) -> None:
    """Compare models on the texts, questions and needles that they share: intervals, paired tests, a page.

    Intervals are over documents, questions or cells. A difference between two
    models is tested on the same items, and all p-values are adjusted together
    (Holm). The tests know nothing of other seeds of a training. Only
    evaluations with the same settings are compared. The page also shows the
    grids of needles, where recall ends, and the effect of the metrics'
    constants; one model alone has a page too.

    Example: [bold]linnet compare runs/llama-10m-* runs/tnl-10m-*[/]

    Args:
        runs (RUN...): Run folders with evaluations (linnet evaluate).
        out (PATH): The page, or a folder for index.html; pictures go beside it (default: index.html in comparison).
        page: Write the page (needs the extra study).
        depth_ratio: Needles: weight of a depth relative to the one before.
        length_ratio: Needles: weight of a length relative to the one before.
        threshold: Needles: share of right answers from which a cell counts as found.
        as_json: Print one JSON object and write no page.
        open_: Show the page in the browser.
    """
    from linnet.report.compare import Constants

    page = page and not as_json
    if not out.suffix or (out.is_dir() and out.suffix.lower() not in (".html", ".htm")):
        out = out / "index.html"
    _check(depth_ratio, length_ratio, out if page else None, open_)
    show_comparison(runs, out if page else None, Constants(depth_ratio, length_ratio, threshold), as_json)
    if page and open_:
        open_page(out)


def show_comparison(
    runs: list[Path], page: Path | None, constants: "Constants | None" = None, as_json: bool = False
) -> None:
    """Compares the saved evaluations of runs and prints tables.

    Args:
        runs: run folders.
        page: path of the page; None writes no page.
        constants: constants of the needle metrics; None uses the defaults.
        as_json: print one JSON object instead of tables, and write no page.

    Raises:
        ConfigError: runs without evaluations, or with none in common.
    """
    from linnet.evaluate.compare import SCOPE, shared, split
    from linnet.evaluate.compare import compare as compare_all

    records, problems = _read(runs)
    for problem in problems:
        Console(stderr=True).print(f"[bold yellow]left out[/] {escape(problem)}", highlight=False, soft_wrap=True)
    groups = shared({name: evaluations for name, (_, evaluations) in records.items()})
    differing = split(groups) if len(records) > 1 else []
    if len(records) > 1:
        groups = [group for group in groups if len(group.lacking) < len(records) - 1]
        if not groups:
            raise ConfigError([*differing, _nothing_in_common(records)], "compare")
    for line in differing:
        Console(stderr=True).print(f"[bold yellow]left out[/] {escape(line)}", highlight=False, soft_wrap=True)
    problems += differing
    comparisons = compare_all(groups)
    if as_json:
        echo_json([_to_dict(comparison) for comparison in comparisons])
        return
    console = Console(highlight=False)
    for group in groups:
        _show(group, [comparison for comparison in comparisons if group.owns(comparison)], records, console)
    if any(comparison.differences for comparison in comparisons):
        console.print(SCOPE, soft_wrap=True, style="dim")
    if page is not None:
        from linnet.report.compare import Constants, write_comparison

        constants = constants or Constants()
        command = _command(runs, page, constants)
        written = write_comparison(groups, comparisons, page, command=command, constants=constants, problems=problems)
        console.print(str(written), soft_wrap=True)


def _command(runs: list[Path], out: Path, constants) -> str:
    """Returns the command that makes this page again, in the same folder."""
    from linnet.report.compare import Constants
    from linnet.report.shell import typed

    usual = vars(Constants())
    changed = {name: value for name, value in vars(constants).items() if value != usual[name]}
    return typed("linnet", "compare", *runs, out=None if out == OUT else out, **changed)


def _read(runs: list[Path]) -> tuple[dict[str, tuple[Path, list]], list[str]]:
    """Returns folder and evaluations by the name of the run, and the problems of those that are left out.

    Raises:
        ConfigError: runs have no evaluation or are given twice; all of them are named.
    """
    from linnet.evaluate.results import read_evaluations
    from linnet.runs import RunFolder

    problems, records, damaged = [], {}, []
    folders = [run.resolve() for run in runs]
    labels = [re.sub(r"-[0-9a-f]{12}$", "", folder.name) for folder in folders]  # without the digest of the settings
    for run, folder, label in zip(runs, folders, labels, strict=True):
        name = label if labels.count(label) == 1 else folder.name
        alone = [other.name for other in folders].count(folder.name) == 1
        try:
            evaluations = read_evaluations(RunFolder.open(run).path, damaged)
        except ConfigError as error:
            problems += error.problems
            continue
        if folders.count(folder) > 1:
            problems.append(f"{run}: is given twice; name another run")
        elif not evaluations:
            form = EVALUATIONS.get(RunFolder.open(run).config.get("objective", "text"), EVALUATIONS["text"])
            example = "linnet evaluate " + form.replace("RUN", str(run))
            problems.append(f"{run}: has no evaluation yet; make one, for example: {example}")
        records[name if alone else str(run)] = (run, evaluations)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems + damaged)), "compare")
    return records, damaged


EVALUATIONS = {  # an evaluation of the runs of each objective
    "text": "text RUN PATH",
    "images": "images RUN",
    "diffusion": "samples RUN --extractor CLASSIFIER",
    "masked": "masked RUN PATH",
    "sentences": "glue RUN --data FOLDER",
    "sequences": "lra RUN",
}


def _nothing_in_common(records: dict[str, tuple[Path, list]]) -> str:
    """Returns a message with the evaluations of each run, and commands that evaluate all runs like the first."""
    from linnet.evaluate.compare import command

    lines = ["the runs have no evaluation with the same settings in common"]
    for run, evaluations in records.values():
        commands = dict.fromkeys(command(evaluation, "RUN") for evaluation in evaluations)
        lines.append(f"{run} has: {'; '.join(commands)}")
    (_, evaluations), *others = records.values()
    lines.append("to compare, run: " + " && ".join(command(evaluations[0], str(run)) for run, _ in others))
    return "\n    ".join(lines)


def _check(depth_ratio: float, length_ratio: float, page: Path | None, show: bool) -> None:
    """Raises ConfigError for wrong constants, or a page that cannot be drawn or written."""
    ratios = {"depth-ratio": depth_ratio, "length-ratio": length_ratio}
    problems = [
        f"--{name}: {value:g} is not above 0; give a positive number"
        for name, value in ratios.items()
        if not 0 < value < float("inf")
    ]
    if show and page is None:
        problems.append("--open: needs a page, but --json and --no-page write none; drop one of the options")
    if page is not None:
        from linnet.report.shell import check_page

        with gather(problems):
            check_study(FIGURES + FITS, "compare", ", or give --no-page")
        with gather(problems):
            check_page(page)
    refuse(problems, "compare")


def _show(group, comparisons, records, console: Console) -> None:
    from linnet.evaluate.compare import between, command, notes, shown, title

    console.print(f"\n[bold]{escape(title(group))}[/]", soft_wrap=True)
    names = [entry.name for entry in group.entries]
    chance = any(comparison.chance is not None for comparison in comparisons)
    table = make_table("task", "metric", "#items", *["#guessing"] * chance, no_wrap=True, style=BOLD)
    for name in names:
        table.add_column(escape(name), justify="right", overflow="fold")
    for comparison in comparisons:
        cells = ["" if comparison.chance is None else shown(comparison.chance)] if chance else []
        for name in names:
            number = next((number for number in comparison.numbers if number.name == name), None)
            value = "" if number is None else shown(number.value)
            value = f"[bold]{value}[/]" if name == comparison.best else value
            if number is not None and number.interval:
                value += f"\n[dim]{between(number.interval).strip(' ()')}[/]"
            cells.append(value)
        table.add_row(
            escape(comparison.task),
            comparison.metric.replace("_", " "),
            f"{comparison.n:,}" if comparison.n else "",
            *cells,
        )
    console.print(table)
    _show_pairs(comparisons, console)
    for note in notes(group, comparisons):
        console.print(escape(note), soft_wrap=True, style="dim")
    for name in group.lacking:
        run = str(records[name][0])
        console.print(
            f"{escape(name)} has none of these; run: {escape(command(group.entries[0].evaluation, run))}",
            soft_wrap=True,
        )


def _show_pairs(comparisons, console: Console) -> None:
    """Prints the tests of differences with their adjusted p-values."""
    from linnet.evaluate.compare import REAL, between, shown

    table = make_table("task, metric", "#difference", "#adjusted p", no_wrap=True, style=BOLD)
    table.add_column("models", overflow="fold")
    for comparison in comparisons:
        for d in comparison.differences:
            about = f"{escape(comparison.task)}\n[dim]{comparison.metric.replace('_', ' ')}[/]"
            value = f"{shown(d.value)}\n[dim]{between(d.interval).strip(' ()')}[/]"
            p = f"{d.adjusted:.2g}\n[dim]{'they differ' if d.adjusted < REAL else 'may be chance'}[/]"
            table.add_row(about, value, p, f"{escape(d.first)}\n− {escape(d.second)}")
    if table.row_count:
        console.print(table)


def _to_dict(comparison) -> dict:
    import dataclasses

    from linnet.runs.record import plain

    return plain(dataclasses.asdict(comparison) | {"best": comparison.best})
