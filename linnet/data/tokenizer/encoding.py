"""From text to ids and back: bytes, and tokenizers of the `tokenizers` library."""

import functools
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from linnet.config import ConfigError, digest
from linnet.data.parts import whole_file
from linnet.data.tokenizer.config import END_OF_DOCUMENT
from linnet.data.tokenizer.file import (
    BYTE_TOKEN,
    byte_values,
    fallback_bytes,
    falls_back,
    is_byte_level,
    keep_apart,
    places_inside,
)

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
# Seconds that a regex of a tokenizer.json may take: at least 5, and 20 microseconds per byte, 20 times the usual.
LEAST_SECONDS, SECONDS_PER_BYTE = 5.0, 20e-6
_WORD_START = re.compile(r"(?<=\S)[ \t\n]")
_BROKEN = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as Python's surrogateescape writes them


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
        with whole_file(Path(path)) as file:
            file.write(self.to_json().encode())

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
        spelled = {number: match for token, number in vocab.items() if (match := BYTE_TOKEN.fullmatch(token))}
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
            texts[number] = fallback_bytes(token) if self._falls_back else bytes(map(byte_values().get, token))
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
        pieces = [cut_pieces(text) if self.byte_lengths is not None else [text] for text in texts]
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

        first, *others = re.split(places_inside(tokens) or "(?!)", text)
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
        byte_level = values["model"]["type"] == "BPE" and values["normalizer"] is None and is_byte_level(values)
        strips = any((token["lstrip"] or token["rstrip"]) and not token["special"] for token in values["added_tokens"])
        if strips or not self._falls_back and not (byte_level and whole):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in vocab.items():
            # the byte-level alphabet writes each byte as one character
            lengths[number] = len(fallback_bytes(token) if self._falls_back else token)
        for token in values["added_tokens"]:
            lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
        lengths[self.end_of_document] = 0
        return lengths


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


def cut_pieces(text: str) -> list[str]:
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
