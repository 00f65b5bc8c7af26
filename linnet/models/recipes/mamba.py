"""Mamba (Gu and Dao 2023, arXiv:2312.00752): blocks of one mixer and no channel mixer, RMSNorm, tied.

Two such blocks have the parameters of one block of a Transformer with a SwiGLU.
"""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import register_family, register_recipe


@register_family("mamba")
def mamba(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    """`num_heads` and `inner` are unused: there are no heads, and the mixer's own width is its `expand`."""
    return ModelConfig(
        d_model=d_model,
        layout=f"mamba x{num_layers}",
        vocab_size=vocab_size,
        norm="rmsnorm",
    )


register_recipe("mamba-10m", lambda: mamba(256, 12))
