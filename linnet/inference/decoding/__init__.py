"""A model's step on fixed memory: slots of states, pending buffers, limited caches, merged products, precision."""

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linnet.config import ConfigError
from linnet.inference.sampling import Chosen, Knobs, choose, choose_greedy
from linnet.layers.base import Mixer, TensorSpec
from linnet.layers.channels.glu import GatedLinearUnit
from linnet.layers.norm import SRMSNorm, ZeroCentredRMSNorm
from linnet.models import CausalLM, ModelState
from linnet.models.backbone import POSITION
from linnet.models.causal_lm import CacheLengths
from linnet.ops.matvec import defer_norm, defers_norm, gated_linear, linear, linears, make_counters, serves

# Merges linear layers that read the same token into one matrix product: q, k, v and a gate; gate and up.
#
# The time of a decoding step is bound by reading weights and by kernel launches, so fewer and larger products are
# faster. One step of the model shows which layers share an input. This works for every mixer, including mixers from
# outside the package, without any declaration in the layers. The weights keep their names: they become rows of one
# matrix.


class Product:
    """Computes several linear layers of one token as one product, and keeps each layer's part until it is taken."""

    def __init__(self, linears: list[nn.Linear]):
        self.weight = torch.cat([linear.weight.detach() for linear in linears])
        biased = linears[0].bias is not None
        self.bias = torch.cat([linear.bias.detach() for linear in linears]) if biased else None
        self.sizes = [linear.out_features for linear in linears]
        self.counters = make_counters(self.weight.device)
        self._x: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def take(self, index: int, x: Tensor) -> Tensor:
        """Returns the output of layer `index` for x [B, K]; the first call computes all layers."""
        if x is not self._x or self._parts[index] is None:
            self._parts, self._x = linears(x, self.weight, self.sizes, self.bias, self.counters), x
        part, self._parts[index] = self._parts[index], None
        if not any(part is not None for part in self._parts):
            self._x = None
        return part

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Returns act(first part) * second part for x [B, K]. The product must have two parts and no bias."""
        return gated_linear(x, self.weight, activation, self.counters)


class Part(nn.Linear):
    """A linear layer whose weight is a range of rows of a `Product`.

    Single tokens [B, D] use the merged product; longer inputs use this layer's rows alone.
    """

    def __init__(self, product: Product, index: int):
        nn.Module.__init__(self)
        start, size = sum(product.sizes[:index]), product.sizes[index]
        self.in_features, self.out_features = product.weight.shape[1], size
        self.weight = nn.Parameter(product.weight[start : start + size], requires_grad=False)
        bias = None if product.bias is None else nn.Parameter(product.bias[start : start + size], requires_grad=False)
        self.register_parameter("bias", bias)
        self._product, self._index = product, index

    def forward(self, x: Tensor) -> Tensor:
        # Slices of a merged output are not contiguous. The parallel forms over many tokens would have to copy them.
        return F.linear(x, self.weight, self.bias) if x.ndim != 2 else self._product.take(self._index, x)


class Row(nn.Linear):
    """A linear layer with fast kernels for one row and for a few rows."""

    counters: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.counters)


class Glu(GatedLinearUnit):
    """A gated linear unit whose gate and up projections are one product; its kernel also applies the activation."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            return super().forward(x)
        return self.down_proj(self.gate_proj._product.gated(x, self.activation))


class Summed(ZeroCentredRMSNorm):
    """A norm with the gain 1 + w that keeps the sum until the weight moves or is written to."""

    _sum: Tensor | None
    version: int  # of the weight, when it was summed

    def gain(self) -> Tensor:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().gain()
        version = 0 if self.weight.is_inference() else self.weight._version
        if self._sum is None or self._sum.device != self.weight.device:
            self._sum, self.version = super().gain(), version
        elif self.version != version:  # in place, since CUDA graphs read it there
            self.version = version
            self._sum.copy_(super().gain())
        return self._sum


@torch.no_grad()
def merge_projections(model: nn.Module) -> int:
    """Merges the linear layers of a `CausalLM` that read the same token. Returns the number of products it saves."""
    device = next(model.parameters()).device
    inputs: list[tuple[nn.Linear, Tensor]] = []  # keeps the tensors alive, so that their ids stay distinct
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    handles = [module.register_forward_pre_hook(lambda m, args: inputs.append((m, args[0]))) for module in layers]
    try:
        model.step(torch.zeros(1, dtype=torch.int64, device=device), model.init_state(1, 1, device))
    finally:
        for handle in handles:
            handle.remove()
    readers: dict[tuple, list[nn.Linear]] = defaultdict(list)
    calls = [module for module, _ in inputs]
    for module, x in inputs:
        if calls.count(module) == 1:
            readers[id(x), module.bias is None, module.weight.dtype].append(module)
    groups = [group for group in readers.values() if len(group) > 1]
    parts: dict[nn.Module, Part] = {}
    for group in groups:
        product = Product(group)
        parts.update((module, Part(product, index)) for index, module in enumerate(group))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in parts:
                setattr(parent, name, parts[child])
        if _is_pair(parent):
            parent.activation = parent.activation  # copies a class attribute to the instance before the class changes
            parent.__class__ = Glu
    return len(parts) - len(groups)


def _is_pair(unit: nn.Module) -> bool:
    """Returns whether a module is a gated linear unit whose gate and up projections, and no others, are one product."""
    if not isinstance(unit, GatedLinearUnit) or type(unit).forward is not GatedLinearUnit.forward:
        return False
    if not unit.gate_scale == unit.out_scale == 1.0:
        return False
    gate, up = unit.gate_proj, unit.up_proj
    if not isinstance(gate, Part) or not isinstance(up, Part) or gate._product is not up._product:
        return False
    return len(gate._product.sizes) == 2 and (gate._index, up._index) == (0, 1) and gate.bias is None


@torch.no_grad()
def serve_rows(model: nn.Module) -> None:
    """Gives the linear layers that were not merged the kernels for one row and for a few rows, and norms whose gain is
    1 + w that sum."""
    for module in model.modules():
        if type(module) in (ZeroCentredRMSNorm, Summed):
            module.__class__, module._sum = Summed, None
            module.gain()
        if type(module) is nn.Linear:
            module.__class__, module.counters = Row, make_counters(module.weight.device)


def prepare_steps(model: nn.Module, merge: bool = True) -> None:
    """Makes steps of few rows fast. Without `merge` products and norms stay apart, as a compiler needs them."""
    if merge:
        merge_projections(model)
    serve_rows(model)
    if merge:
        defer_norms(model)


# Whether this thread computes a step. Only there is a norm left to its readers: the trial knows no others, and the
# features of one token may be scored in parts while another thread decodes.
_stepping: ContextVar[bool] = ContextVar("stepping", default=False)


@torch.no_grad()
def defer_norms(model: nn.Module) -> None:
    """Leaves the norms of one row on a GPU to the linear layers that read them, where nothing else does.

    Three steps try out which norms these are: without the values of their results they must give the same logits and
    states. It comes after `serve_rows`. In a step, hooks on such a norm and on its readers get a result without values.
    """
    device = next(model.parameters()).device
    if not serves(next(model.parameters())):
        return
    model.step = partial(_step, model)

    def defer(norms: list[SRMSNorm]) -> bool:
        taken: set[SRMSNorm] = set()  # a norm of more rows is not left to products here, so its readers are unknown
        first = None
        try:
            for fill in (float("nan"), 1.0, None):
                for norm in norms:
                    norm.forward = partial(_defer, norm, fill, taken.add)
                logits, states = _try_out(model.step, model, 1, 3, device)
                if first is None:
                    if not _agree(model, logits, expected):
                        return False
                    first = [logits, *states]
                elif not all(map(torch.equal, first, [logits, *states])):  # False for NaN
                    return False
        finally:
            for norm in norms:
                del norm.forward
        for norm in taken:
            norm.forward = partial(_defer, norm, None, None)
        return True

    (expected, _), places = _try_out(model.step, model, 1, 3, device), defaultdict(list)
    for name, norm in model.named_modules():
        if isinstance(norm, SRMSNorm) and type(norm).forward is SRMSNorm.forward and norm.tp is None:
            places[re.sub(r"\d+", "", name)].append(norm)
    for norms in places.values():  # those at the same place of every block at once, and one by one where that fails
        if not defer(norms):
            for norm in norms if len(norms) > 1 else ():
                defer([norm])


def _step(model: CausalLM, tokens: Tensor, states: ModelState) -> tuple[Tensor, ModelState]:
    before = _stepping.set(True)
    try:
        return type(model).step(model, tokens, states)
    finally:
        _stepping.reset(before)


def _defer(
    norm: SRMSNorm, fill: float | None, note: Callable | None, x, residual=None, gate=None, gate_activation="none",
    gate_first=False, keep=False,
):  # fmt: skip
    gain = norm.gain()
    behind = gate is not None and not gate_first
    if behind or not _stepping.get() or not defers_norm(x, residual, gain, gate):
        gates = {"gate": gate, "gate_activation": gate_activation, "gate_first": gate_first}
        return type(norm).forward(norm, x, residual, **gates, keep=keep)
    if note is not None:
        note(norm)
    y, h = defer_norm(x, residual, gain, norm.eps, gate, gate_activation, fill)
    return (y, h) if keep or residual is not None else y


# A model's step on fixed memory: a pool of state slots, the logits of their next tokens, and CUDA graphs.
#
# Shapes never change: every step computes all slots, used or not. So each row is computed by the same kernels in the
# same order, independent of the other rows, and a captured CUDA graph can be replayed for every step.
#
# Reads of KV caches are limited to the current length: a step gets views of the states that hold all tokens so far.
# The lengths double, so that a few CUDA graphs cover all contexts. The shortest length is one block of keys in
# PyTorch's CPU attention. With whole blocks, the sums of a row do not depend on how many empty places follow its
# tokens.
#
# Large states have pending buffers: a step reads a state and its pending tokens, but writes the state only every few.
# The time of a step with many slots is bound by reading and writing their states. Writing every fourth token removes
# most of the cost of the writes. `Mixer.pending_spec` says which layers have pending buffers, and their shapes. Each
# slot has its own counter on the GPU. It starts at 0 when a request takes the slot, so that the tokens of a request do
# not depend on when it came.

# How `choose` picks tokens: the likeliest; sampled by each slot's settings; sampled, with log-probabilities.
KINDS = PLAIN, SAMPLED, TOLD = "plain", "sampled", "told"


class Decoder:
    """Holds the states and logits of all slots, advances them by one token per step, and chooses their tokens.

    Attributes:
        slots: number of slots.
        vocab: number of token ids that may be chosen: 0 to vocab - 1.
        states: states of all slots. With pending tokens (`linnet.inference.decoding`), a state is as of its
            last write.
        write_every: tokens between two writes of a state; 1 if the model has no pending tokens.
        logits: of each slot's next token, [slots, rows of the model's embedding]; those from `vocab` on only share
            in the probability.
        tokens: int64 [slots], the tokens chosen last.
        knobs: sampling settings of each slot.
        graphs: whether steps run as CUDA graphs.
        halved_bytes: what states in bfloat16 save of those in float32.
    """

    def __init__(
        self,
        model: CausalLM,
        slots: int,
        vocab: int,
        context_length: int,
        device: torch.device,
        graphs: bool = True,
        compile: bool = False,
        kinds: Sequence[str] = KINDS,
        state_dtype: torch.dtype = torch.float32,
    ):
        """Allocates the states and captures the steps.

        Args:
            context_length: capacity of KV caches in tokens.
            graphs: capture steps as CUDA graphs, on a GPU.
            compile: run the step through `torch.compile`.
            kinds: the kinds that `choose` will be called with; each needs some memory of the size of the logits.
            state_dtype: bfloat16 halves the bytes of the states that a mixer takes so (`TensorSpec.half`).
        """
        self.slots, self.vocab, self.device = slots, vocab, device
        self._positions = model.backbone.max_context
        self._model_step = _compiled(model, slots, context_length, device) if compile else model.step
        self.states = model.init_state(slots, context_length, device)
        self.halved_bytes = 0
        if state_dtype == torch.bfloat16:
            for layer, name in half_states(model):
                self.states[layer][name] = state = self.states[layer][name].to(state_dtype)
                self.halved_bytes += state.nbytes
        self._names = [(layer, name) for layer, state in self.states.items() for name in state]
        self._pool = self._tensors(self.states)
        if any(x.shape[0] != slots for x in self._pool):
            raise ValueError("state_spec: the first dimension of every tensor of a state must be the batch")
        # A compiled step needs states of constant structure and shape: no pending buffers, and caches in full length.
        self.write_every = 1 if compile else choose_interval(model, slots, device, state_dtype)
        self._pending = add_pending(model, self.states, slots, self.write_every) if self.write_every > 1 else None
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.logits = torch.zeros(slots, model.config.vocab_size, dtype=model.embedding.weight.dtype, device=device)
        self.knobs = Knobs.empty(slots, vocab, device)
        self.graphs = graphs and device.type == "cuda"
        self._memory = torch.cuda.graph_pool_handle() if self.graphs else None
        self._chosen: dict[str, Chosen] = {}
        self._host: dict[str, tuple[Tensor | None, ...]] = {}
        self._lengths = CacheLengths(model, context_length)
        used = self._lengths.values[-1:] if compile else self._lengths.values
        self._advances = {
            length: self._captured(partial(self._advance, self._lengths.corner(self.states, length))) for length in used
        }
        self._compiled = compile
        self._choices = {kind: self._captured(partial(self._choose, kind)) for kind in kinds}

    def insert(self, slot: int, states: ModelState, logits: Tensor) -> None:
        """Puts n sequences into the slots from `slot` on: their states, and the logits of the next tokens."""
        for pool, state in zip(self._pool, self._tensors(states), strict=True):
            pool[slot : slot + len(logits)].copy_(state)
        self.logits[slot : slot + len(logits)].copy_(logits)
        if self._pending is not None:
            self._pending[slot : slot + len(logits)].zero_()

    def advance(self, tokens: int | None = None) -> None:
        """Takes one step in all slots.

        Args:
            tokens: length of the longest context of the slots in use, including the token of this step. Caches are
                read up to about this length. None reads them in full length. A compiled step always does, because its
                shapes must not change.
        """
        whole = tokens is None or self._compiled
        self._advances[self._lengths.values[-1] if whole else self._lengths.choose(tokens)]()

    def choose(self, kind: str) -> Callable[[], tuple[list, ...]]:
        """Starts the choice of a token for every slot.

        Returns:
            A function that waits until the tokens are on the host, and returns the fields of `Chosen` as lists.
        """
        self._choices[kind]()
        chosen = self._chosen[kind]
        if self.device.type != "cuda":
            return lambda: tuple(None if x is None else x.tolist() for x in chosen)
        if kind not in self._host:
            self._host[kind] = tuple(
                None if x is None else torch.empty_like(x, device="cpu").pin_memory() for x in chosen
            )
        host = self._host[kind]
        for to, x in zip(host, chosen, strict=True):
            if x is not None:
                to.copy_(x, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def wait() -> tuple[list, ...]:
            arrived.synchronize()
            return tuple(None if x is None else x.tolist() for x in host)

        return wait

    def _choose(self, kind: str) -> None:
        plain = kind == PLAIN
        chosen = choose_greedy(self.logits, self.vocab) if plain else choose(self.logits, self.knobs, kind == TOLD)
        self._chosen[kind] = chosen
        self.tokens.copy_(chosen.tokens)

    def _advance(self, states: ModelState) -> None:
        if self._positions is not None:  # slots without a request go on counting; a request ends before the limit
            self.states[POSITION]["next"].clamp_(max=self._positions - 1)
        before = self._tensors(states)
        logits, after = self._model_step(self.tokens, states)
        for pool, new in zip(before, self._tensors(after), strict=True):
            if new is not pool:  # this layer does not write its state in place
                pool.copy_(new)
        self.logits.copy_(logits)
        if self._pending is not None:
            self._pending.add_(1).remainder_(self.write_every)

    def _tensors(self, states: ModelState) -> list[Tensor]:
        return [states[layer][name] for layer, name in self._names]

    def _captured(self, call: Callable[[], None]) -> Callable[[], None]:
        """Returns `call` as a CUDA graph, or `call` itself if graphs are off or the capture fails."""
        if not self.graphs:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm up: kernels compile and library handles are created before the capture
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # If the capture fails, `torch.cuda.graph` leaves its own stream current. The outer context restores ours.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            ):
                call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            message = f"the model's step cannot be captured as a CUDA graph ({error}); decoding continues without it"
            warnings.warn(message, stacklevel=4)
            self.graphs = False
            return call
        return graph.replay


def half_states(model: CausalLM) -> list[tuple[str, str]]:
    """Returns the layers and names of the states that `Decoder` can keep in bfloat16.

    Raises:
        ConfigError: names the mixers whose recurrent states are float32 alone; or there is no recurrent state.
    """
    wide = {
        mixer.name
        for mixer in model.backbone.parts()
        if isinstance(mixer, Mixer)
        for spec in mixer.state_spec(1, 1).values()
        if spec.size and spec.dtype == torch.float32 and not spec.half
    }
    blocks = ((str(index), block) for index, block in enumerate(model.backbone.blocks))
    layers = [*blocks, *model.backbone.mixers_before()]
    half = [(layer, name) for layer, each in layers for name, spec in each.state_spec(1, 1).items() if spec.half]
    if wide:
        problem = f"state_dtype: bfloat16, and the states of {', '.join(sorted(wide))} are always float32; use float32"
        raise ConfigError([problem], "engine")
    if not half:
        raise ConfigError(["state_dtype: bfloat16, and this model has no recurrent state; use float32"], "engine")
    return half


def _compiled(model: CausalLM, slots: int, context_length: int, device: torch.device) -> Callable:
    """Returns the model's step through `torch.compile`, or the step itself if the compiled results differ.

    The compiled step may be called only with the same shapes and the same states' structure every time.
    """
    fast = _compile(model.step)
    # On some processors, Inductor of torch 2.11 compiles steps that give wrong results without an error.
    (expected, _), (actual, _) = (_try_out(step, model, slots, context_length, device) for step in (model.step, fast))
    if _agree(model, actual, expected):
        return fast
    apart = f"{((actual - expected).norm() / (expected.norm() or 1.0)).item():.1e}"
    message = (
        f"the compiled step differs from the model's by {apart} (relative); decoding continues without compile; "
        "update torch, or leave compile off"
    )
    warnings.warn(message, stacklevel=4)
    return model.step


def _try_out(
    step: Callable, model: CausalLM, slots: int, context_length: int, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Returns the logits of three steps, float32 [3, slots, V], and the tensors of the states after them."""
    states, logits = model.init_state(slots, context_length, device), []
    for number in range(3):
        tokens = (torch.arange(slots, device=device) + number) % model.config.vocab_size
        out, states = step(tokens, states)
        logits.append(out.float())
    return torch.stack(logits), [x for state in states.values() for x in state.values()]


def _agree(model: CausalLM, logits: Tensor, expected: Tensor) -> bool:
    """Returns whether logits differ by the rounding of the model's dtype alone. Both may be 0; NaN does not agree."""
    bound = 0.1 if model.embedding.weight.dtype.itemsize < 4 else 1e-3
    return bool((logits - expected).norm() <= bound * expected.norm())


def _compile(step: Callable) -> Callable:
    """Returns `step` through `torch.compile`, without the guards that compare each call with the first one."""

    def own(tokens: Tensor, states: ModelState) -> tuple[Tensor, ModelState]:
        return step(tokens, states)

    # torch.compile stores compiled code by code object, and finds it again through guards on every module and tensor.
    # Checking the guards takes as long as the step of a small model. So each decoder gets its own code object, and
    # no guards.
    own.__code__ = own.__code__.replace()
    options = {
        "guard_filter_fn": lambda guards: [False] * len(guards),
        "cpp.min_chunk_size": 16_384,  # elements per thread: with fewer, starting a thread takes longer than the work
    }
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


INTERVAL = 4  # tokens between writes; with 8, the pending tokens take the time and memory that fewer writes save
_LEAST = 2**29  # below this many bytes of state, delayed writes save nothing: caches and launches take the time


def choose_interval(model: CausalLM, slots: int, device: torch.device, state_dtype: torch.dtype = torch.float32) -> int:
    """Returns the tokens between two writes of a state: 1 (every token writes), or more if states are large."""
    if device.type != "cuda":
        return 1
    return INTERVAL if slots * _deferrable_bytes(model, state_dtype) >= _LEAST else 1


def add_pending(model: CausalLM, states: ModelState, slots: int, tokens: int) -> Tensor | None:
    """Adds pending buffers for up to `tokens` - 1 tokens to the states of all slots.

    Returns:
        int32 [slots], the number of pending tokens of each slot, all 0. The caller adds 1 per token, modulo `tokens`.
        None if no layer has pending buffers.
    """
    pending = torch.zeros(slots, dtype=torch.int32, device=model.embedding.weight.device)
    specs = _specs(model, slots, tokens)
    for layer, buffers in specs.items():
        for name, spec in buffers.items():
            states[layer][name] = torch.zeros(spec.shape, dtype=spec.dtype, device=pending.device)
        states[layer]["pending"] = pending
    return pending if specs else None


def pending_bytes(model: CausalLM, tokens: int = INTERVAL) -> int:
    """Returns the bytes that `add_pending` allocates per slot."""
    return sum(spec.bytes for buffers in _specs(model, 1, tokens).values() for spec in buffers.values())


def saved_bytes(model: CausalLM, tokens: int, state_dtype: torch.dtype = torch.float32) -> int:
    """Returns the average memory traffic saved, in bytes per slot and token, compared with writing at every token.

    On average a token reads half of the pending buffers. All tokens but the last of an interval write one place there.
    """
    buffers = pending_bytes(model, tokens)
    return _deferrable_bytes(model, state_dtype) * (tokens - 1) // tokens - buffers // 2 - buffers // tokens


def _specs(model: CausalLM, slots: int, tokens: int) -> dict[str, dict[str, TensorSpec]]:
    specs = {str(index): block.pending_spec(slots, tokens) for index, block in enumerate(model.backbone.blocks)}
    return {layer: buffers for layer, buffers in specs.items() if buffers}


def _deferrable_bytes(model: CausalLM, state_dtype: torch.dtype) -> int:
    """Returns the bytes of state per slot whose writes can be delayed: not those of caches, windows and positions."""
    blocks = (model.backbone.blocks[int(layer)] for layer in _specs(model, 1, INTERVAL))
    specs = [spec for block in blocks for spec in block.state_spec(1, 1).values() if spec.size]
    return sum(spec.bytes // (2 if spec.half and state_dtype == torch.bfloat16 else 1) for spec in specs)
