"""Memorization (004, section 3.1.6 and B.1.6): learn a fixed map from keys to values (the facts) from training data.

    k3 [i] k0 [i] k3 [i]                 the target at each [i] is the value of the key before it

Values never occur in the input, so the model must store them in its weights. The map is one to one, and the same in all
samples and splits of a seed: a test sample asks for the facts of the training samples in another order. So the splits
share their facts by design, and their sequences are independent draws.

`mad-lab`: the insert token takes one id of `vocab_size`, so 256 ids give 127 facts and one value without a key.
"""

from typing import ClassVar

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from linnet.data.synthetic.base import IGNORE, LARGEST, Kind, Samples, Task, check_halves, lay_out
from linnet.data.synthetic.draws import Draws


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
