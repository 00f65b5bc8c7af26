"""Compression (004, section 3.1.5 and B.1.5): pack a sequence into one token, from which a decoder restores it.

    d3 d0 d7 d7 d1 [c]                   the targets are the data tokens, each at its own position

The last token of the input is the compression token. The model is an auto-encoder: a small decoder takes its output at
that token, adds the embedding of a position, and predicts the token at that position. A language model with targets at
each position would just copy its input, so this task is for `autoencoder` models only.

`mad-lab`: the compression token takes one id of `vocab_size` and is also a target, always the same: 1/L of the targets.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from linnet.data.synthetic.base import IGNORE, LARGEST, Kind, Samples, Task, lay_out
from linnet.data.synthetic.draws import Draws


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
