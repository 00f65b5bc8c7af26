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

from linnet.config import Factor
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
    logit_scale: Factor = Field(
        1.0,
        exclude_if=lambda given: given == 1.0,
        description="factor of the output of the last norm before the head, and so of the logits (Granite, Falcon-H1)",
    )
    embedding_norm: bool = Field(False, description="a norm of the embedding and its positions, before the layers")
    embedding_std: Factor | None = Field(
        None,
        exclude_if=lambda given: given is None,
        description="of the initial embedding; null: init_std. With an embedding_scale of sqrt(d_model), "
        "1 / sqrt(d_model) gives the residual stream a variance of 1",
    )
    init: Literal["normal", "xavier"] = Field(
        "normal",
        exclude_if=lambda given: given == "normal",
        description="of linear layers: normal with init_std, or uniform as Glorot and Bengio (2010) do",
    )

    parametrisation: Literal["standard", "mup"] = Field(
        "standard",
        exclude_if=lambda given: given == "standard",
        description="how initial weights and learning rates depend on the width: mup keeps the best rate that of "
        "`base_width` (docs/training.md)",
    )
    base_width: int = Field(
        DEFAULT_BASE_WIDTH,
        ge=1,
        le=1 << 20,
        exclude_if=lambda given: given == DEFAULT_BASE_WIDTH,
        description="d_model at which init_std and the learning rate are those of `parametrisation: mup`",
    )

    def problems(self) -> list[str]:
        """Returns the problems of keys that are valid one by one."""
        found = super().problems()
        if self.head_bias and self.tie_embeddings:
            found.append("head_bias: true needs a head of its own; set tie_embeddings: false, or head_bias: false")
        if self.base_width != DEFAULT_BASE_WIDTH and self.parametrisation != "mup":
            found.append(
                f"base_width: {self.base_width} has no effect with parametrisation: {self.parametrisation}; use mup, "
                "or remove it"
            )
        if self.init != "normal" and self.parametrisation == "mup":
            found.append(
                f"init: {self.init} has a scale of its own, and parametrisation: mup another; use init: normal"
            )
        return found

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
    scan_sum: bool = Field(
        False,
        exclude_if=lambda given: not given,
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
        found = super().problems()
        if self.axes == 1 and self.scan in ("cross", "series"):
            found.append(f"scan: {self.scan} needs a grid of more than one axis, and here is a sequence; use both")
        return found


class MaskedConfig(EncoderConfig):
    """Everything that defines a masked language model except its weights (`linnet.models.bidirectional.masked_lm`)."""

    TITLE = "a masked language model"

    vocab_size: int = Field(
        256,
        ge=2,
        le=1 << 31,
        description="tokens, and optional padding; the mask token has a row of its own after them",
    )
    tie_embeddings: bool = Field(True, description="use the embedding as the head")
    embedding_scale: Factor = Field(1.0, description="factor of the embedding")
    embedding_norm: bool = Field(False, description="a norm of the embedding and its positions, before the layers")


class SentenceConfig(MaskedConfig):
    """Everything that defines a model of sentences except its weights (`linnet.models.bidirectional.sentence`)."""

    TITLE = "a model of sentences"

    outputs: int = Field(2, ge=1, le=1 << 20, description="classes; 1 is a number, which is fitted by squared error")
    pool: Literal["first", "mean"] = Field("first", description="what the head reads: the first token, or their mean")
    head_dropout: float = Field(0.1, ge=0, lt=1, description="probability of dropout before the last layer")


class SequenceConfig(EncoderConfig):
    """Everything that defines a classifier of sequences except its weights (`linnet.models.bidirectional.sequence`)."""

    TITLE = "a classifier of sequences"

    vocab_size: int = Field(256, ge=2, le=1 << 31, description="rows of the embedding, where sequences are of tokens")
    side: int | None = Field(
        None,
        ge=1,
        le=1 << 12,
        description="side of the square images whose pixels are the sequence, row by row; null: sequences of tokens. "
        "Scans cross and series see a grid of pixels, and the others a sequence",
    )
    channels: int = Field(1, ge=1, le=1 << 10, description="channels of the images: 1 grey, 3 colour")
    classes: int = Field(2, ge=2, le=1 << 24, description="classes, the outputs of the head")
    pool: Literal["mean", "last", "first"] = Field(
        "mean", description="what the head reads: the mean of all tokens of a row, the last, or the first"
    )
    head: Literal["linear", "retrieval"] = Field(
        "linear",
        description="linear, of one sequence; retrieval, of two texts with features f1, f2: [f1, f2, f1 f2, f1 - f2], "
        "two layers with GELU between them",
    )
    mean: list[Pixel] | None = Field(None, description="of each channel, subtracted from pixels from 0 to 1")
    std: list[Factor] | None = Field(
        None, description="of each channel; pixels are divided by it after `mean` is subtracted"
    )

    @property
    def axes(self) -> int:  # type: ignore[override]
        """Axes of the grid of tokens: 2 where a scan visits columns of pixels, else 1."""
        return 2 if self.side is not None and self.scan in ("cross", "series") else 1

    def problems(self) -> list[str]:
        """Returns the problems of keys that are valid one by one."""
        found = super().problems() + channel_problems(self)
        if self.side is None:
            found += [
                f"{key}: is of pixels, and side is null; leave it out" for key in ("mean", "std") if getattr(self, key)
            ]
        elif self.head == "retrieval":
            found.append("head: retrieval compares two texts, and side makes the sequences pixels; use head: linear")
        elif self.num_positions is not None and self.num_positions < self.side**2:
            found.append(
                f"num_positions: {self.num_positions} is below the {self.side**2} pixels of side: {self.side}; use "
                f"{self.side**2}"
            )
        for key in ("dropout", "drop_path") if self.head == "retrieval" else ():
            if given := getattr(self, key):  # masks are numbered by rows, and a row has two texts
                found.append(f"{key}: {given} is not built for head: retrieval; use 0")
        return found


def channel_problems(config: Any) -> list[str]:
    """Returns the problems of the mean and std of pixels, in a configuration with `channels`."""
    return [
        f"{key}: has {len(given)} numbers, but channels is {config.channels}; give one per channel"
        for key, given in (("mean", config.mean), ("std", config.std))
        if given is not None and len(given) != config.channels
    ]
