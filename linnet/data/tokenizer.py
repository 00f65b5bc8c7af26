"""Tokenizers: bytes, byte-level BPE or WordPiece that Linnet learns, or any tokenizer.json.

Every tokenizer has an end-of-document token, which follows each document of a corpus. Text never encodes to it: a
document that contains its spelling ("<|endoftext|>") is encoded as ordinary text.
"""

import base64
import functools
import hashlib
import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import tokenizers
from pydantic import Field
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from linnet.config import Config, ConfigError, digest, shown
from linnet.data import hub, wikitext

END_OF_DOCUMENT = "<|endoftext|>"
UNKNOWN = "[UNK]"  # of WordPiece, for words with a rare character
MOST_CHARACTERS = 1000  # distinct characters of a WordPiece vocabulary, the most frequent ones (as BERT's)
# Common names of the end-of-document token in a tokenizer.json, the likeliest first.
COMMON_ENDS = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "<|eos|>",
    "</s>",
    "<eos>",
    "<EOS>",
    "[EOS]",
    "<|im_end|>",
    "<｜end▁of▁sentence｜>",
    "[SEP]",
)
PIECE = 1 << 20  # characters of a document that are encoded at a time
WORD = 4096  # characters of a word from which merges are learned; the time per word grows with the square of its length
MOST_IDS = 1 << 24  # ids of a tokenizer.json
# Seconds that a regex of a tokenizer.json may take: at least 5, and 20 microseconds per byte, 20 times the usual.
LEAST_SECONDS, SECONDS_PER_BYTE = 5.0, 20e-6
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{WORD},}}|(?<!\s)\s{{{WORD},}}")
_WORD_START = re.compile(r"(?<=\S)[ \t\n]")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BROKEN = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as Python's surrogateescape writes them


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


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest little-endian unsigned integer type that holds every id."""
    return np.dtype("<u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


class Tokenizer:
    """The interface of all tokenizers.

    Attributes:
        name: a short description for people.
        vocab_size: number of ids; all ids are below it.
        end_of_document: the id of the token after each document.
        byte_lengths: int64 [vocab_size], the number of bytes of text per token (0 for the end of a document). None if
            a token does not determine it (a tokenizer.json that normalises text or is not byte-level).
        token_bytes: the bytes of text of each id, of length vocab_size, where `byte_lengths` is not None.
        unknown: the id that replaces text the tokenizer cannot express, or None if it can express all text.
        prompt_start: ids that the model expects before a prompt, as converted Llamas do. `encode` does not add them,
            and documents do not have them.
        generation_ends: ids besides `end_of_document` at which a generation ends, as converted chat models name them.
        bos_token: spelling of the token that chat templates call by this name, "" for none; None if it is not known.
        sampling: what a converted model is served with if a request does not say it: `temperature`, `top_p`, ...
    """

    name: str
    vocab_size: int
    end_of_document: int
    byte_lengths: np.ndarray | None
    token_bytes: list[bytes]
    unknown: int | None = None
    prompt_start: tuple[int, ...] = ()
    generation_ends: tuple[int, ...] = ()
    bos_token: str | None = None
    sampling: Mapping[str, float] = MappingProxyType({})

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of a text, int64 [n], without an end of document.

        Raises ValueError for half of a surrogate pair, and for NUL in a text for the byte tokenizer.
        """
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids. Ends of documents are left out; invalid UTF-8 becomes U+FFFD."""
        raise NotImplementedError

    def encode_documents(self, documents: list[bytes]) -> list[np.ndarray]:
        """Returns the token ids of many documents in valid UTF-8, in the dtype of `token_dtype`."""
        raise NotImplementedError

    def to_json(self) -> str:
        """Returns the text that `save` writes."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Writes a file that `load_tokenizer` reads: a tokenizer.json, or a short note for the byte tokenizer."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @functools.cached_property
    def digest(self) -> str:
        """12 hexadecimal digits that are the same for tokenizers with the same tokens and rules."""
        return digest(json.loads(self.to_json()))


def check_utf8(text: str) -> None:
    """Raises ValueError if a text has half of a surrogate pair, as Python has them for bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"character {error.start} is half of a surrogate pair, which no UTF-8 text has; remove it"
        raise ValueError(problem) from None


def encode_inside(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Returns the ids of a text that stands behind other text, without the space that some tokenizers put before one.

    Args:
        encode: returns the ids of a whole text.
    """

    def behind(head: str, text: str) -> list[int] | None:
        first, ids = encode(head), encode(head + text)
        return ids[len(first) :] if ids[: len(first)] == first else None  # else a token spans both

    for head in ("\n", "a", "."):
        letter = behind(head, "b")
        if letter == encode("b"):
            break
        if letter is not None and (ids := behind(head, text)) is not None:
            return ids
    return encode(text)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes; see `ByteTokenizerConfig`."""

    name = "byte"
    vocab_size = 256
    end_of_document = 0

    def __init__(self):
        self.byte_lengths = np.ones(256, dtype=np.int64)
        self.byte_lengths[self.end_of_document] = 0
        self.token_bytes = [bytes([number] * int(size)) for number, size in enumerate(self.byte_lengths)]

    def encode(self, text: str) -> np.ndarray:
        if "\0" in text:
            raise ValueError(f"character {text.index(chr(0))} is NUL, which marks the end of a document; remove it")
        check_utf8(text)
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(np.asarray(ids, dtype=np.uint8)).replace(b"\0", b"").decode(errors="replace")

    def encode_documents(self, documents: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def to_json(self) -> str:
        return '{"linnet": {"kind": "byte"}}'


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, with an end-of-document token.

    Args:
        inner: the library's tokenizer. Truncation, padding, and tokens added before or after a text are turned off.
        end_of_document: the token that ends a document; None takes the first of `COMMON_ENDS` that `inner` has.
        name: a short description for people.
        line_ends: whether this token stands between lines too, which lose white space at both ends. Its byte length
            is then 1, the line feed; the white space that is lost has no token.

    Raises:
        ValueError: `inner` does not have this token.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        end_of_document: str | None = None,
        name: str = "tokenizer.json",
        line_ends: bool = False,
    ):
        self.line_ends = line_ends
        inner.no_truncation()
        inner.no_padding()
        vocab = inner.get_vocab(with_added_tokens=True)
        names = COMMON_ENDS if end_of_document is None else (end_of_document,)
        self._end = next((token for token in names if token in vocab), None)
        if self._end is None:
            raise ValueError(f"it has no end-of-document token {' or '.join(names)}; name one with end_of_document")
        self.name = name
        self.vocab_size = max(vocab.values()) + 1
        self.end_of_document = vocab[self._end]
        self._json = inner.to_str()
        values = json.loads(self._json)
        self.unknown = values["model"].get("unk_id", vocab.get(values["model"].get("unk_token")))
        special = {token["content"]: token["id"] for token in values["added_tokens"] if token["special"]}
        guarded = {token: number for token, number in special.items() if number != self.unknown}
        guarded[self._end] = self.end_of_document
        self._guarded = tuple(guarded)
        self._falls_back = falls_back(values)
        after = values["decoder"] or {"type": ""}
        joins = any(step["type"] == "ByteFallback" for step in (after, *after.get("decoders", ())))
        spelled = {number: match for token, number in vocab.items() if (match := _BYTE_TOKEN.fullmatch(token))}
        self._byte_tokens = {number: int(match[1], 16) for number, match in spelled.items()} if joins else {}
        self.byte_lengths = self._count_bytes(values, vocab)
        if line_ends and self.byte_lengths is not None:
            self.byte_lengths[self.end_of_document] = 1
        self._backtracks = '"Regex":' in self._json  # a pattern of the file, which may take any time
        if (apart := keep_apart(values, self._end, self._guarded)) is not values:
            inner = tokenizers.Tokenizer.from_str(json.dumps(apart))
        inner.encode_special_tokens = True  # encode the spelling of a special token in a document as ordinary text
        self._inner = inner

    def encode(self, text: str) -> np.ndarray:
        check_utf8(text)
        if self.line_ends:
            return self._encode_lines(text, np.dtype(np.int64))
        return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in self._encode([text])[0]])

    def encode_apart(self, text: str, tokens: Iterable[str]) -> list[int]:
        """Returns the ids of a text in which the spelling of some tokens is text, also of those that are not special.

        `encode` returns a token that is added to the vocabulary without being special where a text spells it.
        """
        ids, tokens = self.encode(text).tolist(), tuple(tokens)
        if self.line_ends or not any(self._inner.token_to_id(token) in ids for token in tokens):
            return ids
        return self._cut(text, (*tokens, *self._guarded))

    def decode(self, ids: Iterable[int]) -> str:
        ids = np.asarray(ids, dtype=np.int64)
        if self.line_ends:
            cuts = np.flatnonzero(ids == self.end_of_document)
            lines = np.split(ids, cuts)  # all but the first begin with the end of the line before
            return "\n".join(self._inner.decode(line[i > 0 :].tolist()) for i, line in enumerate(lines))
        if self._falls_back:  # the library's decoder loses the whole characters beside a part of one
            return self.decode_bytes(ids).decode(errors="replace")
        ids = ids[ids != self.end_of_document].tolist()
        if not self._byte_tokens:
            return self._inner.decode(ids, skip_special_tokens=False)
        tokens: list[str] = []  # with runs of bytes as text, for the same reason
        for are_bytes, run in itertools.groupby(ids, self._byte_tokens.__contains__):
            if are_bytes:
                tokens.append(bytes(map(self._byte_tokens.__getitem__, run)).decode(errors="replace"))
            else:
                tokens += [token for number in run if (token := self._inner.id_to_token(number)) is not None]
        return self._inner.decoder.decode(tokens)

    @functools.cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of text of each id, of length vocab_size; b"" for ends of documents and other special tokens.

        Raises:
            ValueError: `byte_lengths` is None, so a token does not determine its bytes.
        """
        if self.byte_lengths is None:
            raise ValueError(f"{self.name}: its tokens are not bytes of text; use a byte-level or fall-back BPE")
        values = json.loads(self._json)
        texts = [b""] * self.vocab_size
        for token, number in self._inner.get_vocab(with_added_tokens=False).items():
            texts[number] = _fallback_bytes(token) if self._falls_back else bytes(map(_byte_values().get, token))
        for token in values["added_tokens"]:
            texts[token["id"]] = b"" if token["special"] else token["content"].encode()
        texts[self.end_of_document] = b""
        return texts

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Returns the token ids of any bytes, int64 [n]; `decode_bytes` gives exactly these bytes back.

        Valid UTF-8 between bytes that are not is encoded as text; each other byte is one token. So the ids of valid
        UTF-8 are those of `encode`. Raises ValueError as `token_bytes`.
        """
        numbers = {byte: number for number, byte in reversed(list(enumerate(self.token_bytes))) if len(byte) == 1}
        parts = _BROKEN.split(data.decode(errors="surrogateescape"))  # text, bytes, text, ...
        broken = [[numbers[character.encode(errors="surrogateescape")] for character in part] for part in parts[1::2]]
        texts = [[number for piece in pieces for number in piece] for pieces in self._encode(parts[::2])]
        joined = [part for pair in itertools.zip_longest(texts, broken, fillvalue=[]) for part in pair]
        return np.array(list(itertools.chain.from_iterable(joined)), dtype=np.int64)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of ids. Raises ValueError as `token_bytes`."""
        return b"".join(map(self.token_bytes.__getitem__, np.asarray(ids, dtype=np.int64).tolist()))

    def encode_documents(self, documents: list[bytes]) -> list[np.ndarray]:
        dtype = token_dtype(self.vocab_size)
        texts = [document.decode() for document in documents]
        if self.line_ends:
            return [self._encode_lines(text, dtype) for text in texts]
        return [np.concatenate([np.asarray(piece, dtype=dtype) for piece in pieces]) for pieces in self._encode(texts)]

    def own_start(self) -> tuple[int, ...]:
        """Returns the ids that the library's own rule, which `encode` does not apply, adds before a text."""
        bare, whole = (self._inner.encode("a", add_special_tokens=flag).ids for flag in (False, True))
        places = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return tuple(whole[: next(places, 0)])

    def to_json(self) -> str:
        # Other programs can read this file too, unless it must note which token is the end of a document.
        values = json.loads(self._json)
        known = [token for token in COMMON_ENDS if self._inner.token_to_id(token) is not None]
        if self._end not in known[:1] or self.line_ends:
            values["linnet"] = {"end_of_document": self._end}
            if self.line_ends:
                values["linnet"]["line_ends"] = True
        return json.dumps(values, ensure_ascii=False)

    def to_library(self) -> str:
        """Returns a tokenizer.json for other programs that gives the ids of `encode` if special tokens are split."""
        return self._inner.to_str()

    def _encode_lines(self, text: str, dtype: np.dtype) -> np.ndarray:
        """Returns the ids of the lines of a text with the end of a document between them, but not after the last."""
        lines, parts, start = text.removesuffix("\n").split("\n"), [], 0
        while start < len(lines):  # some at a time, since the library holds what it has encoded
            end, size = start, 0
            while end < len(lines) and size < PIECE:
                size += 1 + len(lines[end])
                end += 1
            encoded = self._encoded([line.strip() for line in lines[start:end]])
            flat = itertools.chain.from_iterable((self.end_of_document, *line) for line in encoded)
            parts.append(np.fromiter(flat, dtype=dtype))
            start = end
        return np.concatenate(parts)[1:]

    def _encode(self, texts: list[str]) -> list[list[list[int]]]:
        # Long documents are cut into pieces. The library encodes pieces in parallel, and needs some hundred bytes of
        # memory per token of a piece.
        pieces = [_pieces(text) if self.byte_lengths is not None else [text] for text in texts]
        flat = [piece for group in pieces for piece in group]
        encoded = iter(self._encoded(flat))
        return [[next(encoded) for _ in group] for group in pieces]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, none of which is a special token that the text spells."""
        encodings = [encoding.ids for encoding in self._in_time(texts)]
        for ids in encodings:
            self._check(ids)
        return encodings

    def _check(self, ids: list[int]) -> None:
        """Raises ConfigError if a text has the end of a document, as where one character spells it."""
        if self.end_of_document in ids:
            what = f"text has tokens {self._end!r} of {self.name}, which end a document"
            raise ConfigError([f"tokenizer: {what}; name another one with end_of_document, or change the text"], "data")

    def _cut(self, text: str, tokens: Iterable[str]) -> list[int]:
        """Returns the ids of a text that is cut behind the first character of each of some tokens, so that none is one.

        The library looks for added tokens that are not special before its pre-tokenizer runs, so `keep_apart` cannot.
        """

        def encode(part: str) -> list[int]:
            return self._inner.encode(part, add_special_tokens=False).ids

        first, *others = re.split(_places(tokens) or "(?!)", text)
        ids = [*encode(first), *itertools.chain.from_iterable(encode_inside(encode, part) for part in others)]
        self._check(ids)
        return ids

    def _in_time(self, texts: list[str]) -> list:
        def encode() -> list:
            return self._inner.encode_batch_fast(texts, add_special_tokens=False)

        if not self._backtracks:
            return encode()
        try:
            return _within(LEAST_SECONDS + SECONDS_PER_BYTE * sum(map(len, texts)), encode)
        except TimeoutError as error:
            what = f"a regex of {self.name} takes too long for this text ({error})"
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's, when a regex gives up
                raise
            what = f"a regex of {self.name} fails on this text ({error})"
        raise ConfigError([f"tokenizer: {what}; simplify its pre_tokenizer, or use another tokenizer"], "data")

    def _count_bytes(self, values: dict, vocab: dict[str, int]) -> np.ndarray | None:
        whole = set(pre_tokenizers.ByteLevel.alphabet()) <= vocab.keys()
        byte_level = values["model"]["type"] == "BPE" and values["normalizer"] is None and _byte_level(values)
        strips = any((token["lstrip"] or token["rstrip"]) and not token["special"] for token in values["added_tokens"])
        if strips or not self._falls_back and not (byte_level and whole):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in vocab.items():
            # the byte-level alphabet writes each byte as one character
            lengths[number] = len(_fallback_bytes(token) if self._falls_back else token)
        for token in values["added_tokens"]:
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        lengths[self.end_of_document] = 0
        return lengths


def train_bpe(documents: Iterable[str], vocab_size: int, line_ends: bool = False) -> FileTokenizer:
    """Learns byte-level BPE. The same documents give the same tokenizer, in any order and with any number of threads.

    Args:
        line_ends: of the tokenizer; merges are then learned from lines without white space at both ends.

    Raises:
        ConfigError: the documents do not have enough repeated pairs for `vocab_size` tokens.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    if line_ends:
        documents = (line.strip() for document in documents for line in document.split("\n"))
    inner.train_from_iterator(training_parts(documents), trainer=trainer)
    if (size := inner.get_vocab_size()) != vocab_size:
        fix = f"the training text gives only {size} tokens; use at most {size}, or more text"
        raise ConfigError([f"tokenizer.vocab_size: {vocab_size} is too large: {fix}"], "data")
    return FileTokenizer(inner, END_OF_DOCUMENT, name=f"bpe:{vocab_size}", line_ends=line_ends)


def training_parts(documents: Iterable[str]) -> Iterator[str]:
    """Yields documents in parts from which merges can be learned in time and memory that grow with their length."""
    return (part for document in documents for piece in _pieces(document) for part in _short_words(piece))


def train_wordpiece(documents: Iterable[str], vocab_size: int, lowercase: bool = True) -> FileTokenizer:
    """Learns WordPiece. The same documents give the same tokenizer, in any order and with any number of threads.

    Args:
        documents: held in memory, because their characters are counted first.

    Raises:
        ConfigError: the documents do not have enough repeated pairs for `vocab_size` tokens, or have more characters.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    texts = [normalizer.normalize_str(part) for document in documents for part in _short_words(document)]
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    known = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet = sorted([character for character in known if not character.isspace()][:MOST_CHARACTERS])
    # The library numbers pieces that continue a word in the order in which it meets them, which changes from run to
    # run, and pairs with equal counts are merged in the order of these numbers. So they are numbered here.
    first = [END_OF_DOCUMENT, UNKNOWN, *alphabet, *(f"##{character}" for character in alphabet)]
    if len(first) > vocab_size:
        fix = f"its {len(alphabet)} characters alone need {len(first)} tokens; use at least that"
        raise ConfigError([f"tokenizer.vocab_size: {vocab_size} is too small for the training text: {fix}"], "data")
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer=trainer)
    vocab = learner.get_vocab()
    if len(vocab) != vocab_size:
        fix = f"the training text gives only {len(vocab)} tokens; use at most {len(vocab)}, or more text"
        raise ConfigError([f"tokenizer.vocab_size: {vocab_size} is too large: {fix}"], "data")
    # A new tokenizer, because the characters above are not special tokens.
    inner = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token=UNKNOWN))
    inner.normalizer, inner.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([END_OF_DOCUMENT, UNKNOWN])
    return FileTokenizer(inner, END_OF_DOCUMENT, name=f"wordpiece:{vocab_size}")


def given_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """Returns the tokenizer that a configuration names, or None if it must be learned. Raises as `load_tokenizer`."""
    match config:
        case ByteTokenizerConfig():
            return ByteTokenizer()
        case FileTokenizerConfig():
            return load_tokenizer(config.path, config.end_of_document, config.line_ends)
        case FairseqTokenizerConfig():
            return load_fairseq(config.path)
        case TiktokenTokenizerConfig():
            return load_tiktoken(config)
    return None


def load_fairseq(folder: str | Path) -> FileTokenizer:
    """Reads GPT-2's vocabulary in fairseq's order (`linnet.data.wikitext.read_vocabulary`); </s> ends every line.

    Raises:
        ConfigError: a file is missing or damaged, or the files do not fit together.
    """
    try:
        inner = wikitext.read_vocabulary(folder)
    except wikitext.BadVocabulary as error:
        raise ConfigError([f"tokenizer.path: {error}"], "data") from None
    return FileTokenizer(inner, wikitext.LINE_END, name="fairseq", line_ends=True)


def load_tiktoken(config: TiktokenTokenizerConfig) -> FileTokenizer:
    """Reads a file of tiktoken with the `tokenizers` library, which gives the same ids.

    Raises:
        ConfigError: the file cannot be read or is damaged, lacks a byte, or has the id of the end of a document.
    """
    path = Path(config.path).expanduser()
    ranks: dict[bytes, int] = {}
    names = {value: character for character, value in _byte_values().items()}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError([f"tokenizer {path}: cannot be read: {error.strerror or error}"], "data") from None
    for number, line in enumerate(lines, 1):
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
            if not token or not rank.isdigit() or token in ranks or int(rank) >= MOST_IDS:
                raise ValueError
        except ValueError:
            what = f"{shown(line.decode(errors='replace'))} is not a new token in base64 with its rank"
            raise ConfigError([f"tokenizer {path}: line {number}: {what}; download the file again"], "data") from None
        ranks[token] = int(rank)
    taken = set(ranks.values())
    _, end = SPLITS[config.split]
    end = config.end_of_document if config.end_of_document is not None else end
    if config.end_of_document is None and (len(ranks) <= end // 2 or end in taken):
        end = max(taken, default=-1) + 1
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing or len(taken) < len(ranks) or end in taken:
        what = f"lacks the byte {missing[0] if missing else ''}" if missing else "has one rank twice"
        what = f"has a token with the id of the end of a document, {end}" if end in taken and not missing else what
        raise ConfigError([f"tokenizer {path}: {what}; use another file, split or end_of_document"], "data")
    spelled = {token: "".join(map(names.__getitem__, token)) for token in ranks}
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | {END_OF_DOCUMENT: end}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    words = pre_tokenizers.Split(tokenizers.Regex(SPLITS[config.split][0]), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([words, whole]), decoders.ByteLevel()
    inner.add_special_tokens([END_OF_DOCUMENT])
    return FileTokenizer(inner, END_OF_DOCUMENT, name=path.name)


def tokenizer_fingerprint(config: FileTokenizerConfig | FairseqTokenizerConfig | TiktokenTokenizerConfig) -> str:
    """Returns the SHA-256 of the file of a tokenizer, or that of the digests of its files, in hexadecimal.

    Raises:
        ConfigError: a file is missing.
        OSError: a file cannot be read.
    """
    if not isinstance(config, FairseqTokenizerConfig):
        return wikitext.sha256(tokenizer_path(config.path))
    try:
        files = wikitext.vocabulary_files(config.path)
    except wikitext.BadVocabulary as error:
        raise ConfigError([f"tokenizer.path: {error}"], "data") from None
    return hashlib.sha256("".join(map(wikitext.sha256, files.values())).encode()).hexdigest()


def given_vocabulary(config: TokenizerConfig) -> int:
    """Returns the vocabulary size of a tokenizer's configuration without reading text. Raises as `load_tokenizer`."""
    if isinstance(config, FairseqTokenizerConfig):
        return wikitext.vocabulary_size(config.path)
    learned = isinstance(config, (BPETokenizerConfig, WordPieceTokenizerConfig))
    return config.vocab_size if learned else given_tokenizer(config).vocab_size


def load_tokenizer(
    path: str | Path,
    end_of_document: str | int | None = None,
    line_ends: bool = False,
    added: Iterable[tokenizers.AddedToken] = (),
    most: int = MOST_IDS,
) -> Tokenizer:
    """Reads a tokenizer.json, or a file that `Tokenizer.save` wrote.

    Args:
        path: the file, or `hf:NAME` of a model on the Hub.
        end_of_document: the token that ends a document, or its id; None takes the one noted in the file (or, on the
            Hub, in its tokenizer_config.json), else the first of `COMMON_ENDS` that the tokenizer has.
        line_ends: whether it ends lines too, also if the file does not note it.
        added: tokens that the files beside it name, which it gets if it lacks them and has fewer than `most` ids.

    Raises:
        ConfigError: the file does not exist, is not a tokenizer, or has no end-of-document token.
    """
    if hub.is_name(str(path)):
        file, end = _of_hub(str(path))
        tokenizer = load_tokenizer(file, end_of_document or end, line_ends)
        tokenizer.name = str(path)
        return tokenizer
    path = Path(path).expanduser()
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OSError("it is a pipe, socket or device")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise TypeError("it holds no object")
        notes = values.pop("linnet", {})
        if not isinstance(notes, dict):
            notes = {}
        if notes.get("kind") == "byte":
            return ByteTokenizer()
        if problem := _bad_id(values):
            raise ConfigError([f"tokenizer {path}: {problem}"], "data")
        inner = tokenizers.Tokenizer.from_str(json.dumps(values))
        known = {token.content for token in inner.get_added_tokens_decoder().values()}
        for token in added:
            if token.content not in known and inner.get_vocab_size() < most:
                inner.add_tokens([token])
        if isinstance(end_of_document, int):
            end_of_document = inner.id_to_token(end_of_document) if end_of_document < MOST_IDS else None
        end = end_of_document or notes.get("end_of_document")
        return FileTokenizer(inner, end, name=path.name, line_ends=line_ends or notes.get("line_ends") is True)
    except ConfigError:
        raise
    except OSError as error:
        reason = (
            f"cannot be read: {error.strerror or error}; give the path of a tokenizer.json as data.tokenizer, or byte"
        )
    except ValueError as error:
        reason = str(error) if "end_of_document" in str(error) else f"is not JSON ({error})"
    except RecursionError:
        reason = "is JSON that is nested too deeply to read"
    except BaseException as error:  # the library raises a bare Exception or panics for a file that it cannot use
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"is not a tokenizer.json of the tokenizers library ({error})"
    raise ConfigError([f"tokenizer {path}: {reason}"], "data")


def _bad_id(values: dict) -> str | None:
    """Returns a problem if a tokenizer.json names an id that no table of tokens can have, else None."""
    model = values.get("model")
    vocab, added = model.get("vocab") if isinstance(model, dict) else None, values.get("added_tokens")
    named = list(vocab.items()) if isinstance(vocab, dict) else []
    named += [(entry.get("content"), entry.get("id")) for entry in added or [] if isinstance(entry, dict)]
    for token, number in named:
        if type(number) is int and not 0 <= number < MOST_IDS:
            return f"token {shown(token)} has the id {shown(number)}; ids are 0 to {MOST_IDS - 1:,}"
    return None


def _within(seconds: float, function: Callable[[], list]) -> list:
    """Returns the result of a function that leaves Python's lock while it works.

    Raises:
        TimeoutError: it takes longer; it goes on in a thread that ends with the process.
    """
    result: list = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as caught:
            error.append(caught)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"more than {seconds:.0f} s")
    if error:
        raise error[0]
    return result[0]


def tokenizer_path(path: str) -> Path:
    """Returns the file of a `FileTokenizerConfig`. Raises ConfigError for a name on the Hub that cannot be had."""
    return _of_hub(path)[0] if hub.is_name(path) else Path(path).expanduser()


def _of_hub(name: str) -> tuple[Path, str | None]:
    try:
        return hub.tokenizer_file(name)
    except hub.HubError as error:
        raise ConfigError([f"tokenizer {name}: {error}"], "data") from None


def _byte_level(values: dict) -> bool:
    """Returns whether the tokenizer works on bytes and adds nothing, so that each token has an exact byte length."""

    def parts(step: dict | None) -> list[dict]:
        if step is None:
            return []
        inner = step.get("pretokenizers") or step.get("decoders")
        return [part for child in inner for part in parts(child)] if inner else [step]

    before = [part for part in parts(values["pre_tokenizer"]) if part["type"] == "ByteLevel"]
    after = [part["type"] for part in parts(values["decoder"])]
    return after == ["ByteLevel"] and len(before) == 1 and not before[0]["add_prefix_space"]


def _places(tokens: Iterable[str]) -> str:
    """Returns a regex of the places behind the first character of each token of several, "" if there is none."""
    places = [f"(?<={re.escape(token[:1])})(?={re.escape(token[1:])})" for token in tokens if len(token) > 1]
    return "|".join(places)


def keep_apart(values: dict, end: str, special: Iterable[str]) -> dict:
    """Returns the values of a tokenizer.json whose model finds no special token by its spelling, or `values` itself.

    The library keeps special tokens out of a text only where it looks for them before its model does. A model whose
    own vocabulary has them, such as Unigram or WordLevel, finds them by their spelling. So the last step before the
    model cuts the text behind the first character of such a token, and `end` becomes special.
    """
    model, added = values["model"], values["added_tokens"]
    marked = [{**token, "special": True, "normalized": False} if token["content"] == end else token for token in added]
    vocab = model["vocab"]
    pieces = {piece for piece, _ in vocab} if isinstance(vocab, list) else vocab.keys()
    reached = [token for token in special if token in pieces]
    if model["type"] == "BPE" and not model.get("ignore_merges"):
        merged = {"".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1) for merge in model["merges"]}
        reached = [token for token in reached if token in merged]
    places = _places(reached)
    if not places:
        return values if marked == added else {**values, "added_tokens": marked}
    cut = {"type": "Split", "pattern": {"Regex": places}, "behavior": "Isolated", "invert": False}
    before = values["pre_tokenizer"]
    if before is not None and before.get("pretokenizers", [])[-1:] == [cut]:
        return {**values, "added_tokens": marked}
    steps = {"type": "Sequence", "pretokenizers": [cut] if before is None else [before, cut]}
    return {**values, "added_tokens": marked, "pre_tokenizer": steps}


def falls_back(values: dict) -> bool:
    """Returns whether the values of a tokenizer.json are a BPE over characters that spells all others as bytes.

    Such a tokenizer has ASCII characters and the tokens <0x80> to <0xFF>, or <0x00> to <0xFF>, and changes no text.
    """
    model, before, after = values["model"], values["pre_tokenizer"], values["decoder"]
    if model["type"] != "BPE" or not model.get("byte_fallback") or values["normalizer"] is not None:
        return False
    steps = [] if before is None else [before]
    if any(step["type"] != "Split" or step["behavior"] != "Isolated" for step in steps):
        return False
    if [step["type"] for step in (after or {}).get("decoders", [])] != ["ByteFallback", "Fuse"]:
        return False
    vocab = model["vocab"]
    return all(f"<0x{i:02X}>" in vocab for i in range(128, 256)) and all(
        chr(i) in vocab or f"<0x{i:02X}>" in vocab for i in range(128)
    )


def _fallback_bytes(token: str) -> bytes:
    """Returns the bytes of a token of a fall-back BPE: <0x80> is one byte, others are their UTF-8."""
    return bytes([int(match[1], 16)]) if (match := _BYTE_TOKEN.fullmatch(token)) else token.encode()


@functools.cache
def _byte_values() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for: printable ones of Latin-1 for themselves,
    the others for the characters from 256 on in their order (Radford et al. 2019)."""
    printable = [i for i in range(256) if chr(i) in pre_tokenizers.ByteLevel.alphabet()]
    rest = [i for i in range(256) if i not in printable]
    return {chr(i): i for i in printable} | {chr(256 + place): i for place, i in enumerate(rest)}


def _pieces(text: str) -> list[str]:
    """Cuts long text before white space that follows another character; GPT-2's rule always starts a new word there.

    Other byte-level splitting rules may place one token differently at a cut, once per `PIECE` characters. Text that
    has no such place within another `PIECE` characters is cut anyway.
    """
    pieces, start = [], 0
    while len(text) - start > PIECE:
        cut = _WORD_START.search(text, start + PIECE, start + 2 * PIECE)
        if cut is None and len(text) - start <= 2 * PIECE:
            break
        end = start + 2 * PIECE if cut is None else cut.start()
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _short_words(text: str) -> Iterator[str]:
    """Yields the text in parts such that words of `WORD` characters or more, as in text without spaces, are cut."""
    start = 0
    for match in _LONG_WORD.finditer(text):
        for cut in range(match.start() + WORD, match.end() + 1, WORD):
            yield text[start:cut]
            start = cut
    if start < len(text) or not text:
        yield text[start:]
