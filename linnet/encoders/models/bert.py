"""Bidirectional language models: BERT as "Cramming" trains it in a day (Geiping and Goldstein 2022), and LightNet's.

`bert-crammed`: 16 layers of width 768, 12 heads, pre-LayerNorm with epsilon 1e-12, no biases in linear layers, GELU
gated units of inner width 1536 (the published 3072 are both halves of the gate), scaled sinusoids and a norm after the
embedding, tied embedding, vocabulary 32,768: 119.6 M parameters, plus one row for the mask token.

`lightnet-bert`: paper 003 (5.1, Table 5) names no shape of its own. Here the same stack has LightNet's mixer with LRPE
and one Toeplitz encoding before the layers, with a kernel for each direction, and no sinusoids.
"""

from collections.abc import Callable
from functools import partial

from linnet.encoders.config import MaskedConfig
from linnet.models.recipes.registry import default_heads, register_family, register_recipe

CRAMMED_VOCAB = 32_768
GATE_RANK = 64


@register_family("bert", "masked_lm")
def bert(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> MaskedConfig:
    heads = num_heads or default_heads(d_model)
    return MaskedConfig(
        layout=f"attention+glu x{num_layers}",
        options={
            "attention": {"num_heads": heads, "rope": False},
            "glu": {"inner": inner or 2 * d_model, "activation": "gelu"},
        },
        positions="scaled_sinusoidal",
        **_common(d_model, vocab_size),
    )


@register_family("lightnet-bert", "masked_lm")
def lightnet_bert(
    d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256
) -> MaskedConfig:
    heads = num_heads or default_heads(d_model)
    return MaskedConfig(
        layout=f"tpe lightnet+glu x{num_layers}",
        options={
            "lightnet": {"num_heads": heads, "gate_rank": min(GATE_RANK, d_model)},
            "glu": {"inner": inner or 2 * d_model, "activation": "gelu"},
        },
        **_common(d_model, vocab_size),
    )


def _common(d_model: int, vocab_size: int) -> dict:
    return {
        "d_model": d_model,
        "vocab_size": vocab_size,
        "norm": "layernorm",
        "norm_eps": 1e-12,
        "embedding_norm": True,
    }


def _small(build: Callable[..., MaskedConfig], d_model: int, num_layers: int) -> MaskedConfig:
    """Returns a model for bytes whose weights start at 1 / sqrt(d_model), with which small models learn sooner."""
    return build(d_model, num_layers).model_copy(update={"init_std": round(d_model**-0.5, 3)})


register_recipe("bert-crammed", lambda: bert(768, 16, 12, 1536, CRAMMED_VOCAB), "masked_lm")
register_recipe("lightnet-bert", lambda: lightnet_bert(768, 16, 12, 1536, CRAMMED_VOCAB), "masked_lm")
for name, build in (("bert", bert), ("lightnet-bert", lightnet_bert)):
    for layers, width in ((4, 128), (4, 512)):
        register_recipe(f"{name}-{layers}x{width}", partial(_small, build, width, layers), "masked_lm")
