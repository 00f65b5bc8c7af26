"""The page of reproductions: printed tables beside measured ones, verdicts and costs, one section for each item."""

import re
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from linnet.papers.run import read_results
from linnet.report import shell, units

KINDS = {"holds": "yes", "does not hold": "no", "cannot be told": "open", "not run": "off"}
KINDS |= {"reproduced": "yes", "not reproduced": "no"}
WIDTH, HEIGHT = 220, 18  # pixels of a plot of one difference


def write_reproductions(folder: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page of all items that were run in a folder. Returns its path.

    Raises:
        ConfigError: nothing was run there, a result is damaged, or the page cannot be written.
    """
    shell.check_page(shell.page_name(folder, out))
    results = read_results(Path(folder))
    page = shell.page_path(folder, out)
    command = shell.typed("linnet", "reproduce", "report", folder, out=out)
    shell.write_page(page, _page(results, command))
    return page


def _page(results: list[dict[str, Any]], command: str) -> str:
    parts = [f'<p class="lead">{_lead(results)}</p>', _overview(results)]
    for result in results:
        parts += _section(result)
    facts = {
        "Redraw": f"<code>{escape(command)}</code>",
        "Made with": escape(
            "; ".join(dict.fromkeys(units.listed(_versions(result)) for result in results if _versions(result)))
        ),
        "Verdicts": "<b>holds</b>: the 95 % interval over seeds, paired by seed, is on the side of the claim. "
        "<b>does not hold</b>: it is on the other side. <b>cannot be told</b>: it has both, or there is one seed. "
        "Each claim has its own 95 %: of twenty claims about rows that are equal, one is decided by chance. "
        "A full form is <b>reproduced</b> if all of its runs ended and every number that they gave is inside the "
        "tolerance that the item states; a reduced form never is.",
    }
    parts += ["<h2>How this was made</h2>", shell.facts(facts)]
    return shell.document("Reproductions", parts, figures=False)


def _versions(result: dict[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in result["costs"].get("made", {}).items()]


def _lead(results: list[dict[str, Any]]) -> str:
    counts = Counter(verdict["verdict"] for result in results for verdict in result["verdicts"])
    said = ", ".join(f"{counts[kind]} {_mark(kind)}" for kind in KINDS if counts[kind])
    full = [result for result in results if result["outcome"]]
    done = sum(result["outcome"]["says"] == "reproduced" for result in full)
    ending = f" {done} of {units.plural(len(full), 'full form')} reproduced." if full else ""
    claims = units.plural(sum(counts.values()), "claim")
    return f"{units.plural(len(results), 'item')}, {claims}: {said or 'none'}.{ending}"


def _mark(kind: str) -> str:
    return f'<span class="verdict {KINDS[kind]}">{kind}</span>'


def _anchor(result: dict[str, Any]) -> str:
    return f"{'own-' if result.get('own') else ''}{result['paper']}-{result['item']}-{result['scale']}"


def _source(result: dict[str, Any]) -> str:
    """Names the table of the paper; of one's own items the item, since the table is not that of Linnet's papers."""
    name = result["item"] if result.get("own") else result["source"] or result["item"]
    return f"{result['paper']} {name}"


def _overview(results: list[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        counts = Counter(verdict["verdict"] for verdict in result["verdicts"])
        marks = " ".join(f"{counts[kind]} {_mark(kind)}" for kind in KINDS if counts[kind])
        if result["outcome"]:
            marks = f"{_mark(result['outcome']['says'])} {marks}"
        source = _source(result)
        link = f'<a href="#{escape(_anchor(result))}">{escape(source)}</a><br>{escape(result["title"])}'
        rows.append((link, result["scale"], marks, len(result["seeds"]), *_cost(result)))
    return shell.table("items", ("Item", "Size", "Claims", "#Seeds", "#Runs", "#FLOPs", "#Time"), rows)


def _cost(result: dict[str, Any]) -> list[str]:
    """Returns runs, FLOPs and the time that runs recorded."""
    steps = result["steps"].values()
    runs = sum(step["runs"] or 0 for step in steps)
    flops = sum(step["flops"] or 0.0 for step in steps)
    seconds = sum(result["costs"].get("seconds", {}).values())
    time = units.duration(seconds) if seconds else units.MISSING
    return [f"{runs:,}" if runs else units.MISSING, units.scientific(flops, 2) if flops else units.MISSING, time]


def _section(result: dict[str, Any]) -> list[str]:
    source = _source(result)
    parts = [f'<h2 id="{escape(_anchor(result))}">{escape(source)}: {escape(result["title"])}</h2>']
    differs = f" The {result['scale']} form differs: {_sentence(result['differs'])}" if result["differs"] else ""
    items = ["--items", result.get("items") or "FOLDER"] if result.get("own") else []
    command = shell.typed("linnet", "reproduce", result["paper"], result["item"], *items)
    scale = "" if result["scale"] == "reduced" else " --scale full"
    parts.append(f'<p class="caption"><code>{escape(command + scale)}</code>.{differs}</p>')
    parts += [_verdicts(result)]
    if result["rows"]:
        parts.append(_table(result))
    for error in result["errata"]:
        right = "the right number is not known" if error["corrected"] is None else f"right: {error['corrected']}"
        text = f"{error['row']}, {error['column']}: printed {error['printed']}, {right}. {error['why']}"
        parts.append(f'<p class="fine below">Erratum: {escape(text)}</p>')
    if result["outcome"] and (result["outcome"]["outside"] or result["outcome"]["not_measured"]):
        outside, absent = result["outcome"]["outside"], result["outcome"]["not_measured"]
        text = f"Outside the tolerance: {'; '.join(outside)}. " if outside else ""
        text += f"Not measured: {'; '.join(absent)}." if absent else ""
        parts.append(f'<p class="notice">{escape(text)}</p>')
    parts += [
        f'<p class="notice">{escape(name)}: not run ({escape(why)}).</p>' for name, why in result["skipped"].items()
    ]
    if rates := result.get("rates"):
        parts.append(f'<p class="caption">{_sentence(rates)}</p>')
    parts += [f'<p class="notice">{_sentence(note)}</p>' for note in result["notes"]]
    if result["note"]:
        parts.append(f'<p class="fine below">{_sentence(result["note"])}</p>')
    folder = f"../{result['folder']}"
    link = f'<a href="{escape(folder)}/result.json">result.json</a>'
    parts.append(f'<p class="files">{link} in {escape(result["folder"])}</p>')
    return parts


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return _marked(text if text.endswith((".", "!", "?")) else f"{text}.")


def _marked(text: str) -> str:
    """Returns text as HTML; words between backticks, as items write them, become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _verdicts(result: dict[str, Any]) -> str:
    items = []
    if result["outcome"]:
        compared = f"{result['outcome']['compared']} of {result['outcome']['printed']} printed numbers compared"
        items.append(f"<li>{_mark(result['outcome']['says'])} within the tolerances of the item, {compared}</li>")
    for verdict in result["verdicts"]:
        reason = f'<div class="why">{escape(verdict["reason"])}</div>' if verdict["reason"] else ""
        items.append(f"<li>{_mark(verdict['verdict'])} {escape(verdict['claim'])}{reason}</li>")
    return f'<ul class="claims">{"".join(items)}</ul>' if items else ""


def _table(result: dict[str, Any]) -> str:
    """Returns the table: for each column the printed number, the measured one, and differences from the base."""
    shown = [
        column
        for column in result["columns"]
        if any("measured" in row[column] or row[column]["printed"] is not None for row in result["rows"].values())
    ]
    if not shown:
        return ""
    # Measured columns first, because a wide table is cut off at its end.
    shown.sort(key=lambda column: not any("measured" in row[column] for row in result["rows"].values()))
    base = result["base"]
    spans = {
        column: [
            name
            for name, key in (("printed", "printed"), ("measured", "measured"))
            if any(row[column].get(key) is not None for row in result["rows"].values())
        ]
        + (["difference"] if base and _scale(result, column) else [])
        for column in shown
    }
    first, second = ["<th></th>"], ["<th></th>"]
    for column in shown:
        unit = result["columns"][column]
        title = escape(column) + (f'<br><span class="fine">{escape(unit)}</span>' if unit != column else "")
        first.append(f'<th class="n group" colspan="{len(spans[column])}">{title}</th>')
        second += [
            f'<th class="n{" group" if name == spans[column][0] else ""}">'
            + (f"difference from {escape(base)}" if name == "difference" else name)
            + "</th>"
            for name in spans[column]
        ]
    rows = []
    for name, row in result["rows"].items():
        cells = [_cells(row[column], spans[column], _scale(result, column) if base else None) for column in shown]
        mark = ' class="base"' if name == base else ""
        stand_in = result.get("stand_ins", {}).get(name)
        title = f'{escape(stand_in)}<br><span class="fine">for {escape(name)}</span>' if stand_in else escape(name)
        rows.append(f'<tr{mark}><th scope="row">{title}</th>{"".join(cells)}</tr>')
    head = f"{''.join(first)}</tr><tr>{''.join(second)}"
    drawn = any("difference" in names for names in spans.values())
    legend = f"Differences from {base}: ○ printed (or corrected), ● measured with its 95 % interval." if drawn else ""
    table = shell.table(f"table-{escape(_anchor(result))}", head, rows, "reproduced")
    return table + (f'<p class="fine below">{escape(legend)}</p>' if legend else "")


def _cells(cell: dict[str, Any], names: list[str], scale: float | None) -> str:
    cells = []
    for place, name in enumerate(names):
        text = ""
        if name == "printed":
            text = escape("" if cell["printed"] is None else str(cell["printed"]))
            if "corrected" in cell:
                right = "?" if cell["corrected"] is None else _number(cell["corrected"])
                text = f"<del>{text}</del> {right}"
        elif name == "measured" and "measured" in cell:
            text = _number(cell["measured"])
            low, high = cell["interval"] or (0.0, 0.0)
            if low < high:
                text += f'<br><span class="fine">{_number(low)} to {_number(high)}</span>'
            if cell.get("inside") is False:
                text = f'<span class="bad">{text}</span>'
        elif name == "difference" and scale:
            text = _plot(cell, scale)
        cells.append(f'<td class="n{"" if place else " group"}">{text}</td>')
    return "".join(cells)


def _number(value: float) -> str:
    if abs(value) >= 1e6:
        return units.scientific(value, 4)
    return units.significant(value, len(f"{abs(value):.0f}") if value == int(value) else 5)


def _scale(result: dict[str, Any], column: str) -> float | None:
    """Returns the largest difference from the base in a column, printed or measured; None if there is none."""
    ends = [
        abs(value)
        for row in result["rows"].values()
        for key in ("printed_difference", "corrected_difference")
        for value in (row[column].get(key), *(row[column].get("difference") or ()))
        if value is not None
    ]
    return max(ends, default=0.0) or None


def _plot(cell: dict[str, Any], scale: float) -> str:
    """Draws a printed difference (or a corrected one) as a ring and a measured one as a bar over its interval."""
    source = "corrected" if "corrected_difference" in cell else "printed"
    printed, measured = cell.get(f"{source}_difference"), cell.get("difference")
    if printed is None and measured is None:
        return ""

    def x(value: float) -> float:
        return WIDTH / 2 + value / scale * (WIDTH / 2 - 6)

    middle = HEIGHT / 2
    parts = [f'<line x1="{WIDTH / 2}" y1="0" x2="{WIDTH / 2}" y2="{HEIGHT}" class="zero"/>']
    words = []
    if measured is not None:
        low, high = (x(end) for end in measured)
        parts.append(f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" class="interval"/>')
        parts.append(f'<circle cx="{(low + high) / 2:.1f}" cy="{middle}" r="3.5" class="measured"/>')
        words.append(f"measured {_number(measured[0])} to {_number(measured[1])}")
    if printed is not None:
        parts.append(f'<circle cx="{x(printed):.1f}" cy="{middle}" r="4.5" class="printed"/>')
        words.append(f"{source} {_number(printed)}")
    title = escape(", ".join(words))
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img"><title>{title}</title>{"".join(parts)}</svg>'
