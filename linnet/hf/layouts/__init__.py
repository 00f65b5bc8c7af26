"""Checkpoint layouts that Linnet reads, by the `model_type` of config.json; timm's have an `architecture` instead."""

import re
from collections.abc import Mapping

import torch

from linnet.companions import Offer
from linnet.config import ConfigError, parse
from linnet.hf.layouts import fla, hybrids, sparse, uniform
from linnet.hf.layouts.base import HEAD, LARGEST, Part, Plan, Reader, Settings
from linnet.hf.layouts.family import Family
from linnet.models import CausalLM, ModelConfig, upgrade

TIMM, SSM = "timm", "mamba_ssm"


def read_linnet(settings: Settings) -> Plan:
    """Reads Linnet's own export, to convert it back to a model folder."""
    values = settings.values.get("model")
    if not isinstance(values, dict):
        settings.problems.append(f"model: must be an object, the configuration of a Linnet model (given {values!r})")
        settings.check()
    repeats = re.findall(r"\d+", str(values.get("layout")))
    if any(len(number) > 4 or int(number) > LARGEST["layers"] for number in repeats):
        settings.problems.append(f"model.layout: has more than {LARGEST['layers']} layers (given {values['layout']!r})")
        settings.check()
    try:
        model = parse(ModelConfig, upgrade(values), "model of config.json")
        with torch.device("meta"):
            names = CausalLM(model).state_dict()
    except (RuntimeError, TypeError, OverflowError) as error:  # RecursionError is a RuntimeError
        raise ConfigError([f"model: cannot be built ({str(error).splitlines()[0]})"], "config.json") from None
    return Plan(model, {name: Part(f"model.{name}") for name in names})


# model_type -> the family, which is read and written by the same tables
FAMILIES: dict[str, Family] = {
    "bailing_hybrid": sparse.BAILING,
    "bamba": hybrids.BAMBA,
    "delta_net": fla.DELTA_NET,
    "falcon_h1": hybrids.FALCON,
    "gated_deltanet": fla.GATED_DELTANET,
    "granitemoehybrid": hybrids.GRANITE,
    "jamba": sparse.JAMBA,
    "kda": fla.KDA,
    "kimi_linear": sparse.KIMI,
    "lfm2": hybrids.LFM2,
    "llama": uniform.LLAMA,
    "mamba": uniform.MAMBA,
    "mamba2": hybrids.MAMBA,
    "minimax": sparse.MINIMAX,
    "nemotron_h": hybrids.NEMOTRON,
    "olmo_hybrid": hybrids.OLMO,
    "qwen2": uniform.QWEN2,
    "qwen3": uniform.QWEN3,
    "qwen3_5": hybrids.QWEN,
    "qwen3_5_text": hybrids.QWEN,
    "qwen3_next": hybrids.QWEN_NEXT,
    "rwkv7": uniform.RWKV_FLA,
    "rwkv7_author": uniform.RWKV_OWN,
    "rwkv7_fla": uniform.RWKV_FLA,
}


# families that are read alone
READ: dict[str, Family] = {
    "gla": fla.GLA,
    "hgrn": fla.HGRN,
    "hgrn2": fla.HGRN2,
    "lightnet": fla.LIGHTNET,
    "mistral": uniform.MISTRAL,
    "transformer": fla.TRANSFORMER,
    "transnormer": uniform.TRANSNORMER,
}
# model_type -> (name for messages, reader, names that the embedding tensor may have; "" for models of images)
CORE: dict[str, tuple[str, Reader, str]] = {
    **{
        kind: (family.title, family.read, family.spellings("embedding"))
        for kind, family in {**FAMILIES, **READ}.items()
    },
    "kimi_linear": (sparse.KIMI.title, sparse.read_kimi, sparse.KIMI.spellings("embedding")),
    "linnet": ("Linnet", read_linnet, "model.embedding.weight"),
    "mamba": (uniform.MAMBA.title, uniform.read_mamba, uniform.MAMBA.spellings("embedding")),
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
