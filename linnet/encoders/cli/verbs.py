"""Commands on masked language models, GLUE and the Long Range Arena."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from linnet.cli.evaluate import Running, is_given, run_all, run_evaluators
from linnet.config import ConfigError, gather, grouped, parse, refuse
from linnet.evaluate.results import Evaluation, shown_score
from linnet.options import BOLD, WIDE, AsJson, Count, Steps, by_option, echo_json, make_table, options
from linnet.runs import RunFolder
from linnet.runs.folder import STATED

if TYPE_CHECKING:
    from linnet.evaluate.session import Evaluator


SHOWN = 400  # characters of a previewed text
COLUMNS = 8  # images in a row of the contact sheet
SIDE = 256  # pixels to which a previewed image is enlarged, about
SHEET = "preview.png"
HELD = ("validation", "test")


@options
def make_lra(
    task: str,
    source: str | None = None,
    *,
    out: Path,
    samples: str | None = None,
    size: str = "full",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    selection: str = "validation",
    workers: Count = 1,
    preview: Annotated[int, typer.Option(min=0)] = 0,
    anew: bool = False,
    as_json: AsJson = False,
) -> None:
    """Make a task of the Long Range Arena: generate it, or read the published files.

    Writes shards of 1,000 rows, then stage.json with the counts and SHA-256 of
    all. The first rows do not depend on how many are generated. A preview shows
    trees as text, and writes images as one sheet, preview.png.

    Example: [bold]linnet data lra listops --out lra/listops --workers 4 --preview 3[/]

    Args:
        task (TASK): listops, pathfinder or path-x, which are generated; text, retrieval, image (grey) or
            image-as-published (colour, augmented).
        out: Folder to write; the same command resumes in it.
        source ([FOLDER]): Folder of the published files to read; see docs/lra.md for the names (default: generate).
        samples: Rows that are generated: of train, or of train,validation,test (default: as published; of train alone,
            the others in proportion).
        size: full, or reduced (short trees, images of 16 x 16 pixels).
        seed: Seed of what is generated.
        selection: Split that chooses the best epoch; test holds nothing out of train, as published for text.
        workers: Processes; the result does not depend on them.
        preview: Rows of the test split to show; 0 shows none.
        anew: Replace the task that OUT holds.
        as_json: Print stage.json.
    """
    from linnet.encoders.lra import LraCorpus
    from linnet.encoders.lra.corpus import find_maker
    from linnet.encoders.lra.stage import write_lra

    config = _config(task, source, samples, size, seed, selection)
    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Steps(*columns, console=console) as bar:
        line = bar.add_task("reading", total=None)
        stage = write_lra(
            find_maker(config, None),
            out,
            workers=workers,
            anew=anew,
            progress=lambda what, done, total: bar.update(line, description=what, completed=done, total=total),
        )
    corpus = LraCorpus(out, config.model_copy(update={"samples": None}))
    if as_json:
        echo_json({"folder": str(out), **stage})
        return
    _show(stage, out)
    if preview:
        _preview(corpus.test, min(preview, len(corpus.test)), out)


def _config(task: str, source: str | None, samples: str | None, size: str, seed: int, selection: str):
    """Returns the configuration. Raises ConfigError with the problems of all options, under their names."""
    from linnet.encoders.lra import LraDataConfig
    from linnet.encoders.lra.task import COUNTS

    values = {"task": task, "source": source, "size": size, "seed": seed, "selection": selection}
    problems = []
    if samples is not None:
        try:
            counts = [int(part.replace("_", "")) for part in samples.split(",")]
        except ValueError:
            counts = []
        if len(counts) not in (1, 3) or min(counts, default=0) < 1:
            problems.append(
                f"--samples: {samples!r} is not one or three positive numbers; write 96000 or 96000,2000,2000"
            )
        elif source is not None:
            problems.append("--samples: published files have their own number of rows; leave it out, or FOLDER")
        elif (task, size) in COUNTS:
            published = COUNTS[task, size]
            rest = [max(1, counts[0] * count // published[0]) for count in published[1:]] if len(counts) == 1 else []
            values["samples"] = dict(zip(("train", *HELD), [*counts, *rest], strict=True))
    with gather(problems, by_option(LraDataConfig.model_fields, task="TASK", source="FOLDER")):
        config = parse(LraDataConfig, values)
    refuse(problems, "linnet data lra")
    return config


def _show(stage: dict, out: Path) -> None:
    console = Console(soft_wrap=True)
    table = make_table("label", *(f"#{split}" for split in stage["labels"]))
    for label in range(stage["task"]["classes"]):
        table.add_row(str(label), *(f"{counts[label]:,}" for counts in stage["labels"].values()))
    table.add_row("[bold]all[/]", *(f"{count:,}" for count in stage["rows"].values()))
    console.print(table)
    task = stage["task"]
    if task["kind"] == "pixels":
        form = " x ".join(map(str, [task["channels"], *task["grid"]]))
        console.print(f"images of {form} (channels x height x width)")
    else:
        texts = "two texts" if task["kind"] == "pairs" else "one text"
        console.print(f"{texts} of at most {task['max_length']:,} tokens; {task['num_tokens']} ids")
    size = sum(shard["bytes"] for shard in stage["shards"])
    console.print(f"{size:,} bytes in {len(stage['shards'])} shards, in {escape(str(out))}")


def _preview(split, count: int, out: Path) -> None:
    import numpy as np

    console = Console(soft_wrap=True)
    rows = split.rows(np.arange(count))
    if split.task.kind == "pixels":
        from linnet.data.images.decode import encode_png, picture_grid
        from linnet.runs.files import write_atomic

        larger = max(1, SIDE // rows.inputs.shape[-1])
        images = rows.inputs.numpy().repeat(larger, axis=2).repeat(larger, axis=3)
        write_atomic(out / SHEET, encode_png(picture_grid(images, COLUMNS)))
        labels = rows.labels.tolist()
        lines = (" ".join(map(str, labels[at : at + COLUMNS])) for at in range(0, count, COLUMNS))
        console.print(f"{escape(str(out / SHEET))}: {count} images; labels row by row: {' / '.join(lines)}")
        return
    for ids, label in zip(rows.inputs.reshape(count, -1, rows.inputs.shape[-1]), rows.labels.tolist(), strict=True):
        for number, text in enumerate(ids.tolist()):
            name = f"label {label}: " if number == 0 else "  second: "
            console.print(escape(name + _text(split.task, text)), highlight=False)


def _text(task, ids: list[int]) -> str:
    """Returns the beginning of a row as text."""
    from linnet.encoders.lra.task import END, SYMBOLS

    space = " " if task.name == "listops" else ""
    names = [task.symbols[number - SYMBOLS] if number >= SYMBOLS else "?" for number in ids if number > END]
    text = space.join(names)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(names):,} symbols)"


MEANINGS = {
    "masked_perplexity": "per masked token",
    "pseudo_log_likelihood": "nats per sentence",
    "pseudo_perplexity": "per token of the sentences",
    "auc": "of pseudo-log-likelihoods; guessing: 0.5",
    "auc_per_token": "of their means over tokens; guessing: 0.5",
}


def show_numbers(record: Evaluation, path: Path) -> None:
    console, detail = Console(), record.detail
    counts = ", ".join(
        f"{detail[key]:,} {key}" for key in ("documents", "sentences", "sequences", "tokens") if key in detail
    )
    counts = counts or f"{record.asked['task']}, {sum(result.n for result in record.results):,} sentences"
    skipped = f"; {detail['skipped']:,} skipped, which are too short or too long" if detail.get("skipped") else ""
    console.print(f"{record.model['run']}: {counts}{skipped}", highlight=False, markup=False)
    table = make_table(style=WIDE | {"show_header": False})
    for result in record.results:
        of_task = record.kind in ("glue", "lra")
        name = f"{result.task} {result.metric}" if of_task else result.metric.replace("_", " ")
        value = f"{result.value:.2f}" if of_task else shown_score(result.value)
        table.add_row(name, value, MEANINGS.get(result.metric, "per cent"))
    console.print(table)


def show_glue(records: dict[Path, dict], printed: bool = True) -> dict[str, Any]:
    """Returns the best score of each number of GLUE over several runs, and their average; prints both.

    An average is of one pretrained model: the best fine-tunings of several are not those of any.

    Args:
        records: of the kind `glue`, by the path of the run.

    Returns:
        {"scores": {name: per cent}, "from": {name: run}, "average": per cent}; of several pretrained models
        {"models": {model: this}}.
    """
    models = grouped((_pretrained(path, record), (path, record)) for path, record in records.items())
    tables = {name: _best_of_tasks(dict(members)) for name, members in models.items()}
    for name, found in tables.items() if printed and len(records) > 1 else ():
        _print_glue(found, f"number, {escape(name)}" if len(tables) > 1 else "number")
    return {"models": tables} if len(tables) > 1 else next(iter(tables.values()))


def _pretrained(path: Path, record: dict) -> str:
    """Returns what tells the model that a run has fine-tuned from others: its architecture, and where it comes from."""
    start = RunFolder.open(path).config.get("init_from")
    return ", ".join(map(str, filter(None, [record["model"]["architecture"], start]))) or "not said"


def _best_of_tasks(records: dict[Path, dict]) -> dict[str, Any]:
    from linnet.encoders.glue import TASKS, average

    best: dict[str, tuple[float, Path, dict]] = {}  # of each task, by the mean of its numbers
    for path, record in records.items():
        scores = record["detail"]["scores"]
        task, mean = record["asked"]["task"], sum(scores.values()) / len(scores)
        if task not in best or mean > best[task][0]:
            best[task] = (mean, path, scores)
    scores = {name: value for _, _, numbers in best.values() for name, value in numbers.items()}
    runs = {name: str(path) for task, (_, path, _) in best.items() for name in TASKS[task].scores}
    return {"scores": scores, "from": runs, "average": average(scores)}


def _print_glue(found: dict[str, Any], title: str) -> None:
    from linnet.encoders.glue import SCORES

    table = make_table(title, "run", "#per cent", style=BOLD)
    scores, runs = found["scores"], found["from"]
    for name in SCORES:
        value = f"{scores[name]:.2f}" if name in scores else "missing"
        table.add_row(name, escape(Path(runs[name]).name) if name in runs else "", value)
    table.add_row("average of nine", "", f"{found['average']:.2f}")
    Console(soft_wrap=True).print(table)


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
    rows = table(runs)
    for line in _mixed(records):
        typer.echo(f"note: {line}", err=True)
    if printed:
        shown = make_table("last epoch / best epoch", *(f"#{escape(name)}" for name in rows), style=BOLD)
        for task in SCORES:
            pairs = [(row["last"].get(task), row["best"].get(task)) for row in rows.values()]
            shown.add_row(task, *(_last_and_best(*pair) for pair in pairs))
        for name, last, best in (
            ("average of six", "average", "best_average"),
            ("mean of those run", "mean", "best_mean"),
        ):
            shown.add_row(name, *(_last_and_best(row[last], row[best]) for row in rows.values()))
        Console().print(shown)
        several = max(count for row in rows.values() for count in row["runs"].values())
        if several > 1:
            Console().print(f"means over up to {several} runs of a task", highlight=False)
    return rows


OWN = {"seed", "name", "run", "parallel", *STATED}
"""Keys in which the runs of one mean may differ."""


def _mixed(records: dict[Path, dict]) -> list[str]:
    """Returns which means of `show_lra` are over runs that are not repetitions of one training."""
    from linnet.encoders.evaluate.lra import column

    places = (
        ((record["model"]["architecture"], column(record["asked"]["task"])), RunFolder.open(path).config)
        for path, record in records.items()
    )
    lines = []
    for (architecture, task), configs in grouped(places).items():
        keys = sorted({key for config in configs for key in config} - OWN)
        if apart := [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]:
            what = f"{architecture}, {task}: the mean is over runs that differ in {', '.join(apart)}"
            lines.append(f"{what}; evaluate them apart, or train them under names of their own (`architecture`)")
    return lines


def _last_and_best(last: float | None, best: float | None) -> str:
    if last is None:
        return "-"
    return f"{last:.2f} / {'-' if best is None else f'{best:.2f}'}"


@options
def evaluate_masked(
    typed: typer.Context,
    run: Path,
    paths: list[str] | None = None,
    *,
    sentences: list[str] | None = None,
    cola: str | None = None,
    row: Annotated[int | None, typer.Option(min=4)] = None,
    longest: Count = 512,
    text_key: str = "text",
    running: Running,
) -> None:
    """Score a masked language model: masked perplexity of texts, pseudo-log-likelihoods of sentences, AUC on CoLA.

    [bold]linnet evaluate masked RUN "books/*.txt"[/]
    [bold]linnet evaluate masked RUN --sentences lines.txt --cola glue/CoLA[/]

    Args:
        run (RUN): A run folder, or a folder of linnet convert.
        paths (PATH): Files, folders or globs in quotes: text, JSONL or Parquet.
        sentences (PATH): Text files with one sentence per line, for pseudo-log-likelihoods; may be given again.
        cola (FOLDER): Folder of GLUE's CoLA: how well pseudo-log-likelihoods tell acceptable sentences from others.
        row: Tokens per row of a PATH (default: the training length).
        longest: Skip sentences with more tokens.
        text_key: Key (JSONL) or column (Parquet) of the text.
    """
    from linnet.encoders.evaluate import ColaEvaluator, MaskedEvaluator, SentencesEvaluator

    problems = [] if paths or sentences or cola else ["PATH: nothing to score; give texts, --sentences or --cola"]
    for name, needed in (("row", paths), ("text-key", paths), ("longest", sentences or cola)):
        if not needed and is_given(typed, name.replace("-", "_")):
            problems.append(f"--{name}: has no effect on what is scored here; leave it out")
    evaluators: list[Evaluator] = [MaskedEvaluator(paths=paths, text_key=text_key, row=row)] if paths else []
    evaluators += [SentencesEvaluator(paths=sentences, longest=longest)] if sentences else []
    evaluators += [ColaEvaluator(source=cola, longest=longest)] if cola else []
    if not evaluators:
        raise ConfigError(problems, "evaluate")
    run_evaluators(typed, run, evaluators, problems, running)


@options
def evaluate_glue(
    runs: list[Path],
    *,
    data: str | None = None,
    running: Running,
) -> None:
    """Score fine-tuned models on the dev sentences of GLUE, and print the average of its nine numbers.

    Of several runs of one task the best one counts, as papers choose the
    learning rate; a missing task counts as 0. Runs of several pretrained
    models (init_from) or architectures have an average each.

    [bold]linnet evaluate glue RUN --data glue[/]
    [bold]linnet evaluate glue runs/sst2-* runs/cola-* --data glue[/]

    Args:
        runs (RUN...): Runs of objective: sentences, of any tasks.
        data (FOLDER): Folder of GLUE, or of the one task of the runs (default: that of each training).
    """
    from linnet.encoders.evaluate import GlueEvaluator

    run_all({run: GlueEvaluator(source=data) for run in runs}, ["data"], running, show_glue)


@options
def evaluate_lra(
    runs: list[Path],
    *,
    data: str | None = None,
    cache: Path = Path("runs/cache"),
    running: Running,
) -> None:
    """Score models on the Long Range Arena's test splits, and print its table: one column per architecture.

    Each task has the accuracy of the last epoch and of the best one. The
    printed average divides by six, and a missing task counts as 0, as in paper
    002; beside it stands the mean of the tasks that were run.

    [bold]linnet evaluate lra runs/listops-* runs/pathfinder-*[/]

    Args:
        runs (RUN...): Runs of objective: sequences, of any tasks.
        data (FOLDER): Folder of the one task of the runs (default: that of the training).
        cache: Folder of prepared tasks.
    """
    from linnet.encoders.evaluate import LraEvaluator

    evaluators = {run: LraEvaluator(source=data, cache=cache) for run in runs}
    run_all(evaluators, ["data", "cache"], running, lambda *records: {"table": show_lra(*records)})
