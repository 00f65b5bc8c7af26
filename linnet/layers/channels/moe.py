"""Mixture of experts in place of one gated linear unit (paper 004, appendices B.3.1 and C.4.7).

y_t = sum over the k experts e of token t of s_te (SiLU(x_t W_gate^e) * (x_t W_up^e)) W_down^e, with the softmax s over
the k largest logits of a linear router (`linnet.layers.routing`).

Models of today route otherwise, by options (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; Qwen3-Next; Nemotron-H).
`score: sigmoid` scores each expert alone, `normalise: false` keeps the scores of the chosen experts as their weights,
and `weight_scale` multiplies the weights. `correction` adds a number per expert to the scores that choose, which no
gradient reaches, and `groups` limits the choice to the experts of `active_groups` groups, those whose two best sum
highest. A shared expert of width `shared_inner` computes every token, with `shared_gate` times sigmoid(x_t W).
`gated: false` makes experts of two matrices, act(x_t W_up) W_down. With `latent` all experts but the shared one read
and write a narrower vector.

Paper: 8 experts of width 16, 2 of them active. The published implementation is dense: logits outside the top two are 0
instead of -inf, and each down projection sees the hidden units of all experts. Linnet follows the paper: k experts per
token, each with its own three matrices. The options `routing: zero_logits`, `down: dense`, `activation: gelu` and
`router_bias` give the published form.

Only the experts of a token compute it. The choices are sorted by expert, and the tokens of each expert fill blocks of
one size; each block is multiplied by the weights of its expert. No choice is dropped, no shape depends on the data, the
host never waits for the GPU, and there are no atomics. Up to E blocks are padding, at most an eighth of the work;
`flops_exact` counts them. Each block gets a copy of its expert's weights: up to 17 copies per expert for any number of
tokens. Under functorch transforms (bundles of small models) all experts compute all tokens, and the experts that were
not selected have weight zero: the same result, in three matrix products that batch well.
"""

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import Factor, added
from linnet.layers.base import Channel, LayerConfig, LayerContext, last_linear, register_channel
from linnet.layers.routing import BALANCE, ROUTING, Routed, Routing, RoutingKind, route_tokens, scored_routing
from linnet.ops import compat_torch
from linnet.ops.activation import ACTIVATIONS, gated_activation
from linnet.ops.tensor_parallel import leave


class MoeConfig(LayerConfig):
    """Options of `moe`."""

    grows = (*LayerConfig.grows, "shared_inner", "latent")

    num_experts: int = Field(8, ge=1, description="experts of a layer")
    num_active: int = Field(2, ge=1, description="experts per token")
    inner: int = Field(
        0, ge=0, description="width of an expert; 0 gives the active ones together 8/3 of the model width (rounded up)"
    )
    balance_coefficient: float = BALANCE
    routing: RoutingKind = ROUTING
    router_bias: bool = Field(False, description="a bias of the router")
    down: Literal["own", "dense"] = Field(
        "own",
        description="what the down projection of an expert reads: its own hidden units, or densely those of all (with "
        "the unused parameter of inner x num_experts that the published implementation has)",
    )
    activation: Literal["silu", "gelu", "relu", "relu2"] = Field(
        "silu", description="on the gate branch, or without one on the only branch; gelu is its tanh form"
    )
    score: Literal["softmax", "sigmoid"] = added("softmax", "score of an expert, from the logits of the router")
    normalise: bool = added(True, "weights of a token are divided by their sum")
    weight_scale: Factor = added(1.0, "factor of the weights")
    correction: bool = added(
        False, "a number per expert, added to its score for the choice alone; training leaves it as it is"
    )
    groups: int = added(1, "groups of experts, for a choice among some of them", ge=1)
    active_groups: int = added(1, "groups of a token, of which the experts are chosen", ge=1)
    shared_inner: int = added(0, "width of an expert that computes every token; 0 is none", ge=0)
    shared_gate: bool = added(False, "multiplies the shared expert by a sigmoid of x W, one number per token")
    gated: bool = added(True, "experts are gated linear units; false: perceptrons of two matrices")
    latent: int = added(0, "width of a projection of x that the experts read and write; 0 is x itself", ge=0)

    @model_validator(mode="after")
    def _check(self) -> "MoeConfig":
        size, left = divmod(self.num_experts, self.groups)
        problems = []
        if self.num_active > self.num_experts:
            problems.append(
                f"num_active: {self.num_active} experts of a token are more than num_experts {self.num_experts}; "
                "lower the first or raise the second"
            )
        if self.groups > 1 and (left or size < 2):
            problems.append(
                f"groups: {self.groups} groups of num_experts {self.num_experts} are not whole groups of at least 2"
            )
        elif self.active_groups > self.groups or self.active_groups * size < self.num_active <= self.num_experts:
            least = -(-self.num_active // size)
            wanted = f"{least} to {self.groups} groups of {size}, with num_active {self.num_active}"
            problems.append(f"active_groups: {self.active_groups} must be {wanted}")
        scored = {"score", "normalise", "weight_scale", "correction", "groups"}
        if other := sorted(key for key in scored if getattr(self, key) != type(self).model_fields[key].default):
            if self.routing != "top_k":
                problems.append(f"routing: {self.routing} does not read {', '.join(other)}; use top_k")
            if self.balance_coefficient and self.score != "softmax":
                problems.append("balance_coefficient: the balance loss is that of score: softmax; use 0")
        if self.shared_gate and not self.shared_inner:
            problems.append("shared_gate: true has no effect without a shared expert; set shared_inner")
        if problems:
            raise ValueError("; ".join(problems))
        return self


@register_channel("moe", MoeConfig, "mixture_of_experts", "experts")
class Moe(Routed, Channel):
    """The layer. `gate_proj`, `up_proj` and `down_proj` hold the matrices of all experts, grouped by expert."""

    tp_counts = ("num_experts", "shared_inner")
    full_precision = ("correction",)
    indexes_weights = True  # sharding gathers them in float32: in bfloat16 their gradients would be summed in bfloat16

    def __init__(self, config: MoeConfig, context: LayerContext):
        super().__init__()
        d_model, experts = context.d_model, config.num_experts
        self.config, self.d_model, self.num_experts = config, d_model, experts
        self.inner = config.inner or -(-8 * d_model // (24 * config.num_active)) * 8
        self.width = width = config.latent or d_model
        self.shared_inner = shared = config.shared_inner
        self.router = nn.Linear(d_model, experts, bias=config.router_bias)
        self.correction: Tensor | None
        self.register_buffer("correction", torch.zeros(experts) if config.correction else None)
        if config.gated:
            self.gate_proj = nn.Linear(width, experts * self.inner, bias=False)
        self.up_proj = nn.Linear(width, experts * self.inner, bias=False)
        outputs = width * (experts if config.down == "dense" else 1)
        self.down_proj = nn.Linear(experts * self.inner, outputs, bias=False)
        if config.down == "dense":
            self.gates = nn.Parameter(torch.randn(experts, self.inner))  # read by nothing
        self.down_proj.ends_residual = not config.latent
        if config.latent:
            self.latent_down = nn.Linear(d_model, width, bias=False)
            self.latent_up = last_linear(width, d_model, bias=False)
        if shared:
            if config.gated:
                self.shared_gate_proj = nn.Linear(d_model, shared, bias=False)
            self.shared_up_proj = nn.Linear(d_model, shared, bias=False)
            self.shared_down_proj = last_linear(shared, d_model, bias=False)
        if config.shared_gate:
            self.shared_gate = nn.Linear(d_model, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        routing = self.route(x)
        self.keep_balance(routing)
        # `torch.compile` knows this flag too, so a compiled bundle takes the same branch as an eager one.
        return self._combined(x, routing, masked=self.is_dense or compat_torch.in_transform())

    def _combined(self, x: Tensor, routing: Routing, masked: bool) -> Tensor:
        """Returns what all experts add; `masked` computes each of them for each token."""
        read = self.latent_down(x) if self.config.latent else x
        if masked:
            y = self._masked(read, routing)
        else:
            y = self._dispatched(read.flatten(0, -2), routing).unflatten(0, x.shape[:-1])
        y = self.latent_up(y) if self.config.latent else y
        return y + self._shared(x) if self.config.shared_inner else y

    def route(self, x: Tensor) -> Routing:
        """Returns the experts of each token of x [..., D] with their weights; `.load()` is the load per expert."""
        config, logits = self.config, self.router(x)
        if config.routing != "top_k":
            return route_tokens(logits, config.num_active, config.routing)
        groups = (config.groups, config.active_groups)
        return scored_routing(
            logits, config.num_active, config.score, config.normalise, config.weight_scale, self.correction, groups
        )

    @property
    def is_dense(self) -> bool:
        """Whether every token needs all experts."""
        return self.config.down == "dense" or self.config.routing != "top_k"

    def flops_paper(self, seq_len: int) -> float:
        """Returns L D A + L (4 D W A + 2 D W G): A experts of width W, G of them active (paper 004, C.4.7).

        The paper omits L in the second term, which is a slip. It counts the up projections of all experts, and one FLOP
        per weight for the router. Linnet keeps these conventions, so that its numbers can be compared with the paper's;
        `flops_exact` counts the active experts. A shared expert and a latent add 2 FLOPs per weight.
        """
        d_model, experts, active = self.d_model, self.config.num_experts, self.config.num_active
        always = [module for name, module in self.named_children() if name.startswith(("shared", "latent"))]
        each = self.inner * ((4 if self.config.gated else 2) * experts + 2 * active)
        return float(seq_len) * (
            d_model * experts + self.width * each + 2 * sum(layer.weight.numel() for layer in always)
        )

    def tp_plan(self) -> dict[str, str]:
        """Splits by experts, and the shared one by its channels; each rank routes all tokens, and computes what its own
        experts add."""
        plan = {"router": "partial", "gate_proj": "split", "up_proj": "split", "down_proj": "rowwise"}
        plan |= {"correction": "whole", "shared_gate_proj": "colwise", "shared_up_proj": "colwise"}
        plan |= {"shared_down_proj": "rowwise", "shared_gate": "partial", "gates": "whole"}
        plan |= {"latent_down": "partial", "latent_up": "whole"}
        return {name: word for name, word in plan.items() if getattr(self, name, None) is not None}

    def tp_problems(self) -> list[str]:
        problems = ["down: dense reads the experts of all ranks; use down: own"] if self.config.down == "dense" else []
        return problems + (["latent: every rank has all of it; use 0"] if self.config.latent else [])

    def inactive_parameters(self) -> int:
        """Returns the parameters of the experts that a token is not routed to."""
        if self.is_dense:
            return 0
        projections = [self.up_proj, self.down_proj, *([self.gate_proj] if self.config.gated else [])]
        each = sum(projection.weight.numel() for projection in projections) // self.config.num_experts
        return each * (self.config.num_experts - self.config.num_active)

    def _masked(self, x: Tensor, routing: Routing) -> Tensor:
        hidden = self._hidden(self.gate_proj(x) if self.config.gated else None, self.up_proj(x))
        weights = self.own_experts(routing.dense_weights()).to(hidden.dtype)
        if self.config.down == "dense":
            outputs = self.down_proj(hidden).unflatten(-1, (self.width, self.config.num_experts))
            return (outputs * weights.unsqueeze(-2)).sum(-1)
        hidden = hidden.unflatten(-1, (self.num_experts, self.inner)) * weights.unsqueeze(-1)
        return self.down_proj(hidden.flatten(-2))

    def _shared(self, x: Tensor) -> Tensor:
        gate = self.shared_gate_proj(x) if self.config.gated else None
        hidden = self._hidden(gate, self.shared_up_proj(x))
        if self.config.shared_gate:  # before the last matrix, so that each rank of a split layer has a part
            hidden = self.shared_gate(x).sigmoid() * hidden
        return self.shared_down_proj(hidden)

    def _dispatched(self, x: Tensor, routing: Routing) -> Tensor:
        """Computes x [N, D] -> [N, D]; the routing may have any shape with N tokens."""
        tokens, active = x.shape[0], self.config.num_active
        choices = tokens * active
        expert, weights = routing.experts.reshape(choices), routing.weights.reshape(choices, 1)
        if self.tp is not None:
            return leave(self._own(x, expert - self.tp.rank * self.num_experts, weights), self.tp)
        copies = x.unsqueeze(1).expand(tokens, active, self.width).reshape(choices, self.width)
        out = self._of_choices(copies, expert)
        return (out * weights.to(out.dtype)).unflatten(0, (tokens, active)).sum(1)

    def _own(self, x: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        """Returns what the experts of this rank add to x [N, D]; `expert` counts from the first of them."""
        token = torch.arange(len(x), device=x.device).repeat_interleave(self.config.num_active)
        local = (expert >= 0) & (expert < self.num_experts)
        if torch.compiler.is_compiling():  # a graph has no shape that depends on data: others weigh nothing
            expert, weights = expert.clamp(0, self.num_experts - 1), weights * local.unsqueeze(1)
        else:
            expert, weights, token = expert[local], weights[local], token[local]
        out = self._of_choices(x[token], expert)
        return torch.zeros_like(x, dtype=out.dtype).index_add(0, token, out * weights.to(out.dtype))

    def _of_choices(self, copies: Tensor, expert: Tensor) -> Tensor:
        """Returns the outputs [M, D] of experts [M] for inputs [M, D]."""
        experts = self.num_experts
        # A power of two, at most an eighth of an even load: few blocks to multiply, little padding in E more.
        size = 1 << max(0, (len(expert) // (8 * experts)).bit_length() - 1)
        slot, block_expert = _slots(expert, experts, size)
        blocks = copies.new_zeros(block_expert.shape[0] * size, self.width).index_put((slot,), copies)
        blocks = blocks.unflatten(0, (-1, size))  # [blocks, size, D]
        gate = None
        if self.config.gated:
            gate = torch.bmm(blocks, self._of_expert(self.gate_proj)[block_expert].transpose(1, 2))
        up = torch.bmm(blocks, self._of_expert(self.up_proj)[block_expert].transpose(1, 2))
        down = self.down_proj.weight.unflatten(1, (experts, self.inner)).permute(1, 2, 0)  # [E, W, D]
        return torch.bmm(self._hidden(gate, up), down[block_expert]).flatten(0, 1)[slot]

    def _hidden(self, gate: Tensor | None, up: Tensor) -> Tensor:
        kind = self.config.activation
        if kind == "gelu":
            return F.gelu(up, approximate="tanh") if gate is None else F.gelu(gate, approximate="tanh") * up
        return ACTIVATIONS[kind](up) if gate is None else gated_activation(gate, up, kind)

    def _of_expert(self, projection: nn.Linear) -> Tensor:
        """Returns the weights of a projection from the model width as [E, W, D]."""
        return projection.weight.unflatten(0, (self.num_experts, self.inner))


def _slots(expert: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """Assigns choices to rows of blocks, each block for one expert.

    Args:
        expert: int64 [M], the expert of each choice.

    Returns:
        The row [M] of each choice among all rows of all blocks, and the expert [M // size + E] of each block.
    """
    row = torch.arange(expert.shape[0], device=expert.device)
    order = expert.argsort(stable=True)
    ordered = expert[order]
    starts = torch.searchsorted(ordered, torch.arange(experts + 1, device=expert.device))  # first choice per expert
    blocks = (starts.diff() + size - 1) // size
    ends = blocks.cumsum(0)
    shift = (ends - blocks) * size - starts[:-1]  # from an index among ordered choices to an index among all rows
    slot = torch.empty_like(row).scatter(0, order, row + shift[ordered])
    block = torch.arange(expert.shape[0] // size + experts, device=expert.device)
    return slot, torch.searchsorted(ends, block, right=True).clamp(max=experts - 1)
