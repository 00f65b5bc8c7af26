"""Where numbers come from: the date, the commit or release of Linnet, versions of what computes, CPU and GPU."""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import linnet

if TYPE_CHECKING:  # reports are drawn without torch, which takes seconds to import
    import torch

PACKAGE = Path(__file__).parent
THREADS = "OMP_NUM_THREADS"
SHARE = "LINNET_THREADS"  # the value that Linnet itself gave OMP_NUM_THREADS in a process that it started


@functools.cache
def commit(package: Path = PACKAGE) -> str | None:
    """The git commit of the clone that a package runs from, None outside a clone.

    Returns:
        40 hexadecimal digits, with `-dirty` behind them if a tracked file differs from the commit.
    """
    here = ["git", "--no-optional-locks", "-C", str(package)]  # `status` would write the index of a repository
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # A package in a virtual environment inside some other repository is not tracked there.
        _run([*here, "ls-files", "--error-unmatch", "__init__.py"])
        dirty = _run([*here, "status", "--porcelain", "--untracked-files=no"])
        return _run([*here, "rev-parse", "HEAD"]) + ("-dirty" if dirty else "")
    return None


def date() -> str:
    """The present time in UTC, as in `2026-01-31T12:00:00+00:00`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def code_digest() -> str:
    """The first 12 hexadecimal digits of the SHA-256 of Linnet's Python files and of the release of PyTorch."""
    total = hashlib.sha256(importlib.metadata.version("torch").partition("+")[0].encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        total.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


@functools.cache
def cpu_name() -> str:
    """The model of the CPU, or its architecture if the system does not name the model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return _run(["sysctl", "-n", "machdep.cpu.brand_string"])
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Linnet, its commit if it runs from a clone, Python, PyTorch and, if installed, Triton."""
    version_of = {"linnet": linnet.__version__}
    if sha := commit():
        version_of["commit"] = sha
    version_of["python"] = platform.python_version()
    return version_of | {name: version for name in ("torch", "triton") if (version := installed_version(name))}


def installed_version(package: str) -> str:
    """Version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment(device: "torch.device") -> dict[str, Any]:
    """What numbers depend on besides a configuration: `versions`, the CPU, the device that computes, its threads."""
    import torch

    cpu = cpu_name()
    return versions() | {
        "torch": torch.__version__,  # with the build, as in 2.13.0+cpu
        "cpu": cpu,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": torch.get_num_threads(),
    }


def chosen_threads() -> str | None:
    """The value of OMP_NUM_THREADS; None if it is unset, or Linnet set it as this process's share of the cores."""
    value = os.environ.get(THREADS)
    return None if value == os.environ.get(SHARE) else value


def stamp(device: "torch.device") -> dict[str, Any]:
    """`date` and `environment`, as results keep them."""
    return {"date": date(), "environment": environment(device)}


def shown(results: Iterable[Mapping[str, Any]]) -> str:
    """One line about results that were stamped: dates, versions and devices, each value once; "" if none was.

    Args:
        results: each with `date` and `environment`, as far as the release that wrote it recorded them.
    """
    dates, texts = set(), {}
    for result in results:
        if result.get("date"):
            dates.add(str(result["date"])[:10])
        for name, value in (result.get("environment") or {}).items():
            text = str(value)[:12] + "-dirty" * str(value).endswith("-dirty") if name == "commit" else str(value)
            texts.setdefault(name, {})[text] = None
    if texts.get("cpu") == texts.get("device"):
        texts.pop("cpu", None)
    days = sorted(dates)
    parts = [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
    return ", ".join([*parts, *(f"{name} {' or '.join(values)}" for name, values in texts.items())])


def _run(command: list[str]) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environment)
    return done.stdout.strip()
