"""The configurations of bidirectional models of text and of sequences: a stack of layers with what is around it."""

from typing import Literal

from pydantic import Field

from linnet.config import Factor
from linnet.models.config import EncoderConfig, Pixel, channel_problems


class MaskedConfig(EncoderConfig):
    """Everything that defines a masked language model except its weights (`linnet.encoders.models`)."""

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
    """Everything that defines a model of sentences except its weights (`linnet.encoders.models`)."""

    TITLE = "a model of sentences"

    outputs: int = Field(2, ge=1, le=1 << 20, description="classes; 1 is a number, which is fitted by squared error")
    pool: Literal["first", "mean"] = Field("first", description="what the head reads: the first token, or their mean")
    head_dropout: float = Field(0.1, ge=0, lt=1, description="probability of dropout before the last layer")


class SequenceConfig(EncoderConfig):
    """Everything that defines a classifier of sequences except its weights (`linnet.encoders.models`)."""

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
        problems = super().problems() + channel_problems(self)
        if self.side is None:
            problems += [
                f"{key}: is of pixels, and side is null; leave it out" for key in ("mean", "std") if getattr(self, key)
            ]
        elif self.head == "retrieval":
            problems.append("head: retrieval compares two texts, and side makes the sequences pixels; use head: linear")
        elif self.num_positions is not None and self.num_positions < self.side**2:
            problems.append(
                f"num_positions: {self.num_positions} is below the {self.side**2} pixels of side: {self.side}; use "
                f"{self.side**2}"
            )
        for key in ("dropout", "drop_path") if self.head == "retrieval" else ():
            if rate := getattr(self, key):  # masks are numbered by rows, and a row has two texts
                problems.append(f"{key}: {rate} is not built for head: retrieval; use 0")
        return problems
