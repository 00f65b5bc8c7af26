"""Mamba as transformers and flash-linear-attention save it, one layout with two sets of names in config.json; Jamba."""

from collections.abc import Callable
from dataclasses import replace

from linnet.hf.layouts import hybrids
from linnet.hf.layouts.base import Plan, Settings
from linnet.hf.layouts.family import (
    Entry,
    Family,
    Kind,
    Layers,
    Values,
    always,
    below,
    counted,
    ends,
    keys,
    one_kind,
    only,
    table,
)
from linnet.hf.layouts.hybrids import FULL, LINEAR, PLAIN

MIXER = table("in_proj:in_proj+gate_proj conv1d:conv A_log D:skip x_proj:select_proj out_proj")
MIXER |= table("dt_proj.weight:dt_weight dt_proj.bias:dt_bias")


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
        *(hybrids.optional("time_step_rank", "mamba.dt_rank", "auto"), Entry(inner), *KEYS),
    ),
    one_kind("mamba", 32),
    {"mamba": Kind("mamba", table("norm:mixer_norm") | below("mixer", "mixer", MIXER))},
    ends("backbone.embeddings", "backbone.norm_f"),
    "backbone.layers.{}",
)
FLA = replace(
    MAMBA,
    entries=(
        *keys("hidden_size:d_model=2048 vocab_size:vocab_size=32000 norm_eps:norm_eps=1e-5"),
        *(hybrids.optional("dt_rank", "mamba.dt_rank", "auto"), Entry(inner), *KEYS),
    ),
    layers=one_kind("mamba", 48),
)


def read(settings: Settings) -> Plan:
    native = "time_step_rank" in settings.values or "layer_norm_epsilon" in settings.values  # the names of transformers
    return (MAMBA if native else FLA).read(settings)


def periodic(name: str, period: int, offset: int) -> Callable[[Settings, int], list[bool]]:
    """Returns which blocks are every so many ones, from an offset on; with the defaults of the two keys."""

    def read(settings: Settings, layers: int) -> list[bool]:
        step, start = settings.integer(f"{name}_period", period), settings.values.get(f"{name}_offset", offset)
        if type(start) is not int or not 0 <= start < step:
            problem = f"{name}_offset: must be a whole number from 0 on, below {name}_period {step} (given {start!r})"
            settings.problems.append(problem)
        return [index % step == start for index in range(layers)]

    return read


def written_periodic(name: str, chosen: list[bool]) -> Values:
    """Returns the keys of blocks that are every so many; of others, keys that are read as another model."""
    places = [index for index, has in enumerate(chosen) if has] or [len(chosen)]
    step = places[1] - places[0] if len(places) > 1 else len(chosen) + 1
    return {f"{name}_period": step, f"{name}_offset": places[0] % step}


def blocks_of_jamba(settings: Settings) -> list[str]:
    attention = periodic("attn_layer", 8, 4)(settings, counted(32)(settings))
    return [FULL if has else LINEAR for has in attention]


def written_blocks_of_jamba(kinds: list[str]) -> Values:
    return {"num_hidden_layers": len(kinds)} | written_periodic("attn_layer", [kind == FULL for kind in kinds])


def sparse_of_jamba(settings: Settings, layers: int) -> list[bool]:
    several = hybrids.count_experts(settings, "num_experts", 16) > 1
    return [has and several for has in periodic("expert_layer", 2, 1)(settings, layers)]


JAMBA_MIXER = MIXER | table("dt_layernorm:dt_norm b_layernorm:B_norm c_layernorm:C_norm")
JAMBA = Family(
    *("Jamba", "jamba", "JambaForCausalLM"),
    (
        *keys("hidden_size:d_model=4096 vocab_size:vocab_size=65536 intermediate_size:swiglu.inner+moe.inner=14336"),
        *keys("rms_norm_eps:norm_eps=1e-6 num_experts_per_tok:moe.num_active=2 mamba_d_state:mamba.state=16"),
        *keys("mamba_d_conv:mamba.conv_width=4 mamba_expand:mamba.expand=2 mamba_conv_bias:mamba.conv_bias=true"),
        *(
            hybrids.optional("mamba_dt_rank", "mamba.dt_rank", "auto"),
            *hybrids.heads(32, 8),
            hybrids.experts("num_experts", 16),
            *PLAIN,
        ),
        only("mamba_proj_bias", False, why="Linnet's Mamba has no biases in its projections"),
        always(attention__rope=False, mamba__norms=True, moe__normalise=False),
    ),
    hybrids.some_sparse(
        Layers(blocks_of_jamba, written_blocks_of_jamba),
        *(sparse_of_jamba, lambda sparse: written_periodic("expert_layer", sparse)),
    ),
    hybrids.with_experts(
        {
            LINEAR: Kind("mamba+swiglu", hybrids.FEED_FORWARD | below("mamba", "mixer", JAMBA_MIXER)),
            FULL: Kind("attention+swiglu", hybrids.FEED_FORWARD | below("self_attn", "mixer", hybrids.ATTENTION)),
        },
        below("feed_forward", "channel", table("router") | hybrids.OWN_EXPERTS),
    ),
    ends("model.embed_tokens", "model.final_layernorm"),
)
