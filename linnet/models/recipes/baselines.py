"""The architectures that the papers' tables compare with: RMSNorm, SwiGLU and tied embeddings unless said.

- `retnet`: RetNet (Sun et al. 2023, arXiv:2307.08621), blocks of 12 d^2 weights, 8 in the mixer and 4 in a GELU layer
  of 2 d. Heads are 256 wide from d_model 512 on.
- `rglru`: Hawk (De et al. 2024, arXiv:2402.19427), with a gated GELU layer of width 3 d. Griffin puts local attention
  in every third layer: `layout: (rglru+glu x2 attention+glu) x N` with a window of 1,024.
- `elu1` (Katharopoulos et al. 2020) with sinusoids, and `cosformer` (Qin et al. 2022) without positions: linear
  attention with a denominator. Their models of WikiText-103 are in `linnet.models.recipes.wt103`.
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
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe
from linnet.models.recipes.wt103 import as_wt103

FILTERS = ("s4d", "lru", "tnn")  # every channel is a filter of its own: no heads


def _build(
    mixer: str, channel: str, d_model: int, num_layers: int, options: dict[str, Any], **keys: Any
) -> ModelConfig:
    keys = {"norm": "rmsnorm", **keys}
    return ModelConfig(d_model=d_model, layout=f"{mixer}+{channel} x{num_layers}", options=options, **keys)


@register_family("retnet")
def retnet(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    """`inner` is the width of the GLU of a Transformer, whose block then is as large."""
    options = {
        "retnet": {"num_heads": num_heads or default_heads(d_model)},
        "mlp": {"inner": 3 * inner // 4 or 2 * d_model, "activation": "gelu", "bias": False},
    }
    return _build("retnet", "mlp", d_model, num_layers, options, vocab_size=vocab_size)


@register_family("rglru")
def rglru(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    options = {
        "rglru": {"num_heads": num_heads or default_heads(d_model)},
        "glu": {"inner": inner or 3 * d_model, "activation": "gelu"},
    }
    return _build("rglru", "glu", d_model, num_layers, options, vocab_size=vocab_size)


def _denominator(
    mixer: str, d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256
) -> ModelConfig:
    positions = {"positions": "sinusoidal", "embedding_scale": float(d_model) ** 0.5} if mixer == "elu1" else {}
    options = {mixer: {"num_heads": num_heads or default_heads(d_model)}, "swiglu": {"inner": inner}}
    return _build(mixer, "swiglu", d_model, num_layers, options, vocab_size=vocab_size, **positions)


@register_family("rwkv4")
def rwkv4(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    """`num_heads` and `inner` are unused: RWKV-4 has no heads, and its channel mixer has four times the width."""
    norms = {"norm": "layernorm", "embedding_norm": True}
    return _build("rwkv4", "rwkv", d_model, num_layers, {"rwkv": {"receptance": True}}, vocab_size=vocab_size, **norms)


def _filter(
    mixer: str, d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256
) -> ModelConfig:
    return _build(mixer, "swiglu", d_model, num_layers, {"swiglu": {"inner": inner}}, vocab_size=vocab_size)


def _filter_of_wt103(mixer: str, num_layers: int, inner: int) -> ModelConfig:
    return as_wt103(_filter(mixer, 512, num_layers, inner=inner), bias="all", norm="layernorm")


BUILDERS = {"retnet": retnet, "rglru": rglru, "rwkv4": rwkv4}
for mixer in ("elu1", "cosformer"):
    BUILDERS[mixer] = register_family(mixer)(partial(_denominator, mixer))
for mixer in FILTERS:
    BUILDERS[mixer] = register_family(mixer)(partial(_filter, mixer))

for mixer, build in BUILDERS.items():
    register_recipe(f"{mixer}-10m", partial(build, 256, 6))
    for size, (layers, width, heads, glu) in PAPER_SIZES.items():
        if mixer in ("elu1", "cosformer"):  # of the small tables alone
            continue
        sizes = (heads // 2, glu) if mixer == "retnet" else (heads, glu) if mixer == "rglru" else (0, glu)
        register_recipe(f"{mixer}-{size}", partial(build, width, layers, *sizes, vocab_size=PAPER_VOCAB))
register_recipe("rwkv4-wt103", lambda: as_wt103(rwkv4(512, 6)))
for mixer, layers, inner in (("s4d", 6, 1780), ("lru", 6, 1536), ("tnn", 7, 512)):
    register_recipe(f"{mixer}-wt103", partial(_filter_of_wt103, mixer, layers, inner))
