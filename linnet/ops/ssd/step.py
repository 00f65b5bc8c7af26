"""Scalar decay for one token, as in decoding: the state is updated in place."""

from torch import Tensor

from linnet.ops.arguments import check_grouped
from linnet.ops.chunks import decay_rest, exact


def ssd_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, *, scale: float = 1.0) -> Tensor:
    """One token of `ssd`: S <- exp(log_decay) S + k^T v, o = scale q S.

    Args:
        q, k: [B, H, K].
        v: [B, HV, V]; H divides HV.
        log_decay: [B, HV], at most 0.
        state: [B, HV, K, V], float32 or float64: the state after the previous token; updated in place.

    Returns:
        o [B, HV, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_grouped("ssd_step", q, k, v, "[B, ")
    dtype, size = state.dtype, (*v.shape[:2], q.shape[-1], v.shape[-1])
    if log_decay.shape != v.shape[:2] or state.shape != size or dtype.itemsize < 4 or not dtype.is_floating_point:
        raise ValueError(
            f"ssd_step: log_decay {list(log_decay.shape)}, state {list(state.shape)} {dtype}; give log_decay "
            f"{list(v.shape[:2])} and state {list(size)} in float32 or float64"
        )
    with exact(q):
        q, k = (x.to(dtype).repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
        log_decay = log_decay.to(dtype)[..., None, None]
        decay = log_decay.exp()
        update = (k[..., None] * v.to(dtype)[..., None, :]).addcmul_(state, decay_rest(log_decay, decay))
        state.mul_(decay).add_(update)
        return (scale * (q[..., None, :] @ state).squeeze(-2)).to(v.dtype)
