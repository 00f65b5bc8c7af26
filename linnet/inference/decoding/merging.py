"""Merges linear layers that read the same token into one matrix product: q, k, v and a gate; gate and up.

The time of a decoding step is bound by reading weights and by kernel launches, so fewer and larger products are faster.
One step of the model shows which layers share an input. This works for every mixer, including mixers from outside the
package, without any declaration in the layers. The weights keep their names: they become rows of one matrix.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.channels.glu import GatedLinearUnit
from linnet.ops.matvec import gated_linear, linear, linears, make_counters


class Product:
    """Computes several linear layers of one token as one product, and keeps each layer's part until it is taken."""

    def __init__(self, linears: list[nn.Linear]):
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        biased = linears[0].bias is not None
        self.bias = torch.cat([linear.bias.detach() for linear in linears]) if biased else None
        self.sizes = [linear.out_features for linear in linears]
        self.counters = make_counters(self.weight.device)
        self._x: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def take(self, index: int, x: Tensor) -> Tensor:
        """Returns the output of layer `index` for x [B, K]; the first call computes all layers."""
        if x is not self._x or self._parts[index] is None:
            self._parts, self._x = linears(x, self.weight, self.sizes, self.bias, self.counters), x
        part, self._parts[index] = self._parts[index], None
        if not any(part is not None for part in self._parts):
            self._x = None
        return part

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Returns act(first part) * second part for x [B, K]. The product must have two parts and no bias."""
        return gated_linear(x, self.weight, activation, self.counters)


class Part(nn.Linear):
    """A linear layer whose weight is a range of rows of a `Product`.

    Single tokens [B, D] use the merged product; longer inputs use this layer's rows alone.
    """

    def __init__(self, product: Product, index: int):
        nn.Module.__init__(self)
        start, size = sum(product.sizes[:index]), product.sizes[index]
        self.in_features, self.out_features = product.weight.shape[1], size
        self.weight = nn.Parameter(product.weight[start : start + size], requires_grad=False)
        bias = None if product.bias is None else nn.Parameter(product.bias[start : start + size], requires_grad=False)
        self.register_parameter("bias", bias)
        self._product, self._index = product, index

    def forward(self, x: Tensor) -> Tensor:
        # Slices of a merged output are not contiguous. The parallel forms over many tokens would have to copy them.
        return F.linear(x, self.weight, self.bias) if x.ndim != 2 else self._product.take(self._index, x)


class Row(nn.Linear):
    """A linear layer with fast kernels for one row and for a few rows."""

    counters: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.counters)


class Glu(GatedLinearUnit):
    """A gated linear unit whose gate and up projections are one product; its kernel also applies the activation."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            return super().forward(x)
        return self.down_proj(self.gate_proj._product.gated(x, self.activation))


@torch.no_grad()
def merge_projections(model: nn.Module) -> int:
    """Merges the linear layers of a `CausalLM` that read the same token. Returns the number of products it saves."""
    device = next(model.parameters()).device
    inputs: list[tuple[nn.Linear, Tensor]] = []  # keeps the tensors alive, so that their ids stay distinct
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    handles = [module.register_forward_pre_hook(lambda m, args: inputs.append((m, args[0]))) for module in layers]
    try:
        model.step(torch.zeros(1, dtype=torch.int64, device=device), model.init_state(1, 1, device))
    finally:
        for handle in handles:
            handle.remove()
    readers: dict[tuple, list[nn.Linear]] = defaultdict(list)
    calls = [module for module, _ in inputs]
    for module, x in inputs:
        if calls.count(module) == 1:
            readers[id(x), module.bias is None, module.weight.dtype].append(module)
    groups = [group for group in readers.values() if len(group) > 1]
    parts: dict[nn.Module, Part] = {}
    for group in groups:
        product = Product(group)
        parts.update((module, Part(product, index)) for index, module in enumerate(group))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in parts:
                setattr(parent, name, parts[child])
        if _is_pair(parent):
            parent.activation = parent.activation  # copies a class attribute to the instance before the class changes
            parent.__class__ = Glu
    return len(parts) - len(groups)


def _is_pair(unit: nn.Module) -> bool:
    """Returns whether a module is a gated linear unit whose gate and up projections, and no others, are one product."""
    if not isinstance(unit, GatedLinearUnit) or type(unit).forward is not GatedLinearUnit.forward:
        return False
    if not unit.gate_scale == unit.out_scale == 1.0:
        return False
    gate, up = unit.gate_proj, unit.up_proj
    if not isinstance(gate, Part) or not isinstance(up, Part) or gate._product is not up._product:
        return False
    return len(gate._product.sizes) == 2 and (gate._index, up._index) == (0, 1) and gate.bias is None


def serve_rows(model: nn.Module) -> None:
    """Gives the linear layers that were not merged the kernels for one row and for a few rows."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__, module.counters = Row, make_counters(module.weight.device)
