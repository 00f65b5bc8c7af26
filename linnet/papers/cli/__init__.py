"""`linnet reproduce`: tables and figures of the papers, each with its command, its cost and its verdicts."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.options import (
    RULED,
    AsJson,
    default_verb,
    echo_json,
    end_with_failed,
    make_table,
    open_page,
    options,
    parse_seeds,
)

if TYPE_CHECKING:
    from linnet.papers.item import Form
    from linnet.papers.library import Entry, Library
    from linnet.papers.table import Work


STATES = {"complete": "green", "partial": "yellow", "printed": "dim"}
COLOURS = {"holds": "green", "does not hold": "red", "cannot be told": "yellow", "not run": "dim"}
COLOURS |= {"reproduced": "green", "not reproduced": "red"}


def print_list(library: "Library", entries: "list[Entry]") -> None:
    """Prints every item: state, needs, and the cost of both sizes."""
    console = Console(highlight=False)
    for paper in dict.fromkeys(entry.paper for entry in entries):
        about = library.papers[paper]
        table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
        table.title = f"{paper} {about.title}"
        table.add_column("item", no_wrap=True)
        table.add_column("", overflow="fold", ratio=1)
        table.add_column("state", no_wrap=True)
        table.add_column("reduced", overflow="fold", min_width=10)
        table.add_column("full", overflow="fold", min_width=10)
        for entry in entries:
            if entry.paper == paper:
                item = entry.item
                state = f"[{STATES[item.state]}]{item.state}[/]"
                table.add_row(entry.name, escape(item.title), state, *map(cost_line, (item.reduced, item.full)))
        console.print(table)
    console.print(
        "linnet reproduce PAPER ITEM runs the reduced form; --scale full --plan prices the full one; data in "
        "brackets are for some steps alone\n"
        "complete: Linnet has all of it, partial: a part, printed: only the numbers; no state says that they were "
        "reproduced\n"
        "-: no such form; its tests and commands are in docs/papers.md. not yet: cannot be run today",
        style="dim",
        soft_wrap=True,
    )


def cost_line(form: "Form | None") -> str:
    """Describes what a form needs: its device, time and data."""
    if form is None:
        return "-"
    if not form.steps:
        return "not yet"
    of_steps = dict.fromkeys(name for step in form.steps for name in step.needs if name not in form.needs)
    return " + ".join([minutes(form.minutes, form.device), *form.needs, *(f"({name})" for name in of_steps)])


def minutes(value: float | None, device: str) -> str:
    """Returns a time in a fitting unit, with the device."""
    if value is None:
        return "by --plan" if device == "cluster" else device
    unit, size = next((pair for pair in (("days", 1440), ("h", 60)) if value >= 2 * pair[1]), ("min", 1))
    amount = f"{value / size:,.0f}" if value / size >= 100 else f"{value / size:.3g}"
    where = {"cpu": "CPU", "gpu": "GPU", "cluster": "GPU"}[device]
    return f"{where} {amount} {unit}" if device != "cluster" else f"{amount} GPU {unit}"


def as_record(entry: "Entry") -> dict[str, Any]:
    """Returns an item of the list as plain values."""
    item = entry.item
    forms = {
        scale: None
        if form is None
        else {
            "device": form.device,
            "minutes": form.minutes,
            "measured": form.measured,
            "needs": form.needs,
            "seeds": form.seeds,
            "steps": [{"name": step.name, "verb": step.verb, "needs": step.needs} for step in form.steps],
            "differs": form.differs,
            "skip": form.skip,
        }
        for scale, form in (("reduced", item.reduced), ("full", item.full))
    }
    about = {"paper": entry.paper, "item": entry.name, "title": item.title, "state": item.state, "note": item.note}
    source = item.published.source if item.published else None
    return about | {"source": source, "claims": [claim.text for claim in item.claims], **forms}


def print_plan(work: "Work", console: Console | None) -> dict[str, Any]:
    """Prints what a form will cost, and returns it as plain values. Without a console it prints nothing."""
    rows = []
    for name, cost in work.costs.items():
        spent = None if cost.seconds is None else cost.seconds / 86400
        row = {"step": name, "verb": work.jobs[name].step.verb, "runs": cost.runs, "flops": cost.flops}
        rows.append(row | {"device_days": spent, "devices": cost.devices, "notes": list(cost.notes)})
    flops = [row["flops"] for row in rows if row["flops"] is not None]
    days = [row["device_days"] for row in rows]
    record = {
        "paper": work.entry.paper,
        "item": work.entry.name,
        "scale": work.scale,
        "device": work.form.device,
        "needs": work.form.needs,
        "missing": list(work.missing),
        "notes": list(work.notes),
        "seeds": work.seeds,
        "steps": rows,
        "skipped": work.skipped,
        "skipped_here": dict(work.elsewhere),
        "flops": sum(flops) if flops else None,
        "device_days": None if None in days else sum(days),  # not known if that of a step is not
        "minutes_stated": work.form.minutes,
        "minutes_measured": work.form.measured,
    }
    if console is None:
        return record
    console.print(f"[bold]{work.entry.key}[/] {escape(work.entry.item.title)}, {work.scale}")
    table = make_table("~step", "verb", "#runs", "#FLOPs", "#device-days", style=RULED | {"padding": (0, 1, 0, 0)})
    for row in rows:
        runs = "-" if row["runs"] is None else f"{row['runs']:,}"
        numbers = (_number(row["flops"], 2), _number(row["device_days"], 3))
        table.add_row(escape(row["step"]), row["verb"], runs, *numbers)
    console.print(table)
    for row in rows:
        for note in row["notes"]:
            console.print(f"{row['step']}: {note}", markup=False, soft_wrap=True)
    for name, reason in work.skipped.items():
        console.print(f"{name}: not run ({reason})", markup=False, soft_wrap=True)
    for name, reason in work.elsewhere.items():
        console.print(f"{name}: will be skipped here ({reason})", markup=False, soft_wrap=True)
    needs = ", ".join([work.form.device, *(f"data {name}" for name in work.form.needs), *_step_needs(work)])
    console.print(f"needs {needs}; seeds {', '.join(map(str, work.seeds))}", markup=False, soft_wrap=True)
    console.print(_priced(work), markup=False, soft_wrap=True)
    for name, about in work.missing.items():
        data = f"--data {escape(name)}=FOLDER: {escape(about)}"
        console.print(f"[yellow]missing[/] {data}; this plan needs no data", soft_wrap=True)
    for note in work.notes:
        console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    if work.form.smaller is not None:
        console.print(f"a smaller form on two CPU cores: {work.form.smaller}", markup=False, soft_wrap=True)
    if work.form.differs:
        console.print(f"the {work.scale} form differs: {work.form.differs}", markup=False, soft_wrap=True)
    return record


def _priced(work: "Work") -> str:
    """Says where the device-days of a plan come from, beside the cost that the item states."""
    speeds = sorted({f"{cost.flops / cost.seconds:.3g}" for cost in work.costs.values() if cost.flops and cost.seconds})
    parts = [f"device-days: FLOPs at {' and '.join(speeds)} FLOP/s"] if speeds else []
    if (form := work.form).minutes is not None:
        seeds = f"{'seed' if len(form.seeds) == 1 else 'seeds'} {', '.join(map(str, form.seeds))}"
        part = work.jobs.keys() < work.every.keys() or work.seeds != form.seeds or work.elsewhere
        kind = "measured" if form.measured else "estimated"
        of = f", for all its steps and {seeds}" if part else ""
        parts.append(f"stated in the item{of}: {minutes(form.minutes, form.device)}, {kind}")
    return "; ".join(parts) or "cost: not stated"


def _step_needs(work: "Work") -> list[str]:
    """Returns what single steps of a plan need, which are skipped without it."""
    needs = []
    for name, job in work.jobs.items():
        wanted = [f"data {need}" for need in job.step.needs]
        if job.step.device == "gpu" and work.form.device == "cpu":
            wanted.append("a GPU")
        if wanted:
            needs.append(f"{' and '.join(wanted)} for {name}")
    return needs


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else "0" if not value else f"{value:.{digits}g}"


def print_result(result: dict[str, Any], work: "Work", console: Console) -> None:
    """Prints the table beside the printed one, and the verdicts."""
    source = f" ({result['source']})" if result["source"] else ""
    console.print(f"\n[bold]{work.entry.key}[/]{source} {escape(result['title'])}, {result['scale']}")
    columns = {column: {row: values[column] for row, values in result["rows"].items()} for column in result["columns"]}
    measured = [name for name, cells in columns.items() if any("measured" in cell for cell in cells.values())]
    for column in measured or columns:
        if any("measured" in cell or cell["printed"] is not None for cell in columns[column].values()):
            console.print(_column(column, result, columns[column]))
    if measured and (others := [name for name in columns if name not in measured]):
        console.print(f"printed, and not measured: {', '.join(others)}", markup=False, soft_wrap=True)
    if result.get("not_compared"):
        names = ", ".join(result["not_compared"])
        console.print(f"no printed number stands beside these models: {names}", markup=False, soft_wrap=True)
    for verdict in result["verdicts"]:
        colour = COLOURS[verdict["verdict"]]
        reason = f" ({escape(verdict['reason'])})" if verdict["reason"] else ""
        console.print(f"[{colour}]{verdict['verdict']}[/]: {escape(verdict['claim'])}{reason}", soft_wrap=True)
    if (outcome := result["outcome"]) is not None:
        colour = COLOURS[outcome["says"]]
        more = [f"outside the tolerance: {', '.join(outcome['outside'])}"] if outcome["outside"] else []
        more += [f"not measured: {', '.join(outcome['not_measured'])}"] if outcome["not_measured"] else []
        tail = f", {outcome['compared']} of {outcome['printed']} printed numbers compared"
        tail += f": {escape('; '.join(more))}" if more else ""
        console.print(f"[{colour} bold]{outcome['says']}[/]{tail}", soft_wrap=True)
    for name, reason in result["skipped"].items():
        console.print(f"{name}: not run ({reason})", markup=False, soft_wrap=True)
    if result["rates"]:
        console.print(result["rates"], markup=False, soft_wrap=True)
    for note in result["notes"]:
        console.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)
    if result["differs"]:
        console.print(f"the {result['scale']} form differs: {result['differs']}", markup=False, soft_wrap=True)
    console.print(f"in {work.folder}", markup=False)


def _column(column: str, result: dict[str, Any], cells: dict[str, dict[str, Any]]) -> Table:
    unit, base, stand_ins = result["columns"][column], result["base"], result.get("stand_ins", {})
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left", title_style="")
    table.title = column if column == unit else f"{column} ({unit})"
    table.add_column("", overflow="fold")
    spread = any(cell.get("interval") for cell in cells.values())
    names = ["printed", "measured", *(["95 %"] if spread else [])]
    names += [f"difference\nfrom {base},\n{what}" for what in ("printed", "95 %")] if base else []
    for name in names:
        table.add_column(escape(name), justify="right", overflow="fold", no_wrap=name != "printed")
    for row, cell in cells.items():
        printed = "" if cell["printed"] is None else str(cell["printed"])
        if "corrected" in cell:
            printed += f" -> {'?' if cell['corrected'] is None else shown(cell['corrected'])}"
        mine = [shown(cell.get("measured")), *([ends(cell.get("interval"))] if spread else [])]
        if base:
            corrected = cell.get("corrected_difference")
            first = shown(cell.get("printed_difference")) if corrected is None else f"{shown(corrected)} (corrected)"
            mine += [first, ends(cell.get("difference"))]
        if "measured" in cell or cell["printed"] is not None:
            name = f"{stand_ins[row]}\nfor {row}" if row in stand_ins else row
            table.add_row(escape(name), printed, *mine)
    return table


def shown(value: float | None, digits: int = 5) -> str:
    """Returns a number with `digits` digits, or a whole one with up to nine; "" for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1e5 and abs(value) < 1e9 else f"{value:.{digits}g}"


def ends(interval: list[float] | None) -> str:
    """Returns the ends of an interval."""
    if interval is None:
        return ""
    low, high = interval
    return shown(low) if low == high else f"{shown(low, 4)} to {shown(high, 4)}"


@options
def report(
    folder: Path = Path("reproductions"),
    *,
    out: Path | None = None,
    open_: bool = False,
) -> None:
    """Write one page of all items that were run: printed numbers beside measured ones, verdicts and costs.

    The page needs no network. [bold]linnet reproduce report reproductions/[/]

    Args:
        folder: The --out folder of linnet reproduce.
        out: The page. Default: FOLDER/report/index.html.
        open_: Show the page in the browser.
    """
    from linnet.papers.page import write_reproductions

    page = write_reproductions(folder, out)
    typer.echo(page)
    if open_:
        open_page(page)


TICK = 2.0  # seconds between two signs of work


app = typer.Typer(
    cls=default_verb("items"),
    rich_markup_mode="rich",
    help="List, price and run the tables and figures of the papers, and make a page of the results.",
)
app.command()(report)

EXAMPLES = {
    "linnet reproduce": "the papers and their items",
    "linnet reproduce 000 table7": "the reduced form of one, on two CPU cores where the list says CPU",
    "linnet reproduce 001 table4 --scale full --plan": "what the paper's size costs and needs",
    "linnet reproduce 002 table5 --data wikitext-2=FOLDER": "with data of yours; --plan names those that are missing",
    "linnet reproduce 002 table7 --only listops --seeds 0,1,2": "some steps; --plan lists those of an item",
    "linnet reproduce mine table1 --items FOLDER": "an item of your own: FOLDER/mine/table1.yaml (docs/reproduce.md)",
}


@app.command(
    epilog="\n\n".join(f"[bold]{command}[/]  {about}" for command, about in EXAMPLES.items()),
)
@options
def items(
    paper: str | None = None,
    names: list[str] | None = None,
    *,
    scale: str = "reduced",
    plan: bool = False,
    only: str = "",
    data: list[str] | None = None,
    seeds: str = "",
    out: Path = Path("reproductions"),
    waterfall: bool = False,
    own: Annotated[Path | None, typer.Option("--items")] = None,
    allow_plugins: bool = False,
    only_paper: Annotated[str | None, typer.Option("--paper")] = None,
    as_json: AsJson = False,
    markdown: bool = False,
) -> None:
    """List the tables and figures of the papers, or run some beside their printed numbers.

    Without ITEM: every item with its state, the data and hardware it needs,
    and the cost of both sizes. With ITEM: the table beside the printed one,
    and a verdict on each claim. The same command does only what is missing.
    The exit code is 1 if a run failed; a run that diverged has a result.

    The settings of an item are those of its file; there is no --set.

    Args:
        paper (PAPER): 000 to 004; without ITEM, its items are listed.
        names (ITEM...): Items, such as table4; [bold]linnet reproduce 001[/] lists those of a paper.
        scale (reduced|full): reduced: a small form, which says what it changes; full: the paper's size.
        plan: Show steps, runs, FLOPs, device-days and missing data of an item; start nothing.
        only (STEP,...): Only these steps of the item, and those that they follow; with commas between (default: all).
        data (NAME=FOLDER): Where data are that the item needs, such as wikitext-103=~/data/wt; may be given again.
        seeds (N,...): Seeds in place of the item's, with commas between (default: those of the item).
        out: Folder of reproductions; each item gets a folder in it.
        waterfall: With 004 fig3.7: its waterfall, from the score of core to the published one by causes.
        own (FOLDER): Take the items of this folder in place of the papers': your own, or changed copies.
        allow_plugins: Run the Python files that items of --items name. Only if you trust them.
        only_paper (PAPER): List the items of one paper.
        as_json: Print the list, plan or results as JSON.
        markdown: Print docs/papers.md.
    """
    from linnet.config import ConfigError, gather, refuse
    from linnet.papers.item import SCALES
    from linnet.papers.library import read_library, read_own

    problems: list[str] = []
    library, others = None, 0
    with gather(problems):
        library, others = (read_library(), 0) if own is None else read_own(own, paper or "", names or [])
    if scale not in SCALES:
        problems.append(f"--scale {scale!r}: unknown; use reduced or full")
    folders = _data(data or [], problems)
    numbers = parse_seeds("--seeds", seeds, problems) if seeds else ()
    if library is None:
        raise ConfigError(problems, "command line")
    if only_paper is not None and (problem := library.unknown(only_paper)):
        problems.append(f"--paper {only_paper!r}: {problem}")
    if paper is not None and only_paper is not None:
        problems.append("--paper: lists a paper, and PAPER names one already; give one of the two")
    entries = []
    if paper is not None:
        with gather(problems):
            entries = library.find(paper, names or [])
        if waterfall and names:
            entries = _waterfalls(library, entries, problems)
    if not names:
        if (plan or only or folders or numbers or waterfall) and (paper is None or entries):
            known = f": {', '.join(e.name for e in entries[:4])}, ..." if entries else ", such as 000 table7"
            what = "--plan, --only, --data, --seeds and --waterfall: belong to an item, and none is named"
            problems.append(f"{what}; name an ITEM{known}")
        refuse(problems, "command line")
        if markdown and own is not None:
            raise ConfigError(["--markdown: prints the page of Linnet's own items; leave --items out"], "command line")
        return _list(library, paper or only_paper, as_json, markdown)
    if markdown:
        problems.append("--markdown: prints the page of all papers; leave PAPER and ITEM out")

    from linnet.papers.prepare import prepare
    from linnet.papers.run import run
    from linnet.papers.table import Request

    chosen = tuple(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    form = scale if scale in SCALES else "reduced"  # of a wrong one, so that all else is checked too
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with _at_work(console):
        works = prepare(library, entries, Request(form, chosen, folders, numbers, out, plan, allow_plugins), problems)
    if others:
        what = f"{others} {'problem' if others == 1 else 'problems'} in other files of {own}"
        console.print(f"[yellow]note[/] {escape(what)}; linnet reproduce --items {escape(str(own))} lists them")
    if plan:
        records = [print_plan(work, None if as_json else Console(highlight=False)) for work in works]
        if as_json:
            echo_json(records)
        return
    results = []
    for work in works:
        for note in work.notes:
            console.print(f"[yellow]note[/] {note}")
        results.append(run(work, console))
        if not as_json:
            print_result(results[-1], work, Console(highlight=False))
    if as_json:
        echo_json(results)
    elif len(works) == 1:
        console.print(f"a page of all that was run: linnet reproduce report {out}", markup=False)
    failed = [work.folder / path for work, result in zip(works, results, strict=True) for path in result["failed"]]
    end_with_failed(failed, console)


@contextlib.contextmanager
def _at_work(console: "Console") -> Iterator[None]:
    """Shows that works are checked and priced: ladders of hundreds of models take half a minute."""
    from linnet.models.costs import meta_model

    def counted() -> str:
        return f"checking and pricing: {meta_model.cache_info().misses:,} models built"

    def tell() -> None:
        while not ended.wait(TICK):
            status.update(counted()) if console.is_terminal else console.print(counted())

    ended, begun = threading.Event(), threading.Thread(target=tell, daemon=True)
    with console.status("checking and pricing") as status:
        begun.start()
        try:
            yield
        finally:
            ended.set()
            begun.join()


def _waterfalls(library, entries: list, problems: list[str]) -> list:
    """Returns the items with the waterfalls of `entries`, and adds a problem for each that has none."""
    waterfalls = {entry.key: library.items.get((entry.paper, f"{entry.name}-waterfall")) for entry in entries}
    having = [f"{of} {name.removesuffix('-waterfall')}" for of, name in library.items if name.endswith("-waterfall")]
    fix = f"only {', '.join(having)} has one" if having else "no item has one"
    problems += [
        f"--waterfall: {key} has no waterfall; {fix}" for key, waterfall in waterfalls.items() if waterfall is None
    ]
    return [waterfall for waterfall in waterfalls.values() if waterfall is not None]


def _list(library, paper: str | None, as_json: bool, markdown: bool) -> None:
    from linnet.papers.markdown import write_markdown

    if markdown:
        typer.echo(write_markdown(library), nl=False)
        return
    entries = [entry for entry in library.items.values() if paper in (None, entry.paper)]
    if as_json:
        echo_json([as_record(entry) for entry in entries])
    else:
        print_list(library, entries)


def _data(assignments: list[str], problems: list[str]) -> dict[str, str]:
    folders: dict[str, str] = {}
    for text in assignments:
        name, equals, folder = text.partition("=")
        if not (equals and name and folder):
            problems.append(f"--data {text!r}: write NAME=FOLDER, such as wikitext-103=~/data/wikitext-103")
        elif name in folders:
            problems.append(f"--data {name}: given twice; keep one")
        else:
            folders[name] = str(Path(folder).expanduser().absolute())
    return folders
