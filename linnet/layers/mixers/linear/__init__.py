"""Linear attention: a matrix per head that forgets by a decay or divides by a sum, without reading itself."""

from linnet.layers.mixers.linear import cosformer, cosformer2, elu1, gla, hgrn2, lightnet, retnet, tnl

__all__ = ["cosformer", "cosformer2", "elu1", "gla", "hgrn2", "lightnet", "retnet", "tnl"]
