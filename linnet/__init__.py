"""Linnet: from one layer file to a scaling law, for linear-complexity sequence models.

Everything that is true of a layer lives with the layer; everything above asks the layer. See docs/design.md.
"""

from linnet.deprecation import install

__version__ = "0.3.0"

install()
del install
