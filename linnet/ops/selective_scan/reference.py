"""The selective scan, the definition: token by token, differentiated by autograd."""

from torch import Tensor
from torch.nn.functional import softplus

from linnet.ops.chunks import state_dtype
from linnet.ops.documents import walk_tokens


def selective_reference(x, delta, A, B, C, D, delta_bias, initial_state, cu_seqlens) -> tuple[Tensor, Tensor]:
    """s_t = exp(delta_t A) s_{t-1} + delta_t B_t x_t,  y_t = C_t s_t + D x_t (Mamba, as paper 004 recalls it).

    Shapes as in `selective_scan`.
    """
    dtype = state_dtype(x, delta, A, B, C)
    batch, length, _ = x.shape
    values, delta, A = x.to(dtype), delta.to(dtype), A.to(dtype)
    B, C = (y.to(dtype).unsqueeze(2) for y in (B, C))
    if delta_bias is not None:
        delta = softplus(delta + delta_bias.to(dtype))

    def step(t: int, state: Tensor) -> tuple[Tensor, Tensor]:
        decay = (delta[:, t, :, None] * A).exp()
        state = decay * state + (delta[:, t] * values[:, t])[..., None] * B[:, t]
        return state, (state * C[:, t]).sum(-1)

    y, final = walk_tokens(step, initial_state, values.new_zeros(A.shape), cu_seqlens, batch, length)
    if D is not None:
        y = y + D.to(dtype) * values
    return y.to(x.dtype), final
