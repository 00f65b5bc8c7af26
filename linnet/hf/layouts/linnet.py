"""Linnet's own export, back into a model folder."""

import torch

from linnet.config import parse
from linnet.hf.layouts.base import Part, Plan, Settings
from linnet.models import CausalLM, ModelConfig


def read(settings: Settings) -> Plan:
    values = settings.values.get("model")
    if not isinstance(values, dict):
        settings.problems.append(f"model: must be an object, the configuration of a Linnet model (given {values!r})")
    settings.check()

    model = parse(ModelConfig, values, "model of config.json")
    with torch.device("meta"):
        names = CausalLM(model).state_dict()
    return Plan(model, {name: Part(f"model.{name}") for name in names})
