"""TransNormerLLM as its authors released it in 385M, 1B and 7B (paper 001, section 4): TNL v1.

One projection gives queries, keys, values and the output gate, in this order. Norms have no gain, the slopes are those
of ALiBi, later layers decay more slowly, and embeddings are multiplied by sqrt(d). Names and shapes are those of the
modelling file that is released with the weights. The cache of that file has one position for all sequences and does not
reset it before a second prompt; Linnet stores positions in the state.
"""

from linnet.config import parse
from linnet.hf.layouts.base import BLOCK, LARGEST, Part, Plan, Settings, ends, stack
from linnet.models import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.{}"
QKVU = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.output.gate_up")
NAMES = {
    "mixer.output.out_proj.weight": "token_mixer.out_proj.weight",
    "channel.gate_proj.weight": "channel_mixer.l1.weight",
    "channel.up_proj.weight": "channel_mixer.l2.weight",
    "channel.down_proj.weight": "channel_mixer.l3.weight",
}


def read(settings: Settings) -> Plan:
    width = settings.integer("decoder_embed_dim", 1024)
    layers = settings.integer("decoder_layers", 24, LARGEST["layers"])
    heads = settings.integer("decoder_attention_heads", 8)
    vocabulary = settings.integer("vocab_size", 64000, LARGEST["vocabulary"])
    inner = width if settings.values.get("glu_dim") == -1 else settings.integer("glu_dim", 2816)
    activation = settings.choice(
        "linear_act_fun", "silu", {"silu": "silu", "swish": "silu", "1+elu": "elu1", "none": "none"}
    )
    scaled = not settings.flag("no_scale_embedding", False)
    lrpe = _lrpe(settings, layers)
    settings.only("hidden_dim", width, why="Linnet's heads share the model's width")
    settings.only("norm_type", "simplermsnorm", why="the released models have norms without a gain")
    settings.only("bias", False, why="Linnet's layers have no biases")
    settings.check()
    tnl = {
        "num_heads": heads,
        "qk_activation": activation,
        "gate": "full",
        "gate_activation": "none",
        "lrpe": lrpe,
    }
    model = parse(
        ModelConfig,
        {
            "d_model": width,
            "layout": f"tnl+sglu x{layers}",
            "vocab_size": vocabulary,
            "options": {"tnl": tnl, "sglu": {"inner": inner}},
            "norm": "srmsnorm",
            "embedding_scale": float(width) ** 0.5 if scaled else 1.0,
            "tie_embeddings": settings.tied,
        },
        "config.json",
    )
    joined = {
        f"{name}.weight": Part("token_mixer.qkvu_proj.weight", index * width, 4 * width)
        for index, name in enumerate(QKVU)
    }
    parts = ends(settings, EMBEDDING, None) | stack(range(layers), BLOCK, LAYER, NAMES | joined)
    rotated = {"none": 0, "first_layer": 1, "all_layers": layers}[lrpe]
    theta = Part("token_mixer.lrpe.theta", view=(heads, 1, -1))
    parts |= stack(range(rotated), BLOCK, LAYER, {"mixer.lrpe.theta": theta})
    return Plan(model, parts)


def _lrpe(settings: Settings, layers: int) -> str:
    """Returns which layers have LRPE: from a list of one flag per layer or, if it is empty, from one flag for all."""
    flags = settings.values.get("linear_use_lrpe_list") or []
    if not flags:
        return "all_layers" if settings.flag("linear_use_lrpe", False) else "none"
    if not isinstance(flags, list) or len(flags) != layers or any(flag not in (0, 1) for flag in flags):
        settings.problems.append(
            f"linear_use_lrpe_list: must have 0 or 1 for each of {layers} layers (given {flags!r})"
        )
        return "none"
    if not any(flags):
        return "none"
    if flags[0] and not any(flags[1:]):
        return "first_layer"
    if all(flags):
        return "all_layers"
    settings.problems.append(
        f"linear_use_lrpe_list: Linnet supports LRPE in the first layer, in all or in none (given {flags!r})"
    )
    return "none"
