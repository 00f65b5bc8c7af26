"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464): RMSNorm, SwiGLU, tied.

A mixer of 6 d^2 weights has more than one of the Transformer, whose blocks have 4 d^2 and the same SwiGLU.
"""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe


@register_family("gdn")
def gdn(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"gdn+swiglu x{num_layers}",
        vocab_size=vocab_size,
        options={"gdn": {"num_heads": num_heads or default_heads(d_model)}, "swiglu": {"inner": inner}},
        norm="rmsnorm",
    )


register_recipe("gdn-10m", lambda: gdn(256, 6))
for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    register_recipe(f"gdn-{size}", lambda a=(width, layers, heads, glu): gdn(*a, vocab_size=PAPER_VOCAB))
