"""Selective copying (004, section 3.1.4 and B.1.4): reproduce the data tokens of a sequence in order, without blanks.

    d3 [b] d0 [b] d3 [i] [b] [i] [i]     the targets at the three [i] are d3, d0 and d3

The target at the k-th insert token is the k-th data token. Data tokens come first, then insert tokens, with blanks
anywhere between them. All arrangements are equally likely, so blanks may also follow the last data or insert token.

`mad-lab`: one copy token follows the data, then one blank per token to copy, at which the token is the target. Each
blank among the data comes before a data token that is drawn uniformly, so no blank follows the last data token.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from linnet.data.synthetic.base import IGNORE, LARGEST, Kind, Samples, Task, lay_out
from linnet.data.synthetic.draws import Draws


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
