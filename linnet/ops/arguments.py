"""Argument checks that the ops share. They read shapes and dtypes only, except in `linnet.ops.debug()`."""

import torch
from torch import Tensor

from linnet.ops import backend
from linnet.ops.chunks import state_dtype
from linnet.ops.documents import check_documents, count_states


def check_matrix_state(
    op: str, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, key: str = "k"
) -> None:
    """Raises ValueError unless q, k [B, T, H, K], v [B, T, H, V] and the state [N, H, K, V] go together.

    `check_half` refuses float16. `key` is the op's name for k.
    """
    shape, values = q.shape, v.shape
    if len(shape) != 4 or k.shape != shape or len(values) != 4 or values[:3] != shape[:3]:
        raise ValueError(
            f"{op}: q {list(q.shape)}, {key} {list(k.shape)}, v {list(v.shape)}; give q and {key} [B, T, H, K], "
            "v [B, T, H, V]"
        )
    inputs = {"q": q, key: k, "v": v}
    check_sequence(op, inputs, initial_state, (*shape[2:], values[3]), state_dtype(q, k, v), cu_seqlens)
    check_half(op, q, k, v, key)


def check_half(op: str, q: Tensor, k: Tensor, v: Tensor, key: str = "k") -> None:
    """Raises ValueError for float16 where kernels would run."""
    if torch.float16 in (q.dtype, k.dtype, v.dtype) and backend.use_triton("lightning", q.is_cuda):
        raise ValueError(
            f"{op}: q, {key}, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; on a GPU give bfloat16 or float32, since "
            "a state can exceed the largest float16 (65,504): convert with .bfloat16(), or autocast to bfloat16"
        )


def check_decay_dtype(op: str, log_decay: Tensor | None) -> None:
    """Raises ValueError for a float16 log-decay that needs a gradient."""
    if log_decay is not None and log_decay.dtype == torch.float16 and log_decay.requires_grad:
        raise ValueError(f"{op}: log_decay is float16, whose gradient sums over tokens and overflows; give float32")


def check_grouped(op: str, q: Tensor, k: Tensor, v: Tensor, axes: str) -> None:
    """Raises ValueError unless q, k [..., H, K] and v [..., HV, V] go together, where H divides HV.

    `axes` is what the shapes in the message start with: "[B, T, " or "[B, ".
    """
    rank = axes.count(",") + 2
    alike = q.ndim == rank and k.shape == q.shape and v.ndim == rank and v.shape[:-2] == q.shape[:-2]
    if not alike or 0 in q.shape or 0 in v.shape:
        raise ValueError(
            f"{op}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; give q, k {axes}H, K] and v {axes}HV, V], "
            "every size at least 1"
        )
    if v.shape[-2] % q.shape[-2]:
        raise ValueError(
            f"{op}: v has {v.shape[-2]} heads and q, k have {q.shape[-2]}, which does not divide them; give v a "
            "multiple of the heads of q"
        )


def check_sequence(
    op: str, inputs: dict[str, Tensor], initial_state: Tensor | None, state_shape: tuple[int, ...], dtype: torch.dtype,
    cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    """Raises ValueError unless the inputs, the first one [B, T, ...], are floating-point tensors on one device with no
    empty axis, the documents fit, and the initial state is None or [N, *state_shape] in `dtype`."""
    for x in inputs.values():
        if 0 in x.shape or not x.is_floating_point():
            shapes = ", ".join(f"{name} {list(x.shape)} {x.dtype}" for name, x in inputs.items())
            raise ValueError(f"{op}: {shapes}; give floating-point tensors, every size at least 1")
    batch, length = next(iter(inputs.values())).shape[:2]
    check_documents(cu_seqlens, batch, length)
    check_devices(op, **inputs, initial_state=initial_state, cu_seqlens=cu_seqlens)
    check_state(op, initial_state, (count_states(cu_seqlens, batch), *state_shape), dtype)


def check_state(op: str, state: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ValueError unless an initial state is None or has this shape and dtype."""
    if state is not None and (state.shape != shape or state.dtype != dtype):
        raise ValueError(
            f"{op}: initial_state has shape {list(state.shape)} and dtype {state.dtype}; give {list(shape)} in {dtype}"
        )


def check_devices(op: str, **tensors: Tensor | None) -> None:
    """Raises ValueError unless all tensors are on the device of the first one."""
    first, device = "", None
    for name, x in tensors.items():
        if x is None:
            continue
        if device is None:
            first, device = name, x.device
        elif x.device != device:
            raise ValueError(
                f"{op}: {name} is on {x.device}, but {first} on {device}; move it: {name}.to({str(device)!r})"
            )


def check_decay_values(op: str, log_decay: Tensor | None) -> None:
    """For `linnet.ops.debug()`: raises ValueError if a log-decay is NaN or above 0. Waits for the device."""
    if log_decay is not None and backend.debugging(log_decay) and not bool((log_decay <= 0).all()):
        worst = log_decay.detach().max().item()  # NaN if there is one
        raise ValueError(
            f"{op}: log_decay must be at most 0 and not NaN, but reaches {worst}; give the log of a decay in (0, 1]"
        )
