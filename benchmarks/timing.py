"""How the GPU benchmarks measure: medians of CUDA events, peak memory, the ceilings of the card, and tables that carry
all that their numbers depend on."""

import csv
import importlib.metadata
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from linnet import provenance

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "flash-linear-attention", "lightning-attn", "transformers")
BUDGET = 200.0  # milliseconds of the timed calls of one measurement


def measure(run: Callable[[], object], repeats: int = 20) -> float:
    """The median milliseconds of a call, after three that are not timed."""
    warm_up(run)
    return time_calls(run, repeats)


def warm_up(run: Callable[[], object], calls: int = 3) -> None:
    for _ in range(calls):
        run()
    torch.cuda.synchronize()


def time_calls(run: Callable[[], object], repeats: int = 20) -> float:
    """The median milliseconds of calls in a row: at least 3, and fewer than `repeats` where they are long.

    Where the GPU is done before the host gives it the next call, this is the time of the host.
    """
    (first,) = _elapsed(run, 1)
    return statistics.median(_elapsed(run, max(3, min(repeats, int(BUDGET / first)))))


def _elapsed(run: Callable[[], object], calls: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize()
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]


def peak_memory(run: Callable[[], object]) -> float:
    """GiB in use at most during a call, what was there before it included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def measure_ceilings() -> tuple[float, float]:
    """Bytes per second of a large copy (read and written), FLOPs per second of a large bf16 product of random data."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source))
    size = 8192
    x = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * source.numel() / copy * 1e3, 2 * size**3 / measure(lambda: x @ x) * 1e3


def short_name(gpu: str) -> str:
    """`h200` of `NVIDIA H200`, for file names."""
    return gpu.split()[-1].lower()


def constants(command: str) -> dict[str, str]:
    """The columns that say what a row depends on."""
    gpu = torch.cuda.is_available()
    device = {"gpu": torch.cuda.get_device_name()} if gpu else {"cpu": provenance.cpu_name()}
    versions = {name: _version(name) for name in PACKAGES}
    return {**device, **versions, "command": command, "commit": commit()}


def commit() -> str:
    """The commit of the code that is measured, with `-dirty` behind it if tracked files differ from it.

    LINNET_COMMIT, if it is set, names the commit of a copy whose git history is missing or another. Rows from before
    0.2.0 have no commit.
    """
    found = os.environ.get("LINNET_COMMIT") or provenance.commit()
    if not found:
        sys.exit("commit: this copy of Linnet has no git history; set LINNET_COMMIT to the commit that is measured")
    return found


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def update(path: Path, rows: list[dict], keys: Sequence[str], group: Sequence[str] = ()) -> None:
    """Puts rows into a CSV file: in the place of those that agree in the columns `keys`, or at its end.

    Args:
        group: if given, earlier rows that agree with a new one in these columns go.
    """

    def values(row: dict, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(str(row.get(name, "")) for name in names)

    replaced = {values(row, group) for row in rows} if group else set()
    earlier = [row for row in read(path) if values(row, group) not in replaced]
    table = {values(row, keys): row for row in [*earlier, *rows]}
    columns = dict.fromkeys(name for row in table.values() for name in row)
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.values())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
