"""Tables of `linnet reproduce` in the terminal."""

from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.papers.item import Form
from linnet.papers.library import Entry, Library

if TYPE_CHECKING:
    from linnet.papers.work import Work

STATES = {"complete": "green", "partial": "yellow", "printed": "dim"}
COLOURS = {"holds": "green", "does not hold": "red", "cannot be told": "yellow", "not run": "dim"}
COLOURS |= {"reproduced": "green", "not reproduced": "red"}


def print_list(library: Library, entries: list[Entry]) -> None:
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


def cost_line(form: Form | None) -> str:
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


def as_record(entry: Entry) -> dict[str, Any]:
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
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("step", overflow="fold")
    table.add_column("verb")
    for name in ("runs", "FLOPs", "device-days"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = ["-" if row["runs"] is None else f"{row['runs']:,}", _flops(row["flops"]), _days(row["device_days"])]
        table.add_row(escape(row["step"]), row["verb"], *cells)
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
        console.print(
            f"[yellow]missing[/] --data {escape(name)}=FOLDER: {escape(about)}; this plan needs no data", soft_wrap=True
        )
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
    found = []
    for name, job in work.jobs.items():
        wanted = [f"data {need}" for need in job.step.needs]
        if job.step.device == "gpu" and work.form.device == "cpu":
            wanted.append("a GPU")
        if wanted:
            found.append(f"{' and '.join(wanted)} for {name}")
    return found


def _flops(value: float | None) -> str:
    return "-" if value is None else "0" if not value else f"{value:.2g}"


def _days(value: float | None) -> str:
    return "-" if value is None else "0" if not value else f"{value:.3g}"


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
    for one in result["verdicts"]:
        colour = COLOURS[one["verdict"]]
        reason = f" ({escape(one['reason'])})" if one["reason"] else ""
        console.print(f"[{colour}]{one['verdict']}[/]: {escape(one['claim'])}{reason}", soft_wrap=True)
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
