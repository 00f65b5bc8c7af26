"""Names of an earlier release that keep working for one more, with a warning that gives the new name."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

REMOVED_IN = "0.3.0"


class LinnetDeprecationWarning(FutureWarning):
    """A deprecated name, key or option of Linnet was used. Python shows it by default, unlike DeprecationWarning."""


def warn(old: str, new: str, stacklevel: int = 2) -> None:
    """Warns that `old` goes in `REMOVED_IN` and says what to write instead.

    Args:
        old: what was written, for example "TrainConfig key `device`".
        new: what to write, for example "`run.device`".
        stacklevel: frames between the user's line and this function, 1 being the caller.
    """
    message = f"{old} is deprecated and goes in {REMOVED_IN}; use {new}"
    warnings.warn(message, LinnetDeprecationWarning, stacklevel=stacklevel + 1)


def renamed(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` for `module` that serves old names.

        __getattr__ = renamed(__name__, {"OldName": "linnet.new.place.NewName"})

    Args:
        module: the `__name__` of the module that had the old names.
        names: old name -> full dotted path of the new one.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path, _, attribute = names[name].rpartition(".")
        warn(f"{module}.{name}", names[name])
        return getattr(importlib.import_module(path), attribute)

    return get
