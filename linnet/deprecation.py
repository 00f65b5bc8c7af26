"""Modules that moved, under the names of before. They warn, and go in the version that the table names."""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {  # old name -> where its names are now, since, until
    "linnet.study.fit": (("linnet.laws.fit", "linnet.study.table"), "0.3.0", "0.4.0"),
    "linnet.orders": (("linnet.laws.orders",), "0.3.0", "0.4.0"),
    "linnet.study.laws": (("linnet.laws.further",), "0.3.0", "0.4.0"),
    "linnet.study.mad": (("linnet.mad",), "0.3.0", "0.4.0"),
    "linnet.report.mad": (("linnet.mad.page",), "0.3.0", "0.4.0"),
    "linnet.study.reproduce": (("linnet.papers",), "0.3.0", "0.4.0"),
    "linnet.data.clean": (("linnet.corpus",), "0.3.0", "0.4.0"),
    "linnet.study.cleaning": (("linnet.corpus.scoring",), "0.3.0", "0.4.0"),
    "linnet.report.corpus": (("linnet.corpus.page",), "0.3.0", "0.4.0"),
    "linnet.cli.options": (("linnet.options",), "0.3.0", "0.4.0"),
}
_MERGED = {  # below linnet: small modules -> those of their subject
    "corpus.dedup.components": "corpus.dedup.minhash", "corpus.rules.switch": "corpus.rules.filters",
    "inference.checks": "inference.engine",
    "data.split": "data.corpus", "data.synthetic.text": "data.synthetic.base", "laws.fit.heldout": "laws.fit.law",
    "inference.decoding.precision": "inference.engine", "papers.job": "papers.planned",
    "report.downstream.page": "report.downstream.figures", "serve.gate": "serve.app", "serve.metrics": "serve.service",
    "serve.tokens": "serve.scoring", "study.describe": "study.collect", "train.monitor.clock": "train.loop",
    "train.prefetch": "train.session", "train.together.products": "train.together.ensemble",
}  # fmt: skip
MOVED |= {f"linnet.{old}": ((f"linnet.{new}",), "0.3.0", "0.4.0") for old, new in _MERGED.items()}


class Moved(MetaPathFinder, Loader):
    """Makes a module of `MOVED`, or one inside of it, from the attributes of the modules that have its names now."""

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        return spec_from_loader(name, self, is_package=True) if _homes(name) else None

    def create_module(self, spec: ModuleSpec) -> None:
        homes, since, until = _homes(spec.name)
        text = f"{spec.name} is {' and '.join(homes)} since {since}; the old name goes in {until}"
        warnings.warn(text, FutureWarning, stacklevel=2)

    def exec_module(self, module: ModuleType) -> None:
        modules = [importlib.import_module(name) for name in _homes(module.__name__)[0]]

        def look_up(name: str):
            for home in modules:
                if hasattr(home, name):
                    return getattr(home, name)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        module.__getattr__ = look_up


def _homes(name: str) -> tuple[tuple[str, ...], str, str] | None:
    for old, (homes, since, until) in MOVED.items():
        if name == old:
            return homes, since, until
        if name.startswith(f"{old}."):
            return (homes[0] + name.removeprefix(old),), since, until
    return None


def install() -> None:
    """Makes the old names importable. They are looked for only when no module has the name."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
