"""LLaMA: the softmax Transformer of paper 000 (A.1.1): pre-norm, RoPE, SwiGLU, no biases, tied embeddings.

`transformer-385m` and `transformer-1b` are the Transformers of paper 001, Table 11, which does not say what they are:
these have the width, depth, heads and GLU of the TNL beside them, and so fewer parameters (a TNL layer has a gate).

Departure: RMSNorm. The paper's parameter counts suggest two LayerNorms per layer (`norm: layernorm`).
"""

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import PAPER_SIZES, PAPER_VOCAB, default_heads, register_family, register_recipe


@register_family("llama")
def llama(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
    return ModelConfig(
        d_model=d_model,
        layout=f"attention+swiglu x{num_layers}",
        vocab_size=vocab_size,
        options={"attention": {"num_heads": num_heads or default_heads(d_model)}, "swiglu": {"inner": inner}},
        norm="rmsnorm",
    )


for size, (layers, width, heads, glu) in PAPER_SIZES.items():
    register_recipe(f"llama-{size}", lambda a=(width, layers, heads, glu): llama(*a, vocab_size=PAPER_VOCAB))
register_recipe("transformer-385m", lambda: llama(1024, 24, 8, 2816, vocab_size=50_272))
register_recipe("transformer-1b", lambda: llama(2048, 16, 16, 5632, vocab_size=50_272))
register_recipe("llama-10m", lambda: llama(256, 6))
