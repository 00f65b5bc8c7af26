"""Bytes that the blocks of a model hold while they train, counted without a GPU and without memory.

Every kind of block runs forward and backward on fake tensors, which have shapes and no data. A dispatch mode watches
their storages come and go. On a GPU in eager mode some functions are one kernel, which keeps less for the backward than
the composition that fake tensors get: stand-ins with the outputs and the saved tensors of these kernels take its place.
`tests/train/test_plan.py` holds the sums against peaks that were measured on an H200.
"""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from linnet.models.causal_lm import empty_model
from linnet.models.config import ModelConfig
from linnet.ops import activation, backend, norm, rotation
from linnet.ops.compat_torch import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_iter
from linnet.train import recompute
from linnet.train.evaluation import collected


@dataclass(frozen=True)
class Footprint:
    """What one block holds for one row of tokens, in bytes.

    Attributes:
        saved: kept from the forward to the backward, the output of the block included, its input not.
        forward: most that exists during the forward, on top of its input.
        backward: most that exists during the backward, on top of its input: `saved`, gradients of activations, and
            with recomputation what it computes again.
        weights: of the block's parameters in the products' dtype, kept as long as autocast is on. Not per row.
    """

    saved: float
    forward: float
    backward: float
    weights: float


@lru_cache(maxsize=256)
def block_footprints(
    config_json: str, length: int, mode: recompute.Recompute, low_precision: bool, fused: bool
) -> tuple[Footprint, ...]:
    """Returns the footprint of each block of a model for one row of `length` tokens. Equal blocks are counted once.

    Args:
        config_json: the JSON of a ModelConfig.
        mode: recomputation: none, selective or block.
        low_precision: whether products run in bfloat16 under autocast.
        fused: whether norms and gates run as one kernel each: eager mode without a dispatch mode, or a compiler.
    """
    config = ModelConfig.model_validate_json(config_json)
    model = empty_model(config, "meta").train()
    recompute.apply(model, mode)
    counted: dict[tuple, Footprint] = {}
    found = []
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        _to_fakes(model, fakes)
        for block in model.backbone.blocks:
            shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
            kind = (repr(block.layers), shapes)
            if kind not in counted:
                counted[kind] = _count(block, config.d_model, length, low_precision, fused)
            found.append(counted[kind])
    return tuple(found)


def _count(block: nn.Module, width: int, length: int, low_precision: bool, fused: bool) -> Footprint:
    # So many rows that activations outweigh the gradients of the weights, which are not per row, at every moment.
    rows = -(-sum(p.numel() for p in block.parameters()) // (width * length))
    peaks = []
    for count in (rows, 2 * rows):
        with collected():  # checkpointed blocks leave cycles, whose tensors another count must not see end
            peaks.append(_run(block, (count, length, width), low_precision, fused))
    once, twice = peaks
    saved, forward, backward = ((b - a) / rows for a, b in zip(once, twice, strict=True))
    return Footprint(saved, forward, backward, weights=once[0] - rows * saved)


def _run(block: nn.Module, shape: tuple, low_precision: bool, fused: bool) -> tuple[int, int, int]:
    """Returns the bytes after the forward, and the peaks of the forward and of the backward."""
    x = torch.empty(shape, requires_grad=True) * 1
    live = _Live(known=[x, *block.parameters(), *block.buffers()])
    with _kernels(fused), torch.autocast("cpu", torch.bfloat16, enabled=low_precision), live:
        y = block(x)[0]
        saved, forward = live.now, live.peak
        # The next block holds y as its input, and has let go of it when this block's backward begins.
        edge, gradient = torch.autograd.graph.get_gradient_edge(y), torch.empty_like(y)
        del y
        live.peak = live.now
        torch.autograd.backward([edge], [gradient])
    for parameter in block.parameters():
        parameter.grad = None
    backward = live.peak
    return saved, forward, backward


class _Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are freed."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def _to_fakes(model: nn.Module, fakes: FakeTensorMode) -> None:
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            found = FakeTensor(fakes, tensor.detach().to("meta"), torch.device("cpu"))
            made[id(tensor)] = nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)


@contextlib.contextmanager
def _kernels(fused: bool) -> Iterator[None]:
    """Makes ops choose the forms of a GPU, and with `fused` the stand-ins of kernels that only eager mode takes."""
    places: list[tuple[Any, str, Any]] = [
        (backend, "use_triton", lambda op, is_cuda, module="triton": backend.has_triton(op, module))
    ]
    if fused:
        places += [
            (norm, "rms_norm_reference", _norm),
            (norm, "layer_norm_reference", _layer_norm),
            (rotation, "rotate_reference", _rotate),
            (activation, "gated_reference", lambda gate, x, _: _Kernel.apply([(x.shape, x.dtype)], gate, x)),
            (activation, "log_sigmoid_reference", lambda x, _: _Kernel.apply([(x.shape, torch.float32)], x)),
        ]
    before = [getattr(module, name) for module, name, _ in places]
    try:
        for module, name, stand_in in places:
            setattr(module, name, stand_in)
        yield
    finally:
        for (module, name, _), function in zip(places, before, strict=True):
            setattr(module, name, function)


class _Kernel(torch.autograd.Function):
    """A kernel that saves its inputs; its gradients are as large as they are."""

    @staticmethod
    def forward(ctx, outputs, *inputs):
        ctx.save_for_backward(*inputs)
        made = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in outputs)
        return made if len(made) > 1 else made[0]

    @staticmethod
    def backward(ctx, *_):
        return None, *(None if x is None else torch.empty_like(x) for x in ctx.saved_tensors)


class _Norm(torch.autograd.Function):
    """The norm's kernel saves h = x + residual, the gain and the gate."""

    @staticmethod
    def forward(ctx, x, weight, gate, residual, dtype):
        h = x if residual is None else torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
        ctx.save_for_backward(h, weight, gate)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return torch.empty(x.shape, dtype=dtype), h

    @staticmethod
    def backward(ctx, dy, dh):
        h, weight, gate = ctx.saved_tensors
        of_x, of_residual = ctx.dtypes
        dx = torch.empty(h.shape, dtype=of_x)
        dresidual = None
        if of_residual is not None:
            dresidual = dx if of_residual == of_x else torch.empty(h.shape, dtype=of_residual)
        others = (None if t is None else torch.empty_like(t) for t in (weight, gate))
        return dx, *others, dresidual, None


def _norm(x, weight, eps, gate, gate_activation, residual, dtype):
    return _Norm.apply(x, weight, gate, residual, dtype)


def _layer_norm(x, weight, bias, eps, gate, gate_activation, residual, narrow):
    low = torch.is_autocast_enabled("cpu")  # of the fake tensors
    dtype = torch.promote_types(x.dtype, x.dtype if residual is None else residual.dtype)
    if low:
        dtype = torch.get_autocast_dtype("cpu") if narrow else torch.float32
    return _Norm.apply(x, weight, gate, residual, dtype)


def _rotate(x, positions, theta, doubling, activation="none"):
    shape = (*x.shape[:-1], x.shape[-1] * (2 if doubling else 1))
    if activation != "none" or theta.requires_grad:
        return _Kernel.apply([(shape, x.dtype)], x, theta)
    return _Rotation.apply(x, shape)


class _Rotation(torch.autograd.Function):
    """A rotation by fixed angles needs nothing of x in its backward."""

    @staticmethod
    def forward(ctx, x, shape):
        ctx.shape = x.shape
        return torch.empty(shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return torch.empty(ctx.shape, dtype=dy.dtype), None
