"""Helpers that the steps of the ops share: argument checks, the choice of a kernel, its programs, and pending tokens.

A step whose state is large is bound by the bytes of that state. It may be written only every N tokens: the tokens since
then are pending, in buffers [B, H, N - 1, D] beside the state, and each step reads the state and all of them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend, compat_torch
from linnet.ops.chunks import decay_rest

PROGRAMS = 1024  # about eight per multiprocessor of a large GPU
MOST_PENDING = 32  # tokens that a kernel looks at in one tile


def use_kernel(
    op: str, state: Tensor, *inputs: Tensor | None, half: bool = False, pending: "Pending | None" = None
) -> bool:
    """Whether a kernel of `linnet.ops.<op>` takes a token: a contiguous float32 state, or bfloat16 if it takes `half`,
    and no gradient requested; pending tokens contiguous, and not too many."""
    if not backend.use_triton(op, state.is_cuda):
        return False
    if state.dtype not in ((torch.float32, torch.bfloat16) if half else (torch.float32,)) or not state.is_contiguous():
        return False
    if pending is not None and not fits_kernel(*(x for x in pending if x is not None)):
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (state, *inputs)):
        return False
    # torch.compile can trace the registered step; transforms (compiled or not) and dispatch modes get PyTorch's own
    # operations, which they know.
    if torch.compiler.is_compiling():
        return not compat_torch.in_transform()
    return compat_torch.is_plain((state, *inputs))


def step_widened(step: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
    """Returns o of `step` of the bfloat16 state in float32, and rounds the state after it once."""
    wide = state.float()
    o = step(wide)
    state.copy_(wide)
    return o


def as_heads(x: Tensor) -> Tensor:
    """Returns x [B, H, D] with the heads of a token contiguous, as kernels read it; a slice of a wider row stays."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@functools.cache
def choose_columns(rows: int, columns: int, heads: int, most: int = 64) -> tuple[int, int, int, int]:
    """Cuts the states [rows, columns] of `heads` heads, over a batch, into programs of all rows and some columns.

    `most` columns, or fewer where heads are few, so that a small batch reaches more of the GPU; 64 elements per thread.
    On an H200 the fastest of 16 to 256 columns and 8 to 64 elements, or within a few percent of it.

    Returns:
        padded rows, columns per program, programs per head, warps.
    """
    padded = max(16, 1 << (rows - 1).bit_length())
    width = min(most, max(16, 1 << (columns - 1).bit_length()))
    while width > 16 and heads * -(-columns // width) < PROGRAMS:
        width //= 2
    return padded, width, -(-columns // width), min(8, max(1, padded * width // 2048))


def check_step(op: str, v: Tensor, state: Tensor, **keys: Tensor) -> None:
    """Raises ValueError unless q and the other `keys` are [B, H, K], v [B, H, V] and the state [B, H, K, V]."""
    shape = keys["q"].shape
    alike = len(shape) == 3 and all(x.shape == shape for x in keys.values())
    if not alike or v.shape[:-1] != shape[:2] or state.shape != (*shape, v.shape[-1]):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in {**keys, "v": v, "state": state}.items())
        raise ValueError(f"{op}: {shapes}; give {', '.join(keys)} [B, H, K], v [B, H, V] and state [B, H, K, V]")


def check_activation(op: str, activation: str) -> None:
    """Raises ValueError unless a step knows the activation."""
    if activation not in ("none", "silu"):
        raise ValueError(f"{op}: activation {activation!r} is unknown; use none or silu")


def check_pending(op: str, pending: Tensor, **buffers: tuple[Tensor, Tensor]) -> None:
    """Raises ValueError unless each buffer goes with its token [B, H, D] and with `pending`, int32 [B]."""
    lengths = {buffer.shape[2] if buffer.ndim == 4 else 0 for buffer, _ in buffers.values()}
    for name, (buffer, token) in buffers.items():
        B, H, D = token.shape
        if lengths == {0} or len(lengths) > 1 or buffer.shape != (B, H, *lengths, D) or buffer.dtype != token.dtype:
            shapes = ", ".join(f"{name} {list(buffer.shape)} {buffer.dtype}" for name, (buffer, _) in buffers.items())
            raise ValueError(
                f"{op}: {shapes}; give {name} [{B}, {H}, N - 1, {D}] of {token.dtype}, with one N > 1 for all"
            )
    if pending.shape != (B,) or pending.dtype != torch.int32:
        raise ValueError(f"{op}: pending {list(pending.shape)} {pending.dtype}; give int32 [{B}]")


class Pending(NamedTuple):
    """The n < N last tokens of each sequence, which a state S [B, HV, K, V] of the delta rule or of `ssd` lacks.

    A token adds its update at its key, and later tokens decay it: with them the state is
    exp(sum of decays) S + sum_m exp(decays behind m) keys_m^T updates_m, which can be read without being written.

    Attributes:
        number: int32 [B], n; the caller counts, after the step of all layers.
        keys: [B, H, N - 1, K] in the dtype of the keys; heads of values share them as they share keys.
        updates: float32 [B, HV, N - 1, V].
        decays: float32 [B, HV, N - 1] or [B, HV, N - 1, K], log-decays; None where nothing decays.
    """

    number: Tensor
    keys: Tensor
    updates: Tensor
    decays: Tensor | None

    @classmethod
    def of(cls, state: dict[str, Tensor]) -> "Pending | None":
        """Returns the pending tokens among the tensors of a layer's state; None if it has none."""
        if "pending" not in state:
            return None
        return cls(state["pending"], state["keys"], state["updates"], state.get("decays"))

    def check(self, op: str, k: Tensor, v: Tensor, decay: Tensor | None) -> None:
        """Raises ValueError unless the buffers go with a token's k [B, H, K], v [B, HV, V] and decay, [B, HV] or
        [B, HV, K]."""
        room = self.keys.shape[2] if self.keys.ndim == 4 else 0
        fits = {
            "number": (self.number, (k.shape[0],), torch.int32),
            "keys": (self.keys, (*k.shape[:2], room, k.shape[2]), k.dtype),
            "updates": (self.updates, (*v.shape[:2], room, v.shape[2]), torch.float32),
        }
        if (self.decays is None) != (decay is None):
            raise ValueError(f"{op}: pending.decays without a decay, or a decay without them; give both or neither")
        if decay is not None:
            fits["decays"] = (self.decays, (*decay.shape[:2], room, *decay.shape[2:]), torch.float32)
        for name, (buffer, shape, dtype) in fits.items():
            if buffer.shape != shape or buffer.dtype != dtype or (not room and name == "keys"):
                shape = str(list(shape)).replace(", 0", ", N - 1")
                raise ValueError(
                    f"{op}: pending.{name} {list(buffer.shape)} {buffer.dtype}; give {shape} of {dtype}, N > 1 for all"
                )

    def settle(self, state: Tensor) -> None:
        """Adds the pending tokens to the state, and leaves zeros in their place, which add nothing."""
        there = (torch.arange(self.keys.shape[2], device=state.device) < self.number[:, None])[:, None, :, None]
        keys = self.keys.to(state.dtype).where(there, 0.0).repeat_interleave(state.shape[1] // self.keys.shape[1], 1)
        updates = self.updates.to(state.dtype).where(there, 0.0)
        if self.decays is not None:
            decays = self.decays if self.decays.ndim == 4 else self.decays[..., None]
            decays = decays.to(state.dtype).where(there, 0.0)
            behind = F.pad(decays[:, :, 1:], (0, 0, 0, 1)).flip(2).cumsum(2).flip(2)
            keys, total = keys * behind.exp(), decays.sum(2)[..., None]
            decay = total.exp()
            state.copy_((state * decay).addcmul_(state, decay_rest(total, decay)))
            self.decays.zero_()
        state.add_(keys.mT @ updates)
        self.keys.zero_()
        self.updates.zero_()


def fits_kernel(pending: Tensor, *buffers: Tensor) -> bool:
    """Whether kernels take these pending buffers: each contiguous, and none too long."""
    return pending.is_contiguous() and all(x.is_contiguous() and x.shape[2] < MOST_PENDING for x in buffers)


def append(token: Tensor, buffer: Tensor, pending: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Puts a token [B, H, D] behind the pending ones, in the buffer too if it has a place there.

    Returns:
        all tokens [B, H, N, D], which of them are tokens [B, 1, N, 1], which sequences are full [B, 1, 1, 1].
    """
    number = pending.long()[:, None, None, None]
    place = torch.arange(buffer.shape[2] + 1, device=token.device)[:, None]
    tokens = torch.where(place == number, token[:, :, None], F.pad(buffer, (0, 0, 0, 1)))
    full = number == buffer.shape[2]
    buffer.copy_(torch.where(full, buffer, tokens[:, :, :-1]))
    there = place <= number
    return tokens.where(there, 0.0), there, full
