"""Fuzzy in-context recall (004, section 3.1.2 and B.1.2): in-context recall with keys and values of several tokens.

    k3 k1 v1 | k0 v4 v2 v7 | k3 k1 v1     (without the bars) the target after the second k3 k1 is its value v1

A key, or a value, is an ordered tuple of 1 to 3 different tokens; size and tuple are uniform. Keys of validation and
test samples have the largest size, so that no key is a prefix of another. One pair, the probe, occurs somewhere in the
sequence and again at its end. All other pairs are drawn at random; a key that occurs again has the same value. Targets
are all tokens of a value whose key occurred earlier. The rest of the length is padding at the left.

`mad-lab`: the place of the probe is drawn before the pairs, and in 2.4 % of test samples of the baseline the pairs
never reach it; values are drawn with replacement; the padding is 2 longer and takes one id of `vocab_size`; training
targets are all next tokens, padding included.
"""

from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from linnet.data.synthetic.base import IGNORE, Kind, Samples, Task, check_halves, lay_out
from linnet.data.synthetic.draws import Draws, first_places
from linnet.data.synthetic.pairs import earliest


class FuzzyRecall(Task):
    """In-context recall with keys and values of several tokens.

    Attributes:
        max_key_size: tokens of the longest key.
        max_value_size: tokens of the longest value.
    """

    name: ClassVar[str] = "fuzzy_recall"
    summary: ClassVar[str] = "in-context recall with keys and values of one to three tokens"

    max_key_size: int = Field(3, ge=1, le=4)
    max_value_size: int = Field(3, ge=1, le=4)

    @field_validator("vocab_size")
    @classmethod
    def _splits(cls, vocab_size: int, info: ValidationInfo) -> int:
        spec = info.data.get("spec")
        check_halves(spec, vocab_size, 1 if spec == "mad-lab" else 0)
        if vocab_size > 4096:
            raise ValueError(f"{vocab_size} allows more tuples than int64 can number; use at most 4096")
        return vocab_size

    @field_validator("max_key_size", "max_value_size")
    @classmethod
    def _fits(cls, size: int, info: ValidationInfo) -> int:
        spec, vocab_size, seq_len = (info.data.get(key) for key in ("spec", "vocab_size", "seq_len"))
        special = 1 if spec == "mad-lab" else 0
        # With an odd number of ids there is one key fewer than values.
        if vocab_size and (vocab_size - special) // 2 < size:
            raise ValueError(
                f"{size} different tokens cannot be taken from {(vocab_size - special) // 2}; "
                f"use at most {(vocab_size - special) // 2}, or vocab_size of at least {2 * size + special}"
            )
        needed = 2 * (size + info.data.get("max_key_size", 1)) + 1
        if seq_len and seq_len < needed:
            raise ValueError(f"two pairs of this size do not fit into seq_len {seq_len}; use at least {needed}")
        return size

    @property
    def kinds(self) -> tuple[Kind, ...]:
        tokens = self.vocab_size if self.spec == "paper" else self.vocab_size - 1
        keys = tokens // 2
        return lay_out(("keys", "k", keys), ("values", "v", tokens - keys), ("padding", "[p]", 1))

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        keys, values, padding = self.kinds
        drawn = self._draw_pairs(draws, rows, training)
        order, starts, used = self._arrange(draws, drawn)
        columns = used.any(axis=0)
        order, starts, used = order[:, columns], starts[:, columns], used[:, columns]

        # Column 0 of the drawn pairs is the probe. It also ends the sequence.
        key_sizes, value_sizes = (np.take_along_axis(sizes, order, axis=1) for sizes in drawn[1:3])
        ends = (np.where(used, starts + key_sizes + value_sizes, 0)).max(axis=1, keepdims=True)
        last = np.zeros((rows, 1), dtype=np.int64)
        order, starts, used = (
            np.concatenate(part, axis=1) for part in ((order, last), (starts, ends), (used, last == 0))
        )
        key_sizes, value_sizes = (np.take_along_axis(sizes, order, axis=1) for sizes in drawn[1:3])
        length = self.seq_len + 1
        starts = starts + length - (ends + key_sizes[:, -1:] + value_sizes[:, -1:])

        motif = np.take_along_axis(drawn.motif, order, axis=1)  # pairs with the same key have the same motif
        answerable = earliest(motif, drawn.motif.shape[1])
        answerable = np.take_along_axis(answerable, motif, axis=1) < np.arange(motif.shape[1])
        answerable[:, -1] = True

        value_tuples = self._draw_values(draws, drawn, motif, used, values.size)
        tokens = np.full((rows, length), padding.start)
        asked = np.full((rows, length), IGNORE)
        for part in range(self.max_key_size):
            row, item = np.nonzero(used & (part < key_sizes))
            tokens[row, starts[row, item] + part] = keys.start + drawn.keys[row, order[row, item], part]
        for part in range(self.max_value_size):
            row, item = np.nonzero(used & (part < value_sizes))
            place = starts[row, item] + key_sizes[row, item] + part
            tokens[row, place] = values.start + value_tuples[row, motif[row, item], part]
            asked[row, place] = np.where(answerable[row, item], tokens[row, place], IGNORE)
        if training and self.spec == "mad-lab":
            asked = tokens
        return Samples(tokens[:, :-1], asked[:, 1:])

    def _draw_pairs(self, draws: Draws, rows: int, training: bool) -> "_Drawn":
        """Draws the probe, then as many keys as a sequence may need, with the sizes of their values."""
        keys = self.kinds[0].size
        smallest = 1 if training else self.max_key_size
        count = 2 + self.seq_len // (smallest + 1)
        key_sizes = smallest + draws.integers(self.max_key_size - smallest + 1, rows, count)
        parts = _distinct_tokens(draws, rows, count, self.max_key_size, keys)
        code = np.zeros((rows, count), dtype=np.int64)
        for part in range(self.max_key_size):
            code = code * (keys + 1) + np.where(part < key_sizes, parts[:, :, part] + 1, 0)
        motif = first_places(code)
        value_sizes = 1 + draws.integers(self.max_value_size, rows, count)
        return _Drawn(parts, key_sizes, np.take_along_axis(value_sizes, motif, axis=1), motif)

    def _arrange(self, draws: Draws, drawn: "_Drawn") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inserts the probe among the pairs.

        Returns:
            The order of the pairs, where each one starts, and whether it starts early enough to be used.
        """
        rows, count = drawn.motif.shape
        paper = self.spec == "paper"
        sizes = drawn.key_sizes + drawn.value_sizes
        probe, others = sizes[:, :1], sizes[:, 1:]
        starts = np.cumsum(others, axis=1) - others
        # The largest pair that starts before the limit fits, and so does the probe after it.
        limit = self.seq_len + (2 if paper else 0) - probe - self.max_key_size - self.max_value_size
        if paper:
            at = draws.integers((starts < limit).sum(axis=1, keepdims=True), rows, 1)
        else:
            wanted = draws.integers(self.seq_len - 2 * probe, rows, 1)
            at = (starts < wanted).sum(axis=1, keepdims=True)
            # If an earlier pair has the probe's key, that pair is the probe.
            already = ((drawn.motif[:, 1:] == 0) & (np.arange(count - 1) < at)).any(axis=1, keepdims=True)
            at = np.where(already, count - 1, at)
        place = np.arange(count)
        order = np.where(place < at, place + 1, np.where(place == at, 0, place))
        lengths = np.take_along_axis(sizes, order, axis=1)
        starts = np.cumsum(lengths, axis=1) - lengths
        return order, starts, starts < limit

    def _draw_values(
        self, draws: Draws, drawn: "_Drawn", motif: np.ndarray, used: np.ndarray, tokens: int
    ) -> np.ndarray:
        """Draws the value of each motif, int64 [rows, motifs, max_value_size].

        With `paper`, the values of a row are different as long as there are enough.
        """
        rows, count = drawn.motif.shape
        if self.spec == "mad-lab":
            return _distinct_tokens(draws, rows, count, self.max_value_size, tokens)
        present = np.zeros((rows, count), dtype=bool)
        row, item = np.nonzero(used)
        present[row, motif[row, item]] = True
        values = np.zeros((rows, count, self.max_value_size), dtype=np.int64)
        population = 1
        for size in range(1, self.max_value_size + 1):
            population *= tokens - size + 1
            chosen = present & (drawn.value_sizes == size)
            number = chosen.cumsum(axis=1) - 1
            codes = draws.distinct(rows, int(number.max()) + 1, population)
            row, column = np.nonzero(chosen)
            values[row, column, :size] = _decode(codes[row, number[row, column]], size, tokens)
        return values


class _Drawn(NamedTuple):
    """Pairs before they are arranged, the probe first. `keys` is int64 [rows, n, parts], the others [rows, n]."""

    keys: np.ndarray
    key_sizes: np.ndarray
    value_sizes: np.ndarray
    motif: np.ndarray  # the first pair with the same key


def _distinct_tokens(draws: Draws, rows: int, count: int, size: int, tokens: int) -> np.ndarray:
    """Draws uniform ordered tuples of different tokens, int64 [rows, count, size]; their prefixes are uniform too."""
    digits = [draws.integers(tokens - part, rows, count) for part in range(size)]
    return _skip_taken(np.stack(digits, axis=2))


def _decode(codes: np.ndarray, size: int, tokens: int) -> np.ndarray:
    """Returns the tuple of `size` different tokens for each number: int64 [n] -> int64 [n, size]."""
    digits = []
    for part in range(size):
        codes, digit = np.divmod(codes, tokens - part)
        digits.append(digit)
    return _skip_taken(np.stack(digits, axis=1))


def _skip_taken(digits: np.ndarray) -> np.ndarray:
    """Maps digit i, in [0, tokens - i), to one of the tokens that the earlier digits have not chosen."""
    chosen = digits.copy()
    for part in range(1, digits.shape[-1]):
        taken = np.sort(chosen[..., :part], axis=-1)
        for other in range(part):
            chosen[..., part] += chosen[..., part] >= taken[..., other]
    return chosen
