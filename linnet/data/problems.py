"""Reports problems of a text together with the other problems of the training or study that names it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linnet.config import ConfigError, gather, parse
from linnet.data.corpus import DataConfig, check


def in_data(line: str) -> str:
    """Returns a problem of a `DataConfig` with its key in a training or study: `data.` before keys of `DataConfig`."""
    key = line.partition(":")[0].partition(".")[0]
    return f"data.{line}" if key in DataConfig.model_fields else line


def text_problems(values: Any, cache_dir: str | Path, seq_len: Any = None, told: Sequence[str] = ()) -> list[str]:
    """Returns the problems that `check` finds in the text named by the plain values of a `data` key.

    Args:
        values: values of a `DataConfig`. If they are invalid, the result is empty, since the caller reports that.
        cache_dir: folder of corpora.
        seq_len: tokens per row; ignored unless it is an integer.
        told: problems that the caller already reports; they are not repeated.
    """
    if isinstance(values, dict):  # the caller reports unknown keys; the text can be checked without them
        values = {key: value for key, value in values.items() if key in DataConfig.model_fields}
    try:
        config = parse(DataConfig, values)
    except ConfigError:
        return []
    problems: list[str] = []
    with gather(problems):
        check(config, cache_dir, seq_len if isinstance(seq_len, int) else None)
    return [in_data(line) for line in problems if not any(line in other for other in told)]
