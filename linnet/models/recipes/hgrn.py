"""HGRN2 as papers 000 (A.1.3) and 002 train it, and HGRN v1."""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe


@register_family("hgrn2")
def hgrn2(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"hgrn2+sglu x{num_layers}",
        vocab_size=vocab_size,
        options={"hgrn2": {"num_heads": num_heads or default_heads(d_model)}, "sglu": {"inner": inner}},
        norm="srmsnorm",
    )


@register_family("hgrn")
def hgrn(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    """`num_heads` is unused: the recurrence is element-wise."""
    return ModelConfig(
        d_model=d_model,
        layout=f"hgrn+swiglu x{num_layers}",
        vocab_size=vocab_size,
        options={"swiglu": {"inner": inner}},
        norm="layernorm",
    )


for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    register_recipe(f"hgrn2-{size}", lambda a=(width, layers, heads, glu): hgrn2(*a, vocab_size=PAPER_VOCAB))
register_recipe("hgrn2-wt103", lambda: hgrn2(512, 6, 4, 1365, vocab_size=50_265))
register_recipe("hgrn2-10m", lambda: hgrn2(256, 6))
register_recipe("hgrn-wt103", lambda: hgrn(512, 6, inner=1024, vocab_size=50_265))
register_recipe("hgrn-10m", lambda: hgrn(256, 6))
