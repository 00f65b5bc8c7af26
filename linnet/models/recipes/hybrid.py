"""Hybrids: layers of softmax attention among linear ones or convolutions. RMSNorm and SwiGLU.

- `gdn_hybrid`: three layers of Gated DeltaNet and one of gated attention, as Qwen3-Next and Qwen3.5 have them: norms of
  queries and keys, RoPE of a quarter of the channels, zero-centred norms of the model. Departure of the family and of
  its sizes: the widths of `gdn`, and heads of attention of d_model / num_heads. `qwen3.5-*` are the text models
  with their published widths, without vision and multi-token prediction.
- `lfm2`: gated short convolutions and attention (Liquid AI 2025, arXiv:2511.23404), in the published sizes. The family
  has attention in every third layer; the published models have more of it in the second half.
"""

from functools import partial
from typing import Any

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe

Options = dict[str, dict[str, Any]]
GATED = {"gate": "channel", "qk_norm": True, "qk_norm_kind": "zero_centred_rmsnorm"}


@register_family("gdn_hybrid")
def gdn_hybrid(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    heads = num_heads or default_heads(d_model)
    fraction = 0.25 if d_model // heads % 8 == 0 else 1.0
    options: Options = {
        "gdn": {"num_heads": heads, "norm_eps": 1e-6},  # as that of the model, for exports
        "attention": {"num_heads": heads, "rope_fraction": fraction, **GATED},
        "swiglu": {"inner": inner},
    }
    return _hybrid("gdn", 4, d_model, num_layers, vocab_size, options, norm="zero_centred_rmsnorm")


@register_family("lfm2")
def lfm2(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    options: Options = {
        "attention": {"num_heads": num_heads or default_heads(d_model), "qk_norm": True, "rope_base": 1e6},
        "swiglu": {"inner": inner},
    }
    return _hybrid("short_conv", 3, d_model, num_layers, vocab_size, options, norm_eps=1e-5)


def _hybrid(
    mixer: str, every: int, d_model: int, num_layers: int, vocab_size: int, options: Options, **keys: Any
) -> ModelConfig:
    """Returns a model with attention in every so many layers, at least in the last one."""
    whole, rest = divmod(num_layers, every)
    parts = [f"({mixer}+swiglu x{every - 1} attention+swiglu) x{whole}" if whole else "attention+swiglu"]
    if left := rest if whole else rest - 1:
        parts.insert(1 if whole else 0, f"{mixer}+swiglu x{left}")
    return ModelConfig(
        d_model=d_model,
        layout=" ".join(parts),
        vocab_size=vocab_size,
        options={name: given for name, given in options.items() if name in " ".join(parts)},
        **keys,
    )


def qwen3_5(
    d_model: int, num_layers: int, heads: tuple[int, int], value_heads: int, inner: int, tied: bool
) -> ModelConfig:
    """Returns a text model of Qwen3.5; `heads` are those of queries and of keys in attention."""
    attention = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 256, "rope_fraction": 0.25, **GATED}
    gdn = {"num_heads": 16, "num_v_heads": value_heads, "head_dim": 128, "expand_v": 1.0, "norm_eps": 1e-6}
    return ModelConfig(
        d_model=d_model,
        layout=f"(gdn+swiglu x3 attention+swiglu) x{num_layers // 4}",
        vocab_size=248_320,
        options={"attention": {"rope_base": 1e7, **attention}, "gdn": gdn, "swiglu": {"inner": inner}},
        norm="zero_centred_rmsnorm",
        norm_eps=1e-6,
        tie_embeddings=tied,
    )


def _published_lfm2(d_model: int, num_heads: int, inner: int) -> ModelConfig:
    attention = {"num_heads": num_heads, "num_kv_heads": 8, "qk_norm": True, "rope_base": 1e6}
    return ModelConfig(
        d_model=d_model,
        layout="(short_conv+swiglu x2 attention+swiglu) x3 (short_conv+swiglu attention+swiglu) x3 short_conv+swiglu",
        vocab_size=65_536,
        options={"attention": attention, "swiglu": {"inner": inner}},
        norm_eps=1e-5,
    )


register_recipe("gdn_hybrid-10m", lambda: gdn_hybrid(256, 8))
for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    register_recipe(f"gdn_hybrid-{size}", partial(gdn_hybrid, width, layers, heads, glu, vocab_size=PAPER_VOCAB))
register_recipe("qwen3.5-0.8b", lambda: qwen3_5(1024, 24, (8, 2), 16, 3584, tied=True))
register_recipe("qwen3.5-27b", lambda: qwen3_5(5120, 64, (24, 4), 48, 17_408, tied=False))
register_recipe("lfm2-10m", lambda: lfm2(256, 9))
for size, shape in {"350m": (1024, 16, 4608), "700m": (1536, 24, 6912), "1.2b": (2048, 32, 8192)}.items():
    register_recipe(f"lfm2-{size}", partial(_published_lfm2, *shape))
