"""TNL3 as paper 000 scales it (A.1.2), TransNormerLLM (TNL v1) of paper 001 (section 4), and TransNormer before it.

TransNormer (Qin et al. 2022, arXiv:2210.10340; paper 001, Table 12): the first half of the layers has attention in
blocks of 64 tokens, the second half linear attention without decay or gate, both with a norm of the output and LRPE.
T1 has scores relu and keys elu, T2 softmax and 1 + elu. The paper does not say which of its parts 379M has: GLUs of
width 3,072 and a norm after the embedding give 378.6M. Its Table 1 has 44.64 M on WikiText-103: a GLU of 1,365 (as
large as an FFN of 4 d) and biases give 44.640 M.

TNL3 has 25 layers at 410M (its Table 7 parameters), SGLU, SRMSNorm and a low-rank output gate. `tnl-wt103` is TNL v1: a
GLU of 1,280 and an embedding of 50,368 rows give the printed 45.45 M (paper 001, Table 1). So would TNL3 with a GLU of
1,408; paper 001 describes v1.
"""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe
from linnet.models.recipes.wt103 import as_wt103


@register_family("tnl")
def tnl(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"tnl+sglu x{num_layers}",
        vocab_size=vocab_size,
        options={"tnl": {"num_heads": num_heads or default_heads(d_model)}, "sglu": {"inner": inner}},
        norm="srmsnorm",
    )


@register_family("tnl1")
def tnl1(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"tnl+sglu x{num_layers}",
        vocab_size=vocab_size,
        options={
            "tnl": {
                "num_heads": num_heads or default_heads(d_model),
                "gate": "full",
                "gate_activation": "none",
                "lrpe": "first_layer",
            },
            "sglu": {"inner": inner},
        },
        norm="srmsnorm",
        embedding_scale=float(d_model) ** 0.5,
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


for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    depth = 25 if size == "410m" else layers
    register_recipe(f"tnl-{size}", lambda a=(width, depth, heads, glu): tnl(*a, vocab_size=PAPER_VOCAB))
register_recipe("tnl-wt103", lambda: as_wt103(tnl1(512, 6, 8, 1280), vocab_size=50_368))
register_recipe("tn1-wt103", lambda: as_wt103(tn1(512, 6, 8, 1365), bias="all"))
register_recipe("tn2-wt103", lambda: as_wt103(tn2(512, 6, 8, 1365), bias="all"))
register_recipe("tnl-10m", lambda: tnl(256, 6))
register_recipe("tnl1-385m", lambda: tnl1(1024, 24, 8, 2816, vocab_size=50_272))
register_recipe("tnl1-1b", lambda: tnl1(2048, 16, 16, 5632, vocab_size=50_272))  # the shape of the released 1B
register_recipe("tn1-379m", lambda: tn1(1024, 24, 8, 3072, vocab_size=50_272))
register_recipe("tn2-379m", lambda: tn2(1024, 24, 8, 3072, vocab_size=50_272))
