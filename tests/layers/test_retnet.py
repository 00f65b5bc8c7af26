"""RetNet against the parallel form of its paper, in float64."""

import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError, parse
from linnet.layers import MIXERS, LayerContext
from linnet.models import ModelConfig, count_parameters, family, get_recipe

D, HEADS, T = 24, 2, 11


def test_the_layer_is_the_parallel_form_of_the_paper():
    torch.manual_seed(0)
    mixer = MIXERS["retnet"](
        parse(MIXERS["retnet"].Config, {"num_heads": HEADS, "norm_eps": 1e-12}), LayerContext(d_model=D)
    )
    mixer, x = mixer.double(), torch.randn(3, T, D, dtype=torch.float64)
    width, age = D // HEADS, torch.arange(T)[:, None] - torch.arange(T)
    angles = torch.arange(T)[:, None] * 10000.0 ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    turn = torch.polar(torch.ones_like(angles), angles)
    heads = []
    for h in range(HEADS):
        q, k = (proj(x)[..., h * width : (h + 1) * width] for proj in (mixer.q_proj, mixer.k_proj))
        q, k = (torch.complex(z[..., : width // 2], z[..., width // 2 :]) * turn for z in (q, k))
        v = mixer.v_proj(x)[..., 2 * h * width : 2 * (h + 1) * width]
        decay = torch.where(age >= 0, (1 - 2.0 ** (-5 - h)) ** age.clamp(min=0).double(), 0.0)
        scores = (q @ k.mH).real / width**0.5 * decay
        sums = scores.sum(-1, keepdim=True).abs().clamp(min=1.0)  # of the paper; the norm cancels the division
        assert sums.max() > 1.0
        heads.append(scores / sums @ v)
    o = F.group_norm(torch.cat(heads, -1).flatten(0, 1), HEADS, eps=1e-12).view(3, T, 2 * D)
    expected = mixer.out_proj(F.silu(mixer.gate_proj(x)) * o)
    torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-6, atol=1e-6)  # decays are kept in float32


def test_blocks_have_twelve_squares_of_the_width():
    for d_model, layers in ((64, 2), (256, 6)):
        total, _ = count_parameters(family("retnet")(d_model, layers))
        assert total == 12 * d_model**2 * layers + 256 * d_model + (2 * layers + 1) * d_model
    large = get_recipe("retnet-1b")
    assert large.options["retnet"]["num_heads"] == 1536 // 256


def test_slow_decays_of_many_heads_stay_below_one():
    mixer = MIXERS["retnet"](parse(MIXERS["retnet"].Config, {"num_heads": 32}), LayerContext(d_model=64))
    assert mixer.log_decay[-1].item() == pytest.approx(-(2.0**-36)) and (mixer.log_decay < 0).all()


@pytest.mark.parametrize(
    "options, problem", [({"num_heads": 8}, "num_heads: .*even"), ({"expand_v": 1.3}, "expand_v: 1.3 .*use 1 or 2")]
)
def test_heads_that_do_not_fit_are_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(ModelConfig, {"d_model": 24, "layout": "retnet", "options": {"retnet": options}})
