"""Blocks of one mixer and no channel mixer, RMSNorm, tied. Two such blocks have about the parameters of one block of a
Transformer with a SwiGLU.

- `mamba`: Gu and Dao 2023 (arXiv:2312.00752).
- `mamba2`: Dao and Gu 2024 (arXiv:2405.21060), in its own sizes and in those of paper 000, two blocks for each layer
  there. The residual stream is float32 where training is mixed precision.
- `mamba3`: the mixer alone, with one input and one output per head.
"""

from collections.abc import Callable
from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, register_family, register_recipe

PUBLISHED = {"130m": (768, 24), "370m": (1024, 48), "780m": (1536, 48), "1.3b": (2048, 48), "2.7b": (2560, 64)}
PUBLISHED_VOCAB = 50_288  # GPT-NeoX, padded to a multiple of 16


def _family(mixer: str) -> Callable[..., ModelConfig]:
    @register_family(mixer)
    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
        """`num_heads` and `inner` are unused: the mixer's own width is its `expand`, and heads have a width."""
        return ModelConfig(
            d_model=d_model,
            layout=f"{mixer} x{num_layers}",
            vocab_size=vocab_size,
            norm="rmsnorm",
            norm_eps=None if mixer == "mamba" else 1e-5,  # as that of the norm in the mixer, for exports
        )

    register_recipe(f"{mixer}-10m", lambda: build(256, 12))
    return build


mamba, mamba2, mamba3 = (_family(mixer) for mixer in ("mamba", "mamba2", "mamba3"))


for size, shape in PUBLISHED.items():
    register_recipe(f"mamba2-{size}", partial(mamba2, *shape, vocab_size=PUBLISHED_VOCAB))
for size, (layers, width, *_) in PAPER_SIZES.items():
    register_recipe(f"mamba2-{size}", partial(mamba2, width, 2 * layers, vocab_size=PAPER_VOCAB))
