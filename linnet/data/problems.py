"""What is wrong with a text, as a part of what is wrong with the training or study that names it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linnet.config import ConfigError, gather, parse
from linnet.data.corpus import DataConfig, check


def in_data(line: str) -> str:
    """A problem of a `DataConfig` under its key in a training or study, where its configuration is `data`."""
    key = line.partition(":")[0].partition(".")[0]
    return f"data.{line}" if key in DataConfig.model_fields else line


def text_problems(values: Any, cache_dir: str | Path, seq_len: Any = None, told: Sequence[str] = ()) -> list[str]:
    """What `check` finds wrong with the text that a `data` of plain values names, to stand beside what else is wrong.

    Args:
        values: of a `DataConfig`; where they are none, that is for others to tell.
        seq_len: tokens of a row, if it is a number.
        told: problems that others found; what one of them says is not said again.
    """
    if isinstance(values, dict):  # unknown keys are told by others, and say nothing against the text
        values = {key: value for key, value in values.items() if key in DataConfig.model_fields}
    try:
        config = parse(DataConfig, values)
    except ConfigError:
        return []
    problems: list[str] = []
    with gather(problems):
        check(config, cache_dir, seq_len if isinstance(seq_len, int) else None)
    return [in_data(line) for line in problems if not any(line in other for other in told)]
