"""Han characters in the order in which a tokenizer should know them, for those that its corpus lacks.

The lists are those of the national standards, as Python's own codecs have them: level 1 of GB 2312-80 (3,755 frequent
characters of simplified Chinese), of Big5 (5,401 of traditional Chinese) and of JIS X 0208 (2,965 of Japanese), and the
hanja of KS X 1001 (4,620 of Korean, each once). No file of characters is shipped.
"""

import functools
import itertools
from collections.abc import Iterable

import numpy as np

# The blocks of Unicode whose characters are ideographs, and the two marks that are written like them: first, last.
BLOCKS = (
    (0x3005, 0x3005),
    (0x3007, 0x3007),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)


def is_han(codes: np.ndarray) -> np.ndarray:
    """Returns which code points are Han characters, bool of the same shape."""
    found = np.zeros(np.shape(codes), dtype=bool)
    for first, last in BLOCKS:
        found |= (codes >= first) & (codes <= last)
    return found


@functools.cache
def listed() -> tuple[str, ...]:
    """Returns the Han characters of the standards, the most widely used first, each once.

    Characters that are frequent in more of the four standards come first, then those of fewer, then the rarer
    characters of GB 2312 and Big5; within each group the order is that of Unicode.
    """
    frequent = [
        _rows("gb2312", range(0xB0, 0xD8), range(0xA1, 0xFF)),
        _rows("big5", range(0xA4, 0xC7), (*range(0x40, 0x7F), *range(0xA1, 0xFF))),
        _rows("euc_jp", range(0xB0, 0xD0), range(0xA1, 0xFF)),
        _rows("euc_kr", range(0xCA, 0xFE), range(0xA1, 0xFF)),
    ]
    rare = [
        _rows("gb2312", range(0xD8, 0xF8), range(0xA1, 0xFF)),
        _rows("big5", range(0xC9, 0xFA), (*range(0x40, 0x7F), *range(0xA1, 0xFF))),
    ]
    count = {character: sum(character in one for one in frequent) for character in set().union(*frequent, *rare)}
    return tuple(sorted(count, key=lambda character: (-count[character], character)))


def _rows(codec: str, leads: Iterable[int], trails: Iterable[int]) -> set[str]:
    """Returns the characters of the block of unified ideographs among the codes of two bytes."""
    pairs = (bytes(pair) for pair in itertools.product(leads, trails))
    characters = (pair.decode(codec, errors="ignore") for pair in pairs)
    return {one for one in characters if len(one) == 1 and 0x4E00 <= ord(one) <= 0x9FFF}
