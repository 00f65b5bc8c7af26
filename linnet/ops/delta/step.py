"""The gated delta rule for one token, as in decoding: the state is updated in place."""

from torch import Tensor

from linnet.ops.arguments import check_grouped
from linnet.ops.chunks import decay_rest, exact


def gated_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor,
    write: Tensor | None,
    state: Tensor,
    *,
    scale: float = 1.0,
) -> Tensor:
    """One token of `gated_delta_rule`: S <- diag(exp(log_decay)) S, then S <- S + k^T (write v - (erase k) S).

    Args:
        q, k: [B, H, K].
        v: [B, HV, V]; H divides HV.
        log_decay: None, [B, HV] or [B, HV, K], at most 0.
        erase: [B, HV] or [B, HV, K].
        write: [B, HV] or [B, HV, V]; None for `erase`, which is then [B, HV].
        state: [B, HV, K, V], float32 or float64: the state after the previous token; updated in place.

    Returns:
        o [B, HV, V] in the dtype of v.

    Raises:
        ValueError: shapes that do not go together.
    """
    check_shapes("gated_delta_step", q, k, v, log_decay, erase, write, "[B, ")
    dtype, size = state.dtype, (*v.shape[:2], q.shape[-1], v.shape[-1])
    if state.shape != size or dtype.itemsize < 4 or not state.is_floating_point():
        raise ValueError(
            f"gated_delta_step: state has shape {list(state.shape)} and dtype {dtype}; give {list(size)} in float32 "
            "or float64"
        )
    with exact(q):
        q, k = (x.to(dtype).repeat_interleave(v.shape[1] // q.shape[1], 1) for x in (q, k))
        erase, write = (
            (x if x.ndim == 3 else x[..., None]).to(dtype) for x in (erase, erase if write is None else write)
        )
        if log_decay is not None:
            log_decay = (log_decay if log_decay.ndim == 3 else log_decay[..., None]).to(dtype)[..., None]
            decay = log_decay.exp()
            state.copy_((state * decay).addcmul_(state, decay_rest(log_decay, decay)))
        correction = write * v.to(dtype) - ((erase * k)[..., None, :] @ state).squeeze(-2)
        state.addcmul_(k[..., None], correction[..., None, :])
        return (scale * (q[..., None, :] @ state).squeeze(-2)).to(v.dtype)


def check_shapes(
    op: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, erase: Tensor, write: Tensor | None, axes: str
) -> None:
    """Raises ValueError unless the tensors of `gated_delta_rule`, or of one token of it, go together.

    `axes` is what the shapes in the message start with: "[B, T, " or "[B, ".
    """
    check_grouped(op, q, k, v, axes)
    K, V = q.shape[-1], v.shape[-1]
    head = v.shape[:-1]
    for name, x, width, letter in (
        ("log_decay", log_decay, K, "K"),
        ("erase", erase, K, "K"),
        ("write", write, V, "V"),
    ):
        if x is not None and (x.shape not in (head, (*head, width)) or not x.is_floating_point()):
            raise ValueError(
                f"{op}: {name} has shape {list(x.shape)} and dtype {x.dtype}; give floating-point {axes}HV] = "
                f"{list(head)} or {axes}HV, {letter}] = {[*head, width]}"
            )
    if write is None and erase.shape != head:
        raise ValueError(
            f"{op}: erase has one number per channel, {list(erase.shape)}, and write is None; give write {axes}HV] or "
            f"{axes}HV, V]"
        )
