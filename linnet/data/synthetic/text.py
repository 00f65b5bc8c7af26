"""Formats samples as readable text: tokens with names for their roles, and targets under the inputs."""

import numpy as np

from linnet.data.synthetic.base import IGNORE, Task

SILENT = "."  # printed under an input whose position is not scored


def token_names(task: Task) -> list[str]:
    """Returns a name for each id: k0, k1, ... for keys, v0, ... for values, [b] for a blank; see `Task.kinds`."""
    names = []
    for kind in task.kinds:
        single = kind.label.startswith("[")
        names += [kind.label] if single else [f"{kind.label}{number}" for number in range(kind.size)]
    return names


def aligned(task: Task, inputs: np.ndarray, targets: np.ndarray, width: int = 100) -> list[tuple[str, str]]:
    """Returns one sample as pairs of lines, inputs above targets.

    Args:
        inputs, targets: int64 [T].
        width: most characters per line, unless a single token is longer.
    """
    names = token_names(task)
    above = [names[token] for token in inputs]
    below = [SILENT if token == IGNORE else names[token] for token in targets]
    cell = max(map(len, above + below)) + 1
    a_line = max(1, width // cell)
    return [
        tuple("".join(name.ljust(cell) for name in names[at : at + a_line]).rstrip() for names in (above, below))
        for at in range(0, len(above), a_line)
    ]
