"""Which tokenizer: its kinds, and the short forms that name one."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field

from linnet.config import Config
from linnet.data import hub

END_OF_DOCUMENT = "<|endoftext|>"
MOST_IDS = 1 << 24  # ids of a tokenizer.json


class ByteTokenizerConfig(Config):
    """UTF-8 bytes as tokens: 256 ids; id 0 (NUL, which text must not contain) is the end of a document.

    Attributes:
        kind: byte: each byte is a token.
    """

    kind: Literal["byte"] = "byte"


class BPETokenizerConfig(Config):
    """Byte-level BPE learned from the training documents (GPT-2's splitting rule); id 0 is the end of a document.

    Attributes:
        kind: bpe: byte pairs, learned from the training text.
        vocab_size: exact number of tokens: the end of a document, 256 bytes, and the merges.
        train_bytes: bytes of text from which the merges are learned; documents are taken in a fixed random order.
        line_ends: whether the token that ends a document ends every line too, in place of the line feed; white space
            at both ends of a line is left out (as fairseq prepares WikiText).
    """

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = Field(ge=257, le=1 << 20)
    train_bytes: int = Field(100_000_000, ge=1)
    line_ends: bool = Field(False, exclude_if=lambda line_ends: not line_ends)


class WordPieceTokenizerConfig(Config):
    """WordPiece learned from the training documents, with BERT's rules for words; id 0 is the end of a document.

    Text does not come back from its tokens exactly: runs of spaces become one, and case is lost with `lowercase`. So
    bytes per token are known on average only.

    Attributes:
        kind: wordpiece: pieces of words, learned from the training text.
        vocab_size: exact number of tokens: the end of a document, the unknown token, characters and pieces.
        train_bytes: bytes of text from which the pieces are learned; documents are taken in a fixed random order.
        lowercase: whether letters lose case and accents.
    """

    kind: Literal["wordpiece"] = "wordpiece"
    vocab_size: int = Field(ge=4, le=1 << 20)
    train_bytes: int = Field(100_000_000, ge=1)
    lowercase: bool = True


class FileTokenizerConfig(Config):
    """A tokenizer.json of the `tokenizers` library.

    Attributes:
        kind: file: a tokenizer.json.
        path: the file, or `hf:NAME` of a model on the Hub.
        end_of_document: the token that ends a document; None takes the first of `COMMON_ENDS` that the file has.
        line_ends: whether this token ends every line too, as for `bpe`.
    """

    kind: Literal["file"] = "file"
    path: str
    end_of_document: str | None = None
    line_ends: bool = Field(False, exclude_if=lambda line_ends: not line_ends)


class FairseqTokenizerConfig(Config):
    """GPT-2's byte-level BPE with the ids of fairseq's dictionary, in which </s> ends every line (papers 001 to 003).

    Attributes:
        kind: fairseq: the files encoder.json, vocab.bpe and dict.txt.
        path: their folder.
    """

    kind: Literal["fairseq"] = "fairseq"
    path: str


class TiktokenTokenizerConfig(Config):
    """A byte-level BPE in the format of tiktoken: a line per token, its bytes in base64 and its rank, which is its id.

    Attributes:
        kind: tiktoken: a file such as cl100k_base.tiktoken.
        path: the file.
        split: the rule that cuts text into words: that of cl100k_base (default), o200k_base or gpt2 (r50k, p50k).
        end_of_document: id of the end of a document, `<|endoftext|>`; None is that of the library for a file of this
            rule (100257, 199999, 50256), or else the first id that is free.
    """

    kind: Literal["tiktoken"] = "tiktoken"
    path: str
    split: Literal["cl100k", "o200k", "gpt2"] = "cl100k"
    end_of_document: int | None = Field(None, ge=0, lt=MOST_IDS)


# Rules that cut text into words, and the ids of the end of a document, as tiktoken has them; its possessive quantifiers
# are written as greedy ones, which match the same words.
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "cl100k": (rf"{_SHORT}|{_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s+\z|{_SPACES}", 100_257),
    "o200k": (
        rf"{_LETTERS}{_UPPER}*{_LOWER}+{_SHORT}?|{_LETTERS}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        199_999,
    ),
    "gpt2": (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", 50_256),
}
# Those that are read from files.
FILES = (FileTokenizerConfig, FairseqTokenizerConfig, TiktokenTokenizerConfig)
TokenizerConfig = (
    ByteTokenizerConfig
    | BPETokenizerConfig
    | WordPieceTokenizerConfig
    | FileTokenizerConfig
    | FairseqTokenizerConfig
    | TiktokenTokenizerConfig
)


def expand_tokenizer(value: object) -> object:
    """Expands the short forms `byte`, `bpe:4096`, `wordpiece:4096`, `path/to/tokenizer.json`, `path/to/NAME.tiktoken`,
    `hf:NAME` and `fairseq:FOLDER`; returns others unchanged."""
    if not isinstance(value, str):
        return value
    if value == "byte":
        return {"kind": "byte"}
    if match := re.fullmatch(r"(bpe|wordpiece):(\d+)", value):
        return {"kind": match[1], "vocab_size": int(match[2])}
    if value.startswith("fairseq:"):
        return {"kind": "fairseq", "path": value.removeprefix("fairseq:")}
    if value.endswith(".tiktoken") and not hub.is_name(value):
        split = next((split for split in SPLITS if split in Path(value).name), "cl100k")
        split = "gpt2" if Path(value).name.startswith(("r50k", "p50k")) else split
        return {"kind": "tiktoken", "path": value, "split": split}
    if hub.is_name(value) or value.endswith(".json") or Path(value).expanduser().is_file():
        return {"kind": "file", "path": value}
    raise ValueError(
        f"{value!r} is not a tokenizer; use byte, bpe:4096 or wordpiece:4096 (any size), the path of a "
        "tokenizer.json or of a .tiktoken file, hf:NAME or fairseq:FOLDER"
    )
