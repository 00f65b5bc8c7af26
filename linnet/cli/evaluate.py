"""`linnet evaluate`: how well a model predicts texts, and whether it finds needles in them."""

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
    import torch

    from linnet.models.costs import state_bytes
    from linnet.runs import RunFolder, load_model
    from linnet.train import device as devices

    problems = [] if text or needle else ["nothing to evaluate: give --text PATH or --needle MODE"]
    places = _parse_lengths(lengths, problems) if needle else []
    folder = RunFolder.open(run)
    window = window or folder.config.get("seq_len") or 1024
    if stride is not None and stride >= window:
        problems.append(f"stride: is {stride}, but a window has {window} tokens; give a smaller one")
    if problems:
        raise ConfigError(problems, "evaluate")
    place = devices.choose(device.value)
    model, tokenizer = load_model(run, place, getattr(torch, precision.value))
    if tokenizer is None:
        raise ConfigError([f"{run}: has no tokenizer.json, so no text can be read; put one there"], "evaluate")
    about = {"run": folder.path.name, "tokenizer": tokenizer.digest, "precision": precision.value}
    found = {}
    if text:
        if method is Method.auto:
            constant = state_bytes(model.config, 1 << 40) == state_bytes(model.config, 1 << 41)
            method = Method.carried if constant else Method.windowed
        ways = {"method": method.value, "window": window, "stride": stride}
        found["text"] = _score_text(model, tokenizer, text, text_key, ways, about, not as_json)
    if needle:
        asked = {"variant": needle.value} if needle.value not in ("easy", "standard") else {"mode": needle.value}
        asked |= {"samples": samples, "scoring": scoring.value, "haystack": haystack}
        steps = {"lengths": places, "depths": [i / max(depths - 1, 1) for i in range(depths)]}
        found["needle"] = _find_needles(model, tokenizer, asked | steps, about, as_json)
    for kind, result in found.items():
        _keep(folder.path, kind, result)
    if as_json:
        typer.echo(json.dumps(found, indent=1))


def _parse_lengths(text: str, problems: list[str]) -> list[int]:
    """Lengths given as FROM:TO:HOW MANY (evenly spaced) or with commas."""
    try:
        if ":" in text:
            first, last, count = map(int, text.split(":"))
            step = (last - first) / max(count - 1, 1)
            found = [round(first + i * step) for i in range(count)]
        else:
            found = [int(part) for part in text.split(",")]
        if found and min(found) > 0 and found == sorted(set(found)):
            return found
    except ValueError:
        pass
    problems.append(f"lengths: {text!r} is not FROM:TO:HOW MANY or ascending numbers with commas; give 1024:16384:35")
    return []


def _keep(folder: Path, kind: str, result: dict) -> None:
    from linnet.runs.files import write_atomic

    asked = ("text", "text_key", "method", "window", "stride", "precision", "config")
    path = folder / FOLDER / f"{kind}-{digest({name: result[name] for name in asked if name in result})}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        Console(stderr=True).print(f"[bold yellow]not kept[/] in {path}: {error.strerror}", highlight=False)


def _find_needles(model, tokenizer, asked: dict, about: dict, quiet: bool) -> dict:
    from rich.progress import Progress

    from linnet.config import parse
    from linnet.evaluate.needle import NeedleConfig, run_needle
    from linnet.evaluate.needle_scores import needle_scores, sensitivity
    from linnet.inference import Engine

    config = parse(NeedleConfig, asked, "needle")
    room = max(config.lengths) + 128
    weight = model.embedding.weight
    engine = Engine(model, tokenizer, slots=8, context_length=room, device=weight.device.type, dtype=weight.dtype)
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        total = len(config.lengths) * len(config.depths) * config.samples
        task = progress.add_task("prompts", total=total)
        grid = run_needle(engine, config, lambda count: progress.advance(task, count))
    scores = needle_scores(grid)
    if not quiet:
        _show_needles(grid, config, scores)
    result = {"config": config.model_dump(), "accuracy": grid.tolist(), **scores.to_dict()}
    return about | result | {"sensitivity": sensitivity(grid)}


def _show_needles(grid, config, scores) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("tokens", "at this length", "up to it", "penalty", "from the first depth to the last"):
        table.add_column(column, justify="left" if column.startswith("from") else "right")
    for i, length in enumerate(config.lengths):
        cells = "".join(" ░▒▓█"[round(4 * share)] for share in grid[:, i])
        numbers = (scores.at_length[i], scores.up_to_length[i], scores.penalties[i])
        table.add_row(f"{length:,}", *(f"{value:.3f}" for value in numbers), cells)
    console.print(table)
    console.print(f"accuracy {grid.mean():.4f}, weighted {scores.weighted:.4f}, NIAH score {scores.score:.4f}")


def _score_text(model, tokenizer, text: list[str], text_key: str, ways: dict, about: dict, show: bool) -> dict:
    from linnet.evaluate.text import read_texts, score_text
    from linnet.runs.record import plain

    documents = read_texts(text, tokenizer, text_key)
    score = score_text(model, documents, **ways)
    if show:
        _show(score, about["run"])
    return plain(about | {"text": text, "text_key": text_key} | score.to_dict())


def _show(score, name: str) -> None:
    console = Console()
    way = f"windows of {score.window} tokens every {score.stride}" if score.window else "the carried state"
    documents = f"{len(score.documents):,} document{'s' if len(score.documents) != 1 else ''}"
    console.print(f"{name}: {documents} by {way}", highlight=False)
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
