"""When and how the kernels for Hopper GPUs run; `linnet.ops.additive.triton` says what they compute.

They take bfloat16, widths of 64 or 128 (with LRPE: causal, keys of 128), sequences of whole chunks, no documents. But
for forwards without LRPE they need enough heads to fill the GPU, or long sequences, which are then cut into segments.

A forward without LRPE sums segments up in a launch of its own, and each of its programs joins the sums before its
segment. The other sweeps take segments for sequences (`split`) and run twice: first every segment from zero, which
gives what it leaves, then from what those before it (in a reversed sweep, after it) have left together. With the
segments' own states S_j and log-sums z_j, their shares D_j in the gradients of the states before them, and log-sums Z
at the boundaries, the states and gradients at boundary b are

    S_b = sum_{j < b} exp(z_j - Z_b) S_j        D_b = sum_{j >= b} exp(Z_b - Z_j) D_j
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from linnet.ops.additive.chunked import Later, add_later
from linnet.ops.additive.launch import NOTHING, Call
from linnet.ops.launching import Launch, align, cdiv, count_processors, launch, launch_all

try:
    from linnet.ops.additive.hopper.kernels import (
        hopper_keys_kernel,
        hopper_product_kernel,
        hopper_queries_kernel,
        hopper_sums_kernel,
        hopper_values_kernel,
    )
    from linnet.ops.additive.hopper.rotated_kernels import (
        hopper_rotated_keys_kernel,
        hopper_rotated_queries_kernel,
        hopper_rotated_values_kernel,
    )
except ImportError:  # a Triton without Gluon
    hopper_values_kernel = None

CHUNK = 64
WIDTHS = (64, 128)
# Heads per multiprocessor from which on these kernels run even if a sequence is not cut, by whether there is LRPE.
LEAST = {False: 0.45, True: 0.1}
# Chunks per segment at least, and tokens of all heads from which on two sweeps of segments are worth their launches.
SEGMENT_CHUNKS, SEGMENT_TOKENS = 8, 2**19
# With LRPE a program has warps that multiply, and others that rotate (and for dq and dk some that make scores):
# registers per thread at the start, and of those that rotate, by the columns of V. The multiplying ones get the rest:
# with 128 columns that must be 208, or ptxas lets every product wait for the one before. SIDE_REGISTERS: rotating,
# scoring.
ROTATING = {"scratch": True, "maxnreg": 168}
REGISTERS = {64: 128, 128: 88}
SIDES = {"scratch": True, "num_warps": 8, "maxnreg": 128}
SIDE_REGISTERS = {"dq": (88, 72), "dk": (96, 72)}


def suits(call: Call, causal: bool = True, backward: bool = False) -> bool:
    """Whether these kernels take a call."""
    q, V = call.q, call.v.shape[3]
    B, T, H, K = q.shape
    if hopper_values_kernel is None or not q.is_cuda or q.dtype != torch.bfloat16 or call.cu_seqlens is not None:
        return False
    if T == 0 or T % CHUNK or K not in WIDTHS or V not in WIDTHS or (call.theta is not None and K != 128):
        return False
    if torch.cuda.get_device_capability(q.device)[0] != 9:
        return False
    if call.positions is not None and call.positions.ndim == 3:  # these kernels read one coordinate per token
        return False
    if not causal:
        return call.theta is None
    rotated = call.theta is not None
    if rotated and call.scale == 0.0:  # the gradient of the final state is divided by it
        return False
    many = B * H >= LEAST[rotated] * count_processors(q.device)
    return not (backward or rotated) or many or count_swept_twice(call, CHUNK) > 1


def forward(
    call: Call, S: Tensor | None, z: Tensor | None, return_final: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o and the final state, or None and None."""
    o = torch.empty_like(call.v)
    if call.theta is not None and (count := count_swept_twice(call, CHUNK)) > 1:
        segments = split(call, count)
        states, ends = _carry(segments, o, S, z)
        launch_all([_values(segments, segments.v, o, (_before(states), _before(ends)), NOTHING)])
        return o, *((states[:, -1].contiguous(), ends[:, -1].contiguous()) if return_final else NOTHING)
    final = call.empty_state() if return_final else NOTHING
    cut, sums = (1, 1), NOTHING
    if call.theta is None:
        cut = count, shares = _cut(call)
        if count > 1:
            sums = _sum_up(call, count * shares, (count - 1) * shares)
    launch_all([_values(call, call.v, o, (align(S), align(z)), final, sums=sums, cut=cut)])
    return o, *final


def backward(
    call: Call, do: Tensor, dS: Tensor | None, dz: Tensor | None, S: Tensor | None, z: Tensor | None,
    S_end: Tensor | None, theta: Tensor | None, later: Later | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, theta and the initial state, if there is one, without what that itself adds to z's.

    `later`: what tokens after these give (`linnet.ops.additive.triton.backward`).
    """
    dq, dk, dv = gradients = [torch.empty_like(x) for x in (call.q, call.k, call.v)]
    call = split(call, count_swept_twice(call, CHUNK))
    B, T, H, K = call.q.shape
    boundaries, dtheta = call.blank.new_empty(B, T // CHUNK + 1, H, 2, K), call.empty_dtheta(1)
    if call.segments == 1:
        dS, dz, S, z, S_end = (align(x) for x in (dS, dz, S, z, S_end))
        final = NOTHING if S is None else call.empty_state()
        if later is not None:
            shares = call.empty_state()
            launch_all([
                _queries(call, do, dq, (S, z), boundaries, dtheta[0]),
                _keys(call, do, dq, dk, NOTHING, None, shares, boundaries, dtheta[1]),
            ])  # fmt: skip
            dS, dz = add_later(later, shares[0], -shares[1], dS, dz, S_end)
        launch_all([
            *([] if later is not None else [_queries(call, do, dq, (S, z), boundaries, dtheta[0])]),
            _keys(call, do, dq, dk, (dS, dz), S_end, final, boundaries, dtheta[1]),
            _values(call, do, dv, (dS, None), NOTHING, boundaries),
        ])  # fmt: skip
        return *gradients, call.sum_dtheta(dtheta, 1, theta), *final
    states, ends = _carry(call, dv, S, z)
    shares = call.empty_state()
    launch_all([
        _queries(call, do, dq, (_before(states), _before(ends)), boundaries, dtheta[0]),
        _keys(call, do, dq, dk, NOTHING, None, shares, boundaries, dtheta[1]),
    ])  # fmt: skip
    if later is not None:
        D, deltas = carry_back((shares[0], -shares[1]), None, ends, call.segments)
        dS, dz = add_later(later, D[:, 0], deltas[:, 0], dS, dz, S_end)
    last = None if dS is None else (dS, call.dot(dS, S_end) - dz)
    D, deltas = carry_back((shares[0], -shares[1]), last, ends, call.segments)
    dS, S_end = _after(D), _after(states)
    dz = call.dot(dS, S_end) - _after(deltas)
    launch_all([
        _keys(call, do, dq, dk, (dS, dz), S_end, NOTHING, boundaries, dtheta[1]),
        _values(call, do, dv, (dS, None), NOTHING, boundaries),
    ])  # fmt: skip
    final = NOTHING if S is None else (D[:, 0].contiguous(), -deltas[:, 0])
    return *gradients, call.sum_dtheta(dtheta, 1, theta), *final


def forward_non_causal(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """o, S and z, in as many segments as give a multiprocessor two programs, of four chunks each."""
    q, v = call.q, call.v
    B, T, H, K = q.shape
    segments = _count_sums(call)
    o = torch.empty_like(v)
    S, z = summarise(call)
    constants = (T, B, segments, H, K, v.shape[3], CHUNK, 3)
    launch(hopper_product_kernel, B * H * segments, (q, o, S), (call.scale,), constants, scratch=True, num_warps=4)
    return o, S, z


def summarise(call: Call) -> tuple[Tensor, Tensor]:
    """S and z after the last token, from nothing."""
    if call.theta is not None:
        segments = split(call, count_swept_twice(call, CHUNK))
        states, ends = _carry(segments, torch.empty_like(call.v), None, None)
        return states[:, -1].contiguous(), ends[:, -1].contiguous()
    segments = _count_sums(call)
    sums = _sum_up(call, segments, segments)
    return tuple(x.squeeze(2) for x in sums) if segments == 1 else call.combine(segments, sums)


def _count_sums(call: Call) -> int:
    B, T, H, _ = call.q.shape
    return max(1, min(2 * count_processors(call.q.device) // (B * H), T // CHUNK // 4))


def choose_columns(K: int, V: int, programs: int = 1 << 30, processors: int = 1) -> int:
    """Columns of the state per program: all, if there are enough programs."""
    return 128 if K == V == 128 and programs >= 0.9 * processors else 64


def count_segments(call: Call) -> int:
    """Of a forward without LRPE: as many as fill the GPU (one program of 8 warps or two of 4 per multiprocessor), of at
    least 8 chunks each."""
    B, T, H, K = call.q.shape
    width = choose_columns(K, call.v.shape[3])
    programs = B * H * (call.v.shape[3] // width)
    return max(1, min(count_processors(call.q.device) * 128 // width // programs, T // CHUNK // 8))


def _cut(call: Call) -> tuple[int, int]:
    """Segments of a sequence, and shares of each that are summed up one by one: two programs per multiprocessor."""
    B, T, H, _ = call.q.shape
    chunks, segments = T // CHUNK, count_segments(call)
    if segments == 1:
        return 1, 1
    places = 2 * count_processors(call.q.device) // (B * H * (segments - 1))
    shares = max(1, min(places, chunks // (4 * segments)))
    return cdiv(chunks, cdiv(chunks, segments * shares) * shares), shares  # no segment is empty


def count_swept_twice(call: Call, chunk: int) -> int:
    """Segments of equal length that fill the GPU best; 1 where heads are many or no such number is worth it."""
    B, T, H, _ = call.q.shape
    processors = count_processors(call.q.device)
    if 4 * B * H > processors or B * T * H < SEGMENT_TOKENS:
        return 1
    return _choose(B * H, T // chunk, processors)


@functools.lru_cache(1024)
def _choose(heads: int, chunks: int, processors: int) -> int:
    most = min(2 * processors // heads, chunks // SEGMENT_CHUNKS)
    fitting = [G for G in range(1, most + 1) if chunks % G == 0]
    # Their time: rounds of programs of all columns on all multiprocessors, by the length of a segment.
    best = min(fitting, key=lambda G: (-(-heads * G // processors) / G, G), default=1)
    return best if best > 2 else 1


def split(call: Call, segments: int) -> Call:
    """The call with every segment as a sequence."""

    def cut(x: Tensor) -> Tensor:
        return x.view(x.shape[0] * segments, x.shape[1] // segments, *x.shape[2:])

    positions = None if call.positions is None else cut(call.positions)
    return call._replace(q=cut(call.q), k=cut(call.k), v=cut(call.v), positions=positions, segments=segments)


def carry(
    sums: tuple[Tensor, Tensor], first: tuple[Tensor | None, Tensor | None], segments: int
) -> tuple[Tensor, Tensor]:
    """States [B, G + 1, H, K or 2 K, V] and log-sums [B, G + 1, H, K] before each of G segments and after the last one.

    Args:
        sums: those of the segments [B G, H, ...] from zero.
        first: the initial ones [B, H, ...], or None.
    """
    S, z = (_lead(x, y, segments) for x, y in zip(sums, first, strict=True))
    if first[1] is None:
        z[:, 0] = -torch.inf
    ends = torch.logcumsumexp(z, 1)
    # [B, boundary, j, H, K]. Before the first key both are -inf: the weight of every segment is 0.
    weights = (z[:, None] - ends[:, :, None]).exp().nan_to_num(0.0)
    return _weigh(weights.masked_fill_(_ahead(segments, z.device), 0.0), S), ends


def carry_back(
    shares: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor] | None, ends: Tensor, segments: int
) -> tuple[Tensor, Tensor]:
    """Gradients of the states that `carry` gives, with log-sums held, and minus the gradients of those (delta).

    Args:
        shares: what the segments [B G, H, ...] add to both where each begins.
        last: both after the last segment [B, H, ...], or None.
        ends: the log-sums that `carry` gives.
    """
    D, delta = (_lead(x, y, segments).roll(-1, 1) for x, y in zip(shares, last or NOTHING, strict=True))
    weights = (ends[:, :, None] - ends[:, None]).exp().nan_to_num(0.0)
    weights.masked_fill_(_ahead(segments, ends.device).transpose(1, 2), 0.0)
    return _weigh(weights, D), (weights * delta[:, None]).sum(2)


def _lead(x: Tensor, first: Tensor | None, segments: int) -> Tensor:
    """Of segments [B G, ...]: [B, 1 + G, ...] with `first`, or zero, in front."""
    x = x.view(-1, segments, *x.shape[1:])
    first = torch.zeros_like(x[:, :1]) if first is None else first[:, None]
    return torch.cat([first, x], 1)


def _ahead(segments: int, device: torch.device) -> Tensor:
    """[1, boundary, j, 1, 1]: whether j, in the order of `_lead`, comes after the boundary."""
    ones = torch.ones(segments + 1, segments + 1, dtype=torch.bool, device=device)
    return ones.triu_(1)[None, :, :, None, None]


def _weigh(weights: Tensor, states: Tensor) -> Tensor:
    """sum_j weights [B, b, j, H, K] states [B, j, H, K or 2 K, V], as [B, b, H, K or 2 K, V]."""
    halves = states.unflatten(3, (-1, weights.shape[-1]))
    return torch.einsum("bijhk,bjhckv->bihckv", weights, halves).flatten(3, 4)


def _before(x: Tensor) -> Tensor:
    """Of [B, G + 1, ...] at boundaries: where segments begin, [B G, ...]."""
    return x[:, :-1].flatten(0, 1).contiguous()


def _after(x: Tensor) -> Tensor:
    return x[:, 1:].flatten(0, 1).contiguous()


def _carry(segments: Call, scratch: Tensor, S: Tensor | None, z: Tensor | None) -> tuple[Tensor, Tensor]:
    """`carry` of what segments leave, from a sweep from zero that writes its o to `scratch`."""
    sums = segments.empty_state()
    launch_all([_values(segments, segments.v, scratch, NOTHING, sums)])
    return carry(sums, (S, z), segments.segments)


def _sum_up(call: Call, segments: int, count: int) -> tuple[Tensor, Tensor]:
    """Normalised state and log-sum of the first `count` segments."""
    B, T, H, K = call.q.shape
    sums = call.empty_state(segments)
    constants = (T, B, segments, count, H, K, call.v.shape[3], CHUNK, 3)
    launch(hopper_sums_kernel, B * H * count, (call.k, call.v, *sums), (), constants, scratch=True, num_warps=K // 16)
    return sums


def _queries(call: Call, do: Tensor, dq: Tensor, initial: tuple, boundaries: Tensor, dtheta: Tensor) -> Launch:
    """The launch for dq, `boundaries` and a share in the gradient of theta."""
    tensors, flags = (call.k, call.v, do, dq, *initial, boundaries), (initial[0] is not None,)
    if call.theta is None:
        return _by_keys(call, hopper_queries_kernel, tensors, (_columns(call), *flags, 3))
    tensors, flags = (call.q, *tensors, call.theta, dtheta, call.positions), (call.positions is not None, *flags)
    return _by_keys(call, hopper_rotated_queries_kernel, tensors, (*flags, *SIDE_REGISTERS["dq"]))


def _keys(
    call: Call, do: Tensor, dq: Tensor, dk: Tensor, initial: tuple, end: Tensor | None, final: tuple,
    boundaries: Tensor, dtheta: Tensor,
) -> Launch:  # fmt: skip
    """The launch for the gradient of k and its share in that of theta."""
    tensors = (call.q, call.k, call.v, do, dq, dk, *initial, end, *final, boundaries)
    flags = (initial[0] is not None, final[0] is not None)
    if call.theta is None:
        return _by_keys(call, hopper_keys_kernel, tensors, (_columns(call), *flags, 2))
    tensors, flags = (*tensors, call.theta, dtheta, call.positions), (call.positions is not None, *flags)
    return _by_keys(call, hopper_rotated_keys_kernel, tensors, (*flags, *SIDE_REGISTERS["dk"]))


def _by_keys(call: Call, kernel: Callable, tensors: tuple, constants: tuple) -> Launch:
    """A kernel whose programs own rows of the state."""
    B, _, H, K = call.q.shape
    if call.theta is None:
        columns = _columns(call)
        programs, options = B * H * (K // columns), {"scratch": True, "num_warps": columns // 16}
    else:
        programs, options = min(B * H * (K // 64), count_processors(call.q.device)), SIDES
    return Launch(kernel, programs, tensors, (call.scale,), (*_sizes(call), *constants), options)


def _values(
    call: Call, c: Tensor, out: Tensor, initial: tuple, final: tuple, boundaries: Tensor | None = None,
    sums: tuple = NOTHING, cut: tuple[int, int] = (1, 1),
) -> Launch:  # fmt: skip
    """The launch for o, or with `boundaries` for dv."""
    B, T, H, K = call.q.shape
    V, reverse = c.shape[3], boundaries is not None
    flags = (initial[0] is not None, final[0] is not None)
    tensors = (call.q, call.k, c, out, *initial, *final)
    if call.theta is None:
        columns = _columns(call) if reverse else choose_columns(K, V)
        constants = (T, B, *cut, H, K, V, CHUNK, columns, reverse, *flags, cut[0] > 1, 3)
        programs = B * H * cut[0] * (V // columns)
        options = {"scratch": True, "num_warps": columns // 16}
        return Launch(hopper_values_kernel, programs, (*tensors, *sums, boundaries), (call.scale,), constants, options)
    columns = _columns(call)
    constants = (*_sizes(call), columns, reverse, call.positions is not None, *flags, REGISTERS[columns])
    programs = min(B * H * (V // columns), count_processors(c.device))
    tensors = (*tensors, boundaries, call.theta, call.positions)
    options = ROTATING | {"num_warps": columns // 16}
    return Launch(hopper_rotated_values_kernel, programs, tensors, (call.scale,), constants, options)


def _sizes(call: Call) -> tuple[int, ...]:
    B, T, H, K = call.q.shape
    segments = () if call.theta is None else (call.segments,)
    return T, B, *segments, H, K, call.v.shape[3], CHUNK


def _columns(call: Call) -> int:
    B, _, H, K = call.q.shape
    return choose_columns(K, call.v.shape[3], B * H, count_processors(call.q.device))
