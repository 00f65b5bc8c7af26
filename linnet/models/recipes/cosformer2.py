"""cosFormer2 (paper 000, A.1.4): TPE after the embedding, LRPE in every layer, no decay, SGLU; 25 layers at 410M."""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe


@register_family("cosformer2")
def cosformer2(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"tpe cosformer2+sglu x{num_layers}",
        vocab_size=vocab_size,
        options={"cosformer2": {"num_heads": num_heads or default_heads(d_model)}, "sglu": {"inner": inner}},
        norm="rmsnorm",
    )


for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    depth = 25 if size == "410m" else layers
    register_recipe(f"cosformer2-{size}", lambda a=(width, depth, heads, glu): cosformer2(*a, vocab_size=PAPER_VOCAB))
register_recipe("cosformer2-10m", lambda: cosformer2(256, 6))
