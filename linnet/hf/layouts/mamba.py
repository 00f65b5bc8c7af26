"""Mamba as transformers and flash-linear-attention save it: one layout, two sets of names in config.json."""

from linnet.config import parse
from linnet.hf.layouts.base import BLOCK, LARGEST, Part, Plan, Settings, ends, stack
from linnet.models import ModelConfig

EMBEDDING = "backbone.embeddings.weight"
LAYER = "backbone.layers.{}"
NAMES = {
    "mixer_norm.weight": "norm.weight",
    "mixer.select_proj.weight": "mixer.x_proj.weight",
    "mixer.dt_weight": "mixer.dt_proj.weight",
    "mixer.dt_bias": "mixer.dt_proj.bias",
    "mixer.A_log": "mixer.A_log",
    "mixer.skip": "mixer.D",
    "mixer.out_proj.weight": "mixer.out_proj.weight",
}


def read(settings: Settings) -> Plan:
    native = "time_step_rank" in settings.values or "layer_norm_epsilon" in settings.values  # the names of transformers
    width = settings.integer("hidden_size", 768 if native else 2048)
    layers = settings.integer("num_hidden_layers", 32 if native else 48, LARGEST["layers"])
    vocabulary = settings.integer("vocab_size", 50280 if native else 32000, LARGEST["vocabulary"])
    eps = settings.number("layer_norm_epsilon" if native else "norm_eps", 1e-5)
    rank = "time_step_rank" if native else "dt_rank"
    bias = settings.flag("use_conv_bias", True)
    mamba = {
        "expand": settings.integer("expand", 2, largest=64),
        "state": settings.integer("state_size", 16, largest=4096),
        "conv_width": settings.integer("conv_kernel", 4, largest=4096),
        "dt_rank": 0 if settings.values.get(rank) in (None, "auto") else settings.integer(rank, None),
        "conv_bias": bias,
    }
    settings.only("intermediate_size", mamba["expand"] * width, why="Linnet's Mamba has the inner width expand * width")
    settings.only("use_bias", False, why="Linnet's Mamba has no biases in its projections")
    settings.only("hidden_act", "silu", "swish", why="Linnet's Mamba has SiLU")
    settings.check()
    model = parse(
        ModelConfig,
        {
            "d_model": width,
            "layout": f"mamba x{layers}",
            "vocab_size": vocabulary,
            "options": {"mamba": mamba},
            "norm": "rmsnorm",
            "norm_eps": eps,
            "tie_embeddings": settings.tied,
        },
        "config.json",
    )
    inner, taps = mamba["expand"] * width, mamba["conv_width"]
    names = {
        **NAMES,
        "mixer.in_proj.weight": Part("mixer.in_proj.weight", 0, 2 * inner),
        "mixer.gate_proj.weight": Part("mixer.in_proj.weight", inner, 2 * inner),
        "mixer.conv.weight": Part("mixer.conv1d.weight", view=(inner, 1, taps)),
    }
    names |= {"mixer.conv.bias": "mixer.conv1d.bias"} if bias else {}
    return Plan(model, ends(settings, EMBEDDING, "backbone.norm_f.weight") | stack(range(layers), BLOCK, LAYER, names))
