"""Norms, positions, slopes and channel mixers against their definitions."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from linnet.config import ConfigError
from linnet.layers import CHANNELS, MIXERS, LayerContext, load_plugin, short_convolution_spec
from linnet.layers.base import find_mixer
from linnet.layers.lower_bound import LowerBounds, forget_gate
from linnet.layers.mixers.diagonal.tpe import Tpe, TpeConfig
from linnet.layers.mixers.linear.tnl import TnlConfig, alibi_slopes, decay_rates
from linnet.layers.norm import build_norm
from linnet.layers.positions import Lrpe, Rope, token_positions
from linnet.ops import short_convolution


def test_srmsnorm_is_x_over_its_root_mean_square():
    x = torch.randn(3, 5, dtype=torch.float64)
    expected = x / (x.norm(dim=-1, keepdim=True) / math.sqrt(5))
    torch.testing.assert_close(build_norm("srmsnorm", 5)(x), expected, rtol=1e-5, atol=1e-6)
    assert not list(build_norm("srmsnorm", 5).parameters())
    with pytest.raises(ValueError, match="rmsnorm"):
        build_norm("groupnorm", 5)


@pytest.mark.parametrize("form", ["complex", "real"])
def test_lrpe_depends_on_the_difference_of_positions_alone(form):
    lrpe = Lrpe(2, 6, form).double()
    q, k = torch.randn(2, 1, 1, 2, 6, dtype=torch.float64)
    products = [
        (lrpe(q, torch.tensor([[t]])) * lrpe(k, torch.tensor([[s]]))).sum(-1) for t, s in [(3, 1), (12, 10), (2, 0)]
    ]
    torch.testing.assert_close(products[0], products[1])
    torch.testing.assert_close(products[0], products[2])
    if form == "complex":
        torch.testing.assert_close(products[0][0, 0], (q * k * torch.cos(2 * lrpe.theta)).sum(-1)[0, 0])


def test_lrpe_starts_with_one_geometric_series_over_the_model_width():
    theta = Lrpe(2, 4).theta.flatten()
    torch.testing.assert_close(theta, 10000.0 ** (-2 * torch.arange(8.0) / 8))
    assert Lrpe(2, 4, shared_heads=True).theta.shape == (1, 4)


def test_rope_is_the_usual_rotation():
    rope = Rope(4)
    torch.testing.assert_close(rope.theta, torch.tensor([[1.0, 0.01]]))
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    expected = torch.tensor([math.cos(2.0), 0.0, math.sin(2.0), 0.0])
    torch.testing.assert_close(rope(x, torch.tensor([[2]])).flatten(), expected)
    with pytest.raises(ValueError, match="even"):
        Rope(3)


@pytest.mark.parametrize("head_dim, fraction", [(24, 0.65), (96, 0.33), (22, 0.9), (64, 0.3), (12, 0.1)])
def test_the_share_that_a_refused_one_is_told_to_use_is_taken(head_dim, fraction):
    with pytest.raises(ValueError, match="rope_fraction") as error:
        Rope(head_dim, fraction=fraction)
    assert Rope(head_dim, fraction=float(re.search(r"use ([\d.]+)", str(error.value))[1])).width % 2 == 0


def test_far_positions_stay_apart_in_half_precision():
    lrpe = Lrpe(1, 4)
    x = torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)
    turned = lrpe(x, torch.tensor([[100_000, 100_001]]))
    assert not torch.equal(turned[:, 0], turned[:, 1])


def test_positions_restart_at_documents_and_go_on_after_a_state():
    x = torch.zeros(1, 5, 1)
    assert token_positions(x, cu_seqlens=torch.tensor([0, 2, 2, 5])).tolist() == [[0, 1, 0, 1, 2]]
    starts = torch.tensor([10, 99, 7])
    assert token_positions(x, starts, torch.tensor([0, 2, 2, 5])).tolist() == [[10, 11, 7, 8, 9]]
    assert token_positions(torch.zeros(2, 2, 1), torch.tensor([4, 0])).tolist() == [[4, 5], [0, 1]]


def test_tpe_filters_each_channel_and_decodes():
    tpe = Tpe(TpeConfig(num_modes=5, max_time_constant=20), LayerContext(3)).double()
    x = torch.randn(2, 11, 3, dtype=torch.float64)
    kernel = (tpe.weight * (-tpe.log_rate.exp()[None] * torch.arange(11.0)[:, None, None]).exp()).sum(-1)  # [T, D]
    expected = torch.stack([(kernel[: t + 1].flip(0) * x[:, : t + 1]).sum(1) for t in range(11)], 1)
    y, none = tpe(x)
    torch.testing.assert_close(y, expected)
    assert none is None
    state, steps = {"modes": torch.zeros(2, 3, 5, dtype=torch.float64)}, []
    with torch.no_grad():
        for t in range(11):
            out, state = tpe.step(x[:, t], state)
            steps.append(out)
    torch.testing.assert_close(torch.stack(steps, 1), y)
    residual = Tpe(TpeConfig(num_modes=5, max_time_constant=20, residual=True), LayerContext(3)).double()
    residual.load_state_dict(tpe.state_dict())
    torch.testing.assert_close(residual(x)[0], x + y)


def test_tpe_has_128_numbers_a_channel_either_way():
    for config in (TpeConfig(), TpeConfig(num_modes=128, decay="fixed")):
        assert sum(p.numel() for p in Tpe(config, LayerContext(10)).parameters()) == 1280


def test_alibi_slopes_of_powers_of_two_and_others():
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


def test_decays_slow_down_with_depth():
    config = TnlConfig(num_heads=8)
    first, last, only = (decay_rates(config, *place) for place in [(0, 6), (5, 6), (0, 1)])
    assert first.dtype == np.float32 and first.tolist() == pytest.approx([s * 1.00001 for s in alibi_slopes(8)])
    assert last.tolist() == pytest.approx([s * 1e-5 for s in alibi_slopes(8)])
    assert np.isfinite(only).all()
    literal = decay_rates(TnlConfig(num_heads=4, slopes="paper_eq10"), 1, 4)
    assert literal.tolist() == pytest.approx([1.5, 3.0, 4.5, 6.0])
    spread = decay_rates(TnlConfig(num_heads=6, slopes="log_spaced", layer_factor=False), 3, 4)
    geometric = decay_rates(TnlConfig(num_heads=6, slopes="geometric"), 1, 3)
    assert geometric == pytest.approx([2 ** (-8 * h / 6) * (1 - 1 / 2.00001 + 1e-5) for h in range(1, 7)])
    assert spread[[0, 5]].tolist() == pytest.approx([1 / 2, 1 / 256])


def test_lower_bounds_start_linear_in_depth():
    bounds = LowerBounds(4, 3)
    for layer in range(4):
        for form in ("inclusive", "exclusive"):
            torch.testing.assert_close(bounds(layer, form), torch.full((3,), layer / 4))


def test_forget_gate_without_cancellation():
    z = torch.linspace(-60, 60, 41, dtype=torch.float64)
    beta = torch.full_like(z, 0.25)
    exact = 0.25 + 0.75 * torch.sigmoid(z)
    log_f, k = forget_gate(z.float(), beta.float())
    torch.testing.assert_close(log_f.double(), exact.log(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(k.double(), 0.75 * torch.sigmoid(-z), rtol=1e-5, atol=1e-30)
    log_f, _ = forget_gate(z.float(), None)
    torch.testing.assert_close(log_f.double(), torch.nn.functional.logsigmoid(z), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("name", ["glu", "sglu", "swiglu"])
def test_channel_mixers_are_gated_linear_units(name):
    channel = CHANNELS[name](CHANNELS[name].Config(inner=7), LayerContext(d_model=4))
    x = torch.randn(3, 5, 4)
    gate, up = x @ channel.gate_proj.weight.T, x @ channel.up_proj.weight.T
    activation = {"sglu": lambda z: z, "swiglu": torch.nn.functional.silu, "glu": torch.sigmoid}[name]
    torch.testing.assert_close(channel(x), (activation(gate) * up) @ channel.down_proj.weight.T)


def test_the_default_glu_width_is_eight_thirds_of_the_width():
    channel = CHANNELS["sglu"](CHANNELS["sglu"].Config(), LayerContext(d_model=768))
    assert channel.down_proj.in_features == 2048


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match="'hgrn2'"):
        find_mixer("hgnr2")


def test_plugins_say_what_is_wrong(tmp_path):
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "plain.py").write_text("class Mixed:\n    pass\n")
    cases = {
        "mixer.txt:M": "path/to/file.py:ClassName",
        f"{tmp_path}/none.py:M": "none.py",
        f"{tmp_path}/broken.py:M": "ModuleNotFoundError",
        f"{tmp_path}/plain.py:Mixd": "'Mixed'",
        f"{tmp_path}/plain.py:Mixed": "@register_mixer",
    }
    for spec, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            load_plugin(spec)
    file = Path(__file__).parents[2] / "examples" / "my_mixer.py"
    with pytest.raises(ConfigError, match="Nope.* MyMixer, MyMixerConfig$"):
        load_plugin(f"{file}:Nope")  # a class that the file imports does not count as its mixer


def test_kept_inputs_of_a_short_convolution_are_not_counted_as_state():
    spec = short_convolution_spec(3, channels=8, width=4)
    assert spec.shape == (3, 3, 8) and spec.size == 0 and spec.bytes == 3 * 3 * 8 * 4
    x, weight = torch.randn(3, 5, 8), torch.randn(8, 4)
    _, state = short_convolution(x, weight, initial_state=torch.zeros(spec.shape), output_final_state=True)
    assert state.shape == spec.shape
    for name in ("mamba", "hyena", "mh_hyena"):
        mixer = MIXERS[name](MIXERS[name].Config(), LayerContext(d_model=16))
        windows = [one for key, one in mixer.state_spec(1, 64).items() if key in ("conv", "q", "k", "v", "qkv")]
        assert windows and all(one.size == 0 for one in windows)


@pytest.mark.parametrize("width", [45, 62, 63, 66, 90, 100])
@pytest.mark.parametrize("name", ["attention", "retnet", "tnl", "gla", "gdn", "gated_delta_product", "kda"])
def test_the_number_of_heads_that_is_suggested_passes_every_check(name, width):
    """Head widths must be even for rotations, and keys and values have whole numbers of channels."""
    context, config = LayerContext(d_model=width), find_mixer(name).Config
    says = re.compile(r"num_heads: \d+ does not divide d_model \d+; (\d+) does(?:, but then (.*))?")
    for problem in config().check(context):
        if found := says.match(problem):
            left = config(num_heads=int(found[1])).check(context)
            assert left == ([found[2]] if found[2] else [])
            passing = [h for h in range(1, width + 1) if width % h == 0 and not config(num_heads=h).check(context)]
            assert bool(passing) == (not found[2])


def test_heads_of_an_odd_width_name_what_else_can_change():
    assert find_mixer("retnet").Config(num_heads=3).check(LayerContext(d_model=63)) == [
        "num_heads: RoPE needs an even head width, not 21; change num_heads or d_model"
    ]
