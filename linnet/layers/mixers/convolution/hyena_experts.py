"""Hyena experts (paper 004, section 3.2): small Hyena mixers; a router selects a few of them per token.

E experts of width w: each is a `hyena` of w channels without an output projection, y_e. With the softmax s_t over the k
largest of x_t W_g (`linnet.layers.routing`), the output is (sum_e s_te y_te) W_o, W_o from w to D.

"Only a subset of the total state is used to compose the output at each time step" (paper): an expert that is not
selected now must still read the token, because later tokens may select it. In the parallel form all experts therefore
convolve, and masking the outputs of E - k experts is cheaper than gathering k. A decoding step writes all states, but
reads, weighs and gates only those of the selected experts. (The published implementation gives all experts weight; see
`linnet.layers.routing`.)
"""

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from linnet.layers.base import LayerContext, State, last_linear, register_mixer
from linnet.layers.hyena import long_flops_paper
from linnet.layers.mixers.convolution.hyena import HyenaFilterConfig, HyenaMixer
from linnet.layers.routing import BALANCE, ROUTING, Routed, Routing, RoutingKind, route_tokens
from linnet.ops import long_convolution_step
from linnet.ops.tensor_parallel import leave


class HyenaExpertsConfig(HyenaFilterConfig):
    """Options of `hyena_experts`."""

    num_experts: int = Field(8, ge=1, description="experts of a layer")
    num_active: int = Field(2, ge=1, description="experts per token")
    expert_width: int = Field(0, ge=0, description="channels per expert; 0 is d_model / num_experts")
    balance_coefficient: float = BALANCE
    routing: RoutingKind = ROUTING
    router_bias: bool = Field(False, description="a bias of the router")

    @model_validator(mode="after")
    def _check(self) -> "HyenaExpertsConfig":
        if self.num_active > self.num_experts:
            raise ValueError(
                f"num_active: {self.num_active} experts of a token are more than num_experts {self.num_experts}; "
                "lower the first or raise the second"
            )
        return self

    def width(self, d_model: int) -> int:
        """Returns the channels of one expert."""
        return self.expert_width or d_model // self.num_experts

    def channels(self, d_model: int) -> int:
        return self.num_experts * self.width(d_model)

    def check(self, context: LayerContext) -> list[str]:
        if self.width(context.d_model):
            return super().check(context)
        return [f"num_experts: {self.num_experts} experts share a width of {context.d_model}; give expert_width"]


@register_mixer("hyena_experts", HyenaExpertsConfig)
class HyenaExperts(Routed, HyenaMixer):
    """Maps x [B, T, D] to [B, T, D]; all experts read every token, the selected ones contribute to the output."""

    def __init__(self, config: HyenaExpertsConfig, context: LayerContext):
        d_model, experts = context.d_model, config.num_experts
        self.refuse_options(config, context)
        width = config.width(d_model)
        channels = experts * width
        super().__init__(config, d_model, channels=channels, filters=channels, conv_channels=channels)
        self.num_experts, self.width = experts, width
        self.router = nn.Linear(d_model, experts, bias=config.router_bias)
        self.out_proj = last_linear(width, d_model)

    @property
    def experts(self) -> tuple[int, int]:
        """Number of experts, on this rank if tensor parallelism splits them, and channels of an expert."""
        return self.num_experts, self.width

    def tp_plan(self) -> dict[str, str]:
        """Splits by experts. Their outputs are summed before the projection that they share, which is whole."""
        return super().tp_plan() | {"router": "partial", "out_proj": "whole"}

    def route(self, x: Tensor) -> Routing:
        """Returns the experts of each token of x [..., D] with their weights; `.load()` is the load per expert."""
        return route_tokens(self.router(x), self.config.num_active, self.config.routing)

    def signal(self, k: Tensor, v: Tensor) -> Tensor:
        return k * v

    def read(self, y: Tensor, q: Tensor, x: Tensor) -> Tensor:
        routing = self.route(x)
        self.keep_balance(routing)
        weights = self.own_experts(routing.dense_weights()).to(y.dtype)
        output = ((q * y).unflatten(-1, self.experts) * weights[..., None]).sum(-2)
        return self.out_proj(output if self.tp is None else leave(output, self.tp))

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        self._check_decodes()
        routing, width = self.route(x), self.experts[1]
        q, k, v = self._project_token(x, state)
        chosen = (routing.experts[..., None] * width + torch.arange(width, device=x.device)).flatten(1)
        y = long_convolution_step(self.signal(k, v), self.values(1), state["modes"], channels=chosen)
        outputs = (q.gather(1, chosen) * y).unflatten(1, (-1, width))
        return self.out_proj((outputs * routing.weights[..., None].to(y.dtype)).sum(1)), state

    def flops_paper(self, seq_len: int) -> float:
        """L D A + 6 L D^2 + 18 L D + S L W G + 10 L log2(L) W G + 4 L W G + 2 L W D (paper 004, C.4.8).

        A experts of width W, G of them active, S modes; the D^2 are the projections to all A W channels.
        """
        d, (experts, width), channels = self.d_model, self.experts, self.channels
        active = self.config.num_active * width
        dense = seq_len * (d * experts + 6.0 * d * channels + 18.0 * channels + 2.0 * width * d)
        return dense + long_flops_paper(seq_len, self.modes, active, active)
