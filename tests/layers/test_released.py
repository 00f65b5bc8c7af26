"""Options that released checkpoints need: epsilons of norms, a convolution with a bias, scaled RoPE."""

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.layers.norm import SRMSNorm
from linnet.layers.positions.rope import Rope, RopeScalingConfig
from linnet.layers.short_conv import ShortConv
from linnet.models import ModelConfig, build_model, family


def test_the_epsilon_of_the_model_reaches_its_norms_and_no_mixers_own():
    values = {**family("tnl")(16, 2, num_heads=2).model_dump(), "norm_eps": 1e-3}
    values["options"] = {"tnl": {"num_heads": 2, "norm_eps": 1e-2, "gate_input": "residual"}}
    model = build_model(parse(ModelConfig, values))
    found = {name: module.eps for name, module in model.named_modules() if isinstance(module, SRMSNorm)}
    assert len(found) == 7  # two a block, one inside each mixer, the final one
    assert all(eps == (1e-2 if "output.norm" in name else 1e-3) for name, eps in found.items())
    with pytest.raises(ConfigError, match="norm_eps"):
        parse(ModelConfig, {**values, "norm_eps": 0.0})


@pytest.mark.parametrize("name", ["hgrn2", "gla", "lightnet"])
def test_mixers_have_an_epsilon_of_their_own(name):
    config = family(name)(16, 1, num_heads=2).model_dump()
    config["options"] = {name: {"num_heads": 2, "norm_eps": 0.25}}
    mixer = build_model(parse(ModelConfig, config)).backbone.blocks[0].mixer
    assert [m.eps for m in mixer.modules() if isinstance(m, SRMSNorm)] == [0.25]


def test_a_convolution_with_a_bias_is_the_one_without_plus_the_bias():
    torch.manual_seed(0)
    plain, biased = ShortConv(5, 4).double(), ShortConv(5, 4, bias=True).double()
    with torch.no_grad():
        biased.weight.copy_(plain.weight)
        biased.bias.normal_()
    x, state = torch.randn(2, 7, 5).double(), torch.randn(2, 3, 5).double()
    torch.testing.assert_close(biased(x, state)[0], plain(x, state)[0] + biased.bias)
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    torch.testing.assert_close(biased(x[:1], None, offsets)[0], plain(x[:1], None, offsets)[0] + biased.bias)
    whole = biased(x, state.clone())[0]
    steps = [biased.step(x[:, t], state) for t in range(7)]
    torch.testing.assert_close(torch.stack(steps, 1), whole)


def test_scaled_frequencies():
    plain = Rope(64, 500_000.0).theta
    linear = Rope(64, 500_000.0, RopeScalingConfig(kind="linear", factor=4.0)).theta
    torch.testing.assert_close(linear, plain / 4)
    scaled = Rope(64, 500_000.0, RopeScalingConfig(kind="llama3", factor=8.0)).theta
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()
