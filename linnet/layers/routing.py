"""Routing of tokens to experts (papers 004, section 3.2, and Shazeer et al. 2017, arXiv:1701.06538).

s_t = softmax(top_k(u_t W_g)): logits outside the k largest are -inf, so exactly k experts of a token have weight. (The
published implementation of paper 004 sets them to 0 instead, which gives weight to all experts: `zero_logits`.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.ops.tensor_parallel import Split

BALANCE = Field(0.0, ge=0, description="weight of the balance loss of the experts in training; 0 leaves it out")
RoutingKind = Literal["top_k", "zero_logits"]
ROUTING = Field(
    "top_k",
    description="softmax over the num_active largest logits; zero_logits: over all, with the other logits set to 0, as "
    "in the published implementation of paper 004, where every expert has weight",
)


class Routing(NamedTuple):
    """The experts of each token: `experts` int64 [..., k], their `weights` [..., k], and `logits` [..., E].

    Attributes:
        chosen: how many of the experts count as chosen, the first ones; None for all k.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor
    chosen: int | None = None

    @property
    def num_experts(self) -> int:
        return self.logits.shape[-1]

    def dense_weights(self) -> Tensor:
        """Returns weights [..., E], with zeros for the experts that a token does not go to."""
        return torch.zeros_like(self.logits).scatter(-1, self.experts, self.weights)

    def load(self) -> Tensor:
        """Returns [E]: the share of the choices that each expert got; the sum is 1, an even load is 1/E each."""
        chosen = self.experts[..., : self.chosen]
        return F.one_hot(chosen, self.num_experts).flatten(0, -2).to(self.logits.dtype).mean(0)

    def balance_loss(self) -> Tensor:
        """Returns E * sum_e load_e * mean probability_e: 1 for an even load, at most E (arXiv:2101.03961, section 4).

        The option `balance_coefficient` of a routed layer adds it to the training loss.
        """
        probability = self.logits.softmax(-1).flatten(0, -2).mean(0)
        return self.num_experts * (self.load() * probability).sum()


class Routed:
    """Mixin for a layer with experts: its balance loss, weighted by the option `balance_coefficient`.

    `forward` calls `keep_balance` with its routing.
    """

    config: Any
    num_experts: int
    tp: Split | None = None
    _balance: Tensor | None = None
    _load: Tensor | None = None
    _group: "dist.ProcessGroup | None" = None

    def own_experts(self, x: Tensor) -> Tensor:
        """Returns the part of x [..., E] of the experts that this rank holds; all of it without tensor parallelism."""
        return x if self.tp is None else x.narrow(-1, self.tp.rank * self.num_experts, self.num_experts)

    def keep_balance(self, routing: Routing) -> None:
        """Stores the balance loss of a training pass for `auxiliary_loss`; of one rank of several, its two factors."""
        if not (self.config.balance_coefficient and self.training and torch.is_grad_enabled()):
            return
        if self.tp is not None:  # the gradients of all ranks are summed, and each has the whole loss
            share = routing.logits / self.tp.size
            routing = routing._replace(logits=share + (routing.logits - share).detach())
        if self._group is None:
            self._balance = self.config.balance_coefficient * routing.balance_loss()
        else:
            self._balance = routing.logits.softmax(-1).flatten(0, -2).sum(0)
            self._load = F.one_hot(routing.experts[..., : routing.chosen], routing.num_experts).flatten(0, -2).sum(0)

    def auxiliary_loss(self) -> Tensor | None:
        balance, load, self._balance, self._load = self._balance, self._load, None, None
        if balance is None or load is None:
            return balance
        # Not in `forward`: ranks may pass through one layer in turn there. The load has no gradient.
        dist.all_reduce(load, group=self._group)
        choices = load.sum()
        tokens = choices / self.config.num_active
        load = load.to(torch.promote_types(balance.dtype, torch.float32)) / choices
        return self.config.balance_coefficient * len(load) * (load * balance).sum() / tokens


def top_k_routing(logits: Tensor, k: int) -> Routing:
    """Returns the k largest of logits [..., E], with the softmax over them alone, at least in float32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    largest, experts = logits.topk(k, dim=-1)
    return Routing(experts, largest.softmax(-1), logits)


def scored_routing(
    logits: Tensor,
    k: int,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalise: bool = True,
    scale: float = 1.0,
    correction: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
) -> Routing:
    """Returns the k experts with the highest scores of logits [..., E], of exactly k experts whatever their load.

    Args:
        score: of an expert, at least in float32.
        normalise: divides the weights of a token, the scores of its experts, by their sum. scale: multiplies them.
        correction: [E], added to the scores for the choice alone (DeepSeek-V3, arXiv:2412.19437, equation 16).
        groups: number of groups of experts, and of those of a token: the ones whose two highest scores sum highest.
    """
    if score == "softmax" and normalise and correction is None and groups[0] == groups[1]:
        routing = top_k_routing(logits, k)
        return routing if scale == 1.0 else routing._replace(weights=routing.weights * scale)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if groups[0] != groups[1]:
        grouped = ranked.unflatten(-1, (groups[0], -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(groups[1], -1).indices
        chosen = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0) > 0
        ranked = grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = ranked.topk(k, -1).indices
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * scale, logits)


def route_tokens(logits: Tensor, k: int, kind: RoutingKind) -> Routing:
    """Returns the routing of one kind for logits [..., E].

    `top_k` is `top_k_routing`. With `zero_logits` the weights of all experts are the softmax of the logits, in which
    those outside the k largest are 0; `experts` has all E, the k largest logits first.
    """
    if kind == "top_k":
        return top_k_routing(logits, k)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    ordered, experts = logits.sort(dim=-1, descending=True)
    kept = torch.cat([ordered[..., :k], torch.zeros_like(ordered[..., k:])], -1)
    return Routing(experts, kept.softmax(-1), logits, k)


def balance_over(model: nn.Module, group: "dist.ProcessGroup") -> None:
    """Makes the balance losses of a model's experts those of all tokens of a group's ranks, also of their spans.

    `auxiliary_loss` of a layer is then the share of this rank's tokens: the shares of the ranks add up to the loss. It
    is called once after each training pass, on every rank, since it sums the loads of the experts over the ranks.
    """
    for layer in model.modules():
        if isinstance(layer, Routed):
            layer._group = group


@contextmanager
def record_loads(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Records expert loads: each forward pass of `model` appends the load of each of its routed layers.

    A routed layer has a method `route(x) -> Routing` for its input. The routes are computed a second time, so use this
    for inspection only.

        with record_loads(model) as loads:
            model(tokens)
        loads["backbone.blocks.0.channel"]  # a list of [E], one per pass
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
