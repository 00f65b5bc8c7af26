"""Routing of tokens to experts (papers 004, section 3.2, and Shazeer et al. 2017, arXiv:1701.06538).

s_t = softmax(top_k(u_t W_g)): logits outside the k largest are -inf, so exactly k experts of a token have a weight.
(The published implementation of paper 004 puts 0 instead of -inf there, and so gives all experts weight.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Routing(NamedTuple):
    """Where each token goes: `experts` int64 [..., k], with `weights` [..., k] that sum to 1, by `logits` [..., E]."""

    experts: Tensor
    weights: Tensor
    logits: Tensor

    @property
    def num_experts(self) -> int:
        return self.logits.shape[-1]

    def dense_weights(self) -> Tensor:
        """[..., E], with zeros for the experts that a token does not go to."""
        return torch.zeros_like(self.logits).scatter(-1, self.experts, self.weights)

    def load(self) -> Tensor:
        """[E]: the share of the tokens' choices that each expert got; they sum to 1, and 1/E each is even."""
        return F.one_hot(self.experts, self.num_experts).flatten(0, -2).to(self.logits.dtype).mean(0)

    def balance_loss(self) -> Tensor:
        """E * sum_e load_e * mean probability_e: 1 where the load is even, up to E (Fedus et al., arXiv:2101.03961, 4).

        The option `balance_coefficient` of a routed layer adds it to the training loss.
        """
        probability = self.logits.softmax(-1).flatten(0, -2).mean(0)
        return self.num_experts * (self.load() * probability).sum()


class Routed:
    """Mixin of a layer with experts: its balance loss, weighted by the option `balance_coefficient`.

    `forward` calls `keep_balance` with its routing.
    """

    config: Any
    _balance: Tensor | None = None

    def keep_balance(self, routing: Routing) -> None:
        """Keeps the balance loss of a training pass for `auxiliary_loss`."""
        if self.config.balance_coefficient and self.training and torch.is_grad_enabled():
            self._balance = self.config.balance_coefficient * routing.balance_loss()

    def auxiliary_loss(self) -> Tensor | None:
        balance, self._balance = self._balance, None
        return balance


def top_k_routing(logits: Tensor, k: int) -> Routing:
    """The k largest of logits [..., E], with the softmax over them alone, at least in float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    largest, experts = logits.topk(k, dim=-1)
    return Routing(experts, largest.softmax(-1), logits)


@contextmanager
def record_loads(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """While it is open, each forward pass of `model` appends the load of the experts of each of its routed layers.

    A routed layer is one with a method `route(x) -> Routing` on its input. For inspection: routes are computed again.

        with record_loads(model) as loads:
            model(tokens)
        loads["backbone.blocks.0.channel"]  # a list of [E], one a pass
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "route")}
    loads: dict[str, list[Tensor]] = {name: [] for name in layers}

    def recorder(name: str):
        def record(module: nn.Module, inputs: tuple) -> None:
            with torch.no_grad():
                loads[name].append(module.route(inputs[0]).load())

        return record

    handles = [module.register_forward_pre_hook(recorder(name)) for name, module in layers.items()]
    try:
        yield loads
    finally:
        for handle in handles:
            handle.remove()
