"""Common words, after RULER (C.-P. Hsieh et al., arXiv:2404.06654, section 3): which words of a list come most often?

    bavo luki nesa bavo dotu bavo ...   Question: Which 10 words ... Answer: They are

As in RULER, ten words stand 30 times each and the others 3 times each, in any order; others are added until the length
is reached, so a longer list is a harder one. Departures: words are made up from syllables, so that no list of English
words is needed, and are not numbered; there is no example before the list; and lists too short for half of them to be
common have fewer or rarer common words (`TIERS`).
"""

import numpy as np

from linnet.config import ConfigError
from linnet.data import Tokenizer

TIERS = ((10, 30, 3), (10, 10, 1), (5, 10, 1), (2, 10, 1), (1, 5, 1))  # words, how often they stand, and the others
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
_INTRODUCTION = "A list of words, of which some come more often than others:"


def common_words(
    length: int, rivals: int, generator: np.random.Generator, tokenizer: Tokenizer
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """A prompt of at most `length` tokens, the common words that it asks for, and wrong answers of other words.

    Args:
        rivals: how many wrong answers.

    Raises:
        ConfigError: the length does not hold a list.
    """
    ids = generator.permutation(len(_SYLLABLES) ** 2)
    words = [_SYLLABLES[i // len(_SYLLABLES)] + _SYLLABLES[i % len(_SYLLABLES)] for i in ids]
    for number, often, rarely in TIERS:
        question = _question(number)
        room = length - len(tokenizer.encode(_INTRODUCTION)) - len(tokenizer.encode(f" {question}"))
        listed = words[:number] * often
        taken = sum(len(tokenizer.encode(f" {word}")) for word in listed)
        if 2 * taken > room:
            continue
        others = []
        for word in words[number:]:
            size = rarely * len(tokenizer.encode(f" {word}"))
            if taken + size > room:
                break
            others.append(word)
            listed += [word] * rarely
            taken += size
        if len(others) < number:
            continue
        order = generator.permutation(len(listed))
        text = " ".join([_INTRODUCTION, *(listed[i] for i in order), question])
        prompt = np.asarray(tokenizer.encode(text), dtype=np.int64)  # as running text, not word by word
        wrong = tuple(", ".join(generator.choice(others, number, replace=False)) for _ in range(rivals))
        return prompt, tuple(words[:number]), wrong
    least = length - room + 2 * taken
    raise ConfigError([f"lengths: {length} tokens do not hold a list of common words ({least}); give more"], "needle")


def _question(number: int) -> str:
    asked = "word comes" if number == 1 else f"{number} words come"
    return f"Question: Which {asked} most often in the list? Answer: {'It is' if number == 1 else 'They are'}"
