"""A model's step on fixed memory: a pool of state slots, the logits of their next tokens, and CUDA graphs.

Shapes never change: every step computes all slots, used or not. So each row is computed by the same kernels in the same
order, independent of the other rows, and a captured CUDA graph can be replayed for every step.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from linnet.inference.decoding.lengths import CacheLengths
from linnet.inference.decoding.pending import add_pending, choose_interval
from linnet.inference.sampling import Chosen, Knobs, choose, choose_greedy
from linnet.models import CausalLM, ModelState
from linnet.models.backbone import POSITION

# How `choose` picks tokens: the likeliest; sampled by each slot's settings; sampled, with log-probabilities.
KINDS = PLAIN, SAMPLED, TOLD = "plain", "sampled", "told"


class Decoder:
    """Holds the states and logits of all slots, advances them by one token per step, and chooses their tokens.

    Attributes:
        slots: number of slots.
        vocab: number of token ids that may be chosen: 0 to vocab - 1.
        states: states of all slots. With pending tokens (`linnet.inference.decoding.pending`), a state is as of its
            last write.
        write_every: tokens between two writes of a state; 1 if the model has no pending tokens.
        logits: [slots, vocab], of each slot's next token.
        tokens: int64 [slots], the tokens chosen last.
        knobs: sampling settings of each slot.
        graphs: whether steps run as CUDA graphs.
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
        """Allocates the states and captures the steps.

        Args:
            context_length: capacity of KV caches in tokens.
            graphs: capture steps as CUDA graphs, on a GPU.
            compile: run the step through `torch.compile`.
            kinds: the kinds that `choose` will be called with; each needs some memory of the size of the logits.
        """
        self.slots, self.vocab, self.device = slots, vocab, device
        self._positions = model.backbone.max_context
        self._model_step = _compiled(model, slots, context_length, device) if compile else model.step
        self.states = model.init_state(slots, context_length, device)
        self._names = [(layer, name) for layer, state in self.states.items() for name in state]
        self._pool = self._tensors(self.states)
        if any(x.shape[0] != slots for x in self._pool):
            raise ValueError("state_spec: the first dimension of every tensor of a state must be the batch")
        # A compiled step needs states of constant structure and shape: no pending buffers, and caches in full length.
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
        """Puts n sequences into the slots from `slot` on: their states, and logits [n, vocab] of the next tokens."""
        for pool, state in zip(self._pool, self._tensors(states), strict=True):
            pool[slot : slot + len(logits)].copy_(state)
        self.logits[slot : slot + len(logits)].copy_(logits[:, : self.vocab])
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
        chosen = choose_greedy(self.logits) if kind == PLAIN else choose(self.logits, self.knobs, kind == TOLD)
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
        self.logits.copy_(logits[:, : self.vocab])
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


def _compiled(model: CausalLM, slots: int, context_length: int, device: torch.device) -> Callable:
    """Returns the model's step through `torch.compile`, or the step itself if the compiled results differ.

    The compiled step may be called only with the same shapes and the same states' structure every time.
    """
    fast = _compile(model.step)
    # On some processors, Inductor of torch 2.11 compiles steps that give wrong results without an error.
    expected, found = (_try_out(step, model, slots, context_length, device) for step in (model.step, fast))
    error, size = (found - expected).norm().item(), expected.norm().item()
    if error <= (0.1 if model.embedding.weight.dtype.itemsize < 4 else 1e-3) * size:  # both may be 0
        return fast
    apart = f"{error / (size or 1.0):.1e}"
    message = (
        f"the compiled step differs from the model's by {apart} (relative); decoding continues without compile; "
        "update torch, or leave compile off"
    )
    warnings.warn(message, stacklevel=4)
    return model.step


def _try_out(step: Callable, model: CausalLM, slots: int, context_length: int, device: torch.device) -> Tensor:
    """Returns the logits of three steps, float32 [3, slots, V]."""
    states, logits = model.init_state(slots, context_length, device), []
    for place in range(3):
        tokens = (torch.arange(slots, device=device) + place) % model.config.vocab_size
        out, states = step(tokens, states)
        logits.append(out.float())
    return torch.stack(logits)


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
