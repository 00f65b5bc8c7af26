"""A model's step on memory that stays where it is: a pool of state slots, their next logits, and CUDA graphs.

The shape never changes: all slots take a step, whoever is in them. So a row is computed by the same kernels in the same
order whatever its neighbours are, and one graph serves all the time.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from linnet.inference.lengths import CacheLengths
from linnet.inference.pending import add_pending, choose_interval
from linnet.inference.sampling import Chosen, Knobs, choose, choose_greedy
from linnet.models import CausalLM, ModelState

# What `choose` has to do: take the likeliest, draw as asked, tell log-probabilities too.
KINDS = PLAIN, SAMPLED, TOLD = "plain", "sampled", "told"


class Decoder:
    """Slots of states, their logits, and the choice of their tokens.

    Attributes:
        slots, vocab: their number, and how many tokens may be chosen.
        states: of all slots; with pending tokens (`linnet.inference.pending`), as of their last writes.
        write_every: tokens between these writes, 1 where none wait.
        logits [slots, vocab]: of each slot's next token. tokens [slots]: the last ones chosen.
        knobs: how each slot's token is chosen.
        graphs: whether steps are CUDA graphs.
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
    ):
        """Args beside the attributes:
        context_length: capacity of KV caches.
        kinds: ways of choosing that may be asked for; each takes some memory of the size of the logits.
        """
        self.slots, self.vocab, self.device = slots, vocab, device
        self._model_step = _compiled(model, slots, context_length, device) if compile else model.step
        self.states = model.init_state(slots, context_length, device)
        self._names = [(layer, name) for layer, state in self.states.items() for name in state]
        self._pool = self._tensors(self.states)
        if any(x.shape[0] != slots for x in self._pool):
            raise ValueError("state_spec: the first dimension of every tensor of a state must be the batch")
        # A compiled step is called with states of one kind: nothing is pending, and caches are whole.
        self.write_every = 1 if compile else choose_interval(model, slots, device)
        self._pending = add_pending(model, self.states, slots, self.write_every) if self.write_every > 1 else None
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.logits = torch.zeros(slots, vocab, dtype=model.embedding.weight.dtype, device=device)
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
        """Puts sequences into slots from `slot` on: their states, and the logits [n, vocab] of their next tokens."""
        for pool, state in zip(self._pool, self._tensors(states), strict=True):
            pool[slot : slot + len(logits)].copy_(state)
        self.logits[slot : slot + len(logits)].copy_(logits[:, : self.vocab])
        if self._pending is not None:
            self._pending[slot : slot + len(logits)].zero_()

    def advance(self, tokens: int | None = None) -> None:
        """Takes one step in all slots.

        Args:
            tokens: the longest context of a slot in use, the token of this step included; caches are read up to about
                this length. None reads them whole, and so does a compiled step, which always gets the same shapes.
        """
        whole = tokens is None or self._compiled
        self._advances[self._lengths.values[-1] if whole else self._lengths.choose(tokens)]()

    def choose(self, kind: str) -> Callable[[], tuple[list, ...]]:
        """Chooses a token for every slot; the result waits for them and returns what `Chosen` holds, as lists."""
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
        chosen = choose_greedy(self.logits) if kind == PLAIN else choose(self.logits, self.knobs, kind == TOLD)
        self._chosen[kind] = chosen
        self.tokens.copy_(chosen.tokens)

    def _advance(self, states: ModelState) -> None:
        before = self._tensors(states)
        logits, after = self._model_step(self.tokens, states)
        for pool, new in zip(before, self._tensors(after), strict=True):
            if new is not pool:  # a layer that does not write its state in place
                pool.copy_(new)
        self.logits.copy_(logits[:, : self.vocab])
        if self._pending is not None:
            self._pending.add_(1).remainder_(self.write_every)

    def _tensors(self, states: ModelState) -> list[Tensor]:
        return [states[layer][name] for layer, name in self._names]

    def _captured(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call` as a CUDA graph, if there may be graphs and it can be one."""
        if not self.graphs:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # so that all is compiled and all handles are made
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context is for a capture that fails: `torch.cuda.graph` then leaves its stream the current one.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            ):
                call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            warnings.warn(f"no CUDA graph of this model's step ({error}); decoding goes on without", stacklevel=4)
            self.graphs = False
            return call
        return graph.replay


def _compiled(model: CausalLM, slots: int, context_length: int, device: torch.device) -> Callable:
    """The model's step through `torch.compile`, for calls that are always alike; the step itself where it differs."""
    fast = _compile(model.step)
    # Inductor of torch 2.11 compiles wrong steps on some processors, without an error.
    expected, found = (_try_out(step, model, slots, context_length, device) for step in (model.step, fast))
    error, size = (found - expected).norm().item(), expected.norm().item()
    if error <= (0.1 if model.embedding.weight.dtype.itemsize < 4 else 1e-3) * size:  # both may be 0
        return fast
    apart = f"{error / (size or 1.0):.1e}"
    message = f"the compiled step differs from the model's by {apart}; decoding goes on without, or update torch"
    warnings.warn(message, stacklevel=4)
    return model.step


def _try_out(step: Callable, model: CausalLM, slots: int, context_length: int, device: torch.device) -> Tensor:
    """Logits of a few tokens."""
    states, logits = model.init_state(slots, context_length, device), []
    for place in range(3):
        tokens = (torch.arange(slots, device=device) + place) % model.config.vocab_size
        out, states = step(tokens, states)
        logits.append(out.float())
    return torch.stack(logits)


def _compile(step: Callable) -> Callable:
    """`torch.compile` without what looks whether a call is like the one before."""

    def own(tokens: Tensor, states: ModelState) -> tuple[Tensor, ModelState]:
        return step(tokens, states)

    # What was compiled is kept with the code object, and found again by guards on every module and tensor, which take
    # as long as the step of a small model. So this decoder has a code object of its own, and no guards.
    own.__code__ = own.__code__.replace()
    options = {
        "guard_filter_fn": lambda guards: [False] * len(guards),
        "cpp.min_chunk_size": 16_384,  # elements for a thread of its own: fewer are done before another one has begun
    }
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)
