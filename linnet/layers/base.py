"""The contract of a layer, and the registry of layers by name.

A token mixer is one class in one file. It defines its parallel form (`forward`), its recurrence (`step`), the state it
carries (`state_spec`), its cost (`flops_paper`), its tensor-parallel split (`tp_plan`) and the checks of its options
(`Config.check`). A channel mixer defines the same methods, except those about state. The rest of Linnet only calls
these methods and never depends on the architecture.
"""

import ast
import hashlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from linnet import trust
from linnet.config import Config, ConfigError, nearest
from linnet.ops.scans import Scan
from linnet.ops.tensor_parallel import Split

PLUGIN = "linnet_plugin_"  # start of the names of modules that are imported from plugins
State = dict[str, Tensor]
Bias = Literal["none", "qkv", "all"]
NonCausal = Literal["generic", "two_scans", "one_scan"]
Role = Literal["hidden", "vector"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor of a state.

    Attributes:
        counted: weight of one element in the state size of paper 004. The paper counts a complex number once and counts
            recurrent states only, so real numbers in (real, imaginary) pairs have weight 0.5, and caches and windows of
            inputs have weight 0. Integers are positions and never count.
        half: whether `step` also takes it in bfloat16, and then rounds it once each time that it writes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    counted: float = 1.0
    half: bool = False

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Returns the size of this tensor in the state size of paper 004."""
        return round(prod(self.shape) * self.counted) if self.dtype.is_floating_point else 0


@dataclass(frozen=True)
class LayerContext:
    """Everything that a layer may know about the surrounding model.

    Attributes:
        d_model: width D of the residual stream.
        layer_index, num_layers: index of the block in the whole stack, and the depth of the stack.
        mixer_index, mixer_count: index and number among the blocks that have this kind of mixer.
        norm, norm_eps: kind of the model's norms and their epsilon (None: the default of the kind).
        bias: which linear layers get a bias in addition to those that always have one. `none`: no others; `qkv`: the
            projections that a mixer's recurrence or attention reads; `all`: all linear layers of mixers and gated
            linear units.
        shared: modules that the model owns and several layers use, by the names of `Mixer.shared_spec`. Empty for a
            layer that is built alone; the layer then owns these modules itself.
        causal: whether a token sees only those before it. False comes from the class of a model and never from an
            option of a layer; `Mixer.non_causal` says what a mixer then does.
        axes: number of axes of the grid on which the tokens lie; 1 is a sequence.
        prefix: tokens before the grid, such as a class token.
        side: largest side of the grid in tokens, for the start of time constants; None if it is not known.
        scan: the order in which mixers that scan visit the tokens without causality: `forward`, `both` or `cross`
            (`linnet.ops.scans.both_ways`).
        scan_sum: whether the outputs of a mixer in several orders are added in place of their mean.
        mup: whether the model has `parametrisation: mup`, in which softmax attention divides by the width of a head.
        norm_after: whether the block norms what its layers add, and not what they read.
        residual_scale: factor of what each layer of the block adds to the residual stream.
        residual_norm: factor of the normed input that takes the place of the residual stream; None is the stream.
    """

    d_model: int
    layer_index: int = 0
    num_layers: int = 1
    mixer_index: int = 0
    mixer_count: int = 1
    norm: str = "rmsnorm"
    norm_eps: float | None = None
    bias: Bias = "none"
    shared: nn.ModuleDict | dict[str, nn.Module] = field(default_factory=dict)
    causal: bool = True
    axes: int = 1
    prefix: int = 0
    side: int | None = None
    scan: Scan = "both"
    scan_sum: bool = False
    mup: bool = False
    norm_after: bool = False
    residual_scale: float = 1.0
    residual_norm: float | None = None

    @property
    def bias_qkv(self) -> bool:
        """Whether the projections that a recurrence or attention reads have a bias."""
        return self.bias != "none"

    @property
    def bias_all(self) -> bool:
        """Whether every linear layer of a mixer or gated linear unit has a bias."""
        return self.bias == "all"


SET = object()  # in `LayerConfig.unread`


class LayerConfig(Config):
    """Options of a layer. `check` finds options that do not fit this model width or each other.

    Attributes:
        causal_defaults: what an option that is None stands for in a causal model, where that was the default of an
            earlier release. The configuration of a causal model has this value in place of None, and the digest of a
            training omits it.
        grows: options that count heads or channels and so grow with the width of a model (`parametrisation.at_width`).
        nested: options that hold the options of other layers by their names, which grow in the same way.
        unread: an option and a value of it, or `SET` for any but its default -> the options that have no effect then. A
            new training refuses one that is set and that no block reads (`models.stack.unused_options`).
    """

    causal_defaults: ClassVar[Mapping[str, object]] = {}
    grows: ClassVar[tuple[str, ...]] = ("num_heads", "num_kv_heads", "inner", "expert_width", "dt_rank")
    nested: ClassVar[tuple[str, ...]] = ()
    unread: ClassVar[Mapping[tuple[str, object], tuple[str, ...]]] = {}

    def check(self, context: LayerContext) -> list[str]:
        """Returns the problems of these options in a layer at `context`, each as "key: what is wrong; the fix".

        The method must not build a module. A plugin without `check` may raise ValueError in its constructor instead.
        """
        return []


def carried(state: State | None, name: str, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """Returns what a mixer's `forward` tells its op: where it starts, whether it returns its state, the documents."""
    initial = None if state is None else state[name]
    return {"initial_state": initial, "output_final_state": state is not None, "cu_seqlens": cu_seqlens}


def last_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """Returns the linear layer at the end of a residual branch, marked by `ends_residual` (docs/mixers.md)."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    linear.ends_residual = True
    return linear


class Layer(nn.Module):
    """What token mixers and channel mixers have in common: costs, the tensor-parallel split, an auxiliary loss.

    Attributes:
        tp_counts: attributes that count heads or channels; tensor parallelism divides those that the layer has.
        tp: how tensor parallelism splits the layer, if it does.
        within: what precedes the name in the path of the options, for a part of another layer: "parallel.mixers.".
    """

    name: str
    also: tuple[str, ...]
    within: str = ""
    Config: type[Config]
    tp_counts: tuple[str, ...]
    tp: Split | None = None

    def auxiliary_loss(self) -> Tensor | None:
        """Returns the term that the last forward pass adds to the training loss, or None if the layer adds no term.

        The term includes its coefficient and is added once per pass. A layer computes it in training mode with
        gradients enabled, and its value does not depend on the number of tokens.
        """
        return None

    def flops_paper(self, seq_len: int) -> float:
        """Returns the forward FLOPs of one sequence as paper 000, Table 1, counts them (ideal GLU, leading terms).

        The default counts two FLOPs per weight and token, which is right for a layer of linear layers only.
        """
        return 2.0 * seq_len * sum(p.numel() for p in self.parameters() if p.ndim == 2)

    def flops_004(self, seq_len: int) -> float:
        """Returns the forward FLOPs of one sequence by paper 004, C.4; `flops_paper` for layers of other papers."""
        return self.flops_paper(seq_len)

    def flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of one sequence that are neither in matrix products nor in registered ops."""
        return 0.0

    def inactive_parameters(self) -> int:
        """Returns the number of parameters that one token does not use, such as those of other experts."""
        return 0

    def tp_plan(self) -> dict[str, str]:
        """Returns how tensor parallelism splits the layer: path of a submodule, parameter or buffer -> word.

        Each parameter and buffer needs exactly one word, except those of `shared_spec`, which stay whole. {}, the
        default, means that the layer cannot be split.

        - `colwise`: a linear layer whose outputs are split (rows of its weight, and its bias).
        - `rowwise`: a linear layer whose inputs are split; its product is summed over the ranks, then its bias added.
          The one that ends the layer has `ends_residual = True`; the output of any other is read inside the layer.
        - `split`: a tensor whose first dimension is heads or channels.
        - `split_norm`: an RMSNorm or SRMSNorm over the split width; the sum of squares is summed over the ranks.
        - `partial`: whole on each rank; its gradient is summed over the ranks, since each sees its own heads only.
        - `whole`: whole on each rank, and no split tensor reads it, or it has no gradient.

        Inside a split layer, a tensor from outside it, such as one of a shared module, passes
        `linnet.ops.tensor_parallel.own_part` with `self.tp`.
        """
        return {}

    def tp_problems(self) -> list[str]:
        """Returns why these options cannot be split by tensor parallelism, each as "key: what is wrong; the fix"."""
        return []


class Mixer(Layer):
    """A token mixer. Subclasses register with `@register_mixer("name", ConfigClass)`.

    `forward` without a state is the training form: it returns `(y, None)`. With a state (from `init_state` or an
    earlier call) it continues from that state and returns the state after the last token. `step` is `forward` for one
    token. Output projections at the end of a residual branch carry the attribute `ends_residual = True`, which selects
    depth-scaled initialisation. Any module of a layer may name parameters in `full_precision`: these stay float32 when
    the model is cast for serving. Any module of a layer may say in `mup_roles` ({own parameter: role}) how
    `parametrisation: mup` treats a parameter (`linnet.models.parametrisation`); by default the weights of linear layers
    are hidden matrices and everything else is a vector.

    Attributes:
        owns_input_norm: True if the block passes the raw residual stream and the mixer normalises it itself.
        before_layers: True if the mixer runs once before all layers, without norm and residual. A layout names it
            first (`tpe tnl+sglu x12`), and `num_layers` and `layer_index` do not count it.
        sequence_parallel: True if `forward` without a state is right for one span of a longer row, inside
            `linnet.ops.sequence.sequence_parallel`: all that looks at other tokens is an op of Linnet, or exchanges
            what it needs itself. For other mixers the state is passed from rank to rank (`linnet.layers.ring`).
        mixes_state: True if tokens mix the channels of a state [..., K, V], so that the summary of a span has a matrix
            [K, K] beside it.
        non_causal: what the mixer does in a model without causality (`context.causal` is False). `generic`: nothing of
            its own; the model runs `forward` in each order of its scan and takes the mean (`linnet.layers.non_causal`).
            `two_scans`: `forward` runs in the orders of `context.scan` itself. `one_scan`: in one pass of `forward`,
            every token sees all others. There is no state then: `forward` gets None and returns (y, None).
        takes_grid: True if `forward` has a fourth argument `grid` (`linnet.layers.positions.Grid`, None for a
            sequence). Without causality, mixers that are not `generic` get it.
        shares_values: True if later layers of this kind read what the first one computes, in a causal model. `forward`
            and `step` then have a last argument `values`, a list: the first layer appends one tensor [..., C] of the
            tokens, and the others get it in the list. The argument is None where a layer is called alone.
        surrogate_gradient: True if the backward pass is an estimate on purpose, such as a straight-through one, and not
            the derivative of `forward`; `linnet.layers.check` then compares no gradients.
        nominal_state: True if `state_spec` only gives the size that a paper counts for a form that has no finite state
            and does not decode; `init_state`, `step` and `forward` with a state raise ValueError then.
    """

    owns_input_norm = False
    before_layers = False
    tp_counts: tuple[str, ...] = ("num_heads", "num_kv_heads", "channels")
    sequence_parallel = False
    mixes_state = False
    non_causal: ClassVar[NonCausal] = "generic"
    takes_grid: ClassVar[bool] = False
    shares_values: ClassVar[bool] = False
    surrogate_gradient: ClassVar[bool] = False
    nominal_state = False

    @classmethod
    def refuse_options(cls, config: LayerConfig, context: LayerContext) -> None:
        """Raises ValueError with the first problem of the layer's options, under its name."""
        for problem in config.check(context):
            raise ValueError(f"{cls.name}.{problem}")

    @classmethod
    def span_problems(cls, config: Config, context: LayerContext, span: int, ranks: int, tp: int = 1) -> list[str]:
        """Returns why a row cannot be cut into spans for this layer, each as "key: what is wrong; the fix".

        The method must not build a module.

        Args:
            span: tokens of a span. ranks: number of spans. tp: ranks that share the heads or channels of the layer.
        """
        if cls.sequence_parallel or cls.state_spec is not Mixer.state_spec:
            return []
        return ["has no state_spec, so no state can be passed from span to span; write it, or use sp: 1"]

    def least_span(self, ranks: int) -> int:
        """Returns how many tokens each of `ranks` spans of a row needs for this layer."""
        return 1

    @classmethod
    def shared_spec(cls, config: Config, context: LayerContext) -> dict[str, Callable[[], nn.Module]]:
        """Declares the modules that all layers of this kind share: name -> how to make one.

        The model makes each module once, owns it as `backbone.shared.<name>` and passes it in `context.shared`. Prefix
        the name with the mixer's name, so that the names of different kinds do not collide.
        """
        return {}

    def shared(self, name: str, config: Config, context: LayerContext) -> tuple[nn.Module, ...]:
        """Returns the shared module `name` in a tuple, so that it is not registered as a submodule of this layer."""
        if name not in context.shared:
            self.add_module(f"own_{name}", self.shared_spec(config, context)[name]())
            return (self.get_submodule(f"own_{name}"),)
        return (context.shared[name],)

    def parts(self) -> list["Mixer"]:
        """Returns the mixers that this one consists of, which have costs and plans of their own: itself alone."""
        return [self]

    def forward(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None):
        """Mixes x [B, T, D] over time. `cu_seqlens` (int32 [N+1], B = 1) resets the state at document boundaries."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Computes one token: x [B, D] and the state after the previous token give y [B, D] and the state after this
        token.

        The method may write the state in place or return new tensors.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step, so it trains but does not generate")

    def state_spec(self, batch: int, context_length: int) -> dict[str, TensorSpec]:
        """Returns the tensors that the layer carries between tokens; their first dimension is the batch.

        A KV cache depends on `context_length`, a recurrence does not. A state that depends on it is filled from its
        start: the state for a shorter context is the leading corner of the state for a longer one. Caches can therefore
        grow, and a step on the corner that contains all tokens so far reads no empty slots.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state_spec; {{}} carries nothing")

    def pending_spec(self, batch: int, tokens: int) -> dict[str, TensorSpec]:
        """Returns the buffers of pending tokens of a large state that `step` writes only every `tokens` tokens.

        {} means that every step writes the state. A state with these buffers also has `pending`, int32 [batch]: the
        number of pending tokens, 0 to tokens - 1, which the caller of `step` counts. The state is complete if none is
        pending, so a subclass whose `step` reads the state beside what it inherits returns {}.
        """
        return {}

    def flops_masked(self, seq_len: int) -> float:
        """Returns the forward FLOPs of one sequence on pairs of tokens that the causal mask hides.

        `flops_exact` counts them, because SDPA is counted over all pairs; `flops_causal` does not.
        """
        return 0.0

    def init_state(self, batch: int, context_length: int, device=None, dtype: torch.dtype | None = None) -> State:
        """Returns the state before the first token: zeros of `state_spec`, in `dtype` instead of float32 if given."""
        return {
            name: torch.zeros(
                spec.shape,
                dtype=dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype,
                device=device,
            )
            for name, spec in self.state_spec(batch, context_length).items()
        }


class Channel(Layer):
    """A channel mixer: x [..., D] -> [..., D], each token separately. Subclasses register with `@register_channel`.

    A channel mixer that looks at other tokens, such as one with a token shift, is a `Mixer` that registers so.
    """

    tp_counts: tuple[str, ...] = ("inner",)


def layers_of(model: nn.Module) -> list[Layer]:
    """Returns the layers of a model, each before those that it consists of."""
    return [layer for layer in model.modules() if isinstance(layer, Layer)]


def lower_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters of a model to `dtype`, except those that a layer names in its attribute `full_precision`.

    Products of frequencies with positions, and of decay rates with lengths, need float32 in long contexts. Buffers
    with fixed tables of these keep their dtype too.
    """
    for module in model.modules():
        kept = getattr(module, "full_precision", ())
        for name, parameter in module.named_parameters(recurse=False):
            if name not in kept and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def auxiliary_layers(model: nn.Module) -> list[Layer]:
    """Returns the layers of a model that define an `auxiliary_loss`."""
    return [x for x in layers_of(model) if type(x).auxiliary_loss is not Layer.auxiliary_loss]


MIXERS: dict[str, type[Mixer]] = {}
CHANNELS: dict[str, type[Channel | Mixer]] = {}
_ALL = ChainMap[str, Any](MIXERS, CHANNELS)


def register_mixer(name: str, config: type[Config], *also: str):
    """Registers the decorated class as the mixer `name` of layouts, with the options of `config`.

    Args:
        also: other names in use, for the message about an unknown name; case, `-` and `_` do not matter.

    Raises:
        ValueError: another class already has this name.
    """
    return _register(MIXERS, name, config, also)


def register_channel(name: str, config: type[Config], *also: str):
    """Registers the decorated class as `register_mixer` does, for a channel mixer."""
    return _register(CHANNELS, name, config, also)


def known_as(name: str, known: Iterable[str]) -> str | None:
    """Returns the one of the known layers that is also called `name`; None if there is none."""
    known = list(known)
    others = {_plain(also): layer for layer in known for also in getattr(_ALL.get(layer), "also", ())}
    return (others | {_plain(layer): layer for layer in known}).get(_plain(name))


def layers_with(option: str) -> list[str]:
    """Returns the layer that has an option of this name, for messages; "LAYER" if there are several."""
    layers = [name for name, cls in _ALL.items() if option in cls.Config.model_fields]
    return layers if len(layers) <= 1 else ["LAYER"]


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Returns the text of `nearest` about an unknown layer, which may have a known one's other name."""
    known = list(known)
    return f"did you mean {layer!r}?" if (layer := known_as(name, known)) else nearest(name, known)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def find_mixer(name: str) -> type[Mixer]:
    """Returns the class of a registered mixer. Raises ConfigError for an unknown name and suggests the nearest one."""
    return _find(MIXERS, "mixer", name)


def find_channel(name: str) -> type[Channel | Mixer]:
    """Returns the class of a registered channel mixer, as `find_mixer`."""
    return _find(CHANNELS, "channel mixer", name)


def load_plugin(spec: str) -> str:
    """Imports a mixer from a file outside the package and returns the name that it registered.

    This runs the file. Call `linnet.trust.check_plugins` first if a received folder names it.

    Args:
        spec: `path/to/file.py:ClassName`.

    Raises:
        ConfigError: the file or the class is missing, does not import, or is not a registered mixer.
    """
    path_text, colon, class_name = spec.rpartition(":")
    path = Path(path_text)
    if not colon or path.suffix != ".py":
        raise ConfigError([f"mixer {spec!r}: write path/to/file.py:ClassName{_mixers_in(spec)}"], "plugins")
    if not path.is_file():
        fix = "give its path" if path.is_absolute() else f"give its path (relative ones start in {Path.cwd()})"
        raise ConfigError([f"mixer {spec!r}: the file {path} does not exist; {fix}"], "plugins")
    module_name = f"{PLUGIN}{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    module = sys.modules.get(module_name) or _same_source(spec)
    if module is None:
        loader = _SourceOnly(module_name, str(path.absolute()))
        module_spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module
        try:
            module_spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            at = line_of(error, str(path.absolute()))
            problem = f"mixer {spec!r}: importing {path} failed{at}: {type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError):
                problem += "; install it, or put the folder of a file of yours on PYTHONPATH"
            raise ConfigError([problem], "plugins") from error
        trust.accept([loader.digest])
    mixer = getattr(module, class_name, None)
    if mixer is None:
        names = [name for name, member in vars(module).items() if getattr(member, "__module__", None) == module_name]
        raise ConfigError([f"mixer {spec!r}: {path} has no {class_name}; {nearest(class_name, names)}"], "plugins")
    if getattr(mixer, "name", None) not in MIXERS:
        if getattr(mixer, "name", None) in CHANNELS:
            names = [name for name, member in vars(module).items() if member in MIXERS.values()]
            fix = f"give {path}:{names[0]}" if names else "write it into the file of a token mixer and give that one"
            problem = f"{class_name} is a channel mixer; {fix}, and layouts may name both layers of the file"
            raise ConfigError([f"mixer {spec!r}: {problem}"], "plugins")
        names = [name for name, member in vars(module).items() if member in MIXERS.values()]
        fix = f"{class_name} is not a mixer; did you mean {names[0]!r}?" if names else ""
        fix = fix or "decorate the class with @register_mixer(name, ConfigClass)"
        raise ConfigError([f"mixer {spec!r}: {fix}"], "plugins")
    return mixer.name


def _mixers_in(path: str) -> str:
    """Returns `, here path:Class` with the first class of a Python file that a decorator registers, or nothing."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and any(
            "register_mixer" in ast.dump(d) for d in statement.decorator_list
        ):
            return f", here {path}:{statement.name}"
    return ""


def line_of(error: BaseException, file: str | None) -> str:
    """Returns where in a user's file an error came from, as " in line 7 (`x = y`)"; "" if it came from elsewhere."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1].lineno} (`{lines[-1].line}`)" if lines else ""


def _same_source(spec: str) -> ModuleType | None:
    """Returns the module of a registered mixer that came from another file of the same content, such as a copy."""
    digest, mixer = trust.plugin_digest(spec), spec.rpartition(":")[2]
    for name, module in list(sys.modules.items()):
        if name.startswith(PLUGIN) and getattr(module.__loader__, "digest", None) == digest:
            mixer_class = getattr(module, mixer, None)
            if mixer_class is not None and MIXERS.get(getattr(mixer_class, "name", None)) is mixer_class:
                return module
    return None


class _SourceOnly(importlib.machinery.SourceFileLoader):
    """Imports a file from its source. A received folder may contain bytecode (`__pycache__`) of other code.

    Attributes:
        digest: SHA-256 of the source that was imported.
    """

    digest = ""

    def get_code(self, fullname: str):
        source = self.get_data(self.path)
        self.digest = hashlib.sha256(source).hexdigest()
        return self.source_to_code(source, self.path)


def _register(registry: dict, name: str, config: type[Config], also: tuple[str, ...]):
    def decorate(cls):
        known = registry.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"layer name {name!r} is taken by {known.__module__}.{known.__qualname__}; choose another")
        _check_methods(cls)
        cls.name, cls.Config, cls.also = name, config, also
        registry[name] = cls
        return cls

    return decorate


def _check_methods(cls: type[Layer]) -> None:
    """Raises ValueError if a method has the name of one that Linnet calls, but cannot be called as that one."""
    for base in [base for base in (Mixer, Layer) if issubclass(cls, base)]:
        for name, method in vars(base).items():
            override = getattr(cls, name, None)
            if not inspect.isfunction(method) or not inspect.isfunction(override) or name.startswith("_"):
                continue
            takes = list(inspect.signature(method).parameters)
            needs = [
                key
                for key, parameter in inspect.signature(override).parameters.items()
                if parameter.default is parameter.empty
                and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            ]
            if len(needs) > len(takes):
                arguments = ", ".join(takes[1:]) or "no arguments"
                raise ValueError(
                    f"{cls.__name__}.{name} needs {', '.join(needs[1:])}, but Linnet calls the method of this name "
                    f"with {arguments}; rename yours"
                )


def _find(registry: dict, kind: str, name: str):
    if name not in registry:
        raise ConfigError([f"{kind} {name!r} is unknown; {nearest_name(name, registry)}"], "layout")
    return registry[name]
