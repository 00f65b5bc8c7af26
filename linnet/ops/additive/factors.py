"""How the weights exp(u_s - z_t) of the running softmax are split into a query factor and a key factor.

The decays telescope: between token s and token t >= s they multiply to exp(z_s - z_t), so the weight of s at t is
exp(u_s - z_t) <= 1, a product of something of t and something of s, and a chunk is a plain matrix product.

In linear space, with one reference per chunk and channel, r = max(largest logit of the chunk, z before the chunk):

    P_t = exp(z_t - r) = exp(z_before - r) + cumsum_t exp(u - r)          exp(u_s - z_t) = exp(u_s - r) / P_t

This costs one exponential and one division an element, and it is exact to rounding as long as P_t does not come near
the smallest number: a key factor that underflows then belongs to a weight below FLOOR / 1e-38 (float32: 1e-12).

Where a channel grows by more than that inside a chunk (early logits 60 below a later one) the chunk is halved again and
again instead: for rows in a right half and columns in the left half before it, with r = z at the end of the left half,
exp(u_s - r) <= 1 and exp(r - z_t) <= 1, so nothing can overflow for any input, and what underflows is truly that small.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Smallest P_t of the linear form.
FLOOR = {torch.float32: 1e-26, torch.float64: 1e-200}


@dataclass
class Block:
    """Pairs of tokens with weight `row` x `column`, each [B, H, n, m, size, K].

    `halves`: of each 2 x size tokens the right half are the rows, the left half the columns.
    Otherwise rows and columns are the same tokens (size 1: the diagonal).
    """

    size: int
    halves: bool
    row: Tensor
    column: Tensor

    def rows(self, x: Tensor) -> Tensor:
        """[..., C, F] -> [..., m, size, F]: a view on the row tokens."""
        return x.unflatten(-2, (-1, 2, self.size))[..., 1, :, :] if self.halves else x.unflatten(-2, (-1, self.size))

    def columns(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, 2, self.size))[..., 0, :, :] if self.halves else x.unflatten(-2, (-1, self.size))

    def pairs(self, matrix: Tensor) -> Tensor:
        """[..., C, C] -> [..., m, size, size]: a view on the entries of these pairs."""
        parts = 2 if self.halves else 1
        grid = matrix.unflatten(-1, (-1, parts, self.size)).unflatten(-4, (-1, parts, self.size))
        grid = grid[..., parts - 1, :, :, 0, :]
        return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


@dataclass
class Factors:
    """Weights of a run of n chunks of C tokens, with S normalised (by exp(-z)) at the chunk boundaries.

    query, key [B, H, n, C, K]: a token's factors against the state that enters and the one that leaves its chunk,
    enter, leave [B, H, n, K]: what completes them: the weight of the entering state at t is query_t x enter, the weight
    of token s in the leaving state is key_s x leave,
    keep [B, H, n, K]: weight of the entering state in the leaving one,
    z [B, H, K]: log-sum after the last token,
    blocks: None if query x key is also the weight inside a chunk, else where that weight is to be had.
    """

    query: Tensor
    key: Tensor
    enter: Tensor
    leave: Tensor
    keep: Tensor
    z: Tensor
    blocks: list[Block] | None


def factorise(u: Tensor, z: Tensor) -> Factors:
    """Factors for logits u [B, H, n, C, K] that follow a log-sum z [B, H, K]; C is a power of two.

    The linear form is taken when a look at the values allows it. Only on the CPU: a GPU would have to wait for the
    answer, so there it is always halves.
    """
    key, mass, peak, before, after = _linear(u, z)
    keep = (before - _finite(after)).exp_()
    reference = torch.maximum(peak, before)
    enter = (before - _finite(reference)).exp_()
    if u.device.type == "cpu":
        shift = (peak - _finite(reference)).exp_()
        mass = torch.addcmul(enter[..., None, :], mass, shift[..., None, :])
        smallest = float(mass.amin())
        if smallest >= FLOOR[u.dtype] or _only_masked_below(FLOOR[u.dtype], mass, u, before):
            query = mass.reciprocal_()
            if smallest == 0.0:
                query.masked_fill_(query == torch.inf, 0.0)
            key *= shift[..., None, :]
            leave = (reference - _finite(after)).exp_()
            return Factors(query, key, enter, leave, keep, after[:, :, -1], None)
    z_t = torch.cat([before[..., None, :], u], -2).logcumsumexp(-2)[..., 1:, :]
    one = torch.ones_like(enter)
    query = (before[..., None, :] - _finite(z_t)).exp_()
    key = (u - _finite(after)[..., None, :]).exp_()
    return Factors(query, key, one, one, keep, after[:, :, -1], _halves(u, z_t))


def fold_keys(u: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The part of `factorise` that the state alone needs: key, leave, keep, z."""
    key, _, peak, before, after = _linear(u, z)
    return key, (peak - _finite(after)).exp_(), (before - _finite(after)).exp_(), after[:, :, -1]


def _linear(u, z):
    peak = u.amax(-2)
    key = (u - _finite(peak)[..., None, :]).exp_()
    mass = key.cumsum(-2)
    total = peak + mass[..., -1, :].log()
    # A loop over chunks: torch.logcumsumexp goes element by element on the CPU and takes ten times longer.
    edges = [z]
    for part in total.unbind(2):
        edges.append(torch.logaddexp(edges[-1], part))
    edges = torch.stack(edges, 2)
    return key, mass, peak, edges[:, :, :-1], edges[:, :, 1:]


def _only_masked_below(floor, mass, u, before) -> bool:
    nothing_yet = ((u > -torch.inf).cumsum(-2) == 0) & (before == -torch.inf)[..., None, :]
    return bool((nothing_yet | (mass >= floor)).all())


def _halves(u, z_t) -> list[Block]:
    diagonal = (u - _finite(z_t)).exp_().unflatten(-2, (-1, 1))
    blocks = [Block(1, False, torch.ones_like(diagonal), diagonal)]
    size = u.shape[-2] // 2
    while size:
        z_left, z_right = z_t.unflatten(-2, (-1, 2, size)).unbind(-3)
        end = z_left[..., -1:, :]
        column = u.unflatten(-2, (-1, 2, size))[..., 0, :, :]
        blocks.append(Block(size, True, (end - _finite(z_right)).exp_(), (column - _finite(end)).exp_()))
        size //= 2
    return blocks


def _finite(x: Tensor) -> Tensor:
    """x with 0 for -inf: subtracted from -inf, that leaves the weight exp(-inf) = 0 of what is not there."""
    return x.masked_fill(x == -torch.inf, 0.0)
