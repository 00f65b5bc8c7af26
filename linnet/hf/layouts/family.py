"""Families: layouts of checkpoints as tables, from which a folder is read and written.

A family has entries, each some keys of config.json and the values of a Linnet model that they mean; kinds of blocks,
each a block of Linnet's and the names of its tensors; and the names of the tensors around the blocks. Reading goes
through the tables one way and writing the other way, so that one is the inverse of the other. A written config.json is
read again, and what differs from the model is refused by name.

Values of a model have paths: `norm_eps` is a key of the model, `gdn.num_heads` an option of a layer.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from linnet.config import ConfigError, parse, refuse
from linnet.hf.layouts.base import BLOCK, HEAD, LARGEST, Part, Plan, Settings
from linnet.layers.base import MIXERS
from linnet.models import LayerSpec, ModelConfig, empty_of

KINDS: dict[type, str] = {int: "integer", float: "number", bool: "flag"}  # of values -> how `Settings` reads them
Values = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """Keys of config.json, and the values of a model that they mean.

    Attributes:
        read: returns values by path. write: returns keys of config.json from all values of a model; none that belong to
            a layer which the model does not have.
        key, paths: the main key and the paths, for messages.
    """

    read: Callable[[Settings], Values]
    write: Callable[[Values], Values] = lambda values: {}
    key: str = ""
    paths: tuple[str, ...] = ()


def entry(kind: str, key: str, *paths: str, default: Any = None, **bounds: Any) -> Entry:
    """Returns the entry of a key whose value is that of the model.

    Args:
        kind: `integer`, `number` or `flag`, as in `Settings`.
        key: or several spellings with `|` between them, of which the first is written.
        paths: where the value goes; it is written from the first that the model has.
        default: of the source; None: the key is required. A function computes it from the settings.
    """

    names = key.split("|")

    def read(settings: Settings) -> Values:
        fallback = default(settings) if callable(default) else default
        name = next((name for name in names if name in settings.values), names[0])
        return dict.fromkeys(paths, getattr(settings, kind)(name, fallback, **bounds))

    def write(values: Values) -> Values:
        return {names[0]: next(values[path] for path in paths if path in values)} if values.keys() & paths else {}

    return Entry(read, write, names[0], paths)


def keys(text: str) -> tuple[Entry, ...]:
    """Returns the entries of a table of `key:path=default`, such as "hidden_size:d_model=4096".

    A default is JSON, and its type is that of the key: a whole number, a number with a point, or true and false. A key
    of several paths has `+` between them.
    """
    entries = []
    for word in text.split():
        key, _, rest = word.partition(":")
        paths, _, default = rest.partition("=")
        value = json.loads(default)
        bounds = {"largest": LARGEST["vocabulary"]} if key == "vocab_size" else {}
        entries.append(entry(KINDS[type(value)], key, *paths.split("+"), default=value, **bounds))
    return tuple(entries)


def only(key: str, *allowed: Any, why: str) -> Entry:
    """Returns the entry of a key that must have one of some values, of which the first is the default and written."""

    def read(settings: Settings) -> Values:
        settings.only(key, *allowed, why=why)
        return {}

    return Entry(read, lambda values: {} if allowed[0] is None else {key: allowed[0]})


def always(**values: Any) -> Entry:
    """Returns the entry of values of the model that the family always has; `__` in a name stands for a point."""
    return Entry(lambda settings: {name.replace("__", "."): value for name, value in values.items()})


@dataclass(frozen=True)
class Joint:
    """Parameters that are one tensor of the source, by rows.

    Attributes:
        ours: their names, in order. groups: path of the number of groups in each of which the tensor has rows of all.
        view, transposed, across: as in `Part`; a path in the view stands for its value.
        experts: path of the number of experts, of which each has a tensor; {} in its name stands for their numbers.
        where: path of a value without which the parameters are in another tensor.
    """

    ours: str
    groups: str = ""
    view: tuple[int | str, ...] | None = None
    transposed: bool = False
    experts: str = ""
    across: bool = False
    where: str = ""

    def parts(self, name: str, shapes: Shapes, values: Values) -> dict[str, Part]:
        """Returns the sources of parameters of some shapes in the tensor of a name."""
        if self.experts:
            return {ours: Part(name, experts=values[self.experts], across=self.across) for ours in shapes}
        count, start, parts = values.get(self.groups, 1), 0, {}
        alone = len(shapes) == 1 and count == 1
        rows = 0 if alone else sum(shape[0] for shape in shapes.values()) // count
        for parameter, shape in shapes.items():
            view_shape = self.view and tuple(values[size] if isinstance(size, str) else size for size in self.view)
            # Every source keeps the weights of a short convolution as those of a Conv1d.
            view = (-1, 1, shape[1]) if parameter.endswith("conv.weight") else view_shape
            parts[parameter] = Part(name, start, rows, count, view, self.transposed)
            start += shape[0] // count
        return parts


def table(text: str) -> dict[str, str | Joint]:
    """Returns names from words of `theirs:ours`, or of one name for both; `+` joins what is one tensor of theirs."""
    return {word.partition(":")[0]: word.rpartition(":")[2].replace("+", " ") for word in text.split()}


Names = Mapping[str, str | Joint]  # names of modules or parameters of the source -> Linnet's


def below(its: str, own: str, names: Names) -> dict[str, str | Joint]:
    """Returns names below a prefix of the source's and of Linnet's."""

    def place(ours: str) -> str:
        return " ".join(f"{own}.{name}" for name in ours.split())

    return {
        "|".join(f"{its}.{item}" for item in name.split("|")): replace(ours, ours=place(ours.ours))
        if isinstance(ours, Joint)
        else place(ours)
        for name, ours in names.items()
    }


@dataclass(frozen=True)
class Kind:
    """A kind of block.

    Attributes:
        layer: the block of Linnet's layout. names: of its tensors, within a block.
        option: path of an option that is 0 in other kinds of the same block, such as a window.
    """

    layer: str
    names: Names
    option: str = ""


@dataclass(frozen=True)
class Layers:
    """How config.json lists its blocks. `read` returns the kind of each, `write` the keys from the kinds."""

    read: Callable[[Settings], list[str]]
    write: Callable[[list[str]], Values]


@dataclass(frozen=True)
class Family:
    """A layout of checkpoints.

    Attributes:
        title: name for messages. model_type, architecture: of config.json; "" for none.
        entries: what config.json says. layers: how it lists the blocks. kinds: of blocks, by its names for them.
        outer: names of tensors around the blocks. layer: prefix of a block's names, with {} for its number.
        root: what precedes these names, and what does in some folders. ignored, skipped: as in `Plan`; {count}
            in a name that is skipped is the number of blocks.
        recut: as in `Plan`, within a block.
        stores_head: whether a head that shares the embedding's weight is written too, for code that never shares it.

    A name with `|` is one of several spellings, of which the first is written.
    """

    title: str
    model_type: str
    architecture: str
    entries: tuple[Entry, ...]
    layers: Layers
    kinds: Mapping[str, Kind]
    outer: Names = field(default_factory=lambda: ends("model.embed_tokens", "model.norm"))
    layer: str = "model.layers.{}"
    root: tuple[str, str] = ("", "")
    ignored: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    recut: tuple[str, ...] = ()
    stores_head: bool = False

    def spellings(self, ours: str) -> str:
        """Returns the names that the tensor of a module around the blocks may have, with `|` between them."""
        names = next(its for its, name in self.outer.items() if name == ours).split("|")
        return "|".join(self._everywhere([f"{name}.weight" for name in names]))

    def read(self, settings: Settings) -> Plan:
        """Returns the model and the sources of its parameters. Raises ConfigError with all problems of config.json."""
        kinds = self.layers.read(settings)
        sparse = any("moe" in self.kinds[kind].layer for kind in kinds)
        values: Values = {}
        for item in self.entries:
            known = len(settings.problems)
            values |= item.read(settings)
            if item.paths and not sparse and all(path.startswith("moe.") for path in item.paths):
                del settings.problems[known:]  # released dense models have 0 experts per token
        settings.check()
        config = self._config(values, kinds, settings)
        parts = self._parts(config, kinds, settings)
        layers = (self.layer.format(index) for index in range(len(kinds)))
        recut = tuple(tuple(f"{layer}.{name}" for name in self.recut) for layer in layers)
        held = {part.name for part in parts.values()}
        recut = tuple(names for names in recut if names and set(names) <= held)
        skipped = {name.replace("{count}", str(len(kinds))): what for name, what in self.skipped.items()}
        return Plan(config, parts, self.ignored, skipped, recut)

    def write(self, config: ModelConfig) -> Values:
        """Returns the config.json of a model. Raises ConfigError with all settings that the family does not have."""
        where = f"export as {self.title}"
        fix = "export with --to hf"
        names = {(kind.layer, bool(kind.option)): name for name, kind in self.kinds.items()}
        options = {kind.layer: kind.option for kind in self.kinds.values() if kind.option}
        blocks = [("+".join(spec.names), settled(config, spec)) for spec in config.blocks]
        kinds = [names.get((layer, bool(settings.get(options.get(layer, ""))))) for layer, settings in blocks]
        wrong = {layer for (layer, _), kind in zip(blocks, kinds, strict=True) if kind is None}
        wrong |= {str(spec.mixer) for spec in config.stack.before}
        if wrong:
            has = " and ".join(sorted({kind.layer for kind in self.kinds.values()}))
            raise ConfigError(
                [f"layout: {self.title} has no blocks {', '.join(sorted(wrong))}; it has {has}; {fix}"], where
            )
        values = settled(config)
        values |= {path: max(settings.get(path, 0) for _, settings in blocks) for path in options.values()}
        out: Values = {"architectures": [self.architecture]} if self.architecture else {}
        out["model_type"] = self.model_type
        out["tie_word_embeddings"] = config.tie_embeddings
        written = [item.write(values) for item in self.entries]
        for key, value in (pair for more in (*written, self.layers.write(kinds)) for pair in more.items()):
            out[key] = {**out[key], **value} if isinstance(value, dict) and isinstance(out.get(key), dict) else value
        try:
            again = self.read(Settings(out, config.tie_embeddings)).model
        except ConfigError as error:
            raise ConfigError([f"{problem}; {fix}" for problem in error.problems], where) from None
        problems = {}
        if any(spec.names != its.names for spec, its in zip(config.blocks, again.blocks, strict=True)):
            problems["layout"] = (
                f"layout: {config.layout!r} is not what {self.title} has, which is {again.layout!r}; {fix}"
            )
        for spec, its in zip(config.blocks, again.blocks, strict=True):
            mine, others = settled(config, spec), settled(again, its)
            written_from = {
                path: f", as model.{_spelled(first)}, since it has one {item.key} for both"
                for item in self.entries
                if (first := next((path for path in item.paths if path in mine), ""))
                for path in item.paths
                if path != first
            }
            problems |= {
                path: f"{_spelled(path)}: {mine.get(path)!r} is not what {self.title} has, which is "
                f"{others.get(path)!r}{written_from.get(path, '')}; train with that, or {fix}"
                for path in sorted(mine.keys() & others.keys())  # without RoPE there are no options of it
                if not _same(mine.get(path), others.get(path))
            }
        refuse(problems.values(), where)
        return out

    def _config(self, values: Values, kinds: Iterable[str], settings: Settings) -> ModelConfig:
        model: Values = {"tie_embeddings": settings.tied}
        options: dict[str, Values] = {}
        layers = [self.kinds[kind].layer for kind in kinds]
        used = {name for layer in layers for name in layer.split("+")}
        for path, value in values.items():
            layer, _, option = path.partition(".")
            if not option:
                model[layer] = value
            elif "." in option:  # a factor of one of several mixers
                if value != 1.0:
                    outer, _, inner = option.partition(".")
                    options.setdefault(layer, {}).setdefault(outer, {})[inner] = value
            else:
                options.setdefault(layer, {})[option] = value
        if "parallel" in used:
            mixers = {name: options.pop(name) for name in sorted(options) if name in MIXERS and name not in used}
            options.setdefault("parallel", {})["mixers"] = mixers
        near = {kind: self.kinds[kind] for kind in kinds if self.kinds[kind].option}
        for item in self.kinds.values() if not near else ():  # a window in config.json that no block has
            layer, _, option = item.option.partition(".")
            options.get(layer, {}).pop(option, None)
        if near and len(set(kinds)) > 1:  # in some blocks of a layer alone
            for item in near.values():
                layer, _, option = item.option.partition(".")
                alias = {"layer": item.layer, "options": {layer: {option: options[layer].pop(option)}}}
                model.setdefault("aliases", {})["near"] = alias
            layers = ["near" if kind in near else layer for kind, layer in zip(kinds, layers, strict=True)]
        model["layout"] = " ".join(f"{layer} x{len(list(run))}" for layer, run in groupby(layers))
        model["options"] = {name: layer_options for name, layer_options in options.items() if name in used}
        model["norm_after"] = [name for name in values.get("norm_after", []) if name in used]
        try:
            return parse(ModelConfig, model, "config.json")
        except ConfigError as error:  # of Linnet's keys, for people who know the source's
            keys = {path: item.key for item in self.entries for path in item.paths}
            raise ConfigError([_translated(problem, keys) for problem in error.problems], "config.json") from None

    def _parts(self, config: ModelConfig, kinds: Iterable[str], settings: Settings) -> dict[str, Part]:
        shapes = {name: tuple(tensor.shape) for name, tensor in empty_of(config, "meta").state_dict().items()}
        tables = [("", "", self.outer)]
        for index, kind in enumerate(kinds):
            tables.append((f"{BLOCK.format(index)}.", f"{self.layer.format(index)}.", self.kinds[kind].names))
        parts, values = {}, settled(config)
        for prefix, its, names in tables:
            for name, ours in names.items():
                joint = ours if isinstance(ours, Joint) else Joint(ours)
                if joint.where and not values[joint.where]:
                    continue
                for end in ("", ".weight", ".bias"):
                    mine = [f"{prefix}{item}{end}" for item in joint.ours.split()]
                    here = {item: shapes[item] for item in mine if item in shapes}
                    if here:
                        spellings = [f"{its}{item}{end}" for item in name.split("|")]
                        parts |= joint.parts(self._held(spellings, settings), here, values)
        return parts

    def _held(self, names: list[str], settings: Settings) -> str:
        """Returns the first of some names, below either root, that the folder has; else the first."""
        names = self._everywhere(names)
        return next((name for name in names if name.format(0) in settings.shapes), names[0])

    def _everywhere(self, names: list[str]) -> list[str]:
        written, other = self.root
        return names + [other + name.removeprefix(written) for name in names if other and name.startswith(written)]


BIASED = {"attention": ("bias",), "swiglu": ("bias",), "mlp": ("bias",), "mamba2": ("bias", "out_bias")}
INERT = ("layout", "options", "aliases", "dropout", "num_positions", "init", "init_std", "embedding_std", "base_width")


INTRINSIC = ("residual_scale", "residual_norm", "logit_scale", "parametrisation", "norm_after")  # kept at defaults too


def settled(config: ModelConfig, spec: LayerSpec | None = None) -> Values:
    """Returns the values of a model by path, with every default of a shape resolved.

    Args:
        spec: a block whose layers count alone; None for all, of which the first of a kind counts.
    """
    values: Values = {key: value for key, value in config.model_dump().items() if key not in INERT}
    values |= {key: getattr(config, key) for key in INTRINSIC}
    values["norm_eps"] = config.norm_eps or (1e-5 if config.norm == "layernorm" else 1e-6)
    values["num_layers"] = config.num_layers
    values["norm_after"] = sorted(config.norm_after)
    used = {name for block in config.blocks for name in block.names}
    folded = config.bias == "all" and used <= BIASED.keys()  # all biases of the layers, which have options for them
    values["bias"] = "none" if folded else config.bias
    for block in reversed(config.blocks if spec is None else [spec]):
        for name in block.names:
            options = config.layer_options(name, block)
            values |= _settled(name, options, config.d_model)
            if name == "parallel":
                for inner, _, inner_options in options.each():
                    values |= _settled(inner, inner_options, config.d_model)
                    for key in ("input_scales", "output_scales"):
                        values[f"parallel.{key}.{inner}"] = getattr(options, key).get(inner, 1.0)
                values["parallel.mixers"] = sorted(options.mixers)
    return values | {f"{name}.{key}": True for name in used if folded for key in BIASED[name]}


def _settled(name: str, options: Any, width: int) -> Values:
    values = {key: getattr(options, key) for key in type(options).model_fields}
    if name == "attention":
        values["num_kv_heads"] = options.num_kv_heads or options.num_heads
        values["head_dim"] = options.head_dim or width // options.num_heads
        values["scale"] = options.scale or values["head_dim"] ** -0.5
        if not options.rope:
            values = {key: value for key, value in values.items() if not key.startswith("rope_")}
    elif hasattr(options, "value_heads"):  # on the delta rule
        key, value = options.widths(width)
        values |= {"num_v_heads": options.value_heads, "head_dim": key, "expand_k": 1.0, "expand_v": value / key}
    elif name == "mamba2":
        values |= {"expand": 1, "inner": options.channels(width), "head_dim": options.heads(width)[1]}
        values["num_heads"] = options.heads(width)[0]
    elif name == "tnl":
        values |= {"head_dim": options.head_dim or width // options.num_heads, "norm_eps": options.norm_eps or 1e-6}
    elif name == "rwkv7":
        ranks = {"decay_rank": 1.8 * width**0.5, "rate_rank": 1.8 * width**0.5}
        ranks |= {"value_rank": 1.3 * width**0.5, "gate_rank": 0.6 * width**0.8}
        values |= {key: values[key] or max(32, 32 * round(rank / 32)) for key, rank in ranks.items()}
    elif name == "mla":
        values["scale"] = options.scale or (options.nope_dim + options.rope_dim) ** -0.5
        for key in () if options.rope else ("rope_base", "rope_scaling", "rope_interleaved"):
            del values[key]
    elif name == "moe":
        values["inner"] = options.inner or -(-8 * width // (24 * options.num_active)) * 8
        del values["balance_coefficient"]  # of training alone
    elif name in ("swiglu", "mlp", "rwkv"):
        values["inner"] = options.inner or (-(-8 * width // 24) * 8 if name == "swiglu" else 4 * width)
    elif name == "parallel":
        values = {}
    return {f"{name}.{key}": value for key, value in values.items()}


def _same(mine: Any, its: Any) -> bool:
    if isinstance(mine, float) and isinstance(its, float):
        return mine == its or math.isclose(mine, its, rel_tol=1e-9)
    return mine == its


def _spelled(path: str) -> str:
    return f"options.{path}" if "." in path else path


def _translated(problem: str, keys: Mapping[str, str]) -> str:
    """Returns a problem of a model with the source's key before it, if the source has one for its path."""
    for path, key in keys.items():
        if problem.startswith(f"{_spelled(path)}:"):
            return f"{key}: {problem}"
    return problem


def counted(default: int, key: str = "num_hidden_layers") -> Callable[[Settings], int]:
    return lambda settings: settings.integer(key, default, LARGEST["layers"])


def one_kind(kind: str, default: int, key: str = "num_hidden_layers") -> Layers:
    """Returns the list of blocks that are all of one kind."""
    count = counted(default, key)
    return Layers(lambda settings: [kind] * count(settings), lambda kinds: {key: len(kinds)})


LEGACY = {"mamba": "linear_attention", "attention": "full_attention"}  # names before transformers 5


def typed(default: int, absent: Callable[[Settings, int], list[str]], *kinds: str, mixed: bool = False) -> Layers:
    """Returns the list of blocks by `layer_types`; `absent` gives the kinds of so many blocks without that key.

    With `mixed`, the source's own code refuses a model without blocks of every kind.
    """
    count = counted(default)

    def read(settings: Settings) -> list[str]:
        number = count(settings)
        listed = settings.values.get("layer_types", settings.values.get("layers_block_type"))
        if listed is None:
            return absent(settings, number)
        named = [LEGACY.get(item, item) if isinstance(item, str) else "" for item in listed] if _list(listed) else []
        if len(named) != number or not set(named) <= set(kinds):
            settings.problems.append(
                f"layer_types: must have {' or '.join(kinds)} for each of {number} layers (given {listed!r})"
            )
            return [kinds[0]] * number
        if mixed and set(named) != set(kinds):
            settings.problems.append(f"layer_types: must have blocks of {' and '.join(kinds)} (given {listed!r})")
        return named

    return Layers(read, lambda names: {"num_hidden_layers": len(names), "layer_types": names})


def _list(value: Any) -> bool:
    return isinstance(value, list)


def ends(embedding: str, norm: str, head: str = HEAD.removesuffix(".weight")) -> dict[str, str]:
    """Returns the names of the tensors around the blocks."""
    return {embedding: "embedding", norm: "backbone.norm", head: "head"}
