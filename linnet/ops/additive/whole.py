"""Additive decay attention without causality: keys are the softmax over the sequence, and one pass is enough.

k = softmax_t(u),  S = k^T V,  O = Q S          (paper 003, section 4.1; the last token equals that of the causal form)
"""

import torch
from torch import Tensor

from linnet.ops.additive.turn import Turn


def forward(q: Tensor, u: Tensor, v: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
    """o, S, z for [B, H, 1, T, .] tensors: the whole sequence is one chunk."""
    key, z = _softmax(u)
    S = torch.matmul(turn.apply(key).mT, v)
    return torch.matmul(turn.apply(q), S), S[:, :, 0], z[:, :, 0]


def backward(
    do: Tensor, D: Tensor, decline: Tensor, q: Tensor, u: Tensor, v: Tensor, turn: Turn, S: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients to q, u, v and the angles; D is the gradient to S with z held, `decline` minus the one to z."""
    key, _ = _softmax(u)
    queries, keys, S = turn.apply(q), turn.apply(key), S[:, :, None]
    from_o = torch.matmul(queries.mT, do)
    D = D[:, :, None] + from_o
    dq, dangle = turn.transpose(q, torch.matmul(do, S.mT))
    dkey, dangle_k = turn.transpose(key, torch.matmul(v, D.mT))
    # z normalises S, so it also takes what o gives to S.
    decline = decline[:, :, None] + turn.once((from_o * S).sum(-1))
    du = key * (dkey - decline[..., None, :])
    return dq, du, torch.matmul(keys, D), None if dangle is None else dangle + dangle_k


def _softmax(u: Tensor) -> tuple[Tensor, Tensor]:
    peak = u.amax(-2)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    key = (u - peak[..., None, :]).exp_()
    mass = key.sum(-2)
    z = peak + mass.log()
    return key * mass.masked_fill(mass == 0, 1.0).reciprocal()[..., None, :], z
