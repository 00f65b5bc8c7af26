"""Small models of every family, and hybrids, in Linnet's form."""

from linnet.models import FAMILIES, ModelConfig, family

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
        layout, options = HYBRIDS[name]
        return ModelConfig(d_model=32, layout=layout, options=options, vocab_size=vocab_size, init_std=0.2)
    values = family(name)(32, 3, num_heads=2, vocab_size=vocab_size).model_dump()
    return ModelConfig(**{**values, "init_std": 0.2})
