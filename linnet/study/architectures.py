"""Architectures and sizes of a study, and the model of each pair."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from linnet.config import LEAST, Config, ConfigError, Factor, checking, gather, grouped, nearest, parse, refuse
from linnet.layers.base import CHANNELS, MIXERS, load_plugin
from linnet.layers.positions import length_problems
from linnet.models import KINDS, ModelConfig, StackConfig, families_of, family
from linnet.models.kinds import kind_of
from linnet.models.layout import parse_stack, shares, written
from linnet.models.recipes.registry import default_heads
from linnet.models.recipes.sizes_004 import C2_SIZES
from linnet.models.stack import AliasField, as_aliases, note_left_out, repeated


def short_size(value: Any) -> Any:
    """Expands the short forms `[64, 3]`, `[64, 3, 4]` and `70m` to a mapping."""
    if isinstance(value, str):
        return {"recipe": value}
    if isinstance(value, list) and 2 <= len(value) <= 3:
        return dict(zip(("d_model", "num_layers", "num_heads"), value, strict=False))
    return value


def _sizes(value: Any) -> Any:
    """Expands `{widths: [...], layers: [...]}` to one size per pair."""
    if (
        isinstance(value, dict)
        and set(value) == {"widths", "layers"}
        and all(isinstance(v, list) for v in value.values())
    ):
        return [{"d_model": width, "num_layers": layers} for layers in value["layers"] for width in value["widths"]]
    return value


def _constant(value: Any) -> Any:
    """Expands a number to a rule that gives this number at every width, `table` to the rates of a table, and
    `{from: FILE}` to those of a file.
    """
    if value == "table":
        return {"table": True}
    if isinstance(value, dict) and set(value) == {"from"}:
        return {"file": value["from"]}
    if isinstance(value, str):
        forms = (
            "a number, a rule by width such as {value: 0.003, width: 64}, or for learning_rate `table` or {from: FILE}"
        )
        raise ValueError(f"{value!r} is not a rule; give {forms}")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"value": value, "exponent": 0.0, "maximum": value} if number else value


class Size(Config):
    """A size of the ladder: a shape, or a published size `recipe` (`70m` means the recipe `<family>-70m`).

    Short forms in YAML: `[d_model, num_layers]`, `[d_model, num_layers, num_heads]`, `70m`. The sizes of paper 004,
    `c2-8m` to `c2-7b` (`linnet.models.recipes.sizes_004`), are shapes for any family and any layout.

    Attributes:
        d_model: width.
        num_layers: number of blocks. A layout pattern is repeated and cut at this number, in which blocks that `&`
            joins count as one.
        num_heads: number of heads; default: the family's number at this width.
        inner: inner width of the channel mixers; default: the family's.
        recipe: a published size of the family, such as `70m`, or one of paper 004, such as `c2-150m`, instead of a
            shape.
    """

    d_model: int | None = Field(None, gt=0)
    num_layers: int | None = Field(None, gt=0)
    num_heads: int | None = Field(None, gt=0)
    inner: int | None = Field(None, gt=0)
    recipe: str | None = None

    @model_validator(mode="after")
    def _one_form(self):
        shape = (self.d_model, self.num_layers, self.num_heads, self.inner)
        if self.recipe is None and (self.d_model is None or self.num_layers is None):
            raise ValueError("a size needs `d_model` and `num_layers`, or the name of a published size such as 70m")
        if self.recipe is not None and any(part is not None for part in shape):
            raise ValueError(f"recipe: {self.recipe!r} is given with a shape; a size is one of the two: remove one")
        if self.recipe is not None and self.recipe.startswith("c2-") and self.recipe not in C2_SIZES:
            raise ValueError(f"size {self.recipe!r} is not one of paper 004; {nearest(self.recipe, C2_SIZES)}")
        return self

    @property
    def label(self) -> str:
        """The name in tables: `64x3`, with an inner width of its own `64x3/160`, or `70m`. See `StudyConfig.label`."""
        return self.recipe or f"{self.d_model}x{self.num_layers}" + (f"/{self.inner}" if self.inner else "")

    @property
    def label_with_heads(self) -> str:
        """The label with the number of heads, if it is given: `64x3x4` or `64x3x4/160`."""
        shape, slash, inner = self.label.partition("/")
        return f"{shape}x{self.num_heads}{slash}{inner}" if self.num_heads else self.label

    def label_among(self, sizes: Iterable["Size"]) -> str:
        """Returns the label, with the heads if another one of the sizes differs in these alone."""
        same = {size for size in sizes if size.label == self.label}
        return self.label_with_heads if len(same) > 1 else self.label


# With `json_schema_input_type`, the output of `linnet schema` accepts the short forms too.
_OneSize = Annotated[Size, BeforeValidator(short_size, json_schema_input_type=Size | str | list[int])]
Sizes = Annotated[
    list[_OneSize],
    BeforeValidator(_sizes, json_schema_input_type=list[_OneSize] | dict[Literal["widths", "layers"], list[int]]),
    Field(min_length=1),
]


# Bounds within which powers of width / width are numbers.
_Width = Annotated[int, Field(gt=0, le=1 << 20)]
_Power = Annotated[float, Field(ge=-10, le=10)]


class ByWidth(Config):
    """A number that depends on the model's width: value * (d_model / width) ** exponent, at most `maximum`.

    Attributes:
        value: the number at `width`.
        width: the d_model that `value` belongs to.
        exponent: power of d_model / width.
        maximum: upper bound, reached at small widths.
    """

    value: float = Field(gt=0)
    width: _Width
    exponent: _Power
    maximum: float = Field(float("inf"), ge=LEAST, allow_inf_nan=True)

    def at(self, d_model: int) -> float:
        """Returns the number at a width, rounded to 4 digits to keep configurations readable."""
        return float(f"{min(self.maximum, self.value * (d_model / self.width) ** self.exponent):.4g}")


class LearningRate(ByWidth):
    """Peak learning rate by width. A plain number in YAML is the rate of all sizes, `table` that of each size of
    paper 004 (`linnet.models.recipes.sizes_004`), and `{from: rates.yaml}` that of `linnet study tune`.

    The default is 3e-3 at width 64 and falls as 1 / width. It keeps small models of every family near their best rate,
    so that the ladder compares sizes and not learning rates.
    """

    value: float = Field(3e-3, gt=0)
    width: _Width = 64
    exponent: _Power = -1.0
    maximum: float = Field(1e-2, gt=0)
    table: bool = Field(False, description="the printed rate of each size of paper 004 instead of the rule")
    file: str | None = Field(None, description="the rates.yaml of linnet study tune instead of the rule")

    def of(self, size: Size, d_model: int) -> float:
        """Returns the rate of a size. Raises ValueError: there is no printed rate for it."""
        if not self.table:
            return self.at(d_model)
        if size.recipe not in C2_SIZES:
            what = f"learning_rate: table has no rate for size {size.label_with_heads}"
            fix = "it has those of c2-8m to c2-7b: use these sizes, or give a number"
            raise ValueError(f"{what}; {fix}")
        return C2_SIZES[size.recipe].learning_rate


class InitStd(ByWidth):
    """Standard deviation of the initial weights by width. A plain number in YAML is the value for all sizes.

    The published 0.02 is for widths of 512 and more. Models of width 16 to 100 start with too small weights at 0.02
    and learn late. The default is 0.02 at width 512 and follows 1 / sqrt(width) (docs/negative-results.md has the
    numbers).
    """

    value: Factor = Field(0.02)
    width: _Width = 512
    exponent: _Power = -0.5


Rate = Annotated[
    LearningRate,
    BeforeValidator(
        _constant, json_schema_input_type=LearningRate | float | Literal["table"] | dict[Literal["from"], str]
    ),
]
Std = Annotated[InitStd, BeforeValidator(_constant, json_schema_input_type=InitStd | float)]


_SET_ELSEWHERE = {
    "recipe": "set `family`, and `sizes`, where a published size such as 70m is a recipe of the family",
    "d_model": "set `sizes`",
    "num_layers": "set `sizes`",
    "layout": "set `layout` of the architecture",
    "aliases": "set `aliases` of the architecture",
    "options": "set `options` of the architecture",
    "tpe": "write the mixer `tpe` at the start of `layout`",
    "vocab_size": "it follows from `data.tokenizer`",
    "init_std": "set `init_std` of the study",
}
"""Keys of a model that an architecture does not take under `model`, and where they are set."""


class Architecture(Config):
    """One architecture of the comparison. `tnl` in YAML is short for `{name: tnl}`, the family of that name.

    Attributes:
        name: label in tables and figures.
        family: a model family (`linnet.models.recipes.FAMILIES`) or the name of a plugin's mixer; default: `name`.
        layout: a pattern of blocks (`tnl+sglu tnl+sglu attention+swiglu`), or a list of blocks. It is repeated and cut
            at the `num_layers` of the size. With `family`, the rest of the model is that of the family: its norm, its
            embedding scale, and its options of the layers that the layout has too. Without it, the rest is the default
            of a model.
        aliases: short names for blocks in the layout, with their own options (see `linnet.models.ModelConfig`).
        options: layer name -> options of these layers.
        base: name of the architecture to which the study compares this one, paired by seed
            (`linnet.study.differences`).
        published: loss that a paper prints for it, in bits per token; shown beside the measured difference.
        model: keys of the model beside its shape, layers and vocabulary (norm, positions, embedding_scale, ...).
        sizes, seq_len, batch_size, learning_rate: override the values of the study.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    family: str | None = None
    layout: str | list[Any] | None = None
    aliases: dict[str, AliasField] = {}
    options: dict[str, dict[str, Any]] = {}
    model: dict[str, Any] = {}
    base: str | None = None
    published: float | None = Field(None, gt=0, allow_inf_nan=False)
    sizes: Sizes | None = None
    seq_len: int | None = Field(None, gt=0)
    batch_size: int | None = Field(None, gt=0)
    learning_rate: Rate | None = None

    @model_validator(mode="after")
    def _one_form(self):
        if wrong := [
            f"model.{key}: cannot be set here; {_SET_ELSEWHERE[key]}" for key in self.model if key in _SET_ELSEWHERE
        ]:
            raise ValueError(f"architecture {self.name!r}: {'; '.join(wrong)}")
        if self.aliases and self.layout is None:
            what = f"architecture {self.name!r} has aliases, but no layout that uses them"
            raise ValueError(f"{what}; remove them or add a layout")
        return self


Rung = tuple[Architecture, Size, StackConfig]


@dataclass(frozen=True)
class Base:
    """What all models of a study share.

    Attributes:
        kind: their kind (`linnet.models.KINDS`).
        keys: keys of each beside its shape: the vocabulary of language models, size and classes of images.
        seq_len: tokens per row of architectures that set none; None where data are not counted in tokens, or to let
            models have any length.
    """

    kind: str
    keys: Mapping[str, Any]
    seq_len: int | None = None

    @classmethod
    def text(cls, vocab_size: int, seq_len: int | None = None) -> "Base":
        return cls("causal_lm", {"vocab_size": vocab_size}, seq_len)


def make_rungs(
    architectures: Iterable[Architecture],
    sizes: Sizes | None,
    init_std: InitStd | None,
    base: Base,
    problems: list[str],
) -> list[Rung]:
    """Returns the models of every architecture at every size. Appends the reasons for invalid ones to `problems`.

    Args:
        init_std: of all models; None keeps that of each family.
    """
    rungs, wrong = [], []
    for architecture in architectures:
        ladder = architecture.sizes or sizes or []
        for size in ladder:
            try:
                model = make_model(architecture, size, base)
                if base.seq_len is not None:
                    length, fix = architecture.seq_len or base.seq_len, "lower the first, or raise the second"
                    refuse(length_problems("seq_len", length, model.num_positions, fix), "architectures")
                if init_std is not None:
                    model = model.model_copy(update={"init_std": init_std.at(rule_width(model))})
                rungs.append((architecture, size, model))
            except ValueError as error:
                wrong += [(architecture.name, size.label_among(ladder), line) for line in _lines(error)]
    problems += _by_architecture(wrong)
    return rungs


def rule_width(model: StackConfig) -> int:
    """Returns the width at which the rules of a study give the numbers of a model: that of muP's base, or its own."""
    return model.base_width if isinstance(model, ModelConfig) and model.parametrisation == "mup" else model.d_model


def _by_architecture(wrong: list[tuple[str, str, str]]) -> list[str]:
    """Formats (architecture, size, problem) as lines. A problem that several sizes share becomes one line."""
    widths = " (the first number of a size in `sizes` is its d_model)"
    wrong = [(name, size, line + widths * ("d_model" in line)) for name, size, line in wrong]
    sizes = grouped(((architecture, line), size) for architecture, size, line in wrong)
    return [f"architectures.{name} {', '.join(labels)}: {line}" for (name, line), labels in sizes.items()]


def make_model(architecture: Architecture, size: Size, base: Base) -> StackConfig:
    """Returns the model of an architecture at a size.

    Raises:
        ValueError: unknown family, recipe or layer, or a shape that a layer refuses. Includes `ConfigError`.
    """
    kind, name = KINDS[base.kind].config, architecture.family or architecture.name
    widths: dict[str, dict[str, int]] = {}
    if size.recipe in C2_SIZES:
        size, widths = _c2_shape(architecture, name, size.recipe)
    if architecture.layout is not None:
        model = _from_layout(architecture, size, base, widths)
    elif size.recipe is not None:
        model = kind.model_validate({"recipe": f"{name}-{size.recipe}", **base.keys})
    else:
        build = family(name, base.kind)
        taken = {key: base.keys[key] for key in inspect.signature(build).parameters if key in base.keys}
        model = build(size.d_model, size.num_layers, size.num_heads or 0, size.inner or 0, **taken)
        if others := {key: value for key, value in base.keys.items() if key not in taken}:
            model = kind.model_validate(model.model_dump() | others)
    if architecture.model:
        model = _with_keys(model, architecture.model)
    values = model.model_dump()
    for layer, options in architecture.options.items():
        values["options"][layer] = values["options"].get(layer, {}) | options
    nested = architecture.layout is not None and add_nested_heads(values, size.num_heads or default_heads(size.d_model))
    return kind.model_validate(values) if architecture.options or nested else model


def add_nested_heads(values: dict[str, Any], heads: int) -> bool:
    """Gives mixers inside other layers (`parallel`) heads, in place, if they name none. Returns whether there are any.

    Args:
        values: plain values of a model.
    """
    changed = False
    aliases = [alias["options"] for alias in (values.get("aliases") or {}).values() if isinstance(alias, dict)]
    for name, options in (item for layers in (values["options"], *aliases) for item in layers.items()):
        layer = MIXERS.get(name) or CHANNELS.get(name)
        for key in getattr(getattr(layer, "Config", None), "nested", ()):
            mixers = options.get(key)
            for inner, settings in mixers.items() if isinstance(mixers, dict) else ():
                takes = inner in MIXERS and "num_heads" in MIXERS[inner].Config.model_fields
                if takes and isinstance(settings, dict) and "num_heads" not in settings:
                    mixers[inner] = {**settings, "num_heads": heads}
                    changed = True
    return changed


def _with_keys(model: StackConfig, keys: Mapping[str, Any]) -> StackConfig:
    """Returns a model with other values of some keys. Raises ConfigError with the names of the keys."""
    with checking("architectures", "model.{}".format):
        return parse(type(model), model.model_dump() | keys)


def lost_keys(architecture: Architecture, model: StackConfig) -> list[str]:
    """Returns what a layout without a family leaves out: keys that families of its mixers set, as `key: here, there`.

    A key that the architecture sets under `model` is not among them.
    """
    if architecture.layout is None or architecture.family is not None:
        return []
    lost: dict[str, None] = {}
    for name in dict.fromkeys(spec.mixer for spec in model.blocks):
        if name is None or name not in (families := families_of(kind_of(model).name)):
            continue
        theirs, plain = families[name](model.d_model, model.num_layers), type(model).model_fields
        for key in sorted(theirs.model_fields_set - {*_SET_ELSEWHERE, *architecture.model}):
            here, there = getattr(model, key), getattr(theirs, key)
            if here != there and here == plain[key].default:
                lost[f"{key}: {here} (family {name}: {there})"] = None
    return list(lost)


def share_note(architecture: Architecture, depths: Iterable[int]) -> str:
    """Returns where the depths of an architecture do not hold the mixers of its pattern in their shares, or ""."""
    if architecture.layout is None:
        return ""
    stack = parse_stack(*_pattern(architecture))
    pairs = [both for depth in sorted(set(depths)) if (both := shares(stack.blocks, depth))]
    if not pairs:
        return ""
    had, has = ", ".join(dict.fromkeys(pattern for pattern, _ in pairs)), ", ".join(whole for _, whole in pairs)
    fix = f"use a multiple of {len(stack.units)} layers"
    return f"architecture {architecture.name}: the pattern has {had}, but its sizes {has}; {fix}"


def _c2_shape(architecture: Architecture, family: str, name: str) -> tuple[Size, dict[str, dict[str, int]]]:
    """Returns a size of paper 004 as a shape, and options of layers that follow from it, by layer name.

    These are the widths of experts (Tables C.3 and C.4) and the heads of multi-head Hyena, 8 channels each (appendix
    C.2). A model of the families `mamba`, `mamba2` and `mamba3` has two blocks for each layer, since
    their mixers take the place of the GLU too.
    """
    c2 = C2_SIZES[name]
    alone = architecture.layout is None and family in ("mamba", "mamba2", "mamba3")
    layers = 2 * c2.num_layers if alone else c2.num_layers
    shape = Size(d_model=c2.d_model, num_layers=layers, num_heads=c2.num_heads, inner=c2.inner)
    if architecture.layout is None:
        return shape, {}
    names = parse_stack(*_pattern(architecture)).names
    widths = {}
    if "hyena_experts" in names:
        widths["hyena_experts"] = ("expert_width", c2.expert_width)
    if "moe" in names:
        widths["moe"] = ("inner", c2.moe_inner("hyena_experts" in names))
    for layer, (_, width) in widths.items():
        if width is None:
            has = [size for size, row in C2_SIZES.items() if row.moe_width is not None]
            raise ValueError(
                f"size {name!r} has no width for {layer}: Tables C.3 and C.4 of paper 004 have {has[0]} to "
                f"{has[-1]} except c2-1.2b; use one of these, or write [d_model, num_layers]"
            )
    options = {layer: {key: width} for layer, (key, width) in widths.items() if width is not None}
    return shape, options | ({"mh_hyena": {"num_heads": c2.d_model // 8}} if "mh_hyena" in names else {})


def _from_layout(
    architecture: Architecture, size: Size, base: Base, widths: Mapping[str, dict[str, int]] = {}
) -> StackConfig:
    """Returns the pattern of an architecture, repeated and cut at `size.num_layers` (paper 004, section 3).

    Args:
        widths: layer name -> widths that take the place of the size's `inner`.
    """
    if size.recipe is not None:
        raise ValueError(f"size {size.recipe!r} has no shape, which a layout needs; write [d_model, num_layers]")
    pattern, aliases = _pattern(architecture)
    options: dict[str, dict[str, Any]] = {}
    whole = parse_stack(pattern, aliases).names
    layout, aliases = repeated(pattern, size.num_layers, aliases)
    names = parse_stack(layout, as_aliases(aliases)).names
    if lost := sorted(set(whole) - set(names)):
        what = f"layout: the pattern {pattern!r} has no {', '.join(lost)} left when cut at {size.num_layers} blocks"
        fix = "give the size more layers, or a pattern that begins with it"
        raise ValueError(f"{what}; {fix}")
    for name in sorted(names):
        fields = (MIXERS.get(name) or CHANNELS[name]).Config.model_fields
        if "num_heads" in fields:
            options[name] = {"num_heads": size.num_heads or default_heads(size.d_model)}
        if "inner" in fields and size.inner:
            options.setdefault(name, {})["inner"] = size.inner
        options.setdefault(name, {}).update(widths.get(name, {}))
    kind = KINDS[base.kind].config
    if architecture.family is None:
        return kind(d_model=size.d_model, layout=layout, aliases=aliases, options=options, **base.keys)
    build = family(architecture.family, base.kind)
    taken = {key: base.keys[key] for key in inspect.signature(build).parameters if key in base.keys}
    theirs = build(size.d_model, size.num_layers, size.num_heads or 0, size.inner or 0, **taken)
    note_left_out(theirs.stack, pattern, aliases, f"family {architecture.family!r}")
    values = theirs.model_dump()
    layer_options = {
        name: defaults | values["options"].get(name, {}) | widths.get(name, {}) for name, defaults in options.items()
    }
    return kind.model_validate({**values, **base.keys, "layout": layout, "aliases": aliases, "options": layer_options})


def _pattern(architecture: Architecture) -> tuple[str, dict[str, Any]]:
    """Returns the layout of an architecture as a string, and its aliases."""
    if isinstance(architecture.layout, str):
        return architecture.layout, architecture.aliases
    layout, aliases = written(architecture.layout, architecture.aliases)
    return layout, as_aliases(aliases)


def load_plugins(plugins: list[str], problems: list[str]) -> dict[str, str]:
    """Imports plugins and returns mixer name -> plugin. Appends the problems of other plugins to `problems`."""
    mixers = {}
    for spec in plugins:
        with gather(problems):
            mixers[load_plugin(spec)] = spec
    return mixers


def _lines(error: ValueError) -> list[str]:
    """Returns the problems in an error about a model's configuration, one line each."""
    if isinstance(error, ConfigError):
        return error.problems
    if isinstance(error, ValidationError):
        causes = [(problem.get("ctx", {}).get("error"), problem["msg"]) for problem in error.errors()]
        return [
            line
            for cause, message in causes
            for line in (cause.problems if isinstance(cause, ConfigError) else [message.removeprefix("Value error, ")])
        ]
    return [str(error)]
