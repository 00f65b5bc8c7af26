"""Channel mixers. Importing this package registers all of them."""

from linnet.layers.channels import glu

__all__ = ["glu"]
