"""`linnet data`: prepare a corpus of text or images and show what it holds."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from linnet.companions import Offer
from linnet.config import ConfigError, Problem, checking, gather, parse, unwritable
from linnet.options import AsJson, Bar, by_option, echo_json, make_table, options, values_of

SAMPLE = 200  # tokens shown


class _Data(typer.core.TyperGroup):
    """Takes `linnet data PATH...` as `linnet data text PATH...`."""

    default = "text"

    def parse_args(self, ctx, args):
        no_file = not args[1:] or (args[1].startswith("-") and args[1] not in ctx.help_option_names)
        if args[:1] == ["chat"] and no_file and Path("chat").exists():
            args = [self.default, *args]  # a path of this name, since the command needs a file behind it
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


data = typer.Typer(
    cls=_Data,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Prepare text (the default) or images for training, once, and show what they hold.",
    epilog='Example: [bold]linnet data "books/*.txt" --tokenizer bpe:4096[/] is short for linnet data text ..., whose '
    "--help lists the options. Write a path that has the name of a command as ./chat.",
)


@data.command(name="dna")
@options
def write_dna(
    *,
    out: Path,
    letters: Annotated[int, typer.Option(min=1, max=1 << 32)] = 5_000_000,
    order: Annotated[int, typer.Option(min=0, max=8)] = 4,
    sharpness: Annotated[float, typer.Option(min=0, max=10)] = 1.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """Write letters of DNA from a Markov chain, whose entropy every model's loss stays above.

    The chain is its own reverse complement, like the two strands of DNA. Train
    on the file as on other text: FASTA files (.fa, .fasta, .fna) have one
    document per record.

    Example: [bold]linnet data dna --out dna.fa --order 4[/], then linnet train --data dna.fa

    Args:
        out: FASTA file to write, such as dna.fa.
        letters: Number of letters.
        order: Letters that the next one depends on.
        sharpness: How uneven the transitions are; 0 gives uniform letters.
        seed: Seed of the chain and of its letters.
        as_json: Print one JSON object.
    """
    from linnet.data.dna import as_fasta, make_chain
    from linnet.runs.files import write_atomic

    if not out.name.lower().endswith((".fa", ".fasta", ".fna")):
        fix = "end it in .fa, so that training reads its records"
        raise ConfigError([f"--out: {str(out)!r} does not name a FASTA file; {fix}"], "linnet data dna")
    if reason := unwritable(out.parent):
        raise ConfigError([f"--out {out}: its folder {reason}; name another place"], "linnet data dna")
    chain = make_chain(order, seed, sharpness)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, as_fasta(chain, letters, seed))
    bits, nats = chain.bits_per_letter, chain.nats_per_letter
    if as_json:
        print(json.dumps({"path": str(out), "bits_per_letter": bits, "nats_per_letter": nats}))
        return
    print(f"{out}: {letters:,} letters of a chain of order {order}")
    print(f"entropy: {bits:.4f} bits, {nats:.4f} nats per letter; no model has a lower loss on unseen letters")


@dataclass(frozen=True, kw_only=True)
class TextKeys:
    """What is prepared and how: keys of `linnet.data.DataConfig`, which checks them.

    Attributes:
        tokenizer: byte, bpe:4096 or wordpiece:4096 (learned from the text, any size), a tokenizer.json, or hf:NAME.
        validation: Held-out text: a path or glob; may be given again.
        validation_fraction: Share of the text to hold out, by document, if no --validation is given.
        text_key: Key (JSONL) or column (Parquet) of the text.
        max_bytes: Use about this many bytes of documents, in random order (default: all).
        seed: Seed of the choice of documents; the order of training has its own.
    """

    tokenizer: str = "byte"
    validation: list[str] | None = None
    validation_fraction: float = 0.02
    text_key: str = "text"
    max_bytes: int | None = None
    seed: int = 0


@data.command(name="chat")
@options
def show_chat(
    paths: list[str],
    *,
    from_: Path | None = None,
    template: Path | None = None,
    per_answer: bool = False,
    seq_len: Annotated[int, typer.Option(min=2)] = 1024,
    show: Annotated[int, typer.Option(min=0)] = 3,
    as_json: AsJson = False,
) -> None:
    """Show conversations as a model is trained on them: only the marked part, the assistant's turns, has a loss.

    In a terminal targets are green, elsewhere they stand in brackets.

    Example: [bold]linnet data chat chats.jsonl --from MODEL --show 3[/], then
    linnet train --from MODEL --data chats.jsonl --set objective=chat

    Args:
        paths (FILE): JSONL files, folders or globs in quotes; each line has [bold]messages[/], or [bold]prompt[/] and
            [bold]completion[/].
        from_ (MODEL): A run or model folder with tokenizer and chat template (default: bytes and ChatML).
        template: A chat template, in place of the folder's.
        per_answer: Each answer is a conversation of its own, for templates that change earlier turns.
        seq_len: Tokens per row of the training.
        show: Number of conversations to show.
        as_json: Print one JSON object.
    """
    from rich.text import Text

    from linnet.data import ByteTokenizer
    from linnet.data.chat import CHATML, read_chats
    from linnet.data.chat.template import ChatTemplate, load_chat_template
    from linnet.train.objectives.chat import start_of

    def rename(line: str) -> Problem:
        line = line.replace("init_from", "--from", 1).replace("data.template", "--template")
        return Problem(line.replace("data.per_answer=true", "--per-answer"))

    with checking("data", rename):
        if from_ is None and template is None:
            chosen = ChatTemplate(CHATML, ByteTokenizer())
        else:
            chosen = start_of(from_, template) if from_ else load_chat_template(".", ByteTokenizer(), template)
        chats = [chat for parts in read_chats(paths, "FILE", chosen, per_answer) for chat in parts]
    cut = [short for chat in chats if (short := chat.cut(seq_len)) is not None]
    answers = sum(len(chat.ends) for chat in chats)
    counts = {"conversations": len(chats), "answers": answers, "left_out": len(chats) - len(cut)}
    counts |= {"answers_left_out": answers - sum(len(chat.ends) for chat in cut)}
    counts |= {"tokens": sum(len(chat.tokens) for chat in cut)}
    counts |= {"targets": sum(int((chat.turns > 0).sum()) for chat in cut)}
    shown = [[(chosen.decode(ids), target) for target, ids in chat.parts()] for chat in cut[:show]]
    if as_json:
        echo_json(counts | {"shown": [[{"text": text, "target": target} for text, target in chat] for chat in shown]})
        return
    console = Console(soft_wrap=True, highlight=False)
    if from_ is not None and chosen.note:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold yellow]warning[/] {escape(chosen.note)}")
    columns = (f"#{key.replace('_', ' ')}" for key in counts)
    console.print(make_table(*columns, rows=[[f"{number:,}" for number in counts.values()]]))
    for number, parts in enumerate(shown, 1):
        console.rule(f"conversation {number}", align="left")
        if console.is_terminal:
            console.print(Text.assemble(*((text, "bold green" if target else "dim") for text, target in parts)))
        else:
            print("".join(f"[{text}]" if target else text for text, target in parts))


@data.command(name="text")
@options
def prepare_text(
    paths: list[str],
    *,
    keys: TextKeys,
    out: Path = Path("runs/cache"),
    as_json: AsJson = False,
) -> None:
    """Prepare text for training, once, and show what it holds.

    Part of the text is held out; all of it is tokenized and stored on disk.
    A second call finds the corpus, checks it, and rebuilds it if it is damaged.

    Example: [bold]linnet data "books/*.txt" --tokenizer bpe:4096[/]

    Args:
        paths (PATH): Text files, JSONL (.jsonl), JSON, Parquet, folders of them, globs in quotes,
            [bold]hf:NAME:CONFIG:SPLIT[/] of the Hugging Face Hub, or [bold]stdlib[/]: the source text of the Python
            standard library.
        out: Folder of prepared corpora; each gets a subfolder.
        as_json: Print one JSON object.
    """
    from linnet.data import prepare

    with checking("data", _by_option):
        corpus = prepared(prepare, _parse({"source": paths, **values_of(keys)}, out), out)
    sample = corpus.tokenizer.decode(corpus.train[:SAMPLE])
    if as_json:
        echo_json(_summary(corpus, sample))
    else:
        _show(corpus, sample)


def prepared(prepare: Callable[..., Any], config: Any, out: Path) -> Any:
    """Returns the corpus that `prepare` makes of a configuration in `out`, or finds there; rebuilds a damaged one."""
    from linnet.data import CorpusDamaged

    errors = Console(stderr=True, soft_wrap=True)
    with Bar(errors) as bar:
        try:
            return prepare(config, out, progress=bar)
        except CorpusDamaged as damage:
            for problem in damage.problems:
                line = escape(f"{problem.path}: {problem.what}")
                errors.print(f"[bold yellow]damaged[/] {line}; rebuilding it", highlight=False)
            return prepare(config, out, rebuild=True, progress=bar)


def _parse(values: dict, cache: Path):
    """Returns the configuration. Raises ConfigError with the problems of all keys and of the text."""
    from linnet.data import DataConfig
    from linnet.data.problems import text_problems

    with checking("data") as problems:
        with gather(problems):
            return parse(DataConfig, values, "data")
        wrong = {Problem(line).key for line in problems}
        rest = {key: value for key, value in values.items() if key not in wrong}
        problems += text_problems(rest, cache, told=problems)


def _by_option(problem: Problem) -> str:
    """Returns a problem of a key under the name of the option or argument that sets it."""
    line = by_option(TextKeys.__annotations__, source="PATH")(problem.at(problem.path.removeprefix("data.")))
    for command, (what, names) in Offer("tasks").items():
        if task := next((name for name in names if line.what.startswith(f"{name!r} does not exist")), None):
            return f"{line}; for the task of {what}: linnet data {command} {task}"
    return line


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
    table = make_table("split", "#documents", "#bytes", "#tokens", "#bytes/token")
    for name, split in summary["splits"].items():
        counts = [f"{split[key]:,}" for key in ("documents", "bytes", "tokens")]
        table.add_row(name, *counts, f"{split['bytes_per_token']:.3f}")
    console.print(table)
    tokenizer = f"tokenizer {escape(corpus.tokenizer.name)}, {corpus.vocab_size:,} tokens"
    console.print(f"{tokenizer}; {_HELD_OUT[summary['split']]}")
    unknown = sum(split["unknown_tokens"] for split in summary["splits"].values())
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


_HELD_OUT = {
    "documents": "held out by document",
    "tails": "held out: the end of each document, because there are few or very uneven ones",
    "given": "held out: the text given with --validation",
}
