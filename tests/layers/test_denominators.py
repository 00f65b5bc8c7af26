"""Linear attention with a denominator, `elu1` and `cosformer`, against softmax-like weights of all pairs in float64."""

import math

import pytest
import torch
from torch.nn import functional as F

from linnet.config import parse
from linnet.layers import MIXERS, LayerContext
from linnet.models import build_model, count_parameters, family, get_recipe

D, HEADS, T, M = 24, 3, 13, 20


def build(name, causal=True, **options):
    torch.manual_seed(0)
    cls = MIXERS[name]
    return cls(parse(cls.Config, {"num_heads": HEADS, **options}), LayerContext(d_model=D, causal=causal)).double()


def weighted(mixer, x, weights, causal=True):
    """y of a layer whose heads have weights [..., T, T] of queries and keys [..., T, K]."""
    q, k, v = (
        proj(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    w = weights(q, k)
    w = w.tril() if causal else w
    return mixer.out_proj((w / w.sum(-1, keepdim=True).clamp(min=1e-12) @ v).transpose(-2, -3).flatten(-2))


def elu_weights(q, k):
    return (1 + F.elu(q)) @ (1 + F.elu(k)).mT


def cosine_weights(q, k):
    places = torch.arange(q.shape[-2])
    return F.relu(q) @ F.relu(k).mT * (math.pi / (2 * M) * (places[:, None] - places)).cos()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name, weights", [("elu1", elu_weights), ("cosformer", cosine_weights)])
def test_the_layer_is_a_mean_with_the_weights_of_its_paper(name, weights, causal):
    mixer = build(name, causal, eps=1e-12, **({"max_length": M} if name == "cosformer" else {}))
    x = torch.randn(2, T, D, dtype=torch.float64)
    # The frequency of cosFormer is kept in float32.
    torch.testing.assert_close(mixer(x)[0], weighted(mixer, x, weights, causal), rtol=1e-6, atol=1e-7)


def test_features_of_1_plus_elu_keep_their_digits_far_below_zero():
    x = torch.tensor([-20.0, -1.0, 0.0, 2.0], requires_grad=True)
    y = build("elu1").features(x, None)
    y.sum().backward()
    torch.testing.assert_close(y, torch.tensor([math.exp(-20), math.exp(-1), 1.0, 3.0]))
    torch.testing.assert_close(x.grad, torch.tensor([math.exp(-20), math.exp(-1), 1.0, 1.0]))


def test_weights_of_cosformer_are_not_negative_beyond_the_longest_row():
    mixer, x = build("cosformer", max_length=4), torch.ones(1, T, D, dtype=torch.float64)
    q = mixer.features(x.unflatten(-1, (HEADS, -1)), torch.arange(T)[None])
    weights = torch.einsum("bthk,bshk->bhts", q, q)
    assert weights.min() > -1e-6 and weights[0, 0, 4, 0].abs() < 1e-6
    torch.testing.assert_close(weights[0, 0, 4:, 4:], torch.full((T - 4, T - 4), D / HEADS).double(), rtol=1e-6, atol=0)


def test_a_query_that_no_key_matches_reads_nothing():
    mixer, x = build("cosformer"), torch.randn(1, T, D, dtype=torch.float64)
    torch.nn.init.zeros_(mixer.q_proj.weight)
    y = mixer(x.requires_grad_())[0]
    y.sum().backward()
    assert (y == 0).all() and x.grad.isfinite().all()


def test_they_have_the_parameters_of_the_transformer():
    attention = count_parameters(get_recipe("transformer-wt103"))
    for name in ("elu1", "cosformer"):
        assert count_parameters(get_recipe(f"{name}-wt103")) == attention
        assert count_parameters(family(name)(256, 6)) == count_parameters(family("llama")(256, 6))
    assert get_recipe("cosformer-wt103").layer_options("cosformer").max_length == 512


def test_1_plus_elu_knows_places_by_sinusoids_alone():
    model = build_model(family("elu1")(32, 2), seed=0)
    tokens = torch.randint(0, 256, (1, 9))
    swapped = tokens[:, [1, 0, *range(2, 9)]]
    assert not torch.allclose(model(tokens)[0][:, -1], model(swapped)[0][:, -1])


def test_values_have_widths_that_the_kernels_take_and_a_state_counts_without_the_filling():
    for heads, columns in ((3, 16), (2, 16), (24, 8)):
        [spec] = build("elu1", num_heads=heads).state_spec(2, 100).values()
        assert spec.shape == (2, heads, D // heads, columns) and spec.size == 2 * D * (D // heads + 1)
