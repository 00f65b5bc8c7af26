"""Reports problems of data together with the other problems of the training or study that names them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from linnet.config import C, Config, ConfigError, Problem, gather, parse
from linnet.data.corpus import DataConfig, check
from linnet.data.hub import is_name
from linnet.data.sources import find_files


def in_data(line: str, config: type[Config] = DataConfig) -> str:
    """Returns a problem with its key in a training or study: `data.` before keys of `config`."""
    return Problem(line).under("data", config.model_fields)


def problems_of(config: type[C], values: Any, check: Callable[[C], object], told: Sequence[str] = ()) -> list[str]:
    """Returns the problems of the data that the plain values of a `data` key name.

    Args:
        config: class of the values. If they are invalid, the result is empty, since the caller reports that.
        check: raises ConfigError with the problems.
        told: problems that the caller already reports; they are not repeated.
    """
    if isinstance(values, dict):  # the caller reports unknown keys; the data can be checked without them
        values = {key: value for key, value in values.items() if key in config.model_fields}
    try:
        parsed = parse(config, values)
    except ConfigError:
        return []
    problems: list[str] = []
    with gather(problems):
        check(parsed)
    return [in_data(line, config) for line in problems if not any(line in other for other in told)]


def text_problems(values: Any, cache_dir: str | Path, seq_len: Any = None, told: Sequence[str] = ()) -> list[str]:
    """Returns the problems that `check` finds in the text named by the plain values of a `data` key.

    Args:
        values: values of a `DataConfig`. told: as in `problems_of`.
        cache_dir: folder of corpora.
        seq_len: tokens per row; ignored unless it is an integer.
    """
    length = seq_len if isinstance(seq_len, int) else None
    return problems_of(DataConfig, values, lambda config: check(config, cache_dir, length), told)


def missing_text(config: DataConfig) -> list[str]:
    """Returns which files of a text are not there, for plans: these need no data. Reads no text and asks no Hub."""
    problems: list[str] = []
    sources = [config.source] if isinstance(config.source, str) else config.source
    for key, names in (("data.source", sources), ("data.validation", config.validation)):
        if local := [name for name in names if not is_name(name)]:
            find_files(local, key, problems, [])
    return problems
