"""BPE over characters that spells rare characters as bytes, with frequent Han characters as whole tokens.

Paper 001, appendix D.2: many common and uncommon Chinese characters are part of the vocabulary, and what is not in it
is broken down into UTF-8. Merges join characters, never bytes. So every token is whole characters, except the 128
tokens <0x80> to <0xFF>, which stand for one byte each; the other 128 bytes are the ASCII characters. Byte-level BPE
(`linnet.data.tokenizer.train_bpe`) has no such rule: its tokens may end inside a character.
"""

import json
from collections.abc import Iterable, Iterator

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from linnet.config import ConfigError, refuse
from linnet.corpus.bpe import han
from linnet.data.tokenizer import END_OF_DOCUMENT, FileTokenizer, training_parts

# GPT-2's rule for words (Radford et al. 2019), except that marks belong to the letters before them: a vowel sign of
# Devanagari does not end a word. It sets "<", digits and letters apart, so no merge makes the name of a byte.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}\p{M}]+| ?\p{N}+| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
CODES = 0x110000  # code points of Unicode
FIRST = 257  # tokens that every vocabulary has: the end of a document, 128 bytes and 128 ASCII characters
# The last merge of a vocabulary of V tokens saves about WORTH * characters / V^1.5 tokens of the text that it was
# learned from (measured: 3.0 to 3.3 for V = 1,024, 2.8 to 3.4 for 4,096, 1.9 to 2.6 for 16,384; Python source and
# WikiText-2). A character that saves fewer is left to bytes.
WORTH = 3.0
MOST = 0.5  # share of the tokens beyond the Han characters that other characters may take
_LEFT_OUT = "\0"  # stands for characters without a token where merges are learned


def train_fallback_bpe(texts: Iterable[str], counts: np.ndarray, vocab_size: int, cjk: int = 0) -> FileTokenizer:
    """Learns a fall-back BPE. The same texts give the same tokenizer, in any order and with any number of threads.

    Args:
        texts: what merges are learned from.
        counts: `count_characters` of the corpus, which may be more than `texts`.
        vocab_size: exact number of tokens.
        cjk: Han characters that are tokens: the most frequent ones of the corpus, then those of `han.listed`. With 0
            they are like all other characters, which are tokens where this saves as much as a merge.

    Raises:
        ConfigError: `vocab_size` is too small for the characters, or the texts have too few repeated pairs for it, or
            `cjk` is more than the corpus and the list have.
    """
    alphabet = choose_characters(counts, vocab_size, cjk)
    learner = tokenizers.Tokenizer(models.BPE())
    rule = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    learner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(_LEFT_OUT, "removed"), rule])
    first = [END_OF_DOCUMENT, *(f"<0x{byte:02X}>" for byte in range(128, 256))]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=first, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(_known(training_parts(texts), alphabet), trainer=trainer)
    if (found := learner.get_vocab_size()) != vocab_size:
        fix = f"the text gives only {found} tokens; use at most {found}, or more text"
        raise ConfigError([f"--vocab: {vocab_size} is too large: {fix}"], "corpus tokenizer")
    model = json.loads(learner.to_str())["model"]
    # A new tokenizer, because the tokens of bytes are not special tokens.
    merges = [tuple(pair) for pair in model["merges"]]
    inner = tokenizers.Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=True))
    inner.pre_tokenizer = rule
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([END_OF_DOCUMENT])
    return FileTokenizer(inner, END_OF_DOCUMENT, name=f"fallback-bpe:{vocab_size}")


def count_characters(texts: Iterable[str]) -> np.ndarray:
    """Returns how often each code point occurs, int64 [0x110000]."""
    counts = np.zeros(CODES, dtype=np.int64)
    for batch in _batches(texts):
        found = np.bincount(code_points(batch))
        counts[: len(found)] += found
    return counts


def choose_characters(counts: np.ndarray, vocab_size: int, cjk: int) -> list[str]:
    """Returns the characters that are tokens, in the order of Unicode: ASCII, `cjk` Han characters, and others.

    Args:
        counts: occurrences of each code point, [0x110000].

    Raises:
        ConfigError: `vocab_size` has no room for them, or there are fewer Han characters than `cjk`.
    """
    problems = []
    known = np.flatnonzero(counts)
    ideographs = known[han.is_han(known)]
    chosen = _most_frequent(ideographs, counts)[:cjk]
    if len(chosen) < cjk:
        taken = set(chosen)
        chosen += [code for code in map(ord, han.listed()) if code not in taken][: cjk - len(chosen)]
    if len(chosen) < cjk:
        problems.append(f"--cjk: {cjk} is too large: the text and the list have {len(chosen)}; use at most this")
    if (room := vocab_size - FIRST - cjk) < 0:
        why = f"{FIRST} tokens for bytes and the end of a document and {cjk} Han characters need {FIRST + cjk}"
        problems.append(f"--vocab: {vocab_size} is too small: {why}; use more, or a smaller --cjk")
    refuse(problems, "corpus tokenizer")
    others = known[(known >= 128) & ~((han.is_han(known)) & (cjk > 0))]
    saved = counts[others] * (utf8_lengths(others) - 1)
    others = others[(saved >= WORTH * counts.sum() / vocab_size**1.5) & (counts[others] > 1)]
    chosen += _most_frequent(others, counts)[: int(room * MOST)]
    return [chr(code) for code in sorted([*range(128), *chosen])]


def code_points(text: str) -> np.ndarray:
    """Returns the code points of a text without lone surrogates, uint32 [characters]."""
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


def utf8_lengths(codes: np.ndarray) -> np.ndarray:
    """Returns how many bytes UTF-8 needs for each code point, 1 to 4, uint8."""
    return 1 + (codes >= 0x80).astype(np.uint8) + (codes >= 0x800) + (codes >= 0x10000)


def _most_frequent(codes: np.ndarray, counts: np.ndarray) -> list[int]:
    """Returns the code points by how often they occur; those that are equally frequent in the order of Unicode."""
    return codes[np.lexsort((codes, -counts[codes]))].tolist()


def _known(texts: Iterable[str], alphabet: list[str]) -> Iterator[str]:
    """Yields texts with `_LEFT_OUT` for characters that have no token, which must not seem to be neighbours there."""
    known = np.zeros(CODES, dtype=bool)
    known[[ord(character) for character in alphabet]] = True
    for text in texts:
        codes = code_points(text)
        if (unknown := ~known[codes]).any():
            text = np.where(unknown, np.uint32(ord(_LEFT_OUT)), codes).astype("<u4").tobytes().decode("utf-32-le")
        yield text


def _batches(texts: Iterable[str], size: int = 1 << 20) -> Iterator[str]:
    """Yields the same text joined into parts of about `size` characters, or longer."""
    held: list[str] = []
    total = 0
    for text in texts:
        held.append(text)
        total += len(text)
        if total >= size:
            yield "".join(held)
            held, total = [], 0
    if held:
        yield "".join(held)
