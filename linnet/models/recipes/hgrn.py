"""HGRN2 as papers 000 (A.1.3) and 002 train it, and HGRN v1.

The recipes of WikiText-103 have the parameters of paper 002, Tables 1 and 5: biases and LayerNorm, with GLU widths that
follow from the printed totals. `hgrn-wt103` is complex; `hgrn-real-wt103` has one real number of state per channel, and
`hgrn-real2-wt103` two. `hgrn2-wt103` has the sigmoid gate of the authors' script.
"""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe
from linnet.models.recipes.wt103 import as_wt103


@register_family("hgrn2")
def hgrn2(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"hgrn2+sglu x{num_layers}",
        vocab_size=vocab_size,
        options={"hgrn2": {"num_heads": num_heads or default_heads(d_model)}, "sglu": {"inner": inner}},
        norm="srmsnorm",
    )


@register_family("hgrn")
def hgrn(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    """`num_heads` is unused: the recurrence is element-wise."""
    return ModelConfig(
        d_model=d_model,
        layout=f"hgrn+swiglu x{num_layers}",
        vocab_size=vocab_size,
        options={"swiglu": {"inner": inner}},
        norm="layernorm",
    )


for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    register_recipe(f"hgrn2-{size}", lambda a=(width, layers, heads, glu): hgrn2(*a, vocab_size=PAPER_VOCAB))
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
