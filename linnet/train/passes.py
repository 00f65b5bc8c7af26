"""How many times a training reads its data, and the warning where repeated data are worth little.

Muennighoff et al. (2023, arXiv:2305.16264) find that up to four passes are worth nearly as much as new data, and that
the value of further ones falls fast.
"""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from linnet.data import DataConfig
from linnet.data.sources import COMPRESSED, find_files

MOST = 4.0
"""Passes over the data past which a warning is shown."""
BYTES_PER_TOKEN = 4.0
"""Bytes per token of a tokenizer other than bytes, as a guess before the text is read."""


def line(tokens: Sequence[int], available: float, units: str, about: bool = False) -> tuple[str, bool]:
    """Returns a sentence about the passes of one or several trainings, and whether it is a warning.

    Only text is warned about: trainings on images are meant to read them many times.

    Args:
        tokens: units that each training reads.
        available: units of one pass.
        units: their name.
        about: whether `available` is an estimate.
    """
    passes = sorted(one / available for one in tokens)
    shown = f"{passes[0]:.2g}" if f"{passes[0]:.2g}" == f"{passes[-1]:.2g}" else f"{passes[0]:.2g} to {passes[-1]:.2g}"
    size = f"{'about ' if about else ''}{available:,.0f} {units}"
    text = f"passes over the training data ({size}): {shown}" + (" per run" if len(passes) > 1 else "")
    many = sum(one > MOST for one in passes) if units == "tokens" else 0  # images are read for hundreds of passes
    if many:
        whose = f"; {many} of {len(passes)} runs read them more than {MOST:g} times" if len(passes) > 1 else ""
        text += f"{whose}; past {MOST:g} passes, repeated data are worth much less than new data: use more text"
    return text, bool(many)


def estimate(data: DataConfig) -> float | None:
    """Returns about how many tokens a pass over a text has, from the sizes of its files; None if they do not say."""
    sources = [data.source] if isinstance(data.source, str) else list(data.source)
    if any(str(name).startswith("hf:") for name in sources):
        return None
    problems: list[str] = []
    files = find_files(data.source, "data.source", problems, [])
    if problems or not files or any(file.kind == "parquet" or _packed(file.path) for file in files):
        return None
    size: float = sum(file.path.stat().st_size for file in files)
    size = size if data.max_bytes is None else min(size, data.max_bytes)
    size *= 1.0 if data.validation else 1.0 - data.validation_fraction
    return size / (1.0 if _kind(data.tokenizer) == "byte" else BYTES_PER_TOKEN)


def _packed(path: PurePath) -> bool:
    return path.suffix in COMPRESSED


def _kind(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "kind", ""))
