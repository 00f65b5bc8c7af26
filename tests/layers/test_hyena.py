"""The three Hyena mixers: their equations by hand, states of the paper, experts, costs, many models at once."""

import math

import pytest
import torch
from torch.func import functional_call, stack_module_state
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from linnet.config import ConfigError, parse
from linnet.layers import MIXERS, LayerContext
from linnet.layers.routing import record_loads, route_tokens
from linnet.ops import use_backend

NAMES = ("hyena", "mh_hyena", "hyena_experts")


def build(name, d_model=24, seed=0, **options):
    torch.manual_seed(seed)
    if name == "mh_hyena":
        options.setdefault("num_heads", 3)
    return MIXERS[name](parse(MIXERS[name].Config, options), LayerContext(d_model=d_model)).double()


def inputs(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def short(projection, x):
    """conv1d over zeros and the projected tokens."""
    y = projection.linear(x).mT
    width, channels = projection.conv.width, projection.conv.channels
    y = F.conv1d(F.pad(y, (width - 1, 0)), projection.conv.weight[:, None], projection.conv.bias, groups=channels)
    return y.mT


def kernel(mixer, length):
    """h_t = h_0 [t = 0] + sum Re(R exp(-exp(a) + i theta)^t), [F, length]."""
    t = torch.arange(length, dtype=torch.float64)
    rate = torch.complex(-mixer.filter.log_rate.exp(), mixer.filter.theta)
    h = (torch.view_as_complex(mixer.filter.residue.detach())[..., None] * (rate[..., None] * t).exp()).sum(1).real
    h[:, 0] += mixer.filter.skip
    return h


def toeplitz(h):
    lag = torch.arange(h.shape[1])[:, None] - torch.arange(h.shape[1])
    return torch.where(lag >= 0, h[:, lag.clamp(min=0)], 0.0)


@torch.no_grad()
def test_hyena_is_its_equations():
    mixer, x = build("hyena"), inputs(2, 19, 24)
    q, k, v = (short(projection, x) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    y = q * torch.einsum("cts,bsc->btc", toeplitz(kernel(mixer, 19)), k * v)
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(y))


@torch.no_grad()
@pytest.mark.parametrize("part", ["linear", "conv"])
def test_hooks_and_layers_put_in_the_place_of_others_are_heard(part):
    mixer, x = build("hyena"), inputs(2, 19, 24)
    expected, calls = mixer(x)[0], []
    layer = getattr(mixer.q_proj, part)
    handle = layer.register_forward_hook(lambda *given: calls.append(given))
    torch.testing.assert_close(mixer(x)[0], expected)
    handle.remove()
    assert len(calls) == 1

    class Doubled(type(layer)):
        def forward(self, *arguments):
            y = super().forward(*arguments)
            return (2 * y[0], y[1]) if part == "conv" else 2 * y

    layer.__class__ = Doubled
    assert not torch.allclose(mixer(x)[0], expected)


@torch.no_grad()
def test_multi_head_hyena_is_attention_with_a_filter_for_a_decay():
    mixer, x = build("mh_hyena"), inputs(2, 19, 24)
    q, k, v = (short(projection, x).unflatten(-1, (3, 8)) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * toeplitz(kernel(mixer, 19))
    y = torch.einsum("bhts,bshd->bthd", scores, v).flatten(-2)
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(y))


@torch.no_grad()
def test_experts_are_small_hyenas_of_which_two_speak():
    mixer, x = build("hyena_experts", num_experts=4), inputs(2, 19, 24)
    q, k, v = (short(projection, x) for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    y = (q * torch.einsum("cts,bsc->btc", toeplitz(kernel(mixer, 19)), k * v)).unflatten(-1, (4, 6))
    logits = mixer.router(x)
    outside = logits.argsort(-1, descending=True)[..., 2:]
    weights = logits.scatter(-1, outside, -math.inf).softmax(-1)
    assert ((weights > 0).sum(-1) == 2).all()
    torch.testing.assert_close(mixer(x)[0], mixer.out_proj(torch.einsum("bte,btew->btw", weights, y)))


def test_an_expert_that_no_token_chose_has_no_gradient():
    mixer = build("hyena_experts", num_experts=4)
    x = inputs(1, 9, 24).abs()
    with torch.no_grad():
        mixer.router.weight.copy_(torch.tensor([-1.0, 1.0, 2.0, -2.0], dtype=torch.float64)[:, None].expand(4, 24))
    mixer(x)[0].sum().backward()
    used = mixer.filter.theta.grad.unflatten(0, (4, 6)).abs().sum((1, 2)) > 0
    assert used.tolist() == [False, True, True, False]
    with record_loads(mixer) as loads:
        mixer(x)
    torch.testing.assert_close(loads[""][0], torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64))


def test_a_step_reads_the_chosen_experts_only():
    mixer, x = build("hyena_experts", num_experts=4), inputs(1, 24)
    states = [mixer.init_state(1, 8, dtype=torch.float64) for _ in range(2)]
    silent = next(e for e in range(4) if e not in mixer.route(x).experts[0])
    states[1]["modes"][:, silent * 6 : (silent + 1) * 6] = math.nan
    with torch.no_grad():
        torch.testing.assert_close(mixer.step(x, states[1])[0], mixer.step(x, states[0])[0])


@pytest.mark.parametrize("name", NAMES)
def test_states_of_the_paper_are_2048_complex_numbers_a_layer(name):
    mixer = build(name, 128, **({"num_heads": 16} if name == "mh_hyena" else {}))
    spec = mixer.state_spec(1, 1000)
    assert sum(tensor.size for tensor in spec.values()) == 2048
    assert sum(tensor.bytes for tensor in spec.values()) == 2048 * 8 + 3 * 2 * 128 * 4


def test_time_constants_start_within_the_sequence():
    constants = build("hyena", 128, max_time_constant=64).filter.log_rate.neg().exp()
    assert 1 <= constants.min() < 1.2 and 55 < constants.max() <= 64


@pytest.mark.parametrize("name", NAMES)
def test_documents_carry_states(name):
    mixer, x = build(name), inputs(1, 30, 24)
    bounds = [0, 1, 14, 14, 30]
    offsets = torch.tensor(bounds, dtype=torch.int32)
    states = {key: inputs(*tensor.shape) for key, tensor in mixer.init_state(4, 30).items()}
    packed, after = mixer(x, states, offsets)
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        before = {key: value[i : i + 1] for key, value in states.items()}
        if start == end:
            last = before
        else:
            y, last = mixer(x[:, start:end], before)
            torch.testing.assert_close(packed[:, start:end], y)
        for key, value in last.items():
            torch.testing.assert_close(after[key][i : i + 1], value)


@pytest.mark.parametrize("length", [12, 300])
@pytest.mark.parametrize("name", NAMES)
def test_many_models_at_once_are_each_alone(name, length):
    members = [build(name, seed=seed) for seed in range(3)]
    x = inputs(3, 2, length, 24)
    parameters, buffers = stack_module_state(members)

    def run(parameters, buffers, x):
        return functional_call(members[0], (parameters, buffers), (x,))[0]

    together = torch.vmap(run)(parameters, buffers, x)
    together.sin().sum().backward()
    for i, member in enumerate(members):
        y = member(x[i])[0]
        torch.testing.assert_close(together[i], y)
        y.sin().sum().backward()
        for key, parameter in member.named_parameters():
            torch.testing.assert_close(parameters[key].grad[i], parameter.grad)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_with_states_compiles_in_one_graph(name):
    """One without is in the recipes' tests; the ops' tests trace through autograd too."""
    mixer, x = build(name), inputs(2, 20, 24)
    torch._dynamo.reset()
    compiled = torch.compile(mixer, backend="eager", fullgraph=True)
    state = mixer.init_state(2, 20, dtype=torch.float64)
    expected = mixer(x, state)
    actual = compiled(x, state)
    torch.testing.assert_close(actual, expected)


def test_flops_of_the_paper():
    """Appendix C.4 at L = 1024, D = 128, S = 16 modes (2 for heads): by hand, in units of L."""
    length, d = 1024, 128
    expected = {
        "hyena": 8 * d**2 + 18 * d + 16 * d + 100 * d + 4 * d,
        "mh_hyena": 8 * d**2 + 18 * d + 2 * 16 + (100 + 4) * d**2 / 16,
        "hyena_experts": 8 * d + 6 * d**2 + 18 * d + (16 + 100 + 4) * 32 + 2 * 16 * d,
    }
    for name, each in expected.items():
        mixer = build(name, d, **({"num_heads": 16} if name == "mh_hyena" else {}))
        assert mixer.flops_paper(length) == length * each


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_counted_without_memory(name):
    with torch.device("meta"):
        mixer = build(name, 128, **({"num_heads": 16} if name == "mh_hyena" else {})).float()
        x = torch.empty(1, 4096, 128)
    with FlopCounterMode(display=False) as counter:
        mixer(x)
    assert 0.3 < (counter.get_total_flops() + mixer.flops(4096)) / mixer.flops_paper(4096) < 6


def test_experts_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="num_active: 3 .*num_experts.* 2"):
        parse(MIXERS["hyena_experts"].Config, {"num_experts": 2, "num_active": 3})
    with pytest.raises(ValueError, match="expert_width"):
        build("hyena_experts", 4)


# The forms of the published implementation: implicit filters, tied projections, experts that all have weight.
IMPLICIT = {"filter": "implicit", "filter_width": 3, "filter_length": 19}


def implicit_kernel(filter, length):
    """h_t = (W_4 a_3)(t) exp(-|delta| t / (L - 1)) + skip [t = 0], position by position."""
    rows, longest = [], filter.positions.shape[0]
    first, last = math.log(0.01) / 1.5, math.log(0.01) / 0.3
    for t in range(length):
        a = filter.positions[t]
        for weight, bias in zip(filter.weights, filter.biases, strict=True):
            a = torch.sin(filter.frequency * (weight @ a + bias))
        count = len(filter.skip)
        delta = torch.tensor([abs(first + (last - first) * f / (count - 1)) for f in range(count)])
        h = (filter.output @ a) * torch.exp(-delta * t / (longest - 1))
        rows.append(h + filter.skip * (t == 0))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("length", [19, 8])
def test_implicit_hyena_is_its_equations(length):
    """Also with tied projections, where q, k and v are copies of one projection, in a row, before the convolution."""
    mixer, x = build("hyena", expand=2, proj_groups=4, **IMPLICIT), inputs(2, length, 24)
    assert mixer.qkv_proj.linear.weight.shape == (36, 24)
    p = torch.cat([mixer.qkv_proj.linear(x)] * 4, -1).mT
    conv = mixer.qkv_proj.conv
    q, k, v = F.conv1d(F.pad(p, (2, 0)), conv.weight[:, None], conv.bias, groups=144).mT.chunk(3, -1)
    h = implicit_kernel(mixer.filter, length)
    expected = mixer.out_proj(q * torch.einsum("cts,bsc->btc", toeplitz(h), k * v))
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(mixer(x)[0].square().sum(), list(mixer.filter.parameters()))
    for one, wanted in zip(
        found, torch.autograd.grad(expected.square().sum(), list(mixer.filter.parameters())), strict=True
    ):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-6)


def test_implicit_multi_head_hyena_is_its_equations():
    mixer, x = build("mh_hyena", **IMPLICIT), inputs(2, 19, 24)
    q, k, v = (short(part, x).unflatten(-1, (3, 8)) for part in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    h = toeplitz(implicit_kernel(mixer.filter, 19))
    z = torch.einsum("hts,bshd,bshe->bthde", h, k, v)
    expected = mixer.out_proj(torch.einsum("bthd,bthde->bthe", q, z).flatten(-2))
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-6, atol=1e-6)
    with use_backend("reference"):
        torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-6, atol=1e-6)


def test_an_implicit_filter_starts_at_the_published_positions():
    filter = build("hyena", **IMPLICIT).filter
    t = torch.arange(19, dtype=torch.float64)
    z = torch.exp(-1j * 1e-4 * 2 * math.pi * t / 19)
    expected = torch.stack([torch.linspace(0, 1, 19, dtype=torch.float64), z.real, z.imag], 1)
    torch.testing.assert_close(filter.positions.detach(), expected, rtol=0, atol=1e-7)
    assert filter.rates[0].item() == pytest.approx(3.0701, abs=1e-4) and filter.rates[-1].item() == pytest.approx(
        15.3506, abs=1e-4
    )


@pytest.mark.parametrize("name", NAMES)
def test_implicit_filters_have_no_next_token(name):
    mixer = build(name, **IMPLICIT)
    assert mixer.nominal_state and not build(name).nominal_state
    channels = mixer.conv_channels
    assert mixer.state_spec(1, 1)["modes"].size == channels * 3, "the nominal state is the width of the network"
    for call in (
        lambda: mixer.init_state(1, 8),
        lambda: mixer(inputs(1, 4, 24), {}),
        lambda: mixer.step(inputs(1, 24), {}),
    ):
        with pytest.raises(ValueError, match=f"{name}.filter: implicit .*modal"):
            call()
    with pytest.raises(ValueError, match="filter_length"):
        mixer(inputs(1, 20, 24))
    x, cu_seqlens = inputs(1, 38, 24), torch.tensor([0, 19, 38], dtype=torch.int32)
    alone = torch.cat([mixer(part)[0] for part in x.split(19, 1)], 1)
    torch.testing.assert_close(mixer(x, None, cu_seqlens)[0], alone, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=f"{name}.filter_length: 19 is less than a sequence of 20"):
        mixer(x, None, torch.tensor([0, 20, 38], dtype=torch.int32))
    context = LayerContext(d_model=24)
    assert "filter" in mixer.span_problems(mixer.config, context, 8, 2)[0]
    assert (
        "proj_groups"
        in parse(MIXERS[name].Config, {"proj_groups": 7} | ({"num_heads": 3} if name == "mh_hyena" else {})).check(
            context
        )[-1]
    )


def test_all_experts_have_weight_where_logits_outside_the_largest_are_zero():
    logits = torch.tensor([[0.5, -2.0, 3.0, 1.0], [-1.0, -2.0, -3.0, -4.0]], dtype=torch.float64)
    routing = route_tokens(logits, 2, "zero_logits")
    kept = torch.tensor([[0.0, 0.0, 3.0, 1.0], [-1.0, -2.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(routing.dense_weights(), kept.softmax(-1))
    torch.testing.assert_close(routing.load(), torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64))
    assert routing.dense_weights()[1].argmax() in (2, 3), "an expert outside the largest may weigh more"
