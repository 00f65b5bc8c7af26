"""The design of an architecture: which token mixers and channel mixers its blocks have.

A design is read from a model's configuration, never guessed from a name. If only a table of results exists, its column
`layers` names the layers. Without this column, names that are recipes or layouts give the design; others are unknown.

Layers and recipes are imported on first use, so that printing a help text does not import torch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linnet.models import ModelConfig

ATTENTION = "attention"
# Variants of a mixer that paper 004 puts into one family. Other mixers are families of their own.
FAMILY = {"mh_hyena": "hyena", "hyena_experts": "hyena"}
WITHOUT_HEADS = {"mh_hyena": "hyena"}  # a mixer with heads -> the same mixer without


@dataclass(frozen=True)
class Design:
    """The layers of an architecture.

    Attributes:
        mixers, channels: names in alphabetical order, each once.
    """

    mixers: tuple[str, ...]
    channels: tuple[str, ...]

    @classmethod
    def of(cls, layers: Iterable[str]) -> "Design":
        """Returns the design with these layers. An unregistered name is a mixer from a file."""
        from linnet.layers.base import CHANNELS, MIXERS

        names = sorted({name for name in layers if not getattr(MIXERS.get(name), "before_layers", False)})
        channels = tuple(name for name in names if name in CHANNELS and name not in MIXERS)
        return cls(tuple(name for name in names if name not in channels), channels)

    @property
    def striped(self) -> bool:
        """Whether attention layers alternate with those of another mixer."""
        return ATTENTION in self.mixers and len(self.mixers) > 1

    @property
    def base(self) -> tuple[str, ...]:
        """Returns the mixers except attention; attention if it is the only one."""
        return tuple(mixer for mixer in self.mixers if mixer != ATTENTION) or self.mixers

    @property
    def family(self) -> str:
        """Returns the families of the mixers except attention: multi-head Hyena, striped or not, belongs to hyena."""
        return "+".join(sorted({FAMILY.get(mixer, mixer) for mixer in self.base}))


def design_of(model: "ModelConfig") -> Design:
    """Returns the design of a model."""
    return Design.of(name for block in model.blocks for name in (block.mixer, block.channel) if name)


def layers_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the layers of a recorded model, whose `options` have a key for each layer.

    The plugin files of its mixers may be missing.
    """
    return tuple(record.get("options", {}))


def named_design(name: str) -> Design | None:
    """Returns the design of a recipe or a layout; None for other names."""
    from linnet.models import RECIPES, get_recipe, parse_layout

    if name in RECIPES:
        return design_of(get_recipe(name))
    try:
        blocks = parse_layout(name)
    except ValueError:
        return None
    return Design.of(layer for block in blocks for layer in (block.mixer, block.channel) if layer)
