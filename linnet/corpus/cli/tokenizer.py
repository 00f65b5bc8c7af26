"""`linnet corpus tokenizer`: learn the tokenizer of a corpus."""

from glob import escape as escape_glob
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linnet.config import ConfigError, unwritable
from linnet.corpus.cli.stages import Bar, TextKey
from linnet.options import AsJson, Count, echo_json, make_table, options


@options
def tokenizer(
    folders: list[str],
    *,
    out: Path = Path("tokenizer.json"),
    vocab: Annotated[int, typer.Option(min=257, max=1 << 20)] = 64_000,
    cjk: Annotated[int, typer.Option(min=0)] = 0,
    train_bytes: Count = 100_000_000,
    text_key: TextKey = "text",
    as_json: AsJson = False,
) -> None:
    """Learn a BPE with a byte fall-back and whole Han characters, and write a tokenizer.json.

    Each token is whole characters, or one byte of a character that has no
    token. All text and all bytes come back exactly. The same text gives the
    same file, in any order and with any number of threads. linnet data
    --tokenizer, linnet train --set data.tokenizer=FILE and transformers read
    it.

    Example: [bold]linnet corpus tokenizer cleaned --vocab 64000 --cjk 8000 --out tokenizer.json[/]

    Args:
        folders (FOLDER): Folders of stages, or any SOURCE of clean.
        out: The file to write.
        vocab: Exact number of tokens.
        cjk: Han characters that are tokens: the most frequent ones of the corpus, then frequent ones of the national
            standards. With 0 they are tokens only where the text has them often.
        train_bytes: Bytes of text from which merges are learned; characters are counted in all.
        as_json: Print one JSON object.
    """
    from linnet.corpus.bpe.learn import learn_tokenizer
    from linnet.runs.files import write_atomic

    _check_out(out)
    with Bar(Console(stderr=True)) as bar:
        found = learn_tokenizer(folders, vocab, cjk, train_bytes=train_bytes, text_key=text_key, progress=bar)
    out.parent.mkdir(parents=True, exist_ok=True)
    for half in out.parent.glob(f".{escape_glob(out.name)}.*.tmp"):  # what a killed command was writing
        half.unlink(missing_ok=True)
    write_atomic(out, found.tokenizer.to_json())
    values = {
        "path": str(out),
        "digest": found.tokenizer.digest,
        "vocab_size": found.tokenizer.vocab_size,
        "tokens": found.tokens,
        "documents": found.documents,
        "bytes": found.bytes,
        "learned_bytes": found.learned_bytes,
        "measured_bytes": found.measured_bytes,
        "scripts": {name: vars(share) for name, share in found.scripts.items()},
    }
    if as_json:
        echo_json(values, ensure_ascii=False)
        return
    _show(values)


def _check_out(out: Path) -> None:
    """Raises ConfigError before anything is read if the file cannot be written, or would not be read as a tokenizer."""
    if out.is_dir() or out.suffix != ".json":
        raise ConfigError([f"--out {out}: name a file that ends in .json, such as tokenizer.json"], "corpus tokenizer")
    if reason := unwritable(out.parent):
        raise ConfigError([f"--out {out}: its folder {reason}; name another place"], "corpus tokenizer")


def _show(values: dict) -> None:
    console = Console(soft_wrap=True, highlight=False)
    kinds = ", ".join(f"{number:,} {name}" for name, number in values["tokens"].items() if number)
    console.print(f"{values['vocab_size']:,} tokens: {kinds}")
    learned = f"merges learned from {values['learned_bytes']:,} of {values['bytes']:,} bytes"
    console.print(f"{learned} in {values['documents']:,} documents")
    table = make_table("script", "#bytes", "#tokens", "#characters/token", "#bytes/token")
    for name, share in values["scripts"].items():
        ratios = (f"{share[key] / share['tokens']:.2f}" for key in ("characters", "bytes"))
        table.add_row(name, f"{share['bytes']:,}", f"{share['tokens']:,}", *ratios)
    console.print(table)
    console.print(f"{escape(values['path'])} (digest {values['digest']})")
    console.print(f"train with it: linnet train --data FOLDER --set data.tokenizer={escape(values['path'])}")
