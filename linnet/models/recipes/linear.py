"""Linear attention in blocks with a gated linear unit: RMSNorm, tied embeddings.

- `cosformer2` (paper 000, A.1.4): TPE after the embedding, LRPE in every layer, no decay, SGLU; 25 layers at 410M.
- `gla` (Yang et al. 2023, arXiv:2312.06635) in the skeleton of our Transformer, with SwiGLU.
- `lightnet` (paper 003): additive decay, LRPE in every layer, TPE after the embedding, SwiGLU. The 379M model of the
  paper has 25 layers, not the 26 of its Table 10: only 25 give its parameter count.
"""

from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import (
    as_wt103,
    default_heads,
    register_family,
    register_recipe,
    register_sizes,
    uniform_family,
)

# HGRN2 as papers 000 (A.1.3) and 002 train it, and HGRN v1.
#
# The recipes of WikiText-103 have the parameters of paper 002, Tables 1 and 5: biases and LayerNorm, with GLU widths
# that follow from the printed totals. `hgrn-wt103` is complex; `hgrn-real-wt103` has one real number of state per
# channel, and `hgrn-real2-wt103` two. `hgrn2-wt103` has the sigmoid gate of the authors' script.


hgrn2 = uniform_family("hgrn2", "sglu", norm="srmsnorm")
hgrn = uniform_family("hgrn", heads=False, norm="layernorm")
register_sizes("hgrn2", hgrn2)
register_recipe("hgrn2-10m", lambda: hgrn2(256, 6))
register_recipe("hgrn-10m", lambda: hgrn(256, 6))


def _hgrn2_wt103() -> ModelConfig:
    mixer = {"norm": "layernorm", "output_activation": "sigmoid"}
    return as_wt103(hgrn2(512, 6, 4, 1365), {"hgrn2": mixer}, bias="all", norm="layernorm")


def _hgrn_wt103(inner: int, **mixer) -> ModelConfig:
    return as_wt103(hgrn(512, 6, inner=inner), {"hgrn": mixer}, bias="all")


register_recipe("hgrn2-wt103", _hgrn2_wt103)
register_recipe("hgrn-wt103", lambda: _hgrn_wt103(1024, complex=True))
register_recipe("hgrn-real-wt103", lambda: _hgrn_wt103(1536))
register_recipe("hgrn-real2-wt103", lambda: _hgrn_wt103(1024, expand=2, readout="concat"))


# TNL3 as paper 000 scales it (A.1.2), TransNormerLLM (TNL v1) of paper 001 (section 4), and TransNormer before it.
#
# TransNormer (Qin et al. 2022, arXiv:2210.10340; paper 001, Table 12): the first half of the layers has attention in
# blocks of 64 tokens, the second half linear attention without decay or gate, both with a norm of the output and LRPE.
# T1 has scores relu and keys elu, T2 softmax and 1 + elu. The paper does not say which of its parts 379M has: GLUs of
# width 3,072 and a norm after the embedding give 378.6M. Its Table 1 has 44.64 M on WikiText-103: a GLU of 1,365 (as
# large as an FFN of 4 d) and biases give 44.640 M.
#
# TNL3 has 25 layers at 410M (its Table 7 parameters), SGLU, SRMSNorm and a low-rank output gate. `tnl-wt103` is TNL
# v1: a GLU of 1,280 and an embedding of 50,368 rows give the printed 45.45 M (paper 001, Table 1). So would TNL3 with
# a GLU of 1,408; paper 001 describes v1.


tnl = uniform_family("tnl", "sglu", norm="srmsnorm")


tnl1 = uniform_family(
    *("tnl", "sglu", "tnl1"),
    scaled=True,
    options={"gate": "full", "gate_activation": "none", "lrpe": "first_layer"},
    norm="srmsnorm",
)


@register_family("tn1")
def tn1(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return _transnormer(d_model, num_layers, num_heads, inner, vocab_size, scores="relu", activation="elu")


@register_family("tn2")
def tn2(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return _transnormer(d_model, num_layers, num_heads, inner, vocab_size, scores="softmax", activation="elu1")


def _transnormer(
    d_model: int, num_layers: int, num_heads: int, inner: int, vocab_size: int, scores: str, activation: str
) -> ModelConfig:
    heads, blocked = num_heads or default_heads(d_model), num_layers // 2
    parts = [f"{mixer}+swiglu x{n}" for mixer, n in (("attention", blocked), ("tnl", num_layers - blocked)) if n]
    options: dict[str, dict] = {
        "tnl": {
            "num_heads": heads,
            "qk_activation": activation,
            "decay": "none",
            "gate": "none",
            "lrpe": "all_layers",
            "lrpe_form": "real",
            "lrpe_reflection": "householder",
        },
        "swiglu": {"inner": inner},
    }
    if blocked:
        options["attention"] = {
            "num_heads": heads,
            "block": 64,
            "scores": scores,
            "out_norm": "srmsnorm",
            "rope": False,
            "lrpe": True,
            "lrpe_reflection": "householder",
        }
    return ModelConfig(
        d_model=d_model,
        layout=" ".join(parts),
        vocab_size=vocab_size,
        options=options,
        norm="srmsnorm",
        embedding_norm=True,
    )


register_sizes("tnl", tnl, layers_of_410m=25)
register_recipe("tnl-wt103", lambda: as_wt103(tnl1(512, 6, 8, 1280), vocab_size=50_368))
register_recipe("tn1-wt103", lambda: as_wt103(tn1(512, 6, 8, 1365), bias="all"))
register_recipe("tn2-wt103", lambda: as_wt103(tn2(512, 6, 8, 1365), bias="all"))
register_recipe("tnl-10m", lambda: tnl(256, 6))
register_recipe("tnl1-385m", lambda: tnl1(1024, 24, 8, 2816, vocab_size=50_272))
register_recipe("tnl1-1b", lambda: tnl1(2048, 16, 16, 5632, vocab_size=50_272))  # the shape of the released 1B
register_recipe("tn1-379m", lambda: tn1(1024, 24, 8, 3072, vocab_size=50_272))
register_recipe("tn2-379m", lambda: tn2(1024, 24, 8, 3072, vocab_size=50_272))


SIZES = {
    "150m": (768, 15, 6, 2048),
    "385m": (1024, 25, 8, 2816),
    "1b": (2048, 18, 16, 5632),
    "3b": (2560, 36, 20, 6912),
}


cosformer2 = uniform_family("cosformer2", "sglu", before="tpe ")
gla = uniform_family("gla")
lightnet = uniform_family("lightnet", before="tpe ")
for name, build in {"cosformer2": cosformer2, "gla": gla, "lightnet": lightnet}.items():
    register_recipe(f"{name}-10m", partial(build, 256, 6))

register_sizes("cosformer2", cosformer2, layers_of_410m=25)
for size, shape in SIZES.items():
    register_recipe(f"lightnet-{size}", partial(lightnet, *shape, vocab_size=50_272))
register_recipe("lightnet-wt103", lambda: as_wt103(lightnet(512, 6, 8, 1365)))
