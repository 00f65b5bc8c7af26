"""The companions: rooms of one subject that use the core, and that the core finds here and never imports.

A companion is a package with `cli.app`, the commands of its verb. Without its folder, everything else works.
"""

from importlib.util import find_spec

VERBS = {"corpus": "linnet.corpus", "mad": "linnet.mad", "reproduce": "linnet.papers"}


def companions() -> dict[str, str]:
    """Returns verb -> package of the companions that are there."""
    return {verb: package for verb, package in VERBS.items() if find_spec(package) is not None}
