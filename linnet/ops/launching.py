"""How a Triton kernel is started: what a launch depends on is worked out once, and Triton's look-up is passed by."""

import contextlib
import contextvars
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# How Triton's own launcher starts a compiled kernel, in 3.6 and 3.7; `Launcher` does the same.
START = (
    "kernel.run(grid_0,grid_1,grid_2,stream,kernel.function,kernel.packed_metadata,launch_metadata,"
    "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*bound_args.values())"
)


class Launcher:
    """A kernel with its grid and constants, for calls that differ in addresses and floats alone.

    Triton looks at every argument of every call to find the variant to run, some microseconds each, and the driver at
    every tensor; from the second call on this goes straight to the variant, with addresses. Keep one
    (`functools.lru_cache` over what it was made from) for each set of shapes, dtypes, integer arguments, absent tensors
    and device, and pass what the caller gave through `align`: the variant of the first call may count on its alignment.
    A float must be one in every call: of an integer 1, Triton makes a constant. With a Triton that `starts_alike` does
    not know, every call goes by its look-up.

    Args:
        kernel: a function under `triton.jit`, whose last parameters are `constants`.
        programs: the size of its grid.
        scratch: whether it makes tensor descriptors, which lie in memory that Triton asks PyTorch for.
    """

    def __init__(
        self, kernel: Callable, programs: int, constants: tuple, scratch: bool = False, **options: int
    ) -> None:
        self.kernel, self.programs, self.constants, self.options = kernel, programs, constants, options
        self.scratch = scratch
        self.called = False
        self._compiled = self._device = None

    def compile(self, *arguments) -> None:
        """Makes the variant for these arguments without starting it."""
        with torch.cuda.device(next(x.get_device() for x in arguments if isinstance(x, Tensor))):
            self.kernel.warmup(*arguments, *self.constants, grid=(self.programs,), **self.options)

    def __call__(self, *arguments) -> None:
        if self.scratch:
            triton.set_allocator(_allocate)  # each time: a thread, such as that of the backward, has its own
        compiled = self._compiled
        # With hooks a profiler looks on.
        if compiled is None or (hooks := triton.knobs.runtime).launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            self.called = True
            self._device = next(x.get_device() for x in arguments if isinstance(x, Tensor))  # -1 in the interpreter
            with torch.cuda.device(self._device):
                compiled = self.kernel[(self.programs,)](*arguments, *self.constants, **self.options)
            if compiled is not None and starts_alike():  # None in the interpreter
                self._compiled = compiled
            return
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(*arguments)
        compiled.run(
            self.programs, 1, 1, torch._C._cuda_getCurrentRawStream(self._device),
            compiled.function, compiled.packed_metadata, None, None, None,
            *[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments], *self.constants,
        )  # fmt: skip


@functools.cache
def starts_alike(start: Callable | None = None) -> bool:
    """Whether this Triton starts compiled kernels as `START` says; a warning if not.

    Args:
        start: the method of Triton's that launches a kernel, if not the installed one.
    """
    try:
        # What is looked at is no promise of Triton's, the places of these two included.
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction

        known = (
            START in "".join(inspect.getsource(start or JITFunction.run).split())
            and isinstance(CompiledKernel.run, property)  # made at the first launch
            and hasattr(triton.knobs.runtime.launch_enter_hook, "calls")
        )
    except (ImportError, OSError, TypeError, AttributeError):
        known = False
    if not known:
        warnings.warn(
            f"Triton {triton.__version__} starts kernels in a way that Linnet does not know, so every launch goes by "
            "Triton's look-up, which takes the host some microseconds more; Triton 3.6 and 3.7 are known",
            stacklevel=3,
        )
    return known


def launch(
    kernel: Callable, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...], constants: tuple,
    **options: int,
) -> None:  # fmt: skip
    """Starts a kernel of `tensors`, `numbers` and `constants` by the `Launcher` of such calls.

    Args:
        tensors: contiguous, on one device, the first one not None.
        numbers: floats that may differ from call to call.
        constants: integers and what else stays.
    """
    _find(kernel, programs, tensors, constants, options)(*tensors, *numbers)


class Launch(NamedTuple):
    """What `launch` takes."""

    kernel: Callable
    programs: int
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[float, ...]
    constants: tuple
    options: dict[str, int]


def launch_all(launches: Sequence[Launch]) -> None:
    """Starts kernels one after another. Those that never were are compiled first, side by side."""
    calls = [(_find(x.kernel, x.programs, x.tensors, x.constants, x.options), x) for x in launches]
    new = [call for call in calls if not call[0].called]
    if len(new) > 1 and not triton.knobs.runtime.interpret:
        # In a context of its own, since an interrupt would leave the mode of Triton set.
        contextvars.copy_context().run(_compile_all, new)
    for launcher, x in calls:
        launcher(*x.tensors, *x.numbers)


def _compile_all(calls: list[tuple[Launcher, Launch]]) -> None:
    # Triton's passes run without Python's lock. Errors come again, and are heard, where the kernel is started, and the
    # mode is refused to a caller who is in it.
    with (
        contextlib.suppress(RuntimeError),
        ThreadPoolExecutor(len(calls)) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for launcher, x in calls:
            launcher.compile(*x.tensors, *x.numbers)
    for launcher, _ in calls:
        # Triton 3.7 keeps what failed in the place of the kernel, and would fail for ever: a disk may have room again.
        for kernels, *_ in list(launcher.kernel.device_caches.values()):
            for key, kernel in list(kernels.items()):
                if isinstance(kernel, triton.FutureKernel):
                    kernels.pop(key, None)


def _find(kernel: Callable, programs: int, tensors: tuple, constants: tuple, options: dict) -> Launcher:
    kinds = tuple([None if x is None else (x.dtype, x.data_ptr() % 16) for x in tensors])
    return _keep(kernel, programs, kinds, constants, tensors[0].device, tuple(options.items()))


@functools.lru_cache(4096)
def _keep(kernel: Callable, programs: int, kinds: tuple, constants: tuple, device: torch.device, options: tuple):
    return Launcher(kernel, programs, constants, **dict(options))


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def align(x: Tensor | None) -> Tensor | None:
    """x, contiguous and from an address that is a multiple of 16 bytes; a copy only where it is not. None stays."""
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def pad(width: int) -> int:
    """The power of two, at least 16, that a product of matrices takes for a width."""
    return max(16, triton.next_power_of_2(width))


def choose_operands(dtype: torch.dtype) -> tuple[tl.dtype, str]:
    """The operands of products: bfloat16, or float32 (float16 states could overflow) in one or three tf32 passes."""
    if dtype == torch.bfloat16:
        return tl.bfloat16, "tf32"
    return tl.float32, "tf32x3" if dtype == torch.float32 else "tf32"


def count_processors(device: torch.device, interpreted: int = 8) -> int:
    """The multiprocessors of a GPU; as many as `interpreted` in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else interpreted


@functools.cache
def count_shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have: 227 KiB on an H100, also said in the interpreter; 163 KiB on an
    A100, 99 KiB on most other cards."""
    if device.type != "cuda":
        return 227 * 1024
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def has_little_shared_memory(device: torch.device) -> bool:
    """Whether programs get less than the 160 KiB and more of A100, H100 and their like."""
    return count_shared_memory(device) < 160 * 1024
