"""What a layout is: a reader of one project's config.json that says which model it means and where its tensors are."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from linnet.config import ConfigError
from linnet.models import ModelConfig

LARGEST = {"layers": 1 << 10, "width": 1 << 20, "vocabulary": 1 << 24}


@dataclass(frozen=True)
class Part:
    """Where a parameter comes from: part `index` of `of` of a tensor's rows, without its axis 1 if `squeeze`."""

    name: str
    index: int = 0
    of: int = 1
    squeeze: bool = False

    def shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the tensor must have for a parameter of shape `own`."""
        rows, *rest = own
        return (rows * self.of, *([1] if self.squeeze else []), *rest)


@dataclass(frozen=True)
class Plan:
    """A model, its parameters' sources, and tensors that need not be used (patterns of whole names)."""

    model: ModelConfig
    parts: dict[str, Part]
    ignored: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@dataclass
class Settings:
    """config.json, read key by key; `check` raises with everything that was wrong.

    Attributes:
        tied: whether the embedding is the head, as the folder's weights and `tie_word_embeddings` have it.
    """

    values: Mapping[str, Any]
    tied: bool = False
    problems: list[str] = field(default_factory=list)

    def integer(self, key: str, default: int | None, largest: int = LARGEST["width"]) -> int:
        """A number of at least 1. None as the default makes the key a must."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            self.problems.append(f"{key}: must be a whole number from 1 to {largest} (given {value!r})")
            return 1
        return value

    def number(self, key: str, default: float | None, largest: float = 1e9) -> float:
        """A number above 0."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            self.problems.append(f"{key}: must be a number above 0, at most {largest:g} (given {value!r})")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.problems.append(f"{key}: must be true or false (given {value!r})")
        return bool(value)

    def choice(self, key: str, default: str, known: Mapping[str, str]) -> str:
        """A word of the source's, as Linnet calls it."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in known:
            self.problems.append(f"{key}: Linnet has no {value!r}; it has {', '.join(sorted(known))}")
            return next(iter(known.values()))
        return known[value]

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Refuses a value that Linnet's layers cannot express; the first of `allowed` is the default."""
        value = self._value(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(item) for item in allowed)
            self.problems.append(f"{key}: {why} (given {value!r}, only {wanted} can be read)")

    def check(self) -> None:
        if self.problems:
            raise ConfigError(self.problems, "config.json")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


Reader = Callable[[Settings], Plan]


def stack(layers: Iterable[int], own: str, its: str, names: Mapping[str, str | Part]) -> dict[str, Part]:
    """Parts of some layers; `own` and `its` hold {} for the number, `names` go from Linnet's to the source's."""
    parts = {}
    for index in layers:
        for mine, given in names.items():
            part = given if isinstance(given, Part) else Part(given)
            name = f"{its.format(index)}.{part.name}"
            parts[f"{own.format(index)}.{mine}"] = Part(name, part.index, part.of, part.squeeze)
    return parts


def ends(settings: Settings, embedding: str, norm: str | None) -> dict[str, Part]:
    """Embedding, final norm (None where it has no gain), and the head unless it is tied."""
    parts = {"embedding.weight": Part(embedding)}
    if norm is not None:
        parts["backbone.norm.weight"] = Part(norm)
    if not settings.tied:
        parts["head.weight"] = Part(HEAD)
    return parts


BLOCK = "backbone.blocks.{}"
HEAD = "lm_head.weight"
GLU = {f"channel.{name}.weight": f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
