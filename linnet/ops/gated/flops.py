"""FLOPs of gated linear attention, from shapes: 2 a multiply-add, in chunks of 64 whatever form runs.

Matrix products only. Halving computes half of the scores; the products with ones that sum log-decays or their gradients
are sums, and left out.
"""

from linnet.ops.chunks import count_pairs
from linnet.ops.gated.chunked import CHUNK


def gated_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """C (K + 2 V) + 4 K V a token and head: half the scores, scores with v, the state's update and use."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, CHUNK) * (K + 2 * V) + 4 * T * K * V)


def gated_backward_flops(q_shape, k_shape, v_shape, *_, **__) -> int:
    """C (3 K + 4 V) + 10 K V a token and head: scores, gradients of scores, q, k and v, five products with states."""
    (B, T, H, K), V = q_shape, v_shape[-1]
    return B * H * (count_pairs(T, CHUNK) * (3 * K + 4 * V) + 10 * T * K * V)
