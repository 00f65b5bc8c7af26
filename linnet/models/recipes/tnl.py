"""TNL3 as paper 000 scales it (A.1.2), and TransNormerLLM (TNL v1) of paper 001 (section 4).

TNL3 has 25 layers at 410M (its Table 7 parameters), SGLU, SRMSNorm and a low-rank output gate.
"""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe


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


for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    depth = 25 if size == "410m" else layers
    register_recipe(f"tnl-{size}", lambda a=(width, depth, heads, glu): tnl(*a, vocab_size=PAPER_VOCAB))
register_recipe("tnl-wt103", lambda: tnl(512, 6, 8, 1365, vocab_size=50_265))
register_recipe("tnl-10m", lambda: tnl(256, 6))
register_recipe("tnl1-385m", lambda: tnl1(1024, 24, 8, 2816, vocab_size=50_272))
