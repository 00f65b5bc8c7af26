"""A causal language model: embedding, backbone and head, with weights that depend only on the seed."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from linnet.config import shown
from linnet.layers import dropout
from linnet.layers.norm import build_norm
from linnet.layers.positions import build_positions
from linnet.models.backbone import Backbone, ModelState, make_layers
from linnet.models.config import ModelConfig
from linnet.models.parametrisation import role_of
from linnet.models.stack import StackConfig
from linnet.ops import sequence
from linnet.ops.cross_entropy import cross_entropy_reference, is_whole, linear_cross_entropy
from linnet.ops.cross_entropy.split import split_cross_entropy
from linnet.ops.matvec import linear
from linnet.ops.tensor_parallel import Split, enter, gather

M = TypeVar("M", bound=nn.Module)
IGNORE = -100  # a target that is not scored


class CausalLM(nn.Module):
    """Maps tokens to next-token logits. `forward` computes all positions, `step` one token; the two agree.

    Attributes:
        tp: how tensor parallelism splits the rows of embedding and head, if it does.
        logit_mask: [vocab], added to all logits, if it is set (`linnet.models.synthetic.pad_vocabulary`).
    """

    tp: Split | None = None
    logit_mask: Tensor | None

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.backbone = Backbone(config)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)
        self.register_buffer("logit_mask", None, persistent=False)

    def forward(self, tokens: Tensor, states: ModelState | None = None, cu_seqlens: Tensor | None = None):
        """Returns the logits of every position.

        Args:
            tokens: int64 [B, T].
            states: states to continue from, of `init_state` or an earlier call; None in training.
            cu_seqlens: int32 [N+1] document boundaries with B = 1; state and positions restart at each.

        Returns:
            logits [B, T, vocab] and the states after the last token (None if none were given).
        """
        x, states = self.backbone(self.embed(tokens), states, cu_seqlens)
        return self.logits(x), states

    def loss(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the summed negative log-likelihood (nats, at least float32) and the number of targets except -100.

        Inside `linnet.ops.sequence.sequence_parallel` every rank is given the whole rows, int64 [B, T] (and the whole
        `cu_seqlens`), and returns the two sums over its own span of them.
        """
        if sequence.span() is not None:
            tokens, targets, cu_seqlens = cut_rows(tokens, targets, cu_seqlens, self.backbone.least_span())
        x, _ = self.backbone(self.embed(tokens), cu_seqlens=cu_seqlens)
        return self.nll(x, targets), (targets != IGNORE).sum()

    def step(self, tokens: Tensor, states: ModelState) -> tuple[Tensor, ModelState]:
        """Computes one token: int64 [B] and the states after the previous token give logits [B, vocab] and new states.

        A layer whose state has constant size updates it in place.
        """
        x, states = self.backbone.step(self.embed(tokens), states)
        return self.logits(x), states

    def prefill(self, tokens: Tensor, states: ModelState) -> tuple[Tensor, ModelState]:
        """Runs `forward` from states; returns the logits [B, vocab] of the last token only, and the new states."""
        x, states = self.backbone(self.embed(tokens), states)
        return self.logits(x[:, -1]), states

    def init_state(self, batch: int, context_length: int, device=None, dtype: torch.dtype | None = None) -> ModelState:
        """Returns the states before the first token; `context_length` is the capacity of KV caches in tokens.

        More tokens than that raise ValueError on a CPU. On a GPU the first tokens are lost without an error.
        `dtype` None selects the dtypes that the layers specify, or float64 for a model in float64.
        """
        if dtype is None and self.embedding.weight.dtype == torch.float64:
            dtype = torch.float64
        return self.backbone.init_state(batch, context_length, device, dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the input of the backbone: int64 [...] -> [..., D]."""
        x = self.embedding(tokens)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def nll(self, x: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of the negative log-likelihood of targets [...] given the backbone's output [..., D]."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        x = self._to_head(x)
        if self.tp is not None:
            return split_cross_entropy(x, weight, targets, self.tp, self.config.vocab_size, ignore_index=IGNORE)
        plain = self.logit_mask is None and (self.head is None or self.head.bias is None)
        if plain and is_whole(weight):
            return linear_cross_entropy(x, weight, targets, ignore_index=IGNORE)
        return cross_entropy_reference(self._logits(x), targets, IGNORE)

    def head_flops(self, seq_len: int) -> float:
        """Returns the forward FLOPs of the head for one sequence: the logits of every token."""
        return 2.0 * seq_len * self.config.d_model * self.config.vocab_size

    def logits(self, x: Tensor) -> Tensor:
        """Returns the scores of the next token from the output of the backbone: [..., D] -> [..., vocab]."""
        return self._logits(self._to_head(x))

    def _to_head(self, x: Tensor) -> Tensor:
        ratio = self.config.width_ratio * self.config.logit_scale
        return x if ratio == 1.0 else x * ratio

    def _logits(self, x: Tensor) -> Tensor:
        if self.tp is not None:
            x = enter(x, self.tp)
        logits = linear(x, self.embedding.weight) if self.head is None else self.head(x)
        if self.logit_mask is not None:
            logits = logits + self.logit_mask
        return logits if self.tp is None else gather(logits, -1, self.tp, self.config.vocab_size)


def build_model(config: ModelConfig, seed: int = 0, device: torch.device | str | None = None) -> CausalLM:
    """Returns a model whose weights are a function of (seed, parameter name) only, on every device and in any order.

    The weights are drawn on the CPU. Linear layers and embeddings are N(0, init_std); output projections of residual
    branches divide by sqrt(2 L), hidden matrices by sqrt(d_model / base_width) with
    `parametrisation: mup`; biases are 0. With `init: xavier` linear layers are uniform, as Glorot and Bengio
    (2010) draw them, at any depth; `embedding_std` replaces init_std for the embedding of the tokens. Other parameters
    keep the initialisation of their layer, drawn after `torch.manual_seed(seed)` in a fork of the generator.

    Raises:
        TypeError: `config` is not a ModelConfig.
    """
    if not isinstance(config, ModelConfig):
        fix = "give linnet.models.get_recipe(name), or ModelConfig(...)"
        raise TypeError(f"config: {shown(config)} is not a configuration of a causal language model; {fix}")
    return draw_weights(lambda: CausalLM(config), config, seed, device)


def draw_weights(build: Callable[[], M], config: StackConfig, seed: int, device: torch.device | str | None = None) -> M:
    """Returns the model that `build` makes, with weights drawn as in `build_model` (`linnet.models.kinds.build`)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
    _draw(model, "", config, seed)
    if (place := dropout.place_of(model)) is not None:
        place.value[0] = seed
    return model.to(device) if device is not None else model


def draw_parts(config: ModelConfig, seed: int, threads: int = 1) -> Iterator[tuple[str, nn.Module]]:
    """Yields (name, module) for the parts of `build_model(config, seed)`, with the same weights, bit for bit.

    The parts are the embedding, each layer, the modules that layers share, the final norm and the head. One part is
    made at a time, on the CPU, so that a caller which copies a part and drops it never holds the whole model. Together
    they hold every parameter and buffer of the model once. If no layer draws weights in its constructor, the draws of
    constructors, which `build_model` overwrites, are skipped.

    Args:
        threads: matrices of a part that are drawn at the same time, each with a generator of its own.
    """
    constructing = contextlib.nullcontext if _draws_own(config) else _SkipDraws
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
    makers = _make_parts(config, seed)
    while True:
        with torch.random.fork_rng(devices=[]), constructing():
            torch.set_rng_state(state)  # the caller may draw numbers between two parts
            name, part = next(makers, ("", None))
            state = torch.get_rng_state()
        if part is None:
            return
        _draw(part, name, config, seed, threads)
        yield name, part
        del part


def _make_parts(config: ModelConfig, seed: int) -> Iterator[tuple[str, nn.Module]]:
    """Yields the parts of a causal language model in the order of its constructor."""
    yield "embedding", nn.Embedding(config.vocab_size, config.d_model)
    shared = nn.ModuleDict()
    for name, layer in make_layers(config, shared):
        yield f"backbone.{name}", layer
        del layer  # before the next one is made
    yield "backbone.shared", shared
    yield "backbone.norm", build_norm(config.norm, config.d_model, config.norm_eps)
    if config.embedding_norm:
        yield "backbone.input_norm", build_norm(config.norm, config.d_model, config.norm_eps)
    if (positions := build_positions(config.positions, config.d_model, config.num_positions)) is not None:
        yield "backbone.positions", positions
        del positions
    if config.dropout:
        place = dropout.DropoutPosition()
        place.value[0] = seed
        yield "backbone.dropout_position", place
        del place
    if not config.tie_embeddings:
        yield "head", nn.Linear(config.d_model, config.vocab_size, bias=config.head_bias)


def _draw(model: nn.Module, prefix: str, config: StackConfig, seed: int, threads: int = 1) -> None:
    """Draws the weights of the linear layers and embeddings of a model, or of its submodule with the name `prefix`."""
    depth_scale = 1.0 / math.sqrt(2 * config.num_layers)
    branch_scale = 1.0 / math.sqrt(sum(len(spec.names) for spec in config.blocks))
    init = getattr(config, "init", "normal")
    embedding_std: float | None = getattr(config, "embedding_std", None)
    hidden_ratio = getattr(config, "width_ratio", 1.0)

    @torch.no_grad()
    def draw(name: str, module: nn.Linear | nn.Embedding) -> None:
        generator = torch.Generator().manual_seed(_seed_of(seed, name))
        if getattr(module, "starts_zero", False):
            module.weight.zero_()
        elif hasattr(module, "orthogonal"):
            nn.init.orthogonal_(module.weight, module.orthogonal, generator)
        elif isinstance(module, nn.Linear) and getattr(module, "init", init) == "xavier":
            inputs, outputs = getattr(module, "stands_for", (module.in_features, module.out_features))
            bound = math.sqrt(6.0 / (inputs + outputs)) * math.sqrt(inputs / module.in_features)
            module.weight.uniform_(-bound, bound, generator=generator)
        else:
            std = config.init_std
            if getattr(module, "ends_residual", False):
                std *= branch_scale if getattr(module, "counts_branches", False) else depth_scale
            if hasattr(module, "stands_for"):  # the weights of fewer inputs, with the variance of a sum over all
                std *= math.sqrt(module.stands_for[0] / module.in_features)
            is_hidden = role_of(module, "weight") == "hidden" or hasattr(module, "stands_for")
            if hidden_ratio != 1.0 and name.startswith("backbone.") and is_hidden:
                std *= math.sqrt(hidden_ratio)
            if getattr(module, "fan_in", False):
                std = module.in_features**-0.5
            if name == "embedding" and embedding_std is not None:
                std = embedding_std
            module.weight.normal_(0.0, std, generator=generator)
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()

    named = [(name, m) for name, m in model.named_modules(prefix=prefix) if isinstance(m, nn.Linear | nn.Embedding)]
    if threads == 1 or len(named) < 2:
        for name, module in named:
            draw(name, module)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(draw, *zip(*named, strict=True)))


def _draws_own(config: ModelConfig) -> bool:
    """Returns whether a layer draws weights in its constructor that `_draw` does not overwrite."""
    watch = _WatchDraws()
    with torch.device("meta"), watch:
        model = CausalLM(config)
    drawn = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    overwritten = {id(tensor) for module in drawn for tensor in module.parameters(recurse=False)}
    return watch.others or any(id(tensor) not in overwritten for tensor in watch.tensors)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


def empty_model(config: ModelConfig, device: torch.device | str = "cpu") -> CausalLM:
    """Returns a causal language model without weights, as `empty` does."""
    return empty(lambda: CausalLM(config), device)


def empty(build: Callable[[], M], device: torch.device | str = "cpu") -> M:
    """Returns the module that `build` makes, with fixed tables but undefined parameters, to be assigned by the caller.

    Nothing is drawn, so memory is touched only when weights are assigned. The meta device uses no memory.
    """
    with torch.device(device), _NoDraws(torch.device(device).type == "meta"):
        return build()


class _NoDraws(TorchFunctionMode):
    """Skips the initialisation of tensors; of `shapes` alone, arithmetic is skipped as well.

    PyTorch finds the shapes of arithmetic on the meta device in Python, and imports its compiler for that. This takes
    as long as importing torch itself, so the rules that constructors need are here.
    """

    FLOATING = frozenset(("log", "log1p", "exp", "expm1", "div"))
    UNARY = frozenset(("log", "log1p", "exp", "expm1", "neg", "abs", "clamp"))
    BINARY = frozenset(("add", "sub", "mul", "div", "pow", "remainder", "__rsub__", "__rpow__"))

    def __init__(self, shapes: bool):
        super().__init__()
        self.shapes = shapes

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func in (torch.Tensor.uniform_, torch.Tensor.normal_):
            return args[0]
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if self.shapes and name in ("rand", "randn"):
            return torch.empty(*args, **kwargs)
        if self.shapes and (name in self.UNARY or (name in self.BINARY and not kwargs)):
            return self._shape_of(name, args[: 1 + (name in self.BINARY)])
        return func(*args, **kwargs)

    def _shape_of(self, name: str, operands) -> Tensor:
        shape = torch.broadcast_shapes(*(x.shape for x in operands if isinstance(x, Tensor)))
        dtype = torch.result_type(operands[0], operands[-1])
        if name in self.FLOATING and not (dtype.is_floating_point or dtype.is_complex):
            dtype = torch.get_default_dtype()
        return torch.empty(shape, dtype=dtype.to_real() if name == "abs" else dtype, device="meta")


class _WatchDraws(TorchFunctionMode):
    """Records which tensors are drawn.

    Attributes:
        tensors: tensors that a function of `torch.nn.init` filled.
        others: whether any other random function was called.
    """

    RANDOM = frozenset(
        ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rand_like")
        + ("randn_like", "randint_like", "uniform_", "normal_", "random_", "exponential_", "bernoulli_", "cauchy_")
        + ("geometric_", "log_normal_")
    )

    def __init__(self):
        super().__init__()
        self.tensors: list[Tensor] = []
        self.others = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if _is_random_init(func):
            self.tensors.append(args[0] if args else kwargs["tensor"])
            return self.tensors[-1]
        self.others = self.others or getattr(func, "__name__", "") in self.RANDOM
        return func(*args, **(kwargs or {}))


class _SkipDraws(TorchFunctionMode):
    """Skips the random functions of `torch.nn.init`; constants are filled in."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if _is_random_init(func):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _is_random_init(func: Callable) -> bool:
    constants = ("constant_", "dirac_", "eye_", "ones_", "zeros_")
    return getattr(func, "__module__", "") == "torch.nn.init" and func.__name__ not in constants


def cut_rows(
    tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None, least: int = 1
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns this rank's span of rows, inside `linnet.ops.sequence.sequence_parallel`.

    Targets are cut as they are, shifted already, so that no token is lost between two spans. Rows that the number of
    spans does not divide, and rows shorter than `least` for each, are filled at the end with tokens that no target
    scores; nothing before them sees them.

    Args:
        tokens, targets: int64 [B, T], the same on every rank.
        cu_seqlens: int32 [N+1], the documents of whole rows with B = 1, or None.
        least: tokens that a span must have.

    Returns:
        tokens and targets [B, L]; and int32 [N+1], the parts of the documents in the span (`sequence.cut_documents`).
    """
    length = max(-(-tokens.shape[1] // sequence.spans()), least)
    if fill := length * sequence.spans() - tokens.shape[1]:
        tokens, targets = pad(tokens, (0, fill)), pad(targets, (0, fill), value=IGNORE)
    start = sequence.first_position(length)
    tokens, targets = (x[:, start : start + length].contiguous() for x in (tokens, targets))
    if cu_seqlens is None or cu_seqlens.shape[0] == 2:  # one document fills the row
        sequence.cut_documents(torch.zeros(1, 1, dtype=torch.int32, device=tokens.device), length)
        return tokens, targets, None
    starts = sequence.cut_documents(cu_seqlens[None, :-1], length)
    return tokens, targets, pad(starts[0], (0, 1), value=length)


SHORTEST = 512  # tokens of the shortest part of a cache that is read


class CacheLengths:
    """The lengths to which the states of a model are cut.

    Attributes:
        values: the lengths in ascending order. The last one is the context length, at which nothing is cut. It is the
            only one if no state depends on the length.
    """

    def __init__(self, model: CausalLM, context_length: int):
        self.values, length = [context_length], SHORTEST
        whole = model.backbone.state_bytes(context_length)
        while length < context_length and model.backbone.state_bytes(length) < whole:
            self.values.insert(-1, length)
            length *= 2
        self._shapes = cache(partial(_shapes, model))

    def choose(self, tokens: int) -> int:
        """Returns the shortest length that holds `tokens`, or the last one if none does, as for ring buffers."""
        return next((length for length in self.values if length >= tokens), self.values[-1])

    def corner(self, states: ModelState, length: int) -> ModelState:
        """Returns views of the states that hold the first `length` tokens. Pending buffers are not cut."""
        if len(self.values) == 1 or length >= self.values[-1]:
            return states
        shapes = self._shapes(length)
        return {
            layer: {name: _cut(x, shapes[layer].get(name)) for name, x in state.items()}
            for layer, state in states.items()
        }


def merge(states: ModelState, after: ModelState) -> ModelState:
    """Returns `states` updated with `after`, the states that a model returned for a `corner` of them.

    Tensors that were cut are written in place.
    """
    return {layer: {name: _put(x, after[layer][name]) for name, x in state.items()} for layer, state in states.items()}


def _shapes(model: CausalLM, length: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shape of each state for `length` tokens, without the batch dimension."""
    states = model.init_state(1, length, "meta")
    return {layer: {name: tuple(x.shape[1:]) for name, x in state.items()} for layer, state in states.items()}


def _cut(x: Tensor, shape: tuple[int, ...] | None) -> Tensor:
    return x if shape is None or tuple(x.shape[1:]) == shape else x[(slice(None), *map(slice, shape))]


def _put(whole: Tensor, part: Tensor) -> Tensor:
    if whole.shape == part.shape:
        return part
    whole[tuple(map(slice, part.shape))] = part
    return whole
