"""The six tasks of MAD (paper 004). The comment above each class says what a sample is, here and in mad-lab."""

from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from linnet.data.synthetic.base import (
    IGNORE,
    LARGEST,
    Draws,
    Kind,
    Samples,
    Task,
    check_halves,
    check_pairs,
    first_places,
    lay_out,
)

# Pairs of one key and one value with repeated keys, for in-context recall and noisy in-context recall.


class Pairs(NamedTuple):
    """Keys in [0, keys) and values in [0, values), int64 [rows, n].

    `answerable`, bool [rows, n], is True if the key also occurs earlier in the row. It is True for the last pair.
    """

    keys: np.ndarray
    values: np.ndarray
    answerable: np.ndarray


def draw_pairs(draws: Draws, used: np.ndarray, keys: int, values: int, injective: bool) -> Pairs:
    """Draws uniform keys and a map from keys to values per row. The last key is drawn among the row's distinct keys.

    Args:
        used: bool [rows, n], the places that hold a pair. The last place of each row must be True, and at least one
            place before it.
        keys, values: numbers of different keys and values.
        injective: different keys of a row have different values; otherwise values are independent.
    """
    rows, n = used.shape
    drawn = draws.integers(keys, rows, n)
    first = earliest(np.where(used, drawn, keys)[:, :-1], keys + 1)
    score = np.where(first[:, :keys] < n - 1, draws.uniform(rows, keys), -1.0)
    drawn[:, -1] = score.argmax(axis=1)
    answerable = used & (np.take_along_axis(first, drawn, axis=1) < np.arange(n))
    of_key = draws.permutations(rows, values)[:, :keys] if injective else draws.integers(values, rows, keys)
    return Pairs(drawn, np.take_along_axis(of_key, drawn, axis=1), answerable)


def earliest(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns the first place of each id in a row, or n if it does not occur: int64 [rows, n] -> [rows, count]."""
    rows, n = ids.shape
    places = np.full(rows * count, n)
    # With equal indices the last assignment wins, so assigning in reverse order leaves the first place.
    index = (ids + np.arange(rows)[:, None] * count)[:, ::-1].ravel()
    places[index] = np.tile(np.arange(n)[::-1], rows)
    return places.reshape(rows, count)


# In-context recall (004, section 3.1.1 and B.1.1): give the value that a key had earlier in the sequence.
#
#     k3 v1 k0 v4 k3 v1 k0 v4        the targets are the values at the second k3 and the second k0
#
# A sequence has L/2 pairs. Keys are uniform and occur repeatedly; each sequence has its own map from keys to values.
# The last pair asks for one of the distinct keys of the sequence, so each sequence has a target. The task is
# multi-query: every value whose key occurred earlier is a target, in every split.
#
# `mad-lab`: the map is drawn with replacement, so keys may share a value; the sequence is shifted by one, so inputs
# have L - 1 tokens; and training targets are all next tokens, keys and first values included.
class InContextRecall(Task):
    name: ClassVar[str] = "in_context_recall"
    summary: ClassVar[str] = "give the value that a key had earlier in the sequence"

    @field_validator("vocab_size")
    @classmethod
    def _splits(cls, vocab_size: int, info: ValidationInfo) -> int:
        check_halves(info.data.get("spec"), vocab_size)
        return vocab_size

    @field_validator("seq_len")
    @classmethod
    def _holds_pairs(cls, seq_len: int) -> int:
        check_pairs(seq_len)
        return seq_len

    @property
    def kinds(self) -> tuple[Kind, ...]:
        keys = self.vocab_size // 2
        return lay_out(("keys", "k", keys), ("values", "v", self.vocab_size - keys))

    @property
    def input_length(self) -> int:
        return self.seq_len if self.spec == "paper" else self.seq_len - 1

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        keys, values = self.kinds
        paper = self.spec == "paper"
        used = np.ones((rows, self.seq_len // 2), dtype=bool)
        pairs = draw_pairs(draws, used, keys.size, values.size, injective=paper)
        tokens = np.stack([pairs.keys, pairs.values + values.start], axis=2).reshape(rows, -1)
        if training and not paper:
            return Samples(tokens[:, :-1], tokens[:, 1:])
        targets = np.full_like(tokens, IGNORE)
        targets[:, ::2] = np.where(pairs.answerable, tokens[:, 1::2], IGNORE)
        return Samples(tokens[:, : self.input_length], targets[:, : self.input_length])


# Fuzzy in-context recall (004, section 3.1.2 and B.1.2): in-context recall with keys and values of several tokens.
#
#     k3 k1 v1 | k0 v4 v2 v7 | k3 k1 v1     (without the bars) the target after the second k3 k1 is its value v1
#
# A key, or a value, is an ordered tuple of 1 to 3 different tokens; size and tuple are uniform. Keys of validation and
# test samples have the largest size, so that no key is a prefix of another. One pair, the probe, occurs somewhere in
# the sequence and again at its end. All other pairs are drawn at random; a key that occurs again has the same value.
# Targets are all tokens of a value whose key occurred earlier. The rest of the length is padding at the left.
#
# `mad-lab`: the place of the probe is drawn before the pairs, and in 2.4 % of test samples of the baseline the pairs
# never reach it; values are drawn with replacement; the padding is 2 longer and takes one id of `vocab_size`; training
# targets are all next tokens, padding included.
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


# Noisy in-context recall (004, section 3.1.3 and B.1.3): in-context recall with irrelevant tokens between the pairs.
#
#     n4 k3 v1 n0 n7 k0 v4 k3 v1     the target at the second k3 is its value v1
#
# Noise tokens have their own vocabulary and occur singly, anywhere before the last pair but not inside a pair. Noise is
# the share `frac_noise` of the input, rounded so that an even number of tokens is left for pairs; the number is the
# same in every sequence. Everything else is as in in-context recall.
#
# `mad-lab`: two noise tokens replace a whole pair, independently at each place except one, so that keys stay at even
# positions; the number of noise tokens varies. `vocab_size` includes the noise, and training targets are all next
# tokens.
class NoisyRecall(InContextRecall):
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


# Selective copying (004, section 3.1.4 and B.1.4): reproduce the data tokens of a sequence in order, without blanks.
#
#     d3 [b] d0 [b] d3 [i] [b] [i] [i]     the targets at the three [i] are d3, d0 and d3
#
# The target at the k-th insert token is the k-th data token. Data tokens come first, then insert tokens, with blanks
# anywhere between them. All arrangements are equally likely, so blanks may also follow the last data or insert token.
#
# `mad-lab`: one copy token follows the data, then one blank per token to copy, at which the token is the target. Each
# blank among the data comes before a data token that is drawn uniformly, so no blank follows the last data token.
class SelectiveCopying(Task):
    """Copying of data tokens that are scattered among blanks.

    Attributes:
        tokens_to_copy: data tokens per sequence.
    """

    name: ClassVar[str] = "selective_copying"
    summary: ClassVar[str] = "write down the data tokens in order, skipping blanks"

    seq_len: int = Field(256, ge=1, le=LARGEST)
    tokens_to_copy: int = Field(16, ge=1, le=LARGEST)

    @field_validator("vocab_size")
    @classmethod
    def _has_data(cls, vocab_size: int, info: ValidationInfo) -> int:
        special = 2 if info.data.get("spec") == "mad-lab" else 0
        if vocab_size < special + 2:
            beside = " in addition to the copy token and the blank" if special else ""
            raise ValueError(f"{vocab_size} leaves fewer than two data tokens{beside}; use at least {special + 2}")
        return vocab_size

    @field_validator("tokens_to_copy")
    @classmethod
    def _fits(cls, tokens_to_copy: int, info: ValidationInfo) -> int:
        seq_len = info.data.get("seq_len")
        # mad-lab adds the copy token and needs at least one blank among the data.
        extra = 2 if info.data.get("spec") == "mad-lab" else 0
        if seq_len and 2 * tokens_to_copy + extra > seq_len:
            raise ValueError(
                f"{tokens_to_copy} tokens and as many copies do not fit into seq_len {seq_len}; "
                f"use at most {(seq_len - extra) // 2}, or a length of at least {2 * tokens_to_copy + extra}"
            )
        return tokens_to_copy

    @property
    def kinds(self) -> tuple[Kind, ...]:
        if self.spec == "paper":
            return lay_out(("data", "d", self.vocab_size), ("blank", "[b]", 1), ("insert", "[i]", 1))
        return lay_out(("data", "d", self.vocab_size - 2), ("blank", "[b]", 1), ("copy", "[copy]", 1))

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        data, blank, mark = self.kinds
        count = self.tokens_to_copy
        copied = draws.integers(data.size, rows, count)
        inputs = np.full((rows, self.seq_len), blank.start)
        targets = np.full_like(inputs, IGNORE)
        if self.spec == "paper":
            places = np.nonzero(draws.subsets(rows, self.seq_len, 2 * count))[1].reshape(rows, 2 * count)
            np.put_along_axis(inputs, places[:, :count], copied, axis=1)
            np.put_along_axis(inputs, places[:, count:], mark.start, axis=1)
            np.put_along_axis(targets, places[:, count:], copied, axis=1)
            return Samples(inputs, targets)
        blanks = draws.integers(count, rows, self.seq_len - 2 * count - 1)
        before = np.stack([np.bincount(row, minlength=count) for row in blanks]).cumsum(axis=1)
        np.put_along_axis(inputs, before + np.arange(count), copied, axis=1)
        inputs[:, -count - 1] = mark.start
        targets[:, -count:] = copied
        return Samples(inputs, targets)


# Compression (004, section 3.1.5 and B.1.5): pack a sequence into one token, from which a decoder restores it.
#
#     d3 d0 d7 d7 d1 [c]                   the targets are the data tokens, each at its own position
#
# The last token of the input is the compression token. The model is an auto-encoder: a small decoder takes its output
# at that token, adds the embedding of a position, and predicts the token at that position. A language model with
# targets at each position would just copy its input, so this task is for `autoencoder` models only.
#
# `mad-lab`: the compression token takes one id of `vocab_size` and is also a target, always the same: 1/L of the
# targets.
class Compression(Task):
    name: ClassVar[str] = "compression"
    summary: ClassVar[str] = "pack a sequence into one token, from which a decoder recovers it"
    autoencoder: ClassVar[bool] = True

    seq_len: int = Field(32, ge=2, le=LARGEST)

    @field_validator("vocab_size")
    @classmethod
    def _has_data(cls, vocab_size: int, info: ValidationInfo) -> int:
        special = 1 if info.data.get("spec") == "mad-lab" else 0
        if vocab_size < special + 2:
            beside = " in addition to the compression token" if special else ""
            raise ValueError(f"{vocab_size} leaves fewer than two data tokens{beside}; use at least {special + 2}")
        return vocab_size

    @property
    def kinds(self) -> tuple[Kind, ...]:
        data = self.vocab_size if self.spec == "paper" else self.vocab_size - 1
        return lay_out(("data", "d", data), ("compression", "[c]", 1))

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        data, compression = self.kinds
        inputs = np.full((rows, self.seq_len), compression.start)
        inputs[:, :-1] = draws.integers(data.size, rows, self.seq_len - 1)
        targets = inputs.copy()
        if self.spec == "paper":
            targets[:, -1] = IGNORE
        return Samples(inputs, targets)


# Memorization (004, section 3.1.6 and B.1.6): learn a fixed map from keys to values (the facts) from training data.
#
#     k3 [i] k0 [i] k3 [i]                 the target at each [i] is the value of the key before it
#
# Values never occur in the input, so the model must store them in its weights. The map is one to one, and the same in
# all samples and splits of a seed: a test sample asks for the facts of the training samples in another order. So the
# splits share their facts by design, and their sequences are independent draws.
#
# `mad-lab`: the insert token takes one id of `vocab_size`, so 256 ids give 127 facts and one value without a key.
class Memorization(Task):
    name: ClassVar[str] = "memorization"
    summary: ClassVar[str] = "learn a fixed map from keys to values from the training data"
    separate_splits: ClassVar[bool] = False

    vocab_size: int = Field(256, ge=1, le=LARGEST)
    seq_len: int = Field(32, ge=1, le=LARGEST)

    @field_validator("vocab_size")
    @classmethod
    def _splits(cls, vocab_size: int, info: ValidationInfo) -> int:
        spec = info.data.get("spec")
        check_halves(spec, vocab_size, 1 if spec == "mad-lab" else 0, least=2)
        return vocab_size

    @field_validator("seq_len")
    @classmethod
    def _holds_pairs(cls, seq_len: int) -> int:
        if seq_len % 2:
            raise ValueError(f"{seq_len} is odd, but every key needs an insert token; use {seq_len + 1}")
        return seq_len

    @property
    def kinds(self) -> tuple[Kind, ...]:
        facts = self.vocab_size if self.spec == "paper" else self.vocab_size - 1
        keys = facts // 2
        return lay_out(("keys", "k", keys), ("values", "v", facts - keys), ("insert", "[i]", 1))

    def facts(self, seed: int) -> np.ndarray:
        """Returns the value id of each key, int64 [keys]."""
        keys, values, _ = self.kinds
        order = Draws(seed, "shared", self.name, "facts").permutations(1, values.size)[0]
        return values.start + order[: keys.size]

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        keys, _, insert = self.kinds
        asked = draws.integers(keys.size, rows, self.seq_len // 2)
        inputs = np.full((rows, self.seq_len), insert.start)
        inputs[:, ::2] = asked
        targets = np.full_like(inputs, IGNORE)
        targets[:, 1::2] = self.facts(draws.seed)[asked]
        return Samples(inputs, targets)
