"""Output of `linnet evaluate`: progress while it runs, and a table per record."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from linnet.companions import Offer
from linnet.evaluate.results import Evaluation, Result, shown_score
from linnet.laws.orders import FEWEST
from linnet.options import BOLD, WIDE, Steps, make_table


class _Bar:
    """A progress bar as a `linnet.evaluate.session.Meter`."""

    def __init__(self, shown: Any, task: Any):
        self._shown, self._task = shown, task

    def __call__(self, more: int) -> None:
        from linnet.parallel.mesh import sharers

        self._shown.advance(self._task, more * sharers())

    def reach(self, done: int, total: int) -> None:
        self._shown.update(self._task, completed=done, total=total)


@contextmanager
def bar(unit: str, total: int | None) -> Iterator[_Bar]:
    """A progress bar on stderr; a line now and then where it is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Steps(*columns, console=Console(stderr=True)) as shown:
        yield _Bar(shown, shown.add_task(unit, total=total))


def show(record: Evaluation, path: Path) -> None:
    """Prints a record of the model at `path` as a table."""
    tables = {"text": _show_text, "blocks": _show_blocks, "needle": _show_needle, "recall": _show_recall}
    Offer("tables", tables).get(record.kind, _show_tasks)(record, path)


def _show_text(record: Evaluation, path: Path) -> None:
    console, score = Console(), record.detail
    name, count = record.model["run"], len(score["documents"])
    way = f"windows of {score['window']} tokens every {score['stride']}" if score["window"] else "the carried state"
    documents = f"{count:,} document{'s' if count != 1 else ''}"
    console.print(f"{name}: {documents} by {way}", highlight=False, markup=False)
    table = make_table(style=WIDE | {"show_header": False})
    low_high = score["bits_per_byte_interval"]
    few = len(score["documents"]) < FEWEST
    fewer = f"no interval: fewer than {FEWEST} documents" if few else "no interval: all documents have one value"
    interval = f"95 % interval {low_high[0]:.4f} to {low_high[1]:.4f}" if low_high else fewer
    table.add_row("bits per byte", f"{score['bits_per_byte']:.4f}", interval)
    table.add_row("loss", f"{score['loss']:.4f}", "nats per token")
    for what in ("perplexity", *(["word_perplexity"] if score["words"] else []), "byte_perplexity"):
        unit = what.partition("_")[0] if "_" in what else "token"
        table.add_row("perplexity", _short(score[what]), f"per {unit}")
    console.print(table)
    by_context = make_table("#tokens of context", "#loss", "#tokens scored", style=BOLD)
    for bucket in score["contexts"]:
        span = f"{bucket['start']:,} to {bucket['end'] - 1:,}"
        by_context.add_row(span, f"{bucket['loss']:.4f}", f"{bucket['tokens']:,}")
    console.print(by_context)


def _show_blocks(record: Evaluation, path: Path) -> None:
    console, detail = Console(), record.detail
    values = {(result.task, result.metric): result.value for result in record.results}
    tasks = list(dict.fromkeys(task for task, _ in values))
    heads = {"blocks": f"blocks of {record.asked['block']}", "carried": "carried state"}
    table = make_table("", *(f"#{heads[task]}" for task in tasks), style=BOLD)
    end = "line end" if detail["line_ends"] else "end of a text"
    for metric, unit in (
        ("perplexity", f"perplexity per token and {end} ({detail['tokens']:,})"),
        ("word_perplexity", f"perplexity per word and line end ({detail['words_and_line_ends']:,})"),
        ("bits_per_byte", f"bits per byte ({detail['bytes']:,})"),
    ):
        shown = (f"{values[task, metric]:.4f}" if "bits" in metric else _short(values[task, metric]) for task in tasks)
        table.add_row(unit, *shown)
    step = "" if record.model.get("step") is None else f", step {record.model['step']:,}"
    console.print(f"{record.model['run']}{step}: content {record.scored}", highlight=False, markup=False)
    console.print(table)
    console.print("the first line is the number of papers 001 to 003; it is not a word perplexity", style="dim")
    if "carried" not in tasks:
        console.print("no carried state: this model has none of a fixed size for a text of any length", style="dim")


def _short(perplexity: float) -> str:
    """Returns a number with two decimals, or as `shown_score` if it is 1,000 or more."""
    return f"{perplexity:.2f}" if perplexity < 1000 else shown_score(perplexity)


def _show_needle(record: Evaluation, path: Path) -> None:
    console, detail = Console(), record.detail
    columns = ("#tokens", "#at this length", "#up to it", "#penalty", "from the first depth to the last")
    table = make_table(*columns, style=BOLD)
    for i, length in enumerate(detail["config"]["lengths"]):
        cells = "".join(" ░▒▓█"[round(4 * row[i])] for row in detail["accuracy"])
        numbers = (detail[name][i] for name in ("at_length", "up_to_length", "penalties"))
        table.add_row(f"{length:,}", *(f"{value:.3f}" for value in numbers), cells)
    console.print(table)
    accuracy = next(result for result in record.results if result.metric == "accuracy")
    prompts = f"{accuracy.n * detail['config']['samples']:,} prompts"
    scores = f"weighted {detail['weighted']:.4f}, NIAH score {detail['score']:.4f}"
    console.print(f"accuracy {accuracy.value:.4f} of {prompts}, {scores}")
    console.print(f"the grid as a page: linnet compare {escape(str(path))}", soft_wrap=True, style="dim")


def _show_recall(record: Evaluation, path: Path) -> None:
    console, asked = Console(), record.asked
    measured = {(cell["task"], cell["length"], cell["pairs"]): cell for cell in record.detail["cells"]}
    missing = {(row["task"], row["length"], row["pairs"]): row["reason"] for row in record.detail["not_measured"]}
    console.print("accuracy among all tokens, accuracy among the values in the sequence (in parentheses: by guessing)")
    units = {"mqar": "pairs", "selective_copying": "to copy"}
    for task in dict.fromkeys(asked["tasks"]):
        lengths = sorted(set(asked["lengths"]))
        table = make_table(task, *(f"#{length:,} tokens" for length in lengths), style=BOLD)
        table.columns[0].min_width = 17
        for pairs in sorted(set(asked["pairs"])):
            places = ((task, length, pairs) for length in lengths)
            cells = (missing.get(place) or _cell(measured[place]) for place in places)
            table.add_row(f"{pairs:,} {units.get(task, 'keys')}", *cells)
        console.print(table)
    if {"in_context_recall", "noisy_recall", "fuzzy_recall"}.intersection(asked["tasks"]):
        console.print("keys: what a sequence draws its keys from, and as many values", highlight=False)
    reasons = {"too short": "the length does not hold a sequence with so many"}
    reasons["too few words"] = "the model has fewer tokens of visible text than a sequence needs"
    for reason in sorted(set(missing.values())):
        console.print(f"not measured, {reason}: {reasons[reason]}", highlight=False)


def _cell(cell: dict) -> str:
    return f"{cell['accuracy']:.2f} {cell['choice']:.2f} ({cell['chance']:.2f})"


def _show_tasks(record: Evaluation, path: Path) -> None:
    from linnet.evaluate.classification import exact_interval

    table = make_table("task", "metric", "#value", "#error", "#guessing", "#questions", style=BOLD)
    chances = {(task, metric): value for task, metric, value in record.detail.get("chance", ())}
    results = {(result.task, result.metric): result for result in record.results}
    alike: list[Result] = []
    for place in map(tuple, record.detail.get("shown", results)):
        result, chance = results[place], chances.get(place)
        error = _standard_error(result)
        alike += [result] if error == 0 else []
        numbers = ("" if value is None else f"{value:.4f}" for value in (error or None, chance))
        table.add_row(escape(result.task), escape(result.metric), shown_score(result.value), *numbers, f"{result.n:,}")
    console = Console()
    console.print(table)
    for result in alike:
        score, shares = result.items[0].score, {item.weight for item in result.items}
        within = ""
        if score in (0.0, 1.0) and len(shares) == 1:
            low, high = exact_interval(int(score) * result.n, result.n)
            within = f"; 95 % interval {low:.2f} to {high:.2f}"
        text = f"{result.task} {result.metric}: all {result.n:,} score the same, which gives no error{within}"
        console.print(text, highlight=False, markup=False)


def _standard_error(result: Result) -> float | None:
    """Returns the standard error of a mean with equal weights over at least two questions, else None."""
    from statistics import stdev

    if result.average != "mean" or len(result.items) < 2 or len({item.weight for item in result.items}) > 1:
        return None
    return stdev(item.score for item in result.items) / len(result.items) ** 0.5
