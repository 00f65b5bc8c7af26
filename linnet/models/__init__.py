"""Model configurations, causal language models, recipes and costs.

config.py   configurations, around a stack.py of blocks that layout.py reads    kinds.py   configuration -> model
causal_lm.py, backbone.py   language models    synthetic/   autoencoders; the rooms of `linnet.companions` have others
recipes/   models by name, which registry.py holds    costs.py   parameters, FLOPs, state
"""

from functools import partial

from linnet.deprecation import renamed
from linnet.models.backbone import Backbone, ModelState
from linnet.models.causal_lm import CausalLM, build_model, empty_model
from linnet.models.config import ModelConfig
from linnet.models.costs import (
    active_parameters,
    attention_share,
    count_parameters,
    flops_004,
    flops_causal,
    flops_exact,
    flops_paper,
    state_bytes,
    state_numbers,
)
from linnet.models.kinds import KINDS, OBJECTIVE_KINDS, Kind, build, empty_of, kind_of
from linnet.models.layout import Alias, LayerSpec, parse_layout
from linnet.models.recipes import FAMILIES, RECIPES, families_of, family, get_recipe, kind_of_recipe, recipes_of
from linnet.models.stack import StackConfig, check, upgrade
from linnet.models.synthetic import AutoEncoder

__getattr__ = partial(renamed, __name__)

__all__ = [
    "FAMILIES",
    "KINDS",
    "OBJECTIVE_KINDS",
    "RECIPES",
    "Alias",
    "AutoEncoder",
    "Backbone",
    "CausalLM",
    "Kind",
    "LayerSpec",
    "ModelConfig",
    "ModelState",
    "StackConfig",
    "active_parameters",
    "attention_share",
    "build",
    "build_model",
    "check",
    "count_parameters",
    "empty_model",
    "empty_of",
    "families_of",
    "family",
    "flops_004",
    "flops_causal",
    "flops_exact",
    "flops_paper",
    "get_recipe",
    "kind_of",
    "kind_of_recipe",
    "parse_layout",
    "recipes_of",
    "state_bytes",
    "state_numbers",
    "upgrade",
]
