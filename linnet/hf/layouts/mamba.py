"""Mamba as transformers and flash-linear-attention save it: one layout, two sets of names in config.json."""

from dataclasses import replace

from linnet.hf.layouts.base import Plan, Settings
from linnet.hf.layouts.family import Entry, Family, Kind, Values, ends, keys, one_kind, only, table
from linnet.hf.layouts.hybrids import PLAIN

NAMES = (
    "norm:mixer_norm mixer.in_proj:mixer.in_proj+mixer.gate_proj mixer.conv1d:mixer.conv mixer.A_log mixer.D:mixer.skip"
)
NAMES += " mixer.x_proj:mixer.select_proj mixer.dt_proj.weight:mixer.dt_weight"
NAMES += " mixer.dt_proj.bias:mixer.dt_bias mixer.out_proj"


def rank(key: str) -> Entry:
    """Returns the entry of the rank of dt; "auto" is a sixteenth of the width."""

    def read(settings: Settings) -> Values:
        share = settings.values.get(key) in (None, "auto")
        return {"mamba.dt_rank": 0 if share else settings.integer(key, None)}

    return Entry(read, lambda values: {key: values["mamba.dt_rank"] or "auto"}, key, ("mamba.dt_rank",))


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
        *(rank("time_step_rank"), Entry(inner), *KEYS),
    ),
    one_kind("mamba", 32),
    {"mamba": Kind("mamba", table(NAMES))},
    ends("backbone.embeddings", "backbone.norm_f"),
    "backbone.layers.{}",
)
FLA = replace(
    MAMBA,
    entries=(
        *keys("hidden_size:d_model=2048 vocab_size:vocab_size=32000 norm_eps:norm_eps=1e-5"),
        *(rank("dt_rank"), Entry(inner), *KEYS),
    ),
    layers=one_kind("mamba", 48),
)


def read(settings: Settings) -> Plan:
    native = "time_step_rank" in settings.values or "layer_norm_epsilon" in settings.values  # the names of transformers
    return (MAMBA if native else FLA).read(settings)
