"""`linnet reproduce`: tables and figures of the papers, each with its command, its cost and its verdicts."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linnet.options import AsJson, echo_json, options


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
    import webbrowser

    from linnet.papers.page import write_reproductions

    page = write_reproductions(folder, out)
    typer.echo(page)
    if open_:
        webbrowser.open(page.resolve().as_uri())


if TYPE_CHECKING:
    from rich.console import Console

TICK = 2.0  # seconds between two signs of work


class _Reproduce(typer.core.TyperGroup):
    """Takes `linnet reproduce 001 table4` as `linnet reproduce items 001 table4`."""

    default = "items"

    def parse_args(self, ctx, args):
        if not args or args[0] not in self.commands:  # also --help: the options are those of `items`
            args = [self.default, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Reproduce,
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
    "linnet reproduce report": "one page of all that was run",
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

    The settings of an item are those of its file; there is no --set.

    Args:
        paper (PAPER): 000 to 004; without ITEM, its items are listed.
        names (ITEM...): Items, such as table4; linnet reproduce lists them.
        scale (reduced|full): reduced: the declared small form; full: the paper's size.
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
    given = _data(data or [], problems)
    numbers = _seeds(seeds, problems)
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
        if (plan or only or given or numbers or waterfall) and (paper is None or entries):
            fix = "name an ITEM" + (
                f": {', '.join(e.name for e in entries[:4])}, ..." if entries else ", such as 000 table7"
            )
            problems.append(
                f"--plan, --only, --data, --seeds and --waterfall: belong to an item, and none is named; {fix}"
            )
        refuse(problems, "command line")
        if markdown and own is not None:
            raise ConfigError(["--markdown: prints the page of Linnet's own items; leave --items out"], "command line")
        return _list(library, paper or only_paper, as_json, markdown)
    if markdown:
        problems.append("--markdown: prints the page of all papers; leave PAPER and ITEM out")

    from rich.console import Console
    from rich.markup import escape

    from linnet.papers.cli.show import print_plan, print_result
    from linnet.papers.prepare import prepare
    from linnet.papers.run import run
    from linnet.papers.work import Request

    chosen = tuple(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    form = scale if scale in SCALES else "reduced"  # of a wrong one, so that all else is checked too
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with _at_work(console):
        works = prepare(library, entries, Request(form, chosen, given, numbers, out, plan, allow_plugins), problems)
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
    found = {entry.key: library.items.get((entry.paper, f"{entry.name}-waterfall")) for entry in entries}
    having = [f"{of} {name.removesuffix('-waterfall')}" for of, name in library.items if name.endswith("-waterfall")]
    fix = f"only {', '.join(having)} has one" if having else "no item has one"
    problems += [f"--waterfall: {key} has no waterfall; {fix}" for key, one in found.items() if one is None]
    return [one for one in found.values() if one is not None]


def _list(library, paper: str | None, as_json: bool, markdown: bool) -> None:
    from linnet.papers.cli.show import as_record, print_list
    from linnet.papers.markdown import write_markdown

    if markdown:
        typer.echo(write_markdown(library), nl=False)
        return
    entries = [entry for entry in library.items.values() if paper in (None, entry.paper)]
    if as_json:
        echo_json([as_record(entry) for entry in entries])
    else:
        print_list(library, entries)


def _data(given: list[str], problems: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (equals and name and folder):
            problems.append(f"--data {text!r}: write NAME=FOLDER, such as wikitext-103=~/data/wikitext-103")
        elif name in found:
            problems.append(f"--data {name}: given twice; keep one")
        else:
            found[name] = str(Path(folder).expanduser().absolute())
    return found


def _seeds(text: str, problems: list[str]) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdecimal() and int(part) < 1 << 63 for part in parts):
        problems.append(f"--seeds {text!r}: write numbers below 2^63 with commas between, such as 0,1,2")
        return ()
    return tuple(dict.fromkeys(map(int, parts)))
