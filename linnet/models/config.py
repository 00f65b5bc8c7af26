"""The configuration of a causal language model: a stack of layers and a vocabulary.

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

from pydantic import Field

from linnet.models.stack import StackConfig


class ModelConfig(StackConfig):
    """Everything that defines a causal language model except its weights."""

    vocab_size: int = Field(
        256, ge=2, le=1 << 31, description="rows of the embedding: the tokens, and optional padding"
    )
    tie_embeddings: bool = Field(True, description="use the embedding as the head")
    embedding_scale: float = Field(1.0, gt=0, description="factor of the embedding; TNL v1 uses sqrt(d_model)")
