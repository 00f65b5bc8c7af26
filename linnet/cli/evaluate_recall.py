"""The part of `linnet evaluate` that asks for recall without training on it: --recall."""

from rich.console import Console
from rich.table import Table

from linnet.cli.evaluate_run import Opened, progress


def ask_recall(opened: Opened, asked: dict):
    """Asks MQAR and the recall tasks of MAD, prints accuracy by length and pairs, and gives the record.

    Args:
        asked: values of `RecallConfig`.
    """
    from linnet.config import parse
    from linnet.evaluate.recall import RecallConfig, cells, run_recall, to_results
    from linnet.evaluate.results import Evaluation

    config = parse(RecallConfig, asked, "recall")
    total = sum(config.samples for _ in cells(config))
    with progress(opened, "sequences", total) as advance:
        found = run_recall(opened.model, opened.tokenizer, config, progress=advance)
    if not opened.quiet:
        Console().print("share right: of all tokens, of the values in the sequence (by guessing among these)")
        for task in dict.fromkeys(cell.task for cell in found):
            _show(task, [cell for cell in found if cell.task == task])
    settings = config.model_dump() | {"precision": opened.precision}
    return Evaluation(
        "recall", opened.about, settings, to_results(found), {"cells": [cell.to_dict() for cell in found]}
    )


def check_cells(opened: Opened, asked: dict) -> None:
    """Raises ConfigError where the model's vocabulary has too few words for any cell."""
    from linnet.config import parse
    from linnet.evaluate.recall import RecallConfig, check_recall

    check_recall(parse(RecallConfig, asked, "recall"), opened.tokenizer, opened.model.config.vocab_size)


def _show(task: str, found: list) -> None:
    lengths = sorted({cell.length for cell in found})
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(task, min_width=17)
    for length in lengths:
        table.add_column(f"{length:,} tokens", justify="right")
    for pairs in sorted({cell.pairs for cell in found}):
        row = {cell.length: cell for cell in found if cell.pairs == pairs}
        table.add_row(f"{pairs:,} pairs", *(_cell(row.get(length)) for length in lengths))
    Console().print(table)


def _cell(cell) -> str:
    if cell is None:
        return "-"
    return f"{cell.accuracies.mean():.2f} {cell.choices.mean():.2f} ({cell.chance:.2f})"
