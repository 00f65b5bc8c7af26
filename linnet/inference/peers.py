"""transformers' Llama as people run it, to be measured beside Linnet: the shape of a recipe, random weights, SDPA.

`transformers` generates with its default cache (`DynamicCache`), `transformers-static` with a static one, for which
`generate` compiles the model.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from linnet.config import ConfigError
from linnet.inference.throughput import synchronize
from linnet.models import ModelConfig

PEERS = ("transformers", "transformers-static")


class TransformersLlama:
    """`LlamaForCausalLM.generate`, greedy."""

    def __init__(self, name: str, config: ModelConfig, model: str, device: str, dtype: torch.dtype):
        try:
            import transformers
        except ImportError:
            raise ConfigError(["peers: transformers is not installed; pip install 'linnet[hf]'"], "bench") from None
        attention, swiglu = config.options.get("attention"), config.options.get("swiglu")
        if {block.mixer for block in config.blocks} != {"attention"} or swiglu is None:
            raise ConfigError([f"peer_model: {model} is no Llama; use llama-410m or another size of it"], "bench")
        self.name, self.model, self.device = name, model, torch.device(device)
        self.vocab_size = config.vocab_size
        settings = transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=swiglu["inner"] or -(-8 * config.d_model // 24) * 8,
            num_hidden_layers=config.num_layers,
            num_attention_heads=attention["num_heads"],
            num_key_value_heads=attention["num_kv_heads"] or attention["num_heads"],
            max_position_embeddings=1 << 20,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="sdpa",
        )
        self._kv_bytes = 2 * settings.num_hidden_layers * settings.num_key_value_heads * dtype.itemsize
        self._kv_bytes *= settings.hidden_size // settings.num_attention_heads
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self._model = transformers.LlamaForCausalLM(settings).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(default)
        self._cache = {"cache_implementation": "static"} if name == "transformers-static" else {}
        self.weight_bytes = sum(p.numel() * p.element_size() for p in set(self._model.parameters()))

    def carried_bytes(self, context: int) -> int:
        return self._kv_bytes * context

    def warm(self, tokens: Tensor, new: int) -> None:
        self.run(tokens, new if self._cache else min(new, 8))  # the compiled model is one of its cache's length

    @torch.no_grad()
    def run(self, tokens: Tensor, new: int) -> tuple[float, float]:
        tokens = tokens.to(self.device)
        first = self._generate(tokens, 1)
        return first, self._generate(tokens, new) - first if new > 1 else 0.0

    @torch.no_grad()
    def start(self, tokens: Tensor) -> Callable[[], None]:
        """Reads tokens [B, T]; each call of what is returned generates one more, without `generate` around it."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        logits = self._model(tokens.to(self.device), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        last = logits[:, -1:].argmax(-1)

        def advance() -> None:
            nonlocal last
            last = self._model(last, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            last.tolist()  # as a caller sees it

        return advance

    def _generate(self, tokens: Tensor, new: int) -> float:
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
            **self._cache,
        )
        found.cpu()
        if found.shape[1] != tokens.shape[1] + new:
            raise RuntimeError(f"transformers generated {found.shape[1] - tokens.shape[1]} tokens instead of {new}")
        return time.perf_counter() - began
