"""TransNormerLLM as its authors released it in 385M, 1B and 7B (paper 001, section 4): TNL v1.

One projection gives queries, keys, values and the output gate, in this order. Norms have no gain, the slopes are those
of ALiBi, later layers decay more slowly, and embeddings are multiplied by sqrt(d). Names and shapes are those of the
modelling file that is released with the weights. The cache of that file has one position for all sequences and does not
reset it before a second prompt; Linnet stores positions in the state.
"""

from linnet.hf.layouts.base import Settings
from linnet.hf.layouts.family import Entry, Family, Joint, Kind, Values, always, counted, keys, one_kind, only, table

NAMES = "token_mixer.qkvu_proj:mixer.q_proj+mixer.k_proj+mixer.v_proj+mixer.output.gate_up"
NAMES += (
    " token_mixer.out_proj:mixer.output.out_proj channel_mixer.l1:channel.gate_proj channel_mixer.l2:channel.up_proj"
)
NAMES += " channel_mixer.l3:channel.down_proj"
THETA = Joint("mixer.lrpe.theta", view=("tnl.num_heads", 1, -1))
ACTIVATIONS = {"silu": "silu", "swish": "silu", "1+elu": "elu1", "none": "none"}


def values(settings: Settings) -> Values:
    width = settings.integer("decoder_embed_dim", 1024)
    settings.only("hidden_dim", width, why="Linnet's heads share the model's width")
    return {
        "sglu.inner": width if settings.values.get("glu_dim") == -1 else settings.integer("glu_dim", 2816),
        "tnl.qk_activation": settings.choice("linear_act_fun", "silu", ACTIVATIONS),
        "tnl.lrpe": _lrpe(settings, counted(24, "decoder_layers")(settings)),
        "embedding_scale": 1.0 if settings.flag("no_scale_embedding", False) else float(width) ** 0.5,
    }


TRANSNORMER = Family(
    *("TransNormerLLM", "transnormer", "TransnormerForCausalLM"),
    (
        *keys("decoder_embed_dim:d_model=1024 vocab_size:vocab_size=64000 decoder_attention_heads:tnl.num_heads=8"),
        Entry(values),
        only("norm_type", "simplermsnorm", why="the released models have norms without a gain"),
        only("bias", False, why="Linnet's layers have no biases"),
        always(norm="srmsnorm", tnl__gate="full", tnl__gate_activation="none"),
    ),
    one_kind("tnl", 24, "decoder_layers"),
    {"tnl": Kind("tnl+sglu", table(NAMES) | {"token_mixer.lrpe.theta": THETA})},
)


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
