"""GLA (Yang et al. 2023, arXiv:2312.06635) in the skeleton of our Transformer: RMSNorm, SwiGLU, tied."""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import default_heads, register_family, register_recipe


@register_family("gla")
def gla(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"gla+swiglu x{num_layers}",
        vocab_size=vocab_size,
        options={"gla": {"num_heads": num_heads or default_heads(d_model)}, "swiglu": {"inner": inner}},
        norm="rmsnorm",
    )


register_recipe("gla-10m", lambda: gla(256, 6))
