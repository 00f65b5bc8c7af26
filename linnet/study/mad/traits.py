"""What the name of an architecture says of its design: mixers, channels, and with them its family.

Names are those of the recipes (`mad-mh-hyena-attention-moe`) or layouts (`mamba+mamba attention+swiglu x2`).
"""

import re
from dataclasses import dataclass

ATTENTION = "attention"
CHANNELS = ("swiglu", "geglu", "sglu", "glu", "mlp", "moe")
_COMPOUND = re.compile(r"\b(multi[-_]?head|mh)[-_](\w+?)(?=[-_+ )x]|$)|\b(\w+?)[-_]experts\b")
_SILENT = re.compile(r"mad|striped|uniform|none|x?\d+")


@dataclass(frozen=True)
class Traits:
    """Attributes: mixers, channels: names in alphabetical order, each once."""

    mixers: tuple[str, ...]
    channels: tuple[str, ...]

    @property
    def striped(self) -> bool:
        """Attention layers between those of another mixer."""
        return ATTENTION in self.mixers and len(self.mixers) > 1

    @property
    def base(self) -> tuple[str, ...]:
        """The mixers beside attention; attention where it is alone."""
        return tuple(mixer for mixer in self.mixers if mixer != ATTENTION) or self.mixers

    @property
    def family(self) -> str:
        """The lineage: multi-head Hyena and Hyena experts are of hyena, striped or not."""
        return "+".join(sorted({mixer.removeprefix("mh_").removesuffix("_experts") for mixer in self.base}))


def traits(name: str) -> Traits:
    """Reads the traits off a name; words that are no known channel count as mixers."""
    joined = _COMPOUND.sub(lambda m: f"mh_{m[2]}" if m[2] else f"{m[3]}_experts", name.lower())
    words = [word for word in re.findall(r"\w+", joined) if not _SILENT.fullmatch(word)]
    mixers = sorted({word for word in words if word not in CHANNELS})
    return Traits(tuple(mixers), tuple(sorted({word for word in words if word in CHANNELS})))
