"""`linnet evaluate`: how well a model predicts texts."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from linnet.config import ConfigError, digest

FOLDER = "evaluations"


class Method(StrEnum):
    auto = "auto"
    carried = "carried"
    windowed = "windowed"


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
        list[str],
        typer.Option(
            metavar="PATH", help="Text to score: a file, folder, glob in quotes, JSONL or Parquet; may be given again."
        ),
    ],
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
    device: Annotated[Device, typer.Option(help="auto is the GPU where there is one.")] = Device.auto,
    precision: Annotated[Precision, typer.Option(help="Of weights and products.")] = Precision.float32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with every document.")] = False,
) -> None:
    """Score texts: perplexity by token, word and byte, with intervals, and by the length of the context.

    A text file is one document, JSONL has one a line. Intervals are bootstrapped over documents.
    The result is also kept in RUN/evaluations, with every document.

    Example: [bold]linnet evaluate runs/tnl-10m-1a2b3c4d5e6f --text "books/*.txt"[/]
    """
    import torch

    from linnet.evaluate.text import read_texts, score_text
    from linnet.models.costs import state_bytes
    from linnet.runs import RunFolder, load_model
    from linnet.runs.files import write_atomic
    from linnet.runs.record import plain
    from linnet.train import device as devices

    place = devices.choose(device.value)
    model, tokenizer = load_model(run, place, getattr(torch, precision.value))
    if tokenizer is None:
        raise ConfigError([f"{run}: has no tokenizer.json, so no text can be read; put one there"], "evaluate")
    folder = RunFolder.open(run)
    window = window or folder.config.get("seq_len") or 1024
    if stride is not None and stride >= window:
        raise ConfigError([f"stride: is {stride}, but a window has {window} tokens; give a smaller one"], "evaluate")
    if method is Method.auto:
        constant = state_bytes(model.config, 1024) == state_bytes(model.config, 2048)
        method = Method.carried if constant else Method.windowed
    documents = read_texts(text, tokenizer, text_key)
    score = score_text(model, documents, method=method.value, window=window, stride=stride)
    about = {"run": folder.path.name, "text": text, "tokenizer": tokenizer.digest, "precision": precision.value}
    result = plain(about | score.to_dict())
    key = digest({name: result[name] for name in ("text", "method", "window", "stride", "precision")})
    path = folder.path / FOLDER / f"text-{key}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        Console(stderr=True).print(f"[bold yellow]not kept[/] in {path}: {error.strerror}", highlight=False)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        _show(score, folder.path.name)


def _show(score, name: str) -> None:
    console = Console()
    way = f"windows of {score.window} tokens every {score.stride}" if score.window else "the carried state"
    console.print(f"{name}: {len(score.documents):,} documents by {way}", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    low_high = score.interval()
    interval = f"95 % interval {low_high[0]:.4f} to {low_high[1]:.4f}" if low_high else ""
    table.add_row("bits per byte", f"{score.bits_per_byte:.4f}", interval)
    table.add_row("loss", f"{score.loss:.4f}", "nats a token")
    for what in ("perplexity", "word_perplexity", "byte_perplexity"):
        per = what.partition("_")[0] if "_" in what else "token"
        table.add_row("perplexity", f"{getattr(score, what):,.2f}", f"by {per}")
    console.print(table)
    by_context = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("tokens of context", "loss", "tokens scored"):
        by_context.add_column(column, justify="right")
    for bucket in score.contexts:
        by_context.add_row(f"{bucket.start:,} to {bucket.end - 1:,}", f"{bucket.loss:.4f}", f"{bucket.tokens:,}")
    console.print(by_context)
