"""Layouts: readers of a project's config.json that return the model it describes and the names of its tensors."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from linnet.config import ConfigError
from linnet.models import StackConfig

LARGEST = {"layers": 1 << 10, "width": 1 << 20, "vocabulary": 1 << 24, "experts": 1 << 12}


@dataclass(frozen=True)
class Part:
    """The source of a parameter.

    Attributes:
        name: name of the tensor in the checkpoint.
        start, rows: the parameter is rows from `start` on of the tensor's `rows`, of all if 0, or of each group's.
        groups: equal groups of rows, such as heads, in each of which the parameter has its share.
        view: shape of the whole tensor, whose elements in order are those of the rows; -1 is what is left, and None the
            shape that follows from the parameter's.
        transposed: whether the tensor has its axes in reverse.
        experts: the parameter is the matrices of so many experts, one after the other by rows. A name with {} is that
            of a tensor per expert, with its number there; another has those of all, [experts, ...].
        across: whether the experts are one after the other by columns.
    """

    name: str
    start: int = 0
    rows: int = 0
    groups: int = 1
    view: tuple[int, ...] | None = None
    transposed: bool = False
    experts: int = 0
    across: bool = False

    @property
    def names(self) -> list[str]:
        """Returns the names of the tensors, of several for experts that are stored one by one."""
        return [self.name.format(index) for index in range(self.experts)] if "{}" in self.name else [self.name]

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that the tensor, or that of each expert, must have for a parameter of shape `ours`."""
        if self.experts:
            rows, columns = ours
            each = (rows, columns // self.experts) if self.across else (rows // self.experts, columns)
            return each if "{}" in self.name else (self.experts, *each)
        whole = ((self.rows * self.groups or ours[0]), *ours[1:])
        if self.view is not None:
            known = math.prod(size for size in self.view if size > 0)
            whole = tuple(math.prod(whole) // known if size < 0 else size for size in self.view)
        return whole[::-1] if self.transposed else whole

    def take(self, tensors: Iterable[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Returns the parameter of shape `shape` from the tensors of `names`, of which it keeps one at a time."""
        parameter = None
        for index, tensor in enumerate(tensors):
            if self.experts:
                parameter = torch.empty(shape, dtype=tensor.dtype) if parameter is None else parameter
                self._of_experts(parameter, index).copy_(tensor)
                continue
            tensor = tensor.T if self.transposed else tensor
            if self.rows:
                count = shape[0] // self.groups
                tensor = tensor.reshape(self.groups, self.rows, *shape[1:])[:, self.start : self.start + count]
            parameter = tensor.reshape(shape).clone(memory_format=torch.contiguous_format)
        assert parameter is not None
        return parameter

    def put(self, tensor: Tensor, parameter: Tensor, index: int) -> None:
        """Writes the parameter into its place of the tensor of `names[index]`, the inverse of `take`."""
        shape, target = tuple(parameter.shape), tensor.T if self.transposed else tensor
        if self.rows:
            target = target.view(self.groups, self.rows, *shape[1:])[
                :, self.start : self.start + shape[0] // self.groups
            ]
        target.copy_(self._of_experts(parameter, index) if self.experts else parameter.reshape(target.shape))

    def _of_experts(self, parameter: Tensor, index: int) -> Tensor:
        """Returns the view of a parameter that is the tensor of `names[index]`."""
        sizes = (self.experts, -1)
        each = parameter.unflatten(1, sizes).movedim(1, 0) if self.across else parameter.unflatten(0, sizes)
        return each[index] if "{}" in self.name else each


@dataclass(frozen=True)
class Plan:
    """A model, the sources of its parameters, and regular expressions for names of tensors that may be unused.

    Attributes:
        skipped: expressions for tensors of parts of a checkpoint that Linnet does not read, with what the part is.
        recut: groups of tensors that together have the right rows, but that may be cut at other rows.
    """

    model: StackConfig
    parts: dict[str, Part]
    ignored: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    recut: tuple[tuple[str, ...], ...] = ()

    def ignores(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in (*self.ignored, *self.skipped))


@dataclass
class Settings:
    """Reads config.json key by key and collects problems; `check` raises them together.

    Attributes:
        values: the content of config.json.
        tied: whether the head shares the embedding's weight.
        problems: problems found so far.
        images: the content of preprocessor_config.json, {} without that file.
        shapes: shapes of the tensors of the checkpoint, by name; {} if there is none.
    """

    values: Mapping[str, Any]
    tied: bool = False
    problems: list[str] = field(default_factory=list)
    images: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def integer(self, key: str, default: int | None, largest: int = LARGEST["width"]) -> int:
        """Returns a whole number of at least 1. With None as the default, the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            self.problems.append(f"{key}: must be a whole number from 1 to {largest} (given {value!r})")
            return 1
        return value

    def number(self, key: str, default: float | None, largest: float = 1e9) -> float:
        """Returns a number above 0. With None as the default, the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= largest:
            self.problems.append(f"{key}: must be a number above 0, at most {largest:g} (given {value!r})")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns a true or false; null is false, as in the code of the sources."""
        value = self.values.get(key, default)
        value = False if value is None else value
        if not isinstance(value, bool):
            self.problems.append(f"{key}: must be true or false (given {value!r})")
        return bool(value)

    def choice(self, key: str, default: str, known: Mapping[str, str]) -> str:
        """Returns Linnet's name for a value of the source; `known` maps the source's names to Linnet's."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in known:
            self.problems.append(f"{key}: Linnet does not have {value!r}; it has {', '.join(sorted(known))}")
            return next(iter(known.values()))
        return known[value]

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Adds a problem for a value that Linnet's layers cannot express; the first of `allowed` is the default."""
        value = self._value(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(item) for item in allowed)
            self.problems.append(f"{key}: {why} (given {value!r}; only {wanted} can be converted)")

    def check(self) -> None:
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)), "config.json")

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


Reader = Callable[[Settings], Plan]


def stack(layers: Iterable[int], own: str, its: str, names: Mapping[str, str | Part]) -> dict[str, Part]:
    """Returns the sources of the parameters of some layers.

    Args:
        layers: numbers of the layers.
        own, its: prefix of a layer's names in Linnet and in the source, with {} for its number.
        names: Linnet's names within a layer, mapped to the source's.
    """
    parts = {}
    for index in layers:
        for mine, source in names.items():
            part = source if isinstance(source, Part) else Part(source)
            name = f"{its.format(index)}.{part.name}"
            parts[f"{own.format(index)}.{mine}"] = replace(part, name=name)
    return parts


BLOCK = "backbone.blocks.{}"
HEAD = "lm_head.weight"


ROTATIONS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
ROPE_KEYS = tuple(
    "rope_type type rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings".split()
)
YARN_KEYS = ("beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim", "truncate")


def read_rope(
    settings: Settings, fraction: float | None = None, theta: float = 10000.0, inert: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns RoPE's options, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        fraction: default of `partial_rotary_factor`; None: the source rotates all channels.
        theta: default of `rope_theta`.
        inert: keys that do not change the rotation of text.
    """
    # The precedence of transformers 5, where a file has both: the older key, and the length beside the parameters.
    parameters = settings.values.get("rope_scaling") or settings.values.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        settings.problems.append(f"rope_parameters: must be an object (given {parameters!r})")
        return {}
    outer = {key: settings.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    rope = Settings({**outer, **parameters})
    if fraction is None:
        rope.only("partial_rotary_factor", 1, why="Linnet's RoPE rotates all channels of a head")
    share = {} if fraction is None else {"rope_fraction": rope.number("partial_rotary_factor", fraction, largest=1)}
    base, kind = rope.number("rope_theta", theta), parameters.get("rope_type", parameters.get("type", "default"))
    known = (*ROPE_KEYS, *inert, *(YARN_KEYS if kind == "yarn" else ()))
    for key in sorted(key for key, value in parameters.items() if value is not None and key not in known):
        rope.problems.append(
            f"{key}: Linnet's RoPE does not have it (given {parameters[key]!r}); it has {', '.join(known)}"
        )
    scaling = None
    if kind == "linear":
        scaling = {"kind": "linear", "factor": rope.number("factor", None)}
    elif kind in ROTATIONS:
        (low, high), yarn = ROTATIONS[kind], kind == "yarn"
        key = "original_max_position_embeddings"
        length = settings.values.get(key, parameters.get(key, settings.values.get("max_position_embeddings")))
        scaling = {
            "kind": kind,
            "factor": rope.number("factor", None),
            "low": rope.number(low, 1.0 if yarn else None),
            "high": rope.number(high, 32.0 if yarn else None),
            "length": Settings({key: length}, problems=rope.problems).integer(key, None),
        }
        if yarn:
            scaling |= {
                "truncate": rope.flag("truncate", True),
                "attention_factor": _amplitude(rope, scaling["factor"]),
            }
    elif kind != "default":
        rope.problems.append(f"rope_type: Linnet does not have {kind!r}; it has default, linear, llama3 and yarn")
    settings.problems += [f"rope_parameters.{problem}" for problem in rope.problems]
    return {"rope_base": base, "rope_scaling": scaling, **share}


def write_rope(attention: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of config.json for RoPE's options, the inverse of `read_rope`."""
    values: dict[str, Any] = {"rope_type": "default", "rope_theta": attention["rope_base"]}
    if attention.get("rope_fraction", 1.0) != 1.0:
        values["partial_rotary_factor"] = attention["rope_fraction"]
    scaling = attention["rope_scaling"]
    if not scaling:
        return {"rope_parameters": values}
    scaling = scaling if isinstance(scaling, Mapping) else scaling.model_dump()
    values |= {"rope_type": scaling["kind"], "factor": scaling["factor"]}
    if scaling["kind"] == "linear":
        return {"rope_parameters": values}
    low, high = ROTATIONS[scaling["kind"]]
    values |= {
        low: scaling["low"],
        high: scaling["high"],
        "original_max_position_embeddings": scaling["length"],
        **{key: scaling[key] for key in ("attention_factor", "truncate") if key in scaling},
    }
    return {"rope_parameters": values, "max_position_embeddings": int(scaling["factor"] * scaling["length"])}


def _amplitude(rope: Settings, factor: float) -> float | None:
    """Returns the factor of rotated queries and keys that YaRN's keys name, None for Linnet's default."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor", None)
    if not (rope.values.get("mscale") and rope.values.get("mscale_all_dim")):
        return None
    mscale, all_dim = (
        0.1 * rope.number(key, None) * math.log(max(1.0, factor)) + 1.0 for key in ("mscale", "mscale_all_dim")
    )
    return mscale / all_dim
