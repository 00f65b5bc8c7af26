"""DNA: reading FASTA files, and chains of letters whose entropy is known.

A record of a FASTA file is a line that starts with `>`, and lines of letters up to the next. It is one document: its
letters without the line, in upper case, A, C, G and T as they are and every other letter as N.

`linnet data dna` writes records of a Markov chain of order k over A, C, G and T that is its own reverse complement, as
the two strands of DNA are. Its entropy rate is a lower bound of every model's loss, so the floor of a scaling law of
such text is known before it is fitted.
"""

import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

LETTERS = "ACGT"
LINE = 80  # letters per line
RECORD = 1 << 15  # letters per record, at most
_ALPHABET = string.ascii_letters + "*-"
_KEPT = bytes.maketrans(
    _ALPHABET.encode(), "".join(letter.upper() if letter.upper() in LETTERS else "N" for letter in _ALPHABET).encode()
)


def read_fasta(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes | str]]:
    """Yields the number of each record's first line (from 1) with its letters, or with what is wrong with it.

    Args:
        lines: the lines of a FASTA file.
    """
    letters: list[bytes] = []
    start, wrong, within = 1, "", False
    for number, line in enumerate(lines, 1):
        if line.startswith((b">", b";")):
            if within and line.startswith(b">"):
                yield start, wrong or b"".join(letters)
                letters, wrong = [], ""
            if line.startswith(b">"):
                start, within = number, True
            continue
        bases = b"".join(line.split()).translate(_KEPT)
        if not bases:
            continue
        if not within:
            yield number, f"line {number} has letters before the first line that starts with '>'; add one"
            return
        if not wrong and (other := bases.translate(None, b"ACGTN")):
            wrong = f"line {number} has {chr(other[0])!r}; lines of a record are letters"
        letters.append(bases)
    if within:
        yield start, wrong or b"".join(letters)


@dataclass(frozen=True)
class Chain:
    """A Markov chain over A, C, G and T that is its own reverse complement.

    Attributes:
        order: letters that the next one depends on.
        words: probability of each word of `order` + 1 letters, [4 ** order, 4].
    """

    order: int
    words: np.ndarray

    @property
    def nats_per_letter(self) -> float:
        """The entropy rate: no model has a lower loss on unseen letters."""
        contexts = self.words.sum(1, keepdims=True)
        return float(-(self.words * np.log(self.words / contexts)).sum())

    @property
    def bits_per_letter(self) -> float:
        return self.nats_per_letter / np.log(2)

    def draw(self, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
        """Returns independent records as numbers 0 to 3 of A, C, G, T, uint8 [number, length]."""
        contexts = self.words.sum(1)
        upto = np.cumsum(self.words / contexts[:, None], 1)[:, :3]
        state = generator.choice(len(contexts), number, p=contexts)
        records = np.empty((number, length), np.uint8)
        for place in range(min(self.order, length)):  # the letters of the first context
            records[:, place] = state >> 2 * (self.order - 1 - place) & 3
        for place in range(self.order, length):
            letter = (generator.random((number, 1)) > upto[state]).sum(1)
            records[:, place] = letter
            state = (state * 4 + letter) % len(contexts)
        return records


def make_chain(order: int, seed: int, sharpness: float = 1.0) -> Chain:
    """Returns a random chain of an order.

    A chain with random transitions and its reverse complement are averaged word by word, which keeps both stationary.

    Args:
        sharpness: standard deviation of the logarithms of the transitions; 0 gives uniform letters.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    contexts = 4**order
    moves = np.exp(sharpness * generator.standard_normal((contexts, 4)))
    moves /= moves.sum(1, keepdims=True)
    into = (np.arange(contexts)[:, None] * 4 + np.arange(4)) % contexts
    share = np.full(contexts, 1 / contexts)
    for _ in range(10_000):
        new = np.bincount(into.ravel(), (share[:, None] * moves).ravel(), contexts)
        done, share = np.abs(new - share).max() < 1e-15, new / new.sum()
        if done:
            break
    words = (share[:, None] * moves).ravel()
    words = (words + words[reverse_complement(order + 1)]) / 2
    return Chain(order, words.reshape(contexts, 4))


def reverse_complement(length: int) -> np.ndarray:
    """Returns, for each word of a length as a number in base 4 (A, C, G, T are 0 to 3), that of the other strand."""
    word = np.arange(4**length)
    complement = np.zeros_like(word)
    for _ in range(length):
        complement, word = complement * 4 + 3 - word % 4, word // 4
    return complement


def as_fasta(chain: Chain, letters: int, seed: int) -> str:
    """Returns at least `letters` letters of a chain as FASTA, in records of equal length."""
    number = -(-letters // RECORD)
    length = -(-letters // number)
    generator = np.random.Generator(np.random.Philox([seed, 1]))
    records = np.frombuffer(LETTERS.encode(), np.uint8)[chain.draw(number, length, generator)]
    lines = []
    for index, record in enumerate(records):
        lines.append(f">record-{index} order={chain.order} bits_per_letter={chain.bits_per_letter:.6f}")
        text = record.tobytes().decode()
        lines += [text[start : start + LINE] for start in range(0, length, LINE)]
    return "\n".join(lines) + "\n"
