"""Models on the delta rule, with one kind of mixer. All but RWKV-7 have RMSNorm, SwiGLU and tied embeddings.

- `delta_net`: Yang et al. 2024 (arXiv:2406.06484).
- `gdn`: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464). Its mixer has 6 d^2 weights, that of the
  Transformer 4 d^2, beside the same SwiGLU.
- `gated_delta_product`: Siems et al. 2025 (arXiv:2502.10297), with two micro-steps. Its mixer has 8.25 d^2 weights.
- `gdn2`: `kda` with erase and write gates per channel.
- `kda`: Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692) in every layer. Kimi Linear mixes three such layers and
  one of attention without positions; its experts and MLA are not here.
- `rwkv7`: RWKV-7 (Peng et al. 2025, arXiv:2503.14456), with LayerNorm with a bias, one more after the embedding, heads
  of 64 and its own channel mixer. The sizes of the house are tied and have the widths and depths of other models here.
  `rwkv7-world-*` are the published models, with their 65,536 tokens and a head of its own. The embedding starts as
  every embedding here does.
"""

from collections.abc import Callable
from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe

WORLD = {"0.1b": (12, 768), "0.4b": (24, 1024), "1.5b": (24, 2048), "2.9b": (32, 2560)}  # layers, width


def _family(mixer: str) -> Callable[..., ModelConfig]:
    @register_family(mixer)
    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
        return ModelConfig(
            d_model=d_model,
            layout=f"{mixer}+swiglu x{num_layers}",
            vocab_size=vocab_size,
            options={mixer: {"num_heads": num_heads or default_heads(d_model)}, "swiglu": {"inner": inner}},
            norm="rmsnorm",
            norm_eps=1e-5,  # as that of the norm in the mixer, for exports
        )

    register_recipe(f"{mixer}-10m", lambda: build(256, 6))
    return build


BUILDERS = {mixer: _family(mixer) for mixer in ("delta_net", "gdn", "kda", "gdn2", "gated_delta_product")}


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


for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    for mixer in ("gdn", "kda", "gdn2", "gated_delta_product"):
        register_recipe(f"{mixer}-{size}", partial(BUILDERS[mixer], width, layers, heads, glu, vocab_size=PAPER_VOCAB))
    register_recipe(f"rwkv7-{size}", partial(rwkv7, width, layers, vocab_size=PAPER_VOCAB))
register_recipe("rwkv7-10m", lambda: rwkv7(256, 6))
for size, (layers, width) in WORLD.items():
    world = {"vocab_size": 65_536, "tie_embeddings": False, "gate_rank": 128 if size == "0.4b" else 0}
    register_recipe(f"rwkv7-world-{size}", partial(rwkv7, width, layers, **world))
