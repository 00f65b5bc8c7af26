"""RWKV-7 as flash-linear-attention saves it, and with the names of its author's files.

The author publishes .pth files without a config.json; saved as safetensors, the shapes of their tensors say all that it
would. What a config.json leaves out is read from the shapes for both.
"""

from collections.abc import Callable

from linnet.hf.layouts.base import Settings
from linnet.hf.layouts.family import (
    Entry,
    Family,
    Joint,
    Kind,
    Layers,
    Names,
    Values,
    always,
    below,
    ends,
    entry,
    only,
    table,
)

ROW = (1, 1, -1)
SHARES = {f"x_{name}": Joint(f"x_{name}", view=ROW) for name in "rwkvag"}
HEADS = {"r_k": Joint("r_k", view=("rwkv7.num_heads", -1))}
NORM_EPS = 1e-5
LOW = (("w", "decay", "w0"), ("a", "rate", "a0"), ("v", "value", "v0"), ("g", "gate", "none"))

FLA_MIXER = {**SHARES, **HEADS, **table("k_k k_a r_proj k_proj v_proj o_proj:out_proj")}
FLA_MIXER |= table("g_norm.weight:norm_weight g_norm.bias:norm_bias")
OWN_MIXER = {**SHARES, **HEADS, **{name: Joint(name, view=ROW) for name in ("k_k", "k_a", "w0", "a0", "v0")}}
OWN_MIXER |= table("receptance:r_proj key:k_proj value:v_proj output:out_proj")
OWN_MIXER |= table("ln_x.weight:norm_weight ln_x.bias:norm_bias")
for letter, rank, shift in LOW:
    lora = f"{letter}_lora.lora"
    FLA_MIXER |= table(f"{lora}.0:{rank}.down {lora}.2.weight:{rank}.up.weight {lora}.2.bias:{shift}")
    OWN_MIXER[f"{letter}1"] = Joint(f"{rank}.down.weight", transposed=True)
    OWN_MIXER[f"{letter}2"] = Joint(f"{rank}.up.weight", transposed=True)
FEED_FORWARD = table("key:up_proj value:down_proj")


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


def entries(embedding: str, layer: str, rank: str, axis: int, inner: str) -> tuple[Entry, ...]:
    """Returns the entries by the names of tensors whose shapes say what config.json may leave out.

    Args:
        layer, rank, axis: prefix of a mixer, the end of the name of a low rank's first factor, and its axis.
    """
    width = measured(embedding, 1, 2048)

    def wide(settings: Settings) -> int:
        times = settings.integer("hidden_ratio", 4)
        return measured(inner, 0, 32 * -(-settings.integer("hidden_size", width(settings)) * times // 32))(settings)

    def low(key: str, path: str, letter: str, default: int) -> Entry:
        tensor = f"{layer.format(int(letter == 'v'))}.{letter}{rank}"  # the first layer has no share of values
        return entry("integer", f"{key}_low_rank_dim", f"rwkv7.{path}_rank", default=measured(tensor, axis, default))

    return (
        entry("integer", "hidden_size", "d_model", default=width),
        entry("integer", "vocab_size", "vocab_size", default=measured(embedding, 0, 32000), largest=1 << 24),
        heads(measured(f"{layer.format(0)}.r_k", 0, 0)),
        entry("integer", "intermediate_size", "rwkv.inner", default=wide),
        *(low("decay", "decay", "w", 64), low("gate", "gate", "g", 128)),
        *(low("a", "rate", "a", 64), low("v", "value", "v", 16)),
        only("norm_eps", NORM_EPS, why="the norm inside Linnet's rwkv7 has this epsilon per channel of a head"),
        only("hidden_act", "sqrelu", why="Linnet's rwkv squares a relu"),
        only("norm_first", True, why="Linnet's model has a norm of the embedding"),
        only("norm_bias", True, why="Linnet's LayerNorms have biases"),
        only("attn", None, why="Linnet reads RWKV-7 without attention layers in between"),
        always(norm="layernorm", norm_eps=NORM_EPS, embedding_norm=True),
    )


def kinds(norms: str, mixer: str, names: Names, channel: str, shifted: Joint) -> dict[str, Kind]:
    inside = below(mixer, "mixer", names) | below(channel, "channel", FEED_FORWARD | {"x_k": shifted})
    return {"rwkv7": Kind("rwkv7+rwkv", table(norms) | inside)}


FIRST = "model.layers.0"
FLA = Family(
    *("RWKV-7 of flash-linear-attention", "rwkv7", "RWKV7ForCausalLM"),
    entries(
        "model.embeddings.weight", "model.layers.{}.attn", "_lora.lora.0.weight", 0, "model.layers.0.ffn.key.weight"
    ),
    blocks("model.layers.{}.attn_norm.weight"),
    kinds("attn_norm:mixer_norm ffn_norm:channel_norm", "attn", FLA_MIXER, "ffn", Joint("x_k")),
    ends("model.embeddings", "model.norm") | {f"{FIRST}.pre_norm": "backbone.input_norm"},
)
OWN = Family(
    *("RWKV-7 with its author's names", "rwkv7", ""),
    entries("emb.weight", "blocks.{}.att", "1", 1, "blocks.0.ffn.key.weight"),
    blocks("blocks.{}.ln1.weight"),
    kinds("ln1:mixer_norm ln2:channel_norm", "att", OWN_MIXER, "ffn", Joint("x_k", view=ROW)),
    ends("emb", "ln_out", "head") | {"blocks.0.ln0": "backbone.input_norm"},
    "blocks.{}",
    ignored=(r"blocks\.0\.att\.v[012]",),  # the first layer of some files has them, and its values are v_first
)
