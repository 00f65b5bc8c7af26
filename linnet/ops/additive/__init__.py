"""Additive decay attention (LightNet, paper 003): keys are a running softmax over time."""

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from linnet.ops import backend
from linnet.ops.additive import chunked
from linnet.ops.additive.reference import reference
from linnet.ops.additive.step import additive_step
from linnet.ops.arguments import check_devices, check_matrix_state, check_state
from linnet.ops.chunks import exact, state_dtype
from linnet.ops.documents import count_states
from linnet.ops.fast_path import make_fast_path, no_state
from linnet.ops.vmap_rules import fold_all, run_each, unfold

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
    initial_state: tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Linear attention whose keys are the softmax over time of the logits k, up to each token.

        z_t = log sum_{s <= t} exp(k_s)
        S_t = diag(exp(z_{t-1} - z_t)) S_{t-1} + exp(k_t - z_t)^T v_t
        o_t = scale q_t S_t

    Logits may be of any size; -inf takes a token's channel out (padding), also before the first real token.
    On a GPU, tokens lose a channel whose logit rises by more than 97 above all before it within the next 64 tokens.

    Args:
        q, k: [B, T, H, K]; k holds raw logits.
        v: [B, T, H, V].
        theta: [H, K], LRPE frequencies in radians a token. q and the normalised keys are then rotated by position,
            x -> [x cos(t theta), x sin(t theta)], which doubles K in the state.
        positions: integers [B, T]; default 0 .. T-1, from 0 at each document. Give the true ones with a state.
        scale: multiplies q.
        causal: False takes the softmax over the whole sequence (document): o = q (k^T v).
        initial_state: (S [N, H, K or 2K, V], z [N, H, K]), from an earlier call or S = 0 and z = -inf. N is B, or the
            number of documents. Only with causal=True.
        output_final_state: return the state after the last token.
        cu_seqlens: int32 [N+1] with B = 1, the offsets of packed documents; the state resets at each.

    Returns:
        o [B, T, H, V] in the dtype of v, and the final state (float32; float64 for float64 inputs) or None.

    Raises:
        ValueError: shapes, dtypes or options do not fit together.

    Source: paper 003, section 4.1; LRPE in its complex form, section 4.2. Gradients reach q, k, v, theta and
    the state.
    """
    _check(q, k, v, theta, positions, causal, initial_state, cu_seqlens)
    S, z = (None, None) if initial_state is None else initial_state
    if backend.debugging() and not bool((k < torch.inf).all()):
        raise ValueError(f"{OP}: k must hold logits below +inf and no NaN; -inf masks a token")
    if backend.use_reference():
        with exact(q):
            o, (S, z) = reference(q, k, v, theta, positions, initial_state, scale, causal, cu_seqlens)
    else:
        o, S, z = _direct(q, k, v, theta, positions, S, z, float(scale), causal, cu_seqlens, output_final_state)
    return o, ((S, z) if output_final_state else None)


def _form(x: Tensor):
    if backend.use_triton("additive", x.is_cuda):
        return importlib.import_module("linnet.ops.additive.triton")
    return chunked


@torch.library.custom_op("linnet::additive", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | None,
    positions: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    scale: float,
    causal: bool,
    cu_seqlens: Tensor | None,
    wants_final: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    o, *final = _attend(q, k, v, theta, positions, S, z, scale, causal, cu_seqlens, wants_final)
    return o, *(final if wants_final or not causal else (no_state(q), no_state(q)))


@torch.library.custom_op("linnet::additive_backward", mutates_args=())
def _backward(
    do: Tensor,
    dS: Tensor | None,
    dz: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: Tensor | None,
    positions: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    S_end: Tensor | None,
    scale: float,
    causal: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *gradients, dS, dz = _attend_backward(do, dS, dz, q, k, v, theta, positions, S, z, S_end, scale, causal, cu_seqlens)
    return *gradients, *((no_state(q), no_state(q)) if S is None else (dS, dz))


def _attend(q, *arguments):
    with exact(q):
        return _form(q).forward(q, *arguments)


def _attend_backward(do, dS, dz, q, *arguments):
    with exact(q):
        return _form(q).backward(do, dS, dz, q, *arguments)


@_forward.register_fake
def _(q, k, v, theta, positions, S, z, scale, causal, cu_seqlens, wants_final=True):
    dtype = state_dtype(q, k, v)
    states, key_dim = count_states(cu_seqlens, q.shape[0]), q.shape[3]
    rows = key_dim if theta is None else 2 * key_dim
    if causal and not wants_final:
        return v.new_empty(v.shape), no_state(q), no_state(q)
    return (
        v.new_empty(v.shape),
        v.new_empty((states, q.shape[2], rows, v.shape[3]), dtype=dtype),
        v.new_empty((states, q.shape[2], key_dim), dtype=dtype),
    )


@_backward.register_fake
def _(do, dS, dz, q, k, v, theta, positions, S, z, S_end, scale, causal, cu_seqlens):
    dtheta = q.new_empty(0, dtype=state_dtype(q, k, v)) if theta is None else theta.new_empty(theta.shape)
    starts = (no_state(q) if x is None else x.new_empty(x.shape) for x in (S, z if causal else None))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dtheta, *starts)


def _save(ctx, inputs, output):
    q, k, v, theta, positions, S, z, ctx.scale, ctx.causal, cu_seqlens, wants_final = inputs
    S_end = output[1] if wants_final or not ctx.causal else None
    # Without causality there is no z before the first token, and the place is free for the one after the last.
    ctx.save_for_backward(q, k, v, theta, positions, S, z if ctx.causal else output[2], S_end, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, do, dS, dz):
    q, k, v, theta, positions, S, z, S_end, cu_seqlens = ctx.saved_tensors
    do = torch.zeros_like(v) if do is None else do
    if S_end is None:  # the final state was empty, as is what a sum over all results gives to it
        dS = dz = None
    dq, dk, dv, dtheta, dS, dz = _direct_backward(
        do, dS, dz, q, k, v, theta, positions, S, z, S_end, ctx.scale, ctx.causal, cu_seqlens
    )
    if S is None:
        dS = dz = None
    else:
        dS, dz = dS.to(S.dtype), dz.to(z.dtype)
    return dq, dk, dv, None if theta is None else dtheta, None, dS, dz, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
_direct = make_fast_path(_forward, _save, _differentiate, implementation=_attend)
_direct_backward = make_fast_path(_backward, implementation=_attend_backward)


@_forward.register_vmap
def _(info, in_dims, *args):
    size, theta, cu_seqlens = info.batch_size, args[3], args[9]
    by_heads = theta is not None or cu_seqlens is not None
    if in_dims[9] is not None or (by_heads and in_dims[4] is not None):
        return run_each(_forward, size, in_dims, args)
    axes = (2, 2, 2, 0, None, 1, 1) if by_heads else (0, 0, 0, None, 0, 0, 0)
    outputs = _forward(*fold_all(args[:7], in_dims, size, axes), *args[7:])
    return _unfold_all(outputs, size, (2, 1, 1) if by_heads else (0, 0, 0))


@_backward.register_vmap
def _(info, in_dims, *args):
    size, theta, cu_seqlens = info.batch_size, args[6], args[13]
    by_heads = theta is not None or cu_seqlens is not None
    if in_dims[13] is not None or (by_heads and in_dims[7] is not None):
        return run_each(_backward, size, in_dims, args)
    axes = (2, 1, 1, 2, 2, 2, 0, None, 1, 1, 1) if by_heads else (0, 0, 0, 0, 0, 0, None, 0, 0, 0, 0)
    gradients = _backward(*fold_all(args[:11], in_dims, size, axes), *args[11:])
    return _unfold_all(gradients, size, (2, 2, 2, 0, 1, 1) if by_heads else (0,) * 6)


def _unfold_all(outputs, size: int, axes: tuple[int, ...]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Results and their out-dims; what is not there is empty, and so for all models."""
    outs = tuple(None if x.numel() == 0 and x.ndim == 1 else axis for x, axis in zip(outputs, axes, strict=True))
    return tuple(x if out is None else unfold(x, size, out) for x, out in zip(outputs, outs, strict=True)), outs


# FLOPs: 2 a multiply-add, matrix products of the chunked form only, in chunks of 64 whatever form runs; the empty half
# of a chunk's scores is counted because it is computed. Exponentials and rotations are free.


def _sizes(q_shape, v_shape, theta_shape, causal) -> tuple[int, int, int, int]:
    """Pairs of tokens that share a chunk and tokens, both over batch and heads; rows and columns of the state."""
    B, T, H, K = q_shape
    full, tail = divmod(T, chunked.CHUNK)
    pairs = full * chunked.CHUNK**2 + tail**2 if causal else 0
    return B * H * pairs, B * H * T, K if theta_shape is None else 2 * K, v_shape[-1]


@register_flop_formula(torch.ops.linnet.additive)
def additive_flops(q_shape, k_shape, v_shape, theta_shape, positions, S, z, scale, causal, *_, **__) -> int:
    """2 C (K + V) + 4 K V a token and head, with K doubled by theta; without causality 4 K V."""
    pairs, tokens, K, V = _sizes(q_shape, v_shape, theta_shape, causal)
    return 2 * pairs * (K + V) + 4 * tokens * K * V


@register_flop_formula(torch.ops.linnet.additive_backward)
def additive_backward_flops(
    do, dS, dz, q_shape, k_shape, v_shape, theta_shape, positions, S, z, S_end, scale, causal, *_, **__
) -> int:
    """2 C (3 K + 2 V) + 10 K V a token and head: as in lightning attention; without causality 8 K V."""
    pairs, tokens, K, V = _sizes(q_shape, v_shape, theta_shape, causal)
    return 2 * pairs * (3 * K + 2 * V) + (10 if causal else 8) * tokens * K * V


def _check(q, k, v, theta, positions, causal, initial_state, cu_seqlens) -> None:
    check_matrix_state(OP, q, k, v, None, cu_seqlens)
    batch, length, heads, key_dim = q.shape
    if theta is not None and tuple(theta.shape) != (heads, key_dim):
        raise ValueError(f"{OP}: theta must be [H, K] = [{heads}, {key_dim}]; given {list(theta.shape)}")
    if positions is not None and (tuple(positions.shape) != (batch, length) or positions.is_floating_point()):
        raise ValueError(
            f"{OP}: positions must be integers [B, T] = [{batch}, {length}]; "
            f"given {positions.dtype} {list(positions.shape)}"
        )
    S, z = (None, None) if initial_state is None else initial_state
    check_devices(OP, q=q, theta=theta, positions=positions, S=S, z=z)
    if initial_state is None:
        return
    if not causal:
        raise ValueError(f"{OP}: initial_state needs causal=True: without causality no token comes before another")
    states, dtype = count_states(cu_seqlens, batch), state_dtype(q, k, v)
    check_state(OP, S, (states, heads, key_dim * (1 if theta is None else 2), v.shape[3]), dtype)
    check_state(OP, z, (states, heads, key_dim), dtype)
