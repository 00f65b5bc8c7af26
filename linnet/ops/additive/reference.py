"""Additive decay attention, the definition: token by token, differentiated by autograd."""

import torch
from torch import Tensor

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import count_states, documents
from linnet.ops.rotation import spread


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | None,
    positions: Tensor | None,
    state: tuple[Tensor, Tensor] | None,
    scale: float,
    causal: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Paper 003, section 4.1 (LightNet attention). Shapes as in `additive_attention`.

        z_t = log sum_{s <= t} exp(u_s)                      the running log-sum, per key channel
        k_t = exp(u_t - z_t),  a_t = exp(z_{t-1} - z_t)      k_t = 1 - a_t
        S_t = diag(a_t) S_{t-1} + k_t^T v_t,  o_t = q_t S_t

    Not causal: k = softmax of u over the sequence, o = q (k^T v). With `theta`, q and the normalised keys are rotated
    by position in the complex form of LRPE (paper 003, section 4.2), x -> [x cos(t theta), x sin(t theta)].
    """
    batch, length, heads, key_dim = k.shape
    dtype, out_dtype = state_dtype(q, k, v), v.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    S = q.new_zeros(count_states(cu_seqlens, batch), heads, key_dim * (1 if theta is None else 2), v.shape[3])
    z = q.new_full((S.shape[0], heads, key_dim), -torch.inf)
    if state is not None:
        S, z = state
    outputs, finals = [], []
    for rows, start, end in documents(cu_seqlens, batch, length):
        if positions is None:
            at = torch.arange(end - start, device=q.device).expand(batch, -1)
        else:
            at = positions[:, start:end]
        run = _causal if causal else _non_causal
        o, S_end, z_end = run(q[:, start:end] * scale, k[:, start:end], v[:, start:end], theta, at, S[rows], z[rows])
        outputs.append(o)
        finals.append((S_end, z_end))
    return torch.cat(outputs, 1).to(out_dtype), (torch.cat([S for S, _ in finals]), torch.cat([z for _, z in finals]))


def rotate(x: Tensor, theta: Tensor | None, positions: Tensor) -> Tensor:
    """[x cos(t theta), x sin(t theta)] for x [..., H, K], theta [H, K]; x itself without theta.

    Positions are [...], or [..., A] on A axes, each of which rotates its group of channels (`spread`). The angle is
    formed in float64, because t theta in float32 is off by 0.01 radian near t = 131,072.
    """
    if theta is None:
        return x
    places = positions[..., None] if positions.ndim == x.ndim - 2 else spread(positions, x.shape[-1])
    angle = places[..., None, :].double() * theta.double()
    return torch.cat([x * angle.cos().to(x.dtype), x * angle.sin().to(x.dtype)], -1)


def _causal(q, u, v, theta, positions, S, z):
    outputs = []
    for t in range(q.shape[1]):
        masked = u[:, t] == -torch.inf
        logit = u[:, t].masked_fill(masked, 0.0)
        z_next = torch.where(masked, z, torch.logaddexp(z, logit))
        empty = z_next == -torch.inf
        finite = z_next.masked_fill(empty, 0.0)
        key = (logit - finite).masked_fill(masked, -torch.inf).exp()  # masked before exp: 0 times inf has no gradient
        decay = (z - finite).exp()
        if theta is not None:
            decay = torch.cat([decay, decay], -1)
        S = decay[..., None] * S + rotate(key, theta, positions[:, t])[..., None] * v[:, t, :, None]
        z = z_next
        outputs.append(torch.einsum("bhk,bhkv->bhv", rotate(q[:, t], theta, positions[:, t]), S))
    return torch.stack(outputs, 1) if outputs else v, S, z


def _non_causal(q, u, v, theta, positions, S, z):
    if q.shape[1] == 0:
        return v, S, z
    peak = u.detach().amax(1, keepdim=True)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weight = (u - peak).exp()
    denominator = weight.sum(1, keepdim=True)
    empty = denominator == 0
    denominator = denominator.masked_fill(empty, 1.0)
    S = torch.einsum("bthk,bthv->bhkv", rotate(weight / denominator, theta, positions), v)
    z = (peak + denominator.log()).masked_fill(empty, -torch.inf)[:, 0]
    return torch.einsum("bthk,bhkv->bthv", rotate(q, theta, positions), S), S, z
