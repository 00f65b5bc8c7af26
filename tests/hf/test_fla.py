"""flash-linear-attention's layouts against restatements in float64, and, where it and a GPU are there, against itself.

The restatements run each layer's recurrence token by token as the papers write it (HGRN: arXiv:2311.04823; HGRN2:
paper 002, 3.2; GLA: arXiv:2312.06635, 4; LightNet: paper 003, 4.1), with what that project adds: its scale, its
epsilons, its names.
"""

import importlib.util

import pytest
import torch
from hf_folders import random_tensors, relative, write_folder

from linnet.runs import load_model

pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")

COMMON = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 50, "intermediate_size": 48, "norm_eps": 1e-3}
CONFIGS = {
    "hgrn": {**COMMON, "model_type": "hgrn"},
    "hgrn-hybrid": {
        **COMMON,
        "model_type": "hgrn",
        "use_lower_bound": False,
        "attn": {"layers": [1], "num_heads": 2},
    },
    "hgrn2": {**COMMON, "model_type": "hgrn2", "expand_ratio": 8, "num_heads": 4},
    "hgrn2-free": {**COMMON, "model_type": "hgrn2", "expand_ratio": None, "num_heads": 2, "use_lower_bound": False},
    "gla": {**COMMON, "model_type": "gla", "num_heads": 2, "expand_k": 0.5},
    "gla-unfused": {**COMMON, "model_type": "gla", "num_heads": 4, "expand_k": 1.0, "fuse_norm": False},
    "lightnet": {**COMMON, "model_type": "lightnet", "expand_ratio": 8, "gate_low_rank_dim": 4},
    "gla-hybrid": {
        **COMMON,
        "model_type": "gla",
        "num_heads": 2,
        "expand_k": 0.5,
        "num_hidden_layers": 4,
        "attn": {"layers": [1, 3], "num_heads": 4, "num_kv_heads": 1, "window_size": 6, "rope_theta": 50.0},
    },
    "hgrn2-hybrid": {
        **COMMON,
        "model_type": "hgrn2",
        "expand_ratio": 16,
        "use_lower_bound": False,
        "attn": [{"layers": [0], "num_heads": 2, "qkv_bias": False}],
    },
    "transformer": {**COMMON, "model_type": "transformer", "num_heads": 4, "num_kv_heads": 2, "rope_theta": 100.0},
    "transformer-window": {**COMMON, "model_type": "transformer", "num_heads": 2, "window_size": 5},
}


def layer_of(config, layer):
    """What kind of mixer a layer has, and its options: `attn` puts attention among the others."""
    attn = config.get("attn")
    attn = attn[0] if isinstance(attn, list) else attn
    if attn and layer in attn["layers"]:
        return "transformer", {"hidden_size": config["hidden_size"], **attn}
    return config["model_type"], config


def mixer_shapes(kind, config):
    d, key = config["hidden_size"], int(config["hidden_size"] * config.get("expand_k", 1))
    square = (d, d)
    match kind:
        case "hgrn":
            return {"i_proj": square, "f_proj": square, "g_proj": square, "o_proj": square, "g_norm": (d,)}
        case "hgrn2":
            return {"q_proj": square, "f_proj": square, "i_proj": square, "o_proj": square, "g_norm": (d,)}
        case "gla":
            norm = "g_norm_swish_gate" if config.get("fuse_norm", True) else "g_norm"
            found = {"q_proj": (key, d), "k_proj": (key, d), "v_proj": square, "o_proj": square, "g_proj": square}
            return found | {"gk_proj.0": (16, d), "gk_proj.1": (key, 16), norm: (d // config["num_heads"],)}
        case "lightnet":
            rank = config["gate_low_rank_dim"]
            found = {"q_proj": square, "k_proj": square, "v_proj": square, "o_proj": square, "g_norm": (d,)}
            return found | {"g_proj.0": (rank, d), "g_proj.1": (d, rank)}
        case "transformer":
            kv = d // config["num_heads"] * config.get("num_kv_heads", config["num_heads"])
            return {"q_proj": square, "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": square}


def shapes(config):
    d, g = config["hidden_size"], config["intermediate_size"]
    found = {"model.embeddings.weight": (50, d), "model.norm.weight": (d,), "lm_head.weight": (50, d)}
    for layer in range(config["num_hidden_layers"]):
        name, (kind, options) = f"model.layers.{layer}", layer_of(config, layer)
        attn = mixer_shapes(kind, options)
        found |= {f"{name}.attn_norm.weight": (d,), f"{name}.mlp_norm.weight": (d,)}
        found |= {f"{name}.attn.{part}.weight": shape for part, shape in attn.items()}
        found |= {f"{name}.mlp.{part}.weight": (g, d) for part in ("gate_proj", "up_proj")}
        found[f"{name}.mlp.down_proj.weight"] = (d, g)
        if kind == "gla":
            found[f"{name}.attn.gk_proj.1.bias"] = attn["gk_proj.1"][:1]
    if config["model_type"] in ("hgrn", "hgrn2") and config.get("use_lower_bound", True):
        found["model.lower_bounds"] = (config["num_hidden_layers"], d)
    return found


def rms(x, gain, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def swish(x):
    return x * x.sigmoid()


def recurrence(q, k, v, decay):
    """S_t = diag(decay_t) S_{t-1} + k_t v_t^T, o_t = K^(-1/2) q_t S_t; all [B, T, H, .]."""
    state = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=v.dtype)
    outputs = []
    for t in range(q.shape[1]):
        state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)


def hgrn(config, w, layer, x):
    """arXiv:2311.04823, equations 1 to 5, with a real state, and the gate after the norm."""
    i, f = swish(x @ w["i_proj.weight"].T), (x @ w["f_proj.weight"].T).sigmoid()
    if "lower_bounds" in w:
        bound = w["lower_bounds"].softmax(0)[1 : layer + 1].sum(0)
        f = bound + (1 - bound) * f
    state, outputs = torch.zeros_like(i[:, 0]), []
    for t in range(x.shape[1]):
        state = f[:, t] * state + (1 - f[:, t]) * i[:, t]
        outputs.append(state)
    o = rms(torch.stack(outputs, 1), w["g_norm.weight"], config["norm_eps"]) * swish(x @ w["g_proj.weight"].T)
    return o @ w["o_proj.weight"].T


def hgrn2(config, w, layer, x):
    key = config["expand_ratio"] or config["hidden_size"] // config["num_heads"]
    q, f, i = swish(x @ w["q_proj.weight"].T), (x @ w["f_proj.weight"].T).sigmoid(), x @ w["i_proj.weight"].T
    if "lower_bounds" in w:
        share = w["lower_bounds"].softmax(0)
        bound = share[1 : layer + 1].sum(0)
        f = bound + (1 - bound) * f
    q, f, i = (y.unflatten(-1, (-1, key)) for y in (q, f, i))
    o = recurrence(q, 1 - f, i, f).flatten(-2)
    return rms(o, w["g_norm.weight"], 1e-5) @ w["o_proj.weight"].T


def gla(config, w, layer, x):
    heads = (config["num_heads"], -1)
    q, k, v = ((x @ w[f"{name}_proj.weight"].T).unflatten(-1, heads) for name in "qkv")
    logits = x @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
    decay = (logits.sigmoid() ** (1 / 16)).unflatten(-1, heads)
    gate = swish(x @ w["g_proj.weight"].T).unflatten(-1, heads)
    gain = w.get("g_norm_swish_gate.weight", w.get("g_norm.weight"))
    o = rms(recurrence(q, k, v, decay), gain, config["norm_eps"]) * gate
    return o.flatten(-2) @ w["o_proj.weight"].T


def lightnet(config, w, layer, x):
    heads = (-1, config["expand_ratio"])
    q, u, v = ((x @ w[f"{name}_proj.weight"].T).unflatten(-1, heads) for name in "qkv")
    total = u.exp().cumsum(1)
    before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], 1)
    o = recurrence(swish(q), u.exp() / total, v, before / total).flatten(-2)
    gate = swish(x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T)
    return (rms(o, w["g_norm.weight"], 1e-6) * gate) @ w["o_proj.weight"].T


def transformer(config, w, layer, x):
    head = config["hidden_size"] // config["num_heads"]
    q, k, v = ((x @ w[f"{name}_proj.weight"].T).unflatten(-1, (-1, head)) for name in "qkv")
    time = torch.arange(x.shape[1]).double()
    angle = time[:, None] * config.get("rope_theta", 1e4) ** (-torch.arange(0, head, 2).double() / head)

    def rotate(y):
        a, b = y.chunk(2, -1)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    group = q.shape[2] // k.shape[2]
    k, v = rotate(k).repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", rotate(q), k) * head**-0.5
    distance = time[:, None] - time
    seen = (distance >= 0) & (distance < (config.get("window_size") or len(time)))
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", shares, v).flatten(-2) @ w["o_proj.weight"].T


MIXERS = {"hgrn": hgrn, "hgrn2": hgrn2, "gla": gla, "lightnet": lightnet, "transformer": transformer}


def restated(config, tensors, tokens):
    """Logits [B, T, vocabulary] in float64."""
    w = {name.removeprefix("model."): tensor.double() for name, tensor in tensors.items()}
    x, eps = w["embeddings.weight"][tokens], config["norm_eps"]
    for layer in range(config["num_hidden_layers"]):
        mine = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in w.items()}
        attn = {name.removeprefix("attn."): tensor for name, tensor in mine.items()}
        kind, options = layer_of(config, layer)
        x = x + MIXERS[kind](options, attn, layer, rms(x, mine["attn_norm.weight"], eps))
        y = rms(x, mine["mlp_norm.weight"], eps)
        y = swish(y @ mine["mlp.gate_proj.weight"].T) * (y @ mine["mlp.up_proj.weight"].T)
        x = x + y @ mine["mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"], eps) @ w["lm_head.weight"].T


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_are_those_of_the_definition(case, tmp_path):
    config = CONFIGS[case]
    tensors = random_tensors(shapes(config))
    found = hf.convert(write_folder(tmp_path / "source", config, tensors), tmp_path / "out")
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(2))
    expected = restated(config, tensors, tokens)
    with torch.no_grad():
        # In float64 only RoPE's fixed frequencies are float32.
        assert relative(load_model(found.path, dtype=torch.float64)[0](tokens)[0], expected) < 2e-6
        model, _ = load_model(found.path)
        assert relative(model(tokens)[0].double(), expected) < 1e-4
        states = model.init_state(2, 40)
        for place in range(40):
            last, states = model.step(tokens[:, place], states)
        assert relative(last.double(), expected[:, -1]) < 1e-4


def has_fla():
    return importlib.util.find_spec("fla") is not None and torch.cuda.is_available()


@pytest.mark.skipif(not has_fla(), reason="needs flash-linear-attention and a GPU, where its kernels run")
@pytest.mark.parametrize("name", ["HGRN", "HGRN2", "GLA", "LightNet", "Mamba"])
def test_logits_are_those_of_flash_linear_attention(name, tmp_path):
    import fla.models

    torch.manual_seed(0)
    changes = {} if name == "Mamba" else {"intermediate_size": 256}
    config = getattr(fla.models, f"{name}Config")(
        hidden_size=256, num_hidden_layers=3, vocab_size=512, initializer_range=0.05, **changes
    )
    theirs = getattr(fla.models, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in theirs.parameters():  # so that gains, biases and lower bounds show
            parameter.add_(0.02 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "source")
    found = hf.convert(tmp_path / "source", tmp_path / "out")
    tokens = torch.randint(0, 512, (2, 60))  # up to 64 it runs its recurrent kernels, which compile sooner
    with torch.no_grad():
        # float64 on the CPU is the truth. Its recurrent kernels are exact enough to tell its epsilons apart (1e-6 was
        # measured, 6e-6 and 6e-5 with the wrong ones); our parallel ones run float32 through the tensor cores.
        truth = load_model(found.path, dtype=torch.float64)[0](tokens)[0].cuda()
        its = theirs.cuda().eval()(tokens.cuda()).logits.double()
        ours = load_model(found.path, "cuda")[0](tokens.cuda())[0].double()

    def rms_error(logits):
        return ((logits - truth).square().mean() / truth.square().mean()).sqrt().item()

    assert rms_error(its) < 4e-6 and rms_error(ours) < 5e-3
