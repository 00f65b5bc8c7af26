"""The configuration of a stack of layers, independent of inputs and outputs: layout, options, norms and positions.

A layout is a pattern of blocks as a string or a list (`linnet.models.layout`). With `num_layers: N` it is repeated and
cut at N blocks. Options belong to a kind of layer (`options`) or to the blocks of an alias (`aliases`), which override.
"""

import json
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

import linnet.layers  # noqa: F401  (registers the layers)
from linnet.config import (
    Config,
    ConfigError,
    Epsilon,
    Factor,
    Problem,
    SeveralKeys,
    added,
    in_full,
    nearest,
    parse,
    shown,
)
from linnet.layers.base import CHANNELS, MIXERS, SET, Bias, LayerContext, Mixer, layers_with, nearest_name
from linnet.layers.norm import StackNorm
from linnet.layers.positions import PositionKind, check_positions
from linnet.models.layout import Alias, LayerSpec, Stack, check_aliases, cut, parse_stack, shares, written
from linnet.models.registry import get_recipe, set_by_recipe

MOST_OPTION = 1 << 24  # largest whole number in the options of a layer: a width, a number of heads, a length

# Error locations include these tags; because they are written as kinds, `linnet.config` removes them from messages.
AliasField = Annotated[
    Annotated[str, Tag("str")] | Annotated[Alias, Tag("dict[alias]")],
    Discriminator(lambda value: "str" if isinstance(value, str) else "dict[alias]"),
]


class StackConfig(Config):
    """Everything that defines a stack of layers except its weights.

    After validation `layout` is a string, and `options` holds the complete options of each layer that it names.
    """

    TITLE: ClassVar[str] = "a model"  # what messages call the kind of model, with an article
    INPUTS: ClassVar[dict[str, int]] = {}  # keys of a small model around the layers of any mixer; {}: has none
    ELSEWHERE: ClassVar = dict.fromkeys(
        ("n_layers", "n_layer", "layers", "depth"),
        "write the layers in `layout`, for example 'tnl+sglu x6', or a pattern and `num_layers`",
    ) | {"tpe": "write the mixer `tpe` at the start of `layout`, and its values in `options.tpe`"}

    ENTRIES: ClassVar = {"options": layers_with}

    # Of the class of a model and no keys: whether tokens see only those before them, and the axes of their grid.
    causal: ClassVar[bool] = True
    axes: ClassVar[int] = 1

    d_model: int = Field(ge=1, le=1 << 20, description="width D of the residual stream")
    layout: str = Field(description="the layers, for example 'tnl+sglu x24', or a list of blocks")
    options: dict[str, dict[str, Any]] = Field({}, description="options of each kind of layer, by its name")
    aliases: dict[str, AliasField] = Field(
        {}, description="short names for blocks in the layout, with options of their own: {layer: ..., options: ...}"
    )
    norm: StackNorm = Field(
        "rmsnorm",
        description="kind of the norms before each layer and after the last one; batchnorm, over the tokens of a "
        "batch, only in models without causality",
    )
    norm_eps: Epsilon | None = Field(
        None,
        description="epsilon of these norms; null is the default of the kind (1e-6, LayerNorm and BatchNorm 1e-5)",
    )
    norm_after: list[str] = added(
        [],
        description="mixers (or channel mixers alone) in whose blocks the norms follow the layers, x + norm(f(x)), in "
        "place of x + f(norm(x)); for OLMo 2, [attention]",
    )
    residual_scale: Factor = added(
        1.0, "factor of what each mixer and channel mixer adds to the residual stream (Granite)"
    )
    residual_norm: Factor | None = added(
        None, "a in blocks a norm(x) + f(norm(x)), with a normed stream, in place of x + f(norm(x)) (MiniMax-01)"
    )
    positions: PositionKind = Field("none", description="absolute positions, added once to the embedding")
    num_positions: int | None = Field(
        None, ge=1, le=1 << 31, description="longest sequence in tokens, for positions: learned"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability of dropout on the embedding and on what each layer adds, in training"
    )
    bias: Bias = Field(
        "none",
        description="biases of linear layers: qkv, the projections that a mixer's recurrence or attention reads; all, "
        "every one in mixers and gated linear units; none, only those that a layer always has",
    )
    init_std: Factor = Field(0.02, description="of linear layers and embeddings; residual ends divide by sqrt(2L)")

    @model_validator(mode="before")
    @classmethod
    def _normal_form(cls, values: Any) -> Any:
        values = in_full("model", values)
        if not isinstance(values, Mapping):
            return values
        values = _without_recipe(cls, dict(values))
        if values.get("tpe") is None:
            values = upgrade(values)
        return _complete(_one_layout(values), cls.causal)

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if problems := self.problems():
            raise SeveralKeys(problems, "model")
        return self

    def problems(self) -> list[str]:
        """Returns the problems of keys that are valid one by one; a subclass adds those of its own keys."""
        return check(self)

    @property
    def stack(self) -> Stack:
        """The parsed layout."""
        return parse_stack(self.layout, self.aliases)

    @property
    def blocks(self) -> list[LayerSpec]:
        """Returns the layers, first to last, without the mixers before them."""
        return self.stack.blocks

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    def layer_options(self, name: str, spec: LayerSpec | None = None) -> Config:
        """Returns the options of one kind of layer, in the block `spec` if its alias has options of its own."""
        layer = MIXERS.get(name) or CHANNELS[name]
        alias_options = {} if spec is None else spec.options.get(name, {})
        return parse(layer.Config, {**self.options.get(name, {}), **alias_options})

    def shown_option(self, key: str) -> Any:
        """Returns the value of an option (num_heads, inner, ...) in the first block that has it, or None."""
        for spec in self.blocks:
            for name in spec.names:
                values = {**self.options.get(name, {}), **spec.options.get(name, {})}
                if key in values:
                    return values[key]
        return None


def check(config: StackConfig) -> list[str]:
    """Returns the problems of the layers of a configuration whose keys are valid one by one.

    Builds no module: each layer's `Config.check` checks its own options.
    """
    problems = check_positions(config.positions, config.d_model, config.num_positions)
    if config.norm == "batchnorm" and config.causal:
        problems.append(
            f"norm: batchnorm takes its statistics over all tokens of a batch, so in {config.TITLE} a token would see "
            "those after it; use rmsnorm, srmsnorm or layernorm"
        )
    if wrong := check_aliases(config.aliases):
        return problems + wrong
    try:
        stack = config.stack
    except ValueError as error:  # the layout's message shows the wrong place
        return [*problems, str(error)]
    problems += [
        f"options.{name}: the layout {config.layout!r} has no such layer; {nearest_name(name, stack.names)}"
        for name in config.options
        if name not in stack.names
    ]
    first = dict.fromkeys(spec.names[0] for spec in stack.blocks)
    problems += [
        f"norm_after: no block of the layout {config.layout!r} starts with {name!r}; {nearest(name, first)}"
        for name in config.norm_after
        if name not in first
    ]
    if config.norm_after and config.residual_norm is not None:
        problems.append("residual_norm: norms what the layers read, and norm_after what they add; leave one out")
    context = outer_context(config)
    lines: dict[str, None] = {}
    for spec in (*stack.before, *stack.blocks):
        for name in sorted(spec.names):
            for problem in _option_problems(config, name, spec, context):
                local = Problem(problem).key in spec.options.get(name, {})
                lines[f"aliases.{spec.alias}.options.{name}.{problem}" if local else f"options.{name}.{problem}"] = None
    return problems + list(lines)


def unused_options(config: StackConfig) -> list[str]:
    """Returns the options that no block reads with the others as they are (`LayerConfig.unread`), each with the fix.

    An alias may switch an option of the model off in its blocks, so one that any block reads is allowed. So is a value
    that a recipe has, since a change of that recipe may switch it off.
    """
    blocks = [(name, spec) for spec in (*config.stack.before, *config.stack.blocks) for name in spec.names]
    read: dict[str, bool] = {}
    why: dict[str, str] = {}
    for name, spec in blocks:
        options, of_alias = config.layer_options(name, spec), spec.options.get(name, {})
        changed, off = options.model_dump(mode="json", exclude_defaults=True), {}
        for (switch, value), keys in getattr(options, "unread", {}).items():
            if switch in changed if value is SET else getattr(options, switch) == value:
                off |= dict.fromkeys(keys, switch)
        for key, value in changed.items():
            place = f"aliases.{spec.alias}.options.{name}.{key}" if key in of_alias else f"options.{name}.{key}"
            read[place] = read.get(place, False) or key not in off
            if key in off:
                on = json.dumps(getattr(options, off[key])).strip('"')
                why[place] = (
                    f"{json.dumps(value)} has no effect with {off[key]}: {on}; leave it out, or change {off[key]}"
                )
                read[place] = read[place] or set_by_recipe(name, key, value)
    return [f"{place}: {why[place]}" for place, used in read.items() if not used]


def outer_context(
    config: StackConfig,
    causal: bool | None = None,
    axes: int | None = None,
    prefix: int = 0,
    side: int | None = None,
) -> LayerContext:
    """Returns the context of a layer outside the blocks; `causal` and `axes` are by default those of the class."""
    scan = getattr(config, "scan", "both")  # a key of models without causality
    return LayerContext(
        config.d_model,
        num_layers=config.num_layers,
        norm=config.norm,
        norm_eps=config.norm_eps,
        bias=config.bias,
        causal=config.causal if causal is None else causal,
        axes=config.axes if axes is None else axes,
        prefix=prefix,
        side=side,
        scan="both" if scan == "series" else scan,
        scan_sum=getattr(config, "scan_sum", False),
        mup=getattr(config, "parametrisation", "standard") == "mup",
        residual_scale=config.residual_scale,
        residual_norm=config.residual_norm,
    )


def class_token_problems(config: StackConfig) -> list[str]:
    """Returns why a class token would not see the tokens of a stack without causality, as `key: what; the fix`.

    Tokens before a grid stay in front in every order of a scan, so they see only each other, except in a mixer in which
    every token sees all (`Mixer.non_causal` is `one_scan`).
    """
    mixers = {spec.mixer for spec in config.blocks if spec.mixer is not None}
    if any(MIXERS[name].non_causal == "one_scan" for name in mixers):
        return []
    known = sorted(name for name, mixer in MIXERS.items() if mixer.non_causal == "one_scan" and not mixer.before_layers)
    return [
        f"pool: cls needs a mixer in which every token sees all others ({', '.join(known)}), but the layout "
        f"{config.layout!r} has only mixers that scan, which leave the class token blind; use pool: mean"
    ]


def span_problems(config: StackConfig, span: int, ranks: int, tp: int = 1) -> list[str]:
    """Returns why rows cannot be cut into spans (`linnet.ops.sequence`), as `Mixer.span_problems` says; builds nothing.

    Args:
        span: tokens of a span. ranks: number of spans. tp: ranks that share the heads or channels of a layer.
    """
    stack, context = config.stack, outer_context(config)
    lines: dict[str, None] = {}
    for spec in (*stack.before, *stack.blocks):
        for name in spec.names:
            layer, options = MIXERS.get(name) or CHANNELS[name], config.layer_options(name, spec)
            problems = layer.span_problems(options, context, span, ranks, tp) if issubclass(layer, Mixer) else []
            for problem in problems:
                key = Problem(problem).key
                if key not in type(options).model_fields:
                    lines[f"layout: {name} {problem}"] = None
                elif key in spec.options.get(name, {}):
                    lines[f"aliases.{spec.alias}.options.{name}.{problem}"] = None
                else:
                    lines[f"options.{name}.{problem}"] = None
    return list(lines)


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrites the model of a folder that 0.1.0 wrote (config.yaml, config.json) with today's keys.

    `tpe: {...}` becomes the mixer `tpe` at the start of the layout; `tpe: null` removes this mixer, for example from a
    recipe.
    """
    if "tpe" not in values:
        return dict(values)
    values = dict(values)
    tpe, layout, options = values.pop("tpe"), values.get("layout"), values.get("options") or {}
    if not isinstance(layout, str) or not isinstance(options, Mapping):
        return values
    head, _, rest = layout.strip().partition(" ")
    layout = rest if head == "tpe" else layout
    values["options"] = {name: fields for name, fields in options.items() if name != "tpe"}
    values["layout"] = layout
    if tpe is not None:
        values["layout"] = f"tpe {layout}"
        values["options"]["tpe"] = tpe.model_dump() if isinstance(tpe, BaseModel) else tpe
    return values


def _without_recipe(cls: type[StackConfig], values: dict[str, Any]) -> dict[str, Any]:
    """Applies changes to a recipe's values. A new layout replaces the recipe's, with its options and `stack.before`."""
    if "recipe" not in values:
        return values
    name = values.pop("recipe")
    config = get_recipe(name)
    recipe, stack = config.model_dump(), config.stack
    if not recipe.keys() <= cls.model_fields.keys():
        raise ValueError(
            f"recipe: {name!r} describes {config.TITLE}, but {cls.TITLE} is needed here; choose another recipe "
            "(linnet models lists them), or the objective of that kind of model"
        )
    options = recipe["options"]
    if config.causal and not cls.causal:  # what stands for None in the recipe does not here
        options = {
            name: {key: value for key, value in fields.items() if _causal_defaults(name).get(key, ...) != value}
            for name, fields in options.items()
        }
    if isinstance(values.get("layout"), list) and isinstance(values.get("aliases") or {}, Mapping):
        values["layout"], values["aliases"] = written(values["layout"], values.get("aliases") or {})
    layout = values.get("layout", recipe["layout"])
    if layout != recipe["layout"]:
        left = note_left_out(stack, layout, values.get("aliases"), "" if "tpe" in values else f"recipe {name!r}")
        options = {spec.mixer: options[spec.mixer] for spec in stack.before if spec.mixer not in left}
    for name, changes in (values.pop("options", None) or {}).items():
        options[name] = {**options.get(name, {}), **changes}
    return {**recipe, **values, "options": options}


def note_left_out(stack: Stack, layout: Any, aliases: Any, owner: str) -> list[str | None]:
    """Returns the mixers before the layers that a layout, in the place of that of a recipe or family, leaves out.

    Args:
        stack: that of the recipe or family. owner: which it is, for a warning; "" for none.
    """
    try:
        named = [spec.mixer for spec in parse_stack(layout, as_aliases(aliases or {})).before]
    except (TypeError, ValueError):  # the validation of the fields reports it
        return []
    left = [spec.mixer for spec in stack.before if spec.mixer not in named]
    if left and owner:
        change = f"layout: {layout!r} replaces all of the layout of {owner}, with {', '.join(map(str, left))} before it"
        warnings.warn(f"{change}; write {stack.head + layout!r} to keep it", stacklevel=2)
    return left


def _one_layout(values: dict[str, Any]) -> dict[str, Any]:
    """Writes a list of blocks as a string, and repeats and cuts the layout at `num_layers`."""
    aliases = values.get("aliases") or {}
    if isinstance(values.get("layout"), list) and isinstance(aliases, Mapping):
        layout, aliases = written(values["layout"], aliases)
        values = {**values, "layout": layout, "aliases": aliases}
    if "num_layers" not in values:
        return values
    values = dict(values)
    number, layout = values.pop("num_layers"), values.get("layout")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"num_layers: {number!r} is not a number of blocks; give a whole number of at least 1")
    known = as_aliases(aliases)
    if not isinstance(layout, str) or known is None or check_aliases(known):
        return values  # the validation of the fields reports the problem
    pattern = parse_stack(layout, known)
    if len(pattern.units) != number:
        values["layout"], values["aliases"] = repeated(layout, number, known)
        whole = parse_stack(values["layout"], as_aliases(values["aliases"]))
        longer = number > len(pattern.units)  # `repeated` tells of a cut one
        if longer and (portions := shares(pattern.blocks, len(whole.blocks))):
            warnings.warn(
                f"layout: the pattern {layout!r} has {portions[0]}, but {portions[1]} at num_layers: {number}; use a "
                f"multiple of {len(pattern.units)}",
                stacklevel=2,
            )
        left = whole.names
        options = values.get("options") or {}
        if isinstance(options, Mapping):  # drop the options of layers that the cut removed
            values["options"] = {name: options[name] for name in options if name in left or name not in pattern.names}
        if isinstance(after := values.get("norm_after"), list):
            values["norm_after"] = [name for name in after if name in left or name not in pattern.names]
    return values


def repeated(layout: str, num_layers: int, aliases: Mapping[str, str | Alias] | None = None) -> tuple[str, dict]:
    """Repeats a pattern and cuts it at `num_layers` blocks (paper 004, section 3); returns the layout and the aliases.

    Warns if the pattern itself is longer, unless all of its blocks are equal.
    """
    units = parse_stack(layout, aliases).units
    if len(units) > num_layers and any(unit != units[0] for unit in units):
        warnings.warn(
            f"layout: the pattern {layout!r} has {len(units)} blocks and is cut at num_layers: {num_layers}; "
            "give a multiple, or a shorter pattern",
            stacklevel=2,
        )
    return cut(layout, num_layers, aliases or {})


def _complete(values: dict[str, Any], causal: bool) -> dict[str, Any]:
    """Fills `options` with the defaults of every layer of the layout; `check` reports invalid values."""
    layout, options, aliases = (
        values.get("layout"),
        values.get("options") or {},
        as_aliases(values.get("aliases") or {}),
    )
    if not isinstance(layout, str) or not isinstance(options, Mapping) or aliases is None:
        return values
    try:
        names = parse_stack(layout, aliases).names
    except ValueError:
        return values
    complete = {}
    for name in sorted(names):
        layer = MIXERS.get(name) or CHANNELS[name]
        try:
            complete[name] = parse(layer.Config, options.get(name, {})).model_dump()
            for key, value in _causal_defaults(name).items() if causal else ():
                if key in complete[name] and complete[name][key] is None:
                    complete[name][key] = value
        except ConfigError:
            complete[name] = options[name]
    return {**values, "options": complete | {name: fields for name, fields in options.items() if name not in complete}}


def _causal_defaults(name: str) -> Mapping[str, object]:
    """Returns `LayerConfig.causal_defaults` of a layer."""
    layer = MIXERS.get(name) or CHANNELS.get(name)
    return getattr(getattr(layer, "Config", None), "causal_defaults", {})


def as_aliases(values: Any) -> dict[str, str | Alias] | None:
    """Returns aliases from plain values; None if they are invalid, which the validation of the field reports."""
    try:
        return {
            name: alias if isinstance(alias, str) else Alias.model_validate(alias) for name, alias in values.items()
        }
    except (AttributeError, ValueError):
        return None


def _option_problems(config: StackConfig, name: str, spec: LayerSpec, context: LayerContext) -> list[str]:
    try:
        options = config.layer_options(name, spec)
    except ConfigError as error:
        return error.problems
    if large := _large(options):
        return large
    ask = getattr(options, "check", None)  # the options of a plugin may have no `check`
    return [] if ask is None else ask(context)


def _large(options: Any, before: str = "") -> list[str]:
    """Returns the whole numbers of options, and of those inside them, that are too large for a layer."""
    problems = []
    for key, value in options.items() if isinstance(options, dict) else options:
        if isinstance(value, dict):
            problems += _large(value, f"{before}{key}.")
        elif type(value) is int and value > MOST_OPTION:
            problems.append(f"{before}{key}: {shown(value)} is too large; use at most {MOST_OPTION:,}")
    return problems
