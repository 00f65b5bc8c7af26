"""What the 44M models of WikiText-103 share (papers 001 to 003, after fairseq's scripts of HGRN, HGRN2 and TNN).

The embedding has 50,265 rows (GPT-2's byte-level BPE in the order of fairseq's dictionary) and is the head too. Linear
layers are drawn as Glorot and Bengio (2010) do; the embedding is drawn with 1 / sqrt(D) and multiplied by sqrt(D).
Departure: fairseq starts the row of its padding token at zero, and blocks of text have no padding. Dropout of 0.1
belongs to the training and is in configs/wikitext-103.yaml.
"""

from functools import partial
from typing import Any

from linnet.models.config import ModelConfig
from linnet.models.recipes.registry import register_recipe

VOCABULARY = 50_265


def as_wt103(config: ModelConfig, options: dict[str, dict[str, Any]] | None = None, **changes: Any) -> ModelConfig:
    """Returns a model with the embedding and the initial weights of the setting, other options and other keys."""
    values = config.model_dump() | {
        "vocab_size": VOCABULARY,
        "init": "xavier",
        "embedding_scale": config.d_model**0.5,
        "embedding_std": config.d_model**-0.5,
        **changes,
    }
    for layer, own in (options or {}).items():
        values["options"][layer] |= own
    return ModelConfig(**values)


def transformer(mixer: str = "attention", **own: Any) -> ModelConfig:
    """The Transformer of the tables (44.65 M): ReLU, LayerNorm, biases, sinusoids added to the scaled embedding.

    The tables print as many parameters for its form with 1 + elu or cosFormer in place of attention.
    """
    options = {mixer: {"num_heads": 8, **own}, "mlp": {"inner": 2048, "activation": "relu"}}
    model = ModelConfig(d_model=512, layout=f"{mixer}+mlp x6", options=options, norm="layernorm")
    return as_wt103(model, bias="all", positions="sinusoidal")


register_recipe("transformer-wt103", partial(transformer, rope=False))
register_recipe("elu1-wt103", partial(transformer, "elu1"))
register_recipe("cosformer-wt103", partial(transformer, "cosformer", max_length=512))
