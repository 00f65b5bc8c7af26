"""The device of a run: choice, peak speed, memory in use."""

import platform
import resource
import sys
from typing import Literal

import torch

import linnet
from linnet.config import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]

# Dense bfloat16 matrix products with float32 sums, without sparsity, in FLOP/s, from the vendor's data sheets. The
# first name that the device's name contains counts.
_PEAKS = (
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
)


def choose(name: DeviceName) -> torch.device:
    """`auto` is the GPU where there is one. Raises `ConfigError` for a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        reason = "this PyTorch has no CUDA" if torch.version.cuda is None else "no GPU is visible"
        raise ConfigError([f"device: 'cuda' was asked for, but {reason}; use 'cpu' or 'auto'"])
    return torch.device(name)


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s that the device can reach at most (dense bfloat16), None where we do not know it, as on every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS if part.lower() in name.lower()), None)


def memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: tensors on a GPU, or all of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def environment(device: torch.device) -> dict:
    """What the numbers depend on besides the configuration."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "linnet": linnet.__version__,
        "torch": torch.__version__,
        "device": name,
        "threads": torch.get_num_threads(),
    }
