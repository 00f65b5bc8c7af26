"""Multi-query associative recall (Arora et al. 2023, "Zoology"), as in section 4.1 of paper 002.

    k7 v3 k2 v9 [0] [0] k2 [0] k7 [0]    the targets at the second k2 and k7 are v9 and v3

The first 2P tokens are P pairs with distinct keys and distinct values. Then each key occurs once more, as a query, at
an even distance from the pairs. Its value is the target at this position and is not part of the input. The slots of
the queries are drawn one by one without replacement, slot i with weight i^(power_a - 1). With the small power of the
paper (0.01) most queries come early and some late; 1 is uniform. The rest is filler, id 0.

This is the generator of zoology. mad-lab does not have this task, so there is only one specification.
"""

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from linnet.data.synthetic.base import IGNORE, LARGEST, Draws, Kind, Samples, Task, check_pairs, lay_out


class Mqar(Task):
    """Multi-query associative recall, as in zoology.

    Attributes:
        num_pairs: pairs to remember, and queries, per sequence.
        power_a: exponent of the distance between a pair and its query; small values make short distances likelier.
        random_filler: draw filler tokens uniformly from all ids; by default they are id 0, as in Figure 2 of zoology.
    """

    name: ClassVar[str] = "mqar"
    summary: ClassVar[str] = "multi-query associative recall, as in zoology"

    spec: Literal["paper"] = "paper"
    vocab_size: int = Field(8192, ge=1, le=LARGEST)
    seq_len: int = Field(64, ge=1, le=LARGEST)
    num_pairs: int = Field(4, ge=1, le=LARGEST)
    power_a: float = Field(0.01, gt=0, le=10)
    random_filler: bool = False

    @field_validator("seq_len")
    @classmethod
    def _fits_vocabulary(cls, seq_len: int, info: ValidationInfo) -> int:
        check_pairs(seq_len)
        if seq_len >= info.data.get("vocab_size", seq_len + 1):
            raise ValueError(f"{seq_len} tokens need a larger vocabulary; use vocab_size of at least {seq_len + 1}")
        return seq_len

    @field_validator("num_pairs")
    @classmethod
    def _fits(cls, num_pairs: int, info: ValidationInfo) -> int:
        seq_len = info.data.get("seq_len")
        if seq_len and 4 * num_pairs > seq_len:
            raise ValueError(
                f"{num_pairs} pairs and as many queries, two tokens each, do not fit into seq_len {seq_len}; "
                f"use at most {seq_len // 4}, or a length of at least {4 * num_pairs}"
            )
        return num_pairs

    @property
    def kinds(self) -> tuple[Kind, ...]:
        half = self.vocab_size // 2
        return lay_out(("filler", "[0]", 1), ("keys", "k", half - 1), ("values", "v", self.vocab_size - half))

    @property
    def questions(self) -> int:
        return self.num_pairs

    def draw(self, draws: Draws, rows: int, training: bool) -> Samples:
        filler, keys, values = self.kinds
        pairs = self.num_pairs
        asked = keys.start + draws.distinct(rows, pairs, keys.size)
        answers = values.start + draws.distinct(rows, pairs, values.size)
        slots = (self.seq_len - 2 * pairs) // 2
        weights = np.arange(1, slots + 1) ** (self.power_a - 1.0)
        # Sorting exponential variables divided by weights draws without replacement in proportion to the weights.
        times = -np.log1p(-draws.uniform(rows, slots)) / weights
        places = 2 * pairs + 2 * np.argsort(times, axis=1)[:, :pairs]
        if self.random_filler:
            inputs = draws.integers(self.vocab_size, rows, self.seq_len)
        else:
            inputs = np.full((rows, self.seq_len), filler.start)
        inputs[:, : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = asked, answers
        np.put_along_axis(inputs, places, asked, axis=1)
        targets = np.full_like(inputs, IGNORE)
        np.put_along_axis(targets, places, answers, axis=1)
        return Samples(inputs, targets)
