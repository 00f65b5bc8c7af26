"""TransNormerLLM's layout against a restatement of its definition in float64 (paper 001, section 4, and its code).

The restatement computes attention as the masked product of all pairs of tokens; nothing of Linnet's layers is in it.
"""

import math

import pytest
import torch
from hf_folders import random_tensors, relative, write_folder

from linnet.runs import load_model

pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")

SMALL = {
    "model_type": "transnormer",
    "decoder_embed_dim": 32,
    "hidden_dim": 32,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "glu_dim": 40,
    "vocab_size": 50,
    "norm_type": "simplermsnorm",
    "linear_act_fun": "silu",
    "no_scale_embedding": False,
    "linear_use_lrpe_list": [1, 0, 0],
    "bias": False,
}
# The three sizes that were released: width, layers, heads, inner width.
RELEASED = {"385M": (1024, 24, 8, 2816), "1B": (2048, 16, 16, 5632), "7B": (4096, 30, 32, 11008)}


def shapes(config):
    d, g, heads = config["decoder_embed_dim"], config["glu_dim"], config["decoder_attention_heads"]
    found = {"model.embed_tokens.weight": (config["vocab_size"], d), "lm_head.weight": (config["vocab_size"], d)}
    for layer in range(config["decoder_layers"]):
        found |= {
            f"model.layers.{layer}.token_mixer.qkvu_proj.weight": (4 * d, d),
            f"model.layers.{layer}.token_mixer.out_proj.weight": (d, d),
            f"model.layers.{layer}.channel_mixer.l1.weight": (g, d),
            f"model.layers.{layer}.channel_mixer.l2.weight": (g, d),
            f"model.layers.{layer}.channel_mixer.l3.weight": (d, g),
        }
        if config["linear_use_lrpe_list"] and config["linear_use_lrpe_list"][layer]:
            found[f"model.layers.{layer}.token_mixer.lrpe.theta"] = (heads, 1, d // heads)
    return found


def slopes(heads):
    """ALiBi's: 2^(-8 h / H) for a power of two; else those of the power below, then every second one of the next."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * h / heads) for h in range(1, heads + 1)]
    below = 1 << (heads.bit_length() - 1)
    return slopes(below) + slopes(2 * below)[::2][: heads - below]


def srms(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def restated(config, tensors, tokens):
    """Logits [B, T, vocabulary] in float64."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    d, heads, layers = config["decoder_embed_dim"], config["decoder_attention_heads"], config["decoder_layers"]
    phi = {"silu": lambda x: x * x.sigmoid(), "1+elu": lambda x: torch.where(x > 0, 1 + x, x.exp())}
    phi = phi[config["linear_act_fun"]]
    x = w["model.embed_tokens.weight"][tokens] * (1.0 if config["no_scale_embedding"] else math.sqrt(d))
    time = torch.arange(tokens.shape[1]).double()
    distance = time[:, None] - time[None, :]
    for layer in range(layers):
        name = f"model.layers.{layer}"
        q, k, v, u = (srms(x) @ w[f"{name}.token_mixer.qkvu_proj.weight"].T).split(d, -1)
        q, k, v = (y.unflatten(-1, (heads, -1)) for y in (phi(q), phi(k), v))
        scores = torch.einsum("bthd,bshd->bhtsd", q, k)
        if config["linear_use_lrpe_list"] and config["linear_use_lrpe_list"][layer]:
            theta = w[f"{name}.token_mixer.lrpe.theta"][:, 0]
            scores = scores * torch.cos(distance[None, :, :, None] * theta[:, None, None, :])
        rate = torch.tensor(slopes(heads)).double() * (1 - layer / max(layers - 1, 1) + 1e-5)
        decay = torch.where(distance >= 0, torch.exp(-rate[:, None, None] * distance), 0.0)
        o = torch.einsum("bhts,bshd->bthd", scores.sum(-1) * decay, v).flatten(-2)
        x = x + (u * srms(o)) @ w[f"{name}.token_mixer.out_proj.weight"].T
        y = srms(x)
        y = (y @ w[f"{name}.channel_mixer.l1.weight"].T) * (y @ w[f"{name}.channel_mixer.l2.weight"].T)
        x = x + y @ w[f"{name}.channel_mixer.l3.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return srms(x) @ head.T


CHANGES = {
    "released": {},
    "without_lrpe": {"linear_use_lrpe_list": []},
    "lrpe_everywhere": {"linear_use_lrpe_list": [1, 1, 1], "no_scale_embedding": True},
    "six_heads": {"decoder_embed_dim": 48, "hidden_dim": 48, "decoder_attention_heads": 6},
    "elu": {"linear_act_fun": "1+elu"},
    "one_layer": {"decoder_layers": 1, "linear_use_lrpe_list": [1]},
    "tied": {},
}


@pytest.mark.parametrize("case", CHANGES)
def test_logits_are_those_of_the_definition(case, tmp_path):
    config = {**SMALL, **CHANGES[case]}
    names = shapes(config)
    if case == "tied":
        del names["lm_head.weight"]
    tensors = random_tensors(names)
    found = hf.convert(write_folder(tmp_path / "source", config, tensors), tmp_path / "out")
    tokens = torch.randint(0, 50, (2, 70), generator=torch.Generator().manual_seed(2))
    expected = restated(config, tensors, tokens)
    with torch.no_grad():
        model, _ = load_model(found.path, dtype=torch.float64)
        # Rates of decay and frequencies are float32 in both: what is left is their rounding.
        assert relative(model(tokens)[0], expected) < 2e-6
        model, _ = load_model(found.path)
        assert relative(model(tokens)[0].double(), expected) < 1e-4
        states = model.init_state(2, 70)
        for place in range(70):
            last, states = model.step(tokens[:, place], states)
        assert relative(last.double(), expected[:, -1]) < 1e-4


@pytest.mark.parametrize("size", RELEASED)
def test_the_released_sizes_have_all_their_tensors(size):
    from linnet.hf.layouts import LAYOUTS, Settings
    from linnet.models import CausalLM

    d, layers, heads, inner = RELEASED[size]
    config = {
        **SMALL,
        "decoder_embed_dim": d,
        "hidden_dim": d,
        "decoder_layers": layers,
        "decoder_attention_heads": heads,
        "glu_dim": inner,
        "vocab_size": 64000,
        "linear_use_lrpe_list": [1] + [0] * (layers - 1),
    }
    plan = LAYOUTS["transnormer"][1](Settings(config))
    with torch.device("meta"):
        own = {name: tuple(tensor.shape) for name, tensor in CausalLM(plan.model).state_dict().items()}
    assert {part.name: part.shape(own[name]) for name, part in plan.parts.items()} == shapes(config)
    weights = layers * (5 * d * d + 3 * d * inner) + 2 * 64000 * d + d
    assert sum(torch.Size(shape).numel() for shape in own.values()) == weights
