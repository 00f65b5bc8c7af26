"""Additive decay attention (LightNet, paper 003): keys are a running softmax over time."""

import importlib

import torch
from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend, sequence
from linnet.ops.additive import chunked
from linnet.ops.additive.reference import reference, rotate
from linnet.ops.arguments import check_devices, check_matrix_state, check_state
from linnet.ops.chunks import count_pairs, exact, state_dtype
from linnet.ops.documents import count_states
from linnet.ops.fast_path import no_state
from linnet.ops.registration import empty_like, register, register_plain, register_step
from linnet.ops.rotation import check_positions, drop_single_axis
from linnet.ops.spans import cut_normalised, rotate_state, rotation_gradient
from linnet.ops.stepping import use_kernel

__all__ = ["additive_attention", "additive_step"]

OP = "additive_attention"


def additive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    theta: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = True,
    query_activation: str = "none",
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Linear attention whose keys are the softmax over time of the logits k, up to each token.

        z_t = log sum_{s <= t} exp(k_s)
        S_t = diag(exp(z_{t-1} - z_t)) S_{t-1} + exp(k_t - z_t)^T v_t
        o_t = scale q_t S_t

    Logits may be of any size; -inf masks a token in a channel (padding), also before the first real token. GPU only: if
    a logit exceeds the running maximum of its channel by more than 97 within 64 tokens, earlier tokens of that chunk
    read 0 from that channel. In float32 z has the spacing of float32 at its size: with all logits near 1e3 the error
    is at most 1e-5 of the largest output, near 1e4 2e-4 (4,096 tokens on a CPU; docs/kernels.md has the command). A
    constant that is subtracted from all logits of a channel changes no output.

    Cost: time and memory are linear in T; 4 K V + 128 (K + V) FLOPs per token and head, with K doubled by theta
    (without causality 4 K V). State: S and z, K V + K numbers per head, 2 K V + K with theta.

    Args:
        q, k: [B, T, H, K]; k holds raw logits.
        v: [B, T, H, V].
        theta: [H, K], LRPE frequencies in radians per token. Rotates q and the normalised keys by position,
            x -> [x cos(t theta), x sin(t theta)], which doubles K in the state.
        positions: integers [1 or B, T]; default 0 .. T-1, from 0 in each document. With a state, give the true
            positions. [1 or B, T, A] are coordinates on A axes: the channels of a head fall into A contiguous groups
            of ceil(K / A), each rotated by its coordinate (MD-LRPE). In bfloat16 on a GPU, keep angles on several
            axes below some ten thousand radians: they are off by 1e-7 of their size.
        scale: multiplies q.
        causal: False takes the softmax over the whole sequence (document): o = q (k^T v).
        query_activation: none or silu, of q before its rotation. The backward computes it again.
        initial_state: (S [N, H, K or 2K, V], z [N, H, K]), from an earlier call, or S = 0 and z = -inf. N is B, or the
            number of documents. Only with causal=True.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1, the offsets of packed documents; the state resets at each.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state (float32; float64 for float64 inputs) or None. Gradients
        reach q, k, v, theta and the state.

    Raises:
        ValueError: shapes, dtypes or options do not fit together.

    Source: paper 003, section 4.1; LRPE in its complex form, section 4.2, and on several axes, equations 10 to 14.
    """
    _check(q, k, v, theta, positions, causal, initial_state, cu_seqlens)
    if query_activation not in ("none", "silu"):
        raise ValueError(f"{OP}: query_activation {query_activation!r} is unknown; use none or silu")
    S, z = (None, None) if initial_state is None else initial_state
    positions = drop_single_axis(positions)
    if backend.debugging(k) and not bool((k < torch.inf).all()):
        raise ValueError(f"{OP}: k must hold logits below +inf and no NaN; -inf masks a token")
    if query_activation == "silu" and (sequence.span() is not None or backend.use_reference()):
        q, query_activation = F.silu(q), "none"
    if sequence.span() is not None:
        if not causal:
            raise ValueError(f"{OP}: causal=False needs whole rows, but ranks share them; use parallel.sp: 1")
        if theta is not None and positions is None and cu_seqlens is not None:
            positions = sequence.positions(q, cu_seqlens)
        arguments = (q, k, v, theta, positions, S, z, cu_seqlens, float(scale), causal, "none")
        o, S, z = additive_span(*arguments, output_final_state)
    elif backend.use_reference():
        with exact(q):
            o, (S, z) = reference(q, k, v, theta, positions, initial_state, scale, causal, cu_seqlens)
    else:
        numbers = (float(scale), causal, query_activation, output_final_state)
        o, S, z = additive.call(q, k, v, theta, positions, S, z, cu_seqlens, *numbers)
    return o, ((S, z) if output_final_state else None)


def _form(x: Tensor):
    if backend.use_triton("additive", x.is_cuda):
        return importlib.import_module("linnet.ops.additive.triton")
    return chunked


def _forward(q, k, v, theta, positions, S, z, cu_seqlens, scale, causal, activation, return_final_state):
    return_final_state = return_final_state or not causal  # the backward of the form that is not causal reads it
    form, silu = _form(q), activation == "silu"
    arguments = (k, v, theta, positions, S, z, scale, causal, cu_seqlens, return_final_state)
    if silu and _applies_silu(form, causal, q, k, v, theta):
        o, *final = form.forward(q, *arguments, silu=True)
    else:
        o, *final = form.forward(F.silu(q) if silu else q, *arguments)
    return o, *(final if return_final_state else (None, None))


def _applies_silu(form, causal, *tensors) -> bool:
    """Whether a form has kernels that apply SiLU to the queries, as they read them."""
    return form is not chunked and not causal and form.supports(*tensors)


def _backward(q, k, v, theta, positions, S, z, cu_seqlens, scale, causal, activation, S_end, z_end, do, dS, dz):
    if S_end is None or S_end.shape == (0,):  # not requested
        S_end = dS = dz = None
    # Without causality no token has a z before it, and the place is free for the one after the last token.
    z = z if causal else z_end
    form, silu, arguments = _form(q), activation == "silu", (S, z, S_end, scale, causal, cu_seqlens)
    if silu and _applies_silu(form, causal, q, k, v, theta, do):
        return form.backward(do, dS, dz, q, k, v, theta, positions, *arguments, silu=True)
    dq, *gradients = form.backward(do, dS, dz, F.silu(q) if silu else q, k, v, theta, positions, *arguments)
    return torch.ops.aten.silu_backward(dq, q) if silu else dq, *gradients


def _shapes(q, k, v, theta, positions, S, z, cu_seqlens, scale, causal, activation, return_final_state):
    if causal and not return_final_state:
        return empty_like(v), None, None
    states, K, dtype = (count_states(cu_seqlens, q.shape[0]), q.shape[2]), q.shape[3], state_dtype(q, k, v)
    rows = K if theta is None else 2 * K
    return empty_like(v), v.new_empty((*states, rows, v.shape[3]), dtype=dtype), v.new_empty((*states, K), dtype=dtype)


def _axes(arguments, in_dims):
    """Models fold into the batch, or into the heads where there is theta or documents are packed (B = 1)."""
    by_heads = arguments[3] is not None or arguments[7] is not None
    if in_dims[7] is not None or (by_heads and in_dims[4] is not None):
        return None
    return ((2, 2, 2, 0, None, 1, 1), (2, 1, 1)) if by_heads else ((0, 0, 0, None, 0, 0, 0), (0, 0, 0))


# FLOPs: 2 per multiply-add, matrix products of the chunked form only, in chunks of 64 whatever form runs. The empty
# half of a chunk's scores counts, because it is computed. Exponentials and rotations are free.


def _sizes(q_shape, v_shape, theta_shape, causal) -> tuple[int, int, int, int]:
    """Pairs of tokens that share a chunk and tokens, both over batch and heads; rows and columns of the state."""
    B, T, H, K = q_shape
    pairs = count_pairs(T, chunked.CHUNK) if causal else 0
    return B * H * pairs, B * H * T, K if theta_shape is None else 2 * K, v_shape[-1]


def _flops(q_shape, k_shape, v_shape, theta_shape, positions, S, z, cu_seqlens, scale, causal, *_, **__) -> int:
    """2 C (K + V) + 4 K V per token and head, with K doubled by theta; without causality 4 K V."""
    pairs, tokens, K, V = _sizes(q_shape, v_shape, theta_shape, causal)
    return 2 * pairs * (K + V) + 4 * tokens * K * V


def _backward_flops(
    q_shape, k_shape, v_shape, theta_shape, positions, S, z, cu_seqlens, scale, causal, *_, **__
) -> int:
    """2 C (3 K + 2 V) + 10 K V per token and head, as in lightning attention; without causality 8 K V."""
    pairs, tokens, K, V = _sizes(q_shape, v_shape, theta_shape, causal)
    return 2 * pairs * (3 * K + 2 * V) + (10 if causal else 8) * tokens * K * V


additive = register(
    "additive",
    "Tensor q, Tensor k, Tensor v, Tensor? theta, Tensor? positions, Tensor? S, Tensor? z, Tensor? cu_seqlens, "
    "float scale, bool causal, str activation, bool return_final_state=True",
    _forward,
    _backward,
    outputs=3,
    learned=(0, 1, 2, 3, 5, 6),
    kept=(1, 2),
    shapes=_shapes,
    like=2,
    axes=_axes,
    flops=_flops,
    backward_flops=_backward_flops,
)


def _span_backward(
    q, k, v, theta, positions, S, z, cu_seqlens, scale, causal, activation, S_end, z_end, passed, do, dS, dz, group,
    method, first,
):  # fmt: skip
    """`_backward` of a span, in which it asks the ranks of later spans what they give to the state after it."""
    frame = theta if positions is None else None
    length, turns = q.shape[1], None if frame is None else torch.zeros_like(S[0, :, : theta.shape[1], 0])
    if frame is not None and dS is not None:  # of the state with its positions in the row
        dS = rotate_state(dS, theta, -first)
        turns += first * rotation_gradient(dS, S_end)

    def later(D: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        if dS is not None:  # passes through the span
            D = D + sequence.widen(passed, dS) * dS
            delta = delta + passed * (sequence.dot(dS, S_end, passed.shape[-1]) - dz)
        if frame is None:
            return sequence.later_shares(D, delta, passed, group, method)
        D, delta = sequence.later_shares(rotate_state(D, theta, first), delta, passed, group, method)
        D = rotate_state(D, theta, -first)
        # The next span takes the state with its positions lower by `length`.
        turns.sub_(rotation_gradient(D, S_end), alpha=length)
        return D, delta

    form, more = _form(q), (q, k, v, theta, positions, S, z)
    if form is not chunked and form.supports(q, k, v, theta, do):
        grads = form.backward(do, dS, dz, *more, S_end, scale, causal, None, later)
    else:
        *_, D, own_z = chunked.backward(do, None, None, *more, None, scale, causal, None)
        dS, dz = chunked.add_later(later, D, sequence.dot(D, S, z.shape[-1]) - own_z, dS, dz, S_end)
        grads = chunked.backward(do, dS, dz, *more, S_end, scale, causal, None)
    dq, dk, dv, dtheta, *states = grads
    if theta is None:
        dtheta = no_state(q)
    elif frame is not None:
        dtheta = (dtheta + turns).to(theta.dtype)
    return dq, dk, dv, dtheta, *states


_run_span_backward = register_plain(
    "additive_span_backward",
    "Tensor q, Tensor k, Tensor v, Tensor? theta, Tensor? positions, Tensor S, Tensor z, Tensor? cu_seqlens, "
    "float scale, bool causal, str activation, Tensor S_end, Tensor z_end, Tensor passed, Tensor do, Tensor? dS, "
    "Tensor? dz, str group, str method, int first",
    6,
    _span_backward,
    lambda q, k, v, theta, positions, S, z, *_: tuple(
        no_state(q) if x is None else empty_like(x) for x in (q, k, v, theta, S, z)
    ),
)

# S and z after a span, from nothing, without running the op.
_run_summary = register_plain(
    "summary_additive",
    "Tensor k, Tensor v, Tensor? theta, Tensor? positions",
    2,
    lambda k, *arguments: _form(k).summarise(k, *arguments),
    lambda k, v, theta, positions: _shapes(k, k, v, theta, positions, None, None, None, 1.0, True, "none", True)[1:],
)


def _summarise(q, k, v, theta, positions, *_) -> tuple[Tensor, Tensor]:
    return _run_summary(k, v, theta, positions)


additive_span = cut_normalised(additive, 5, 6, 7, 3, 4, _summarise, _run_span_backward)


def _check(q, k, v, theta, positions, causal, initial_state, cu_seqlens) -> None:
    check_matrix_state(OP, q, k, v, None, cu_seqlens)
    batch, length, heads, key_dim = q.shape
    if theta is not None and tuple(theta.shape) != (heads, key_dim):
        raise ValueError(f"{OP}: theta must be [H, K] = [{heads}, {key_dim}]; given {list(theta.shape)}")
    if positions is not None:
        check_positions(OP, positions, batch, length)
    S, z = (None, None) if initial_state is None else initial_state
    check_devices(OP, q=q, theta=theta, positions=positions, S=S, z=z)
    if initial_state is None:
        return
    if not causal:
        raise ValueError(f"{OP}: initial_state needs causal=True: without causality no token comes before another")
    states, dtype = count_states(cu_seqlens, batch), state_dtype(q, k, v)
    check_state(OP, S, (states, heads, key_dim * (1 if theta is None else 2), v.shape[3]), dtype)
    check_state(OP, z, (states, heads, key_dim), dtype)


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
    _check_step(q, k, v, S, z, theta, positions)
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


def _check_step(q, k, v, S, z, theta, positions) -> None:
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
