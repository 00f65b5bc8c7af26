"""The modal convolution, the definition: token by token, differentiated by autograd."""

from torch import Tensor

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import walk_tokens


def modal_reference(x, log_decay, weight, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """u_t = exp(log_decay) u_{t-1} + x_t, y_t = sum_m weight u_t (TPE, papers 003 and 000, A.1.4).

    Shapes as in `modal_convolution`.
    """
    dtype = state_dtype(x, log_decay, weight)
    batch, length, channels = x.shape
    values, decay, weight = x.to(dtype), log_decay.to(dtype).exp(), weight.to(dtype)

    def step(t: int, u: Tensor) -> tuple[Tensor, Tensor]:
        u = decay * u + values[:, t, :, None]
        return u, (weight * u).sum(-1)

    zero = values.new_zeros(channels, decay.shape[1])
    y, final = walk_tokens(step, initial_state, zero, cu_seqlens, batch, length)
    return y.to(x.dtype), final
