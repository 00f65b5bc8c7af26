"""Model configurations, causal language models, recipes and costs."""

from linnet.models.autoencoder import AutoEncoder, build_autoencoder
from linnet.models.backbone import Backbone, ModelState
from linnet.models.causal_lm import CausalLM, build_model, empty_model
from linnet.models.classifier import ImageClassifier
from linnet.models.config import (
    DenoiserConfig,
    MaskedConfig,
    ModelConfig,
    SentenceConfig,
    SequenceConfig,
    VisionConfig,
)
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
from linnet.models.denoiser import Denoiser
from linnet.models.kinds import KINDS, OBJECTIVE_KINDS, Kind, build, empty_of, kind_of
from linnet.models.layout import Alias, LayerSpec, parse_layout
from linnet.models.masked_lm import MaskedLM
from linnet.models.recipes import FAMILIES, RECIPES, families_of, family, get_recipe, kind_of_recipe, recipes_of
from linnet.models.sentence import SentenceModel
from linnet.models.sequence import SequenceClassifier
from linnet.models.stack import StackConfig, check, upgrade

__all__ = [
    "FAMILIES",
    "KINDS",
    "OBJECTIVE_KINDS",
    "RECIPES",
    "Alias",
    "AutoEncoder",
    "Backbone",
    "CausalLM",
    "ImageClassifier",
    "Denoiser",
    "DenoiserConfig",
    "Kind",
    "LayerSpec",
    "MaskedConfig",
    "MaskedLM",
    "ModelConfig",
    "ModelState",
    "SentenceConfig",
    "SentenceModel",
    "SequenceClassifier",
    "SequenceConfig",
    "StackConfig",
    "VisionConfig",
    "active_parameters",
    "attention_share",
    "build",
    "build_autoencoder",
    "build_model",
    "check",
    "count_parameters",
    "empty_model",
    "empty_of",
    "families_of",
    "family",
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
