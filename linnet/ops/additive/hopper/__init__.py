"""How the kernels for Hopper GPUs are launched, and for which calls they are.

They want bfloat16, widths of 64 or 128 (with LRPE: causal, keys of 128), sequences of whole chunks, no documents, and
(but for forwards without LRPE) heads enough to fill the GPU, or long sequences, which are cut into parts.
`linnet.ops.additive.triton` says what they compute.

Where heads are few, sequences are cut into parts, which the kernels take for sequences. They sweep twice. The first
time every part starts from zero, which tells what it leaves, the second time from what those before it (or, in a reversed
sweep, after it) have left together. With the parts' own states S_j and log-sums z_j, their shares D_j in the gradients
of the states before them, and log-sums Z at the boundaries, there are at these

    S_b = sum_{j < b} exp(z_j - Z_b) S_j        D_b = sum_{j >= b} exp(Z_b - Z_j) D_j
"""

import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from linnet.ops.additive.launch import Call
from linnet.ops.launching import Launch, align, count_processors, launch, launch_all

try:
    from linnet.ops.additive.hopper.kernels import (
        hopper_keys_kernel,
        hopper_product_kernel,
        hopper_queries_kernel,
        hopper_sums_kernel,
        hopper_values_kernel,
    )
    from linnet.ops.additive.hopper.rotated_kernels import (
        hopper_turned_kernel,
        hopper_turned_keys_kernel,
        hopper_turned_queries_kernel,
    )
except ImportError:  # a Triton without Gluon
    hopper_values_kernel = None

CHUNK = 64
NOTHING = (None, None)
WIDTHS = (64, 128)
# Heads a multiprocessor from which on these kernels run even if a sequence is not cut, by whether there is LRPE.
LEAST = {False: 0.45, True: 0.1}
# With LRPE a program has warps that multiply, and others that turn (and for dq and dk some that make scores): registers
# of a thread at the start, and of those that turn, by the columns of V. The multiplying ones get what is left: with 128
# columns that must be 208, or ptxas lets every product wait for the one before. SIDE_REGISTERS: turning, scoring.
TURNING = {"scratch": True, "maxnreg": 168}
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
    if not causal:
        return call.theta is None
    turned = call.theta is not None
    if turned and call.scale == 0.0:  # by which the final state's gradient is divided
        return False
    many = B * H >= LEAST[turned] * count_processors(q.device)
    return not (backward or turned) or many or count_parts(call, CHUNK) > 1


def forward(
    call: Call, S: Tensor | None, z: Tensor | None, wants_final: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o and the final state, or None and None."""
    o = torch.empty_like(call.v)
    if call.theta is not None and (count := count_parts(call, CHUNK)) > 1:
        part = cut_parts(call, count)
        states, ends = _carry(part, o, S, z)
        launch_all([_values(part, part.v, o, (_before(states), _before(ends)), NOTHING)])
        return o, *((states[:, -1].contiguous(), ends[:, -1].contiguous()) if wants_final else NOTHING)
    leave = call.empty_state() if wants_final else NOTHING
    cut, sums = (1, 1), NOTHING
    if call.theta is None:
        cut = count, pieces = _cut(call)
        if count > 1:
            sums = _sum(call, count * pieces, (count - 1) * pieces)
    launch_all([_values(call, call.v, o, (align(S), align(z)), leave, sums=sums, cut=cut)])
    return o, *leave


def backward(
    call: Call, do: Tensor, dS: Tensor | None, dz: Tensor | None, S: Tensor | None, z: Tensor | None,
    S_end: Tensor | None, theta: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients to q, k, v, theta and the initial state, if there is one, but for what that itself gives to z."""
    dq, dk, dv = gradients = [torch.empty_like(x) for x in (call.q, call.k, call.v)]
    call = cut_parts(call, count_parts(call, CHUNK))
    B, T, H, K = call.q.shape
    edges, dtheta = call.blank.new_empty(B, T // CHUNK + 1, H, 2, K), call.empty_slopes(1)
    if call.parts == 1:
        dS, dz, S, z, S_end = (align(x) for x in (dS, dz, S, z, S_end))
        leave = NOTHING if S is None else call.empty_state()
        launch_all([
            _queries(call, do, dq, (S, z), edges, dtheta[0]),
            _keys(call, do, dq, dk, (dS, dz), S_end, leave, edges, dtheta[1]),
            _values(call, do, dv, (dS, None), NOTHING, edges),
        ])  # fmt: skip
        return *gradients, call.sum_slopes(dtheta, 1, theta), *leave
    states, ends = _carry(call, dv, S, z)
    shares = call.empty_state()
    launch_all([
        _queries(call, do, dq, (_before(states), _before(ends)), edges, dtheta[0]),
        _keys(call, do, dq, dk, NOTHING, None, shares, edges, dtheta[1]),
    ])  # fmt: skip
    last = None if dS is None else (dS, call.dot(dS, S_end) - dz)
    D, falls = carry_back((shares[0], -shares[1]), last, ends, call.parts)
    dS, S_end = _after(D), _after(states)
    dz = call.dot(dS, S_end) - _after(falls)
    launch_all([
        _keys(call, do, dq, dk, (dS, dz), S_end, NOTHING, edges, dtheta[1]),
        _values(call, do, dv, (dS, None), NOTHING, edges),
    ])  # fmt: skip
    leave = NOTHING if S is None else (D[:, 0].contiguous(), -falls[:, 0])
    return *gradients, call.sum_slopes(dtheta, 1, theta), *leave


def forward_whole(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """o, S and z without causality, in as many segments as give a multiprocessor two programs, of four chunks each."""
    q, v = call.q, call.v
    B, T, H, K = q.shape
    segments = max(1, min(2 * count_processors(q.device) // (B * H), T // CHUNK // 4))
    o = torch.empty_like(v)
    sums = _sum(call, segments, segments)
    S, z = (x.squeeze(2) for x in sums) if segments == 1 else call.combine(segments, sums)
    constants = (T, B, segments, H, K, v.shape[3], CHUNK, 3)
    launch(hopper_product_kernel, B * H * segments, (q, o, S), (call.scale,), constants, scratch=True, num_warps=4)
    return o, S, z


def count_segments(call: Call) -> int:
    """Of the forward: as many as fill the GPU, a program of 8 warps or two of 4 a multiprocessor, 8 chunks each."""
    B, T, H, K = call.q.shape
    width = choose_columns(K, call.v.shape[3])
    programs = B * H * (call.v.shape[3] // width)
    return max(1, min(count_processors(call.q.device) * 128 // width // programs, T // CHUNK // 8))


def _cut(call: Call) -> tuple[int, int]:
    """Segments of a sequence, and pieces of each, which are summed up one by one: two programs a multiprocessor."""
    B, T, H, _ = call.q.shape
    chunks, segments = T // CHUNK, count_segments(call)
    if segments == 1:
        return 1, 1
    places = 2 * count_processors(call.q.device) // (B * H * (segments - 1))
    pieces = max(1, min(places, chunks // (4 * segments)))
    return triton.cdiv(chunks, triton.cdiv(chunks, segments * pieces) * pieces), pieces  # no segment is empty


def choose_columns(K: int, V: int, programs: int = 1 << 30, processors: int = 1) -> int:
    """Columns of the state that a program has: all, if there are programs enough."""
    return 128 if K == V == 128 and programs >= 0.9 * processors else 64


def _sum(call: Call, segments: int, count: int) -> tuple[Tensor, Tensor]:
    """Normalised state and log-sum of the first `count` segments."""
    B, T, H, K = call.q.shape
    sums = call.empty_state(segments)
    constants = (T, B, segments, count, H, K, call.v.shape[3], CHUNK, 3)
    launch(hopper_sums_kernel, B * H * count, (call.k, call.v, *sums), (), constants, scratch=True, num_warps=K // 16)
    return sums


def _carry(part: Call, scratch: Tensor, S: Tensor | None, z: Tensor | None) -> tuple[Tensor, Tensor]:
    """`carry`, from a sweep that starts from zero and writes what it has for o to `scratch`."""
    sums = part.empty_state()
    launch_all([_values(part, part.v, scratch, NOTHING, sums)])
    return carry(sums, (S, z), part.parts)


def _before(x: Tensor) -> Tensor:
    """Of [B, G + 1, ...] at boundaries: where parts begin, [B G, ...]."""
    return x[:, :-1].flatten(0, 1).contiguous()


def _after(x: Tensor) -> Tensor:
    return x[:, 1:].flatten(0, 1).contiguous()


def _queries(call: Call, do: Tensor, dq: Tensor, entry: tuple, edges: Tensor, dtheta: Tensor) -> Launch:
    """What makes dq, `edges` and a share in the gradient of theta."""
    tensors, flags = (call.k, call.v, do, dq, *entry, edges), (entry[0] is not None,)
    if call.theta is None:
        return _by_keys(call, hopper_queries_kernel, tensors, (_columns(call), *flags, 3))
    tensors, flags = (call.q, *tensors, call.theta, dtheta, call.positions), (call.positions is not None, *flags)
    return _by_keys(call, hopper_turned_queries_kernel, tensors, (*flags, *SIDE_REGISTERS["dq"]))


def _keys(
    call: Call, do: Tensor, dq: Tensor, dk: Tensor, entry: tuple, end: Tensor | None, leave: tuple, edges: Tensor,
    dtheta: Tensor,
) -> Launch:  # fmt: skip
    """What makes the gradient of k and its share in that of theta."""
    tensors = (call.q, call.k, call.v, do, dq, dk, *entry, end, *leave, edges)
    flags = (entry[0] is not None, leave[0] is not None)
    if call.theta is None:
        return _by_keys(call, hopper_keys_kernel, tensors, (_columns(call), *flags, 2))
    tensors, flags = (*tensors, call.theta, dtheta, call.positions), (call.positions is not None, *flags)
    return _by_keys(call, hopper_turned_keys_kernel, tensors, (*flags, *SIDE_REGISTERS["dk"]))


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
    call: Call, c: Tensor, out: Tensor, entry: tuple, leave: tuple, edges: Tensor | None = None, sums: tuple = NOTHING,
    cut: tuple[int, int] = (1, 1),
) -> Launch:  # fmt: skip
    """What makes o, or dv where there are `edges`."""
    B, T, H, K = call.q.shape
    V, reverse = c.shape[3], edges is not None
    flags = (entry[0] is not None, leave[0] is not None)
    tensors = (call.q, call.k, c, out, *entry, *leave)
    if call.theta is None:
        columns = _columns(call) if reverse else choose_columns(K, V)
        constants = (T, B, *cut, H, K, V, CHUNK, columns, reverse, *flags, cut[0] > 1, 3)
        programs = B * H * cut[0] * (V // columns)
        options = {"scratch": True, "num_warps": columns // 16}
        return Launch(hopper_values_kernel, programs, (*tensors, *sums, edges), (call.scale,), constants, options)
    columns = _columns(call)
    constants = (*_sizes(call), columns, reverse, call.positions is not None, *flags, REGISTERS[columns])
    programs = min(B * H * (V // columns), count_processors(c.device))
    tensors = (*tensors, edges, call.theta, call.positions)
    options = TURNING | {"num_warps": columns // 16}
    return Launch(hopper_turned_kernel, programs, tensors, (call.scale,), constants, options)


def _sizes(call: Call) -> tuple[int, ...]:
    B, T, H, K = call.q.shape
    places = () if call.theta is None else (call.parts,)
    return T, B, *places, H, K, call.v.shape[3], CHUNK


def _columns(call: Call) -> int:
    B, _, H, K = call.q.shape
    return choose_columns(K, call.v.shape[3], B * H, count_processors(call.q.device))


# Chunks of a part at least; and tokens of all heads from which on the more launches are worth it.
PART, WORTH = 8, 2**19


def count_parts(call: Call, chunk: int) -> int:
    """Parts, all of one length, that fill the GPU best; 1 where heads are many or no such number is worth it."""
    B, T, H, _ = call.q.shape
    processors = count_processors(call.q.device)
    if 4 * B * H > processors or B * T * H < WORTH:
        return 1
    return _choose(B * H, T // chunk, processors)


@functools.lru_cache(1024)
def _choose(heads: int, chunks: int, processors: int) -> int:
    most = min(2 * processors // heads, chunks // PART)
    fitting = [G for G in range(1, most + 1) if chunks % G == 0]
    # Their time: rounds of programs of all columns on all multiprocessors, by the length of a part.
    best = min(fitting, key=lambda G: (-(-heads * G // processors) / G, G), default=1)
    return best if best > 2 else 1


def cut_parts(call: Call, parts: int) -> Call:
    """The call with every part as a sequence."""

    def split(x: Tensor) -> Tensor:
        return x.view(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])

    positions = None if call.positions is None else split(call.positions)
    return call._replace(q=split(call.q), k=split(call.k), v=split(call.v), positions=positions, parts=parts)


def carry(sums: tuple[Tensor, Tensor], first: tuple[Tensor | None, Tensor | None], parts: int) -> tuple[Tensor, Tensor]:
    """States [B, G + 1, H, K or 2 K, V] and log-sums [B, G + 1, H, K] before each of G parts and after the last one.

    Args:
        sums: those of the parts [B G, H, ...] from zero.
        first: the initial ones [B, H, ...], or None.
    """
    S, z = (_lead(x, y, parts) for x, y in zip(sums, first, strict=True))
    if first[1] is None:
        z[:, 0] = -torch.inf
    ends = torch.logcumsumexp(z, 1)
    # [B, boundary, j, H, K]. Where no key has come yet, -inf less -inf, there is nothing of any part.
    weights = (z[:, None] - ends[:, :, None]).exp().nan_to_num(0.0)
    return _weigh(weights.masked_fill_(_ahead(parts, z.device), 0.0), S), ends


def carry_back(
    shares: tuple[Tensor, Tensor], last: tuple[Tensor, Tensor] | None, ends: Tensor, parts: int
) -> tuple[Tensor, Tensor]:
    """Gradients of the states that `carry` gives, with log-sums held, and what a rise of those takes from the loss.

    Args:
        shares: what the parts [B G, H, ...] add to both where each begins.
        last: both after the last part [B, H, ...], or None.
        ends: the log-sums that `carry` gives.
    """
    D, fall = (_lead(x, y, parts).roll(-1, 1) for x, y in zip(shares, last or (None, None), strict=True))
    weights = (ends[:, :, None] - ends[:, None]).exp().nan_to_num(0.0)
    weights.masked_fill_(_ahead(parts, ends.device).transpose(1, 2), 0.0)
    return _weigh(weights, D), (weights * fall[:, None]).sum(2)


def _lead(x: Tensor, first: Tensor | None, parts: int) -> Tensor:
    """Of parts [B G, ...]: [B, 1 + G, ...] with `first`, or zero, in front."""
    x = x.view(-1, parts, *x.shape[1:])
    first = torch.zeros_like(x[:, :1]) if first is None else first[:, None]
    return torch.cat([first, x], 1)


def _ahead(parts: int, device: torch.device) -> Tensor:
    """[1, boundary, j, 1, 1]: whether j, in the order of `_lead`, comes after the boundary."""
    return torch.ones(parts + 1, parts + 1, dtype=torch.bool, device=device).triu_(1)[None, :, :, None, None]


def _weigh(weights: Tensor, states: Tensor) -> Tensor:
    """sum_j weights [B, b, j, H, K] states [B, j, H, K or 2 K, V], as [B, b, H, K or 2 K, V]."""
    turned = states.unflatten(3, (-1, weights.shape[-1]))
    return torch.einsum("bijhk,bjhckv->bihckv", weights, turned).flatten(3, 4)
