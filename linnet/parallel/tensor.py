"""Tensor parallelism: each rank of a group holds some heads or channels of every layer, and some rows of the embedding.

`split` cuts the parameters and buffers of a model to this rank's parts, by the words of `Mixer.tp_plan`. They stay
ordinary tensors under their own names, so that ops, FSDP and optimizers see nothing new. Per layer and direction there
is one all-reduce of [B, T, D], and one of [B, T] for a norm over the split width (paper 001, equations 38 to 42).

After each backward pass, `reduce_partial` completes the gradients of the parameters that the layers hold whole.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.layers.base import CHANNELS, MIXERS, Channel, Mixer
from linnet.layers.norm import SRMSNorm
from linnet.models.causal_lm import CausalLM, empty_model
from linnet.models.config import ModelConfig
from linnet.ops.tensor_parallel import Entered, Split, columns, enter, enter_columns, leave, rowwise

WORDS = ("colwise", "rowwise", "split", "split_norm", "partial", "whole")
Cuts = Mapping[str, tuple[int, tuple[int, ...]]]  # name of a cut tensor -> its cut dimension, and its whole shape
VOCABULARY = "vocabulary"  # the word of the embedding and the head: the rows are split, unevenly if need be


@dataclass(frozen=True)
class Place:
    """One parameter or buffer of a split model.

    Attributes:
        word: how it is split, one of WORDS or VOCABULARY.
        dim: the dimension that is cut, None for a tensor that each rank holds whole.
        shape: the shape of the whole tensor.
    """

    word: str
    dim: int | None
    shape: torch.Size


def split(model: CausalLM, group: dist.ProcessGroup) -> None:
    """Cuts a model, on a device or on meta, to this rank's part, in place. Call it before recompute, compile and FSDP.

    Raises:
        ValueError: the model cannot be split over this many ranks; `problems` says so before work starts.
    """
    how = Split.over(group)
    if reasons := _problems(model, how.size):
        raise ValueError("; ".join(reasons))
    places = _places(model)
    for name, place in places.items():
        _cut(model, name, place, how)
    for layer in model.backbone.parts():
        _prepare(layer, how)
    model.tp = how
    model.embedding.forward = partial(_look_up, model.embedding, how, model.config.vocab_size)
    model.tp_places = places


def split_dims(model: nn.Module) -> dict[str, int | None]:
    """Returns the dimension in which each parameter and buffer of a model is cut; None if each rank holds it whole.

    Call it after `split`; a model that was not split is whole. It works under FSDP and compilation too.
    """
    places = getattr(model, "tp_places", {})
    return {name: places[name].dim if name in places else None for name, _, _ in _tensors(model)}


def whole_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Returns the shape of each parameter and buffer in the model before it was split."""
    places = getattr(model, "tp_places", {})
    return {name: places[name].shape if name in places else tensor.shape for name, _, tensor in _tensors(model)}


def cuts(model: nn.Module) -> Cuts:
    """Returns the dimension and the whole shape of each parameter and buffer that is cut."""
    shapes, dims = whole_shapes(model), split_dims(model)
    return {name: (dim, tuple(shapes[name])) for name, dim in dims.items() if dim is not None}


def slice_of(model: CausalLM, name: str, whole: Tensor) -> Tensor:
    """Returns this rank's part of a whole parameter or buffer, as a view; `whole` itself if it is not cut.

    Raises:
        ValueError: `whole` does not have the shape of this tensor in the model before it was split.
    """
    place = getattr(model, "tp_places", {}).get(name)
    if place is None or place.dim is None:
        return whole
    if whole.shape != place.shape:
        raise ValueError(f"{name}: a whole tensor has shape {list(place.shape)}, not {list(whole.shape)}")
    return model.tp.cut(whole, place.dim)


def reduce_partial(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Sums the gradients of `partial` parameters over the ranks, in place, in one all-reduce per dtype.

    Call it once after the last backward pass of a step, before the norm of the gradients. Gradients may be sharded by
    FSDP. A parameter without a gradient on this rank must have none on the other ranks of the group.
    """
    places = getattr(model, "tp_places", {})
    if not any(place.word == "partial" for place in places.values()):
        return
    gradients: dict[torch.dtype, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if name in places and places[name].word == "partial" and parameter.grad is not None:
            gradient = parameter.grad
            gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            gradients.setdefault(gradient.dtype, []).append(gradient)
    with torch.no_grad():
        for parts in gradients.values():
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=group)
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))


def problems(config: ModelConfig, tp: int) -> list[str]:
    """Returns why a model cannot be split over `tp` ranks, each as "key: what is wrong; the fix"."""
    return [] if tp == 1 else _problems(empty_model(config, "meta"), tp)


def words(layer: Mixer | Channel) -> dict[str, str]:
    """Returns the word of every parameter and buffer of a layer, from its `tp_plan`; {} for a layer without a plan.

    Raises:
        ValueError: the plan has an unknown word or path, or a tensor has no word or two; lists all of these.
    """
    plan, by_name, wrong = layer.tp_plan(), {}, []
    if not plan:
        return {}
    for path, word in plan.items():
        if word not in WORDS:
            wrong.append(f"{path}: the word {word!r} is unknown; use {', '.join(WORDS)}")
            continue
        try:
            owner = _find(layer, path)
        except AttributeError:
            wrong.append(f"{path}: the layer has no such submodule, parameter or buffer; correct the path")
            continue
        if word in ("colwise", "rowwise") and owner is not None and type(owner) is not nn.Linear:
            wrong.append(f"{path}: {word} is for torch.nn.Linear, not for {type(owner).__name__}; write another word")
        names = [path] if isinstance(owner, Tensor) else [f"{path}.{name}" for name, _, _ in _tensors(owner)]
        for name in names:
            if name in by_name:
                wrong.append(f"{name}: has two words; leave one out")
            by_name[name] = word
    names = [name for name, _, _ in _tensors(layer) if not name.startswith("own_")]  # not of a shared module built here
    if missing := [name for name in names if name not in by_name]:
        have = "has" if len(missing) == 1 else "have"
        wrong.append(f"{', '.join(missing)}: {have} no word; write one of {', '.join(WORDS)} for each")
    if {"colwise", "split"} & set(by_name.values()):
        # A whole one ends a layer that sums over the ranks itself.
        ends = [path for path, word in plan.items() if word in ("rowwise", "whole") and _ends(_find(layer, path))]
        if not ends:
            wrong.append("no rowwise layer ends it; set ends_residual = True on the last projection")
    if wrong:
        raise ValueError("; ".join(f"{layer.name}.tp_plan: {problem}" for problem in wrong))
    return by_name


def _problems(model: CausalLM, tp: int) -> list[str]:
    reasons: dict[str, None] = {}
    for layer in model.backbone.parts():
        reasons |= dict.fromkeys(_layer_problems(layer, tp))
    vocab = model.config.vocab_size
    if (tp - 1) * -(-vocab // tp) >= vocab:
        reasons[f"model.vocab_size: {vocab} rows leave one of {tp} ranks without any; use a smaller parallel.tp"] = None
    if model.config.head_bias:
        reasons["model.head_bias: true, but a head with a bias cannot be split; use false, or parallel.tp: 1"] = None
    return list(reasons)


def _layer_problems(layer: Mixer | Channel, tp: int) -> list[str]:
    kind = "mixer" if isinstance(layer, Mixer) else "channel mixer"
    if problems := layer.tp_problems():
        return [f"model.options.{layer.within}{layer.name}.{problem}, or parallel.tp: 1" for problem in problems]
    try:
        named = words(layer)
    except ValueError as error:
        return [str(error)]
    if not named:
        known = ", ".join(sorted(_with_plan(MIXERS if kind == "mixer" else CHANNELS)))
        return [
            f"parallel.tp: {tp}, but the {kind} {layer.name} has no tensor-parallel plan; use parallel.dp_shard (FSDP) "
            f"instead, write its tp_plan, or use one of {known}"
        ]
    options = f"model.options.{layer.within}{layer.name}"
    reasons = [
        f"{options}.{path.rpartition('.')[2]}: no {type(norm).__name__} over a split width; use rmsnorm or srmsnorm, "
        "or parallel.tp: 1"
        for path, word in layer.tp_plan().items()
        if word == "split_norm" and not isinstance(norm := _find(layer, path), SRMSNorm | None)
    ]
    counts = {}
    if set(named.values()) - {"partial", "whole"}:
        counts = {key: count for key in layer.tp_counts if isinstance(count := getattr(layer, key, None), int)}
    for key, count in counts.items():
        if count % tp and count not in list(counts.values())[: list(counts).index(key)]:
            where = f"{options}.{key}" if key in layer.Config.model_fields else f"{layer.name}: its {key}"
            reasons.append(f"{where}: {count} is not a multiple of parallel.tp: {tp}; change one of the two")
    if not reasons:
        for name, place in _layer_places(layer).items():
            if place.dim is not None and (place.dim >= len(place.shape) or place.shape[place.dim] % tp):
                reasons.append(
                    f"{layer.name}: {name} has shape {list(place.shape)}, and parallel.tp: {tp} does not divide "
                    f"dimension {place.dim}; change one of the two"
                )
    return reasons


def _with_plan(registry: dict[str, type]) -> list[str]:
    return [name for name, cls in registry.items() if cls.tp_plan not in (Mixer.tp_plan, Channel.tp_plan)]


def _places(model: CausalLM) -> dict[str, Place]:
    """Returns the places of the tensors that are split, and of all others inside split layers, by their names."""
    places = {"embedding.weight": Place(VOCABULARY, 0, model.embedding.weight.shape)}
    if model.head is not None:
        places["head.weight"] = Place(VOCABULARY, 0, model.head.weight.shape)
    prefixes = {id(module): name for name, module in model.named_modules()}
    for layer in model.backbone.parts():
        prefix = prefixes[id(layer)]
        places |= {f"{prefix}.{name}": place for name, place in _layer_places(layer).items()}
    return places


def _layer_places(layer: Mixer | Channel) -> dict[str, Place]:
    tensors = {name: tensor for name, _, tensor in _tensors(layer)}
    return {name: Place(word, _dim(word, name), tensors[name].shape) for name, word in words(layer).items()}


def _dim(word: str, name: str) -> int | None:
    match word:
        case "partial" | "whole":
            return None
        case "rowwise":  # the bias is added to the sum
            return 1 if name.endswith("weight") else None
    return 0


def _cut(model: nn.Module, name: str, place: Place, how: Split) -> None:
    """Replaces one tensor by this rank's part, and the widths that its module keeps."""
    if place.dim is None:
        return
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    whole = getattr(module, attribute)
    part = how.cut(whole.detach(), place.dim).clone()
    setattr(module, attribute, nn.Parameter(part, whole.requires_grad) if isinstance(whole, nn.Parameter) else part)
    if attribute == "weight":
        match module:
            case nn.Linear():
                module.out_features, module.in_features = part.shape
            case nn.Embedding():
                module.num_embeddings = part.shape[0]


def _prepare(layer: Mixer | Channel, how: Split) -> None:
    """Makes a layer whose tensors are cut compute its part: counts, norms, and the sums on the way in and out."""
    named = words(layer)
    if not set(named.values()) - {"partial", "whole"}:
        return
    owners = {id(owner): owner for name, owner, _ in _tensors(layer) if named.get(name) == "split"}
    for module in {id(layer): layer, **owners}.values():
        for key in layer.tp_counts:
            if isinstance(count := getattr(module, key, None), int):
                setattr(module, key, count // how.size)
    entry = Entry(how)
    for path, word in layer.tp_plan().items():
        module = _find(layer, path)
        if word == "colwise" and module is not None:
            module.forward = partial(entry.multiply, module)
            entry.linears.append(module)
        elif word == "rowwise":
            module.forward = partial(_rowwise, module, how, not _ends(module))
        elif word == "split_norm":
            module.dim, module.tp = module.dim // how.size, how
    layer.tp = how
    layer.register_forward_pre_hook(entry)


class Entry:
    """The way into a split layer: a hook before its forward, and the forward of its colwise layers.

    In eager training the backward multiplies the gradients of the colwise weights while that of the input is summed.
    Compilers and fake tensors get the plain form.
    """

    def __init__(self, how: Split):
        self.how = how
        self.linears: list[nn.Linear] = []
        self.entered: dict[nn.Linear, Entered] = {}

    def __call__(self, layer: nn.Module, arguments: tuple) -> tuple:
        x, *others = arguments
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or type(x) is not Tensor or x.is_meta:
            return enter(x, self.how), *others
        linears = [linear for linear in self.linears if linear.weight.requires_grad]
        x, entered = enter_columns(x, [linear.weight for linear in linears], self.how)
        self.entered = dict(zip(linears, entered, strict=True))
        return x, *others

    def multiply(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """Returns the product of a colwise layer, and drops what the hook left, so that no graph outlives its step."""
        if torch.compiler.is_compiling() or linear not in self.entered:
            return F.linear(x, linear.weight, linear.bias)
        return columns(x, linear.bias, self.entered.pop(linear))


def _rowwise(linear: nn.Linear, how: Split, inside: bool, x: Tensor) -> Tensor:
    """Returns the whole product of a rowwise layer. `inside`: split tensors of the layer read it."""
    y = rowwise(x, linear.weight, how)
    y = y if linear.bias is None else y + linear.bias.to(y.dtype)
    return enter(y, how) if inside else y


def _look_up(embedding: nn.Embedding, how: Split, vocab: int, tokens: Tensor) -> Tensor:
    """Returns the rows of tokens [...] from a table whose rows are split: [..., D]."""
    first, count = how.part(vocab)
    index = tokens - first
    mask = (index >= 0) & (index < count)
    rows = F.embedding(index.where(mask, 0), embedding.weight)
    return leave(rows.where(mask[..., None], 0.0), how)


def _ends(linear: nn.Module) -> bool:
    return bool(getattr(linear, "ends_residual", False))


def _find(layer: nn.Module, path: str) -> nn.Module | Tensor | None:
    """Returns the submodule, parameter or buffer at a path, None for one that the options leave out."""
    member: nn.Module | Tensor | None = layer
    for name in path.split("."):
        member = getattr(member, name)
    return member


def _tensors(module: nn.Module | None) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yields name, owner and value of each parameter and buffer. A tied tensor comes once, by its first name."""
    if module is None:
        return
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for name, tensor in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{path}.{name}" if path else name), owner, tensor
