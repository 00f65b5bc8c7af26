"""`linnet data`: prepare a corpus of text or images and show what it holds."""

import json
import re
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from linnet.cli.data.lra import make_lra
from linnet.config import ConfigError

SAMPLE = 200  # tokens shown


class _Data(typer.core.TyperGroup):
    """Takes `linnet data PATH...` as `linnet data text PATH...`."""

    default = "text"

    def parse_args(self, ctx, args):
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


data = typer.Typer(
    cls=_Data,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Prepare text (the default) or images for training, once, and show what they hold.",
    epilog='Example: [bold]linnet data "books/*.txt" --tokenizer bpe:4096[/], in full linnet data text ...; a path '
    "that is called text, images, dna or lra is written ./text.",
)
data.command(name="lra")(make_lra)


@data.command(name="dna")
def write_dna(
    out: Annotated[Path, typer.Option(help="FASTA file to write, such as dna.fa.")],
    letters: Annotated[int, typer.Option(help="Number of letters.", min=1, max=1 << 32)] = 5_000_000,
    order: Annotated[int, typer.Option(help="Letters that the next one depends on.", min=0, max=8)] = 4,
    sharpness: Annotated[
        float, typer.Option(help="How uneven the transitions are; 0 gives uniform letters.", min=0, max=10)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the chain and of its letters.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write letters of DNA from a Markov chain, whose entropy every model's loss stays above.

    The chain is its own reverse complement, like the two strands of DNA. Train
    on the file as on other text: FASTA files (.fa, .fasta, .fna) have one
    document per record.

    Example: [bold]linnet data dna --out dna.fa --order 4[/], then linnet train --data dna.fa
    """
    from linnet.data.dna import as_fasta, make_chain
    from linnet.runs.files import write_atomic

    if not out.name.lower().endswith((".fa", ".fasta", ".fna")):
        fix = "end it in .fa, so that training reads its records"
        raise ConfigError([f"--out: {str(out)!r} does not name a FASTA file; {fix}"], "linnet data dna")
    chain = make_chain(order, seed, sharpness)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, as_fasta(chain, letters, seed))
    bits, nats = chain.bits_per_letter, chain.nats_per_letter
    if as_json:
        print(json.dumps({"path": str(out), "bits_per_letter": bits, "nats_per_letter": nats}))
        return
    print(f"{out}: {letters:,} letters of a chain of order {order}")
    print(f"entropy: {bits:.4f} bits, {nats:.4f} nats per letter; no model has a lower loss on unseen letters")


@data.command(name="text")
def prepare_text(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Text files, JSONL (.jsonl), JSON, Parquet, folders of them, globs in quotes, "
            "[bold]hf:NAME:CONFIG:SPLIT[/] of the Hugging Face Hub, or [bold]stdlib[/]: "
            "the source text of the Python standard library.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="byte, bpe:4096 or wordpiece:4096 (learned from the text, any size), a tokenizer.json, or hf:NAME."
        ),
    ] = "byte",
    out: Annotated[Path, typer.Option(help="Folder of prepared corpora; each gets a subfolder.")] = Path("runs/cache"),
    validation: Annotated[
        list[str] | None, typer.Option(help="Held-out text: a path or glob; may be given again.", show_default=False)
    ] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of the text to hold out, by document, if no --validation is given.")
    ] = 0.02,
    text_key: Annotated[str, typer.Option(help="Key (JSONL) or column (Parquet) of the text.")] = "text",
    max_bytes: Annotated[
        int | None, typer.Option(help="Use about this many bytes of documents, in random order.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of documents; the order of training has its own.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prepare text for training, once, and show what it holds.

    Part of the text is held out; all of it is tokenized and stored on disk.
    A second call finds the corpus, checks it, and rebuilds it if it is damaged.

    Example: [bold]linnet data "books/*.txt" --tokenizer bpe:4096[/]
    """
    from linnet.data import CorpusDamaged, prepare

    values = {"source": paths, "tokenizer": tokenizer, "validation": validation or [], "text_key": text_key}
    values |= {"validation_fraction": validation_fraction, "max_bytes": max_bytes, "seed": seed}
    errors = Console(stderr=True, soft_wrap=True)
    try:
        config = _parse(values, out)
        with Bar(errors) as bar:
            try:
                corpus = prepare(config, out, progress=bar)
            except CorpusDamaged as damage:
                for problem in damage.problems:
                    found = escape(problem.partition(";")[0])
                    errors.print(f"[bold yellow]damaged[/] {found}; rebuilding it", highlight=False)
                corpus = prepare(config, out, rebuild=True, progress=bar)
    except ConfigError as error:
        raise ConfigError([_by_option(line) for line in error.problems], "data") from None
    sample = corpus.tokenizer.decode(corpus.train[:SAMPLE])
    if as_json:
        typer.echo(json.dumps(_summary(corpus, sample), indent=1))
    else:
        _show(corpus, sample)


def _parse(values: dict, cache: Path):
    """Returns the configuration. Raises ConfigError with the problems of all keys and of the text."""
    from linnet.config import parse
    from linnet.data import DataConfig
    from linnet.data.problems import text_problems

    try:
        return parse(DataConfig, values, "data")
    except ConfigError as error:
        wrong = {line.partition(":")[0].partition(".")[0] for line in error.problems}
        rest = {key: value for key, value in values.items() if key not in wrong}
        raise ConfigError([*error.problems, *text_problems(rest, cache, told=error.problems)], "data") from None


def _by_option(problem: str) -> str:
    """Returns a problem of a key under the name of the option or argument that sets it."""
    place, colon, rest = problem.removeprefix("data.").partition(":")
    key = place.partition(".")[0]
    if key == "source":
        from linnet.data.lra.task import TaskName

        names = [name for name in get_args(TaskName) if rest.startswith(f" {name!r} does not exist")]
        return f"PATH:{rest}" + (f"; for the task of the Long Range Arena: linnet data lra {names[0]}" if names else "")
    options = ("tokenizer", "validation", "validation_fraction", "text_key", "max_bytes", "seed")
    return f"--{key.replace('_', '-')}{colon}{rest}" if key in options else problem


class Bar(Progress):
    """A progress bar; call it with the name of the current step, its finished bytes and its total bytes."""

    def __init__(self, console: Console):
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._doing: tuple | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._doing is None or self._doing[0] != what:
            self._doing = (what, self.add_task(what, total=total))
        self.update(self._doing[1], completed=done, total=total)


def _summary(corpus, sample: str) -> dict:
    splits = {}
    for name in ("train", "validation"):
        shards = corpus.split(name)
        splits[name] = {"documents": shards.documents, "bytes": shards.bytes, "tokens": len(shards)}
        splits[name] |= {"bytes_per_token": corpus.bytes_per_token(name), "unknown_tokens": shards.unknown}
    metadata = corpus.metadata
    return {
        "folder": str(corpus.folder),
        "digest": corpus.digest,
        "tokenizer": corpus.tokenizer.name,
        "vocab_size": corpus.vocab_size,
        "split": metadata["split"],
        "splits": splits,
        "copies_left_out": metadata["copies_left_out"],
        "rows_left_out": metadata.get("rows_left_out", {}),
        "skipped": metadata["skipped"],
        "skipped_files": metadata["skipped_files"],
        "sample": sample,
    }


def _show(corpus, sample: str) -> None:
    console, summary = Console(soft_wrap=True), _summary(corpus, sample)
    table = Table("split", box=None)
    for name in ("documents", "bytes", "tokens", "bytes/token"):
        table.add_column(name, justify="right")
    for name, found in summary["splits"].items():
        counts = [f"{found[key]:,}" for key in ("documents", "bytes", "tokens")]
        table.add_row(name, *counts, f"{found['bytes_per_token']:.3f}")
    console.print(table)
    tokenizer = f"tokenizer {escape(corpus.tokenizer.name)}, {corpus.vocab_size:,} tokens"
    console.print(f"{tokenizer}; {_HELD_OUT[summary['split']]}")
    unknown = sum(found["unknown_tokens"] for found in summary["splits"].values())
    if unknown:
        console.print(f"[yellow]{unknown:,} tokens are unknown to the tokenizer[/]")
        console.print("[yellow]bits per byte will therefore be too low[/]")
    if summary["copies_left_out"]:
        console.print(f"{summary['copies_left_out']:,} copies of held-out documents are left out of training")
    if rows := summary["rows_left_out"]:
        console.print(f"rows without text left out: {', '.join(f'{number:,} {kind}' for kind, number in rows.items())}")
    if summary["skipped"]:
        console.print(f"{summary['skipped']:,} files skipped, for example {escape(summary['skipped_files'][0])}")
    console.print(f"in {escape(str(corpus.folder))}")
    console.rule("how it starts", align="left")
    console.print(sample, markup=False, highlight=False)


CLASSES_SHOWN = 20
_IMAGE_OPTIONS = (
    "split held_out validation validation_fraction kind image_key label_key classes size crop convert store "
    "skip_damaged max_images seed"
).split()


@data.command(name="images")
def prepare_images(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Folders of classes (root/class/*.png), Parquet, tar shards, IDX files, .npz and .npy arrays, "
            "folders of these, [bold]hf:NAME:CONFIG:SPLIT[/], or [bold]digits[/] of scikit-learn.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of prepared corpora; each gets a subfolder.")] = Path("runs/cache"),
    split: Annotated[str, typer.Option(help="Part to train on, if the source has parts.")] = "train",
    held_out: Annotated[
        str | None, typer.Option(help="Part to hold out.", show_default="validation, or else test")
    ] = None,
    validation: Annotated[
        list[str] | None, typer.Option(help="Held-out images: a source; may be given again.", show_default=False)
    ] = None,
    validation_fraction: Annotated[
        float | None,
        typer.Option(help="Share of each class to hold out.", show_default="0.1, if the source has no part for it"),
    ] = None,
    kind: Annotated[str, typer.Option(help="images or latents.")] = "images",
    image_key: Annotated[
        str | None, typer.Option(help="Column or array of the images.", show_default="the usual names")
    ] = None,
    label_key: Annotated[
        str | None, typer.Option(help="Column or array of the labels.", show_default="the usual names")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Names of labels 0, 1, ..., with commas.", show_default="those of the source")
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="Side in pixels: resize and cut out the centre.", show_default="as they are")
    ] = None,
    crop: Annotated[float, typer.Option(help="Share of the shorter side that the cut keeps.")] = 0.875,
    convert: Annotated[str | None, typer.Option(help="grey or rgb.", show_default="as they are")] = None,
    store: Annotated[str, typer.Option(help="auto, encoded or pixels.")] = "auto",
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Leave out damaged images.")] = False,
    max_images: Annotated[
        int | None, typer.Option(help="Use this many training images, in random order.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of images; the order of training has its own.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prepare images for training, once, and show what they hold.

    All images are decoded and checked, and stored on disk with their classes;
    part of them is held out. A second call finds the corpus, checks it, and
    rebuilds it if it is damaged.

    Example: [bold]linnet data images photos --size 64 --convert rgb[/]
    """
    from linnet.config import parse
    from linnet.data import CorpusDamaged
    from linnet.data import images as library

    values = {"source": source, "split": split, "held_out": held_out, "validation": validation or []}
    values |= {"validation_fraction": validation_fraction, "kind": kind, "image_key": image_key, "label_key": label_key}
    values |= {"size": size, "crop": crop, "convert": convert, "store": store, "skip_damaged": skip_damaged}
    values |= {"max_images": max_images, "seed": seed, "classes": None if classes is None else classes.split(",")}
    errors = Console(stderr=True, soft_wrap=True)
    try:
        config = parse(library.ImageDataConfig, values, "data")
        with Bar(errors) as bar:
            try:
                corpus = library.prepare_images(config, out, bar)
            except CorpusDamaged as damage:
                for problem in damage.problems:
                    found = escape(problem.partition(";")[0])
                    errors.print(f"[bold yellow]damaged[/] {found}; rebuilding it", highlight=False)
                corpus = library.prepare_images(config, out, bar, rebuild=True)
    except ConfigError as error:
        raise ConfigError([_by_image_option(line) for line in error.problems], "data") from None
    summary = _image_summary(corpus)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    else:
        _show_images(summary)


def _by_image_option(problem: str) -> str:
    """Returns a problem of a key under the name of the option or argument that sets it."""
    problem = problem.replace("set skip_damaged: true", "give --skip-damaged")
    keys = "|".join(_IMAGE_OPTIONS)
    problem = re.sub(rf"\b(give|set|use) ({keys}): ", lambda fix: f"give --{_dashed(fix[2])} ", problem)
    problem = re.sub(rf" in ({keys})$", lambda place: f" in --{_dashed(place[1])}", problem)
    place, colon, rest = problem.partition(":")
    key = place.partition(".")[0]
    if key == "source":
        return f"SOURCE:{rest}"
    return f"--{_dashed(key)}{colon}{rest}" if key in _IMAGE_OPTIONS else problem


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _image_summary(corpus) -> dict:
    metadata = corpus.metadata
    counts = {
        name: corpus.split(name).labels(slice(None)).bincount(minlength=len(corpus.classes)).tolist()
        for name in ("train", "validation")
    }
    return {
        "folder": str(corpus.folder),
        "digest": corpus.digest,
        "kind": metadata["kind"],
        "channels": corpus.channels,
        "side": corpus.side,
        "stored": metadata["stored"],
        "bytes": metadata["files"]["images.bin"]["size"],
        "splits": {name: sum(counts[name]) for name in counts},
        "split": metadata["split"],
        "classes": {name: [counts[split][n] for split in counts] for n, name in enumerate(corpus.classes)},
        "mean": corpus.mean,
        "std": corpus.std,
        "copies_left_out": metadata["copies_left_out"],
        "damaged": metadata["damaged"],
        "skipped": metadata["skipped"],
        "skipped_files": metadata["skipped_files"],
    }


def _show_images(summary: dict) -> None:
    console = Console(soft_wrap=True)
    table = Table("class", box=None)
    for name in summary["splits"]:
        table.add_column(name, justify="right")
    classes = summary["classes"]
    for name, counts in list(classes.items())[:CLASSES_SHOWN]:
        table.add_row(escape(name), *(f"{count:,}" for count in counts))
    if len(classes) > CLASSES_SHOWN:
        table.add_row(f"... {len(classes) - CLASSES_SHOWN:,} more")
    table.add_row("[bold]all[/]", *(f"{count:,}" for count in summary["splits"].values()))
    console.print(table)
    size = f"{summary['kind']} of {summary['channels']} x {summary['side']} x {summary['side']}"
    console.print(
        f"{size} (channels x height x width), {len(classes):,} classes; stored as {summary['stored']}, "
        f"{summary['bytes']:,} bytes"
    )
    console.print(_IMAGES_HELD_OUT[summary["split"]])
    if summary["mean"]:
        mean, std = (", ".join(f"{value:.4f}" for value in summary[key]) for key in ("mean", "std"))
        console.print(f"training pixels from 0 to 1: mean {mean}; standard deviation {std}", highlight=False)
    if summary["copies_left_out"]:
        console.print(f"{summary['copies_left_out']:,} copies of held-out images are left out of training")
    if summary["skipped"]:
        damaged = f" ({summary['damaged']:,} damaged images)" if summary["damaged"] else ""
        console.print(
            f"{summary['skipped']:,} files skipped{damaged}, for example {escape(summary['skipped_files'][0])}"
        )
    console.print(f"in {escape(summary['folder'])}")


_IMAGES_HELD_OUT = {
    "fraction": "held out: a share of each class, by a hash of the pixels",
    "given": "held out: the images of --validation, or of the source's own part",
}
_HELD_OUT = {
    "documents": "held out by document",
    "tails": "held out: the end of each document, because there are few or very uneven ones",
    "given": "held out: the text given with --validation",
}
