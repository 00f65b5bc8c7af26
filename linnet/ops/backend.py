"""Which form of an op runs, chosen by device and overridable here and nowhere else; and warnings of slow forms.

`reference` is the definition token by token (any dtype, slow), `chunked` is PyTorch on any device, `triton` for GPUs.
A missing Triton or GPU is never an import error: `triton` is chosen only for CUDA tensors of an op that has that form.
"""

import contextlib
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType

import torch

from linnet.ops import compat_torch

FORMS = ("auto", "reference", "chunked", "triton")

_form = "auto"
_debug = False


@contextlib.contextmanager
def use_backend(form: str):
    """Makes every op inside the `with` block run in one form. Raises ValueError for an unknown one."""
    global _form
    if form not in FORMS:
        raise ValueError(f"backend {form!r} is unknown; use one of {', '.join(FORMS)}")
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


@contextlib.contextmanager
def debug():
    """Turns on value checks that would make a GPU wait: non-positive log-decays without NaN and ordered `cu_seqlens`.

    Meta and fake tensors have no values, and `torch.vmap` hides those of its models: these calls are not checked.
    """
    global _debug
    before, _debug = _debug, True
    try:
        yield
    finally:
        _debug = before


def debugging(*tensors: torch.Tensor | None) -> bool:
    """Whether `debug` is on, and these tensors have values to look at."""
    return _debug and all(x is None or compat_torch.has_values(x) for x in tensors)


def use_reference() -> bool:
    """Whether `use_backend` asks for the definition."""
    return _form == "reference"


def use_triton(op: str, is_cuda: bool, module: str = "triton") -> bool:
    """Whether `linnet.ops.<op>.<module>` serves a call. RuntimeError if `use_backend` asks for one that is missing."""
    if _form != "triton" and not (_form == "auto" and is_cuda):
        return False
    # A compiler cannot look for modules, and needs Triton itself for CUDA tensors.
    there = torch.compiler.is_compiling() or has_triton(op, module)
    if _form == "triton" and not there:
        raise RuntimeError(f"backend 'triton' was asked for, but op {op!r} has no Triton form here; use 'chunked'")
    return there


def choose_form(op: str, x: torch.Tensor, chunked: ModuleType) -> ModuleType:
    """Returns `linnet.ops.<op>.triton` if it serves a call on the device of x, else `chunked`."""
    return importlib.import_module(f"linnet.ops.{op}.triton") if use_triton(op, x.is_cuda) else chunked


def forms(op: str, chunked: ModuleType, *functions: str) -> list[Callable]:
    """Returns functions that call those of the form which `choose_form` gives for their first argument."""

    def run(function: str, x: torch.Tensor, *arguments):
        return getattr(choose_form(op, x, chunked), function)(x, *arguments)

    return [functools.partial(run, function) for function in functions]


@functools.cache  # asked on every call of an op
def has_triton(op: str, module: str = "triton") -> bool:
    """Whether Triton is installed and `linnet.ops.<op>.<module>` exists."""
    return (
        importlib.util.find_spec("triton") is not None
        and importlib.util.find_spec(f"linnet.ops.{op}.{module}") is not None
    )


class SlowPathWarning(UserWarning):
    """A call runs in a form that is several times slower than the kernels of the op."""


@functools.cache
def warn_slow(op: str, reason: str, fix: str) -> None:
    """Warns, once for each op and reason, that a call misses the kernels of the op."""
    warnings.warn(f"{op}: {reason} misses the fast kernels and runs slower; {fix}", SlowPathWarning, stacklevel=2)


def is_wide(op: str, *tensors: torch.Tensor) -> bool:
    """Whether a tensor is float64, which no Triton kernel takes; warns if so."""
    if all(x.dtype != torch.float64 for x in tensors):
        return False
    warn_slow(op, "float64", "give float32 or bfloat16 tensors")
    return True


def takes_kernels(op: str, dtypes: tuple[torch.dtype, ...], widths: tuple[int, ...] = (), widest: int = 256) -> bool:
    """Whether the Triton kernels of a matrix-state op take tensors of these dtypes and head widths; warns if not.

    They take one dtype of at most 32 bits, and widths that are multiples of 8 up to `widest`.
    """
    if torch.float64 in dtypes:
        warn_slow(op, "float64", "give float32 or bfloat16 tensors")
    elif len(set(dtypes)) > 1:
        names = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
        warn_slow(op, f"a mix of dtypes ({names})", "give all tensors in one dtype")
    elif odd := [width for width in widths if width % 8 or not 8 <= width <= widest]:
        warn_slow(op, f"a head width of {odd[0]}", f"use a multiple of 8 from 8 to {widest}")
    else:
        return True
    return False
