"""In-context recall (004, section 3.1.1 and B.1.1): give the value that a key had earlier in the sequence.

    k3 v1 k0 v4 k3 v1 k0 v4        the targets are the values at the second k3 and the second k0

A sequence has L/2 pairs. Keys are uniform and occur repeatedly; each sequence has its own map from keys to values. The
last pair asks for one of the distinct keys of the sequence, so each sequence has a target. The task is multi-query:
every value whose key occurred earlier is a target, in every split.

`mad-lab`: the map is drawn with replacement, so keys may share a value; the sequence is shifted by one, so inputs have
L - 1 tokens; and training targets are all next tokens, keys and first values included.
"""

from typing import ClassVar

import numpy as np
from pydantic import ValidationInfo, field_validator

from linnet.data.synthetic.base import IGNORE, Kind, Samples, Task, check_halves, check_pairs, lay_out
from linnet.data.synthetic.draws import Draws
from linnet.data.synthetic.pairs import draw_pairs


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
