"""`linnet corpus`: makes a corpus to train on from raw text, in stages that resume."""

import typer

from linnet.corpus.cli.score import filter_, loop, sample, score, verdicts
from linnet.corpus.cli.stages import clean, dedup, report, tokenizer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make a corpus to train on from raw text: clean, deduplicate, score, review, tokenize.",
    epilog="Each stage reads sources or the folder of an earlier stage, and writes a folder that training takes: "
    "[bold]linnet train --data FOLDER[/]. A command that was stopped resumes when it is given again.",
)
app.command(name="clean")(clean)
app.command(name="dedup")(dedup)
app.command(name="score")(score)
app.command(name="filter")(filter_)
app.command(name="sample")(sample)
app.command(name="verdicts")(verdicts)
app.command(name="loop")(loop)
app.command(name="tokenizer")(tokenizer)
app.command(name="report")(report)
