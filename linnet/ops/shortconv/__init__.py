"""The short convolution: a few taps per channel on the tokens before, and an activation (Mamba, Hyena)."""

from torch import Tensor
from torch.nn import functional as F

from linnet.ops import backend
from linnet.ops.arguments import check_devices
from linnet.ops.chunks import state_dtype
from linnet.ops.registration import empty_like, register
from linnet.ops.shortconv import chunked

__all__ = ["short_convolution"]

OP = "shortconv"


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, offset: Tensor | None = None, silu: bool = False
) -> Tensor:
    """y_t = act(sum_j w_j (x_{t - (W - 1) + j} + a) + b), each channel on its own; nothing is before the first token.

    Computes in float32 (float64 for float64 inputs), whatever autocast says, and rounds once. On a GPU it is one launch
    and one for the backward, which keep nothing but the inputs.

    Args:
        x: [B, T, D].
        weight: [D, W], the newest token's last.
        bias: b, [D] or None.
        offset: a, [D] or None: the bias of a linear layer that x comes from, which costs no pass of its own here.
        silu: whether the activation is x sigmoid(x); else there is none.

    Returns:
        y [B, T, D] in the dtype of x. Gradients reach every argument.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    more = {name: y for name, y in (("bias", bias), ("offset", offset)) if y is not None}
    parts = {"x": x, "weight": weight} | more
    if (
        x.ndim != 3
        or weight.ndim != 2
        or weight.shape[0] != x.shape[2]
        or any(y.shape != x.shape[2:] for y in more.values())
        or 0 in weight.shape
        or not all(y.is_floating_point() for y in parts.values())
    ):
        shapes = ", ".join(f"{name} {list(y.shape)} {y.dtype}" for name, y in parts.items())
        raise ValueError(
            f"short_convolution: {shapes}; give floating-point x [B, T, D], weight [D, W], and bias and offset [D] "
            "or None, with at least one channel and tap"
        )
    check_devices("short_convolution", **parts)
    if x.numel() == 0:
        return x.clone()
    if backend.use_reference():
        taps = weight.to(state_dtype(x, weight))[:, None]
        line = x.to(taps.dtype) if offset is None else x.to(taps.dtype) + offset
        past = F.pad(line.mT, (weight.shape[1] - 1, 0))
        y = F.conv1d(past, taps, None if bias is None else bias.to(taps.dtype), groups=x.shape[2]).mT
        return (F.silu(y) if silu else y).to(x.dtype)
    return convolve.call(x, weight[None], *(None if y is None else y[None] for y in (bias, offset)), silu)


# The registered op has an axis of models, for vmap: weight [M, D, W], bias and offset [M, D], each for R / M rows.
convolve = register(
    "short_convolution",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? offset, bool silu",
    lambda x, *arguments: backend.choose_form(OP, x, chunked).forward(x, *arguments),
    lambda x, *arguments: backend.choose_form(OP, x, chunked).backward(x, *arguments),
    outputs=1,
    learned=range(4),
    shapes=lambda x, *_: empty_like(x),
    like=0,
    axes=lambda arguments, in_dims: ((0, 0, 0, 0), (0,)),
)
