"""The architectures that the papers' tables compare with: RMSNorm, SwiGLU and tied embeddings unless said.

- `retnet`: RetNet (Sun et al. 2023, arXiv:2307.08621), blocks of 12 d^2 weights, 8 in the mixer and 4 in a GELU layer
  of 2 d. Heads are 256 wide from d_model 512 on.
- `rglru`: Hawk (De et al. 2024, arXiv:2402.19427), with a gated GELU layer of width 3 d. Griffin puts local attention
  in every third layer: `layout: (rglru+glu x2 attention+glu) x N` with a window of 1,024.
- `elu1` (Katharopoulos et al. 2020) with sinusoids, and `cosformer` (Qin et al. 2022) without positions: linear
  attention with a denominator. Their models of WikiText-103 are in `linnet.models.recipes.registry`.
- `rwkv4`: RWKV-4 (Peng et al. 2023, arXiv:2305.13048), LayerNorm with a bias, one more after the embedding.
  `rwkv4-wt103` has six layers of the published form: 46.22 M, where paper 001, Table 1, prints 46.23.
- `s4d` (which includes DSS), `lru` and `tnn`: fixed linear filters. `tnn-wt103` is the model of TNN's script, to the
  digit (48.68 M): seven layers, three times the width in the mixer, and a GLU of the width of the model. `lru-wt103`
  (46.24 M) and `s4d-wt103` (DSS, 45.73 M) have GLU widths that follow from the printed totals of 001, Table 1, because
  no script of them is known; S4D has 64 real numbers of state per channel, as the DSS of that group has.
"""

from functools import partial
from typing import Any

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import (
    PAPER_SIZES,
    PAPER_VOCAB,
    as_wt103,
    default_heads,
    register_family,
    register_recipe,
    register_sizes,
    uniform_family,
)

# LLaMA: the softmax Transformer of paper 000 (A.1.1): pre-norm, RoPE, SwiGLU, no biases, tied embeddings.
#
# `transformer-385m` and `transformer-1b` are the Transformers of paper 001, Table 11, which does not say what they
# are: these have the width, depth, heads and GLU of the TNL beside them, and so fewer parameters (a TNL layer has a
# gate).
#
# Departure: RMSNorm. The paper's parameter counts suggest two LayerNorms per layer (`norm: layernorm`).


llama = uniform_family("attention", name="llama")
register_sizes("llama", llama)
register_recipe("transformer-385m", lambda: llama(1024, 24, 8, 2816, vocab_size=50_272))
register_recipe("transformer-1b", lambda: llama(2048, 16, 16, 5632, vocab_size=50_272))
register_recipe("llama-10m", lambda: llama(256, 6))


# Blocks of one mixer and no channel mixer, RMSNorm, tied. Two such blocks have about the parameters of one block of a
# Transformer with a SwiGLU.
#
# - `mamba`: Gu and Dao 2023 (arXiv:2312.00752).
# - `mamba2`: Dao and Gu 2024 (arXiv:2405.21060), in its own sizes and in those of paper 000, two blocks for each layer
#   there. The residual stream is float32 where training is mixed precision.
# - `mamba3`: the mixer alone, with one input and one output per head; in the sizes of paper 000 as `mamba2`.

PUBLISHED = {"130m": (768, 24), "370m": (1024, 48), "780m": (1536, 48), "1.3b": (2048, 48), "2.7b": (2560, 64)}
PUBLISHED_VOCAB = 50_288  # GPT-NeoX, padded to a multiple of 16


mamba = uniform_family("mamba", channel="", heads=False)
# The epsilon is that of the norm in the mixer, for exports.
mamba2, mamba3 = (uniform_family(mixer, channel="", heads=False, norm_eps=1e-5) for mixer in ("mamba2", "mamba3"))
for name, build in {"mamba": mamba, "mamba2": mamba2, "mamba3": mamba3}.items():
    register_recipe(f"{name}-10m", partial(build, 256, 12))
for size, shape in PUBLISHED.items():
    register_recipe(f"mamba2-{size}", partial(mamba2, *shape, vocab_size=PUBLISHED_VOCAB))
for size, (layers, width, *_) in PAPER_SIZES.items():
    for name, build in {"mamba2": mamba2, "mamba3": mamba3}.items():
        register_recipe(f"{name}-{size}", partial(build, width, 2 * layers, vocab_size=PAPER_VOCAB))


# Hybrids: layers of softmax attention among linear ones or convolutions. RMSNorm and SwiGLU.
#
# - `gdn_hybrid`: three layers of Gated DeltaNet and one of gated attention, as Qwen3-Next and Qwen3.5 have them:
#   norms of queries and keys, RoPE of a quarter of the channels, zero-centred norms of the model. Departure of the
#   family and of its sizes: the widths of `gdn`, and heads of attention of d_model / num_heads. `qwen3.5-*` are the
#   text models with their published widths, without vision and multi-token prediction.
# - `lfm2`: gated short convolutions and attention (Liquid AI 2025, arXiv:2511.23404), in the published sizes. The
#   family has attention in every third layer; the published models have more of it in the second half.

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
        options={name: fields for name, fields in options.items() if name in " ".join(parts)},
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
register_sizes("gdn_hybrid", gdn_hybrid)
register_recipe("qwen3.5-0.8b", lambda: qwen3_5(1024, 24, (8, 2), 16, 3584, tied=True))
register_recipe("qwen3.5-27b", lambda: qwen3_5(5120, 64, (24, 4), 48, 17_408, tied=False))
register_recipe("lfm2-10m", lambda: lfm2(256, 9))
for size, shape in {"350m": (1024, 16, 4608), "700m": (1536, 24, 6912), "1.2b": (2048, 32, 8192)}.items():
    register_recipe(f"lfm2-{size}", partial(_published_lfm2, *shape))


# Models on the delta rule, with one kind of mixer. All but RWKV-7 have RMSNorm, SwiGLU and tied embeddings.
#
# - `delta_net`: Yang et al. 2024 (arXiv:2406.06484).
# - `gdn`: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464). Its mixer has 6 d^2 weights, that of
#   the Transformer 4 d^2, beside the same SwiGLU.
# - `gated_delta_product`: Siems et al. 2025 (arXiv:2502.10297), with two micro-steps. Its mixer has 8.25 d^2 weights.
#   Departure: weights start as in every model here; the authors draw them as Glorot and Bengio do, times 2^-2.5.
# - `gdn2`: `kda` with erase and write gates per channel.
# - `kda`: Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692) in every layer. Kimi Linear mixes three such layers
#   and one of attention without positions; its experts and MLA are not here.
# - `rwkv7`: RWKV-7 (Peng et al. 2025, arXiv:2503.14456), with LayerNorm with a bias, one more after the embedding,
#   heads of 64 and its own channel mixer. The sizes of the house are tied and have the widths and depths of other
#   models here. `rwkv7-world-*` are the published models, with their 65,536 tokens and a head of its own. The
#   embedding starts as every embedding here does.

WORLD = {"0.1b": (12, 768), "0.4b": (24, 1024), "1.5b": (24, 2048), "2.9b": (32, 2560)}  # layers, width


DELTA_BUILDERS = {
    mixer: uniform_family(mixer, norm_eps=1e-5)  # as that of the norm in the mixer, for exports
    for mixer in ("delta_net", "gdn", "kda", "gdn2", "gated_delta_product")
}
for mixer, build in DELTA_BUILDERS.items():
    register_recipe(f"{mixer}-10m", partial(build, 256, 6))


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
    for mixer, build in DELTA_BUILDERS.items():
        register_recipe(f"{mixer}-{size}", partial(build, width, layers, heads, glu, vocab_size=PAPER_VOCAB))
    register_recipe(f"rwkv7-{size}", partial(rwkv7, width, layers, vocab_size=PAPER_VOCAB))
register_recipe("rwkv7-10m", lambda: rwkv7(256, 6))
for size, (layers, width) in WORLD.items():
    world = {"vocab_size": 65_536, "tie_embeddings": False, "gate_rank": 128 if size == "0.4b" else 0}
    register_recipe(f"rwkv7-world-{size}", partial(rwkv7, width, layers, **world))


# `inner` is the width of the GLU of a Transformer, whose block then is as large.
retnet = uniform_family(
    "retnet",
    "mlp",
    of_channel=lambda d_model, inner: {"inner": 3 * inner // 4 or 2 * d_model, "activation": "gelu", "bias": False},
)
rglru = uniform_family(
    "rglru", "glu", of_channel=lambda d_model, inner: {"inner": inner or 3 * d_model, "activation": "gelu"}
)
# RWKV-4 has no heads, and its channel mixer has four times the width: `inner` is unused.
rwkv4 = uniform_family(
    "rwkv4",
    "rwkv",
    heads=False,
    of_channel=lambda d_model, inner: {"receptance": True},
    norm="layernorm",
    embedding_norm=True,
)
elu1 = uniform_family("elu1", scaled=True, positions="sinusoidal")
BUILDERS = {"retnet": retnet, "rglru": rglru, "rwkv4": rwkv4, "elu1": elu1, "cosformer": uniform_family("cosformer")}
BUILDERS |= {mixer: uniform_family(mixer, heads=False) for mixer in ("s4d", "lru", "tnn")}  # a filter per channel

for mixer, build in BUILDERS.items():
    register_recipe(f"{mixer}-10m", partial(build, 256, 6))
    for size, (layers, width, heads, glu) in PAPER_SIZES.items():
        if mixer not in ("elu1", "cosformer"):  # of the small tables alone
            heads = heads // 2 if mixer == "retnet" else heads
            register_recipe(f"{mixer}-{size}", partial(build, width, layers, heads, glu, vocab_size=PAPER_VOCAB))
register_recipe("rwkv4-wt103", lambda: as_wt103(rwkv4(512, 6)))


def _filter_of_wt103(mixer: str, num_layers: int, inner: int) -> ModelConfig:
    return as_wt103(BUILDERS[mixer](512, num_layers, inner=inner), bias="all", norm="layernorm")


for mixer, layers, inner in (("s4d", 6, 1780), ("lru", 6, 1536), ("tnn", 7, 512)):
    register_recipe(f"{mixer}-wt103", partial(_filter_of_wt103, mixer, layers, inner))
