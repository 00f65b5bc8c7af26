"""`linnet corpus report`: what a corpus holds and what each stage did to it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linnet.corpus.cli.stages import Bar
from linnet.options import AsJson, echo_json, make_table, options


@options
def report(
    folders: list[str],
    *,
    tokenizer: str | None = None,
    measure_bytes: Annotated[int | None, typer.Option(min=0)] = None,
    out: Path | None = None,
    as_json: AsJson = False,
    open_: bool = False,
) -> None:
    """Show what a corpus holds and what each stage did: tables here, and one page that needs no network.

    Documents, bytes, tokens and shares by source and by script (paper 001,
    Table 10), what was left out by stage and reason, duplicates, scores,
    characters per token, and examples before and after. Unfinished pipelines
    are shown as far as they are.

    Example: [bold]linnet corpus report clean dedup --tokenizer tokenizer.json --open[/]

    Args:
        folders (FOLDER): Folders of stages. The last of a chain is enough for all counts; each has its own examples.
        tokenizer: tokenizer.json, byte or hf:NAME: counts tokens (default: no tokens are counted).
        measure_bytes: Bytes of text that are read for scripts, scores and tokens; 0: all (default: 64 MiB).
        out: The page; the pictures go beside it. Default: report/index.html in the last FOLDER.
        as_json: Print one JSON object; writes no page.
        open_: Show the page in the browser.
    """
    import webbrowser

    from linnet.config import FIGURES, check_study, parse
    from linnet.corpus.page.records import MEASURED, read_corpus
    from linnet.data import DataConfig, given_tokenizer

    if not as_json:
        check_study(FIGURES, "corpus report", "; or use --json, which draws nothing")
    counter, measured = None, MEASURED if measure_bytes is None else measure_bytes
    if tokenizer is not None:
        counter = given_tokenizer(parse(DataConfig, {"tokenizer": tokenizer}, "corpus report").tokenizer)
    with Bar(Console(stderr=True)) as bar:
        if as_json:
            found, page = read_corpus(folders, counter, measure_bytes=measured, progress=bar), None
        else:
            from linnet.corpus.page import write_corpus

            page, found = write_corpus(
                folders,
                out,
                tokenizer=counter,
                tokenizer_name=tokenizer,
                measure_bytes=measured,
                progress=bar,
            )
    if page is None:
        echo_json(found.values(), ensure_ascii=False)
        return
    _show(found.values())
    typer.echo(page)
    if open_:
        webbrowser.open(page.resolve().as_uri())


def _show(values: dict) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for problem in values["problems"]:
        console.print(f"[yellow]{escape(problem)}[/]")
    for kind in ("source", "script"):
        console.print(_tallies(kind, values[f"{kind}s"], values["total"]))
    if values["measured"] < 1:
        share = f"{values['measured']:.2%}"
        console.print(f"scripts and tokens are estimates from {share} of the bytes; --measure-bytes 0 takes all")
    table = make_table("stage", "reason", "#documents left out", "#of those read")
    for stage in values["stages"]:
        for reason, number in stage["drops"].items():
            share = number / stage["documents read"] if stage["documents read"] else 0
            table.add_row(escape(stage["name"]), escape(reason), f"{number:,}", f"{share:.2%}")
    if table.row_count:
        console.print(table)
    if values["token_scripts"]:
        rows = [
            (escape(name), *(f"{share[key] / share['tokens']:.2f}" for key in ("characters", "bytes")))
            for name, share in values["token_scripts"].items()
        ]
        console.print(make_table("script", "#characters/token", "#bytes/token", rows=rows))


def _tallies(kind: str, rows: dict[str, dict], total: dict) -> Table:
    by = "tokens" if total["tokens"] else "bytes"
    table = make_table(kind, "#documents", "#bytes", "#tokens", f"#share of {by}")
    for name, row in [*rows.items(), ("total", total)]:
        numbers = ["-" if row[key] is None else f"{row[key]:,}" for key in ("documents", "bytes", "tokens")]
        share = (row[by] or 0) / total[by] if total[by] else 0
        table.add_row(escape(name), *numbers, f"{share:.1%}")
    return table
