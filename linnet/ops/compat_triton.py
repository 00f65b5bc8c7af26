"""Every private API of Triton that Linnet uses. Tried with Triton 3.6.0 and 3.7.1; check this file at a new release.

No other file of Linnet may name one (`tests/ops/test_compat.py` looks for them). Gluon and its Hopper instructions are
`triton.experimental`, which is public but unstable: the kernels import them, and their ops run without.
"""

import functools
import warnings
from collections.abc import Callable

import torch
import triton

# Releases whose `JITFunction.run` starts a compiled kernel as `make_start` does.
KNOWN_RELEASES = ("3.6", "3.7")

_runtime = triton.knobs.runtime


@functools.cache
def can_start(release: str = triton.__version__) -> bool:
    """Whether `make_start` works with this release of Triton; warns if not.

    Args:
        release: the version to ask for, if not the installed one.
    """
    known = ".".join(release.split(".")[:2]) in KNOWN_RELEASES
    if not known:
        warnings.warn(
            f"triton {release} is not among the releases whose launches Linnet knows ({', '.join(KNOWN_RELEASES)}); "
            "every launch goes through Triton's own look-up, which costs the host some microseconds more; "
            f"to avoid that, install triton=={KNOWN_RELEASES[-1]}.*",
            stacklevel=3,
        )
    return known


def make_start(compiled, grid: tuple[int, int, int], constants: tuple) -> Callable[[int, list], None]:
    """Returns start(stream, arguments), which starts a compiled kernel as Triton does once it has found it.

    Args:
        compiled: what `kernel[grid](...)` returned.
        constants: the last parameters of the kernel; `arguments` are those before, with addresses for tensors.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    x, y, z = grid

    def start(stream: int, arguments: list) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments, *constants)

    return start


def has_hooks() -> bool:
    """Whether a profiler has hooks on launches, which `make_start` would not call."""
    return _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls


def is_interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1)."""
    return _runtime.interpret


def compile_only(kernel: Callable, grid: tuple, arguments: tuple, options: dict[str, int]) -> None:
    """Compiles a kernel for these arguments without starting it."""
    kernel.warmup(*arguments, grid=grid, **options)


def forget_failures(kernel: Callable) -> None:
    """Removes what failed to compile in `AsyncCompileMode` from a kernel's cache, so that the next call tries again.

    Triton 3.7 keeps it in the place of the compiled kernel.
    """
    for kernels, *_ in list(kernel.device_caches.values()):
        for key, compiled in list(kernels.items()):
            if isinstance(compiled, triton.FutureKernel):
                kernels.pop(key, None)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have. PyTorch's device properties have it from 2.12 on only."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
