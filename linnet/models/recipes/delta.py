"""Models on the gated delta rule, with one kind of mixer: RMSNorm, SwiGLU, tied.

- `delta_net`: Yang et al. 2024 (arXiv:2406.06484).
- `gdn`: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464). Its mixer has 6 d^2 weights, that of the
  Transformer 4 d^2, beside the same SwiGLU.
- `gated_delta_product`: Siems et al. 2025 (arXiv:2502.10297), with two micro-steps. Its mixer has 8.25 d^2 weights.
- `gdn2`: `kda` with erase and write gates per channel.
- `kda`: Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692) in every layer. Kimi Linear mixes three such layers and
  one of attention without positions; its experts and MLA are not here.
"""

from collections.abc import Callable
from functools import partial

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe


def _family(mixer: str) -> Callable[..., ModelConfig]:
    @register_family(mixer)
    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
        return ModelConfig(
            d_model=d_model,
            layout=f"{mixer}+swiglu x{num_layers}",
            vocab_size=vocab_size,
            options={mixer: {"num_heads": num_heads or default_heads(d_model)}, "swiglu": {"inner": inner}},
            norm="rmsnorm",
            norm_eps=1e-5,  # as that of the norm in the mixer, for exports
        )

    register_recipe(f"{mixer}-10m", lambda: build(256, 6))
    return build


BUILDERS = {mixer: _family(mixer) for mixer in ("delta_net", "gdn", "kda", "gdn2", "gated_delta_product")}
for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    for mixer in ("gdn", "kda", "gdn2", "gated_delta_product"):
        register_recipe(f"{mixer}-{size}", partial(BUILDERS[mixer], width, layers, heads, glu, vocab_size=PAPER_VOCAB))
