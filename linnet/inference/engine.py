"""The engine: reads prompts with the parallel form, generates tokens with the step, in constant memory.

A request waits in a queue until a slot of the decoder is free. The engine then reads its prompt in chunks, as a batch
of one, and generates one token per round until the request ends and its slot is free again. All slots take the same
memory at any context length, so there is nothing to page. The tokens of a request depend on its prompt, settings and
seed, but not on its time of arrival or on other requests: no chunk mixes requests, and every round computes all slots
alike.
"""

import contextlib
import re
import secrets
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from linnet.config import ConfigError, checking, parse, refuse, unknown
from linnet.data import Tokenizer
from linnet.data.tokenizer import encode_inside
from linnet.inference.decoding import (
    PLAIN,
    SAMPLED,
    TOLD,
    Decoder,
    half_states,
    pending_bytes,
    prepare_steps,
)
from linnet.inference.prefix import Cut, Prefix, PrefixCache, covered, cuts, load_prefix, weights_digest
from linnet.inference.request import CONTEXT, Completion, Piece, Request
from linnet.inference.sampling import DRAWING, Sampling
from linnet.layers.base import lower_precision
from linnet.models import CausalLM, ModelState
from linnet.models.backbone import UNBOUNDED_CONTEXT
from linnet.models.causal_lm import CacheLengths, merge
from linnet.runs.model import Generation, load_checkpoint

NOT_FINITE = "the logits are NaN or infinite; its training diverged, or its weights overflow at this precision"
CONTEXT_LENGTH = 4096  # default capacity of KV caches in tokens
READ_AT_ONCE = 4  # most prompts that are read by turns; each has its own states in addition to the slots


@dataclass
class Counters:
    """Totals of an engine: requests submitted, requests finished by reason, tokens read and generated, rounds.

    `prefix_hits` are prompts that began at a kept prefix, `prefix_tokens` the tokens that it saved.
    """

    requests: int = 0
    finished: Counter = field(default_factory=Counter)
    prompt_tokens: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0


@dataclass
class _Reading:
    """A prompt that is being read."""

    request: Request
    slot: int
    states: ModelState
    logits: torch.Tensor | None
    seen: torch.Tensor
    cuts: list[Cut]
    at: int = 0  # the cuts that were read

    @property
    def done(self) -> bool:
        return self.at == len(self.cuts)


class Engine:
    """Generates for many requests at once. One thread calls `advance`; any thread may call `submit` and `cancel`.

    Attributes:
        limit: most tokens of a prompt and its completion together; None if the model has no such limit (no KV cache
            that grows with the context, and no table of positions).
        counters: totals so far.
        generation: how a generation ends, and what it is served with unless a request says otherwise.
        turn_ends: tokens after which prompts are cut, so that the states there can be kept.
        prefixes: the automatic cache of prefixes; None without one.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        *,
        name: str = "model",
        slots: int = 8,
        context_length: int | None = None,
        prefill_chunk: int | None = None,
        prefix_cache: float = 0.0,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        compile: bool = False,
        graphs: bool = True,
        merge: bool = True,
        state_dtype: torch.dtype = torch.float32,
        generation: Generation | None = None,
    ):
        """Takes ownership of the model: moves, casts and changes it in place.

        Args:
            name: name of the model in answers of the server.
            slots: most requests that are decoded at once; each round computes all of them.
            context_length: capacity of KV caches in tokens; models without KV caches ignore it. Default: 4096.
            prefill_chunk: tokens of a prompt that are read at a time; bounds the memory for reading a prompt.
                Default: 2048 on a GPU, 256 on a CPU.
            prefix_cache: GiB of states after beginnings of prompts that are kept, on the device. A prompt with such a
                beginning continues there. Its answer is the same to the bit as without the cache.
            device: auto, cpu, cuda, or one of several GPUs as cuda:1.
            dtype: dtype of the weights. Default: bfloat16 on a GPU, float32 on a CPU.
            compile: run the step through `torch.compile`. This takes seconds to a minute at the start, and halves the
                time per token on a CPU.
            graphs: decode with CUDA graphs, on a GPU.
            merge: compute layers that read the same input as one matrix product, unless `compile` is set.
            state_dtype: of the recurrent states of slots, float32 or bfloat16. The latter rounds a state when it is
                written, and halves the memory of slots and most of the traffic of many; only the delta rule and Mamba-2
                take it (`TensorSpec.half`). Prompts are read, and prefixes kept, in float32.
            generation: how generations end; None takes what the tokenizer says, so a model without one never ends.

        Raises:
            ConfigError: a setting is invalid, or a mixer of the model has no step.
        """
        check_settings(slots, context_length, prefill_chunk, device, prefix_cache)
        refuse(
            [
                f"layout: {name!r} has no step, so the model trains and scores texts, but does not generate; write "
                "step(self, x, state) in its class, one token of forward"
                for name in model.backbone.without_step
            ],
            "model",
        )
        if state_dtype == torch.bfloat16:
            half_states(model)
            if compile:
                raise ConfigError(["state_dtype: bfloat16 and compile do not go together; leave one out"], "engine")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device, self.name, self.tokenizer = torch.device(device), name, tokenizer
        gpu = self.device.type == "cuda"
        self.prefill_chunk = prefill_chunk or (2048 if gpu else 256)
        self.limit = (context_length or CONTEXT_LENGTH) if model.backbone.state_grows else None
        if model.backbone.max_context is not None:  # the model has a table of positions with this many rows
            self.limit = min(self.limit or model.backbone.max_context, model.backbone.max_context)
        self._context = self.limit or UNBOUNDED_CONTEXT
        self.prefixes = PrefixCache(int(prefix_cache * 2**30)) if prefix_cache else None
        self.generation = generation or Generation.of(tokenizer)
        with checking("sampling in config.yaml") as problems:  # here, since every request would be refused for it
            problems += unknown("sampling", sorted(self.generation.sampling.keys() - set(DRAWING)), DRAWING)
            parse(Sampling, {key: value for key, value in self.generation.sampling.items() if key in DRAWING})
        self.turn_ends = set(self.generation.ends)
        self.vocab = model.config.vocab_size
        if tokenizer is not None:
            if tokenizer.vocab_size > self.vocab:
                message = (
                    f"tokenizer: has {tokenizer.vocab_size} tokens, more than the model's {self.vocab}; "
                    "use the model's own tokenizer"
                )
                raise ConfigError([message], "engine")
            self.vocab = tokenizer.vocab_size  # larger ids are padding of the embedding and must not be drawn
        model.eval().requires_grad_(False)
        lower_precision(model, dtype or (torch.bfloat16 if gpu else torch.float32))
        self.model = model.to(self.device)
        with torch.no_grad(), self.on_device():
            # On a CPU, Inductor of torch 2.11 reads wrong parts of merged products.
            prepare_steps(self.model, merge and not compile)
            shape = slots, self.vocab, self._context, self.device
            self._decoder = Decoder(self.model, *shape, graphs, compile, state_dtype=state_dtype)
        self._lengths = CacheLengths(self.model, self._context)
        self.counters = Counters()
        self._lock = threading.Lock()
        self._queue: deque[tuple[Request, Prefix | None]] = deque()
        self._slots: list[Request | None] = [None] * slots
        self._readings: deque[_Reading] = deque()  # the first one is read next
        self._mail: dict[Request, deque[Piece]] = {}  # pieces for callers of `stream` and `generate`

    @classmethod
    def of_run(cls, path: str | Path, *, allow_plugins: bool = False, **settings) -> "Engine":
        """Returns the engine of a run or model folder.

        Args:
            allow_plugins: as in `linnet.runs.load_model`.
            settings: as in the constructor.

        Raises:
            ConfigError: the folder has no model, or names plugins that are not trusted.
        """
        path = Path(path)
        if not path.exists():
            raise ConfigError([f"{path}: does not exist; `linnet train` prints the folder of its run"], "run")
        loaded = load_checkpoint(path, allow_plugins=allow_plugins)
        settings = {"name": path.resolve().name, "generation": loaded.generation, **settings}
        return cls(loaded.model, loaded.tokenizer, **settings)

    def submit(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, prefix: Prefix | None = None
    ) -> Request:
        """Puts a request into the queue.

        Args:
            prompt: text, or token ids. An empty text begins a new document.
            sampling: how tokens are chosen; by default greedily.
            prefix: a prefix that the prompt continues; the prompt may then be empty.

        Raises:
            ConfigError: lists all problems of the request.
        """
        request = self.check(prompt, sampling or Sampling(), prefix)
        with self._lock:
            self.counters.requests += 1
            self._queue.append((request, prefix))
        return request

    def check(self, prompt: str | Sequence[int], sampling: Sampling, prefix: Prefix | None = None) -> Request:
        """Returns the request that `submit` would queue, without queueing it. Raises the same `ConfigError`."""
        problems: list[str] = []
        tokens = encode(prompt, self.tokenizer, self.vocab, problems, begins=prefix is None)
        total = len(tokens) + (0 if prefix is None else prefix.tokens)
        if not problems and total == 0:
            problems.append("prompt: is empty; give at least one token")
        if sampling.stop and self.tokenizer is None:
            problems.append(f"stop: {sampling.stop!r} needs a tokenizer, and this engine has none; use stop_tokens")
        wrong = [token for token in sampling.stop_tokens if not 0 <= token < self.vocab]
        if wrong:
            problems.append(f"stop_tokens: {wrong} are not token ids; use numbers from 0 to {self.vocab - 1}")
        most = sampling.max_tokens
        if self.limit is not None:
            if total >= self.limit:
                problems.append(
                    f"prompt: {total} tokens are too many; use at most {self.limit - 1}, one less than context_length, "
                    "or raise that"
                )
            elif "max_tokens" not in sampling.model_fields_set or most is None:
                most = min(most or self.limit, self.limit - total)
            elif total + most > self.limit:
                problems.append(
                    f"max_tokens: {most} after {total} tokens of prompt exceeds context_length {self.limit}; "
                    f"use at most {self.limit - total}"
                )
        if prefix is not None and prefix.digest != self.digest:
            problems.append(
                f"prefix: belongs to the model {prefix.digest}, not to this one ({self.digest}); "
                "make the prefix again with this model"
            )
        refuse(problems, "request")
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        before = () if prefix is None else prefix.last
        return Request(tokens, total, sampling, seed, most, self.tokenizer, self.generation.ends, before)

    def cancel(self, request: Request) -> None:
        """Ends a queued or running request in the next round. Does nothing to a finished one."""
        request.cancelled = True

    @torch.no_grad()
    def advance(self) -> list[tuple[Request, Piece]]:
        """Runs one round: reads at most one chunk of a prompt, and generates a token for every slot that decodes.

        Returns:
            The new pieces, each with its request.
        """
        events = self._drop_cancelled()
        self.counters.rounds += 1
        events += self._read()
        events += self._decode()
        for _, piece in events:
            if piece.finish is not None:
                self.counters.finished[piece.finish] += 1
        return events

    def advance_or_fail(self) -> tuple[list[tuple[Request, Piece]], str | None]:
        """Runs one round; any error ends all requests with it. Returns the pieces, and the traceback of the error."""
        try:
            return self.advance(), None
        except Exception as error:  # any failure must reach all callers
            return self.fail(f"{type(error).__name__}: {error}"), traceback.format_exc()

    def fail(self, error: str) -> list[tuple[Request, Piece]]:
        """Ends every request with an error. The engine can then take new ones."""
        with self._lock:
            left = [request for request, _ in self._queue]
            self._queue.clear()
        left += [request for request in self._slots if request is not None]
        self._slots = [None] * len(self._slots)
        self._readings.clear()
        if self.prefixes is not None:
            self.prefixes.clear()  # whatever failed may have written them
        self.counters.finished["error"] += len(left)
        return [(request, Piece(None, finish="error", error=error)) for request in left]

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    @property
    def active(self) -> int:
        """Number of requests in slots, including those whose prompts are being read."""
        return sum(request is not None for request in self._slots)

    @property
    def slots(self) -> int:
        """Most requests that are decoded at once."""
        return len(self._slots)

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self.active > 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the prefixes that are kept."""
        return 0 if self.prefixes is None else self.prefixes.bytes

    def stream(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, prefix: Prefix | None = None
    ) -> Iterator[Piece]:
        """Yields the pieces of one request as they are generated. Leaving the loop early cancels the request.

        Raises:
            ConfigError: the prompt is invalid, or the model gives logits that are not finite.
        """
        request = self.submit(prompt, sampling, prefix)
        mail = self._mail[request] = deque()
        ended = False
        try:
            while not ended:
                while not mail:
                    self._deliver()
                piece = mail.popleft()
                ended = piece.finish is not None
                _raise_error(piece)
                yield piece
        finally:
            del self._mail[request]
            if not ended:
                self.cancel(request)
                self._deliver()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        prefix: Prefix | None = None,
    ) -> list[Completion]:
        """Returns the completions of many prompts, in the same order.

        Args:
            prompts: texts, or lists of token ids.
            sampling: settings for all prompts, or one per prompt.
            prefix: a prefix that all prompts continue.

        Raises:
            ConfigError: a prompt is invalid, raised before anything is generated; or the model gives logits that are
                not finite.
            ValueError: the number of settings differs from that of prompts.
        """
        each = list(sampling) if isinstance(sampling, Sequence) else [sampling or Sampling()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"sampling: {len(each)} settings for {len(prompts)} prompts; give one, or one per prompt")
        for prompt, settings in zip(prompts, each, strict=True):
            self.check(prompt, settings, prefix)
        requests = [self.submit(prompt, settings, prefix) for prompt, settings in zip(prompts, each, strict=True)]
        mail: dict[Request, deque[Piece]] = {request: deque() for request in requests}
        self._mail.update(mail)
        try:
            while any(not pieces or pieces[-1].finish is None for pieces in mail.values()):
                self._deliver()
        finally:  # after an interruption, cancel the requests that did not finish
            for request in requests:
                del self._mail[request]
                if not mail[request] or mail[request][-1].finish is None:
                    self.cancel(request)
        for pieces in mail.values():
            _raise_error(pieces[-1])
        return [Completion.of(request, pieces) for request, pieces in mail.items()]

    @torch.no_grad()
    def prefix(
        self,
        prompt: str | Sequence[int],
        prefix: Prefix | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Prefix:
        """Reads a prompt, after another prefix if one is given, and returns its states for requests to continue.

        Args:
            progress: is called after each chunk with the tokens read so far and those of the prompt.
        """
        request = self.check(prompt, Sampling(max_tokens=1), prefix)
        reading = self._begin(request, 0, prefix)
        while not reading.done:
            self._read_chunk(reading)
            if progress is not None:
                progress(reading.cuts[reading.at - 1].end, len(request.prompt))
        last = (*(() if prefix is None else prefix.last), *request.prompt[-CONTEXT:].tolist())[-CONTEXT:]
        return Prefix(self.digest, request.prompt_tokens, reading.states, reading.logits, reading.seen, last)

    def load_prefix(self, path: str | Path) -> Prefix:
        """Reads a saved prefix. Raises `ConfigError` if it is not a prefix of this model."""
        like = self.model.init_state(1, self._context, "meta")
        return load_prefix(path, self.digest, like, self.model.config.vocab_size, self.vocab, self.device)

    def kept(self, prompt: np.ndarray) -> int:
        """Returns how many tokens of a prompt the prefix cache would save now. Any thread may call this."""
        if self.prefixes is None:
            return 0
        return covered(cuts(prompt, self.prefill_chunk, self.turn_ends), self.prefixes.keys)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Returns a context in which this thread's kernels run on the engine's GPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    @cached_property
    def digest(self) -> str:
        """Digest of the model's configuration and of its weights as they are served."""
        return weights_digest(self.model, self.model.config.model_dump_json())

    @property
    def state_bytes(self) -> int:
        """Bytes of states, caches and pending buffers per slot."""
        wide = self.model.backbone.state_bytes(self._context) + pending_bytes(self.model, self._decoder.write_every)
        return wide - self._decoder.halved_bytes // self.slots

    def _deliver(self) -> None:
        """Runs one round and hands its pieces to the callers of `stream` and `generate`."""
        for request, piece in self.advance():
            if request in self._mail:
                self._mail[request].append(piece)

    def _drop_cancelled(self) -> list[tuple[Request, Piece]]:
        with self._lock:
            gone = [request for request, _ in self._queue if request.cancelled]
            if gone:
                self._queue = deque(entry for entry in self._queue if not entry[0].cancelled)
        for slot, request in enumerate(self._slots):
            if request is not None and request.cancelled:
                gone.append(request)
                self._slots[slot] = None
                self._readings = deque(reading for reading in self._readings if reading.request is not request)
        return [(request, Piece(None, finish="cancelled")) for request in gone]

    def _read(self) -> list[tuple[Request, Piece]]:
        """Reads a chunk of the next prompt. After its last chunk, the request begins to decode.

        Up to `READ_AT_ONCE` prompts take turns, so that a short prompt does not wait until a long one is read. A
        request whose logits are then NaN or infinite ends with an error: its tokens would mean nothing.
        """
        while len(self._readings) < READ_AT_ONCE and None in self._slots:
            with self._lock:
                if not self._queue:
                    break
                request, prefix = self._queue.popleft()
            slot = self._slots.index(None)
            self._slots[slot] = request
            self._readings.append(self._begin(request, slot, prefix))
        if not self._readings:
            return []
        reading = self._readings.popleft()
        if not reading.done:
            self._read_chunk(reading)
        if not reading.done:
            self._readings.append(reading)
        elif not reading.logits.isfinite().all():
            self._slots[reading.slot] = None
            return [(reading.request, Piece(None, finish="error", error=f"{self.name}: {NOT_FINITE}"))]
        else:
            self._decoder.insert(reading.slot, reading.states, reading.logits[None])
            self._decoder.knobs.set(reading.slot, reading.request.sampling, reading.request.seed, reading.seen)
        return []

    def _begin(self, request: Request, slot: int, prefix: Prefix | None) -> _Reading:
        """Begins to read a prompt after `prefix`, else after the longest of its own prefixes that is kept."""
        places, at = cuts(request.prompt, self.prefill_chunk, self.turn_ends), 0
        if prefix is None and self.prefixes is not None:
            at, kept = self.prefixes.find(places)
            if kept is not None:
                self.counters.prefix_hits += 1
                self.counters.prefix_tokens += kept.tokens
                request.cached_tokens = kept.tokens
                whole = self.model.init_state(1, self._context, self.device)
                return _Reading(
                    request, slot, merge(whole, _copy(kept.states)), kept.logits, kept.seen.clone(), places, at
                )
        if prefix is None:
            seen = torch.zeros(self.vocab, dtype=torch.bool, device=self.device)
            return _Reading(request, slot, self.model.init_state(1, self._context, self.device), None, seen, places)
        return _Reading(request, slot, _copy(prefix.states), prefix.logits, prefix.seen.clone(), places)

    def _read_chunk(self, reading: _Reading) -> None:
        cut, begin = reading.cuts[reading.at], reading.cuts[reading.at - 1].end if reading.at else 0
        prompt = reading.request.prompt[begin : cut.end]
        tokens = torch.from_numpy(prompt).to(self.device)
        before = reading.request.prompt_tokens - len(reading.request.prompt)  # tokens of the prefix
        length = self._lengths.choose(before + cut.end)
        logits, after = self.model.prefill(tokens[None], self._lengths.corner(reading.states, length))
        reading.states = merge(reading.states, after)
        reading.logits = logits[0]
        reading.seen[tokens] = True
        reading.at += 1
        self.counters.prompt_tokens += len(prompt)
        last = reading.at >= len(reading.cuts) - 1  # a longer prompt may go on from one of the last two
        if self.prefixes is not None and not before and cut.key is not None and (cut.turn or last):
            states = _copy(self._lengths.corner(reading.states, length))
            self.prefixes.keep(cut.key, Prefix("", cut.end, states, reading.logits, reading.seen.clone()))

    def _decode(self) -> list[tuple[Request, Piece]]:
        reading = {entry.slot for entry in self._readings}
        live = [(i, r) for i, r in enumerate(self._slots) if r is not None and i not in reading]
        if not live:
            return []
        told = any(request.sampling.logprobs is not None for _, request in live)
        kind = TOLD if told else PLAIN if all(request.sampling.plain for _, request in live) else SAMPLED
        wait = self._decoder.choose(kind)
        # The GPU runs the next step while the host handles the tokens of this one. A request that ends with its token
        # does not use that step.
        if not all(request.on_last_token for _, request in live):
            self._decoder.advance(max(request.prompt_tokens + request.generated + 1 for _, request in live))
        tokens, logprobs, top_tokens, top_logprobs = wait()
        events = []
        for slot, request in live:
            if (count := request.sampling.logprobs) is None:
                piece = request.accept(tokens[slot])
            else:
                top = tuple(zip(top_tokens[slot][:count], top_logprobs[slot][:count], strict=True))
                piece = request.accept(tokens[slot], logprobs[slot], top)
            events.append((request, piece))
            if piece.finish is not None:
                self._slots[slot] = None
        self.counters.generated_tokens += len(events)
        return events


def _raise_error(piece: Piece) -> None:
    if piece.finish == "error":
        raise ConfigError([piece.error], "model")


def _copy(states: ModelState) -> ModelState:
    return {layer: {name: x.clone() for name, x in state.items()} for layer, state in states.items()}


NOTHING = np.zeros(0, np.int64)


def check_settings(
    slots: int, context_length: int | None, prefill_chunk: int | None, device: str, prefix_cache: float = 0.0
) -> None:
    """Raises `ConfigError` with all invalid settings of an engine."""
    whole = {"slots": slots, "context_length": context_length, "prefill_chunk": prefill_chunk}
    settings = {key: value for key, value in whole.items() if value is not None}
    problems = [f"{key}: {value} is not above 0" for key, value in settings.items() if value < 1]
    problems += [f"{key}: {value} is above {1 << 31:,}" for key, value in settings.items() if value > 1 << 31]
    if not 0 <= prefix_cache <= 1 << 20:
        problems.append(f"prefix_cache: {prefix_cache} is not a number of GiB; use 0 for no cache, or for example 1")
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        problems.append(f"device: {device!r} is unknown; use auto, cpu, cuda or cuda:1")
    elif device.startswith("cuda") and not torch.cuda.is_available():
        problems.append(f"device: {device} needs a CUDA GPU, and this machine has none; use cpu")
    elif device.startswith("cuda:") and int(device[5:]) >= torch.cuda.device_count():
        problems.append(
            f"device: {device} is not there; this machine has {torch.cuda.device_count()} GPUs, from cuda:0 on"
        )
    refuse(problems, "engine")


def encode(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab: int, problems: list[str], begins: bool = True
) -> np.ndarray:
    """Returns the token ids of a prompt, int64 [T]. Adds the reasons to `problems` if the prompt cannot be used.

    Args:
        begins: the text is the start of a sequence, not the continuation of a prefix. It then starts with the
            tokenizer's `prompt_start`. If the tokenizer has no such tokens, an empty text becomes the end-of-document
            token. In training this token precedes each document, so the model begins a new document.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            fix = "give token ids, or put a tokenizer.json into its folder"
            problems.append(f"prompt: is text, but this model has no tokenizer; {fix}")
            return NOTHING
        try:
            if not begins:
                return np.asarray(encode_inside(lambda text: tokenizer.encode(text).tolist(), prompt), np.int64)
            start = tokenizer.prompt_start or (() if prompt else (tokenizer.end_of_document,))
            return np.concatenate([np.asarray(start, np.int64), tokenizer.encode(prompt)])
        except ValueError as error:
            problems.append(f"prompt: {error}")
            return NOTHING
    tokens = np.asarray(prompt)
    if tokens.size == 0:
        return NOTHING
    if tokens.dtype.kind in "Of" and all(type(token) is int for token in prompt):  # more than 64 bits
        tokens = np.asarray(prompt, object)
    elif tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        problems.append("prompt: is neither text nor a list of token ids; give text or a list of whole numbers")
        return NOTHING
    if outside := tokens[(tokens < 0) | (tokens >= vocab)][:3].tolist():
        problems.append(f"prompt: {outside} are not token ids; use numbers from 0 to {vocab - 1}")
        return NOTHING
    return tokens.astype(np.int64)
