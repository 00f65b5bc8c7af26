"""What the registered op and its kernels must agree on: the sizes of a call, and the states kept for the backward."""

from typing import NamedTuple

from torch import Tensor

from linnet.ops import backend

MOST_STATES = 64  # of a channel, in the kernels


class Shape(NamedTuple):
    """Rows of [R, T, D], their tokens and channels; states a channel, models, and documents a row (0 without)."""

    rows: int
    length: int
    channels: int
    states: int
    models: int
    documents: int

    @classmethod
    def of(cls, x: Tensor, A: Tensor, cu_seqlens: Tensor | None) -> "Shape":
        documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return cls(*x.shape, A.shape[2], A.shape[0], documents)

    @property
    def sequences(self) -> int:
        """That have a state of their own."""
        return self.rows * max(1, self.documents)

    def starts(self) -> tuple[int, int, int]:
        """[slots, N, D]: the states that are kept of each sequence; each row has the same number."""
        every = tokens_between(self.states)
        slots = self.length // every + self.documents if self.documents else -(-self.length // every)
        return self.rows * slots, self.states, self.channels


def tokens_between(states: int) -> int:
    """Tokens between the states that are kept for the backward: 2 bytes a token and channel at 4 or 16 states."""
    return 8 if states <= 4 else 32


def runs_in_kernels(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether the Triton kernels take a call; warns if not."""
    if A.shape[2] > MOST_STATES:
        backend.warn_slow("selective_scan", f"{A.shape[2]} states per channel", f"use at most {MOST_STATES}")
        return False
    return not backend.is_wide("selective_scan", x, delta, A, B, C)
