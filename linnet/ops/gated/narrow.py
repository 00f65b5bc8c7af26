"""Gated linear attention with keys of a few channels, as a diagonal scan over all K V numbers of each head's state.

A product of matrices needs 16 channels, so the kernels of this op refuse narrower keys than 8. The element-wise scan
reads and writes K numbers per channel of the values, which costs little where K is small (paper 002, 3.1).
"""

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.chunks import state_dtype
from linnet.ops.scan import diagonal_scan

NARROWEST = 8  # channels of a key that the matrix kernels take at least


def takes(q: Tensor) -> bool:
    """Whether a call with queries [..., K] is scanned: narrow keys on a GPU, where kernels run."""
    return q.shape[-1] < NARROWEST and q.is_cuda and backend.use_triton("scan", True)


def narrow_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns o [B, T, H, V] and the final state [N, H, K, V]; arguments as in `gated_linear_attention`."""
    heads, dtype = (*q.shape[2:], v.shape[-1]), state_dtype(q, k, v)
    written = (k.to(dtype).unsqueeze(-1) * v.to(dtype).unsqueeze(-2)).flatten(2)
    decays = log_decay.to(dtype).unsqueeze(-1).expand(*log_decay.shape, heads[-1]).flatten(2)
    states, final = diagonal_scan(
        written,
        decays,
        initial_state=None if initial_state is None else initial_state.flatten(1),
        output_final_state=True,
        cu_seqlens=cu_seqlens,
    )
    with torch.autocast(q.device.type, enabled=False):
        o = scale * (q.to(dtype).unsqueeze(-1) * states.unflatten(2, heads)).sum(-2)
    return o.to(v.dtype), final.unflatten(1, heads)
