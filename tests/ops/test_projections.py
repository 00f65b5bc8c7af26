"""Projections of one input: the gradient that their products sum is autograd's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from linnet.layers.base import Layer, layers_of
from linnet.models import build_model, family
from linnet.ops import projections
from linnet.train import recompute

FAMILIES = ("cosformer2", "gdn", "hgrn2", "kda", "lightnet", "llama", "mamba2", "rwkv7", "tnl")


@pytest.fixture
def summed(monkeypatch):
    """Lets layers sum on this device, for inputs of any size; returns the shapes of the weights that did."""
    shapes = []
    add = projections.Sum.add

    def note(self, dy, weight):
        shapes.append(tuple(weight.shape))
        add(self, dy, weight)

    monkeypatch.setattr(projections, "on_gpu", lambda x: True)
    monkeypatch.setattr(projections, "LEAST", 1)
    monkeypatch.setattr(projections.Sum, "add", note)
    return shapes


def gradients(model: nn.Module, autocast: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        nll, count = model.loss(tokens[:, :-1], tokens[:, 1:])
    (nll / count).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["none", "block"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name, mode, summed):
    expected_model = build_model(family(name)(64, 2, 0, 96, vocab_size=64)).double()
    model = copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    recompute.apply(model, mode)
    actual, expected = gradients(model), gradients(expected_model)
    assert actual.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-9, atol=1e-12, msg=key)
    assert len(summed) >= (0 if name == "rwkv7" else 4)  # every projection of rwkv7 has an input of its own


def test_every_projection_of_gated_deltanet_joins(summed):
    model = build_model(family("gdn")(64, 1, 0, 96, vocab_size=64))
    projections.prepare(layers_of(model))
    gradients(model)
    mixer, channel = model.backbone.blocks[0].mixer, model.backbone.blocks[0].channel
    inputs = [mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.beta_proj, mixer.decay_proj, mixer.gate_proj]
    inputs += [channel.gate_proj, channel.up_proj]
    assert sorted(summed) == sorted(tuple(linear.weight.shape) for linear in inputs)


def test_autocast_and_biases(summed):
    config = family("llama")(64, 2, 0, 96, vocab_size=64)
    expected_model = build_model(config.model_copy(update={"bias": "all"}))
    exact, model = copy.deepcopy(expected_model).double(), copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    actual, expected, exact = gradients(model, True), gradients(expected_model, True), gradients(exact)
    assert summed
    for key in exact:
        bound = 1.5 * (expected[key] - exact[key]).norm() + 1e-3 * exact[key].norm()
        assert (actual[key] - exact[key]).norm() <= bound, key
        assert actual[key].dtype == torch.float32


class Reader(Layer):
    """A layer that multiplies its input twice and also reads it as it is; one weight may be frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.out(self.first(x) * self.second(x)) + x.sin()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Reader()

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("frozen", [(), ("first.weight",), ("first.bias", "second.bias")])
def test_other_readers_of_the_input_and_frozen_weights(frozen, summed):
    expected_model = Model().double()
    for name in frozen:
        expected_model.layer.get_parameter(name).requires_grad_(False)
    model = copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    results = []
    for each in (model, expected_model):
        leaf = x.clone().requires_grad_()
        y = each(leaf.tanh())
        for _ in range(2):  # a graph that is kept gives its gradient twice
            y.square().sum().backward(retain_graph=True)
        results.append([leaf.grad, *(p.grad for p in each.layer.parameters() if p.requires_grad)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert len(summed) == 4


def test_inputs_that_stay_as_they_were(summed):
    """Without gradients, of an input without one, and in a transform, no product sums."""
    model = Model()
    projections.prepare(layers_of(model))
    x = torch.randn(2, 8)
    with torch.no_grad():
        model(x.requires_grad_())
    model(x.detach()).sum().backward()
    torch.func.grad(lambda x: model(x).sum())(x.detach())
    assert not summed
    linear = model.layer.first
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias))
    assert linear.forward.func.__self__.sum is None


def test_a_layer_that_fails_keeps_no_graph(summed):
    model = Model()
    projections.prepare(layers_of(model))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 7, requires_grad=True))
    assert model.layer.first.forward.func.__self__.sum is None


def test_on_a_cpu_nothing_changes(monkeypatch):
    monkeypatch.setattr(projections, "LEAST", 1)
    monkeypatch.setattr(projections.Sum, "add", lambda *_: pytest.fail("summed on a CPU"))
    model = Model()
    projections.prepare(layers_of(model))
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
