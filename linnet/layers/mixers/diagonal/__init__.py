"""Recurrences of single numbers and state space models: every channel or head has decays of its own."""

from linnet.layers.mixers.diagonal import hgrn, lru, mamba, mamba2, mamba3, rglru, rwkv4, s4d, tpe

__all__ = ["hgrn", "lru", "mamba", "mamba2", "mamba3", "rglru", "rwkv4", "s4d", "tpe"]
