"""Channel mixers. Importing this package registers all of them."""

from linnet.layers.channels import glu, mlp, moe, rwkv

__all__ = ["glu", "mlp", "moe", "rwkv"]
