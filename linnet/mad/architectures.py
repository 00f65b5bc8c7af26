"""Architectures by name: a recipe such as mad-hyena-swiglu, or a layout such as `tnl+swiglu x2`.

The architectures of MQAR are those that zoology's Figure 2 and section 4.1 of paper 002 compare: a token mixer in two
layers, without channel mixers; LayerNorm, tied embeddings, one head (paper 002: an expansion of 128, or the full width
if it is smaller). Departures from zoology: its blocks add their normalised input once more in place of a channel mixer;
it gives attention learned positions, Linnet RoPE; it uses dropout, Linnet does not.
"""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from linnet.config import ConfigError, parse
from linnet.layers.base import CHANNELS, MIXERS, LayerContext, TensorSpec, find_mixer
from linnet.mad.settings import MQAR_WIDTHS
from linnet.models import RECIPES, ModelConfig, get_recipe, parse_layout
from linnet.models.costs import meta_model
from linnet.models.recipes.mad import ARCHITECTURES, MAD_LAB, Layers, mad_model
from linnet.study.architectures import add_nested_heads

# The fixed state of a model, and its normalisation to the 4,096 numbers of paper 004 (section 3.2, appendix B.3).
#
# The fixed state is the state that a layer carries for every context: recurrent states, with a complex number counted
# once, but neither caches of keys and values nor the few inputs that a short convolution reads. Each layer specifies
# all of this in its `state_spec`.
#
# The paper normalises architectures without attention to 4,096 in four layers. Each layer of a block (its mixer, its
# channel mixer) therefore has a share of 1,024, and `hyena+swiglu` 2,048, as much as two layers of Mamba. In a hybrid,
# blocks with a cache do not count.

TOTAL = 4096
_FAR = 1 << 20  # a context length at which a cache is visible in the size of the state


class BlockState(NamedTuple):
    """The state of block `index`.

    Attributes:
        size: size of its fixed state, in numbers (complex ones count once).
        grows: whether it also has a cache that depends on the context length.
        share: required size in numbers; 0 if it carries only a cache or nothing.
        own: options of its mixer that an alias overrides.
    """

    index: int
    mixer: str | None
    size: int
    grows: bool
    share: float
    own: Mapping[str, Any] = {}


def block_states(config: ModelConfig, total: int = TOTAL) -> list[BlockState]:
    """Returns the state of each block, with the share of `total` that it should have."""
    backbone, specs = meta_model(config.model_dump_json()).backbone, config.blocks
    layers = sum(len(spec.names) for spec in specs)
    states = []
    for index, (block, spec) in enumerate(zip(backbone.blocks, specs, strict=True)):
        fixed, grows = _fixed(block)
        size = sum(tensor.size for tensor in fixed)
        share = total * len(spec.names) / layers if size else 0.0
        options = spec.options.get(spec.mixer, {})
        states.append(BlockState(index, spec.mixer, size, grows, share, options))
    return states


def state_size(config: ModelConfig) -> int:
    """Returns the fixed state of the model in numbers, with mixers before the layers; 0 for attention alone."""
    return sum(block.size for block in block_states(config)) + sum(spec.size for spec in _before(config))


def has_nominal_state(config: ModelConfig) -> bool:
    """Returns whether a mixer of the model has no finite state, so that its size is nominal (`Mixer.nominal_state`)."""
    return meta_model(config.model_dump_json()).backbone.nominal_state


def target_size(config: ModelConfig, total: int = TOTAL) -> int:
    """Returns the value that `state_size` should have: `total` minus the shares of blocks without a fixed state."""
    return round(sum(block.share for block in block_states(config, total)))


def check_state(config: ModelConfig, total: int = TOTAL) -> None:
    """Raises ConfigError if the state of the model differs from its part of `total`, and names possible changes."""
    size, target = state_size(config), target_size(config, total)
    if size != target:
        problems = [_advice(config, block, total) for block in _wrong(config, total)]
        if before := _before(config):
            names = " ".join(spec.mixer for spec in config.stack.before)
            problems.append(f"layout: {names} adds {sum(spec.size for spec in before):,} before the layers; drop it")
        raise ConfigError(problems, f"a fixed state of {size:,}, where {target:,} is required")


def normalise(config: ModelConfig, total: int = TOTAL) -> ModelConfig:
    """Returns the model with one option of each mixer changed so that its state is its part of `total`.

    As in the paper, the shape of a layer is kept as far as possible: the size of the state changes before expansion
    factors, and these before the number of heads. A model that is already normalised is returned unchanged.

    Raises:
        ConfigError: no option reaches the size; the message lists which sizes can be reached and how.
    """
    options = dict(config.options)
    for block in _wrong(config, total):
        for key, value, size in _choices(config, block):
            if size == block.share and key not in block.own:
                options[block.mixer] = {**config.options[block.mixer], key: value}
                break  # an option that an alias overrides stays unchanged, and `check_state` below reports it
    changed = config if options == config.options else ModelConfig(**{**config.model_dump(), "options": options})
    check_state(changed, total)
    return changed


def _fixed(layer) -> tuple[list[TensorSpec], bool]:
    """Returns the tensors of a layer that do not depend on the context length, and whether there are others."""
    near, far = layer.state_spec(1, 1), layer.state_spec(1, _FAR)
    return [far[name] for name in far if near[name] == far[name]], near != far


def _before(config: ModelConfig) -> list[TensorSpec]:
    """Returns the fixed states of the mixers before the layers, which do not count towards `total`."""
    mixers = meta_model(config.model_dump_json()).backbone.mixers_before()
    return [spec for _, mixer in mixers for spec in _fixed(mixer)[0] if spec.size]


def _wrong(config: ModelConfig, total: int) -> list[BlockState]:
    """Returns one block for each kind of mixer and each alias with options whose state differs from its share."""
    wrong = {(b.mixer, repr(b.own)): b for b in block_states(config, total) if b.size != b.share}
    return list(wrong.values())


def _choices(config: ModelConfig, block: BlockState) -> list[tuple[str, Any, int]]:
    """Returns (option, value, size) for each option of a mixer that changes its state, the preferred ones first."""
    options = {**config.options[block.mixer], **block.own}
    choices = []
    for key, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        tried = [value * 2.0**k for k in (-1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6)] if value else []
        for other in tried:
            if isinstance(value, int) and not other.is_integer():
                continue
            other = type(value)(other)
            size = _size_with(config, block.mixer, {**options, key: other})
            if size is not None and size != block.size:
                choices.append((key, other, size))
    return sorted(choices, key=lambda choice: _rank(choice[0]))


def _rank(key: str) -> int:
    if "state" in key or "mode" in key:
        return 0
    return 2 if "head" in key or "expert" in key else 1


def _size_with(config: ModelConfig, mixer: str, options: dict) -> int | None:
    """Returns the state of a layer with other options; None if it cannot be built."""
    try:
        cls = find_mixer(mixer)
        with torch.device("meta"):
            layer = cls(parse(cls.Config, options), LayerContext(d_model=config.d_model, norm=config.norm))
    except ValueError:
        return None
    return sum(spec.size for spec in _fixed(layer)[0])


def _advice(config: ModelConfig, block: BlockState, total: int) -> str:
    where = f"{block.mixer}: a layer has {block.size:,} and should have "
    if not block.share.is_integer():
        return f"{where}{block.share:,.1f}, which none can; change the layout, or ask for {_fitting(block, total)}"
    where += f"{block.share:,.0f}"
    choices = _choices(config, block)
    other = f"change d_model ({config.d_model}) or the layout, or ask for {_fitting(block, total)}"
    if not choices:
        return f"{where}; none of its options changes it: {other}"
    closest: dict[str, list] = {}
    for choice in sorted(choices, key=lambda choice: abs(choice[2] - block.share)):
        closest.setdefault(choice[0], []).append(choice)
    ways = [f"{key}={value} gives {size:,}" for best in closest.values() for key, value, size in best[:2]]
    return f"{where}; of its options {', '.join(ways)}; or {other}"


def _fitting(block: BlockState, total: int) -> str:
    """Returns advice with the total for which a block needs no change."""
    return f"a state of {block.size * total / block.share:,.0f}, for which it is right as it is"


def architecture(
    name: str, changes: Mapping[str, Any] | None = None, state: int = TOTAL, layers: Layers = "paper"
) -> ModelConfig:
    """Returns the model of a recipe, or of a layout with the width and the options of paper 004.

    Args:
        changes: keys of `ModelConfig` that override the defaults.
        state: fixed state of the whole model. One option of each mixer may change to reach it; 0 changes nothing.
        layers: "mad-lab" takes the layers of the published implementation, whose own mixers keep their state (8,192
            for multi-head Hyena).

    Raises:
        ConfigError: an unknown layer or recipe, options that a layer rejects, or a state that cannot be reached.
    """
    changes = dict(changes or {})
    if name in RECIPES and not (layers == "mad-lab" and name in ARCHITECTURES):
        base = get_recipe(name)
    else:
        _check(ARCHITECTURES.get(name, name))
        base = mad_model(name, layers=layers)
    values = base.model_dump() | changes
    overrides = changes.get("options", {})
    values["options"] = {
        layer: {**base.options.get(layer, {}), **overrides.get(layer, {})} for layer in {**base.options, **overrides}
    }
    config = parse(ModelConfig, values, name)
    published = layers == "mad-lab" and not overrides and {b.mixer for b in config.blocks if b.mixer} <= MAD_LAB.keys()
    if not state or published:
        return config
    normalised = normalise(config, state)
    if any(normalised.options[layer] != config.options[layer] for layer in overrides):
        check_state(config, state)  # normalising would change an option that the caller gave, so raise instead
    return normalised


def mqar_architecture(name: str, changes: Mapping[str, Any] | None = None) -> ModelConfig:
    """Returns the model of two layers of a token mixer (`hgrn2`), or of a layout, at the smallest width of MQAR.

    Args:
        changes: keys of `ModelConfig` that override those of zoology.

    Raises:
        ConfigError: an unknown layer, a recipe, or options that a layer rejects.
    """
    if name in RECIPES:
        raise ConfigError(["a recipe has its own width; give a token mixer or a layout"], name)
    _check(name)
    changes = dict(changes or {})
    layout = f"{name} x2" if name in MIXERS else name
    used = {layer for block in parse_layout(layout, changes.get("aliases")) for layer in block if layer}
    heads = [layer for layer in used if "num_heads" in {**MIXERS, **CHANNELS}[layer].Config.model_fields]
    options = {layer: {"num_heads": 1} for layer in heads}
    overrides = changes.pop("options", {})
    options = {layer: {**options.get(layer, {}), **overrides.get(layer, {})} for layer in {**options, **overrides}}
    values = {"d_model": min(MQAR_WIDTHS), "layout": layout, "norm": "layernorm", "options": options}
    config = parse(ModelConfig, values | changes, name)
    values = config.model_dump()
    return parse(ModelConfig, values, name) if add_nested_heads(values, 1) else config


def recorded(config: ModelConfig) -> dict[str, Any]:
    """Returns a model as runs and plan.json record it: the same for an unchanged model in every release.

    The names of run folders are digests that include it, so it holds every key of the first release, and a key that a
    later release added only if it is not at its default.
    """
    changed = config.model_dump(mode="json", exclude_defaults=True)
    values = config.model_dump(mode="json")
    record = {key: values.get(key) for key in _KEYS} | changed
    options = {}
    for layer, layer_options in values["options"].items():
        kind = MIXERS.get(layer) or CHANNELS[layer]
        defaults = {key: field.default for key, field in kind.Config.model_fields.items()}
        always = _OPTIONS.get(layer, layer_options)
        options[layer] = {key: value for key, value in layer_options.items() if key in always or value != defaults[key]}
    return record | {"options": options}


_KEYS = "d_model layout vocab_size options aliases norm norm_eps tpe tie_embeddings embedding_scale init_std".split()
_GATED = "norm norm_eps gate gate_rank gate_activation gate_first num_heads"
_OPTIONS = {
    layer: keys.split()
    for layer, keys in {
        "attention": "num_heads num_kv_heads rope rope_base rope_scaling window",
        "cosformer2": f"{_GATED} gate_input lrpe_shared_heads",
        "gla": "num_heads expand_k gate_rank gate_temperature norm_eps",
        "hgrn": "complex norm norm_first",
        "hgrn2": "num_heads norm norm_eps output_activation value_activation lower_bound",
        "hyena": "num_modes max_time_constant conv_width",
        "hyena_experts": "num_modes max_time_constant conv_width num_experts num_active expert_width",
        "lightnet": f"{_GATED} lrpe lrpe_shared_heads",
        "mamba": "expand state dt_rank conv_width conv_bias",
        "mh_hyena": "num_modes max_time_constant conv_width num_heads",
        "tnl": f"{_GATED} qk_activation v_activation gate_input slopes layer_factor lrpe lrpe_form lrpe_shared_heads",
        "swiglu": "inner",
        "sglu": "inner",
        "glu": "inner activation",
        "mlp": "inner activation bias",
        "moe": "num_experts num_active inner",
    }.items()
}  # keys of the first release; the options of other layers are all recorded


def _check(layout: str) -> None:
    try:
        parse_layout(layout)
    except ValueError as error:
        close = difflib.get_close_matches(layout, RECIPES, n=1, cutoff=0.8)
        recipe = f"there is no such recipe; did you mean {close[0]!r}? As a " if close else ""
        raise ConfigError([f"{recipe}{error}"], layout) from None
