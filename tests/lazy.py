"""Modules that are imported when a test first uses them: each worker of the suite collects all tests but runs few."""

import importlib.util
import sys
from types import ModuleType


def lazy(name: str) -> ModuleType:
    """Returns a module whose code runs at the first use of an attribute (the recipe of importlib's documentation)."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
