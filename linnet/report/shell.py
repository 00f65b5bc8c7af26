"""The frame of every report: one HTML page that needs no network, and a PNG and an SVG file of each figure."""

import contextlib
import functools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import linnet
from linnet import provenance
from linnet.config import ConfigError, printable, unwritable
from linnet.report import style, units
from linnet.report.drawing import Figure
from linnet.runs import RunFolder
from linnet.runs.files import write_atomic

CORRELATION = "correlate.html"  # the page of `linnet mad correlate`, beside the folder's own


def page_name(folder: str | Path, out: str | Path | None, name: str = "index.html") -> Path:
    """Returns the path of a page: `out`, or report/`name` in the folder that the page describes."""
    return Path(out) if out is not None else Path(folder) / "report" / name


def page_path(folder: str | Path, out: str | Path | None, name: str = "index.html") -> Path:
    """`page_name`, checked, with its folder made."""
    page = page_name(folder, out, name)
    check_page(page)
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"--out {str(page)!r}: its folder cannot be made ({error.strerror}); name another"
        raise ConfigError([problem], "report") from None
    return page


def check_page(page: Path) -> None:
    """Raises ConfigError if a page cannot be written; creates nothing, so that it can be called before any work."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise ConfigError([f"--out {str(page)!r}: name a page, for example {str(page / 'index.html')!r}"], "report")
    if page.is_dir():
        raise ConfigError([f"--out {str(page)!r}: is a folder; name a page, for example one in it"], "report")
    check_folder(page.parent, page)
    if page.exists() and not os.access(page, os.W_OK):
        raise ConfigError([f"--out {str(page)!r}: may not be written; name another"], "report")


def check_folder(folder: Path, out: Path) -> None:
    """Raises ConfigError if a folder cannot be made or written; creates nothing. `out` is the path for messages."""
    if reason := unwritable(folder):
        raise ConfigError([f"--out {str(out)!r}: its folder {reason}; name another place"], "report")


def typed(*words: str | Path, **options: object) -> str:
    """Returns a command line; options that are None are left out, and options that are True have no value."""
    line = [str(word) for word in words]
    for name, value in options.items():
        line += [] if value is None else [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(line)


def write_pictures(folder: Path, figure: Figure) -> None:
    import vl_convert

    themed = _printable(figure.spec) | {"config": style.theme(font=style.PICTURE_FONT), "padding": 12}
    svg = vl_convert.vegalite_to_svg(themed, vl_version=_vegalite())
    ids: dict[str, int] = {}  # counted from 0 in each file; vega counts through the process
    svg = re.sub(r'(id="clip|url\(#clip)(\d+)', lambda clip: clip[1] + str(ids.setdefault(clip[2], len(ids))), svg)
    for suffix, content in (("svg", svg.encode()), ("png", vl_convert.svg_to_png(svg, scale=2))):
        write_atomic(folder / f"{figure.name}.{suffix}", content)


def write_page(page: Path, html: str, figures: Iterable[Figure] = ()) -> None:
    """Writes a page, after the pictures of its figures beside it."""
    for figure in figures:
        write_pictures(page.parent, figure)
    write_atomic(page, html)


def _printable(spec):
    """Returns a specification without the characters that end the process which draws them."""
    if isinstance(spec, dict):
        return {key: _printable(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_printable(value) for value in spec]
    return printable(spec) if isinstance(spec, str) else spec


@functools.cache
def _bundle() -> str:
    """vega, vega-lite and vega-embed as one script."""
    import vl_convert

    return vl_convert.javascript_bundle(vl_version=_vegalite())


def _vegalite() -> str:
    """The vega-lite release that Altair writes for, as vl-convert names it: 6.4."""
    import altair as alt

    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def document(title: str, parts: Sequence[str], figures: bool = True) -> str:
    """The page: `parts` are HTML, in order. Without `figures`, it has no scripts and needs no drawing package."""
    scripts = []
    if figures:
        themes = {"light": style.theme(), "dark": style.theme(dark=True)}
        scripts = [
            f'<script type="application/json" id="themes">{_json(themes)}</script>',
            f"<script>{_bundle()}</script>",
            f"<script>{_resource('page.js')}</script>",
        ]
    whole = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{_resource('page.css')}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        *parts,
        "</main>",
        *scripts,
        "</body></html>\n",
    ]
    return "\n".join(whole)


def swatch(architectures: Sequence[str], name: str) -> str:
    """An architecture's name with its colour."""
    colour = style.colours(architectures)[name]
    return f'<span class="arch"><i style="background:{colour}"></i>{escape(name)}</span>'


def key(architectures: Sequence[str]) -> str:
    """The sticky bar that names the colours and brings one architecture forward in all figures."""
    buttons = "".join(
        f'<button type="button" aria-pressed="false" data-name="{escape(name)}">{swatch(architectures, name)}</button>'
        for name in architectures
    )
    label = "Bring one architecture forward in all figures"
    return f'<div class="key" role="group" aria-label="{label}"><span>Bring forward</span>{buttons}</div>'


def section(figure: Figure, command: str) -> str:
    """A figure with its caption, its files, and the command that redraws it."""
    png, svg = (
        f'<a href="{figure.name}.{form}" aria-label="{form.upper()} of {escape(figure.title)}">{form.upper()}</a>'
        for form in ("png", "svg")
    )
    return (
        f"<section><h2>{escape(figure.title)}</h2>"
        f'<p class="caption">{escape(figure.caption)}</p>'
        f'<div class="figure" id="{figure.name}"></div>'
        f'<noscript><img src="{figure.name}.svg" alt="{escape(figure.title)}" width="1080"></noscript>'
        f'<script type="application/json" id="spec-{figure.name}">{_json(figure.spec)}</script>'
        f'<p class="files">{png} · {svg} · '
        f"redrawn by <code>{escape(command)}</code></p></section>"
    )


def facts(values: dict[str, str]) -> str:
    """Names and HTML texts as a list; empty texts are left out."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{text}</dd>" for name, text in values.items() if text)
    return f"<dl>{items}</dl>"


def captioned(title: str, caption: str, *content: str) -> list[str]:
    """Returns a section of a page: a title, a caption and further content, all of HTML."""
    return [f"<h2>{title}</h2>", f'<p class="caption">{caption}</p>', *content]


def findings(lines: Iterable[str], title: str = "What was found") -> list[str]:
    """Returns the section of a page that lists what was found, from lines of HTML."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return [f"<h2>{title}</h2>", f'<ul class="findings">{items}</ul>']


def how_made(command: str, source: str, values: dict[str, str]) -> list[str]:
    """Returns the last section of a page as HTML: the command that draws it again, further facts, and versions.

    Args:
        source: what the command reads; "" if the page does not say it.
    """
    redraw = f"<code>{escape(command)}</code>" + (f", from {source}" if source else "")
    every = {"Redraw": redraw, **values, "Drawn with": escape(drawn_with())}
    return ["<h2>How this was made</h2>", facts(every)]


def made_by(folder: str | Path) -> str:
    """Returns dates, versions and devices of the runs directly in a folder, from their result.json; "" if unknown."""
    results = []
    for path in sorted(Path(folder).glob("*/result.json")):
        with contextlib.suppress(ConfigError):  # damaged files are reported where scores are read
            results.append(RunFolder(path.parent).result())
    return escape(provenance.shown(results))


def drawn_with() -> str:
    """Returns the versions of the drawing packages."""
    import altair
    import vl_convert

    versions = {"linnet": linnet.__version__, "altair": altair.__version__, "vega-lite": _vegalite()}
    return pairs(versions | {"vl-convert": vl_convert.__version__})


def pairs(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def refused(reasons: Iterable[str]) -> str:
    """Returns the content of a cell whose number is refused."""
    return f'<span class="refused">refused</span><div class="why">{units.prose(*reasons)}</div>'


class Cell(NamedTuple):
    """A cell of a table with more than its text: attributes such as `data-v`, or a class other than its column's."""

    text: object
    attributes: str = ""
    kind: str | None = None


def sorted_by(value: object, text: object) -> Cell:
    """Returns a cell whose column sorts by a value."""
    return Cell(text, f' data-v="{"" if value is None else value}"')


def number(value: float | None, form: Callable[[Any], str], titled: bool = False) -> Cell:
    """Returns a cell that shows a number in a form and sorts by it; `titled` shows all digits on hovering."""
    if value is None:
        return sorted_by("", units.MISSING)
    cell = sorted_by(f"{value:.10g}", form(value))
    return cell._replace(attributes=f'{cell.attributes} title="{value:.10g}"') if titled else cell


_KINDS = {"#": "n", "?": "why", "*": "th"}


def table(name: str, columns: Iterable, rows: Iterable, kind: str = "", ids: Sequence[str] = ()) -> str:
    """Returns an HTML table, which scrolls sideways if it is too wide; "" if there are no rows.

    Args:
        columns: titles or `Cell`s of them, with "#" before those of numbers, "?" of reasons and "*" of names of rows.
        rows: of cells, which are HTML or a `Cell`. A row, or all titles, may also be HTML as a whole.
        ids: of the rows.
    """
    heads = [] if isinstance(columns, str) else [title if isinstance(title, Cell) else Cell(title) for title in columns]
    kinds = [_KINDS.get(str(cell.text)[:1], "") for cell in heads]
    head = columns if isinstance(columns, str) else "".join(map(_head, heads, kinds))
    lines = [row if isinstance(row, str) else f"<tr>{''.join(map(_cell, row, kinds))}</tr>" for row in rows]
    lines = [f'<tr id="{anchor}">{line[4:]}' for anchor, line in zip(ids, lines, strict=True)] if ids else lines
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table id="{name}" class="{kind}">{body}</table></div>' if lines else ""


def _head(cell: Cell, kind: str) -> str:
    title = str(cell.text)[1:] if kind else cell.text
    return (
        f'<th scope="col" class="n">{title}</th>' if kind == "n" else f'<th scope="col"{cell.attributes}>{title}</th>'
    )


def _cell(cell: object, kind: str) -> str:
    text, attributes, cell_kind = cell if isinstance(cell, Cell) else (cell, "", None)
    kind = kind if cell_kind is None else cell_kind
    if kind == "th":
        return f'<th scope="row">{text}</th>'
    return f'<td class="{kind}"{attributes}>{text}</td>' if kind else f"<td{attributes}>{text}</td>"


def _json(value) -> str:
    """Returns JSON that is safe inside a script element: neither `</script>` nor `<!--` of a name is read as HTML."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return files("linnet.report").joinpath(name).read_text(encoding="utf-8")
