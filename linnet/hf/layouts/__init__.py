"""Checkpoint layouts that Linnet reads, by the `model_type` of config.json; timm's have an `architecture` instead."""

from collections.abc import Mapping

from linnet.companions import Offer
from linnet.hf.layouts import fla, linnet, llama, mamba, transnormer
from linnet.hf.layouts.base import HEAD, Part, Plan, Reader, Settings

TIMM = "timm"

# model_type -> (name for messages, reader, name of the embedding tensor; "" for models of images)
CORE: dict[str, tuple[str, Reader, str]] = {
    "gla": ("GLA of flash-linear-attention", fla.read_gla, fla.EMBEDDING),
    "hgrn": ("HGRN of flash-linear-attention", fla.read_hgrn, fla.EMBEDDING),
    "hgrn2": ("HGRN2 of flash-linear-attention", fla.read_hgrn2, fla.EMBEDDING),
    "lightnet": ("LightNet of flash-linear-attention", fla.read_lightnet, fla.EMBEDDING),
    "linnet": ("Linnet", linnet.read, "model.embedding.weight"),
    "llama": ("Llama", llama.read, llama.EMBEDDING),
    "mamba": ("Mamba", mamba.read, mamba.EMBEDDING),
    "mistral": ("Mistral", llama.read_mistral, llama.EMBEDDING),
    "qwen2": ("Qwen2", llama.read_qwen2, llama.EMBEDDING),
    "qwen3": ("Qwen3", llama.read_qwen3, llama.EMBEDDING),
    "transformer": ("Transformer of flash-linear-attention", fla.read_transformer, fla.EMBEDDING),
    "transnormer": ("TransNormerLLM", transnormer.read, transnormer.EMBEDDING),
}
LAYOUTS: Mapping[str, tuple[str, Reader, str]] = Offer("layouts", CORE)

# model_type -> the layer that Linnet lacks
MISSING = {
    "deit": "a distillation token (a DeiT without one is published as `vit`, such as facebook/deit-small-patch16-224)",
    "mamba2": "Mamba-2 (SSD: one decay per head and token, and a convolution of x, B and C together)",
    "rwkv": "RWKV",
    "rwkv6": "RWKV-6",
}

__all__ = ["HEAD", "LAYOUTS", "MISSING", "Part", "Plan", "Settings", "TIMM"]
