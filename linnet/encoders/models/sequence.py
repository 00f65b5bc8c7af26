"""A classifier of sequences: tokens, pairs of texts, or the pixels of an image, row by row (Long Range Arena).

Rows of different lengths are packed into one, and no token sees another row. So a padded batch gives what its rows give
alone, in every mixer, and padding enters no norm and no mean. The retrieval head compares two texts that pass through
the same encoder (Tay et al. 2020, arXiv:2011.04006; its features are those of HGRN2's and S4's code).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.encoders.config import SequenceConfig
from linnet.layers.positions.grid import Grid
from linnet.models.backbone import Backbone
from linnet.models.kinds import Kind
from linnet.models.labelled import labelled_loss
from linnet.models.patches import Patches


class RetrievalHead(nn.Module):
    """Maps the features f1, f2 of two texts to classes: [f1, f2, f1 f2, f1 - f2], Linear 4D -> D, GELU, Linear."""

    def __init__(self, d_model: int, classes: int):
        super().__init__()
        self.hidden = nn.Linear(4 * d_model, d_model)
        self.out = nn.Linear(d_model, classes)

    def forward(self, features: Tensor) -> Tensor:
        """Maps [B, 2, D] to [B, classes]."""
        first, second = features.unbind(1)
        both = torch.cat([first, second, first * second, first - second], -1)
        return self.out(F.gelu(self.hidden(both)))


class SequenceClassifier(nn.Module):
    """Maps sequences to the logits of classes.

    Attributes:
        grid: of the pixels of an image, one axis or two (`SequenceConfig.axes`); None for tokens.
    """

    def __init__(self, config: SequenceConfig):
        super().__init__()
        self.config = config
        self.grid: Grid | None = None
        if config.side is None:
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        else:
            self.grid = Grid((config.side, config.side) if config.axes == 2 else (config.side**2,))
            self.pixels = Patches(config.channels, 1, config.d_model, config.mean, config.std)
            self.pixels.proj.fan_in = config.positions != "learned"  # as in `ImageClassifier`
        side = config.side if config.axes == 2 else None
        self.backbone = Backbone(config, causal=False, axes=config.axes, side=side)
        if config.head == "retrieval":
            self.head: nn.Module = RetrievalHead(config.d_model, config.classes)
        else:
            self.head = nn.Linear(config.d_model, config.classes)

    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Returns the logits [B, classes].

        Args:
            inputs: tokens int64 [B, L]; with the retrieval head [B, 2, L]; or images [B, C, H, W], uint8 or floating
                point from 0 to 1.
            lengths: int64 [B] or [B, 2], at least 1, the tokens of each row that count; None: all of them.

        Raises:
            ValueError: inputs of another shape, or rows longer than `num_positions`.
        """
        if self.config.side is not None:
            return self.head(self.features(inputs))
        if (inputs.ndim == 3) != (self.config.head == "retrieval"):
            head = self.config.head
            wanted = "[batch, 2, length]" if head == "retrieval" else "[batch, length]"
            raise ValueError(f"inputs: have shape {list(inputs.shape)}, but head: {head} reads {wanted}; give those")
        if inputs.ndim == 2:
            return self.head(self.features(inputs, lengths))
        found = self.features(inputs.flatten(0, 1), None if lengths is None else lengths.flatten())
        return self.head(found.unflatten(0, (-1, 2)))

    def features(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Returns the pooled output of the backbone, [B, D]. Arguments as `forward`, pairs as rows of their own."""
        if self.config.side is not None:
            x, _ = self.backbone(self._project(inputs), grid=self.grid)
            return self._pool(x, None)
        batch, longest = inputs.shape
        if (most := self.config.num_positions) is not None and longest > most:
            raise ValueError(
                f"inputs: rows of {longest} tokens are longer than num_positions: {most}, the table of positions: "
                "learned; cut the rows, or use a larger num_positions or positions: sinusoidal"
            )
        if lengths is None:
            x, _ = self.backbone(self.embedding(inputs))
            return self._pool(x, None)
        inside = torch.arange(longest, device=inputs.device) < lengths[:, None]
        places = inside.flatten().nonzero()[:, 0]  # waits for a GPU
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        x, _ = self.backbone(self.embedding(inputs.flatten()[places][None]), cu_seqlens=cu_seqlens)
        rows = x.new_zeros(batch * longest, x.shape[-1]).index_copy(0, places, x[0])
        return self._pool(rows.unflatten(0, (batch, longest)), lengths)

    def loss(self, inputs: Tensor, lengths: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy (nats, at least float32) and the number of rows; `labels` int64 [B]."""
        return labelled_loss(self.forward(inputs, lengths), labels)

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the head for one text or image, of any length; of a pair the half."""
        width, classes = self.config.d_model, self.config.classes
        if self.config.head == "retrieval":
            return 1.0 * width * (4 * width + classes)
        return 2.0 * width * classes

    def input_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the projection of pixels; 0 for tokens."""
        return 0.0 if self.config.side is None else 2.0 * seq_len * self.config.channels * self.config.d_model

    def _project(self, images: Tensor) -> Tensor:
        """Returns tokens [B, H W, D] of images [B, C, H, W]."""
        side = self.config.side
        if images.ndim != 4 or images.shape[-2:] != (side, side):
            raise ValueError(
                f"inputs: have shape {list(images.shape)}, but the model reads [batch, {self.config.channels}, {side}, "
                f"{side}]; give such images, or change side"
            )
        return self.pixels(self.pixels.normalise(images))

    def _pool(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """Returns [B, D] of x [B, L, D], which is 0 where rows have no token."""
        match self.config.pool:
            case "first":
                return x[:, 0]
            case "last" if lengths is not None:
                return x[torch.arange(len(x), device=x.device), lengths - 1]
            case "last":
                return x[:, -1]
        return x.mean(1) if lengths is None else x.sum(1) / lengths[:, None].to(x.dtype)


KIND = Kind("sequence", SequenceConfig, SequenceClassifier, "linnet evaluate lra")
