"""Token mixers: one file each. Importing this package registers all of them."""

from linnet.layers.mixers import (
    attention,
    cosformer2,
    delta_net,
    gdn,
    gla,
    hgrn,
    hgrn2,
    hyena,
    hyena_experts,
    kda,
    lightnet,
    mamba,
    mh_hyena,
    parallel,
    tnl,
    tpe,
)

__all__ = [
    "attention",
    "cosformer2",
    "delta_net",
    "gdn",
    "gla",
    "hgrn",
    "hgrn2",
    "hyena",
    "hyena_experts",
    "kda",
    "lightnet",
    "mamba",
    "mh_hyena",
    "parallel",
    "tnl",
    "tpe",
]
