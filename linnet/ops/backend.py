"""Which form of an op runs: chosen by device, overridable here and nowhere else.

`reference` is the definition token by token (any dtype, slow), `chunked` is PyTorch on any device, `triton` for GPUs.
A missing Triton or GPU is never an import error: `triton` is chosen only for CUDA tensors of an op that has that form.
"""

import contextlib
import functools
import importlib.util

import torch

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
    """Turns on value checks that would make a GPU wait: finite, non-positive log-decays and ordered `cu_seqlens`."""
    global _debug
    before, _debug = _debug, True
    try:
        yield
    finally:
        _debug = before


def debugging() -> bool:
    """Whether `debug` is on."""
    return _debug


def use_reference() -> bool:
    """Whether `use_backend` asks for the definition."""
    return _form == "reference"


def use_triton(op: str, is_cuda: bool, module: str = "triton") -> bool:
    """Whether `linnet.ops.<op>.<module>` serves a call. RuntimeError where it is asked for by name but not there."""
    if _form != "triton" and not (_form == "auto" and is_cuda):
        return False
    # A compiler cannot look for modules, and needs Triton itself for CUDA tensors.
    there = torch.compiler.is_compiling() or has_triton(op, module)
    if _form == "triton" and not there:
        raise RuntimeError(f"backend 'triton' was asked for, but op {op!r} has no Triton form here; use 'chunked'")
    return there


@functools.cache  # asked on every call of an op
def has_triton(op: str, module: str = "triton") -> bool:
    """Whether Triton is installed and `linnet.ops.<op>.<module>` is there."""
    return (
        importlib.util.find_spec("triton") is not None
        and importlib.util.find_spec(f"linnet.ops.{op}.{module}") is not None
    )
