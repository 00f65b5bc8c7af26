"""RWKV-4: time and channel mixing against the equations, keys of any size, documents that continue a state."""

import pytest
import torch
from test_state_spaces import build as build_mixer
from test_state_spaces import compare, inputs

from linnet.config import parse
from linnet.layers import CHANNELS, LayerContext

D, T = 6, 19


def build(noise=0.5):
    return build_mixer("rwkv4", noise=noise)


def shifted(x):
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


def definition(mixer, x):
    """The sums of the paper, written out in pairs of tokens."""
    before = shifted(x)
    r, k, v = ((x + mu * (before - x)) for mu in (mixer.x_r, mixer.x_k, mixer.x_v))
    r, k, v = mixer.r_proj(r), mixer.k_proj(k), mixer.v_proj(v)
    outputs = []
    for t in range(x.shape[1]):
        age = torch.arange(t - 1, -1, -1, dtype=x.dtype)[:, None]
        weights = torch.cat([k[:, :t] - age * mixer.decay.exp(), k[:, t : t + 1] + mixer.bonus], 1).softmax(1)
        outputs.append((weights * v[:, : t + 1]).sum(1))
    return mixer.out_proj(r.sigmoid() * torch.stack(outputs, 1))


def test_time_mixing_is_the_mean_of_its_paper():
    mixer = build()
    compare(mixer, lambda x: definition(mixer, x))


@pytest.mark.parametrize("scale, shift", [(1000.0, 0.0), (1.0, -500.0), (1.0, 500.0), (30.0, 2000.0)])
def test_keys_of_any_size_neither_overflow_nor_vanish(scale, shift):
    mixer = build()
    with torch.no_grad():
        mixer.k_proj.weight *= scale
    mixer.k_proj.bias = torch.nn.Parameter(torch.full((D,), shift, dtype=torch.float64))
    x = inputs()
    expected = definition(mixer, x)
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-10, atol=1e-10)
    steps, state = [], mixer.init_state(2, T, dtype=torch.float64)
    with torch.no_grad():
        for t in range(T):
            y, state = mixer.step(x[:, t], state)
            steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), expected, rtol=1e-10, atol=1e-10)
    single = mixer.float()(x.float())[0]
    assert (single.double() - expected).abs().max() < 1e-3 * expected.abs().max()


def test_packed_documents_continue_states_of_their_own():
    mixer, x = build(), inputs()[:1]
    starts = mixer(inputs().flip(1)[:, :7], mixer.init_state(2, T, dtype=torch.float64))[1]
    starts = {name: torch.cat([y, torch.zeros_like(y[:1])]) for name, y in starts.items()}  # the last one is new
    bounds = [0, 4, 4, T]  # the second one gets no token
    y, after = mixer(x, starts, torch.tensor(bounds, dtype=torch.int32))
    for i, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = {name: s[i : i + 1] for name, s in starts.items()}
        if b > a:
            alone, state = mixer(x[:, a:b], state)
            torch.testing.assert_close(y[:, a:b], alone, rtol=1e-10, atol=1e-10)
        for name, s in state.items():
            torch.testing.assert_close(after[name][i : i + 1], s, rtol=1e-10, atol=1e-10)


def test_channel_mixing_has_the_gate_of_its_paper():
    torch.manual_seed(0)
    config = parse(CHANNELS["rwkv"].Config, {"receptance": True})
    mixer = CHANNELS["rwkv"](config, LayerContext(d_model=D)).double()
    assert (mixer.up_proj.out_features, mixer.r_proj.starts_zero) == (4 * D, True)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))

    def expected(x):
        delta = shifted(x) - x
        gate = mixer.r_proj(x + mixer.x_r * delta).sigmoid()
        return gate * mixer.down_proj(mixer.up_proj(x + mixer.x_k * delta).relu().square())

    compare(mixer, expected)


def test_decays_and_bonus_start_as_in_the_published_training():
    mixer = build(0)
    assert (mixer.decay[0].item(), mixer.decay[-1].item()) == (-5, 3)
    expected = 0.3 * torch.tensor([0.0, 0.5, -0.5]).double().exp()
    torch.testing.assert_close(mixer.bonus[:3].exp(), expected)
    torch.testing.assert_close(1 - mixer.x_k, torch.arange(D).double() / D)
    assert mixer.k_proj.starts_zero and mixer.r_proj.starts_zero and mixer.out_proj.starts_zero
