"""How a Triton kernel is started: planned once for each kind of call, recorded for tests.

Every kernel of `linnet.ops` starts through `Launcher`: an op keeps one in a plan of its own, or calls `launch` or
`launch_all`, which find it.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linnet.ops import compat_torch, compat_triton

_records: list[list[str]] = []


@contextlib.contextmanager
def record() -> Iterator[list[str]]:
    """Lists the kernels that start inside the `with` block, in any thread, as "<folder of the op>.<kernel>".

    For tests that assert which kernel ran. The replay of a CUDA graph starts nothing and lists nothing.

        with record() as kernels:
            lightning_attention(q, k, v)
        assert "lightning.hopper_kernel" in kernels
    """
    names: list[str] = []
    _records.append(names)
    try:
        yield names
    finally:
        _records[:] = [other for other in _records if other is not names]


class Launcher:
    """A kernel with its grid and constants, for calls that differ in addresses and floats alone.

    Triton looks at every argument of every call to find the variant to run, some microseconds each, and the driver at
    every tensor. From the second call on this starts the variant of the first call, with addresses. Keep one
    (`functools.lru_cache` over what it was made from) for each set of shapes, dtypes, integer arguments, absent tensors
    and device, and pass the caller's tensors through `align`: the variant of the first call may count on alignment.
    A float must be a float in every call: Triton makes a constant of an integer 1. With a release of Triton that
    `compat_triton.can_start` does not know, every call goes through Triton's look-up.

    Args:
        kernel: a function under `triton.jit`, whose last parameters are `constants`.
        programs: the size of its grid, along one axis or two.
        scratch: whether it makes tensor descriptors, for which Triton asks PyTorch for memory.
    """

    def __init__(
        self, kernel: Callable, programs: int | tuple[int, int], constants: tuple, scratch: bool = False, **options: int
    ) -> None:
        self.kernel, self.constants, self.options, self.scratch = kernel, constants, options, scratch
        self._fixed = constants
        self.grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        function = getattr(kernel, "fn", kernel)
        folder = function.__module__.removeprefix("linnet.ops.").split(".")[0]
        self.name = f"{folder}.{getattr(function, '__name__', '')}"
        self._may_overlap = "OVERLAPS" in getattr(getattr(function, "__code__", None), "co_varnames", ())
        self.called = False
        self._start = self._device = None

    def compile(self, *arguments) -> None:
        """Compiles the variant for these arguments without starting it."""
        with torch.cuda.device(self._settle(arguments)):
            compat_triton.compile_only(self.kernel, self.grid, (*arguments, *self.constants), self.options)

    def __call__(self, *arguments) -> None:
        if self.scratch:
            triton.set_allocator(_allocate)  # in each call: a thread, such as that of the backward, has its own
        if self._start is None or compat_triton.has_hooks():
            self.called = True
            self._device = self._settle(arguments)
            with torch.cuda.device(self._device):
                compiled = self.kernel[self.grid](*arguments, *self.constants, **self.options)
            if compiled is not None and compat_triton.can_start():  # None in the interpreter
                self._start = compat_triton.make_start(compiled, self.grid, self.constants)
        elif compat_torch.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(*arguments)
        else:
            stream = compat_torch.current_stream(self._device)
            self._start(stream, [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments])
        for names in _records:
            names.append(self.name)

    def _settle(self, arguments: tuple) -> int:
        """Returns the index of the device, -1 in the interpreter; sets the constant that depends on the device.

        A kernel whose last parameter is OVERLAPS begins before the one before it has ended (`device.after_previous`),
        on Hopper and later.
        """
        index = next(x.get_device() for x in arguments if isinstance(x, Tensor))
        if self._may_overlap:
            # AMD's accelerators have capabilities of 9 too. Two threads may come here at once.
            overlaps = index >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)
            self.constants = (*self._fixed, overlaps)
            if overlaps:
                self.options = {**self.options, "launch_pdl": True}
        return index


def launch(
    kernel: Callable,
    programs: int | tuple[int, int],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    constants: tuple,
    **options: int,
) -> None:
    """Starts a kernel whose parameters are `tensors`, `numbers` and `constants`, by the `Launcher` of such calls.

    Args:
        tensors: on one device, the first one not None. Their strides are the caller's business.
        numbers: floats that may differ from call to call.
        constants: integers, and all else that a variant depends on.
    """
    _find(kernel, programs, tensors, constants, options)(*tensors, *numbers)


class Launch(NamedTuple):
    """The arguments of one `launch`."""

    kernel: Callable
    programs: int
    tensors: tuple[Tensor | None, ...]
    numbers: tuple[float, ...]
    constants: tuple
    options: dict[str, int]


class Launches:
    """Starts kernels in the order in which they are added, with the arguments of `launch`.

    From the first one on that never was started all wait for `start`, which compiles the new ones side by side. So the
    results of a kernel are there after `start`, and not before. If all are known, nothing waits, and no tensor is kept.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Launcher, tuple]] = []

    def add(self, kernel: Callable, programs, tensors: tuple, numbers: tuple, constants: tuple, **options: int) -> None:
        launcher = _find(kernel, programs, tensors, constants, options)
        if launcher.called and not self._waiting:
            launcher(*tensors, *numbers)
        else:
            self._waiting.append((launcher, (*tensors, *numbers)))

    def start(self) -> None:
        new = [call for call in self._waiting if not call[0].called]
        if len(new) > 1 and not compat_triton.is_interpreting():
            # In a context of its own: an interrupt would leave Triton's mode set.
            contextvars.copy_context().run(_compile_all, new)
        for launcher, arguments in self._waiting:
            launcher(*arguments)
        self._waiting.clear()


def launch_all(launches: Sequence[Launch]) -> None:
    """Starts kernels one after another. Those that never were are compiled first, side by side."""
    started = Launches()
    for x in launches:
        started.add(x.kernel, x.programs, x.tensors, x.numbers, x.constants, **x.options)
    started.start()


def _compile_all(calls: list[tuple[Launcher, tuple]]) -> None:
    # Triton's passes run without Python's lock. An error here is suppressed, since it is raised again where the kernel
    # starts; Triton refuses the mode to a caller who is in it.
    with (
        contextlib.suppress(RuntimeError),
        ThreadPoolExecutor(len(calls)) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        for launcher, arguments in calls:
            launcher.compile(*arguments)
    for launcher, _ in calls:
        compat_triton.forget_failures(launcher.kernel)  # a full disk may have room at the next call


def _find(kernel: Callable, programs, tensors: tuple, constants: tuple, options: dict) -> Launcher:
    kinds = tuple([None if x is None else (x.dtype, x.data_ptr() % 16) for x in tensors])
    return _keep(kernel, programs, kinds, constants, tensors[0].device, tuple(options.items()))


@functools.lru_cache(4096)
def _keep(kernel: Callable, programs, kinds: tuple, constants: tuple, device: torch.device, options: tuple):
    return Launcher(kernel, programs, constants, **dict(options))


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def align(x: Tensor | None) -> Tensor | None:
    """Returns x, contiguous and at an address that is a multiple of 16 bytes; a copy only if it is not. None stays."""
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def align_slices(x: Tensor | None) -> tuple[Tensor | None, int, int]:
    """As `align`, but x [M, D] or [M, H, D] may be columns of a wider tensor, each of its M slices in one piece.

    Returns:
        x or its copy, the numbers of a slice and from one slice to the next; 0 and 0 if x is in one piece.
    """
    if x is None or x.is_contiguous() or x.ndim not in (2, 3) or x.data_ptr() % 16:
        return align(x), 0, 0
    whole = x.stride(-1) == 1 and (x.ndim == 2 or x.stride(1) == x.shape[2])
    return (x, x[0].numel(), x.stride(0)) if whole else (x.contiguous(), 0, 0)


def align_rows(x: Tensor, shape: Sequence[int]) -> tuple[Tensor, int]:
    """As `align_slices`, of x [..., *shape]: rows, of one or two axes, which may be columns of wider rows.

    Returns:
        x or its copy, [M, *shape], and the numbers from one row to the next.
    """
    x, width = x.reshape(-1, *shape), math.prod(shape)
    x, _, hop = align_slices(x if x.stride(0) >= width else x.contiguous())  # an expanded axis has stride 0
    return x, hop or width


def cdiv(x: int, y: int) -> int:
    """Returns x / y, rounded up. Triton's takes some microseconds, since it also runs inside kernels."""
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    """Returns the least power of two that is at least x >= 1."""
    return 1 << (x - 1).bit_length()


def pad(width: int) -> int:
    """Returns the power of two, at least 16, that a product of matrices takes for a width."""
    return max(16, next_power_of_2(width))


def choose_operands(dtype: torch.dtype) -> tuple[tl.dtype, str]:
    """Returns the dtype of products' operands and the precision of float32 ones.

    bfloat16 stays; float32 takes three TF32 passes, float16 one: its states could overflow as float16.
    """
    if dtype == torch.bfloat16:
        return tl.bfloat16, "tf32"
    return tl.float32, "tf32x3" if dtype == torch.float32 else "tf32"


def count_processors(device: torch.device, interpreted: int = 8) -> int:
    """Returns the multiprocessors of a GPU, or `interpreted` in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else interpreted


@functools.cache
def count_shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may have: 227 KiB on an H100 and in the interpreter, 163 KiB
    on an A100, 99 KiB on most other cards."""
    return compat_triton.shared_memory(device) if device.type == "cuda" else 227 * 1024


def has_little_shared_memory(device: torch.device) -> bool:
    """Whether programs get less than the 160 KiB and more of A100, H100 and their like."""
    return count_shared_memory(device) < 160 * 1024


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels for Hopper GPUs (compute capability 9.x) run here."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9
