"""How the kernels for Hopper GPUs are launched, and for which calls they are.

They want bfloat16, widths of 64 or 128, sequences of whole chunks, no documents, no LRPE, and (if causal) heads enough
to fill the GPU. `linnet.ops.additive.triton` says what they compute.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from linnet.ops.additive.launch import Call
from linnet.ops.launching import Launcher, align, count_processors

try:
    from linnet.ops.additive import hopper, hopper_keys, hopper_whole
except ImportError:  # a Triton without Gluon
    hopper = hopper_keys = hopper_whole = None

CHUNK = 64
WIDTHS = (64, 128)
# Heads a multiprocessor from which on a sequence is not cut into segments.
LEAST = 0.45


def suits(call: Call, causal: bool = True) -> bool:
    """Whether these kernels take a call."""
    q, V = call.q, call.v.shape[3]
    B, T, H, K = q.shape
    if hopper is None or not q.is_cuda or q.dtype != torch.bfloat16 or call.cu_seqlens is not None:
        return False
    if call.theta is not None or T == 0 or T % CHUNK or K not in WIDTHS or V not in WIDTHS:
        return False
    if torch.cuda.get_device_capability(q.device)[0] != 9:
        return False
    return not causal or B * H >= LEAST * count_processors(q.device)


def forward(call: Call, S: Tensor | None, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """o and the final state."""
    call, S, z = _align(call), align(S), align(z)
    o = torch.empty_like(call.v)
    leave = call.empty_state()
    plan = _plan(call.q.shape, call.v.shape[3], call.q.device, S is not None, False)
    plan.values(call.q, call.k, call.v, o, S, z, *leave, None, call.scale)
    return o, *leave


def backward(
    call: Call, do: Tensor, dS: Tensor | None, dz: Tensor | None, S: Tensor | None, z: Tensor | None, S_end: Tensor,
    theta: None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients to q, k, v, theta and the initial state, but for what the state itself gives to z."""
    call = _align(call)
    do, dS, dz, S, z, S_end = (align(x) for x in (do, dS, dz, S, z, S_end))
    B, T, H, K = call.q.shape
    dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    leave = call.empty_state()
    edges = call.blank.new_empty(B, T // CHUNK + 1, H, 2, K)
    plan = _plan(call.q.shape, call.v.shape[3], call.q.device, S is not None, dS is not None)
    plan.dq(call.k, call.v, do, dq, S, z, edges, call.scale)
    plan.dk(call.q, call.k, call.v, do, dq, dk, dS, dz, S_end, *leave, edges, call.scale)
    plan.dv(call.q, call.k, do, dv, dS, None, None, None, edges, call.scale)
    return dq, dk, dv, call.blank.new_empty(0), *leave


def forward_whole(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """o, S and z without causality."""
    call = _align(call)
    q, k, v = call.q, call.k, call.v
    launch_sums, launch_product, segments = _plan_whole(q.shape, v.shape[3], q.device)
    o = torch.empty_like(v)
    sums = call.empty_state(segments)
    launch_sums(k, v, *sums)
    S, z = (x.squeeze(2) for x in sums) if segments == 1 else call.combine(segments, sums)
    launch_product(q, o, S, call.scale)
    return o, S, z


class Plan(NamedTuple):
    """The launches of the causal sweeps."""

    values: Launcher
    dq: Launcher
    dk: Launcher
    dv: Launcher


def choose_columns(K: int, V: int, programs: int, processors: int) -> int:
    """Columns of the state that a program has: all, if there are programs enough."""
    return 128 if K == V == 128 and programs >= 0.9 * processors else 64


@functools.lru_cache(1024)
def _plan(shape: torch.Size, V: int, device: torch.device, entry: bool, gradient: bool) -> Plan:
    B, T, H, K = shape
    columns = choose_columns(K, V, B * H, count_processors(device))

    def prepare(kernel, width, *constants):
        constants = (T, B, H, K, V, CHUNK, columns, *constants)
        return Launcher(kernel, B * H * (width // columns), constants, scratch=True, num_warps=columns // 16)

    return Plan(
        prepare(hopper.hopper_values_kernel, V, False, entry, True, 3),
        prepare(hopper_keys.hopper_queries_kernel, K, entry, 3),
        prepare(hopper_keys.hopper_keys_kernel, K, gradient, True, 2),
        prepare(hopper.hopper_values_kernel, V, True, gradient, False, 3),
    )


@functools.lru_cache(1024)
def _plan_whole(shape: torch.Size, V: int, device: torch.device) -> tuple[Launcher, Launcher, int]:
    """The two launches, and the segments of a sequence: two programs a multiprocessor, but four chunks each."""
    B, T, H, K = shape
    segments = max(1, min(2 * count_processors(device) // (B * H), T // CHUNK // 4))
    constants = (T, B, segments, H, K, V, CHUNK, 3)
    return (
        Launcher(hopper_whole.hopper_sums_kernel, B * H * segments, constants, scratch=True, num_warps=K // 16),
        Launcher(hopper_whole.hopper_product_kernel, B * H * segments, constants, scratch=True, num_warps=4),
        segments,
    )


def _align(call: Call) -> Call:
    return call._replace(q=align(call.q), k=align(call.k), v=align(call.v))
