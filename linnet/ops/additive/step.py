"""Additive decay attention, one token: the state is updated in place."""

import torch
from torch import Tensor

from linnet.ops.additive.reference import rotate
from linnet.ops.chunks import exact
from linnet.ops.registration import register_step
from linnet.ops.stepping import use_kernel


def additive_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor],
    *,
    theta: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """One token of `additive_attention`: updates S and z in place and returns the output.

    Cost: reads and writes the state once, 4 K V FLOPs per head, with K doubled by theta.

    Args:
        q, k: [B, H, K]; k holds raw logits.
        v: [B, H, V].
        state: (S [B, H, K or 2K, V], z [B, H, K]), both float32 or float64; before the first token S = 0, z = -inf.
        theta: [H, K], LRPE frequencies in radians per token; needs `positions`.
        positions: integers [B], the position of this token in its sequence.
        scale: multiplies q.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes or dtypes do not fit together, or theta came without positions.

    Source: paper 003, section 4.1, with a_t = 1 - k_t: the weights then always add up to one, which
    exp(z_{t-1} - z_t) in float32 does not keep over a long sequence.
    """
    S, z = state
    _check(q, k, v, S, z, theta, positions)
    if z.is_contiguous() and use_kernel("additive", S, q, k, v, z, theta):
        return _step(q, k, v, S, z, theta, positions, float(scale))
    logit = k.to(z.dtype)
    z_next = torch.logaddexp(z, logit)
    key = (logit - z_next.masked_fill(z_next == -torch.inf, 0.0)).exp()
    z.copy_(z_next)
    decay = 1 - key if theta is None else (1 - key).repeat(1, 1, 2)
    S.mul_(decay[..., None]).add_(rotate(key, theta, positions)[..., None] * v.to(S.dtype)[..., None, :])
    with exact(q):
        o = torch.matmul((rotate(q.to(S.dtype), theta, positions) * scale)[..., None, :], S)
    return o.squeeze(-2).to(v.dtype)


_step = register_step(
    "additive_step",
    "Tensor q, Tensor k, Tensor v, Tensor(a!) S, Tensor(b!) z, Tensor? theta, Tensor? positions, float scale",
    "additive.step_kernel.step",
    like="v",
)


def _check(q, k, v, S, z, theta, positions) -> None:
    if q.ndim != 3 or q.shape != k.shape or v.ndim != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"additive_step takes one token: q, k [B, H, K] and v [B, H, V]; "
            f"given q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    batch, heads, key_dim = q.shape
    if theta is not None and (tuple(theta.shape) != (heads, key_dim) or positions is None):
        raise ValueError(
            f"theta must be [H, K] = [{heads}, {key_dim}] and come with positions [B]; given {list(theta.shape)} "
            f"and positions {None if positions is None else list(positions.shape)}"
        )
    if theta is not None and tuple(positions.shape) != (batch,):
        raise ValueError(f"positions must be [B] = [{batch}], of one axis; given {list(positions.shape)}")
    rows = key_dim if theta is None else 2 * key_dim
    if tuple(S.shape) != (batch, heads, rows, v.shape[2]) or tuple(z.shape) != (batch, heads, key_dim):
        raise ValueError(
            f"state must be (S [{batch}, {heads}, {rows}, {v.shape[2]}], z [{batch}, {heads}, {key_dim}]); "
            f"given S {list(S.shape)}, z {list(z.shape)}"
        )
    if S.dtype not in (torch.float32, torch.float64) or z.dtype != S.dtype:
        raise ValueError(f"state must be float32 or float64; given S {S.dtype}, z {z.dtype}")
