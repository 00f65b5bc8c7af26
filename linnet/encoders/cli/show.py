"""Tables of `linnet evaluate masked`, `glue` and `lra`."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from linnet.evaluate.results import Evaluation, shown_score
from linnet.options import BOLD, WIDE, make_table

MEANINGS = {
    "masked_perplexity": "per masked token",
    "pseudo_log_likelihood": "nats per sentence",
    "pseudo_perplexity": "per token of the sentences",
    "auc": "of pseudo-log-likelihoods; guessing: 0.5",
    "auc_per_token": "of their means over tokens; guessing: 0.5",
}


def show_numbers(record: Evaluation, path: Path) -> None:
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
    from linnet.encoders.evaluate.glue import average
    from linnet.encoders.glue import SCORES, TASKS

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
    """Returns the table of the Long Range Arena by architecture (`linnet.encoders.evaluate.lra.table`), and prints it.

    Args:
        records: of the kind `lra`, by the path of the run.
    """
    from linnet.encoders.evaluate.lra import SCORES, table

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
