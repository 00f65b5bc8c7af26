"""Models whose tokens see all others: masked language models, and heads on sentences and on sequences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.encoders.config import MaskedConfig, SentenceConfig, SequenceConfig
from linnet.layers.dropout import Dropout, DropoutPosition
from linnet.layers.positions import Grid
from linnet.models.backbone import Backbone
from linnet.models.causal_lm import IGNORE
from linnet.models.kinds import Kind, labelled_loss
from linnet.models.patches import Patches
from linnet.models.recipes.registry import default_heads, register_family, register_recipe
from linnet.ops.chunks import exact
from linnet.ops.cross_entropy import cross_entropy_reference, is_whole, linear_cross_entropy
from linnet.ops.matvec import linear

# A masked language model: every token sees all others, and hidden ones are predicted (Devlin et al. 2018).
#
# The mask token is one row more than the vocabulary; the head, usually the embedding, has no logit for it. Logits are
# computed at masked places only, a quarter of the tokens: at every token the head of `bert-crammed` would cost 27 % of
# the work of its layers (Geiping and Goldstein 2022, arXiv:2212.14034, do the same).


class MaskedLM(nn.Module):
    """Maps tokens int64 [B, T], of which some have the id `vocab_size` (the mask token), to logits [B, T, vocab]."""

    def __init__(self, config: MaskedConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.backbone = Backbone(config, causal=False)
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def mask_token(self) -> int:
        """Id of the mask token, one above those of the vocabulary."""
        return self.config.vocab_size

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns the logits of every position.

        Args:
            tokens: int64 [B, T].
            cu_seqlens: int32 [N+1], boundaries of documents or sentences with B = 1; none sees another.
        """
        x, _ = self.backbone(embed(self, tokens), cu_seqlens=cu_seqlens)
        return linear(x, self.weight())

    def loss(
        self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, answers: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the summed negative log-likelihood (nats, at least float32) and the number of targets except -100.

        Args:
            tokens: int64 [B, T], as the model sees them.
            targets: int64 [B, T], the token at each masked place and -100 elsewhere.
            cu_seqlens: as in `forward`.
            answers: largest number of targets of a row, if it is known: shapes are then fixed, and the host does not
                wait for a GPU to count them.
        """
        wanted = targets != IGNORE
        if answers is None:
            rows, columns = wanted.nonzero(as_tuple=True)
        else:
            columns = wanted.int().topk(answers, dim=1).indices.sort(1).values
            rows = torch.arange(len(targets), device=targets.device)[:, None].expand_as(columns).flatten()
            columns = columns.flatten()
        x, _ = self.backbone(embed(self, tokens), cu_seqlens=cu_seqlens, keep=(rows, columns))
        labels, weight = targets[rows, columns], self.weight()
        if is_whole(weight):
            nll = linear_cross_entropy(x, weight, labels, ignore_index=IGNORE)
        else:
            nll = cross_entropy_reference(linear(x, weight), labels, IGNORE)
        return nll, wanted.sum()

    def log_likelihoods(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Returns the log-likelihood of each target in nats, at least float32 [n], in the order of rows and places.

        Args:
            tokens, targets, cu_seqlens: as in `loss`.
        """
        rows, columns = (targets != IGNORE).nonzero(as_tuple=True)
        x, _ = self.backbone(embed(self, tokens), cu_seqlens=cu_seqlens, keep=(rows, columns))
        logits = linear(x, self.weight())
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return logits.log_softmax(-1).gather(-1, targets[rows, columns][:, None])[:, 0]

    def weight(self) -> Tensor:
        """Returns the rows of the head, [vocab, D]."""
        return self.embedding.weight[: self.config.vocab_size] if self.head is None else self.head.weight

    def head_flops(self, positions: int) -> float:
        """Returns the forward FLOPs of the head for the logits at a number of positions of a sequence."""
        return 2.0 * positions * self.config.d_model * self.config.vocab_size


def embed(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the input of the layers of a model with an `embedding`: int64 [...] -> [..., D]."""
    x = model.embedding(tokens)
    return x if model.config.embedding_scale == 1.0 else x * model.config.embedding_scale


MASKED_LM = Kind("masked_lm", MaskedConfig, MaskedLM, "linnet evaluate masked")


# A model of sentences: a bidirectional encoder with a head, which fine-tuning adds to a masked language model.
#
# Sentences of different lengths are packed into one row, and no token sees another sentence, so there is no padding to
# compute or to mask. The head is BERT's: the features of the first token, Linear, tanh, dropout, Linear (Devlin et al.
# 2018, arXiv:1810.04805, 4.1).


HEAD_SITE = 1 << 30  # of the head's dropout, beyond those of all layers


class SentenceModel(nn.Module):
    """Maps packed sentences to classes, or to one number each.

    Its embedding and backbone have the names and shapes of `MaskedLM`, from whose weights fine-tuning starts. `pooler`
    and `head` start anew.
    """

    def __init__(self, config: SentenceConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size + 1, config.d_model)
        self.backbone = Backbone(config, causal=False)
        self.pooler = nn.Linear(config.d_model, config.d_model)
        self.head = nn.Linear(config.d_model, config.outputs)
        self.dropout = Dropout(config.head_dropout, HEAD_SITE) if config.head_dropout else None
        if self.dropout is not None and self.backbone.dropout_position is None:
            self.backbone.dropout_position = DropoutPosition()

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Returns [N, outputs] for N sentences.

        Args:
            tokens: int64 [1, T], the sentences one after another, none of them empty.
            cu_seqlens: int32 [N+1], where each starts, and T.
        """
        pooled = torch.tanh(self.pooler(self.features(tokens, cu_seqlens)))
        if self.dropout is not None and self.training:
            first = cu_seqlens[:-1].long()
            position = self.backbone.dropout_position
            assert position is not None
            keys = position(tokens[..., None], cu_seqlens)[:, first]
            pooled = self.dropout(pooled[None], keys)[0]
        return self.head(pooled)

    def features(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Returns the features of each sentence, [N, D]: those of its first token, or the mean over its tokens."""
        x, first = embed(self, tokens), cu_seqlens[:-1].long()
        if self.config.pool == "first":
            x, _ = self.backbone(x, cu_seqlens=cu_seqlens, keep=(torch.zeros_like(first), first))
            return x
        x, _ = self.backbone(x, cu_seqlens=cu_seqlens)
        # A product with a matrix of 0 and 1, because a sum by index adds in another order in each call on a GPU.
        positions = torch.arange(x.shape[1], device=x.device)
        inside = ((positions >= cu_seqlens[:-1, None]) & (positions < cu_seqlens[1:, None])).to(x.dtype)
        with exact(x):
            return inside @ x[0] / cu_seqlens.diff()[:, None].to(x.dtype)

    def loss(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the summed loss and the number of sentences: cross-entropy in nats, or squared error for one output.

        Args:
            labels: int64 [N], classes; float [N] for one output.
        """
        return labelled_loss(self.forward(tokens, cu_seqlens).float(), labels)

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the head for one sentence, of any length."""
        return 2.0 * self.config.d_model * (self.config.d_model + self.config.outputs)


SENTENCE = Kind("sentence", SentenceConfig, SentenceModel, "linnet evaluate glue")


# A classifier of sequences: tokens, pairs of texts, or the pixels of an image, row by row (Long Range Arena).
#
# Rows of different lengths are packed into one, and no token sees another row. So a padded batch gives what its rows
# give alone, in every mixer, and padding enters no norm and no mean. The retrieval head compares two texts that pass
# through the same encoder (Tay et al. 2020, arXiv:2011.04006; its features are those of HGRN2's and S4's code).


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
        vectors = self.features(inputs.flatten(0, 1), None if lengths is None else lengths.flatten())
        return self.head(vectors.unflatten(0, (-1, 2)))

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


SEQUENCE = Kind("sequence", SequenceConfig, SequenceClassifier, "linnet evaluate lra")


# Bidirectional language models: BERT as "Cramming" trains it in a day (Geiping and Goldstein 2022), and LightNet's.
#
# `bert-crammed`: 16 layers of width 768, 12 heads, pre-LayerNorm with epsilon 1e-12, no biases in linear layers, GELU
# gated units of inner width 1536 (the published 3072 are both halves of the gate), scaled sinusoids and a norm after
# the embedding, tied embedding, vocabulary 32,768: 119.6 M parameters, plus one row for the mask token.
#
# `lightnet-bert`: paper 003 (5.1, Table 5) names no shape of its own. Here the same stack has LightNet's mixer with
# LRPE and one Toeplitz encoding before the layers, with a kernel for each direction, and no sinusoids.


CRAMMED_VOCAB = 32_768
GATE_RANK = 64


@register_family("bert", "masked_lm")
def crammed_bert(
    d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256
) -> MaskedConfig:
    mixer = {"attention": {"num_heads": num_heads or default_heads(d_model), "rope": False}}
    layout = f"attention+glu x{num_layers}"
    return _bert(layout, mixer, d_model, inner, vocab_size, positions="scaled_sinusoidal")


@register_family("lightnet-bert", "masked_lm")
def lightnet_bert(
    d_model: int, num_layers: int, num_heads: int = 0, inner: int = 0, vocab_size: int = 256
) -> MaskedConfig:
    heads = num_heads or default_heads(d_model)
    mixer = {"lightnet": {"num_heads": heads, "gate_rank": min(GATE_RANK, d_model)}}
    return _bert(f"tpe lightnet+glu x{num_layers}", mixer, d_model, inner, vocab_size)


def _bert(layout: str, mixer: dict, d_model: int, inner: int, vocab_size: int, **keys: Any) -> MaskedConfig:
    """Returns a model with gated units of GELU, and with what both families have in common."""
    keys["options"] = mixer | {"glu": {"inner": inner or 2 * d_model, "activation": "gelu"}}
    keys |= {"norm": "layernorm", "norm_eps": 1e-12, "embedding_norm": True}
    return MaskedConfig(d_model=d_model, vocab_size=vocab_size, layout=layout, **keys)


def _small(build: Callable[..., MaskedConfig], d_model: int, num_layers: int) -> MaskedConfig:
    """Returns a model for bytes whose weights start at 1 / sqrt(d_model), with which small models learn sooner."""
    return build(d_model, num_layers).model_copy(update={"init_std": round(d_model**-0.5, 3)})


register_recipe("bert-crammed", lambda: crammed_bert(768, 16, 12, 1536, CRAMMED_VOCAB), "masked_lm")
register_recipe("lightnet-bert", lambda: lightnet_bert(768, 16, 12, 1536, CRAMMED_VOCAB), "masked_lm")
for name, build in (("bert", crammed_bert), ("lightnet-bert", lightnet_bert)):
    for layers, width in ((4, 128), (4, 512)):
        register_recipe(f"{name}-{layers}x{width}", partial(_small, build, width, layers), "masked_lm")
