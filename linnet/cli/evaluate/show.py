"""Output of `linnet evaluate`: progress while it runs, and a table per record."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from linnet.evaluate.results import Evaluation, Result, shown_score
from linnet.options import BOLD, WIDE, make_table


class _Bar:
    """A progress bar as a `linnet.evaluate.session.Meter`."""

    def __init__(self, shown: Any, task: Any):
        self._shown, self._task = shown, task

    def __call__(self, more: int) -> None:
        self._shown.advance(self._task, more)

    def reach(self, done: int, total: int) -> None:
        self._shown.update(self._task, completed=done, total=total)


@contextmanager
def bar(unit: str, total: int | None) -> Iterator[_Bar]:
    """A progress bar on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield _Bar(shown, shown.add_task(unit, total=total))


def show(record: Evaluation, path: Path) -> None:
    """Prints a record of the model at `path` as a table."""
    if record.kind == "text":
        _show_text(record)
    elif record.kind == "blocks":
        _show_blocks(record)
    elif record.kind == "needle":
        _show_needle(record, path)
    elif record.kind == "recall":
        _show_recall(record)
    elif record.kind == "images":
        _show_images(record, path)
    elif record.kind in ("masked", "sentences", "cola", "glue", "lra"):
        _show_numbers(record)
    elif record.kind == "samples":
        _show_samples(record, path)
    else:
        _show_tasks(record)


def _show_text(record: Evaluation) -> None:
    console, score = Console(), record.detail
    name, count = record.model["run"], len(score["documents"])
    way = f"windows of {score['window']} tokens every {score['stride']}" if score["window"] else "the carried state"
    documents = f"{count:,} document{'s' if count != 1 else ''}"
    console.print(f"{name}: {documents} by {way}", highlight=False, markup=False)
    table = make_table(style=WIDE | {"show_header": False})
    low_high = score["bits_per_byte_interval"]
    interval = f"95 % interval {low_high[0]:.4f} to {low_high[1]:.4f}" if low_high else ""
    table.add_row("bits per byte", f"{score['bits_per_byte']:.4f}", interval)
    table.add_row("loss", f"{score['loss']:.4f}", "nats per token")
    for what in ("perplexity", "word_perplexity", "byte_perplexity"):
        unit = what.partition("_")[0] if "_" in what else "token"
        table.add_row("perplexity", _short(score[what]), f"per {unit}")
    console.print(table)
    by_context = make_table("#tokens of context", "#loss", "#tokens scored", style=BOLD)
    for bucket in score["contexts"]:
        by_context.add_row(
            f"{bucket['start']:,} to {bucket['end'] - 1:,}", f"{bucket['loss']:.4f}", f"{bucket['tokens']:,}"
        )
    console.print(by_context)


def _show_blocks(record: Evaluation) -> None:
    console, found = Console(), record.detail
    values = {(one.task, one.metric): one.value for one in record.results}
    tasks = list(dict.fromkeys(task for task, _ in values))
    heads = {"blocks": f"blocks of {record.asked['block']}", "carried": "carried state"}
    table = make_table("", *(f"#{heads[task]}" for task in tasks), style=BOLD)
    end = "line end" if found["line_ends"] else "end of a text"
    for metric, unit in (
        ("perplexity", f"perplexity per token and {end} ({found['tokens']:,})"),
        ("word_perplexity", f"perplexity per word and line end ({found['words_and_line_ends']:,})"),
        ("bits_per_byte", f"bits per byte ({found['bytes']:,})"),
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
    console, found = Console(), record.detail
    columns = ("#tokens", "#at this length", "#up to it", "#penalty", "from the first depth to the last")
    table = make_table(*columns, style=BOLD)
    for i, length in enumerate(found["config"]["lengths"]):
        cells = "".join(" ░▒▓█"[round(4 * row[i])] for row in found["accuracy"])
        numbers = (found[name][i] for name in ("at_length", "up_to_length", "penalties"))
        table.add_row(f"{length:,}", *(f"{value:.3f}" for value in numbers), cells)
    console.print(table)
    accuracy = next(one.value for one in record.results if one.metric == "accuracy")
    console.print(f"accuracy {accuracy:.4f}, weighted {found['weighted']:.4f}, NIAH score {found['score']:.4f}")
    console.print(f"the grid as a page: linnet compare {escape(str(path))}", soft_wrap=True, style="dim")


def _show_recall(record: Evaluation) -> None:
    console, found = Console(), record.detail["cells"]
    console.print("accuracy among all tokens, accuracy among the values in the sequence (in parentheses: by guessing)")
    for task in dict.fromkeys(cell["task"] for cell in found):
        cells = {(cell["length"], cell["pairs"]): cell for cell in found if cell["task"] == task}
        lengths = sorted({length for length, _ in cells})
        table = make_table(task, *(f"#{length:,} tokens" for length in lengths), style=BOLD)
        table.columns[0].min_width = 17
        for pairs in sorted({pairs for _, pairs in cells}):
            table.add_row(f"{pairs:,} pairs", *(_cell(cells.get((length, pairs))) for length in lengths))
        console.print(table)


def _cell(cell: dict | None) -> str:
    return "-" if cell is None else f"{cell['accuracy']:.2f} {cell['choice']:.2f} ({cell['chance']:.2f})"


def _show_images(record: Evaluation, path: Path) -> None:
    console, found = Console(), record.detail
    values = {one.metric: one.value for one in record.results}
    speed = f"{found['images_per_second']:,.0f} images per second"
    console.print(f"{record.model['run']}: {found['images']:,} images, {speed}", highlight=False, markup=False)
    table = make_table(style=WIDE | {"show_header": False})
    chances = {metric: value for _, metric, value in found["chance"]}
    for metric, name in (("accuracy", "accuracy"), ("top5_accuracy", "top-5 accuracy")):
        if metric in values:
            low, high = found["wilson"][metric]
            interval = f"95 % interval {low:.2%} to {high:.2%}; guessing: {chances[metric]:.2%}"
            table.add_row(name, f"{values[metric]:.2%}", interval)
    table.add_row("loss", f"{values['nll']:.4f}", "nats per image")
    table.add_row("calibration error", f"{values['calibration_error']:.4f}", f"{len(found['bins'])} bins of confidence")
    console.print(table)
    wrong = sorted((one for one in found["confusions"] if one[0] != one[1]), key=lambda one: -one[2])
    if wrong:
        most = make_table("label", "predicted", "#images", style=BOLD)
        for label, predicted, count in wrong[:5]:
            most.add_row(escape(found["classes"][label]), escape(found["classes"][predicted]), f"{count:,}")
        console.print(most)
    console.print(f"mistakes, confusions and calibration as a page: linnet report {escape(str(path))}", soft_wrap=True,
                  style="dim")  # fmt: skip


MEANINGS = {
    "masked_perplexity": "per masked token",
    "pseudo_log_likelihood": "nats per sentence",
    "pseudo_perplexity": "per token of the sentences",
    "auc": "of pseudo-log-likelihoods; guessing: 0.5",
    "auc_per_token": "of their means over tokens; guessing: 0.5",
}


def _show_numbers(record: Evaluation) -> None:
    console, found = Console(), record.detail
    counts = ", ".join(
        f"{found[key]:,} {key}" for key in ("documents", "sentences", "sequences", "tokens") if key in found
    )
    counts = counts or f"{record.asked['task']}, {sum(one.n for one in record.results):,} sentences"
    skipped = f"; {found['skipped']:,} skipped, which are too short or too long" if found.get("skipped") else ""
    console.print(f"{record.model['run']}: {counts}{skipped}", highlight=False, markup=False)
    table = make_table(style=WIDE | {"show_header": False})
    for one in record.results:
        of_task = record.kind in ("glue", "lra")
        name = f"{one.task} {one.metric}" if of_task else one.metric.replace("_", " ")
        value = f"{one.value:.2f}" if of_task else shown_score(one.value)
        table.add_row(name, value, MEANINGS.get(one.metric, "per cent"))
    console.print(table)


def show_glue(records: dict[Path, dict], printed: bool = True) -> dict[str, Any]:
    """Returns the best score of each number of GLUE over several runs, and their average; prints both.

    Args:
        records: of the kind `glue`, by the path of the run.

    Returns:
        {"scores": {name: per cent}, "from": {name: run}, "average": per cent}.
    """
    from linnet.data.glue import SCORES, TASKS
    from linnet.evaluate.bidirectional.glue import average

    best: dict[str, tuple[float, Path, dict]] = {}  # of each task, by the mean of its numbers
    for path, record in records.items():
        scores = record["detail"]["scores"]
        task, mean = record["asked"]["task"], sum(scores.values()) / len(scores)
        if task not in best or mean > best[task][0]:
            best[task] = (mean, path, scores)
    scores = {name: value for _, _, found in best.values() for name, value in found.items()}
    runs = {name: path for task, (_, path, _) in best.items() for name in TASKS[task].scores}
    mean = average(scores)
    if printed and len(records) > 1:
        table = make_table("number", "run", "#per cent", style=BOLD)
        for name in SCORES:
            value = f"{scores[name]:.2f}" if name in scores else "missing"
            table.add_row(name, escape(runs[name].name) if name in runs else "", value)
        table.add_row("average of nine", "", f"{mean:.2f}")
        Console().print(table)
    return {"scores": scores, "from": {name: str(path) for name, path in runs.items()}, "average": mean}


def show_lra(records: dict[Path, dict], printed: bool = True) -> dict[str, Any]:
    """Returns the table of the Long Range Arena by architecture (`linnet.evaluate.lra.table`), and prints it.

    Args:
        records: of the kind `lra`, by the path of the run.
    """
    from linnet.evaluate.lra import SCORES, table

    runs = [
        {
            "architecture": record["model"]["architecture"],
            "task": record["asked"]["task"],
            "last": record["detail"]["accuracy"],
            "best": record["detail"]["best_test_accuracy"],
        }
        for record in records.values()
    ]
    found = table(runs)
    if printed:
        shown = make_table("last epoch / best epoch", *(f"#{escape(name)}" for name in found), style=BOLD)
        for task in SCORES:
            pairs = [(row["last"].get(task), row["best"].get(task)) for row in found.values()]
            shown.add_row(task, *(_last_and_best(*pair) for pair in pairs))
        for name, last, best in (
            ("average of six", "average", "best_average"),
            ("mean of those run", "mean", "best_mean"),
        ):
            shown.add_row(name, *(_last_and_best(row[last], row[best]) for row in found.values()))
        Console().print(shown)
        several = max(count for row in found.values() for count in row["runs"].values())
        if several > 1:
            Console().print(f"means over up to {several} runs of a task", highlight=False)
    return found


def _last_and_best(last: float | None, best: float | None) -> str:
    if last is None:
        return "-"
    return f"{last:.2f} / {'-' if best is None else f'{best:.2f}'}"


def _show_samples(record: Evaluation, path: Path) -> None:
    console, found, asked = Console(soft_wrap=True), record.detail, record.asked
    speed = f"{found['samples_per_second']:,.1f} per second"
    drawn = f"{asked['sampler']}, {asked['steps']} steps, guidance {asked['guidance']:g}"
    console.print(
        f"{record.model['run']}: {asked['samples']:,} samples ({drawn}; {speed})", highlight=False, markup=False
    )
    table = make_table(style=WIDE | {"show_header": False})
    distance, kernel = record.results[:2]
    real = found["real"]
    floor = f"to {real['images']:,} training images (held-out images: {real[distance.metric]:.3f})"
    table.add_row(escape(distance.metric), f"{distance.value:.3f}", floor)
    table.add_row(escape(kernel.metric), f"{kernel.value:.5f}", f"standard error {found['kernel_error']:.5f}")
    values = {one.metric: one.value for one in record.results}
    if "asked_class" in values:
        low, high = found["wilson"]
        interval = f"95 % interval {low:.1%} to {high:.1%}"
        table.add_row("asked class", f"{values['asked_class']:.1%}", interval)
    near = "nearer to training images than held-out images are (50 %: equally near)"
    table.add_row("memorised", f"{values['memorised']:.1%}", near)
    if "precision" in values:
        table.add_row("precision", f"{values['precision']:.1%}", "samples that lie among training images")
        table.add_row("recall", f"{values['recall']:.1%}", "training images that lie among samples")
    console.print(table)
    console.print(f"samples as a page: linnet report {escape(str(path))}", soft_wrap=True, style="dim")


def _show_tasks(record: Evaluation) -> None:
    table = make_table("task", "metric", "#value", "#error", "#guessing", "#questions", style=BOLD)
    chances = {(task, metric): value for task, metric, value in record.detail["chance"]}
    results = {(one.task, one.metric): one for one in record.results}
    for place in map(tuple, record.detail["shown"]):
        one, chance = results[place], chances.get(place)
        error = _standard_error(one)
        numbers = ("" if value is None else f"{value:.4f}" for value in (error, chance))
        table.add_row(escape(one.task), escape(one.metric), shown_score(one.value), *numbers, f"{one.n:,}")
    Console().print(table)


def _standard_error(result: Result) -> float | None:
    """Returns the standard error of a mean with equal weights over at least two questions, else None."""
    from statistics import stdev

    if result.average != "mean" or len(result.items) < 2 or len({item.weight for item in result.items}) > 1:
        return None
    return stdev(item.score for item in result.items) / len(result.items) ** 0.5
