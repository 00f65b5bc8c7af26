"""Projections of one input: the gradient that their products sum is autograd's."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from linnet.layers import hyena
from linnet.layers.base import Layer, layers_of
from linnet.models import ModelConfig, build_model, family
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


def test_narrow_projections_of_mamba2_are_one_product(summed):
    model = build_model(family("mamba2")(64, 1, 0, 96, vocab_size=64))
    projections.prepare(layers_of(model))
    gradients(model)
    mixer = model.backbone.blocks[0].mixer
    narrow = sum(linear.out_features for linear in (mixer.dt_proj, mixer.C_proj, mixer.B_proj))
    assert sorted(summed) == sorted([tuple(x.weight.shape) for x in (mixer.gate_proj, mixer.in_proj)] + [(narrow, 64)])


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_gradients_of_float32_weights_on_a_gpu(name, monkeypatch):
    """Of products in bfloat16, not rounded to it: as near to those in float64 as PyTorch's or nearer."""
    monkeypatch.setattr(projections, "LEAST", 1)
    expected_model = build_model(family(name)(256, 2, 0, 512, vocab_size=64), device="cuda")
    exact, model = copy.deepcopy(expected_model).double(), copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    tokens = torch.randint(64, (2, 257), device="cuda")
    results = []
    for each in (model, expected_model, exact):
        with torch.autocast("cuda", torch.bfloat16, enabled=each is not exact):
            nll, count = each.loss(tokens[:, :-1], tokens[:, 1:])
        (nll / count).backward()
        results.append({name: p.grad for name, p in each.named_parameters()})
    actual, expected, exact = results
    for key in exact:
        bound = 1.5 * (expected[key] - exact[key]).norm() + 1e-3 * exact[key].norm()
        assert (actual[key] - exact[key]).norm() <= bound, key
    weight = model.backbone.blocks[0].mixer.gate_proj.weight if name == "mamba2" else None
    if weight is not None:
        assert weight.grad.dtype == torch.float32 and not torch.equal(weight.grad.bfloat16().float(), weight.grad)


class Reader(Layer):
    """A layer that multiplies its input twice and also reads it as it is; one weight may be frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.out(self.first(x) * self.second(x)) + x.sin()


class Model(nn.Module):
    def __init__(self, kind=Reader):
        super().__init__()
        self.layer = kind()

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
    assert not summed


class InPlace(Reader):
    def forward(self, x):
        x.mul_(2.0)
        return self.out(self.first(x) * self.second(x))


class Detached(Reader):
    def forward(self, x):
        first = self.first(x)
        return self.out(first * self.second(x.detach_()))


class Checkpointed(Reader):
    def forward(self, x):
        return self.out(checkpoint(lambda x: self.first(x) * self.second(x), x, use_reentrant=False))


class Transformed(Reader):
    def forward(self, x):
        scale = torch.func.grad(lambda scale: (self.first(x) * scale).sum())(torch.ones(4).to(x.dtype))
        return self.out(self.first(x) * self.second(x) * scale)


class Cast(Reader):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            first = self.first(x)
        return self.out(first * self.second(x))


class Hooked(Reader):
    def forward(self, x):
        first = self.first(x)
        x.register_hook(lambda gradient: 3.0 * gradient)
        return self.out(first * self.second(x))


class Watched(Reader):
    def forward(self, x):
        x.retain_grad()
        self.read = x
        return super().forward(x)


class Nested(Reader):
    def forward(self, x, inner=True):
        first = self.first(x)
        other = self(0.5 * x, inner=False) if inner else 0.0
        return self.out(first * self.second(x)) + other


class Outer(Layer):
    def __init__(self):
        super().__init__()
        self.inner, self.gate = Reader(), nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x) * self.gate(x)


def leaf_and_weights(model, x, call=lambda model, x: model(x)):
    """Returns the gradients of an input and of the weights."""
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    call(model, leaf.sin()).square().sum().backward()
    return [leaf.grad, *(p.grad for p in model.parameters())]


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))


def in_keyword(model, x):
    return model.layer(x=x)


def twice(model, x):
    return model(model(x))


def on_the_host(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def expanded(model, x):
    return model(x[:1].expand(3, 5, 8))


def turned(model, x):
    return model(x.transpose(0, 1))


def checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False)


CALLS = (in_keyword, twice, on_the_host, expanded, turned, checkpointed)
KINDS = (InPlace, Detached, Checkpointed, Transformed, Cast, Hooked, Watched, Nested, Outer)


@pytest.mark.parametrize("kind, call", [(Reader, call) for call in CALLS] + [(kind, None) for kind in KINDS])
def test_any_layer(kind, call, summed):
    """What a plugin may do with its input, and how a layer may be called."""
    expected_model = Model(kind) if kind is Cast else Model(kind).double()
    model = copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    x = X.to(next(model.parameters()).dtype)
    results = [leaf_and_weights(each, x, call or Model.__call__) for each in (model, expected_model)]
    torch.testing.assert_close(*results, rtol=1e-6 if kind is Cast else 1e-12, atol=1e-6 if kind is Cast else 1e-12)
    if kind is Watched:
        torch.testing.assert_close(model.layer.read.grad, expected_model.layer.read.grad)


def test_complex_inputs(summed):
    expected_model = Model().to(torch.complex128)
    model = copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))

    def magnitude(model, x):
        return model(torch.complex(x, x.cos())).abs()

    results = [leaf_and_weights(each, X.double(), magnitude) for each in (model, expected_model)]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_layers_inside_a_layer_join_its_sum(summed):
    model = Model(Outer)
    projections.prepare(layers_of(model))
    leaf_and_weights(model, X)
    assert sorted(summed) == [(4, 8), (4, 8), (8, 8)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_that_stops_early_leaves_nothing(fails, summed):
    """One of two weights alone, or one that a hook ends: the next backward of the graph starts anew."""
    expected_model = Model().double()
    model = copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    results = []
    for each in (model, expected_model):
        leaf = X.double().requires_grad_()
        loss = each(leaf.sin()).square().sum()
        if fails:
            hook = each.layer.first.weight.register_hook(lambda _: pytest.fail("a hook that fails"))
            with pytest.raises(pytest.fail.Exception):
                loss.backward(retain_graph=True)
            hook.remove()
            each.zero_grad()
            leaf.grad = None
        else:
            torch.autograd.grad(loss, each.layer.second.weight, retain_graph=True)
        loss.backward()
        results.append([leaf.grad, *(p.grad for p in each.parameters())])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_a_backward_under_autocast(summed):
    expected_model = Model()
    model = copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    results = []
    for each in (model, expected_model):
        leaf = X.clone().requires_grad_()
        loss = each(leaf).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


def test_a_class_that_is_changed_later_is_kept(summed):
    """As decoding and runs that train together do."""
    expected_model = Model()
    model = copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    for each in (model, expected_model):
        each.layer.first.__class__ = Doubled
    torch.testing.assert_close(model(X), expected_model(X))


def test_a_copy_has_its_own_weights(summed):
    model = Model()
    projections.prepare(layers_of(model))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert torch.equal(copies[0](X), model(X)) and torch.equal(copies[1](X), model(X))
    for each in copies:
        leaf_and_weights(each, X)
        with torch.no_grad():
            each.layer.first.weight.zero_()
        assert not torch.equal(each(X), model(X))
    assert len(summed) == 4


def test_a_prepared_projection_keeps_its_bias_in_the_convolution(monkeypatch):
    model = build_model(ModelConfig(d_model=32, layout="hyena+glu", vocab_size=64))
    offsets, convolve = [], hyena.short_convolution

    def note(*arguments, **options):
        offsets.append(options.get("offset"))
        return convolve(*arguments, **options)

    monkeypatch.setattr(hyena, "short_convolution", note)
    projections.prepare(layers_of(model))
    gradients(model)
    assert offsets and all(offset is not None for offset in offsets)


def test_on_a_cpu_nothing_changes(monkeypatch):
    monkeypatch.setattr(projections, "LEAST", 1)
    monkeypatch.setattr(projections.Sum, "add", lambda *_: pytest.fail("summed on a CPU"))
    model = Model()
    projections.prepare(layers_of(model))
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()


class Joined(Reader):
    def forward(self, x):
        first, second = projections.project(x, (self.first, self.second))
        return self.out(first * second) + x.sin()


def freeze(model):
    model.layer.second.weight.requires_grad_(False)


def drop_bias(model):
    model.layer.second.bias = None


def add_hook(model):
    model.layer.first.register_forward_hook(lambda linear, inputs, y: 2 * y)


def replace_class(model):
    model.layer.first.__class__ = Doubled


def drop_biases(model):
    model.layer.first.bias = model.layer.second.bias = None


@pytest.mark.parametrize(
    "change, products", [(None, 1), (drop_biases, 1), (freeze, 2), (drop_bias, 2), (add_hook, 2), (replace_class, 1)]
)
def test_joined_products(change, products, summed):
    """They are one where that gives what each layer gives; a layer of another class sums nothing."""
    expected_model = Model(Joined).double()
    model = copy.deepcopy(expected_model)
    projections.prepare(layers_of(model))
    for each in (model, expected_model):
        if change is not None:
            change(each)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    actual, expected = (leaf_and_weights(each, X.double()) for each in (model, expected_model))
    assert [x is None for x in actual] == [x is None for x in expected]
    for a, e in zip(actual, expected, strict=True):
        if e is not None:
            torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)
    assert len(summed) == products and len(frozen) == (change is freeze)
