"""Where heads are few on a Hopper GPU: sequences are cut into parts, which its kernels take for sequences.

They sweep twice. The first time every part starts from zero, which tells what it leaves, the second time from what
those before it (or, in a reversed sweep, after it) have left together. With the parts' own states S_j and log-sums z_j,
their shares D_j in the gradients of the states before them, and log-sums Z at the boundaries, there are at these

    S_b = sum_{j < b} exp(z_j - Z_b) S_j        D_b = sum_{j >= b} exp(Z_b - Z_j) D_j
"""

import functools

import torch
from torch import Tensor

from linnet.ops.additive.launch import Call
from linnet.ops.launching import count_processors

# Chunks of a part at least; and tokens of all heads from which on the more launches are worth it.
LEAST, WORTH = 8, 2**19


def count(call: Call, chunk: int) -> int:
    """Parts, all of one length, that fill the GPU best; 1 where heads are many or no such number is worth it."""
    B, T, H, _ = call.q.shape
    processors = count_processors(call.q.device)
    if 4 * B * H > processors or B * T * H < WORTH:
        return 1
    return _choose(B * H, T // chunk, processors)


@functools.lru_cache(1024)
def _choose(heads: int, chunks: int, processors: int) -> int:
    most = min(2 * processors // heads, chunks // LEAST)
    fitting = [G for G in range(1, most + 1) if chunks % G == 0]
    # Their time: rounds of programs of all columns on all multiprocessors, by the length of a part.
    best = min(fitting, key=lambda G: (-(-heads * G // processors) / G, G), default=1)
    return best if best > 2 else 1


def cut(call: Call, parts: int) -> Call:
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
    return _sum(weights.masked_fill_(_ahead(parts, z.device), 0.0), S), ends


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
    return _sum(weights, D), (weights * fall[:, None]).sum(2)


def _lead(x: Tensor, first: Tensor | None, parts: int) -> Tensor:
    """Of parts [B G, ...]: [B, 1 + G, ...] with `first`, or zero, in front."""
    x = x.view(-1, parts, *x.shape[1:])
    first = torch.zeros_like(x[:, :1]) if first is None else first[:, None]
    return torch.cat([first, x], 1)


def _ahead(parts: int, device: torch.device) -> Tensor:
    """[1, boundary, j, 1, 1]: whether j, in the order of `_lead`, comes after the boundary."""
    return torch.ones(parts + 1, parts + 1, dtype=torch.bool, device=device).triu_(1)[None, :, :, None, None]


def _sum(weights: Tensor, states: Tensor) -> Tensor:
    """sum_j weights [B, b, j, H, K] states [B, j, H, K or 2 K, V], as [B, b, H, K or 2 K, V]."""
    turned = states.unflatten(3, (-1, weights.shape[-1]))
    return torch.einsum("bijhk,bjhckv->bihckv", weights, turned).flatten(3, 4)
