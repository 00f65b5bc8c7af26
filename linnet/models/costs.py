"""Parameters, FLOPs in three conventions and the state of a model of any kind, from its layers. Allocates nothing.

`flops_exact` sums the FLOP formulas of every matrix product and registered op with the real widths (2 per multiply-add,
full tiles, attention without the causal discount, no element-wise work), forward and backward, plus the model's own
`head_flops`. `flops_causal` is `flops_exact` without the pairs of tokens that the mask of softmax attention hides:
kernels skip them, but compute the chunks of linear attention whole. `flops_paper` is the convention of paper 000, Table
1 (ideal GLU 8d/3, leading terms, no embedding or head): three times the forward sum of `flops_paper` over the layers.
`flops_004` is that of paper 004, appendix C.4 (real widths, the softmax, embedding and head as 4LDV), likewise.

A sequence has `seq_len` tokens. Of a model of images, `seq_len` None is one image of its `image_size`, and no other
number of tokens can be counted: change `image_size` in the configuration.
"""

import copy
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch

from linnet.config import ConfigError
from linnet.layers.base import MIXERS, Mixer
from linnet.layers.block import Block
from linnet.layers.non_causal import mix_all, passes
from linnet.layers.positions import Grid
from linnet.models.backbone import Backbone
from linnet.models.config import ModelConfig
from linnet.models.kinds import KINDS, empty_of, kind_of
from linnet.models.stack import StackConfig
from linnet.ops.compat_torch import OpOverload, TorchDispatchMode

PAPER_BATCH, PAPER_SEQ_LEN = 480, 8192  # one optimizer step of paper 000


def count_parameters(config: StackConfig) -> tuple[int, int]:
    """Returns total and non-embedding parameters: without input embedding or patches, learned positions and head."""
    return _parameters(*_key(config))


def flops_exact(config: StackConfig, seq_len: int | None = None, batch: int = 1, training: bool = True) -> float:
    """Returns the FLOPs of `batch` sequences of `seq_len` tokens: forward, backward (with `training`) and head."""
    return batch * model_flops(meta_of(config), seq_len, training)


def model_flops(model: torch.nn.Module, seq_len: int | None = None, training: bool = True) -> float:
    """Returns the FLOPs of one sequence or image through any model with `config`, `backbone` and `head_flops(seq_len)`.

    A model may also have `input_flops(seq_len)`, forward FLOPs on inputs that need no gradient (backward costs as much
    again, for the weights), and `grid`, the grid of its tokens. Backbones are counted once per shape and length: models
    that differ in vocabulary or head share the count.
    """
    seq_len = _tokens(model, seq_len)
    outside = (3.0 if training else 1.0) * model.head_flops(seq_len)
    if hasattr(model, "input_flops"):
        outside += (2.0 if training else 1.0) * model.input_flops(seq_len)
    key = (*_backbone_key(model.config), seq_len, training)
    if key not in _backbone_flops:
        meta = model if next(model.parameters()).is_meta else meta_model(*key[:2])
        _backbone_flops[key] = _sum_over_layers(
            meta.backbone, lambda layer: _count(copy.deepcopy(layer), meta, seq_len, training)
        )
    return outside + _backbone_flops[key]


def flops_paper(config: StackConfig, seq_len: int | None = None) -> float:
    """Returns the training FLOPs of one sequence as paper 000 counts them (Table 1)."""
    return _paper(*_key(config), seq_len)


def counted_by_weights(config: StackConfig) -> list[str]:
    """Returns the mixers from outside the package that do not define `flops_paper`: two FLOPs per weight and token."""
    names = {cls: name for name, cls in MIXERS.items()}
    parts = {type(part) for part in meta_model(*_key(config)).backbone.parts() if isinstance(part, Mixer)}
    foreign = [cls for cls in parts if not cls.__module__.startswith("linnet.")]
    return sorted(names.get(cls, cls.__name__) for cls in foreign if cls.flops_paper is Mixer.flops_paper)


def flops_004(config: StackConfig, seq_len: int | None = None) -> float:
    """Returns the training FLOPs of one sequence by the formulas of paper 004, appendix C.4.

    The formulas are of a forward pass; training is three times that. Embedding and head are 4LDV for the vocabulary V;
    a model without one has no such term.
    """
    seq_len = _tokens(meta_of(config), seq_len)
    vocabulary = 12.0 * seq_len * config.d_model * getattr(config, "vocab_size", 0)
    return vocabulary + _paper(*_key(config), seq_len, "flops_004")


def flops_causal(config: StackConfig, seq_len: int | None = None, batch: int = 1, training: bool = True) -> float:
    """Returns `flops_exact` without the pairs of tokens that the mask of softmax attention hides."""
    masked = _masked(*_backbone_key(config), seq_len)
    return flops_exact(config, seq_len, batch, training) - batch * (3.0 if training else 1.0) * masked


def active_parameters(config: StackConfig) -> int:
    """Returns the non-embedding parameters that one token uses: of several experts, only those it is routed to."""
    return count_parameters(config)[1] - sum(part.inactive_parameters() for part in meta_of(config).backbone.parts())


def attention_share(config: StackConfig) -> float | None:
    """Returns the share of softmax attention among the mixers of all blocks; None for a model without mixers."""
    blocks = meta_of(config).backbone.blocks
    mixers = [mixer for block in blocks if block.mixer is not None for mixer in block.mixer.parts()]
    return sum(mixer.name in ("attention", "mla") for mixer in mixers) / len(mixers) if mixers else None


def state_numbers(config: StackConfig, context_length: int) -> tuple[int, int]:
    """Returns how many numbers one sequence carries between tokens, as paper 004 counts them: fixed and dynamic.

    The fixed part is the recurrent states (`TensorSpec.size`) and the caches of windowed attention. The dynamic part is
    the caches that grow with the context: 2 x KV width x `context_length` per layer of attention.
    """
    return _state_numbers(*_backbone_key(config), context_length)


def state_bytes(config: StackConfig, context_length: int) -> int:
    """Returns the bytes carried between tokens for one sequence: recurrent states in float32, KV caches in bfloat16."""
    return _state(*_key(config), context_length)


def meta_of(config: StackConfig) -> torch.nn.Module:
    """Returns the model of any configuration on the meta device."""
    return meta_model(*_key(config))


# Keys that no layer depends on. Those of text are all that paper 000's models have; the rest are of images.
_OUTSIDE_BACKBONE = set("vocab_size tie_embeddings embedding_scale logit_scale init_std mean std head_bias".split())


@lru_cache(maxsize=64)
def meta_model(config_json: str, kind: str = "causal_lm") -> torch.nn.Module:
    """Returns a model of one kind on the meta device, from the JSON of its configuration (which is hashable)."""
    try:
        return empty_of(KINDS[kind].config.model_validate_json(config_json), "meta")
    except RuntimeError as error:  # a matrix has more elements than 64 bits count
        reason = str(error).splitlines()[0]
        message = f"model: has a matrix that no machine can hold ({reason}); lower d_model, inner or num_experts"
        raise ConfigError([message], "model") from None


def _key(config: StackConfig) -> tuple[str, str]:
    return config.model_dump_json(), kind_of(config).name


def _backbone_key(config: StackConfig) -> tuple[str, str]:
    return config.model_dump_json(exclude=_OUTSIDE_BACKBONE), kind_of(config).name


def _tokens(model: torch.nn.Module, seq_len: int | None) -> int:
    """Returns the tokens of a sequence or image. Raises ValueError if a model of images has another number."""
    grid: Grid | None = getattr(model, "grid", None)
    if seq_len is None and grid is None:
        raise ValueError("seq_len: is missing; a model of sequences needs the number of tokens")
    if grid is not None and seq_len not in (None, grid.tokens):
        raise ValueError(
            f"seq_len: {seq_len} is not the {grid.tokens} tokens of the model's images; leave it out, or change "
            "image_size in the configuration"
        )
    return seq_len if grid is None else grid.tokens


@lru_cache(maxsize=4096)
def _parameters(config_json: str, kind: str) -> tuple[int, int]:
    model = meta_model(config_json, kind)
    total, inside = (sum(p.numel() for p in module.parameters()) for module in (model, model.backbone))
    positions = model.backbone.positions
    return total, inside - (0 if positions is None else sum(p.numel() for p in positions.parameters()))


_backbone_flops: dict[tuple[str, str, int, bool], float] = {}  # configuration, kind, tokens, training


def _sum_over_layers(backbone: Backbone, cost: Callable[[torch.nn.Module], float]) -> float:
    """Returns the cost of all layers; layers of the same shape, state and options are counted once and multiplied."""
    counted: dict[tuple, float] = {}
    total = 0
    for layer in backbone.layers():
        kind = repr(layer.layers) if isinstance(layer, Block) else type(layer)
        shapes = tuple((name, p.shape) for name, p in layer.named_parameters())
        state = tuple(sorted((name, spec.shape) for name, spec in layer.state_spec(1, 1 << 20).items()))
        if (kind, shapes, state) not in counted:
            counted[kind, shapes, state] = cost(layer)
        total += counted[kind, shapes, state]
    return total


# Of operands of one floating-point type, these give that type and the shape and strides of the largest.
_ELEMENTWISE = frozenset("mul add sub rsub div pow neg exp log sqrt rsqrt sigmoid silu tanh gelu relu softplus".split())


class _Counter(TorchDispatchMode):
    """Counts FLOPs as PyTorch's counter does, in half the time, on tensors of the meta device alone.

    PyTorch finds shapes of element-wise operations in Python, which takes longer than the matrix products that count.

    Attributes:
        flops: FLOPs of the operations that have a formula.
    """

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # brings Triton with it

        super().__init__()
        self.flops = 0
        self._formulas = flop_registry

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            result = func(*args, **kwargs)
            self.flops += formula(*args, **kwargs, out_val=result)
            return result
        if (like := _result_like(func, args)) is not None:
            # On this device `empty_like` is Python code as well.
            return like.new_empty(like.shape) if like.is_contiguous() else torch.empty_like(like)
        with self:
            parts = func.decompose(*args, **kwargs)  # in inference mode, operations come here whole
        return func(*args, **kwargs) if parts is NotImplemented else parts


def _result_like(func: OpOverload, args: tuple) -> torch.Tensor | None:
    """Returns an operand with the type and layout of the result of an element-wise operation; None if in doubt."""
    if func.overloadpacket.__name__.removesuffix("_backward") not in _ELEMENTWISE:
        return None
    if not all(isinstance(x, torch.Tensor | int | float) for x in args):
        return None
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    largest = max(tensors, key=torch.Tensor.numel)
    if not largest.is_floating_point() or any(x.dtype != largest.dtype for x in tensors):
        return None
    shape = largest.shape
    for x in tensors:
        sizes = zip(reversed(x.shape), reversed(shape), strict=False)
        if x.ndim > largest.ndim or any(size not in (1, wide) for size, wide in sizes):
            return None
    return largest


def _count(layer: torch.nn.Module, model: torch.nn.Module, seq_len: int, training: bool) -> float:
    x = torch.empty(1, seq_len, model.config.d_model, device="meta", requires_grad=training)
    grid = getattr(model, "grid", None)
    flops = layer.flops(seq_len)
    with _Counter() as counter, torch.set_grad_enabled(training):
        if isinstance(layer, Block):
            more = {"condition": torch.empty_like(x[:, 0], requires_grad=training)} if layer.takes_condition else {}
            y, *_ = layer(x, grid=grid, **more)
        elif model.backbone.causal:
            y, _ = layer(x)
        else:
            y = mix_all(layer, x, model.backbone.scan, grid=grid)
            flops *= passes(layer, model.backbone.scan)
        if training:
            y.sum().backward()
    layer.zero_grad(set_to_none=True)
    return counter.flops + (3.0 if training else 1.0) * flops


@lru_cache(maxsize=4096)
def _paper(config_json: str, kind: str, seq_len: int | None, convention: str = "flops_paper") -> float:
    model = meta_model(config_json, kind)
    return 3.0 * model.backbone.flops_paper(_tokens(model, seq_len), convention)


@lru_cache(maxsize=4096)
def _state(config_json: str, kind: str, context_length: int) -> int:
    def cost(layer: torch.nn.Module) -> int:
        specs = copy.deepcopy(layer).to(torch.bfloat16).state_spec(1, context_length)
        return sum(spec.bytes for spec in specs.values())

    backbone = meta_model(config_json, kind).backbone
    if not backbone.causal:
        return 0
    return _sum_over_layers(backbone, cost) + sum(spec.bytes for spec in backbone.own_state().values())


@lru_cache(maxsize=4096)
def _masked(config_json: str, kind: str, seq_len: int | None) -> float:
    model = meta_model(config_json, kind)
    if not model.backbone.causal:
        return 0.0
    mixers = [part for part in model.backbone.parts() if isinstance(part, Mixer)]
    return sum(mixer.flops_masked(seq_len) for mixer in mixers)


@lru_cache(maxsize=4096)
def _state_numbers(config_json: str, kind: str, context_length: int) -> tuple[int, int]:
    def caches(layer: torch.nn.Module, length: int) -> dict[str, int]:
        specs = layer.state_spec(1, length).items()
        return {name: prod(s.shape) for name, s in specs if s.dtype.is_floating_point and not s.counted}

    fixed = dynamic = 0
    backbone = meta_model(config_json, kind).backbone
    for layer in backbone.layers() if backbone.causal else ():
        fixed += sum(spec.size for spec in layer.state_spec(1, context_length).values())
        longer, shortest = caches(layer, 2 * context_length), caches(layer, 1)
        for name, now in caches(layer, context_length).items():  # a layer of mixers has caches of several kinds
            if longer[name] > now:
                dynamic += now
            elif now > shortest[name]:  # a window limits it; buffers of inputs do not depend on the context
                fixed += now
    return fixed, dynamic


def summary(name: str, config: ModelConfig, context_length: int, counts: Mapping[str, Any] | None = None) -> dict:
    """Returns one row of `linnet models --json`: the shape and every count of a model, in full precision.

    Args:
        counts: the result of `count`, if it is known.
    """
    counts = counts or count(config, context_length)
    return {
        "name": name,
        "layout": config.layout,
        "num_layers": config.num_layers,
        "d_model": config.d_model,
        "num_heads": config.shown_option("num_heads"),
        "glu_width": counts["glu_width"],
        "vocab_size": config.vocab_size,
        "params_total": counts["params_total"],
        "params_non_embedding": counts["params_non_embedding"],
        "pflops_per_step": counts["pflops_per_step"],
        "pflops_per_step_exact": counts["pflops_per_step_exact"],
        "context_length": context_length,
        "state_bytes": counts["state_bytes"],
    }


def count(config: ModelConfig, context_length: int) -> dict[str, Any]:
    """Returns the parameters, FLOPs and state bytes of a model.

    `pflops_per_step` is in 10^15 FLOPs per optimizer step at the batch of paper 000 (480 x 8192), as in its Table 7.
    """
    total, non_embedding = count_parameters(config)
    return {
        "glu_width": _glu_width(config),
        "params_total": total,
        "params_non_embedding": non_embedding,
        "pflops_per_step": PAPER_BATCH * flops_paper(config, PAPER_SEQ_LEN) / 1e15,
        "pflops_per_step_exact": flops_exact(config, PAPER_SEQ_LEN, PAPER_BATCH) / 1e15,
        "state_bytes": state_bytes(config, context_length),
    }


def image_summary(name: str, config: Any, counts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns one row of `linnet models --vision --json`: the shape and every count of a model of images.

    Args:
        config: of a kind of model with `image_size` and `patch`.
        counts: the result of `image_count`, if it is known.
    """
    return {
        "name": name,
        "kind": kind_of(config).name,
        "layout": config.layout,
        "num_layers": config.num_layers,
        "d_model": config.d_model,
        "num_heads": config.shown_option("num_heads"),
        "image_size": config.image_size,
        "patch": config.patch,
        "channels": config.channels,
        **(counts or image_count(config)),
    }


def image_count(config: StackConfig) -> dict[str, Any]:
    """Returns the parameters of a model of images, its tokens per image, and its FLOPs per image of `image_size`."""
    total, non_embedding = count_parameters(config)
    return {
        "glu_width": _glu_width(config),
        "tokens": meta_of(config).grid.tokens,
        "params_total": total,
        "params_non_embedding": non_embedding,
        "flops_forward": flops_exact(config, training=False),
        "flops_training": flops_exact(config),
    }


def _glu_width(config: StackConfig) -> int | None:
    """Returns the inner width of the first channel mixer, as built (the layer resolves an option of 0)."""
    for block in meta_of(config).backbone.blocks:
        if hasattr(block.channel, "down_proj"):
            return block.channel.down_proj.in_features
    return None
