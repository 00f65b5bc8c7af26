"""The configurations of models: a stack of layers, with a vocabulary or images around it.

In a file, a model is the name of a recipe, a recipe with changes, or a full description:

    model: tnl-10m

    model: {recipe: tnl-10m, vocab_size: 4096}

    model:
      d_model: 256
      layout: (tnl+sglu x3 attention+swiglu) x2
      options: {tnl: {num_heads: 4}, attention: {num_heads: 4, window: 128}}

    model:                                   # one layer with global attention after three with a window
      d_model: 256
      layout: L L L G
      num_layers: 24
      aliases:
        L: {layer: attention+swiglu, options: {attention: {window: 64}}}
        G: attention+swiglu
"""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from linnet.config import Factor, added
from linnet.deprecation import renamed
from linnet.layers.non_causal import ScanOption
from linnet.models.stack import StackConfig

__getattr__ = partial(renamed, __name__)

DEFAULT_BASE_WIDTH = 256

Pixel = Annotated[float, Field(ge=-1e6, le=1e6)]


class ModelConfig(StackConfig):
    """Everything that defines a causal language model except its weights."""

    TITLE = "a causal language model"
    INPUTS = {"vocab_size": 256}

    vocab_size: int = Field(
        256, ge=2, le=1 << 31, description="rows of the embedding: the tokens, and optional padding"
    )
    tie_embeddings: bool = Field(True, description="use the embedding as the head")
    head_bias: bool = Field(False, description="bias of a head of its own (tie_embeddings: false)")
    embedding_scale: Factor = Field(1.0, description="factor of the embedding; TNL v1 uses sqrt(d_model)")
    logit_scale: Factor = added(
        1.0,
        description="factor of the output of the last norm before the head, and so of the logits (Granite, Falcon-H1)",
    )
    embedding_norm: bool = Field(False, description="a norm of the embedding and its positions, before the layers")
    embedding_std: Factor | None = added(
        None,
        description="of the initial embedding; null: init_std. With an embedding_scale of sqrt(d_model), "
        "1 / sqrt(d_model) gives the residual stream a variance of 1",
    )
    init: Literal["normal", "xavier"] = added(
        "normal",
        description="of linear layers: normal with init_std, or uniform as Glorot and Bengio (2010) do",
    )

    parametrisation: Literal["standard", "mup"] = added(
        "standard",
        description="how initial weights and learning rates depend on the width: mup keeps the best rate that of "
        "`base_width` (docs/training.md)",
    )
    base_width: int = added(
        DEFAULT_BASE_WIDTH,
        ge=1,
        le=1 << 20,
        description="d_model at which init_std and the learning rate are those of `parametrisation: mup`",
    )

    def problems(self) -> list[str]:
        """Returns the problems of keys that are valid one by one."""
        problems = super().problems()
        if self.head_bias and self.tie_embeddings:
            problems.append("head_bias: true needs a head of its own; set tie_embeddings: false, or head_bias: false")
        if self.base_width != DEFAULT_BASE_WIDTH and self.parametrisation != "mup":
            problems.append(
                f"base_width: {self.base_width} has no effect with parametrisation: {self.parametrisation}; use mup, "
                "or remove it"
            )
        if self.init != "normal" and self.parametrisation == "mup":
            problems.append(
                f"init: {self.init} has a scale of its own, and parametrisation: mup another; use init: normal"
            )
        return problems

    @property
    def width_ratio(self) -> float:
        """base_width / d_model with `parametrisation: mup`, else 1."""
        return self.base_width / self.d_model if self.parametrisation == "mup" else 1.0


class EncoderConfig(StackConfig):
    """Keys of every model without causality, in which a token sees those before and after it."""

    causal: ClassVar[bool] = False

    scan: ScanOption = Field(
        "both",
        description="order in which mixers that scan visit the tokens: forward, row-major from the start; both, from "
        "both ends; cross, row-major and column-major, each from both ends; series, both row-major, then both "
        "column-major. No effect on mixers in which every token sees all in one pass",
    )
    scan_sum: bool = added(
        False,
        description="add the outputs of a mixer in the orders of the scan, in place of their mean; gla, hgrn, hgrn2 "
        "and tnl always add them, before their own norm",
    )
    drop_path: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability with which the last block is dropped for a row, in training; it "
        "rises linearly from 0 in the first block",
    )
    init: Literal["normal", "xavier"] = Field(
        "normal", description="of linear layers: normal with init_std, or uniform as Glorot and Bengio (2010) do"
    )

    def problems(self) -> list[str]:
        problems = super().problems()
        if self.axes == 1 and self.scan in ("cross", "series"):
            problems.append(f"scan: {self.scan} needs a grid of more than one axis, and here is a sequence; use both")
        return problems


def channel_problems(config: Any) -> list[str]:
    """Returns the problems of the mean and std of pixels, in a configuration with `channels`."""
    return [
        f"{key}: has {len(numbers)} numbers, but channels is {config.channels}; give one per channel"
        for key, numbers in (("mean", config.mean), ("std", config.std))
        if numbers is not None and len(numbers) != config.channels
    ]
