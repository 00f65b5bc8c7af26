"""The diagonal-plus-low-rank rule (DPLR): a token reads the state with one vector and adds what it read along another,
while the state decays (RWKV-7). The gated delta rule is the case in which both are the key."""

from torch import Tensor

from linnet.ops import backend
from linnet.ops.arguments import check_decay_dtype, check_decay_values, check_devices, check_matrix_state
from linnet.ops.chunks import decay_rest, exact
from linnet.ops.dplr import chunked
from linnet.ops.dplr.chunked import backward_flops, forward_flops
from linnet.ops.dplr.reference import dplr_reference
from linnet.ops.registration import register_matrix_state
from linnet.ops.spans import cut_linear, run_form, transition
from linnet.ops.stepping import check_step

__all__ = ["dplr_rule", "dplr_step"]

OP = "dplr_rule"


def dplr_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """S_t = diag(exp(log_decay_t)) S_{t-1} + a_t^T (b_t S_{t-1}) + k_t^T v_t,  o_t = scale q_t S_t.

    b reads the state before its decay, and a says where this is added. RWKV-7 has b = kappa of unit norm and a = -eta
    kappa with a rate eta per channel, which erases a part of what kappa reads.

    Time and memory are linear in T. States, sums and the triangular solve are float32 (float64 for float64 inputs).
    No decay overflows: exp(log_decay) may be anything from 1 down to 0, -inf included. A state stays bounded only where
    diag(exp(log_decay)) + a^T b stretches no vector.

    Args:
        q, k, a, b: [B, T, H, K].
        v: [B, T, H, V].
        log_decay: [B, T, H, K], at most 0. Keep it in float32: bfloat16 rounds decays near 1 to 1, and float16 is
            refused where it needs a gradient.
        scale: multiplies o.
        initial_state: [N, H, K, V], float32 (float64 for float64 inputs), the state after the token before the first;
            None for zeros. N is B, or the number of documents.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1: where documents start in T, then T; the state starts anew in each.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state [N, H, K, V] or None. All tensors have gradients.

    Raises:
        ValueError: shapes or dtypes that do not go together, offsets that do not rise from 0 to T.

    Source: Peng et al. 2025 (arXiv:2503.14456).
    """
    check_matrix_state(OP, q, k, v, initial_state, cu_seqlens)
    for name, x in (("log_decay", log_decay), ("a", a), ("b", b)):
        if x.shape != q.shape or not x.is_floating_point():
            raise ValueError(
                f"{OP}: {name} has shape {list(x.shape)} and dtype {x.dtype}; give floating-point [B, T, H, K] = "
                f"{list(q.shape)}, as q"
            )
    check_devices(OP, q=q, log_decay=log_decay, a=a, b=b)
    check_decay_dtype(OP, log_decay)
    check_decay_values(OP, log_decay)
    arguments = (q, k, v, log_decay, a, b, initial_state, cu_seqlens, float(scale))
    return run_form(dplr, dplr_span, dplr_reference, arguments, output_final_state)


dplr = register_matrix_state(
    "dplr",
    *backend.forms("dplr", chunked, "dplr_forward", "dplr_backward"),
    gates="Tensor log_decay, Tensor a, Tensor b",
    flops=forward_flops,
    backward_flops=backward_flops,
)

dplr_span = cut_linear(dplr, 6, 7, transition(dplr, 6, 7), matrices=True)


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
