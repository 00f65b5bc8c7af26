"""Linear maps from D channels to n D, with many parameters or few: the PESE forms of paper 002 (section 3.1, Table 2).

The output is n rows of D numbers, row after row. e = D / n and r = round(D / (n + 1)), which gives `lr` about D^2
parameters.

| form | output | parameters |
|---|---|---|
| `naive` | W x, W [n D, D] | n D^2 |
| `lr` | W_2 W_1 x, W_1 [r, D] and W_2 [n D, r] | D r (n + 1) |
| `glt` | row i: W_i x_i, x_i the i-th of n groups of e channels, W_i [D, e] | D^2 |
| `glti` | row i: sum over j of M_ji W_j x_j, M [n, n] from the identity | D^2 + n^2 |
| `krp` | row i, channel c: W_ic x_c, W [n, D] | n D |
| `kp` | row i: a_i W x, W [D, D], a [n] | D^2 + n |

Initial weights give each output the variance that it has in a dense layer [n D, D] under the initialisation of the
model. A sum over e channels in place of D needs weights sqrt(D / e) times as large (`glt`, `glti`), one channel sqrt(D)
times (`krp`). W_1 of `lr` and W of `kp` are drawn as the dense layer is, and the other factor keeps the variance: W_2
has variance 1 / r, and a has variance 1 and is drawn, because equal rows would stay equal.
"""

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

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
