"""The diagonal-plus-low-rank rule for one token, as in decoding: the state is updated in place."""

from torch import Tensor

from linnet.ops.chunks import decay_rest, exact
from linnet.ops.stepping import check_step


def dplr_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, a: Tensor, b: Tensor, state: Tensor, *, scale: float = 1.0
) -> Tensor:
    """One token of `dplr_rule`: S <- diag(exp(log_decay)) S + a^T (b S) + k^T v.

    Args:
        q, k, log_decay, a, b: [B, H, K]; log_decay at most 0.
        v: [B, H, V].
        state: [B, H, K, V], float32 or float64: the state after the previous token; updated in place.

    Returns:
        o [B, H, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together, a state below float32.
    """
    check_step("dplr_step", v, state, q=q, k=k, log_decay=log_decay, a=a, b=b)
    dtype = state.dtype
    if dtype.itemsize < 4 or not state.is_floating_point():
        raise ValueError(f"dplr_step: state has dtype {dtype}; give float32 or float64")
    with exact(q):
        q, k, values, log_decay, a, b = (x.to(dtype) for x in (q, k, v, log_decay, a, b))
        read, log_decay = b[..., None, :] @ state, log_decay[..., None]
        decay = log_decay.exp()
        state.copy_((state * decay).addcmul_(state, decay_rest(log_decay, decay)))
        state.addcmul_(a[..., None], read).addcmul_(k[..., None], values[..., None, :])
        return (scale * (q[..., None, :] @ state).squeeze(-2)).to(v.dtype)
