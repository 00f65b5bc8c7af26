"""`linnet evaluate masked`, `glue` and `lra`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linnet.cli.evaluate import Running, is_given, run_all, run_evaluators
from linnet.config import ConfigError
from linnet.options import Count, options

if TYPE_CHECKING:
    from linnet.evaluate.session import Evaluator


@options
def masked(
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
    from linnet.encoders.evaluate.evaluators import ColaEvaluator, MaskedEvaluator, SentencesEvaluator

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
def glue(
    runs: list[Path],
    *,
    data: str | None = None,
    running: Running,
) -> None:
    """Score fine-tuned models on the dev sentences of GLUE, and print the average of its nine numbers.

    Of several runs of one task the best one counts, as papers choose the learning rate; a missing task counts as 0.

    [bold]linnet evaluate glue RUN --data glue[/]
    [bold]linnet evaluate glue runs/sst2-* runs/cola-* --data glue[/]

    Args:
        runs (RUN...): Runs of objective: sentences, of any tasks.
        data (FOLDER): Folder of GLUE, or of the one task of the runs (default: that of each training).
    """
    from linnet.encoders.cli.show import show_glue
    from linnet.encoders.evaluate.evaluators import GlueEvaluator

    run_all({run: GlueEvaluator(source=data) for run in runs}, ["data"], running, show_glue)


@options
def lra(
    runs: list[Path],
    *,
    data: str | None = None,
    cache: Path = Path("runs/cache"),
    running: Running,
) -> None:
    """Score models on the Long Range Arena's test splits, and print its table: one row per architecture.

    Each task has the accuracy of the last epoch and of the best one. The
    printed average divides by six, and a missing task counts as 0, as in paper
    002; beside it stands the mean of the tasks that were run.

    [bold]linnet evaluate lra runs/listops-* runs/pathfinder-*[/]

    Args:
        runs (RUN...): Runs of objective: sequences, of any tasks.
        data (FOLDER): Folder of the one task of the runs (default: that of the training).
        cache: Folder of prepared tasks.
    """
    from linnet.encoders.cli.show import show_lra
    from linnet.encoders.evaluate.evaluators import LraEvaluator

    evaluators = {run: LraEvaluator(source=data, cache=cache) for run in runs}
    run_all(evaluators, ["data", "cache"], running, lambda *records: {"table": show_lra(*records)})
