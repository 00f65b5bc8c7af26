"""Measures generation speed with the protocol of paper 001 (Figure 5: prompts of 512 tokens, 1,024 new) and others.

A case is a batch of prompts of one length and a number of new tokens, chosen greedily. Two times are measured, both as
a caller sees them. The time to the first token covers reading all prompts of the batch, choosing one token for each,
and copying it to the host. The time of the other tokens includes copying each to the host before the next is requested.

`bandwidth_share` is the bytes moved per token, divided by its time and by the measured bandwidth of a large copy. The
bytes count the weights once, states as often as they are read and written, and caches once.

Models of other libraries to compare with are in their usual configuration: the shape of a recipe, random weights.

- `transformers`: its Llama with SDPA and its default cache (`DynamicCache`).
- `transformers-static`: the same with a static cache, for which `generate` compiles the model.
- `fla`: HGRN2 of flash-linear-attention.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from linnet.config import ConfigError, not_installed
from linnet.inference.decoding import (
    PLAIN,
    Decoder,
    choose_interval,
    pending_bytes,
    prepare_steps,
    saved_bytes,
)
from linnet.install import install_command
from linnet.layers.base import lower_precision
from linnet.layers.channels.glu import default_inner
from linnet.models import CausalLM, ModelConfig, ModelState
from linnet.provenance import installed_version

FILL = "max"  # the largest batch that fits into memory
_AT_A_TIME = 16_384  # most tokens of a batch of prompts that are read at a time
_STATES_AT_A_TIME = 2**31  # most bytes of their states, which exist twice: before and after a chunk


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        batch: number of prompts; `FILL` takes as many as fit into memory if each sequence grows to `room` tokens.
        prompt: tokens per prompt.
        new: tokens generated per prompt.
        room: tokens per sequence for which `FILL` reserves memory; 0 means prompt + new. A larger value measures a few
            tokens of a long generation with the batch that fits all of it.
    """

    batch: int | str
    prompt: int
    new: int
    room: int = 0


class System(Protocol):
    """A system that generates tokens: Linnet, or a peer of `linnet.inference.benchmark`."""

    name: str
    model: str
    vocab_size: int
    weight_bytes: int

    def carried_bytes(self, context: int) -> int:
        """Returns the bytes of states and caches of one sequence after `context` tokens."""

    def held_bytes(self, context: int) -> int:
        """Returns the bytes of memory per sequence of a large batch if it may grow to `context` tokens."""

    def moved_bytes(self, batch: int, context: int) -> int:
        """Returns the bytes moved to generate one token for all sequences after `context` tokens."""

    def warm(self, tokens: Tensor, new: int) -> None:
        """Does the one-time work of the first `run` with such tokens: compilation and CUDA graph capture."""

    def run(self, tokens: Tensor, new: int) -> tuple[float, float]:
        """Reads tokens [B, T] and generates `new` per row. Returns seconds to the first token, and for all others."""


class Linnet:
    """A model with random weights and the engine's decoder. Prompts are read `chunk` tokens at a time."""

    def __init__(self, config: ModelConfig, model: str, device: str, dtype: torch.dtype, chunk: int = 2048):
        self.name, self.model, self.device = "linnet", model, torch.device(device)
        self.vocab_size, self._chunk = config.vocab_size, chunk
        with torch.no_grad():
            self._model = random_model(config, self.device, dtype)
            prepare_steps(self._model)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in set(self._model.parameters()))
        self._decoder: tuple[tuple[int, int], Decoder] | None = None

    def carried_bytes(self, context: int) -> int:
        return self._model.backbone.state_bytes(context)

    def held_bytes(self, context: int) -> int:
        return self.carried_bytes(context) + (pending_bytes(self._model) if self.device.type == "cuda" else 0)

    def moved_bytes(self, batch: int, context: int) -> int:
        constant = self.carried_bytes(1)
        if grown := self.carried_bytes(context) - constant:  # `constant` includes one token of the caches; subtract it
            constant = max(0, constant - grown // (context - 1))
        spared = saved_bytes(self._model, choose_interval(self._model, batch, self.device))
        return self.weight_bytes + batch * (2 * constant + grown - spared)

    @torch.no_grad()
    def warm(self, tokens: Tensor, new: int) -> None:
        batch, length = tokens.shape
        decoder = self._prepare(batch, length + new)
        at_once = self._rows(batch, length, length + new)
        for rows in {at_once, batch % at_once} - {0}:
            self._read(tokens[:rows], decoder, length + new)
        decoder.choose(PLAIN)()
        decoder.advance()

    @torch.no_grad()
    def run(self, tokens: Tensor, new: int) -> tuple[float, float]:
        batch, length = tokens.shape
        decoder = self._prepare(batch, length + new)
        synchronize(self.device)
        began = time.perf_counter()
        self._read(tokens, decoder, length + new)
        beside = self.device.type != "cpu"  # like the engine: the next step runs while the host handles the token
        for place in range(new):
            wait = decoder.choose(PLAIN)
            if beside and place < new - 1:
                decoder.advance(length + place + 1)
            wait()
            if place == 0:
                first = time.perf_counter() - began
            if not beside and place < new - 1:  # after the time was taken: the first token must not include this step
                decoder.advance(length + place + 1)
        return first, time.perf_counter() - began - first

    def _prepare(self, batch: int, context: int) -> Decoder:
        """Returns the decoder of a case, built and captured once for all repeats."""
        if self._decoder is None or self._decoder[0] != (batch, context):
            self._decoder = None
            made = Decoder(self._model, batch, self.vocab_size, context, self.device, kinds=(PLAIN,))
            self._decoder = (batch, context), made
        return self._decoder[1]

    def _rows(self, batch: int, length: int, context: int) -> int:
        """Returns how many prompts of a batch are read together, into states for `context` tokens."""
        states = _STATES_AT_A_TIME // max(1, self.carried_bytes(context))
        return max(1, min(batch, _AT_A_TIME // min(length, self._chunk), states))

    def _read(self, tokens: Tensor, decoder: Decoder, context: int) -> None:
        batch, length = tokens.shape
        rows = self._rows(batch, length, context)
        for start in range(0, batch, rows):
            some = tokens[start : start + rows].to(self.device)
            states: ModelState = self._model.init_state(some.shape[0], context, self.device)
            for place in range(0, length, self._chunk):
                logits, states = self._model.prefill(some[:, place : place + self._chunk], states)
            decoder.insert(start, states, logits)


@torch.no_grad()
def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> CausalLM:
    """Returns a model with normally distributed weights, built on its device, for inference only.

    Building a large model on the CPU would take minutes.
    """
    with torch.device(device):
        model = CausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, config.init_std)
    lower_precision(model, dtype)
    return model.eval().requires_grad_(False)


NUMBERS = frozenset(
    "prompt new batch first_token_s prefill_tokens_per_second tokens_per_second weight_bytes carried_bytes peak_bytes "
    "repeats token_ms decode_tokens_per_second bandwidth_share".split()
)
"""Numbers of a row of `measure`."""


def measure(system: System, cases: Sequence[Case], repeats: int, bandwidth: float) -> Iterator[dict]:
    """Yields one row per case: medians over `repeats` runs after a warm-up.

    The row of a case that does not fit into memory has `error` set.
    """
    for case in cases:
        row = {"model": system.model, "system": system.name, "prompt": case.prompt, "new": case.new, "error": ""}
        batch = _fill(system, case) if case.batch == FILL else int(case.batch)
        while True:
            try:
                row |= {"batch": batch} | _measure(system, batch, case, repeats, bandwidth)
                break
            except torch.OutOfMemoryError:
                _free(system)
                if case.batch != FILL or batch < 2:
                    row |= {"batch": batch, "error": "out of memory"}
                    break
                batch = int(0.85 * batch)
        yield row


def copy_bandwidth(device: torch.device) -> float:
    """Returns the bandwidth of a large copy in bytes per second; each byte counts as read and as written."""
    source = torch.ones(2**31 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(10):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2 * source.numel() / statistics.median(times[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure(system: System, batch: int, case: Case, repeats: int, bandwidth: float) -> dict:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(system.vocab_size, (batch, case.prompt), generator=generator)
    gpu = torch.cuda.is_available()
    if gpu:
        _free(system)  # memory of earlier cases must not count in the peak of this one
        torch.cuda.reset_peak_memory_stats()
    system.warm(tokens, case.new)
    firsts, others = zip(*(system.run(tokens, case.new) for _ in range(repeats)), strict=True)
    first, other = statistics.median(firsts), statistics.median(others)
    row = {
        "first_token_s": first,
        "prefill_tokens_per_second": batch * case.prompt / first,
        "tokens_per_second": batch * case.new / (first + other),
        "weight_bytes": system.weight_bytes,
        "carried_bytes": system.carried_bytes(case.prompt + case.new),
        "peak_bytes": torch.cuda.max_memory_allocated() if gpu else None,
        "repeats": repeats,
    }
    if case.new > 1:
        step = other / (case.new - 1)
        row |= {
            "token_ms": 1e3 * step,
            "decode_tokens_per_second": batch / step,
            "bandwidth_share": system.moved_bytes(batch, case.prompt + case.new // 2) / step / bandwidth,
        }
    return row


def _fill(system: System, case: Case) -> int:
    """Returns the batch whose states, caches, pending buffers, logits and tokens take 90 % of the free memory."""
    if not torch.cuda.is_available():
        return 64
    _free(system)
    free, _ = torch.cuda.mem_get_info()
    each = system.held_bytes(case.room or case.prompt + case.new) + 8 * system.vocab_size
    return max(1, int(0.9 * free / each))


def _free(system: System) -> None:
    """Frees the memory of earlier cases."""
    if isinstance(system, Linnet):
        system._decoder = None
    gc.collect()
    torch.cuda.empty_cache()


PEERS = {"transformers": "llama", "transformers-static": "llama", "fla": "hgrn2"}  # peer: recipe with the same shape

_TRANSFORMERS = "transformers", install_command("hf")
_PACKAGES = {
    "transformers": _TRANSFORMERS,
    "transformers-static": _TRANSFORMERS,
    "fla": ("fla", "pip install flash-linear-attention"),
}
_RECORDED = "torch", "triton", "transformers", "flash-linear-attention"


class _Clock:
    """A streamer for `generate` that records when each token arrives on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:  # called first with the prompt, then once per token
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class _Generator:
    """A model with random weights that generates greedily through transformers' `generate`."""

    _cache: dict[str, str] = {}  # cache arguments for `generate`

    def __init__(self, name: str, model: str, model_class: type, settings: Any, device: str, dtype: torch.dtype):
        self.name, self.model, self.device = name, model, torch.device(device)
        self.vocab_size = settings.vocab_size
        self._model = _build(model_class, settings, device, dtype)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in set(self._model.parameters()))

    def carried_bytes(self, context: int) -> int:
        raise NotImplementedError

    def held_bytes(self, context: int) -> int:
        return self.carried_bytes(context)

    def moved_bytes(self, batch: int, context: int) -> int:
        return self.weight_bytes + batch * self.carried_bytes(context)

    def warm(self, tokens: Tensor, new: int) -> None:
        self.run(tokens, new if self._cache else min(new, 8))  # with a static cache, each length compiles anew

    @torch.no_grad()
    def run(self, tokens: Tensor, new: int) -> tuple[float, float]:
        tokens, clock = tokens.to(self.device), _Clock()
        synchronize(self.device)
        began = time.perf_counter()
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
            eos_token_id=None,
            streamer=clock,
            **self._cache,
        )
        if output.shape[1] != tokens.shape[1] + new or len(clock.times) != new + 1:
            raise RuntimeError(f"{self.name} generated {output.shape[1] - tokens.shape[1]} tokens instead of {new}")
        return clock.times[1] - began, clock.times[-1] - clock.times[1]


def missing(names: Sequence[str]) -> list[str]:
    """Returns one problem per package that these peers need and that is not installed."""
    packages = {_PACKAGES[name] for name in names}
    return [
        f"--peer needs {package}, which is not installed; install it: {fix}"
        for package, fix in sorted(packages)
        if not_installed([package])
    ]


def versions() -> dict[str, str]:
    """Returns versions of the packages that decide the speed of Linnet and its peers; "" for one not installed."""
    return {name: installed_version(name) for name in _RECORDED}


def make_peer(name: str, config: ModelConfig, model: str, device: str, dtype: torch.dtype) -> _Generator:
    """Returns a peer of `PEERS` in the shape of a recipe. Raises `ConfigError` if it cannot have that shape."""
    return (FlaHGRN2 if name == "fla" else TransformersLlama)(name, config, model, device, dtype)


class TransformersLlama(_Generator):
    """transformers' `LlamaForCausalLM`."""

    def __init__(self, name: str, config: ModelConfig, model: str, device: str, dtype: torch.dtype):
        import transformers

        attention, swiglu = config.options.get("attention"), config.options.get("swiglu")
        if {(block.mixer, block.alias) for block in config.blocks} != {("attention", "")} or swiglu is None:
            raise ConfigError([f"peers: {model} is not a Llama; use llama-410m or another size of it"], "bench")
        settings = transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=swiglu["inner"] or default_inner(config.d_model),
            num_hidden_layers=config.num_layers,
            num_attention_heads=attention["num_heads"],
            num_key_value_heads=attention["num_kv_heads"] or attention["num_heads"],
            max_position_embeddings=1 << 20,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
        self._kv_bytes = 2 * settings.num_hidden_layers * settings.num_key_value_heads * dtype.itemsize
        self._kv_bytes *= settings.hidden_size // settings.num_attention_heads
        self._cache = {"cache_implementation": "static"} if name == "transformers-static" else {}
        super().__init__(name, model, transformers.LlamaForCausalLM, settings, device, dtype)

    def carried_bytes(self, context: int) -> int:
        return self._kv_bytes * context

    @torch.no_grad()
    def start(self, tokens: Tensor) -> Callable[[], None]:
        """Reads tokens [B, T]. Returns a function that generates one more token per call, without `generate`."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        logits = self._model(tokens.to(self.device), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        last = logits[:, -1:].argmax(-1)

        def advance() -> None:
            nonlocal last
            last = self._model(last, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            last.tolist()  # a caller needs the token on the host

        return advance


class FlaHGRN2(_Generator):
    """flash-linear-attention's `HGRN2ForCausalLM`."""

    def __init__(self, name: str, config: ModelConfig, model: str, device: str, dtype: torch.dtype):
        from fla.models import HGRN2Config, HGRN2ForCausalLM

        mixer, sglu = config.options.get("hgrn2"), config.options.get("sglu")
        if {(block.mixer, block.alias) for block in config.blocks} != {("hgrn2", "")} or sglu is None:
            raise ConfigError([f"peers: {model} is not an HGRN2; use hgrn2-410m or another size of it"], "bench")
        settings = HGRN2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=sglu["inner"] or default_inner(config.d_model),
            num_hidden_layers=config.num_layers,
            expand_ratio=config.d_model // mixer["num_heads"],
            max_position_embeddings=1 << 20,
            tie_word_embeddings=config.tie_embeddings,
        )
        self._state_bytes = 4 * config.num_layers * config.d_model * config.d_model // mixer["num_heads"]
        super().__init__(name, model, HGRN2ForCausalLM, settings, device, dtype)

    def carried_bytes(self, context: int) -> int:
        return self._state_bytes

    def moved_bytes(self, batch: int, context: int) -> int:
        return self.weight_bytes + 2 * batch * self._state_bytes  # each state is read and written


def _build(model_class: type, settings: object, device: str, dtype: torch.dtype):
    """Builds a model directly on its device and in its dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_class(settings).to(device).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
