"""RWKV-7 as flash-linear-attention saves it, and with the names of its author's files.

The author publishes .pth files without a config.json; saved as safetensors, the shapes of their tensors say all that it
would. What a config.json leaves out is read from the shapes for both.
"""

from collections.abc import Callable
from dataclasses import replace

from linnet.hf.layouts.base import Settings
from linnet.hf.layouts.family import Entry, Family, Joint, Kind, Layers, Values, always, below, ends, entry, only

SHARES = [f"x_{name}" for name in "rwkvag"]
ROW = (1, 1, -1)
HEADS = Joint("r_k", view=("rwkv7.num_heads", -1))
NORM_EPS = 1e-5

FLA_MIXER = {
    **{name: Joint(name, view=ROW) for name in SHARES},
    **{name: name for name in ("k_k", "k_a")},
    **{f"{name}_proj": f"{name}_proj" for name in "rkv"},
    "r_k": HEADS,
    "o_proj": "out_proj",
    "g_norm.weight": "norm_weight",
    "g_norm.bias": "norm_bias",
    **{
        f"{name}_lora.lora.{place}": ours
        for name, low, shift in (("w", "decay", "w0"), ("a", "rate", "a0"), ("v", "value", "v0"), ("g", "gate", ""))
        for place, ours in (("0", f"{low}.down"), ("2.weight", f"{low}.up.weight"), ("2.bias", shift))
        if ours
    },
}
OWN_MIXER = {
    **{name: Joint(name, view=ROW) for name in (*SHARES, "k_k", "k_a", "w0", "a0", "v0")},
    "r_k": HEADS,
    **dict(zip(("receptance", "key", "value", "output"), ("r_proj", "k_proj", "v_proj", "out_proj"), strict=True)),
    "ln_x.weight": "norm_weight",
    "ln_x.bias": "norm_bias",
    **{
        f"{name}{place}": Joint(f"{low}.{part}.weight", transposed=True)
        for name, low in (("w", "decay"), ("a", "rate"), ("v", "value"), ("g", "gate"))
        for place, part in ((1, "down"), (2, "up"))
    },
}
FEED_FORWARD = {"key": "up_proj", "value": "down_proj"}


def measured(tensor: str, axis: int, default: int) -> Callable[[Settings], int]:
    """Returns a function that reads a number from the shape of a tensor, or returns a default without it."""

    def read(settings: Settings) -> int:
        shape = settings.shapes.get(tensor, ())
        return shape[axis] if len(shape) > axis else default

    return read


def blocks(norm: str) -> Layers:
    """Returns the list of blocks, as many as there are norms if config.json has no number of them."""

    def read(settings: Settings) -> list[str]:
        number = next((index for index in range(1 << 10) if norm.format(index) not in settings.shapes), 0)
        return ["rwkv7"] * settings.integer("num_hidden_layers", number or 24, 1 << 10)

    return Layers(read, lambda kinds: {"num_hidden_layers": len(kinds)})


def heads(count: Callable[[Settings], int]) -> Entry:
    """Returns the entry of the heads, by their width or, without it, their number."""

    def read(settings: Settings) -> Values:
        width = settings.integer("hidden_size", settings.shapes.get("emb.weight", (0, 2048))[-1])
        number = settings.integer("num_heads", count(settings) or max(1, width // 64))
        if settings.values.get("head_dim") is not None:
            head = settings.integer("head_dim", None)
            number = max(1, width // head)
            if number * head != width:
                settings.problems.append(f"head_dim: {head} does not divide hidden_size {width}")
        return {"rwkv7.num_heads": number}

    def write(values: Values) -> Values:
        number = values["rwkv7.num_heads"]
        return {"head_dim": values["d_model"] // number, "num_heads": number}

    return Entry(read, write, "head_dim", ("rwkv7.num_heads",))


def entries(embedding: str, layer: str, ranks: dict[str, tuple[str, int]], inner: str) -> tuple[Entry, ...]:
    """Returns the entries by the names of tensors whose shapes say what config.json may leave out.

    Args:
        ranks: tensor and axis of each low rank, by the letter of its key. inner: tensor of the channel mixer's width.
    """
    defaults = {"decay": 64, "gate": 128, "a": 64, "v": 16}
    paths = {"decay": "decay_rank", "gate": "gate_rank", "a": "rate_rank", "v": "value_rank"}
    width = measured(embedding, 1, 2048)

    def wide(settings: Settings) -> int:
        times = settings.integer("hidden_ratio", 4)
        return measured(inner, 0, 32 * -(-settings.integer("hidden_size", width(settings)) * times // 32))(settings)

    return (
        entry("integer", "hidden_size", "d_model", default=width),
        entry("integer", "vocab_size", "vocab_size", default=measured(embedding, 0, 32000), largest=1 << 24),
        heads(measured(f"{layer}.r_k", 0, 0)),
        entry("integer", "intermediate_size", "rwkv.inner", default=wide),
        *(
            entry(
                *("integer", f"{name}_low_rank_dim", f"rwkv7.{paths[name]}"),
                default=measured(*ranks[name], default),
            )
            for name, default in defaults.items()
        ),
        only("norm_eps", NORM_EPS, why="the norm inside Linnet's rwkv7 has this epsilon per channel of a head"),
        only("hidden_act", "sqrelu", why="Linnet's rwkv squares a relu"),
        only("norm_first", True, why="Linnet's model has a norm of the embedding"),
        only("norm_bias", True, why="Linnet's LayerNorms have biases"),
        only("attn", None, why="Linnet reads RWKV-7 without attention layers in between"),
        always(norm="layernorm", norm_eps=NORM_EPS, embedding_norm=True),
    )


FLA = Family(
    "RWKV-7 of flash-linear-attention",
    "rwkv7",
    "RWKV7ForCausalLM",
    entries(
        "model.embeddings.weight",
        "model.layers.0.attn",
        {
            name: (f"model.layers.{int(name == 'v')}.attn.{tensor}_lora.lora.0.weight", 0)
            for name, tensor in (("decay", "w"), ("gate", "g"), ("a", "a"), ("v", "v"))
        },
        "model.layers.0.ffn.key.weight",
    ),
    blocks("model.layers.{}.attn_norm.weight"),
    {
        "rwkv7": Kind(
            "rwkv7+rwkv",
            {"attn_norm": "mixer_norm", "ffn_norm": "channel_norm"}
            | below("attn", "mixer", FLA_MIXER)
            | below("ffn", "channel", FEED_FORWARD | {"x_k": "x_k"}),
        )
    },
    ends("model.embeddings", "model.norm") | {"model.layers.0.pre_norm": "backbone.input_norm"},
    "model.layers.{}",
)
OWN = replace(
    FLA,
    title="RWKV-7 with its author's names",
    architecture="",
    entries=entries(
        "emb.weight",
        "blocks.0.att",
        {
            name: (f"blocks.{int(name == 'v')}.att.{tensor}1", 1)
            for name, tensor in (("decay", "w"), ("gate", "g"), ("a", "a"), ("v", "v"))
        },
        "blocks.0.ffn.key.weight",
    ),
    layers=blocks("blocks.{}.ln1.weight"),
    kinds={
        "rwkv7": Kind(
            "rwkv7+rwkv",
            {"ln1": "mixer_norm", "ln2": "channel_norm"}
            | below("att", "mixer", OWN_MIXER)
            | below("ffn", "channel", FEED_FORWARD | {"x_k": Joint("x_k", view=ROW)}),
        )
    },
    outer=ends("emb", "ln_out", "head") | {"blocks.0.ln0": "backbone.input_norm"},
    layer="blocks.{}",
    ignored=(r"blocks\.0\.att\.v[012]",),  # the first layer of some files has them, and its values are v_first
)
