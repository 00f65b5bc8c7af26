"""Linear attention in blocks with a gated linear unit: RMSNorm, tied embeddings.

- `cosformer2` (paper 000, A.1.4): TPE after the embedding, LRPE in every layer, no decay, SGLU; 25 layers at 410M.
- `gla` (Yang et al. 2023, arXiv:2312.06635) in the skeleton of our Transformer, with SwiGLU.
- `lightnet` (paper 003): additive decay, LRPE in every layer, TPE after the embedding, SwiGLU. The 379M model of the
  paper has 25 layers, not the 26 of its Table 10: only 25 give its parameter count.
"""

from collections.abc import Callable
from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe
from linnet.models.recipes.wt103 import as_wt103

SIZES = {
    "150m": (768, 15, 6, 2048),
    "385m": (1024, 25, 8, 2816),
    "1b": (2048, 18, 16, 5632),
    "3b": (2560, 36, 20, 6912),
}


def _family(mixer: str, channel: str, before: str = "") -> Callable[..., ModelConfig]:
    @register_family(mixer)
    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
        return ModelConfig(
            d_model=d_model,
            layout=f"{before}{mixer}+{channel} x{num_layers}",
            vocab_size=vocab_size,
            options={mixer: {"num_heads": num_heads or default_heads(d_model)}, channel: {"inner": inner}},
            norm="rmsnorm",
        )

    register_recipe(f"{mixer}-10m", lambda: build(256, 6))
    return build


cosformer2 = _family("cosformer2", "sglu", "tpe ")
gla = _family("gla", "swiglu")
lightnet = _family("lightnet", "swiglu", "tpe ")

for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    depth = 25 if size == "410m" else layers
    register_recipe(f"cosformer2-{size}", partial(cosformer2, width, depth, heads, glu, vocab_size=PAPER_VOCAB))
for size, shape in SIZES.items():
    register_recipe(f"lightnet-{size}", partial(lightnet, *shape, vocab_size=50_272))
register_recipe("lightnet-wt103", lambda: as_wt103(lightnet(512, 6, 8, 1365)))
