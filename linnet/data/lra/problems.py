"""Reports problems of a task's folder together with the other problems of the training that names it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linnet.data.lra.corpus import check_lra
from linnet.data.lra.task import LraDataConfig
from linnet.data.problems import problems_of


def task_problems(values: Any, cache_dir: str | Path, told: Sequence[str] = ()) -> list[str]:
    """Returns the problems of the folder named by the plain values of a `data` key: missing splits, columns, images.

    Args:
        values: values of an `LraDataConfig`. told: as in `problems_of`.
        cache_dir: folder of prepared tasks.
    """
    return problems_of(LraDataConfig, values, lambda config: check_lra(config, cache_dir), told)
