"""Layers read by products of matrices are the layers that they were."""

import pytest
import torch
from torch import nn

from linnet.train.together import multiply

MODELS = 3


def both_ways(build, inputs, together):
    """Outputs and gradients of a layer before and after `multiply`, mapped over weights; `together`: of one input."""
    found = []
    for multiplied in (False, True):
        holder = nn.ModuleList([build()])
        if multiplied:
            multiply(holder)
            assert type(holder[0]) is not type(build())
        torch.manual_seed(0)
        state = {name: torch.randn(MODELS, *p.shape, requires_grad=True) for name, p in holder[0].named_parameters()}

        def one(state, x, layer=holder[0]):
            return torch.func.functional_call(layer, state, (x,))

        y = torch.vmap(one, (0, None if together else 0))(state, inputs)
        weights = torch.arange(y.numel()).view(y.shape) / y.numel()
        found.append([y, *torch.autograd.grad((y * weights).sum(), list(state.values()))])
    return found


@pytest.mark.parametrize("together", [True, False])
def test_embeddings(together):
    """With tokens that members share, and with their own."""
    tokens = torch.randint(7, (4, 8) if together else (MODELS, 4, 8))
    expected, actual = both_ways(lambda: nn.Embedding(7, 6), tokens, together)
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_biases(together, precision):
    x = torch.randn((4, 8, 8) if together else (MODELS, 4, 8, 8))
    with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
        expected, actual = both_ways(lambda: nn.Linear(8, 32), x, together)
    assert actual[0].dtype == precision
    tolerance = {"rtol": 2e-2, "atol": 4e-2} if precision == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, check_dtype=False, **tolerance)


def test_what_stays_as_it_is():
    kept = [nn.Embedding(1000, 2), nn.Embedding(7, 6, padding_idx=0), nn.Linear(8, 32, bias=False), nn.Linear(32, 32)]
    holder = nn.ModuleList([*kept, nn.Linear(8, 32)])
    multiply(holder, biases=False)
    assert [type(layer) for layer in holder[-1:]] == [nn.Linear]
    multiply(holder)
    assert [type(layer) for layer in kept] == [nn.Embedding, nn.Embedding, nn.Linear, nn.Linear]
    assert type(holder[-1]) is not nn.Linear
