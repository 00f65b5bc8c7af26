"""The device of a run: choice, peak speed, memory in use."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from typing import Literal

import torch

from linnet import provenance
from linnet.config import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]

# FLOP/s of dense bfloat16 matrix products with float32 sums, without sparsity, from the vendor's data sheets. The first
# entry whose name is contained in the device's name is used.
_PEAKS = (
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("MI300X", 1307.4e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
)


def choose(name: DeviceName) -> torch.device:
    """Returns the device of a name; `auto` is the GPU if one is visible. Raises `ConfigError` if the GPU is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        reason = "this PyTorch has no CUDA" if torch.version.cuda is None else "no GPU is visible"
        raise ConfigError([f"device: 'cuda' was requested, but {reason}; use 'cpu' or 'auto'"])
    return torch.device(name)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """Returns a context for forward passes in a precision: products in bfloat16, or all as the parameters are."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()


def peak_flops(device: torch.device) -> float | None:
    """Returns the peak FLOP/s of the device (dense bfloat16), None if it is unknown, as for every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS if part.lower() in name.lower()), None)


def memory_bytes(device: torch.device) -> int:
    """Returns the peak memory in use so far: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def capacity(device: torch.device) -> int | None:
    """Returns the bytes of memory that tensors on a device may take together, or None if they are unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


_WORK = 1 << 25  # FLOPs of a matrix product that are worth a thread: about a millisecond of one core


def threads(device: torch.device, width: int, tokens: int) -> contextlib.AbstractContextManager:
    """Limits the CPU threads of PyTorch to one per `_WORK` of a product of [tokens, width] and [width, width].

    Threads wait for each other after every operation. If one of them has no core for a moment, because other processes
    use it, an operation of microseconds takes milliseconds. On a GPU, or if the user chose OMP_NUM_THREADS or
    `executor.threads`, nothing changes.
    """
    if device.type != "cpu" or provenance.chosen_threads() is not None:
        return use_threads(None)
    return use_threads(max(1, min(torch.get_num_threads(), 2 * tokens * width**2 // _WORK)))


@contextlib.contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Lets PyTorch use `count` CPU threads, None as many as now, and the number of before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_LARGEST_KEPT = 31 << 20


def keep_freed_memory(device: torch.device) -> None:
    """Lets a training on a CPU use freed memory again, in place of fresh pages of the system for every tensor.

    glibc takes blocks above a threshold from the system and gives them back when they are freed. The threshold starts
    at 128 KiB and rises to the size of the largest such block that was freed, up to 32 MiB. Freeing one block, which is
    never written, raises it for the rest of the process; memory at the end of the heap is then given back above twice
    the threshold, 62 MiB. Nothing changes with other allocators, or where MALLOC_MMAP_THRESHOLD_ is set.
    """
    if device.type == "cpu":
        torch.empty(_LARGEST_KEPT, dtype=torch.uint8, device=device)


def execution(device: torch.device, compiled: bool) -> dict:
    """Returns the part of a run's environment that changes the rounding of losses, as checkpoints keep it."""
    names = ("torch", "triton", "device", "threads")
    environment = {name: value for name, value in provenance.environment(device).items() if name in names}
    if device.type == "cuda":
        del environment["threads"]
    return environment | {"compile": compiled}
