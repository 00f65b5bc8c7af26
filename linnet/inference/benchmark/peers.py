"""Models of other libraries to compare with, in their usual configuration: the shape of a recipe, random weights.

- `transformers`: its Llama with SDPA and its default cache (`DynamicCache`).
- `transformers-static`: the same with a static cache, for which `generate` compiles the model.
- `fla`: HGRN2 of flash-linear-attention.
"""

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linnet.config import ConfigError, not_installed
from linnet.inference.benchmark.throughput import synchronize
from linnet.install import install_command
from linnet.models import ModelConfig

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
    """A model that generates greedily through transformers' `generate`."""

    name: str
    device: torch.device
    weight_bytes: int
    _model: Any
    _cache: dict[str, str] = {}  # cache arguments for `generate`

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
        found = self._model.generate(
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
        if found.shape[1] != tokens.shape[1] + new or len(clock.times) != new + 1:
            raise RuntimeError(f"{self.name} generated {found.shape[1] - tokens.shape[1]} tokens instead of {new}")
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
    found = {}
    for name in _RECORDED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


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
        self.name, self.model, self.device = name, model, torch.device(device)
        self.vocab_size = config.vocab_size
        settings = transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=_inner(swiglu, config),
            num_hidden_layers=config.num_layers,
            num_attention_heads=attention["num_heads"],
            num_key_value_heads=attention["num_kv_heads"] or attention["num_heads"],
            max_position_embeddings=1 << 20,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
        self._kv_bytes = 2 * settings.num_hidden_layers * settings.num_key_value_heads * dtype.itemsize
        self._kv_bytes *= settings.hidden_size // settings.num_attention_heads
        self._model = _build(transformers.LlamaForCausalLM, settings, device, dtype)
        self._cache = {"cache_implementation": "static"} if name == "transformers-static" else {}
        self.weight_bytes = sum(p.numel() * p.element_size() for p in set(self._model.parameters()))

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
        self.name, self.model, self.device = name, model, torch.device(device)
        self.vocab_size = config.vocab_size
        settings = HGRN2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=_inner(sglu, config),
            num_hidden_layers=config.num_layers,
            expand_ratio=config.d_model // mixer["num_heads"],
            max_position_embeddings=1 << 20,
            tie_word_embeddings=config.tie_embeddings,
        )
        self._model = _build(HGRN2ForCausalLM, settings, device, dtype)
        self._state_bytes = 4 * config.num_layers * config.d_model * config.d_model // mixer["num_heads"]
        self.weight_bytes = sum(p.numel() * p.element_size() for p in set(self._model.parameters()))

    def carried_bytes(self, context: int) -> int:
        return self._state_bytes

    def moved_bytes(self, batch: int, context: int) -> int:
        return self.weight_bytes + 2 * batch * self._state_bytes  # each state is read and written


def _inner(channel: dict, config: ModelConfig) -> int:
    return channel["inner"] or -(-8 * config.d_model // 24) * 8


def _build(model_class: type, settings: object, device: str, dtype: torch.dtype):
    """Builds a model directly on its device and in its dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return model_class(settings).to(device).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)
