"""Filters over the tokens, short ones and long ones without a finite state."""

from linnet.layers.mixers.convolution import hyena, hyena_experts, mh_hyena, short_conv, tnn

__all__ = ["hyena", "hyena_experts", "mh_hyena", "short_conv", "tnn"]
