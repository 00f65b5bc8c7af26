"""How far results may be from the same in float64: by their relative RMS error, each as its dtype allows.

Not element by element: where terms of both signs cancel, an element of a sum is as far off as the terms are rounded,
and in which order and with which instructions they are added up depends on the processor.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

# Kernels multiply float16 as TF32 (the same mantissa, no overflow) and float32 in three passes of it.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}


def widen(arguments: Iterable) -> list:
    """Arguments with all floating-point tensors in float64."""
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]


def poison(results: Iterable[Tensor | None], dtype: torch.dtype) -> None:
    """Leaves NaN in the memory that such results will get, in `dtype` or float32: for what a kernel does not write."""
    for x in results:
        if x is not None:
            torch.full_like(x, float("nan"), dtype=dtype), torch.full_like(x, float("nan"), dtype=torch.float32)


def relative_error(actual: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """The norm of the difference over that of `expected`, which counts as `least` where it is smaller.

    Infinite where not the same elements are infinite, of the same sign.
    """
    finite = expected.isfinite()
    if not torch.equal(actual[~finite].double(), expected[~finite].double()):
        return float("inf")
    actual, expected = actual[finite].double(), expected[finite].double()
    return ((actual - expected).norm() / expected.norm().clamp(min=least)).item()


@contextlib.contextmanager
def launching(kernel: str | None) -> Iterator[None]:
    """Asserts that the block starts a kernel whose name begins so ("lightning.sweep_kernel"); None: no kernel."""
    from linnet.ops import launching  # needs Triton

    with launching.record() as kernels:
        yield
    assert any(name.startswith(kernel) for name in kernels) if kernel is not None else not kernels, kernels


def assert_near(
    actual: Sequence[Tensor], expected: Sequence[Tensor | None], tolerance: float | None = None, least: float = 1e-30
) -> None:
    """Every result within `tolerance`, or what its own dtype allows, of the expected one, where there is one."""
    pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if e is not None]
    errors = [relative_error(a, e, least) for a, e in pairs]
    allowed = [tolerance or TOLERANCE[a.dtype] for a, _ in pairs]
    assert all(error <= most for error, most in zip(errors, allowed, strict=True)), errors


def assert_same(actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = 1e-10) -> None:
    """Every element within `tolerance`, relative or absolute: for results in float64."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, check_dtype=False)
