"""S4D and LRU against their papers' equations, token by token in complex numbers, and how they start."""

import math

import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError, parse
from linnet.layers import MIXERS, LayerContext
from linnet.models import ModelConfig, build_model

D, T = 6, 19


def build(name, options=None, noise=0.3, d_model=D):
    torch.manual_seed(0)
    mixer = MIXERS[name](parse(MIXERS[name].Config, options or {}), LayerContext(d_model=d_model)).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return mixer


def inputs():
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compare(mixer, expected):
    """Compares outputs and gradients with a function of the same inputs and parameters, to 1e-10."""
    found = []
    for run in (lambda x: mixer(x)[0], expected):
        x = inputs().requires_grad_()
        mixer.zero_grad()
        y = run(x)
        (y * torch.linspace(-1, 1, D, dtype=torch.float64)).sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in mixer.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("discretisation", ["zoh", "bilinear", "none"])
@pytest.mark.parametrize("output", ["glu", "linear"])
def test_s4d_is_the_diagonal_state_space_of_each_channel(discretisation, output):
    mixer = build("s4d", {"state": 8, "discretisation": discretisation, "output": output, "init": "inv"})

    def expected(x):
        A = torch.complex(-mixer.log_rate.exp(), mixer.frequency)
        dt = mixer.log_dt.exp()[:, None].to(A.dtype)
        C = torch.view_as_complex(mixer.weight)
        if discretisation == "bilinear":
            decay, B = (1 + dt * A / 2) / (1 - dt * A / 2), dt / (1 - dt * A / 2)
        else:
            decay = (dt * A).exp()
            B = (decay - 1) / A if discretisation == "zoh" else torch.ones_like(A)
        h, outputs = torch.zeros(2, *A.shape, dtype=A.dtype), []
        for t in range(T):
            h = decay * h + B * x[:, t, :, None]
            outputs.append(2 * (C * h).sum(-1).real + mixer.skip * x[:, t])
        y = mixer.out_proj(F.gelu(torch.stack(outputs, 1)))
        return y if output == "linear" else y[..., :D] * y[..., D:].sigmoid()

    compare(mixer, expected)


def test_s4d_starts_as_lin_or_inv_with_steps_in_their_range():
    lin, inv = (build("s4d", {"state": 8, "init": kind, "dt_min": 0.01, "dt_max": 0.02}, 0) for kind in ("lin", "inv"))
    torch.testing.assert_close(lin.frequency[0], math.pi * torch.arange(4.0).double())
    expected = torch.tensor([8 / math.pi * (8 / (2 * n + 1) - 1) for n in range(4)])
    torch.testing.assert_close(inv.frequency[3], expected.double())
    for mixer in (lin, inv):
        torch.testing.assert_close(mixer.log_rate.exp(), torch.full((D, 4), 0.5).double())
        assert ((mixer.log_dt.exp() > 0.0099) & (mixer.log_dt.exp() < 0.0201)).all()


def test_s4d_scales_small_steps_without_cancellation():
    """(lambda - 1) / A is Delta for Delta A near 0, in float32 too."""
    mixer = build("s4d", {"state": 2}, 0).float()
    with torch.no_grad():
        mixer.log_dt.fill_(math.log(1e-6))
        mixer.weight.copy_(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(mixer.filter().residue[..., 0], torch.full((D, 1), 2e-6), rtol=1e-5, atol=0)


def test_lru_is_the_complex_recurrence_of_its_paper():
    mixer = build("lru", {"state": 5, "r_min": 0.5, "r_max": 0.9})

    def expected(x):
        decay = torch.exp(torch.complex(-mixer.nu.exp(), mixer.theta.exp()))
        B = torch.view_as_complex(mixer.in_proj.weight.unflatten(0, (5, 2)).transpose(1, 2).contiguous())  # [N, D]
        pairs = mixer.out_proj.weight.unflatten(1, (5, 2))
        C = torch.complex(pairs[..., 0], -pairs[..., 1])  # y = Re(C h)
        h, outputs = torch.zeros(2, 5, dtype=B.dtype), []
        for t in range(T):
            h = decay * h + mixer.gamma.exp() * (x[:, t].to(B.dtype) @ B.T)
            outputs.append((h @ C.T).real + mixer.skip * x[:, t])
        return torch.stack(outputs, 1)

    compare(mixer, expected)


def test_lru_starts_on_a_ring_and_with_the_variance_of_its_inputs():
    mixer = build("lru", {"state": 4000, "r_min": 0.6, "r_max": 0.8, "max_phase": 0.5}, 0)
    size = (-mixer.nu.exp()).exp()
    assert 0.6 <= size.min() < 0.61 and 0.79 < size.max() <= 0.8
    # Uniform on the ring: the square of the radius is uniform.
    assert (size.square() < (0.6**2 + 0.8**2) / 2).double().mean().item() == pytest.approx(0.5, abs=0.03)
    assert 0 < mixer.theta.exp().min() and mixer.theta.exp().max() <= 0.5
    torch.testing.assert_close(mixer.gamma.exp().square(), 1 - size.square())


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("s4d", {"state": 7}, "state"),
        ("s4d", {"dt_min": 0.5}, "dt_min: 0.5"),
        ("s4d", {"dt_max": 0.0}, "dt_max"),
        ("lru", {"r_min": 0.9, "r_max": 0.8}, "r_min: 0.9"),
        ("lru", {"r_max": 1.5}, "r_max"),
    ],
)
def test_options_that_have_no_meaning_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_model(parse(ModelConfig, {"d_model": 8, "layout": name, "options": {name: options}}))
