"""Mamba as transformers and flash-linear-attention save it, one layout with two sets of names in config.json."""

from dataclasses import replace

from linnet.hf.layouts.base import Plan, Settings
from linnet.hf.layouts.family import Entry, Family, Kind, Values, below, ends, keys, one_kind, only, table
from linnet.hf.layouts.hybrids import PLAIN, optional

MAMBA1 = table("in_proj:in_proj+gate_proj conv1d:conv A_log D:skip x_proj:select_proj out_proj")
MAMBA1 |= table("dt_proj.weight:dt_weight dt_proj.bias:dt_bias")


def inner(settings: Settings) -> Values:
    wide = settings.integer("expand", 2, largest=64) * settings.integer("hidden_size", 768)
    settings.only("intermediate_size", wide, why="Linnet's Mamba has the inner width expand * width")
    return {}


KEYS = (
    *keys("expand:mamba.expand=2 state_size:mamba.state=16 conv_kernel:mamba.conv_width=4"),
    *keys("use_conv_bias:mamba.conv_bias=true"),
    only("use_bias", False, why="Linnet's Mamba has no biases in its projections"),
    *PLAIN,
)
MAMBA = Family(
    *("Mamba", "mamba", "MambaForCausalLM"),
    (
        *keys("hidden_size:d_model=768 vocab_size:vocab_size=50280 layer_norm_epsilon:norm_eps=1e-5"),
        *(optional("time_step_rank", "mamba.dt_rank", "auto"), Entry(inner), *KEYS),
    ),
    one_kind("mamba", 32),
    {"mamba": Kind("mamba", table("norm:mixer_norm") | below("mixer", "mixer", MAMBA1))},
    ends("backbone.embeddings", "backbone.norm_f"),
    "backbone.layers.{}",
)
FLA = replace(
    MAMBA,
    entries=(
        *keys("hidden_size:d_model=2048 vocab_size:vocab_size=32000 norm_eps:norm_eps=1e-5"),
        *(optional("dt_rank", "mamba.dt_rank", "auto"), Entry(inner), *KEYS),
    ),
    layers=one_kind("mamba", 48),
)


def read(settings: Settings) -> Plan:
    native = "time_step_rank" in settings.values or "layer_norm_epsilon" in settings.values  # the names of transformers
    return (MAMBA if native else FLA).read(settings)
