"""Common words, after RULER (C.-P. Hsieh et al., arXiv:2404.06654, section 3): which words are most common in a list?

    bavo luki nesa bavo dotu bavo ...   Question: Which 10 words ... Answer: They are

As in RULER, ten words occur 30 times each and the others 3 times each, in random order. Other words fill the list up to
the length, so a longer list is harder. Differences from RULER: the words are made of syllables, which needs no list of
English words; they are not numbered; there is no example before the list; and a list in which ten common words would
take more than half of the length has fewer or less frequent common words (`TIERS`).
"""

import numpy as np

from linnet.config import ConfigError
from linnet.data import Tokenizer

# Number of common words, occurrences of each common word, occurrences of each other word.
TIERS = ((10, 30, 3), (10, 10, 1), (5, 10, 1), (2, 10, 1), (1, 5, 1))
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
_INTRODUCTION = "A list of words, of which some come more often than others:"


def wording() -> list[str]:
    """Returns the texts of which lists and questions are made."""
    return [_INTRODUCTION, *_SYLLABLES, *map(_question, (1, 10)), repr(TIERS)]


def common_words(
    length: int, rivals: int, generator: np.random.Generator, tokenizer: Tokenizer
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Returns a prompt of at most `length` tokens, the common words that it asks for, and wrong answers.

    Args:
        length: upper bound of the prompt's tokens.
        rivals: number of wrong answers.
        generator: source of all draws.
        tokenizer: the tokenizer of the model.

    Raises:
        ConfigError: the length is too short for a list.
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
        prompt = np.asarray(
            tokenizer.encode(text), dtype=np.int64
        )  # tokens of running text differ from those of single words
        wrong = tuple(", ".join(generator.choice(others, number, replace=False)) for _ in range(rivals))
        return prompt, tuple(words[:number]), wrong
    least = length - room + 2 * taken
    message = f"lengths: {length} is too short for a list of common words; give about {least} or more"
    raise ConfigError([message], "needle")


def _question(number: int) -> str:
    asked = "word comes" if number == 1 else f"{number} words come"
    return f"Question: Which {asked} most often in the list? Answer: {'It is' if number == 1 else 'They are'}"
