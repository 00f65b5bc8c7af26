"""RetNet (Sun et al. 2023, arXiv:2307.08621): blocks of 12 d^2 weights, 8 in the mixer and 4 in a GELU layer of 2 d.

Heads are 256 wide from d_model 512 on. Departure: RMSNorm and tied embeddings, as in the other families here.
"""

from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe


@register_family("retnet")
def retnet(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    """`inner` is the width of the GLU of a Transformer, whose block then is as large."""
    return ModelConfig(
        d_model=d_model,
        layout=f"retnet+mlp x{num_layers}",
        vocab_size=vocab_size,
        options={
            "retnet": {"num_heads": num_heads or default_heads(d_model)},
            "mlp": {"inner": 3 * inner // 4 or 2 * d_model, "activation": "gelu", "bias": False},
        },
        norm="rmsnorm",
    )


register_recipe("retnet-10m", lambda: retnet(256, 6))
for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    register_recipe(f"retnet-{size}", partial(retnet, width, layers, heads // 2, glu, vocab_size=PAPER_VOCAB))
