"""Merged projections: the same step, fewer products, the same weights by name."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from linnet.evaluate.likelihood import log_likelihoods
from linnet.inference import decoding
from linnet.inference.decoding import Glu, Part, defer_norms, merge_projections, serve_rows
from linnet.layers.base import LayerContext
from linnet.layers.channels.glu import SwiGLU, SwigluConfig
from linnet.layers.norm import SRMSNorm, ZeroCentredRMSNorm
from linnet.models import ModelConfig, build_model, family
from linnet.ops import matvec
from linnet.ops.activation import gated_activation
from linnet.ops.norm import rms_norm

OPTIONS = {"hyena_experts": {"num_experts": 4}, "moe": {"num_experts": 4}, "mh_hyena": {"num_heads": 4}}
# Products of a block before and after: what the mixer and the channel have of linear layers that are called.
COUNTS = {
    "tnl+sglu": (9, 5),  # [q k v gate_down] gate_up out, [gate up] down
    "hgrn2+swiglu": (7, 4),
    "cosformer2+sglu": (9, 5),
    "gla+swiglu": (10, 5),
    "attention+swiglu": (7, 4),
    "mamba": (4, 3),
    "hyena+moe": (5, 3),
}


def called(model) -> int:
    """Products of a step: linear layers that are called, those that share one counted once."""
    seen = set()
    handles = [
        module.register_forward_pre_hook(
            lambda m, _: seen.add(m.gate_proj._product if isinstance(m, Glu) else getattr(m, "_product", m))
        )
        for module in model.modules()
        if isinstance(module, (nn.Linear, Glu))
    ]
    model.step(torch.zeros(1, dtype=torch.int64), model.init_state(1, 4))
    for handle in handles:
        handle.remove()
    return len(seen)


@torch.no_grad()
@pytest.mark.parametrize("layout", [*COUNTS, "lightnet+sglu", "hgrn+glu", "mh_hyena+mlp", "hyena_experts+moe"])
def test_steps_and_forward_are_the_same(layout):
    used = {name: options for name, options in OPTIONS.items() if name in layout}
    model = build_model(ModelConfig(d_model=48, layout=layout, vocab_size=31, options=used), seed=1)
    other = build_model(model.config, seed=1)
    before = called(model)
    saved = merge_projections(model)
    assert called(model) == before - saved and saved > 0
    serve_rows(model)
    if layout in COUNTS:
        assert (before, before - saved) == COUNTS[layout]
    tokens = torch.randint(0, 31, (3, 9), generator=torch.Generator().manual_seed(0))
    states, expected_states = model.init_state(3, 9), other.init_state(3, 9)
    for t in range(9):
        logits, states = model.step(tokens[:, t], states)
        expected, expected_states = other.step(tokens[:, t], expected_states)
        torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(states, expected_states)
    torch.testing.assert_close(model(tokens)[0], other(tokens)[0])
    assert merge_projections(model) == 0  # there is nothing left to merge


def test_weights_keep_their_names_and_are_stored_once():
    model = build_model(family("tnl")(32, 2), seed=1)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge_projections(model)
    found = model.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].equal(tensor)
    parts = [module for module in model.modules() if isinstance(module, Part)]
    assert len(parts) == 2 * (4 + 2)
    for part in parts:
        assert part.weight.untyped_storage().data_ptr() == part._product.weight.untyped_storage().data_ptr()


def test_products_hold_no_activations_between_steps():
    model = build_model(family("tnl")(32, 1), seed=1)
    merge_projections(model)
    with torch.no_grad():
        model.step(torch.zeros(2, dtype=torch.int64), model.init_state(2, 1))
    products = {module._product for module in model.modules() if isinstance(module, Part)}
    assert products and all(product._x is None and not any(product._parts) for product in products)


def test_a_layer_read_twice_and_one_with_another_bias_stay_alone():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

        def step(self, tokens, states):
            x = torch.ones(1, 4)
            return self.a(x) + self.b(x) + self.b(2 * x) + self.c(x), states

        def init_state(self, *_):
            return {}

    model = Twice()
    expected = model.step(None, None)[0]
    assert merge_projections(model) == 0
    torch.testing.assert_close(model.step(None, None)[0], expected)


class Scaled(SwiGLU):
    """A unit that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


class Beside(nn.Module):
    """Reads what its unit reads, before the unit does."""

    def __init__(self, unit):
        super().__init__()
        self.own, self.unit = nn.Linear(8, 8, bias=False), unit

    def step(self, x, states):
        return self.own(x) + self.unit(x), states


@torch.no_grad()
@pytest.mark.parametrize(
    "kind, beside, scales, merged",
    [
        (SwiGLU, False, {}, True),
        (Scaled, False, {}, False),
        (SwiGLU, True, {}, False),
        (SwiGLU, False, {"gate_scale": 2.0}, False),
        (SwiGLU, False, {"out_scale": 2.0}, False),
    ],
)
def test_only_units_of_two_parts_are_computed_as_such(kind, beside, scales, merged):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            unit = kind(SwigluConfig(inner=16, **scales), LayerContext(d_model=8))
            self.layer = Beside(unit) if beside else unit

        def step(self, tokens, states):
            x = torch.linspace(-1, 1, 16).view(2, 8)
            return self.layer.step(x, states) if beside else (self.layer(x), states)

        def init_state(self, *_):
            return {}

    model = Model()
    expected = model.step(None, None)[0]
    assert merge_projections(model) == 1 + beside
    assert (type(model.layer.unit if beside else model.layer) is Glu) == merged
    torch.testing.assert_close(model.step(None, None)[0], expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("name", "least"), [("tnl", 4), ("gdn", 4), ("llama", 4), ("mamba2", 2), ("rwkv7", 0)])
@torch.no_grad()
def test_norms_are_left_to_the_products_that_alone_read_them(name, least):
    model = build_model(family(name)(256, 2), seed=1).to("cuda", torch.bfloat16)
    tokens = torch.arange(12, device="cuda")[:, None] % 31

    def step():
        states = model.init_state(1, 12, "cuda")
        return [model.step(token, states)[0] for token in tokens]

    expected = step()
    merge_projections(model)
    serve_rows(model)
    defer_norms(model)
    assert sum("forward" in norm.__dict__ for norm in model.modules() if isinstance(norm, SRMSNorm)) >= least
    for logits, before in zip(step(), expected, strict=True):
        assert (logits - before).float().norm() < 0.05 * before.float().norm()


@pytest.fixture
def kernels_on_a_cpu(monkeypatch):
    """The kernels of one row, in PyTorch."""

    def product(x, weight, bias, activation, norm, early):
        if norm is not None:
            h = x if norm.residual is None else norm.h.copy_(x + norm.residual)
            gates = {"gate": norm.gate, "gate_activation": norm.activation, "gate_first": norm.gate is not None}
            x = rms_norm(h, norm.gain, eps=norm.eps, **gates)
        y = F.linear(x, weight, bias)
        return y if activation is None else gated_activation(*y.chunk(2, -1), activation)

    for module in (matvec, decoding):
        monkeypatch.setattr(module, "serves", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr(matvec, "_has_kernel", lambda x, weight, bias: x.dtype == weight.dtype)
    monkeypatch.setattr(matvec, "_kernels", lambda: SimpleNamespace(matvec=product))


def deferred(model) -> set[str]:
    return {name.removeprefix("backbone.") for name, module in model.named_modules() if "forward" in module.__dict__}


MIXERS, CHANNELS = ({f"blocks.{block}.{kind}_norm" for block in (0, 1)} for kind in ("mixer", "channel"))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("tnl+sglu", MIXERS | CHANNELS | {"norm"}),
        ("gdn+swiglu", MIXERS | CHANNELS | {"norm"}),
        ("mamba2+swiglu", MIXERS | CHANNELS | {"norm"} | {f"blocks.{block}.mixer.norm" for block in (0, 1)}),
        ("tnl+moe", MIXERS | {"norm"}),  # experts read copies of the tokens that are routed to them
        ("rwkv7+swiglu", CHANNELS | {"norm"}),  # a token shift reads the norm
    ],
)
@torch.no_grad()
def test_norms_are_left_to_products_in_steps_alone(kernels_on_a_cpu, layout, expected):
    settings = {name: options for name, options in OPTIONS.items() if name in layout}
    config = ModelConfig(d_model=32, layout=f"{layout} x2", vocab_size=31, norm="rmsnorm", options=settings)
    model, other = build_model(config, seed=1), build_model(config, seed=1)
    merge_projections(model)
    serve_rows(model)
    defer_norms(model)
    assert deferred(model) == expected
    for served in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        states, expected_states = served.init_state(1, 8), other.init_state(1, 8)
        for token in torch.arange(8)[:, None] * 7 % 31:
            logits, states = served.step(token, states)
            plain, expected_states = other.step(token, expected_states)
            torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-5)
    requests = [([1, 2, 3], [4])]  # the features of one token, which the scorer cuts
    assert log_likelihoods(model, requests)[0].nats == pytest.approx(log_likelihoods(other, requests)[0].nats)


@pytest.mark.parametrize("later", [False, True])
@torch.no_grad()
def test_a_norm_that_a_later_token_reads_is_computed(kernels_on_a_cpu, later):
    class Model(nn.Module):
        config = SimpleNamespace(vocab_size=5)

        def __init__(self):
            super().__init__()
            self.embedding, self.norm, self.head = nn.Embedding(5, 4), SRMSNorm(4), nn.Linear(4, 5)

        def step(self, tokens, states):
            y = self.norm(self.embedding(tokens))
            before, states = states["0"]["x"], {"0": {"x": y if later else states["0"]["x"]}}
            return self.head(before if later else y), states

        def init_state(self, batch, *_):
            return {"0": {"x": torch.zeros(batch, 4)}}

    model = Model()
    serve_rows(model)
    defer_norms(model)
    assert deferred(model) == (set() if later else {"norm"})


def test_a_gain_of_1_and_w_follows_its_weight():
    model = nn.Sequential(ZeroCentredRMSNorm(4))
    serve_rows(model)
    with torch.no_grad():
        gain = model[0].gain()
        assert model[0].gain() is gain
        model.load_state_dict({"0.weight": torch.arange(4.0)})
        assert model[0].gain() is gain and gain.tolist() == [1, 2, 3, 4]  # a CUDA graph reads it there
        assert pickle.loads(pickle.dumps(model))[0].gain().equal(copy.deepcopy(model)[0].gain())
    model[0].gain().sum().backward()
    assert model[0].weight.grad.tolist() == [1, 1, 1, 1]
