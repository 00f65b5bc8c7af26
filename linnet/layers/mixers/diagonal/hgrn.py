"""HGRN: element-wise gated linear recurrence with lower-bounded forget gates (Qin et al. 2023; paper 002, 2.2).

Real: h_t = f_t h_{t-1} + (1 - f_t) c_t. Complex: h_t = f_t e^{i theta} h_{t-1} + (1 - f_t) c_t with learned theta; its
features are the real and imaginary parts. c = silu(x W_in); y = Norm(h * silu(x W_g)) W_o, with the norm after the gate
as in the paper (`norm_first`: the order of the authors' module). No biases.

State expansion (paper 002, 3.1; `expand: n`): forget gate, input and output gate have n D features, each with its own
recurrence, and the lower bound of a channel holds for its n features. `expansion` is the form of the three projections.
`readout: sum` adds the n gated states of a channel before norm and W_o, as the paper does; `concat` keeps them apart,
so that norm and W_o read n D features.

The default, a real state of D numbers, is the smallest form and not the best. In Table 1 of paper 002 (WikiText-103,
test perplexity) it has 26.12, the complex form (`complex: true`) 24.82, and the real form with a state of 2 D
(`expand: 2, readout: concat`, inferred from its parameters) 24.55. The default stays because other papers and libraries
call this form HGRN, and because a change would rename the runs that have it.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from linnet.config import Epsilon, added
from linnet.layers.base import LayerConfig, LayerContext, Mixer, State, TensorSpec, carried, last_linear, register_mixer
from linnet.layers.lower_bound import LowerBounds
from linnet.layers.non_causal import refuse_state, scan_both_ways
from linnet.layers.norm import NormKind, build_norm
from linnet.layers.positions import Grid, geometric_frequencies
from linnet.ops import diagonal_scan, diagonal_step
from linnet.ops.activation import forget_inputs, gated_activation
from linnet.ops.scans import ORDERS, Order
from linnet.ops.tensor_parallel import own_part

# Linear maps from D channels to n D, with many parameters or few: the PESE forms of paper 002 (section 3.1, Table 2).
#
# The output is n rows of D numbers, row after row. e = D / n and r = round(D / (n + 1)), which gives `lr` about D^2
# parameters.
#
# | form | output | parameters | |---|---|---| | `naive` | W x, W [n D, D] | n D^2 | | `lr` | W_2 W_1 x, W_1 [r, D] and
# W_2 [n D, r] | D r (n + 1) | | `glt` | row i: W_i x_i, x_i the i-th of n groups of e channels, W_i [D, e] | D^2 | |
# `glti` | row i: sum over j of M_ji W_j x_j, M [n, n] from the identity | D^2 + n^2 | | `krp` | row i, channel c: W_ic
# x_c, W [n, D] | n D | | `kp` | row i: a_i W x, W [D, D], a [n] | D^2 + n |
#
# Initial weights give each output the variance that it has in a dense layer [n D, D] under the initialisation of the
# model. A sum over e channels in place of D needs weights sqrt(D / e) times as large (`glt`, `glti`), one channel
# sqrt(D) times (`krp`). W_1 of `lr` and W of `kp` are drawn as the dense layer is, and the other factor keeps the
# variance: W_2 has variance 1 / r, and a has variance 1 and is drawn, because equal rows would stay equal.

Expansion = Literal["naive", "lr", "glt", "glti", "krp", "kp"]


def build_expansion(kind: Expansion, width: int, expand: int, bias: bool) -> nn.Module:
    """Returns a module x [..., D] -> [..., n D] for D = width and n = expand.

    Raises:
        ValueError: `check_expansion` has a problem.
    """
    for problem in check_expansion(kind, width, expand):
        raise ValueError(problem)
    return _FORMS[kind](width, expand, bias)


def check_expansion(kind: Expansion, width: int, expand: int) -> list[str]:
    """Returns a list with one problem if a form cannot have this expansion, as `key: what; the fix`, else an empty
    list."""
    if kind in ("glt", "glti") and width % expand:
        fits = [n for n in range(1, width + 1) if width % n == 0]
        best = min(fits, key=lambda n: (abs(n - expand), n))
        return [f"expand: {expand} does not divide d_model {width}, as expansion: {kind} needs; {best} does"]
    return []


def rank(width: int, expand: int) -> int:
    """Returns the rank of `lr`."""
    return max(1, round(width / (expand + 1)))


class _Standing(nn.Linear):
    """A linear layer whose weights are drawn so that its outputs have the variance of those of a dense layer.

    Attributes:
        stands_for: inputs and outputs of that dense layer.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, stands_for: tuple[int, int]):
        super().__init__(inputs, outputs, bias)
        self.stands_for = stands_for


class LowRank(nn.Module):
    """`lr`."""

    def __init__(self, width: int, expand: int, bias: bool):
        super().__init__()
        middle = rank(width, expand)
        self.down = _Standing(width, middle, False, (width, expand * width))
        self.up = nn.Linear(middle, expand * width, bias=bias)
        self.up.init, self.up.fan_in = "normal", True

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class GroupLinear(_Standing):
    """`glt`: group i of the channels makes row i of the output. The weight [n D, e] holds the matrices [D, e]."""

    def __init__(self, width: int, expand: int, bias: bool):
        super().__init__(width // expand, expand * width, bias, (width, expand * width))
        self.groups = expand

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x).flatten(-2)
        return rows if self.bias is None else rows + self.bias

    def rows(self, x: Tensor) -> Tensor:
        """Returns the output without the bias, [..., n, D]."""
        weight = self.weight.unflatten(0, (self.groups, -1))
        return torch.einsum("...ne,nde->...nd", x.unflatten(-1, (self.groups, -1)), weight)


class InteractingGroups(GroupLinear):
    """`glti`: the rows of `glt`, mixed by a matrix that starts as the identity."""

    def __init__(self, width: int, expand: int, bias: bool):
        super().__init__(width, expand, bias)
        self.mix = nn.Parameter(nn.init.eye_(torch.empty(expand, expand)))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.einsum("...md,mn->...nd", self.rows(x), self.mix.to(x.dtype)).flatten(-2)
        return rows if self.bias is None else rows + self.bias


class KhatriRao(_Standing):
    """`krp`: n scalings of each channel. The weight [n D, 1] holds the rows one after the other."""

    mup_roles: ClassVar = {"weight": "vector"}  # an output has one input, whatever the width

    def __init__(self, width: int, expand: int, bias: bool):
        super().__init__(1, expand * width, bias, (width, expand * width))
        self.expand = expand

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.unsqueeze(-2) * self.weight.unflatten(0, (self.expand, -1)).squeeze(-1)).flatten(-2)
        return rows if self.bias is None else rows + self.bias


class Kronecker(nn.Module):
    """`kp`: n multiples of one dense layer, before the bias."""

    def __init__(self, width: int, expand: int, bias: bool):
        super().__init__()
        self.dense = _Standing(width, width, False, (width, expand * width))
        self.scales = nn.Parameter(torch.randn(expand))
        self.bias = nn.Parameter(torch.zeros(expand * width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.dense(x)
        rows = (self.scales.to(y.dtype)[:, None] * y.unsqueeze(-2)).flatten(-2)
        return rows if self.bias is None else rows + self.bias


def _dense(width: int, expand: int, bias: bool) -> nn.Linear:
    return nn.Linear(width, expand * width, bias=bias)


_FORMS: dict[str, Callable[[int, int, bool], nn.Module]] = {
    "naive": _dense,
    "lr": LowRank,
    "glt": GroupLinear,
    "glti": InteractingGroups,
    "krp": KhatriRao,
    "kp": Kronecker,
}


class HgrnConfig(LayerConfig):
    """Options of `hgrn`."""

    complex: bool = Field(False, description="complex recurrence with a learned rotation")
    expand: int = added(1, ge=1, description="real numbers of state per channel of the model (paper 002, section 3.1)")
    expansion: Expansion = added(
        "naive",
        description="form of the projections to `expand` features per channel: naive, dense; lr, low rank; glt, "
        "groups; glti, groups that interact; krp, Khatri-Rao product; kp, Kronecker product (paper 002, Table 2)",
    )
    readout: Literal["sum", "concat"] = added(
        "sum", description="what the output norm and projection read: sum, one number per channel; concat, all features"
    )
    norm: NormKind = Field("layernorm", description="norm of the output")
    norm_eps: Epsilon | None = Field(None, description="epsilon of the norm; null is the default of its kind")
    norm_first: bool = Field(False, description="Norm(h) * gate instead of the paper's Norm(h * gate)")
    lower_bound: Literal["inclusive", "none"] = Field(
        "inclusive",
        description="learned bound of the forget gate, which rises with the layers; none leaves it at 0",
    )
    theta_per_direction: bool = added(
        False, description="rotations of their own for the scans from the end, without causality (complex: true)"
    )

    def check(self, context: LayerContext) -> list[str]:
        problems = check_expansion(self.expansion, context.d_model, self.expand)
        if self.expand == 1 and self.readout == "concat":
            problems.append("readout: concat has no effect with expand: 1; leave it out, or expand the state")
        if self.complex and (self.expand > 1 or self.expansion != "naive"):
            option = f"expand: {self.expand}" if self.expand > 1 else f"expansion: {self.expansion}"
            problems.append(
                f"{option} is for real states, and complex: true has two numbers per channel; use one of them"
            )
        if self.norm_first and self.expand > 1 and self.readout == "sum":
            problems.append(
                "norm_first: true would norm the states before they are added; use norm_first: false, or "
                "readout: concat"
            )
        return problems + self._direction_problems(context)

    def _direction_problems(self, context: LayerContext) -> list[str]:
        if not self.theta_per_direction:
            return []
        setting = "a causal model" if context.causal else "scan: forward" if context.scan == "forward" else ""
        if setting:
            return [f"theta_per_direction: true has no effect with {setting}, which has one direction; leave it out"]
        if self.complex:
            return []
        return ["theta_per_direction: true has no effect with complex: false, which has no rotation; leave it out"]


@register_mixer("hgrn", HgrnConfig, "hgru")
class Hgrn(Mixer):
    """x [B, T, D] -> [B, T, D]; the state is one number per channel, complex or real, or `expand` real ones.

    Without causality the projections are computed once and the outputs of all directions added before the norm.
    """

    sequence_parallel = True
    non_causal = "two_scans"
    takes_grid = True
    full_precision = ("theta", "theta_backwards")

    def __init__(self, config: HgrnConfig, context: LayerContext):
        super().__init__()
        d_model = context.d_model
        self.config, self.d_model, self.index = config, d_model, context.mixer_index
        self.causal, self.orders = context.causal, ORDERS[context.scan]
        self.sums = config.expand > 1 and config.readout == "sum"
        if config.complex:
            features = read = 2 * d_model
            self.in_proj = nn.Linear(d_model, features, bias=context.bias_qkv)
            self.f_proj = nn.Linear(d_model, d_model, bias=context.bias_qkv)
            self.gate_proj = nn.Linear(d_model, features, bias=context.bias_all)
        else:
            read = d_model if self.sums else config.expand * d_model
            form = (config.expansion, d_model, config.expand)
            self.in_proj = build_expansion(*form, bias=context.bias_qkv)
            self.f_proj = build_expansion(*form, bias=context.bias_qkv)
            self.gate_proj = build_expansion(*form, bias=context.bias_all)
        self.norm = build_norm(config.norm, read, config.norm_eps)
        self.out_proj = last_linear(read, d_model, bias=context.bias_all)
        self.theta = nn.Parameter(geometric_frequencies(d_model)) if config.complex else None
        if config.theta_per_direction:
            self.theta_backwards = nn.Parameter(geometric_frequencies(d_model))
        bounded = config.lower_bound != "none"
        self.bounds = self.shared(self.name, config, context) if bounded else ()

    @classmethod
    def shared_spec(cls, config: HgrnConfig, context: LayerContext):
        """Returns one table of lower bounds for all layers of this kind, if this layer has a bound."""
        if config.lower_bound == "none":
            return {}
        return {cls.name: partial(LowerBounds, context.mixer_count, context.d_model)}

    def forward(
        self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None, grid: Grid | None = None
    ):
        inputs, log_decay = self._project(x)
        if not self.causal:
            refuse_state(state)
            return self._read(self._scan_both_ways(inputs, log_decay, cu_seqlens, grid), x), None
        h, hidden = diagonal_scan(inputs, log_decay, theta=self.theta, **carried(state, "hidden", cu_seqlens))
        return self._read(h, x), (None if state is None else {"hidden": hidden})

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        inputs, log_decay = self._project(x, one_token=True)
        h = diagonal_step(inputs, log_decay, state["hidden"], theta=self.theta)
        return self._read(h, x), state

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        if self.config.complex:
            return {"hidden": TensorSpec((batch, self.d_model, 2), counted=0.5)}
        return {"hidden": TensorSpec((batch, self.config.expand * self.d_model))}

    def tp_plan(self) -> dict[str, str]:
        if self.tp_problems():
            return {}
        plan = {name: "colwise" for name in ("in_proj", "f_proj", "gate_proj")}
        return plan | {"norm": "split_norm", "out_proj": "rowwise"}

    def tp_problems(self) -> list[str]:
        """The complex form is refused: its features are pairs before the scan and halves after it. Expanded states are
        refused too: their features are rows of all channels."""
        expand, expansion = self.config.expand, self.config.expansion
        if expand > 1 or expansion != "naive":
            option, fix = (f"expand: {expand}", "expand: 1") if expand > 1 else (f"expansion: {expansion}", "naive")
            return [f"{option} cannot be split over devices; use {fix}"]
        if not self.config.complex:
            return []
        return ["complex: true cannot be split over devices, since no rows of out_proj are a slice; use complex: false"]

    def _scan_both_ways(
        self, inputs: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None, grid: Grid | None
    ) -> Tensor:
        """Returns the sum of the hidden states over the directions."""

        def run(theta: Tensor | None, orders: tuple[Order, ...]) -> Tensor:
            op = partial(diagonal_scan, theta=theta)
            return scan_both_ways(op, inputs, log_decay, orders=orders, cu_seqlens=cu_seqlens, grid=grid)

        backwards = tuple(order for order in self.orders if order.backwards)
        if not self.config.theta_per_direction or not backwards:
            return run(self.theta, self.orders)
        forwards = tuple(order for order in self.orders if not order.backwards)
        return run(self.theta, forwards) + run(self.theta_backwards, backwards)

    def _project(self, x: Tensor, one_token: bool = False):
        beta = None
        if self.bounds and self.index:
            bounds = self.bounds[0].constant if one_token else self.bounds[0]
            beta = own_part(bounds(self.index, "inclusive"), -1, self.tp)
            if self.config.expand > 1:
                beta = beta.repeat(self.config.expand)
        logits, c = self.f_proj(x), self.in_proj(x)
        if self.config.complex:  # neighbouring features are the real and the imaginary part
            c = c.unflatten(-1, (self.d_model, 2))
        return forget_inputs(c, logits, beta)

    def _read(self, h: Tensor, x: Tensor) -> Tensor:
        if self.config.complex:
            h = h.transpose(-1, -2).flatten(-2)
        h, gate = h.to(x.dtype), self.gate_proj(x)
        if not self.sums:
            return self.out_proj(self.norm(h, gate=gate, gate_activation="silu", gate_first=not self.config.norm_first))
        y = gated_activation(gate, h, "silu").unflatten(-1, (self.config.expand, self.d_model))
        return self.out_proj(self.norm(y.sum(-2)))
