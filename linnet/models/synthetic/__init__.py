"""Models for synthetic tasks: the auto-encoder of compression, losses at few targets, vocabularies padded to a size.

The auto-encoder is for the compression task (paper 004, B.1.5): the last token carries the whole sequence. The encoder
is a backbone of any layout. A two-layer perceptron reads the encoder's output at the last position, plus the fixed
sin-cos embedding of a position, and predicts the token at that position. All positions are decoded at once.

Departures: hidden width D and GELU, which the paper leaves open. The published implementation has three linear layers
with norms before them, and no norm after the encoder: the form `published`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.norm import build_norm
from linnet.models.backbone import Backbone
from linnet.models.causal_lm import IGNORE, CausalLM
from linnet.models.config import ModelConfig
from linnet.ops import sequence
from linnet.ops.cross_entropy import cross_entropy_reference


class AutoEncoder(nn.Module):
    """Maps tokens int64 [B, T] to logits [B, num_positions, vocab] of the tokens at positions 0 to num_positions - 1.

    Args:
        published: whether the decoder is that of the published implementation: norm, linear, GELU, norm, linear, GELU,
            norm, head.

    Raises:
        ValueError: the model width is odd; sines and cosines need an even width.
    """

    logit_mask: Tensor | None  # [vocab], added to all logits, if it is set (`linnet.models.synthetic.pad_vocabulary`)

    def __init__(self, config: ModelConfig, num_positions: int, published: bool = False):
        super().__init__()
        self.config, self.published = config, published
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.backbone = Backbone(config)
        self.register_buffer("positions", sin_cos(num_positions, config.d_model), persistent=False)
        if published:
            self.backbone.norm = nn.Identity()
            norms = [build_norm(config.norm, config.d_model, config.norm_eps) for _ in range(3)]
            linears = [nn.Linear(config.d_model, config.d_model) for _ in range(2)]
            layers = (norms[0], linears[0], nn.GELU(), norms[1], linears[1], nn.GELU(), norms[2])
            self.decoder = nn.Sequential(*layers)
        else:
            self.hidden = nn.Linear(config.d_model, config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size)
        self.register_buffer("logit_mask", None, persistent=False)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale
        x, _ = self.backbone(x)
        x = x[:, -1:] + self.positions
        logits = self.head(self.decoder(x) if self.published else F.gelu(self.hidden(x)))
        return logits if self.logit_mask is None else logits + self.logit_mask

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        """Returns logits and None, as `CausalLM.forward` returns logits and states."""
        return self.logits(tokens), None

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the negative log-likelihood (nats, at least float32) and the number of targets other than
        -100.

        Args:
            targets: int64 [B, num_positions].
        """
        logits = self.logits(tokens)
        if targets.shape != logits.shape[:2]:
            shapes = f"shape {list(targets.shape)} does not match the positions {list(logits.shape[:2])}"
            raise ValueError(f"targets: {shapes}; give one target per position")
        return cross_entropy_reference(logits, targets, IGNORE), (targets != IGNORE).sum()

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the output layer for one sequence; they do not depend on `seq_len`.

        Hidden layers, 2 D^2 per position each, are not counted, as in the published rows of `flops`.
        """
        return 2.0 * len(self.positions) * self.config.d_model * self.config.vocab_size


def sin_cos(num_positions: int, width: int) -> Tensor:
    """Returns [num_positions, width]: sin(i w_j), cos(i w_j), w_j = 10000^(-j / (h - 1)), j = 0..h-1, h = width / 2."""
    if width % 2:
        raise ValueError(f"d_model: {width} is odd; sines and cosines of positions need an even width, {width + 1}")
    half = width // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(half - 1, 1))
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1).float()


class RecallLM(CausalLM):
    """A `CausalLM` with the same parameters, for rows with at most `answers` targets each, whose logits alone it has.

    MQAR (`linnet.data.synthetic.mqar`) has 8,192 tokens and targets at 64 of 512 positions. Computing the logits of all
    positions would be most of the work of a small model, and seven eighths of them would not be used.
    """

    def __init__(self, config: ModelConfig, answers: int):
        super().__init__(config)
        self.answers = answers

    def loss(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the loss of `CausalLM.loss`, from the logits of the targets only."""
        if sequence.span() is not None:  # the targets of a row may all be in one span
            return super().loss(tokens, targets, cu_seqlens)
        x, _ = self.backbone(self.embed(tokens), cu_seqlens=cu_seqlens)
        places = (targets != IGNORE).int().topk(self.answers, dim=1).indices
        x = x.gather(1, places.unsqueeze(-1).expand(*places.shape, x.shape[-1]))
        targets = targets.gather(1, places)
        return self.nll(x, targets), (targets != IGNORE).sum()

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the head for one sequence: the logits of `answers` tokens."""
        return super().head_flops(self.answers)


@torch.no_grad()
def pad_vocabulary(model: CausalLM | AutoEncoder, size: int) -> None:
    """Widens embedding and head of a model to `size` tokens, in place; `config` keeps the tokens that it had.

    Models of several vocabularies then have one shape and train together. The new rows are zeros and their logits -inf.
    No input has such a token and no target is one, so the function is the same, and the new rows get no gradient.
    The model gets a buffer `logit_mask` [size], also if `size` is its own vocabulary.

    Raises:
        ValueError: `size` is less than the vocabulary of the model, or a tensor-parallel part of it.
    """
    vocab = model.config.vocab_size
    if size < vocab or model.embedding.weight.shape[0] != vocab:
        raise ValueError(f"size: {size} is less than the vocabulary of {vocab} tokens, or the model is split or padded")
    model.embedding.weight = nn.Parameter(_rows(model.embedding.weight, size))
    model.embedding.num_embeddings = size
    if model.head is not None:
        model.head.weight = nn.Parameter(_rows(model.head.weight, size))
        model.head.out_features = size
        if model.head.bias is not None:
            model.head.bias = nn.Parameter(_rows(model.head.bias, size))
    mask = torch.zeros(size, device=model.embedding.weight.device)
    mask[vocab:] = float("-inf")
    model.logit_mask = mask


def _rows(x: Tensor, size: int) -> Tensor:
    return torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])
