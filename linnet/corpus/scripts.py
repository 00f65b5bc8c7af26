"""The script of characters and documents, from Unicode's names of letters. It tells scripts apart, not languages.

English, French and Vietnamese are all Latin. A document has the script of most of its letters; kana distinguish
Japanese from Chinese. Code is Latin too: a corpus that has code keeps it in a source of its own.
"""

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from linnet.corpus.bpe import han
from linnet.corpus.bpe.fallback import code_points, utf8_lengths
from linnet.data.tokenizer import FileTokenizer

HAN, DIGITS, SPACE, PUNCTUATION, OTHER = "Han", "digits", "white space", "punctuation and symbols", "other letters"
# The first word of the name of a letter, and what its script is called.
LETTERS = {
    name.upper(): name
    for name in (
        "Latin Greek Cyrillic Armenian Hebrew Arabic Syriac Thaana Devanagari Bengali Gurmukhi Gujarati Oriya Tamil "
        "Telugu Kannada Malayalam Sinhala Thai Lao Tibetan Myanmar Georgian Hangul Ethiopic Cherokee Khmer Mongolian "
        "Hiragana Katakana Bopomofo"
    ).split()
} | {"KATAKANA-HIRAGANA": "Katakana"}
WIDE = ("FULLWIDTH", "HALFWIDTH")
KANA = 0.05  # share of kana in a document of Han characters from which it is Japanese
JAPANESE, NONE = "Han and kana", "no letters"


@functools.cache
def script_of(character: str) -> str:
    """Returns the script of a letter or mark, or "digits", "white space" or "punctuation and symbols"."""
    if han.is_han(np.array(ord(character))):
        return HAN
    category = unicodedata.category(character)
    if category[0] == "N":
        return DIGITS
    if category[0] == "Z" or character in "\t\n\r\v\f":
        return SPACE
    if category[0] not in "LM":
        return PUNCTUATION
    words = unicodedata.name(character, "").split()
    if words and words[0] in WIDE:
        words = words[1:]
    return LETTERS.get(words[0] if words else "", OTHER)


def count_scripts(text: str) -> Counter[str]:
    """Returns the number of characters of each script."""
    codes, found = np.unique(code_points(text), return_counts=True)
    counts: Counter[str] = Counter()
    for code, number in zip(codes.tolist(), found.tolist(), strict=True):
        counts[script_of(chr(code))] += number
    return counts


def script_of_document(text: str) -> str:
    """Returns the script of most letters; "Han and kana" for Japanese, "no letters" for a text that has none.

    Letters are weighed by their bytes in UTF-8, so that an ideograph counts about as much as the letters of a word.
    """
    counts = count_scripts(text)
    kana = counts.pop("Hiragana", 0) + counts.pop("Katakana", 0)
    if kana > KANA * (kana + counts[HAN]):
        counts[JAPANESE] = kana + counts.pop(HAN, 0)
    letters = {name: n for name, n in counts.items() if n and name not in (DIGITS, SPACE, PUNCTUATION)}
    return max(letters, key=lambda name: (letters[name] * _weight(name), name)) if letters else NONE


def _weight(name: str) -> int:
    return 3 if name in (HAN, JAPANESE) else 1


@dataclass
class Share:
    """What the tokens of one script hold.

    Attributes:
        characters, bytes, tokens: their numbers; a token has the script of its last character, so a word keeps the
            space before it.
    """

    characters: int = 0
    bytes: int = 0
    tokens: int = 0


def measure(tokenizer: FileTokenizer, texts: Iterable[str]) -> dict[str, Share]:
    """Returns what the tokens of each script hold, the script with most bytes first.

    Raises:
        ValueError: the tokens of the tokenizer have no bytes of their own (`FileTokenizer.byte_lengths` is None).
    """
    lengths = tokenizer.byte_lengths
    if lengths is None:
        raise ValueError(f"{tokenizer.name}: its tokens are not bytes of text; use a byte-level or fall-back BPE")
    shares: dict[str, Share] = {}
    for text in texts:
        add_shares(shares, lengths, text, tokenizer.encode(text))
    return in_order(shares)


def in_order(shares: dict[str, Share]) -> dict[str, Share]:
    """Returns the shares with that of most bytes first."""
    return dict(sorted(shares.items(), key=lambda item: (-item[1].bytes, item[0])))


def add_shares(shares: dict[str, Share], byte_lengths: np.ndarray, text: str, ids: np.ndarray) -> None:
    """Adds the characters, bytes and tokens of a text to the shares of its scripts.

    Args:
        byte_lengths: bytes per token, int [vocab]. ids: the tokens of the text.
    """
    if not text:
        return
    codes = code_points(text)
    ends = np.cumsum(utf8_lengths(codes), dtype=np.int64)  # the byte behind each character
    lengths = byte_lengths[ids]
    last = np.cumsum(lengths) - 1  # the last byte of each token
    place = np.searchsorted(ends, last, side="right")  # the character that has it
    # Characters of a token: those that end in it.
    ended = np.searchsorted(ends, last + 1, side="right")
    characters = np.diff(ended, prepend=0)
    unique, index = np.unique(codes[place], return_inverse=True)
    names = [script_of(chr(code)) for code in unique.tolist()]
    columns = [np.bincount(index, weights, len(names)) for weights in (characters, lengths, np.ones(len(index)))]
    for name, *values in zip(names, *columns, strict=True):
        share = shares.setdefault(name, Share())
        share.characters += int(values[0])
        share.bytes += int(values[1])
        share.tokens += int(values[2])
