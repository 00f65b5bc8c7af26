"""How many times a training reads its data, and the warning where repeated data are worth little.

Muennighoff et al. (2023, arXiv:2305.16264) find that up to four passes are worth nearly as much as new data, and that
the value of further ones falls fast.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from linnet.data import DataConfig
from linnet.data.corpus import MixtureSource, Portion
from linnet.data.records import COMPRESSED
from linnet.data.sources import find_files

MOST = 4.0
"""Passes over the data past which a warning is shown."""
OVER = 1.02
"""Passes per epoch of a mixture from which a plan warns: estimates are not exact."""
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
    passes = sorted(count / available for count in tokens)
    shown = f"{passes[0]:.2g}" if f"{passes[0]:.2g}" == f"{passes[-1]:.2g}" else f"{passes[0]:.2g} to {passes[-1]:.2g}"
    size = f"{'about ' if about else ''}{available:,.0f} {units}"
    text = f"passes over the training data ({size}): {shown}" + (" per run" if len(passes) > 1 else "")
    many = sum(count > MOST for count in passes) if units == "tokens" else 0  # images are read for hundreds of passes
    if many:
        whose = f"; {many} of {len(passes)} runs read them more than {MOST:g} times" if len(passes) > 1 else ""
        text += f"{whose}; past {MOST:g} passes, repeated data are worth much less than new data: use more text"
    return text, bool(many)


def gives(
    mixture: Sequence[MixtureSource | Portion], available: Sequence[float | None], tokens: int
) -> list[dict[str, Any]]:
    """Returns what each source of a mixture gives to a training.

    Args:
        available: tokens of one pass over each source; None if they are unknown.
        tokens: length of the training.

    Returns:
        `source`, `tokens`, `passes` and the `epochs` that were asked for (None: a weight) of each source; None for what
        an unknown size leaves open.
    """
    parts: list[float] = []
    for source, size in zip(mixture, available, strict=True):
        part = source.weight if source.epochs is None else None if size is None else source.epochs * size
        parts += [] if part is None else [part]
    whole = sum(parts) if len(parts) == len(mixture) else 0.0
    read = [tokens * part / whole for part in parts] if whole else [None] * len(mixture)
    return [
        {
            "source": source.name,
            "tokens": None if count is None else round(count),
            "passes": count / size if size and count is not None else None,
            "epochs": source.epochs,
        }
        for source, size, count in zip(mixture, available, read, strict=True)
    ]


def lines(
    sources: Sequence[Mapping[str, Any]], about: bool = False, least: Sequence[Mapping[str, Any]] = ()
) -> list[tuple[str, bool]]:
    """Returns a sentence about each source of `gives`, and whether it is a warning.

    Args:
        about: whether the sizes of the sources are estimates.
        least: what the sources give to the shortest of several trainings, if `sources` is about the longest.
    """
    sentences, word = [], "about " if about else ""
    for low, high in zip(least or sources, sources, strict=True):
        tokens, times = "an unknown number of tokens", "unknown"
        if high["tokens"] is not None:
            tokens = f"{word}{_ends(low['tokens'], high['tokens'], ',')} tokens" + (" per run" if least else "")
        if high["passes"] is not None:
            times = word + _ends(low["passes"], high["passes"], ".3g")
        text, warning = f"source {high['source']}: gives {tokens}; passes: {times}", False
        if high["epochs"] is not None:
            text += f" of {high['epochs']:g} epochs"
            if high["passes"] is not None and high["passes"] > OVER * high["epochs"]:
                text, warning = f"{text}, which end before the training: use fewer steps, or more epochs", True
        if high["passes"] is not None and high["passes"] > MOST:
            fix = "use more of its text, or less of it"
            text += f"; past {MOST:g} passes, repeated data are worth much less than new data: {fix}"
            warning = True
        sentences.append((text, warning))
    return sentences


def study_lines(
    mixture: Sequence[MixtureSource | Portion], available: Sequence[float | None], runs: Sequence[int], about: bool
) -> list[tuple[str, bool]]:
    """Returns the sentences of `lines` for several trainings of `runs` tokens each."""
    least, most = (gives(mixture, available, pick(runs)) for pick in (min, max))
    return lines(most, about, least)


def _ends(low: float, high: float, form: str) -> str:
    shown = [format(value, form) for value in (low, high)]
    return " to ".join(dict.fromkeys(shown))


def estimate(data: DataConfig, source: Sequence[str] | None = None) -> float | None:
    """Returns about how many tokens a pass over a text has, from the sizes of its files; None if they do not say.

    Args:
        source: some sources of the text; None: all.
    """
    names = data.source if source is None else list(source)
    if isinstance(names, list) and any(name.startswith("hf:") for name in names):
        return None
    problems: list[str] = []
    files = find_files(names, "data.source", problems, [])
    if problems or not files or any(file.kind == "parquet" or _packed(file.path) for file in files):
        return None
    size: float = sum(file.path.stat().st_size for file in files)
    if data.max_bytes is not None and source is None:
        size = min(size, data.max_bytes)
    size *= 1.0 if data.validation else 1.0 - data.validation_fraction
    return size / (1.0 if _kind(data.tokenizer) == "byte" else BYTES_PER_TOKEN)


def _packed(path: PurePath) -> bool:
    return path.suffix in COMPRESSED


def _kind(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "kind", ""))
