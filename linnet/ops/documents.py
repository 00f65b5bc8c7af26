"""Packed documents: `cu_seqlens` (int32 [N+1], B = 1) gives where each starts, and states reset there.

`check_documents` reads shapes only, so it is safe while tracing; `documents` reads the values, so it belongs inside an
op's implementation. An op loops over the result of `documents`, which without `cu_seqlens` is the whole batch:

    for rows, start, end in documents(cu_seqlens, batch, length):
        o[:, start:end], state[rows] = run(q[:, start:end], ..., initial_state[rows])
"""

import torch
from torch import Tensor

from linnet.ops import backend


def check_documents(cu_seqlens: Tensor | None, batch: int, length: int) -> None:
    """Raises ValueError unless `cu_seqlens` is None, or int32 [N+1] with N >= 1 and the batch is one sequence.

    In `linnet.ops.debug()` also reads the values: they must rise from 0 to `length`.
    """
    if cu_seqlens is None:
        return
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype != torch.int32:
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; "
            "give int32 [N+1]: the start of each of N documents, then the total length"
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens packs documents into one sequence, but the batch is {batch}; reshape it to [1, B*T, ...]"
        )
    if backend.debugging():
        documents(cu_seqlens, batch, length)


def count_states(cu_seqlens: Tensor | None, batch: int) -> int:
    """Returns N, the number of states of an op: one per document, or one per sequence."""
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def documents(cu_seqlens: Tensor | None, batch: int, length: int) -> list[tuple[slice, int, int]]:
    """Returns (slice of the state's first axis, first token, end token) of each range that has states of its own.

    Documents may be empty (start = end); their final state is their initial state.

    Raises:
        ValueError: if the boundaries do not rise from 0 to `length`; names the first wrong one.
    """
    if cu_seqlens is None:
        return [(slice(0, batch), 0, length)]
    offsets = cu_seqlens.tolist()
    pairs = list(zip(offsets, offsets[1:], strict=False))
    problem = ""
    if offsets[0] != 0:
        problem = f"cu_seqlens[0]: {offsets[0]} is not 0; start the first document at token 0"
    elif offsets[-1] != length:
        problem = f"cu_seqlens[{len(pairs)}]: {offsets[-1]} is not the sequence length {length}; end with {length}"
    elif falls := [i for i, (start, end) in enumerate(pairs, 1) if end < start]:
        i = falls[0]
        problem = (
            f"cu_seqlens[{i}]: {offsets[i]} is below the boundary before it, {offsets[i - 1]}; sort the boundaries "
            "(two equal ones mean an empty document)"
        )
    if problem:
        raise ValueError(problem)
    return [(slice(i, i + 1), start, end) for i, (start, end) in enumerate(pairs)]
