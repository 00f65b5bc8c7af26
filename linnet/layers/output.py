"""The end of a linear-attention mixer: norm over the full width, output gate, output projection.

TNL3 and cosFormer2 (paper 000, A.1.2 and A.1.4): y = (Norm(O) * sigmoid(X W_down W_up)) W_o. The equations of the paper
leave W_o out, but its parameter and FLOP counts include it. TNL v1 (paper 001, section 4) gates with a full projection
and no activation: y = (U * Norm(O)) W_o.
"""

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from linnet.config import Epsilon
from linnet.layers.base import LayerConfig, LayerContext, last_linear
from linnet.layers.norm import NormKind, build_norm, norm_and_gate
from linnet.ops.activation import gated_activation


class GatedOutputConfig(LayerConfig):
    """Options of `GatedOutput`, and of every mixer that ends with it."""

    unread = {
        ("gate", "none"): ("gate_rank", "gate_activation", "gate_first"),
        ("gate", "full"): ("gate_rank",),
    }

    norm: NormKind = Field("srmsnorm", description="norm of the concatenated heads, over the full width")
    norm_eps: Epsilon | None = Field(None, description="epsilon of the norm; null is the default of its kind")
    gate: Literal["low_rank", "full", "none"] = Field("low_rank", description="full is TNL v1; none is its ablation")
    gate_rank: int = Field(0, ge=0, description="rank of the low-rank gate; 0 means the head width")
    gate_activation: Literal["sigmoid", "silu", "none"] = Field("sigmoid", description="on the gate")
    gate_first: bool = Field(False, description="Norm(O * gate) instead of the paper's Norm(O) * gate")


class GatedOutput(nn.Module):
    """Maps the heads' output o [..., I] and the mixer's input x [..., D] to y [..., D]; I is `inner`, by default D."""

    def __init__(self, config: GatedOutputConfig, context: LayerContext, head_dim: int, inner: int = 0):
        super().__init__()
        d_model, bias = context.d_model, context.bias_all
        inner = inner or d_model
        self.config = config
        self.norm = build_norm(config.norm, inner, config.norm_eps)
        if config.gate == "low_rank":
            rank = config.gate_rank or head_dim
            self.gate_down = nn.Linear(d_model, rank, bias=bias)
            self.gate_up = nn.Linear(rank, inner, bias=bias)
            self.gate_up.mup_roles = {"weight": "vector"}  # its inputs are those of a head, whatever the width
        elif config.gate == "full":
            self.gate_up = nn.Linear(d_model, inner, bias=bias)
        self.out_proj = last_linear(inner, d_model, bias=bias)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        if self.config.gate == "none":
            return self.out_proj(self.norm(o))
        gate = self.gate_up(self.gate_down(x) if self.config.gate == "low_rank" else x)
        activation = self.config.gate_activation
        if self.config.gate_first:
            return self.out_proj(self.norm(gated_activation(gate, o, activation)))
        return self.out_proj(norm_and_gate(self.norm, o, gate, activation))

    def tp_plan(self) -> dict[str, str]:
        """Returns the words of its tensors, as `Mixer.tp_plan`."""
        plan = {"norm": "split_norm", "out_proj": "rowwise"}
        if self.config.gate != "none":
            plan["gate_up"] = "colwise"
        if self.config.gate == "low_rank":
            plan["gate_down"] = "partial"
        return plan


def split_heads(
    d_model: int, num_heads: int, mixer: str, config: LayerConfig | None = None, context: LayerContext | None = None
) -> int:
    """Returns the width of a head. Raises ValueError with the problem of `check_heads`, if any."""
    for problem in check_heads(d_model, num_heads, config, context):
        raise ValueError(f"{mixer}.{problem}")
    return d_model // num_heads


def check_heads(
    d_model: int, num_heads: int, config: LayerConfig | None = None, context: LayerContext | None = None
) -> list[str]:
    """Returns a list with one problem if num_heads does not divide d_model, else an empty list.

    Args:
        config, context: options with a key `num_heads` whose other checks depend on it, and where: the number that is
            suggested passes these too, or the problem says what then remains.
    """
    if d_model % num_heads == 0:
        return []
    divisors = sorted((h for h in range(1, d_model + 1) if d_model % h == 0), key=lambda h: (abs(h - num_heads), h))
    problem, fit = f"num_heads: {num_heads} does not divide d_model {d_model}", divisors[0]
    if config is None or context is None:
        return [f"{problem}; {fit} does"]
    left = {heads: config.model_copy(update={"num_heads": heads}).check(context) for heads in divisors}
    if passing := [heads for heads, problems in left.items() if not problems]:
        return [f"{problem}; {passing[0]} does"]
    return [f"{problem}; {fit} does, but then {left[fit][0]}"]
