"""Hawk (De et al. 2024, arXiv:2402.19427): RG-LRU and a gated GELU layer of width 3 d in every block, RMSNorm, tied.

Griffin puts local attention in every third layer: `layout: (rglru+glu x2 attention+glu) x N` with a window of 1,024.
"""

from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe


@register_family("rglru")
def rglru(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"rglru+glu x{num_layers}",
        vocab_size=vocab_size,
        options={
            "rglru": {"num_heads": num_heads or default_heads(d_model)},
            "glu": {"inner": inner or 3 * d_model, "activation": "gelu"},
        },
        norm="rmsnorm",
    )


register_recipe("rglru-10m", lambda: rglru(256, 6))
for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    register_recipe(f"rglru-{size}", partial(rglru, width, layers, heads, glu, vocab_size=PAPER_VOCAB))
