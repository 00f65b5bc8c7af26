"""RWKV-7 (Peng et al. 2025, arXiv:2503.14456): LayerNorm with a bias, one more after the embedding, heads of 64.

The sizes of the house are tied and have the widths and depths of other models here. `rwkv7-world-*` are the published
models, with their 65,536 tokens and a head of its own. The embedding starts as every embedding here does.
"""

from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe

WORLD = {"0.1b": (12, 768), "0.4b": (24, 1024), "1.5b": (24, 2048), "2.9b": (32, 2560)}  # layers, width


@register_family("rwkv7")
def rwkv7(
    d_model: int,
    num_layers: int,
    num_heads: int = 0,
    inner: int = 0,
    vocab_size: int = 256,
    tie_embeddings: bool = True,
    gate_rank: int = 0,
) -> ModelConfig:
    """`inner` is unused: it is the width of three matrices, and the channel mixer has two, of four times the width."""
    heads = num_heads or (d_model // 64 if d_model % 64 == 0 else default_heads(d_model))
    return ModelConfig(
        d_model=d_model,
        layout=f"rwkv7+rwkv x{num_layers}",
        vocab_size=vocab_size,
        options={"rwkv7": {"num_heads": heads, "gate_rank": gate_rank}},
        norm="layernorm",
        embedding_norm=True,
        tie_embeddings=tie_embeddings,
    )


register_recipe("rwkv7-10m", lambda: rwkv7(256, 6))
for size, (layers, width, _, _) in PAPER_SIZES.items():
    register_recipe(f"rwkv7-{size}", partial(rwkv7, width, layers, vocab_size=PAPER_VOCAB))
for size, (layers, width) in WORLD.items():
    world = {"vocab_size": 65_536, "tie_embeddings": False, "gate_rank": 128 if size == "0.4b" else 0}
    register_recipe(f"rwkv7-world-{size}", partial(rwkv7, width, layers, **world))
