"""Numbers that papers print of the models of images that are recipes here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Published numbers of a recipe.

    Attributes:
        params: parameters in millions, with the digits that are printed.
        top1: ImageNet-1k top-1 accuracy after training at 224 x 224 pixels, in percent; None for denoisers.
    """

    params: str
    top1: float | None = None


PUBLISHED: dict[str, Published] = {
    # Paper 003, Table 1.
    "lightnet-vit-t": Published("6.0", 74.46),
    "lightnet-vit-s": Published("22.64", 80.12),
    "lightnet-vit-b": Published("87.74", 81.90),
    # DeiT: H. Touvron et al., arXiv:2012.12877.
    "deit-t": Published("5.7", 72.2),
    "deit-s": Published("22", 79.9),
    "deit-b": Published("86", 81.8),
    # Paper 002, Table 8.
    "hgrn-vit-t": Published("6.1", 74.40),
    "hgrn-vit-s": Published("23.7", 80.09),
    "hgrn2-vit-t": Published("6.1", 75.39),
    "hgrn2-vit-s": Published("23.8", 80.12),
    # Vim: L. Zhu et al., arXiv:2401.09417; paper 003, Table 1.
    "vim-t": Published("7", 76.1),
    "vim-s": Published("26", 80.5),
    # DiT: W. Peebles and S. Xie, arXiv:2212.09748.
    "dit-s": Published("33"),
    "dit-b": Published("130"),
    "dit-l": Published("458"),
    "dit-xl": Published("675"),
    # Paper 003, Table 11.
    "lightnet-dit-s": Published("33"),
    "lightnet-dit-b": Published("131"),
    "lightnet-dit-l": Published("470"),
    "lightnet-dit-xl": Published("680"),
}
