"""Paper 000, equations 1 to 3: softmax attention is a recurrence that starts anew at every token.

Equation 2 keeps two numbers per query, the sum of weights s and the output o. Linnet's attention computes equation 1.
The equations are written out here because no model runs them: they say why a state of fixed size cannot replace the
keys and values: the recurrence of token t reads all of them again, while that of linear attention (equation 3) goes on.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from linnet.layers import MIXERS, LayerContext
from linnet.ops.attention import causal_attention
from linnet.ops.lightning import lightning_attention

TOLERANCE = {"rtol": 0.0, "atol": 1e-12}


def read_again(query, keys, values, start=None):
    """Equation 2 for one query: reads keys [j, D] and values [j, E] in order, returns (s, o [E])."""
    s, o = start if start is not None else (query.new_zeros(()), values.new_zeros(values.shape[1]))
    for key, value in zip(keys, values, strict=True):
        total = s + torch.exp(query @ key / math.sqrt(len(query)))
        o = s / total * o + (1 - s / total) * value
        s = total
    return s, o


def recurrence(q, k, v):
    """Equation 2 for all tokens of one head, q, k [T, D] and v [T, E]: the state starts from zero at every token."""
    return torch.stack([read_again(q[t], k[: t + 1], v[: t + 1])[1] for t in range(len(q))])


def draw(tokens, width, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(tokens, width, dtype=torch.float64, generator=generator) for _ in range(3)]


@settings(max_examples=25)
@given(
    tokens=st.integers(1, 24),
    width=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_the_recurrence_is_softmax_attention(tokens, width, seed, scale):
    q, k, v = draw(tokens, width, seed, scale)
    expected = causal_attention(*(x[None, :, None] for x in (q, k, v)))[0, :, 0]
    torch.testing.assert_close(recurrence(q, k, v), expected, **TOLERANCE)


def test_the_recurrence_is_the_mixer_with_its_cache():
    torch.manual_seed(0)
    attention = MIXERS["attention"]
    layer = attention(attention.Config(num_heads=2, rope=False), LayerContext(d_model=12)).double()
    x = torch.randn(1, 15, 12, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (proj(x).view(15, 2, 6) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
        heads = torch.stack([recurrence(q[:, h], k[:, h], v[:, h]) for h in range(2)], 1)
        expected = layer.out_proj(heads.reshape(1, 15, 12))
        torch.testing.assert_close(layer(x)[0], expected, **TOLERANCE)


def test_a_query_cannot_go_on_from_the_state_of_the_one_before():
    """The state of token t - 1 has the weights of another query, so one more token does not make it that of token t."""
    q, k, v = draw(8, 4, seed=1)
    true = recurrence(q, k, v)
    state, carried = None, []
    for t in range(8):
        state = read_again(q[t], k[t : t + 1], v[t : t + 1], state)
        carried.append(state[1])
    assert (torch.stack(carried) - true)[1:].abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("decay", [0.5, 0.9])
def test_linear_attention_goes_on_from_the_state_before(decay):
    """Equation 3: one state of D x E numbers, which each token updates once."""
    q, k, v = draw(20, 5, seed=2)
    kv, outputs = torch.zeros(5, 5, dtype=torch.float64), []
    for t in range(20):
        kv = decay * kv + k[t, :, None] * v[t]
        outputs.append(kv.mT @ q[t])
    log_decay = torch.tensor([decay], dtype=torch.float64).log()
    got, _ = lightning_attention(*(x[None, :, None] for x in (q, k, v)), log_decay=log_decay)
    torch.testing.assert_close(got[0, :, 0], torch.stack(outputs), **TOLERANCE)
