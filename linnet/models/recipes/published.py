"""What papers print of the models of images that are recipes here."""

from dataclasses import dataclass

LIGHTNET_VIT, LIGHTNET_DIT, DEIT, HGRN_VIT, DIT = (
    "paper 003, Table 1",
    "paper 003, Table 11",
    "DeiT, arXiv:2012.12877",
    "paper 002, Table 8",
    "DiT, arXiv:2212.09748",
)


@dataclass(frozen=True)
class Published:
    """Published numbers of a recipe.

    Attributes:
        params: parameters in millions, with the digits that are printed.
        source: where they are printed.
        top1: ImageNet-1k top-1 accuracy after training at 224 x 224 pixels, in percent; None if it is not kept here.
    """

    params: str
    source: str
    top1: float | None = None


PUBLISHED: dict[str, Published] = {
    "lightnet-vit-t": Published("6.0", LIGHTNET_VIT, 74.46),
    "lightnet-vit-s": Published("22.64", LIGHTNET_VIT, 80.12),
    "lightnet-vit-b": Published("87.74", LIGHTNET_VIT, 81.90),
    "deit-t": Published("5.7", DEIT, 72.2),
    "deit-s": Published("22", DEIT, 79.9),
    "deit-b": Published("86", DEIT, 81.8),
    "hgrn-vit-t": Published("6.1", HGRN_VIT),
    "hgrn-vit-s": Published("23.7", HGRN_VIT),
    "hgrn2-vit-t": Published("6.1", HGRN_VIT, 75.39),
    "hgrn2-vit-s": Published("23.8", HGRN_VIT, 80.12),
    "dit-s": Published("33", DIT),
    "dit-b": Published("130", DIT),
    "dit-l": Published("458", DIT),
    "dit-xl": Published("675", DIT),
    "lightnet-dit-s": Published("33", LIGHTNET_DIT),
    "lightnet-dit-b": Published("131", LIGHTNET_DIT),
    "lightnet-dit-l": Published("470", LIGHTNET_DIT),
    "lightnet-dit-xl": Published("680", LIGHTNET_DIT),
}
