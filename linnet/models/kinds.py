"""The kinds of models: the configuration and the class of each, how to build any of them from a seed, and the loss that
kinds share whose rows have one label each.

A run folder says what it contains by its `objective`, a model folder by its key `kind` (absent: causal language model).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.companions import Offer
from linnet.models.causal_lm import CausalLM, draw_weights, empty
from linnet.models.config import ModelConfig
from linnet.models.stack import StackConfig


@dataclass(frozen=True)
class Kind:
    """One kind of model.

    Attributes:
        name: its name in files.
        config: class of its configuration.
        module: class of the model, built from a configuration alone.
        commands: what reads a folder with such a model, for messages to users who tried something else.
    """

    name: str
    config: type[StackConfig]
    module: type[nn.Module]
    commands: str = ""


CAUSAL = Kind("causal_lm", ModelConfig, CausalLM, "linnet generate, linnet serve, linnet evaluate text")
KINDS: Mapping[str, Kind] = Offer("kinds", {"causal_lm": CAUSAL})
OBJECTIVE_KINDS: Mapping[str, str] = Offer("objective_kinds", {"text": "causal_lm", "chat": "causal_lm"})


def kind_of(config: StackConfig) -> Kind:
    """Returns the kind of model that a configuration describes, which its class determines."""
    return next(kind for kind in KINDS.values() if kind.config is type(config))


def build(kind: str, config: StackConfig, seed: int = 0, device: torch.device | str | None = None) -> nn.Module:
    """Returns a model of one kind with weights drawn as in `linnet.models.build_model`.

    They are a function of (seed, parameter name) only. A linear layer or embedding with the attribute `starts_zero`
    starts at zero. With `init: xavier` the other linear layers are uniform in +-sqrt(6 / (inputs + outputs)), as in
    DiT, except those with the attribute `init = "normal"`; embeddings stay N(0, init_std). Otherwise a linear layer
    with the attribute `fan_in` is N(0, 1 / inputs), not N(0, init_std).
    """
    module = KINDS[kind].module
    return draw_weights(lambda: module(config), config, seed, device)


def empty_of(config: StackConfig, device: torch.device | str = "cpu") -> nn.Module:
    """Returns the model of any configuration without weights, as `linnet.models.causal_lm.empty` does."""
    return empty(lambda: kind_of(config).module(config), device)


def labelled_loss(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns the summed loss (at least float32) and the number of rows.

    A label is a class, the probabilities of classes, or a number. The loss is the cross-entropy in nats, or with one
    output the squared error.

    Args:
        outputs: [B, classes], or [B, 1] of numbers.
        labels: int64 [B]; the probabilities of each class, [B, classes]; or numbers, float [B].
        smoothing: label smoothing: this share of the target is spread evenly over all classes.
    """
    outputs = outputs.float() if outputs.dtype.itemsize < 4 else outputs
    count = torch.full((), len(outputs), dtype=torch.int64, device=outputs.device)
    labels = labels.to(outputs.dtype) if labels.is_floating_point() else labels
    if outputs.shape[1] == 1:
        return (outputs[:, 0] - labels).square().sum(), count
    return F.cross_entropy(outputs, labels, reduction="sum", label_smoothing=smoothing), count
