"""Model configurations, causal language models, recipes and costs."""

from linnet.models.autoencoder import AutoEncoder, build_autoencoder
from linnet.models.backbone import Backbone, ModelState
from linnet.models.causal_lm import CausalLM, build_model, empty_model
from linnet.models.config import ModelConfig
from linnet.models.costs import (
    active_parameters,
    attention_share,
    count_parameters,
    flops_causal,
    flops_exact,
    flops_paper,
    state_bytes,
    state_numbers,
)
from linnet.models.layout import Alias, LayerSpec, parse_layout
from linnet.models.recipes import FAMILIES, RECIPES, family, get_recipe
from linnet.models.stack import StackConfig, check, upgrade

__all__ = [
    "FAMILIES",
    "RECIPES",
    "Alias",
    "AutoEncoder",
    "Backbone",
    "CausalLM",
    "LayerSpec",
    "ModelConfig",
    "ModelState",
    "StackConfig",
    "active_parameters",
    "attention_share",
    "build_autoencoder",
    "build_model",
    "check",
    "count_parameters",
    "empty_model",
    "family",
    "flops_causal",
    "flops_exact",
    "flops_paper",
    "get_recipe",
    "parse_layout",
    "state_bytes",
    "state_numbers",
    "upgrade",
]
