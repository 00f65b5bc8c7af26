"""Learns the tokenizer of a corpus from the folders of its stages."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from linnet.config import ConfigError, refuse
from linnet.corpus.bpe import han
from linnet.corpus.bpe.fallback import CODES, FIRST, count_characters, train_fallback_bpe
from linnet.corpus.documents import Document, Part, find_inputs, read_part
from linnet.corpus.scripts import Share, measure
from linnet.data.tokenizer import FileTokenizer

MEASURED = 16 << 20  # bytes of text whose tokens are counted by script, roughly

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Learned:
    """A tokenizer and what it was learned from.

    Attributes:
        tokenizer: the fall-back BPE.
        documents, bytes: of the whole corpus, whose characters were counted.
        learned_bytes: bytes of the documents from which the merges were learned.
        tokens: how many tokens of each kind it has, by name.
        scripts: what the tokens of each script hold, over `measured_bytes` of text.
    """

    tokenizer: FileTokenizer
    documents: int
    bytes: int
    learned_bytes: int
    tokens: dict[str, int]
    scripts: dict[str, Share]

    @property
    def measured_bytes(self) -> int:
        return sum(share.bytes for share in self.scripts.values())


def learn_tokenizer(
    sources: Sequence[str],
    vocab_size: int,
    cjk: int = 0,
    *,
    train_bytes: int = 100_000_000,
    text_key: str = "text",
    progress: Progress | None = None,
) -> Learned:
    """Learns a fall-back BPE from a corpus, which is read twice: for its characters, and for the merges.

    Args:
        sources: folders of stages, or sources as `documents.find_inputs` takes them.
        vocab_size, cjk: as in `train_fallback_bpe`.
        train_bytes: bytes of text from which merges are learned; documents are chosen by a hash of their names.
        text_key: key (JSONL) or column (Parquet) of the text of sources that are not stages.
        progress: called with the current phase, the bytes done and the bytes in total.

    Raises:
        ConfigError: a source cannot be read, holds no text, or has too little of it for `vocab_size`.
    """
    problems: list[str] = []
    inputs = find_inputs(list(sources), "FOLDER", problems, text_key)
    if vocab_size < FIRST + cjk:  # also found below, but after all text was read
        why = f"{FIRST} tokens for bytes, ASCII and the end of a document, and {cjk} Han characters"
        problems.append(f"--vocab: {vocab_size} is too small for {why}; use at least {FIRST + cjk}")
    refuse(problems, "corpus tokenizer")
    parts, total = inputs.parts, sum(part.size for part in inputs.parts)
    documents = size = 0
    counts = np.zeros(CODES, dtype=np.int64)
    for done, part in _with_size(parts):
        texts = [document.text for document in read_part(part, Counter())]
        documents, size = documents + len(texts), size + sum(len(text.encode()) for text in texts)
        counts += count_characters(texts)
        if progress:
            progress("counting characters", done, total)
    if not size:
        raise ConfigError(["FOLDER: holds no text; give a folder with documents"], "corpus tokenizer")
    learned = 0

    def learn_from() -> Iterator[str]:
        nonlocal learned
        for done, part in _with_size(parts):
            for document in some([part], train_bytes / size):
                learned += len(document.text.encode())
                yield document.text
            if progress:
                progress("learning merges", done, total)

    tokenizer = train_fallback_bpe(learn_from(), counts, vocab_size, cjk)
    scripts = measure(tokenizer, (document.text for document in some(parts, MEASURED / size)))
    if changed := inputs.changed():
        message = f"{changed[0]}: changed while it was read; run again when nothing writes to it"
        raise ConfigError([message], "corpus tokenizer")
    return Learned(tokenizer, documents, size, learned, _kinds(tokenizer, counts), scripts)


def some(parts: Sequence[Part], share: float) -> Iterator[Document]:
    """Yields about this share of the documents, the same ones in any order; all of them from 1 on.

    A document is taken if a hash of its source, file and row, from 0 to 1, is below the share.
    """
    for part in parts:
        for document in read_part(part, Counter()):
            if share >= 1 or _place(document) < share:
                yield document


def _with_size(parts: Sequence[Part]) -> Iterator[tuple[int, Part]]:
    """Yields parts with their bytes of text and those of the parts before, roughly."""
    done = 0
    for part in parts:
        done += part.size
        yield done, part


def _place(document: Document) -> float:
    """Returns a number from 0 to 1 that depends on the name of a document alone."""
    name = f"{document.source}\0{document.file}\0{document.row}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") / 2**64


def _kinds(tokenizer: FileTokenizer, counts: np.ndarray) -> dict[str, int]:
    single = [token.decode() for token in tokenizer.token_bytes[FIRST - 128 :] if len(token.decode()) == 1]
    codes = np.array([ord(character) for character in single if not character.isascii()], dtype=np.int64)
    ideographs = codes[han.is_han(codes)]
    kinds = {
        "end of a document": 1,
        "bytes": 128,
        "ASCII characters": 128,
        "Han characters of the text": int((counts[ideographs] > 0).sum()),
        "Han characters of the list": int((counts[ideographs] == 0).sum()),
        "other characters": len(codes) - len(ideographs),
    }
    return kinds | {"merges": tokenizer.vocab_size - sum(kinds.values())}
