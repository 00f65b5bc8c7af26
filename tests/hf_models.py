"""Small models of every family, and hybrids, in Linnet's form."""

import functools
import re

from linnet.models import FAMILIES, ModelConfig, family, get_recipe

HEADS = {"num_heads": 2}
MODES = {"num_modes": 4, "max_time_constant": 32}
HYBRIDS = {
    "tnl-attention": ("tnl+sglu attention+swiglu x2", {"tnl": HEADS, "attention": HEADS}),
    "window": (
        "gla+swiglu attention+swiglu",
        {"gla": HEADS, "attention": {"num_heads": 4, "num_kv_heads": 2, "window": 5}},
    ),
    "mamba-attention": ("mamba x2 attention+swiglu", {"attention": HEADS}),
    "hyena-moe": ("hyena+moe attention+moe", {"hyena": MODES, "attention": HEADS, "moe": {"num_experts": 4}}),
    "parts": (
        "mla short_conv parallel+swiglu attention+swiglu",
        {
            "mla": {**HEADS, "kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "v_dim": 8},
            "parallel": {"mixers": {"attention": {**HEADS, "window": 5}, "gdn": HEADS}},
            "attention": {**HEADS, "qk_norm": True, "qk_norm_over": "width", "gate": "head", "rope_fraction": 0.5},
        },
        {"norm": "zero_centred_rmsnorm", "norm_after": ["attention"], "residual_scale": 0.5, "logit_scale": 2.0},
    ),
    "hyenas": (
        "mh_hyena+swiglu hyena_experts+swiglu",
        {
            "mh_hyena": {**HEADS, **MODES},
            "hyena_experts": {**MODES, "num_experts": 2, "expert_width": 8, "num_active": 1},
        },
    ),
}
ARCHITECTURES = (*sorted(FAMILIES), *HYBRIDS)


def small(name: str, vocab_size: int = 256) -> ModelConfig:
    """A model of a family or hybrid, 32 wide; its weights are large enough that tokens differ clearly."""
    if name in HYBRIDS:
        layout, options, *keys = HYBRIDS[name]
        sizes = {"d_model": 32, "vocab_size": vocab_size, "init_std": 0.2}
        return ModelConfig(layout=layout, options=options, **sizes, **(keys[0] if keys else {}))
    values = family(name)(32, 3, num_heads=2, vocab_size=vocab_size).model_dump()
    return ModelConfig(**{**values, "init_std": 0.2})


@functools.cache
def shrunk(name: str) -> ModelConfig:
    """A recipe with its own layout and options, 32 wide, with each group of layers at most twice."""
    config = get_recipe(name)
    narrow = {"num_heads": 2, "inner": 48, "max_time_constant": 32}
    small = {"num_kv_heads": 1, "num_v_heads": 4, "head_dim": 16}  # of options that are set
    options = {
        layer: {key: (narrow | (small if value else {})).get(key, value) for key, value in values.items()}
        for layer, values in config.options.items()
    }
    layout = re.sub(r"\bx(\d+)", lambda count: f"x{min(int(count[1]), 2)}", config.layout)
    changes = {"d_model": 32, "vocab_size": 61, "options": options, "layout": layout, "init_std": 0.2}
    return ModelConfig(**{**config.model_dump(), **changes})
