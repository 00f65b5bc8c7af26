"""Sizes of paper 004, appendix C.3 (Tables C.2 to C.4): 35 shapes from 8 million to 7 billion parameters.

A study uses them with any family or layout (`sizes: [c2-8m, c2-150m]`), and `learning_rate: table` takes the rate of
each. As recipes, `c2-8m` to `c2-7b` are the paper's Transformer++: LLaMA with the vocabulary of GPT-2, tied. Their
counts are within 4 % of the names, but for the smallest, which has 7.2 million. `c3-102m` to `c3-1.3b` are StripedHyena
1:11 with experts in place of the SwiGLU (Table C.3), `c4-102m` to `c4-1.3b` with experts of Hyena too (Table C.4), each
named after its row of Table C.2.

Erratum: Table C.2 prints 8 heads for 70M, which is 576 wide with heads of 64. Every other row has d_model / kv_size
heads, so here it has 9. Table C.3 prints a MoE width of 2752 for 440M, that of the row before; its counts need 3072.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from linnet.models.config import ModelConfig
from linnet.models.recipes.baselines import llama
from linnet.models.recipes.registry import register_recipe
from linnet.models.stack import repeated

GPT2_VOCAB = 50_257


@dataclass(frozen=True)
class C2Size:
    """A row of Table C.2, with the widths of Tables C.3 and C.4 where they have this row.

    Attributes:
        inner: width of the SwiGLU. learning_rate: peak rate.
        moe_width: printed width of a mixture of experts in place of the SwiGLU (Table C.3).
        expert_width: channels of each of 8 experts of Hyena experts (Table C.4).
        both_width: printed width of the mixture of experts beside them (Table C.4).
    """

    d_model: int
    inner: int
    num_heads: int
    num_layers: int
    learning_rate: float
    moe_width: int | None = None
    expert_width: int | None = None
    both_width: int | None = None

    def moe_inner(self, both: bool = False) -> int | None:
        """Width of each of 8 experts, 2 of them active, with the printed number of active parameters.

        Half the printed width: the counts of Tables C.3 and C.4 are those of 8 matrices [d_model, width] for the
        experts and one that all share, while an expert of Linnet has three matrices of its own. So totals are higher
        than printed, by three matrices [d_model, width] per layer.

        Args:
            both: beside experts of Hyena, for which Table C.4 prints other widths.
        """
        width = self.both_width if both else self.moe_width
        return None if width is None else width // 2


C2_SIZES = {
    "c2-8m": C2Size(128, 336, 2, 4, 9.77e-4),
    "c2-22m": C2Size(320, 848, 5, 5, 9.57e-4),
    "c2-38m": C2Size(448, 1200, 7, 7, 9.36e-4),
    "c2-54m": C2Size(512, 1360, 8, 9, 9.15e-4),
    "c2-70m": C2Size(576, 1536, 9, 10, 8.95e-4),
    "c2-102m": C2Size(640, 1712, 10, 14, 8.56e-4, 1728, 80, 2368),
    "c2-118m": C2Size(704, 1872, 11, 14, 8.37e-4, 1856, 88, 2624),
    "c2-134m": C2Size(768, 2048, 12, 14, 8.18e-4, 2048, 96, 2816),
    "c2-150m": C2Size(768, 2048, 12, 16, 8.00e-4, 2048, 96, 2880),
    "c2-163m": C2Size(768, 2048, 12, 17, 7.75e-4, 2048, 96, 2880),
    "c2-175m": C2Size(768, 2048, 12, 19, 7.50e-4, 2048, 96, 2880),
    "c2-196m": C2Size(832, 2224, 13, 19, 7.25e-4, 2176, 104, 3072),
    "c2-217m": C2Size(832, 2224, 13, 21, 7.00e-4, 2240, 104, 3072),
    "c2-251m": C2Size(896, 2384, 14, 21, 6.75e-4, 2368, 112, 3328),
    "c2-278m": C2Size(896, 2384, 14, 24, 6.50e-4, 2368, 112, 3328),
    "c2-306m": C2Size(960, 2560, 15, 24, 6.25e-4, 2560, 120, 3584),
    "c2-350m": C2Size(1024, 2736, 16, 24, 6.00e-4, 2752, 128, 3776),
    "c2-440m": C2Size(1152, 3072, 18, 24, 5.66e-4, 3072, 144, 4288),
    "c2-536m": C2Size(1280, 3408, 20, 24, 5.33e-4, 3392, 160, 4736),
    "c2-641m": C2Size(1408, 3760, 11, 24, 5.00e-4, 3712, 176, 5216),
    "c2-756m": C2Size(1536, 4096, 12, 24, 4.75e-4, 4096, 192, 5696),
    "c2-881m": C2Size(1664, 4432, 13, 24, 4.55e-4, 4416, 208, 6176),
    "c2-1.01b": C2Size(1792, 4784, 14, 24, 4.33e-4, 4736, 224, 6592),
    "c2-1.16b": C2Size(1920, 5120, 15, 24, 4.15e-4, 5056, 240, 7104),
    "c2-1.2b": C2Size(1920, 5120, 15, 25, 4.11e-4),
    "c2-1.3b": C2Size(2048, 5456, 16, 24, 4.00e-4, 5440, 256, 7616),
    "c2-1.6b": C2Size(2176, 5808, 17, 26, 3.84e-4),
    "c2-1.9b": C2Size(2304, 6144, 18, 28, 3.67e-4),
    "c2-2.25b": C2Size(2432, 6480, 19, 30, 3.47e-4),
    "c2-2.4b": C2Size(2560, 6832, 20, 29, 3.39e-4),
    "c2-2.64b": C2Size(2560, 6832, 20, 32, 3.25e-4),
    "c2-3.1b": C2Size(2688, 7168, 21, 34, 3.00e-4),
    "c2-4.2b": C2Size(3072, 8192, 24, 36, 2.72e-4),
    "c2-5.2b": C2Size(3328, 8880, 26, 38, 2.46e-4),
    "c2-7b": C2Size(3712, 9904, 29, 41, 2.00e-4),
}


def _striped(size: C2Size, mixer: str) -> ModelConfig:
    layout, _ = repeated(f"{mixer}+moe attention+moe {mixer}+moe x10", size.num_layers)
    both = mixer == "hyena_experts"
    moe = {"inner": size.moe_inner(both)}
    options: dict[str, dict[str, Any]] = {"attention": {"num_heads": size.num_heads}, "moe": moe}
    options |= {mixer: {"expert_width": size.expert_width}} if both else {}
    return ModelConfig(d_model=size.d_model, layout=layout, vocab_size=GPT2_VOCAB, options=options, norm="rmsnorm")


for name, size in C2_SIZES.items():
    shape = (size.d_model, size.num_layers, size.num_heads, size.inner)
    register_recipe(name, partial(llama, *shape, vocab_size=GPT2_VOCAB))
for table, mixer in (("c3", "hyena"), ("c4", "hyena_experts")):
    for name, size in C2_SIZES.items():
        if size.moe_width is not None:
            register_recipe(name.replace("c2", table), partial(_striped, size, mixer))
