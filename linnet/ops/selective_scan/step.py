"""The selective scan, one token: the state is updated in place."""

import torch
from torch import Tensor

from linnet.ops.registration import register_step
from linnet.ops.stepping import use_kernel


def selective_step(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor
) -> Tensor:
    """One token of `selective_scan`: state <- exp(delta A) state + delta B x in place, y = C state + D x.

    Args:
        x, delta: [Bt, D].
        A: [D, N], finite and at most 0.
        B, C: [Bt, N].
        D: [D] or None.
        state: [Bt, D, N], float32 or float64.

    Returns:
        y [Bt, D] in the dtype of x.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if (
        x.ndim != 2
        or delta.shape != x.shape
        or A.ndim != 2
        or B.shape != C.shape
        or tuple(B.shape) != (x.shape[0], A.shape[1])
        or tuple(state.shape) != (*x.shape, A.shape[1])
        or (D is not None and D.shape != x.shape[1:])
    ):
        raise ValueError(
            f"selective_step: x {list(x.shape)}, delta {list(delta.shape)}, A {list(A.shape)}, B {list(B.shape)}, "
            f"C {list(C.shape)}, state {list(state.shape)}; "
            "give x, delta [Bt, D], A [D, N], B, C [Bt, N], D [D] or None, state [Bt, D, N]"
        )
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"selective_step: state has dtype {state.dtype}; give float32 or float64")
    if use_kernel("selective_scan", state, x, delta, A, B, C, D):
        return _step(x, delta, A, B, C, D, state)
    values, delta = x.to(state.dtype), delta.to(state.dtype)
    state.mul_((delta[..., None] * A.to(state.dtype)).exp_())
    state.addcmul_((delta * values)[..., None], B.to(state.dtype)[:, None])
    y = (state * C.to(state.dtype)[:, None]).sum(-1)
    if D is not None:
        y = y + D.to(state.dtype) * values
    return y.to(x.dtype)


_step = register_step(
    "selective_step",
    "Tensor x, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor(a!) state",
    "selective_scan.triton.step",
)
