"""Attention with a softmax: a cache of keys and values, which grows with the tokens."""

from linnet.layers.mixers.softmax import attention, mla

__all__ = ["attention", "mla"]
