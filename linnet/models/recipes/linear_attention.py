"""Linear attention with a denominator, SwiGLU and RMSNorm, tied: `elu1` with sinusoids, `cosformer` without positions.

Their models of WikiText-103 are in `linnet.models.recipes.wt103`.
"""

from typing import Any

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import default_heads, register_family, register_recipe


def _build(mixer: str, d_model: int, num_layers: int, num_heads: int, inner: int, **keys: Any) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"{mixer}+swiglu x{num_layers}",
        options={mixer: {"num_heads": num_heads or default_heads(d_model)}, "swiglu": {"inner": inner}},
        norm="rmsnorm",
        **keys,
    )


@register_family("elu1")
def elu1(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    places = {"positions": "sinusoidal", "embedding_scale": float(d_model) ** 0.5}
    return _build("elu1", d_model, num_layers, num_heads, inner, vocab_size=vocab_size, **places)


@register_family("cosformer")
def cosformer(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return _build("cosformer", d_model, num_layers, num_heads, inner, vocab_size=vocab_size)


register_recipe("elu1-10m", lambda: elu1(256, 6))
register_recipe("cosformer-10m", lambda: cosformer(256, 6))
