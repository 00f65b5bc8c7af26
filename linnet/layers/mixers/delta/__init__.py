"""The delta rule: a matrix per head that corrects what it holds under a key."""

from linnet.layers.mixers.delta import delta_net, gated_delta_product, gdn, gdn2, kda, rwkv7

__all__ = ["delta_net", "gated_delta_product", "gdn", "gdn2", "kda", "rwkv7"]
