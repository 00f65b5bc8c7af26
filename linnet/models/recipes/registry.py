"""Shared by the recipes: published sizes, default head counts, and the family of a name."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from linnet.config import ConfigError
from linnet.deprecation import renamed
from linnet.layers.base import MIXERS
from linnet.models.config import ModelConfig
from linnet.models.layout import nearest_layer
from linnet.models.registry import families_of, register_family, register_recipe
from linnet.models.stack import StackConfig

__getattr__ = partial(renamed, __name__)

PAPER_VOCAB = 100_280  # tiktoken's cl100k with its special tokens (paper 000, 3.2)

# Paper 000's sizes: layers, width, heads, GLU width. Table 7 prints h = 16 and g = 5632 in its 1B rows, but its own
# parameter and FLOP columns need h = 12 and g = 4096; Table 2's head counts contradict its head width of 128.
PAPER_SIZES = {
    "70m": (6, 512, 4, 1536),
    "160m": (12, 768, 6, 2048),
    "410m": (26, 1024, 8, 2816),
    "1b": (32, 1536, 12, 4096),
    "3b": (35, 2560, 20, 6912),
    "7b": (32, 4096, 32, 11008),
}


def family(name: str, kind: str = "causal_lm") -> Callable[..., StackConfig]:
    """Returns the family of a name among the models of one kind (`linnet.models.registry.register_family`).

    A registered mixer without a family of that kind (a plugin) gets `name+swiglu` with RMSNorm, as a language model or
    an image classifier.
    """
    families = families_of(kind)
    if name in families:
        return families[name]
    from linnet.models.kinds import KINDS

    config = KINDS[kind].config
    known = MIXERS if config.INPUTS else {}
    if name not in known:
        told = nearest_layer(name, {*families, *known})
        raise ConfigError([f"architecture {name!r} is unknown; {told}"], "architectures")

    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, **inputs: int) -> StackConfig:
        options: dict[str, dict] = {"swiglu": {"inner": inner}}
        if "num_heads" in MIXERS[name].Config.model_fields:
            options[name] = {"num_heads": num_heads or default_heads(d_model)}
        layers: dict[str, Any] = {"d_model": d_model, "layout": f"{name}+swiglu x{num_layers}", "options": options}
        return config(**{**layers, **config.INPUTS, **inputs})

    return build


def default_heads(d_model: int) -> int:
    """Returns a head count: heads of width 128 from d_model 512 on, 64 from 256 on, else 32 or 16, if these divide."""
    width = 128 if d_model >= 512 else 64 if d_model >= 256 else 32 if d_model >= 64 else 16
    while d_model % width:
        width //= 2
    return d_model // width


def uniform_family(
    mixer: str,
    channel: str = "swiglu",
    name: str = "",
    before: str = "",
    heads: bool = True,
    scaled: bool = False,
    options: Mapping[str, Any] = {},
    of_channel: Callable[[int, int], dict[str, Any]] = lambda d_model, inner: {"inner": inner},
    **keys: Any,
) -> Callable[..., ModelConfig]:
    """Registers and returns the family of equal blocks of two mixers: RMSNorm and tied embeddings unless said.

    Args:
        channel: the channel mixer; "": blocks of the mixer alone, where `inner` is unused.
        name: of the family; "": the mixer's.
        before: layers before the blocks, with a space at the end.
        heads: whether the mixer has a number of heads; `num_heads` is unused otherwise.
        scaled: whether the embedding is multiplied by sqrt(d_model).
        options: further ones of the mixer.
        of_channel: d_model and `inner` -> the options of the channel mixer.
        keys: of the configuration of the model.
    """

    @register_family(name or mixer)
    def build(d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256) -> ModelConfig:
        of_mixer = {"num_heads": num_heads or default_heads(d_model)} if heads else {}
        of_layers = {mixer: {**of_mixer, **options}} if heads or options else {}
        of_layers |= {channel: of_channel(d_model, inner)} if channel else {}
        return ModelConfig(
            d_model=d_model,
            layout=f"{before}{mixer}{channel and f'+{channel}'} x{num_layers}",
            vocab_size=vocab_size,
            options=of_layers,
            **{"norm": "rmsnorm", **({"embedding_scale": float(d_model) ** 0.5} if scaled else {}), **keys},
        )

    return build


def register_sizes(name: str, build: Callable[..., ModelConfig], layers_of_410m: int = 26) -> None:
    """Registers a family in the sizes of paper 000, as `name-70m` to `name-7b`."""
    for size, (layers, width, heads, inner) in PAPER_SIZES.items():
        depth = layers_of_410m if size == "410m" else layers
        register_recipe(f"{name}-{size}", partial(build, width, depth, heads, inner, vocab_size=PAPER_VOCAB))


# What the 44M models of WikiText-103 share (papers 001 to 003, after fairseq's scripts of HGRN, HGRN2 and TNN).
#
# The embedding has 50,265 rows (GPT-2's byte-level BPE in the order of fairseq's dictionary) and is the head too.
# Linear layers are drawn as Glorot and Bengio (2010) do; the embedding is drawn with 1 / sqrt(D) and multiplied by
# sqrt(D). Departure: fairseq starts the row of its padding token at zero, and blocks of text have no padding. Dropout
# of 0.1 belongs to the training and is in configs/wikitext-103.yaml.

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
    for layer, options_of_layer in (options or {}).items():
        values["options"][layer] |= options_of_layer
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
