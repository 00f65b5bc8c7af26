"""Noisy in-context recall (004, section 3.1.3 and B.1.3): in-context recall with irrelevant tokens between the pairs.

    n4 k3 v1 n0 n7 k0 v4 k3 v1     the target at the second k3 is its value v1

Noise tokens have their own vocabulary and occur singly, anywhere before the last pair but not inside a pair. Noise is
the share `frac_noise` of the input, rounded so that an even number of tokens is left for pairs; the number is the same
in every sequence. Everything else is as in in-context recall.

`mad-lab`: two noise tokens replace a whole pair, independently at each place except one, so that keys stay at even
positions; the number of noise tokens varies. `vocab_size` includes the noise, and training targets are all next tokens.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from linnet.data.synthetic.base import IGNORE, LARGEST, Kind, Samples, Task, check_halves, check_pairs, lay_out
from linnet.data.synthetic.draws import Draws
from linnet.data.synthetic.pairs import draw_pairs


class NoisyRecall(Task):
    """In-context recall with noise between the pairs.

    Attributes:
        noise_vocab_size: number of noise tokens in the vocabulary.
        frac_noise: share of noise in the input, in [0, 1).
    """

    name: ClassVar[str] = "noisy_recall"
    summary: ClassVar[str] = "in-context recall with irrelevant tokens between the pairs"

    vocab_size: int = Field(default_factory=lambda data: 32 if data.get("spec") == "mad-lab" else 16, ge=1, le=LARGEST)
    noise_vocab_size: int = Field(16, ge=1, le=LARGEST)
    frac_noise: float = Field(0.2, ge=0, lt=1)

    @field_validator("vocab_size")
    @classmethod
    def _splits(cls, vocab_size: int, info: ValidationInfo) -> int:
        check_halves(info.data.get("spec"), vocab_size)
        return vocab_size

    @field_validator("noise_vocab_size")
    @classmethod
    def _leaves_keys(cls, noise: int, info: ValidationInfo) -> int:
        vocab_size = info.data.get("vocab_size")
        if info.data.get("spec") == "mad-lab" and vocab_size and vocab_size - noise < 4:
            raise ValueError(
                f"{noise} noise ids in vocab_size {vocab_size}, which includes them, leave too few ids for keys and "
                f"values; use vocab_size of at least {noise + 4}"
            )
        return noise

    @field_validator("seq_len")
    @classmethod
    def _holds_pairs(cls, seq_len: int) -> int:
        check_pairs(seq_len)
        return seq_len

    @field_validator("frac_noise")
    @classmethod
    def _leaves_pairs(cls, frac_noise: float, info: ValidationInfo) -> float:
        seq_len = info.data.get("seq_len")
        if seq_len and seq_len - _noise_tokens(frac_noise, seq_len) < 4:
            raise ValueError(
                f"{frac_noise:g} of {seq_len} tokens leaves no room for a pair and a question about it; "
                f"use at most {(seq_len - 4) / seq_len:.3g}, or a longer sequence"
            )
        return frac_noise

    @property
    def kinds(self) -> tuple[Kind, ...]:
        pairs = self.vocab_size if self.spec == "paper" else self.vocab_size - self.noise_vocab_size
        keys = pairs // 2
        return lay_out(("keys", "k", keys), ("values", "v", pairs - keys), ("noise", "n", self.noise_vocab_size))

    @property
    def input_length(self) -> int:
        return self.seq_len if self.spec == "paper" else self.seq_len - 1

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        keys, values, noise = self.kinds
        tokens = noise.start + draws.integers(noise.size, rows, self.seq_len)
        used, places = self._places(draws, rows)
        pairs = draw_pairs(draws, used, keys.size, values.size, injective=self.spec == "paper")
        row = np.nonzero(used)[0]
        tokens[row, places] = pairs.keys[used]
        tokens[row, places + 1] = pairs.values[used] + values.start
        if training and self.spec == "mad-lab":
            return Samples(tokens[:, :-1], tokens[:, 1:])
        targets = np.full_like(tokens, IGNORE)
        targets[row, places] = np.where(pairs.answerable[used], tokens[row, places + 1], IGNORE)
        return Samples(tokens[:, : self.input_length], targets[:, : self.input_length])

    def _places(self, draws: Draws, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns which places hold a pair, bool [rows, n], and the positions of their keys, in order."""
        if self.spec == "paper":
            noise = _noise_tokens(self.frac_noise, self.seq_len)
            pairs = (self.seq_len - noise) // 2
            # All orders of noise and pairs are equally likely, except that the last pair is at the end.
            is_pair = np.ones((rows, pairs + noise), dtype=bool)
            is_pair[:, :-1] = draws.subsets(rows, pairs - 1 + noise, pairs - 1)
            lengths = 1 + is_pair
            starts = np.cumsum(lengths, axis=1) - lengths
            return np.ones((rows, pairs), dtype=bool), starts[is_pair]
        n = self.seq_len // 2
        spared = draws.integers(n, rows, 1)
        used = (draws.uniform(rows, n) >= self.frac_noise) | (np.arange(n) == spared)
        used[:, -1] = True
        # If the place without noise is the last one and all others are noise, mad-lab raises an error. Here the first
        # place then holds a pair.
        used[:, 0] |= ~used[:, :-1].any(axis=1)
        return used, 2 * np.nonzero(used)[1]


def _noise_tokens(frac_noise: float, seq_len: int) -> int:
    """Returns the even number nearest to the share; it must be even because the length of the sequence is."""
    return 2 * round(frac_noise * seq_len / 2)
