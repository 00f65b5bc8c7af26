"""`linnet evaluate`: how well a model predicts texts, and whether it finds needles in them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from linnet.config import ConfigError


class Method(StrEnum):
    auto = "auto"
    carried = "carried"
    windowed = "windowed"


class Needle(StrEnum):
    easy = "easy"
    standard = "standard"
    multikey = "multikey"
    multivalue = "multivalue"
    multiquery = "multiquery"
    tracking = "tracking"


class Scoring(StrEnum):
    match = "match"
    choice = "choice"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, or a folder of linnet convert.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Text to score: a file, folder, glob in quotes, JSONL or Parquet; may be given again.",
            show_default=False,
        ),
    ] = None,
    needle: Annotated[
        Needle | None,
        typer.Option(
            help="Hide facts in a long text and ask for them. easy: the text holds the question too; standard: the "
            "answer alone; the others: several keys, values, questions, or a chain of variables.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            help="carried: every token from all before it in its document, from state to state. windowed: from the "
            "last --window tokens or fewer. auto: carried where the state does not grow, else windowed."
        ),
    ] = Method.auto,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a window.", min=2, show_default="the length of training, or 1024")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows.", min=1, show_default="half a window")
    ] = None,
    text_key: Annotated[str, typer.Option(help="Key (JSONL) or column (Parquet) that holds the text.")] = "text",
    lengths: Annotated[
        str, typer.Option(help="Tokens of needle prompts: FROM:TO:HOW MANY, or lengths with commas.")
    ] = "1024:16384:35",
    depths: Annotated[int, typer.Option(help="How many depths of a needle, from 0 to 1.", min=1)] = 35,
    samples: Annotated[int, typer.Option(help="Needle prompts of each length and depth.", min=1)] = 1,
    scoring: Annotated[
        Scoring, typer.Option(help="match: the model goes on, and the answer is looked for. choice: it is compared.")
    ] = Scoring.match,
    haystack: Annotated[
        str | None, typer.Option(help="Text file to hide needles in.", show_default="text made up")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto is the GPU where there is one.")] = Device.auto,
    precision: Annotated[Precision, typer.Option(help="Of weights and products.")] = Precision.float32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every document.")] = False,
) -> None:
    """Score a model on texts (--text), or look for needles in a haystack (--needle), or both.

    Texts: perplexity by token, word and byte, with intervals over documents, and by the length of the context.
    A text file is one document, JSONL has one a line.
    Needles: accuracy by depth and length, and the four scores of paper 000.
    Results are also kept in RUN/evaluations, with every document and every cell.

    Example: [bold]linnet evaluate runs/tnl-10m-1a2b3c4d5e6f --text "books/*.txt"[/]
    """
    from linnet.cli.evaluate_needle import find_needles, parse_lengths
    from linnet.cli.evaluate_run import keep, open_run, print_json
    from linnet.cli.evaluate_text import score_texts

    problems = [] if text or needle else ["nothing to evaluate: give --text PATH or --needle MODE"]
    places = parse_lengths(lengths, problems) if needle else []
    if problems:
        raise ConfigError(problems, "evaluate")
    opened = open_run(run, device.value, precision.value, as_json)
    window = window or opened.training_length or 1024
    if stride is not None and stride >= window:
        raise ConfigError([f"stride: is {stride}, but a window has {window} tokens; give a smaller one"], "evaluate")
    found = {}
    if text:
        found["text"] = score_texts(opened, text, text_key, method.value, window, stride)
    if needle:
        asked = {"variant": needle.value} if needle.value not in ("easy", "standard") else {"mode": needle.value}
        asked |= {"samples": samples, "scoring": scoring.value, "haystack": haystack, "lengths": places}
        found["needle"] = find_needles(opened, asked | {"depths": [i / max(depths - 1, 1) for i in range(depths)]})
    for evaluation in found.values():
        keep(opened, evaluation)
    if as_json:
        print_json(found)
