"""RWKV-4 (Peng et al. 2023, arXiv:2305.13048): LayerNorm with a bias, one more after the embedding, no positions.

`rwkv4-wt103` has six layers of the published form: 46.22 M, where paper 001, Table 1, prints 46.23. The house sizes are
tied.
"""

from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, register_family, register_recipe
from linnet.models.recipes.wt103 import as_wt103


@register_family("rwkv4")
def rwkv4(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    """`num_heads` and `inner` are unused: RWKV-4 has no heads, and its channel mixer has four times the width."""
    return ModelConfig(
        d_model=d_model,
        layout=f"rwkv4+rwkv x{num_layers}",
        vocab_size=vocab_size,
        options={"rwkv": {"receptance": True}},
        norm="layernorm",
        embedding_norm=True,
    )


register_recipe("rwkv4-10m", lambda: rwkv4(256, 6))
register_recipe("rwkv4-wt103", lambda: as_wt103(rwkv4(512, 6)))
for size, (layers, width, _, _) in PAPER_SIZES.items():
    register_recipe(f"rwkv4-{size}", partial(rwkv4, width, layers, vocab_size=PAPER_VOCAB))
