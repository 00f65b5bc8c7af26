"""LightNet (paper 003): additive decay, LRPE in every layer, TPE after the embedding, SwiGLU.

The 379M model of the paper has 25 layers, not the 26 of its Table 10: only 25 give its parameter count.
"""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import default_heads, register_family, register_recipe
from linnet.models.recipes.wt103 import as_wt103


@register_family("lightnet")
def lightnet(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"tpe lightnet+swiglu x{num_layers}",
        vocab_size=vocab_size,
        options={"lightnet": {"num_heads": num_heads or default_heads(d_model)}, "swiglu": {"inner": inner}},
        norm="rmsnorm",
    )


SIZES = {
    "150m": (768, 15, 6, 2048),
    "385m": (1024, 25, 8, 2816),
    "1b": (2048, 18, 16, 5632),
    "3b": (2560, 36, 20, 6912),
}
for size, shape in SIZES.items():
    register_recipe(f"lightnet-{size}", lambda a=shape: lightnet(*a, vocab_size=50_272))
register_recipe("lightnet-wt103", lambda: as_wt103(lightnet(512, 6, 8, 1365)))
register_recipe("lightnet-10m", lambda: lightnet(256, 6))
