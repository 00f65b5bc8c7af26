"""Models that mix tokens with fixed linear filters: S4D (which includes DSS), LRU and TNN.

The house sizes have RMSNorm, SwiGLU and tied embeddings. The recipes of WikiText-103 have the parameters of paper 001,
Table 1:

- `tnn-wt103` is the model of TNN's script, to the digit (48.68 M): seven layers, three times the width in the mixer,
  and a GLU of the width of the model.
- `lru-wt103` (46.24 M) and `s4d-wt103` (DSS, 45.73 M) have GLU widths that follow from the printed totals, because
  no script of them is known; S4D has 64 real numbers of state per channel, as the DSS of that group has.
"""

from collections.abc import Callable
from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, register_family, register_recipe
from linnet.models.recipes.wt103 import as_wt103


def _family(mixer: str) -> Callable[..., ModelConfig]:
    @register_family(mixer)
    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
        """`num_heads` is unused: every channel is a filter of its own."""
        return ModelConfig(
            d_model=d_model,
            layout=f"{mixer}+swiglu x{num_layers}",
            vocab_size=vocab_size,
            options={"swiglu": {"inner": inner}},
            norm="rmsnorm",
        )

    register_recipe(f"{mixer}-10m", partial(build, 256, 6))
    for size, (layers, width, _, glu) in PAPER_SIZES.items():
        register_recipe(f"{mixer}-{size}", partial(build, width, layers, inner=glu, vocab_size=PAPER_VOCAB))
    return build


def _wt103(mixer: str, num_layers: int, inner: int) -> ModelConfig:
    return as_wt103(FAMILIES[mixer](512, num_layers, inner=inner), bias="all", norm="layernorm")


FAMILIES = {mixer: _family(mixer) for mixer in ("s4d", "lru", "tnn")}
for mixer, layers, inner in (("s4d", 6, 1780), ("lru", 6, 1536), ("tnn", 7, 512)):
    register_recipe(f"{mixer}-wt103", partial(_wt103, mixer, layers, inner))
