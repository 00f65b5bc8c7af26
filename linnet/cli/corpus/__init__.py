"""`linnet corpus`: makes a corpus to train on from raw text, in stages that resume. One file per verb."""

import typer

from linnet.cli.corpus.clean import clean
from linnet.cli.corpus.dedup import dedup
from linnet.cli.corpus.filter import filter_
from linnet.cli.corpus.loop import loop
from linnet.cli.corpus.report import report
from linnet.cli.corpus.sample import sample
from linnet.cli.corpus.score import score
from linnet.cli.corpus.tokenizer import tokenizer
from linnet.cli.corpus.verdicts import verdicts

corpus = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Make a corpus to train on from raw text: clean, deduplicate, score, review, tokenize.",
    epilog="Each stage reads sources or the folder of an earlier stage, and writes a folder that training takes: "
    "[bold]linnet train --data FOLDER[/]. A command that was stopped resumes when it is given again.",
)
corpus.command(name="clean")(clean)
corpus.command(name="dedup")(dedup)
corpus.command(name="score")(score)
corpus.command(name="filter")(filter_)
corpus.command(name="sample")(sample)
corpus.command(name="verdicts")(verdicts)
corpus.command(name="loop")(loop)
corpus.command(name="tokenizer")(tokenizer)
corpus.command(name="report")(report)
