"""Linnet's own export, to convert it back to a model folder."""

import re

import torch

from linnet.config import ConfigError, parse
from linnet.hf.layouts.base import LARGEST, Part, Plan, Settings
from linnet.models import CausalLM, ModelConfig, upgrade


def read(settings: Settings) -> Plan:
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
