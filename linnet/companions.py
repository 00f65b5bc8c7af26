"""The companions: rooms of one subject that use the core, and that the core finds here and never imports.

A companion with a verb of its own is a package with `cli.app`, its commands. A room is a package with `OFFERS`: what it
adds to the core's kinds of models, objectives, commands and the like. Without its folder, everything else works.
"""

from collections import UserDict
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

VERBS = {"corpus": "linnet.corpus", "mad": "linnet.mad", "reproduce": "linnet.papers"}
ROOMS = {"vision": "linnet.vision", "encoders": "linnet.encoders"}


def companions() -> dict[str, str]:
    """Returns verb -> package of the companions that are there."""
    return {verb: package for verb, package in VERBS.items() if find_spec(package) is not None}


class Offer(UserDict):
    """Things of one sort by their names: those of the core, and those that the rooms that are there offer.

    A room names its things as "module:attribute". A module is imported when its thing is looked up.
    """

    def __init__(self, sort: str, core: Mapping[str, Any] | None = None):
        super().__init__(core or {})
        for package in ROOMS.values():
            if find_spec(package) is not None:
                self.data |= import_module(package).OFFERS.get(sort, {})

    def __getitem__(self, name: str) -> Any:
        thing = super().__getitem__(name)
        if isinstance(thing, str) and ":" in thing:
            module, _, attribute = thing.partition(":")
            thing = self.data[name] = getattr(import_module(module), attribute)
        return thing
