"""Checkpoint layouts that Linnet reads, by the `model_type` of config.json; timm's have an `architecture` instead."""

from collections.abc import Mapping

from linnet.companions import Offer
from linnet.hf.layouts import fla, hybrids, linnet, llama, mamba, rwkv, transnormer
from linnet.hf.layouts.base import HEAD, Part, Plan, Reader, Settings
from linnet.hf.layouts.family import Family

TIMM, SSM = "timm", "mamba_ssm"

# model_type -> the family, which is read and written by the same tables
FAMILIES: dict[str, Family] = {
    "bailing_hybrid": hybrids.BAILING,
    "bamba": hybrids.BAMBA,
    "delta_net": fla.DELTA_NET,
    "falcon_h1": hybrids.FALCON,
    "gated_deltanet": fla.GATED_DELTANET,
    "granitemoehybrid": hybrids.GRANITE,
    "jamba": hybrids.JAMBA,
    "kda": fla.KDA,
    "kimi_linear": hybrids.KIMI,
    "lfm2": hybrids.LFM2,
    "llama": llama.LLAMA,
    "mamba": mamba.MAMBA,
    "mamba2": hybrids.MAMBA,
    "minimax": hybrids.MINIMAX,
    "nemotron_h": hybrids.NEMOTRON,
    "olmo_hybrid": hybrids.OLMO,
    "qwen2": llama.QWEN2,
    "qwen3": llama.QWEN3,
    "qwen3_5": hybrids.QWEN,
    "qwen3_5_text": hybrids.QWEN,
    "qwen3_next": hybrids.QWEN_NEXT,
    "rwkv7": rwkv.FLA,
    "rwkv7_author": rwkv.OWN,
    "rwkv7_fla": rwkv.FLA,
}


# families that are read alone
READ: dict[str, Family] = {
    "gla": fla.GLA,
    "hgrn": fla.HGRN,
    "hgrn2": fla.HGRN2,
    "lightnet": fla.LIGHTNET,
    "mistral": llama.MISTRAL,
    "transformer": fla.TRANSFORMER,
    "transnormer": transnormer.TRANSNORMER,
}
# model_type -> (name for messages, reader, names that the embedding tensor may have; "" for models of images)
CORE: dict[str, tuple[str, Reader, str]] = {
    **{
        kind: (family.title, family.read, family.spellings("embedding"))
        for kind, family in {**FAMILIES, **READ}.items()
    },
    "kimi_linear": (hybrids.KIMI.title, hybrids.read_kimi, hybrids.KIMI.spellings("embedding")),
    "linnet": ("Linnet", linnet.read, "model.embedding.weight"),
    "mamba": (mamba.MAMBA.title, mamba.read, mamba.MAMBA.spellings("embedding")),
    "mamba2": (hybrids.MAMBA.title, hybrids.read_mamba2, hybrids.MAMBA.spellings("embedding")),
    SSM: ("Mamba-2 of state-spaces", hybrids.read_mamba_ssm, hybrids.MAMBA.spellings("embedding")),
}
LAYOUTS: Mapping[str, tuple[str, Reader, str]] = Offer("layouts", CORE)

# model_type -> the layer that Linnet lacks
MISSING = {
    "deit": "a distillation token (a DeiT without one is published as `vit`, such as facebook/deit-small-patch16-224)",
    "rwkv": "RWKV",
    "rwkv6": "RWKV-6",
}

__all__ = ["FAMILIES", "HEAD", "LAYOUTS", "MISSING", "Part", "Plan", "SSM", "Settings", "TIMM"]
