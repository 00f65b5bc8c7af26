"""Norms over the last dimension: SRMSNorm (no gain), RMSNorm, LayerNorm. BatchNorm is over the tokens of a batch.

A zero-centred RMSNorm multiplies by 1 + w, and w starts at 0 (Qwen3-Next, Gemma).

SRMSNorm(x) = x / (||x||_2 / sqrt(d)) is paper 001, equation 14. Epsilon sits inside the mean square: 1e-6 for SRMSNorm
and RMSNorm, 1e-5 for LayerNorm and BatchNorm.
"""

from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.ops.activation import ACTIVATIONS, gated_activation
from linnet.ops.norm import layer_norm, rms_norm, split_rms_norm
from linnet.ops.tensor_parallel import Split, sum_over

NormKind = Literal["srmsnorm", "rmsnorm", "zero_centred_rmsnorm", "layernorm"]
StackNorm = Literal["srmsnorm", "rmsnorm", "zero_centred_rmsnorm", "layernorm", "batchnorm"]

MOMENTUM = 0.1  # share of a batch in the running statistics of BatchNorm


class SRMSNorm(nn.Module):
    """Root-mean-square norm without a gain (paper 001, section 4).

    Attributes:
        tp: how tensor parallelism splits the width, if it does; x then has this rank's channels.
    """

    tp: Split | None = None

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.register_parameter("weight", None)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        gate_activation: str = "none",
        gate_first: bool = False,
        keep: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `linnet.ops.norm.rms_norm`. A split norm takes no residual."""
        gain = self.gain()
        if self.tp is not None:
            if gate is not None and gate_first:
                x, gate = gated_activation(gate, x, gate_activation), None
            settings = {"eps": self.eps, "gate": gate, "gate_activation": gate_activation}
            return split_rms_norm(x, gain, self.tp, **settings)
        gates = {"gate": gate, "gate_activation": gate_activation, "gate_first": gate_first}
        return rms_norm(x, gain, eps=self.eps, **gates, residual=residual, keep=keep)

    def gain(self) -> Tensor | None:
        """Returns what multiplies each feature, [D], or None."""
        return self.weight

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class RMSNorm(SRMSNorm):
    """Root-mean-square norm with a learned gain (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim))


class ZeroCentredRMSNorm(SRMSNorm):
    """Root-mean-square norm with the gain 1 + w, at least in float32: a w in bfloat16 keeps its digits."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__(dim, eps)
        self.weight = nn.Parameter(torch.zeros(dim))

    def gain(self) -> Tensor:
        return 1.0 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension, with the sum before it and the gate around it."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        gate: Tensor | None = None,
        gate_activation: str = "none",
        gate_first: bool = False,
        keep: bool = False,
        narrow: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `linnet.ops.norm.layer_norm`; returns y, and h with a residual or `keep`.

        With one of the further arguments and a gain, y is narrow unless `narrow` is False, since products follow.
        """
        more = keep or residual is not None
        y, h = layer_norm(
            x,
            self.weight,
            self.bias,
            eps=self.eps,
            gate=gate,
            gate_activation=gate_activation,
            gate_first=gate_first,
            residual=residual,
            keep=keep,
            narrow=narrow and self.weight is not None and (more or gate is not None),
        )
        return (y, h) if more else y


class BatchNorm(nn.Module):
    """Norm of each channel over all tokens of a batch, with learned gain and bias (arXiv:1502.03167).

    In evaluation mode it uses running statistics, which are buffers and so a part of checkpoints. A token depends on
    all tokens of its batch in training, so models that predict the next token cannot have it. Rows are packed and not
    padded, so there is no padding in the statistics.

    Attributes:
        split: the ranks whose tokens are one batch (`synchronise`); None for those of this process.
    """

    running_mean: Tensor
    running_var: Tensor
    split: Split | None = None

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = True):
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None
        self.register_buffer("running_mean", torch.zeros(dim))
        self.register_buffer("running_var", torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., D] to [..., D]. Raises ValueError in training if the batch has a single token."""
        rows = x.flatten(0, -2)
        if self.training and self.split is not None:
            return self._over_ranks(rows, self.split).view(x.shape)
        statistics = (self.running_mean, self.running_var)
        y = F.batch_norm(rows, *statistics, self.weight, self.bias, self.training, MOMENTUM, self.eps)
        return y.view(x.shape)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"

    def _over_ranks(self, rows: Tensor, split: Split) -> Tensor:
        """Returns the norm of rows [N, D] by the statistics of the rows of all ranks, two sums over them."""
        x = rows if rows.dtype == torch.float64 else rows.float()
        total = sum_over(torch.cat([x.sum(0), x.new_full((1,), len(x))]), split)
        mean, count = total[:-1] / total[-1], total[-1]
        x = x - mean
        squares = sum_over(x.square().sum(0), split)
        with torch.no_grad():
            self.running_mean.lerp_(mean, MOMENTUM)
            self.running_var.lerp_(squares / (count - 1), MOMENTUM)
        y = x * torch.rsqrt(squares / count + self.eps)
        return (y if self.weight is None else y * self.weight + self.bias).to(rows.dtype)


def synchronise(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes the statistics of every BatchNorm in a model those of the tokens of all ranks of a group, in training."""
    for norm in model.modules():
        if isinstance(norm, BatchNorm):
            norm.split = Split.over(group)


def build_norm(kind: StackNorm, dim: int, eps: float | None = None, affine: bool = True) -> nn.Module:
    """Returns the norm of one kind over `dim` features. Raises ValueError for an unknown kind.

    Args:
        affine: False leaves out the learned gain and bias, where a layer has its own; RMSNorms are SRMSNorm then.
    """
    match kind:
        case "srmsnorm":
            return SRMSNorm(dim, eps or 1e-6)
        case "rmsnorm":
            return RMSNorm(dim, eps or 1e-6) if affine else SRMSNorm(dim, eps or 1e-6)
        case "zero_centred_rmsnorm":
            return ZeroCentredRMSNorm(dim, eps or 1e-6) if affine else SRMSNorm(dim, eps or 1e-6)
        case "layernorm":
            return LayerNorm(dim, eps or 1e-5, elementwise_affine=affine)
        case "batchnorm":
            return BatchNorm(dim, eps or 1e-5, affine)
    raise ValueError(f"norm {kind!r} is unknown; use {', '.join(get_args(StackNorm))}")


def norm_and_gate(norm: nn.Module, x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Returns norm(x) * act(gate) for a norm of `build_norm`; on a GPU in one pass, except for BatchNorm."""
    if isinstance(norm, SRMSNorm | LayerNorm):
        return norm(x, gate=gate, gate_activation=activation)
    return norm(x) * ACTIVATIONS[activation](gate)


def add_and_norm(norm: nn.Module, x: Tensor, residual: Tensor, narrow: bool = True) -> tuple[Tensor, Tensor]:
    """Returns norm(x + residual) and x + residual; on a GPU in one pass, except for BatchNorm.

    Args:
        narrow: matrix products alone read the norm (`linnet.ops.norm.layer_norm`).
    """
    if isinstance(norm, LayerNorm):
        return norm(x, residual=residual, narrow=narrow)
    if isinstance(norm, SRMSNorm):
        return norm(x, residual=residual)
    total = x + residual
    return norm(total), total


def norm_and_keep(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns norm(x) and x for other readers. The norm's backward adds the gradient of x, except for BatchNorm."""
    return norm(x, keep=True) if isinstance(norm, SRMSNorm | LayerNorm) else (norm(x), x)
