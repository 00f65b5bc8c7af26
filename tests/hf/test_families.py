"""Families of hybrids against transformers' own models: read, stepped, and written back."""

import json
import math
import re
import weakref
from pathlib import Path

import pytest
import torch
from hf_folders import random_tensors, write_folder
from safetensors.torch import load_file
from torch.nn import functional as F

from linnet import models
from linnet.config import ConfigError, parse
from linnet.data import ByteTokenizer
from linnet.hf.layouts import FAMILIES
from linnet.models import ModelConfig, build_model, get_recipe
from linnet.runs import load_model, save_model
from linnet.serve.requests import CompletionRequest

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")
wrap = pytest.importorskip("linnet.hf.export").wrap

SHAPE = {"hidden_size": 32, "vocab_size": 97, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 48, "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None}
SHAPE |= {"eos_token_id": 3}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
QWEN = SHAPE | LINEAR | {"head_dim": 16, "num_hidden_layers": 3, "layer_types": MIXED}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8}
GRANITE = SHAPE | MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 40, "num_hidden_layers": 3}
GRANITE |= {"layer_types": MIXED}
FALCON = SHAPE | MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 48}
FACTORS = {"lm_head_multiplier": 0.3, "embedding_multiplier": 5.6, "mlp_multipliers": [0.7, 0.4], "key_multiplier": 0.5}
FACTORS |= {"attention_out_multiplier": 0.9, "attention_in_multiplier": 1.3, "ssm_in_multiplier": 1.2}
FACTORS |= {"ssm_multipliers": [0.35, 0.25, 1.1, 0.5, 0.3], "ssm_out_multiplier": 0.2}
NEMOTRON = SHAPE | {"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 8, "n_groups": 2}
NEMOTRON |= {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
BAMBA = SHAPE | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1], "head_dim": 8}
LFM2 = SHAPE | {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
OLMO = SHAPE | {"num_hidden_layers": 3, "layer_types": MIXED, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
WINDOWS = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 5}
SPARSE = QWEN | {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
SPARSE |= {"num_experts_per_tok": 2}
GRANITE_SPARSE = GRANITE | {"num_local_experts": 4, "intermediate_size": 12, "shared_intermediate_size": 20}
NEMOTRON_SPARSE = NEMOTRON | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"]}
NEMOTRON_SPARSE |= {"n_routed_experts": 4, "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 20}
KIMI = SHAPE | {"num_key_value_heads": 4, "num_hidden_layers": 3, "layer_types": MIXED, "moe_intermediate_size": 12}
KIMI |= {"num_experts": 4, "num_experts_per_token": 2, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 6}
KIMI |= {"qk_nope_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4}
LING = {key: value for key, value in KIMI.items() if not key.startswith("linear")} | {"head_dim": 8}
LING |= {"num_experts": 6, "num_expert_group": 3, "topk_group": 2, "first_k_dense_replace": 1}
YARN_ALL = YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}
JAMBA = SHAPE | {"num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1}
JAMBA |= {"intermediate_size": 24, "mamba_d_state": 8}
MINIMAX = SHAPE | {"num_hidden_layers": 3, "layer_types": MIXED, "num_local_experts": 4, "intermediate_size": 12}
ALPHAS = {f"{name}_alpha_factor": 3.5 for name in ("full_attn", "linear_attn", "mlp")}
BETAS = {f"{name}_beta_factor": 0.7 for name in ("full_attn", "linear_attn", "mlp")}
MAMBA2 = {"hidden_size": 32, "vocab_size": 97, "num_heads": 4, "head_dim": 16, "state_size": 8, "num_hidden_layers": 2}
MAMBA2 |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 3}


def rope(fraction=None, theta=1e4, **more):
    share = {} if fraction is None else {"partial_rotary_factor": fraction}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **share, **more}}


# family -> (configuration class, configurations that vary each of its keys)
CASES = {
    "qwen3_5": (
        "Qwen3_5TextConfig",
        QWEN,
        QWEN | {"tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 1e-3},
        QWEN | rope(0.5, 77.0) | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3},
        QWEN | rope(0.5, **YARN) | {"num_key_value_heads": 4, "linear_key_head_dim": 7, "linear_value_head_dim": 12},
        QWEN | rope(1.0, **LLAMA3) | {"head_dim": 8, "intermediate_size": 20, "num_key_value_heads": 1},
        {**QWEN, "num_hidden_layers": 4, "layer_types": None} | rope(0.25, mrope_section=[1, 1, 0]),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        QWEN | {"num_experts": 0},
        QWEN | {"num_experts": 4, "mlp_only_layers": [0, 1, 2], "attention_bias": True, "tie_word_embeddings": True},
        QWEN | rope(0.5, 77.0) | {"num_experts": 0, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
        SPARSE,
        SPARSE | {"norm_topk_prob": False, "num_experts_per_tok": 3, "tie_word_embeddings": True, "num_experts": 6},
        SPARSE | {"mlp_only_layers": [1], "shared_expert_intermediate_size": 4, "moe_intermediate_size": 8},
        {**SPARSE, "decoder_sparse_step": 2, "num_hidden_layers": 4, "layer_types": None, "attention_bias": True},
        SPARSE | rope(0.5, **YARN) | {"num_experts_per_tok": 1, "rms_norm_eps": 1e-3, "linear_key_head_dim": 7},
        SPARSE | rope(1.0, **LLAMA3) | {"num_experts": 5, "num_experts_per_tok": 5, "linear_num_value_heads": 2},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        OLMO,
        OLMO | {"linear_allow_neg_eigval": False, "attention_bias": True, "tie_word_embeddings": True},
        OLMO | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "rms_norm_eps": 1e-3},
        OLMO | {"linear_num_value_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 7},
        OLMO | rope(theta=50.0) | {"linear_conv_kernel_dim": 3, "num_key_value_heads": 4, "intermediate_size": 20},
        {**OLMO, "num_hidden_layers": 2, "layer_types": None, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
    ),
    "lfm2": (
        "Lfm2Config",
        LFM2,
        LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "norm_eps": 1e-3},
        LFM2 | {"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.5, "tie_word_embeddings": False},
        LFM2 | rope(theta=50.0) | {"num_key_value_heads": 1, "head_dim": 12},
        LFM2 | rope(**YARN) | {"num_key_value_heads": 4, "conv_L_cache": 2},
        {**LFM2, "layer_types": None, "full_attn_idxs": [0, 2]},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        GRANITE,
        GRANITE | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05},
        GRANITE | {"logits_scaling": 8.0, "position_embedding_type": "rope", **rope(theta=50.0), "rms_norm_eps": 1e-3},
        GRANITE | {"mamba_n_groups": 2, "mamba_proj_bias": True, "attention_bias": True, "mamba_conv_bias": False},
        GRANITE | {"mamba_d_conv": 3, "mamba_expand": 3, "time_step_limit": [0.1, 0.5], "tie_word_embeddings": True},
        {**GRANITE, "layer_types": None, "num_key_value_heads": None, "mamba_d_head": 16, "head_dim": 12}
        | {"time_step_limit": [0.3, float("inf")]},
        GRANITE | {"num_experts_per_tok": 0},  # a dense model as released: a key of layers that it lacks
        GRANITE_SPARSE | {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.05},
        GRANITE_SPARSE | {"num_experts_per_tok": 1, "logits_scaling": 8.0, "tie_word_embeddings": True},
        GRANITE_SPARSE | {"num_experts_per_tok": 3, "num_local_experts": 5, "position_embedding_type": "rope"},
        GRANITE_SPARSE | {"intermediate_size": 8, "shared_intermediate_size": 5, "mamba_n_groups": 2},
        GRANITE_SPARSE | {"layer_types": None, "mamba_d_conv": 3, "rms_norm_eps": 1e-3, "time_step_limit": [0.1, 0.5]},
        GRANITE_SPARSE | {"attention_bias": True, "mamba_proj_bias": True, "num_key_value_heads": 1},
    ),
    "bamba": (
        "BambaConfig",
        BAMBA,
        BAMBA | {"mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True, "tie_word_embeddings": True},
        BAMBA | {"mamba_n_groups": 2, "mamba_conv_bias": None, "mamba_d_conv": 3, "time_step_limit": [0.1, 0.5]},
    ),
    "falcon_h1": (
        "FalconH1Config",
        FALCON,
        FALCON | FACTORS,
        FALCON | FACTORS | {"mamba_rms_norm": True, "mamba_n_groups": 2, "tie_word_embeddings": True},
        FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True, "mlp_bias": True},
        FALCON | {"attention_bias": True, "projectors_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3},
        {**FALCON, "mamba_d_ssm": None, "head_dim": 12, "rms_norm_eps": 1e-3, "time_step_limit": [0.1, 0.5]}
        | rope(theta=50.0),
    ),
    "nemotron_h": (
        "NemotronHConfig",
        NEMOTRON,
        NEMOTRON | {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        NEMOTRON | {"n_groups": 4, "conv_kernel": 3, "time_step_min": 0.3, "layer_norm_epsilon": 1e-3},
        NEMOTRON | {"mlp_hidden_act": "silu", "head_dim": 12, "num_key_value_heads": 4, "mamba_head_dim": 8},
        {**NEMOTRON, "layers_block_type": None, "hybrid_override_pattern": "M-M*-"},
        NEMOTRON | {"layers_block_type": ["full_attention", "linear_attention"], "ssm_state_size": 5},
        NEMOTRON_SPARSE,
        NEMOTRON_SPARSE | {"norm_topk_prob": False, "num_experts_per_tok": 3, "mlp_hidden_act": "silu"},
        NEMOTRON_SPARSE | {"routed_scaling_factor": 2.5, "n_routed_experts": 6, "n_group": 3, "topk_group": 2},
        NEMOTRON_SPARSE | {"moe_latent_size": 16, "moe_intermediate_size": 8, "tie_word_embeddings": True},
        {**NEMOTRON_SPARSE, "layers_block_type": None, "hybrid_override_pattern": "ME*E", "mlp_hidden_act": "relu"},
        NEMOTRON_SPARSE | {"moe_shared_expert_intermediate_size": 5, "n_routed_experts": 5, "num_experts_per_tok": 1},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        KIMI,
        KIMI | {"q_lora_rank": 12, "attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
        KIMI | {"num_experts": 6, "num_expert_group": 3, "topk_group": 2, "routed_scaling_factor": 1.0},
        KIMI | {"moe_renormalize": None, "num_experts_per_token": 3, "num_shared_experts": 2, "v_head_dim": 12},
        {**KIMI, "num_hidden_layers": 5, "layer_types": None, "first_k_dense_replace": 3, "qk_nope_head_dim": 3}
        | {"linear_attn_config": {"head_dim": 6, "num_heads": 2, "short_conv_kernel_size": 3}},
        {**KIMI, "layer_types": None, "mlp_layer_types": ["sparse", "dense", "sparse"], "qk_rope_head_dim": 6}
        | {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3]}, "kv_lora_rank": 9},
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        LING,
        LING | {"kda_safe_gate": False, "attention_bias": True, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
        LING | {"kda_lower_bound": -2.0, "topk_group": 1, "short_conv_kernel_size": 3, "routed_scaling_factor": 1.0},
        LING | {"rope_parameters": YARN_ALL} | {"moe_renormalize": False, "v_head_dim": 12, "num_shared_experts": 2},
        {**LING, "layer_types": None, "layer_group_size": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]}
        | {"rope_theta": 50.0, "kv_lora_rank": 9},
        LING | {"num_experts": 4, "num_expert_group": 1, "topk_group": 1, "qk_rope_head_dim": 6, "head_dim": 6},
    ),
    "jamba": (
        "JambaConfig",
        JAMBA,
        JAMBA | {"num_experts_per_tok": 3, "tie_word_embeddings": True, "mamba_conv_bias": False},
        JAMBA | {"expert_layer_period": 3, "expert_layer_offset": 0, "mamba_dt_rank": 5, "mamba_expand": 1},
        JAMBA | {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_conv": 3, "rms_norm_eps": 1e-3},
        JAMBA | {"num_experts": 1, "num_key_value_heads": 4, "mamba_d_state": 5},
        JAMBA | {"expert_layer_period": 1, "expert_layer_offset": 0, "num_experts": 6, "num_hidden_layers": 3},
    ),
    "minimax": (
        "MiniMaxConfig",
        MINIMAX,
        MINIMAX | ALPHAS | {"num_experts_per_tok": 3, "tie_word_embeddings": True, "head_dim": 12},
        MINIMAX | ALPHAS | BETAS | rope(theta=50.0) | {"rms_norm_eps": 1e-3, "block_size": 4},
        MINIMAX | BETAS | {"num_attention_heads": 6, "head_dim": 8, "num_local_experts": 6, "block_size": 5},
        {**MINIMAX, "layer_types": None, "sliding_window": 5, "num_key_value_heads": 4, "num_experts_per_tok": 1},
        MINIMAX | rope(**YARN) | {"head_dim": 8, "num_hidden_layers": 1, "layer_types": ["full_attention"]},
    ),
    "mamba2": (
        "Mamba2Config",
        MAMBA2 | {"n_groups": 1},
        MAMBA2 | {"n_groups": 2, "use_bias": True, "tie_word_embeddings": True},
        MAMBA2 | {"n_groups": 4, "use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-3},
        MAMBA2 | {"time_step_limit": [0.1, 0.5], "n_groups": 1, "expand": 3, "num_heads": 6},
    ),
    "llama": ("LlamaConfig", SHAPE | {"num_hidden_layers": 2, "attention_bias": True, **rope(**LLAMA3)}),
    "qwen2": (
        "Qwen2Config",
        SHAPE | WINDOWS | {"max_window_layers": 1},
        SHAPE | WINDOWS | {"max_window_layers": 0, "sliding_window": 7},
    ),
    "qwen3": (
        "Qwen3Config",
        SHAPE | WINDOWS | {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
        SHAPE | {"num_hidden_layers": 2, "head_dim": 12, "attention_bias": True, **rope(**YARN)},
    ),
    "mamba": (
        "MambaConfig",
        {"hidden_size": 32, "vocab_size": 97, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 5},
    ),
}
TESTS = [(family, index) for family, (_, *cases) in CASES.items() for index in range(len(cases))]


def build(family, case):
    name, *cases = CASES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**cases[case])).eval()
    with torch.no_grad():
        corrections = [tensor for name, tensor in model.named_buffers() if name.endswith("correction_bias")]
        for parameter in (*model.parameters(), *corrections):  # so that gains and biases show
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


TOKENS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))


def steps(model, tokens):
    states = model.init_state(len(tokens), tokens.shape[1])
    for place in range(tokens.shape[1]):
        last, states = model.step(tokens[:, place], states)
    return last


@pytest.mark.parametrize("family, case", TESTS)
@torch.no_grad()
def test_logits_are_those_of_transformers_and_an_export_is_the_inverse(family, case, tmp_path):
    theirs = build(family, case)
    theirs.save_pretrained(tmp_path / "source")
    model, _ = load_model(hf.convert(tmp_path / "source", tmp_path / "ours").path)
    expected, logits = theirs(TOKENS, use_cache=False).logits, model(TOKENS)[0]
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (steps(model, TOKENS) - expected[:, -1]).abs().max() < 1e-4 * expected.abs().max()
    folder = hf.export_as(family, tmp_path / "ours", tmp_path / "back", shard_size="8KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = again.state_dict()
    for name, tensor in theirs.state_dict().items():  # MiniMax has tables of its blocks of tokens
        assert name.endswith("_decay") or torch.equal(weights[name], tensor), name
    logits = again(TOKENS, use_cache=False).logits
    assert (logits - expected).abs().max() <= 1e-6 * expected.abs().max()
    if case > 1:
        return
    second, _ = load_model(hf.convert(folder, tmp_path / "twice").path)
    assert second.config.layout == model.config.layout
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_a_head_that_shares_the_embedding_is_that_of_transformers(family, tmp_path):
    """transformers' Kimi Linear, Ling 3 and Nemotron-H never share it, whatever config.json says."""
    build(family, 0).save_pretrained(tmp_path / "source")
    config = load_model(hf.convert(tmp_path / "source", tmp_path / "read").path)[0].config
    model = build_model(config.model_copy(update={"tie_embeddings": True}), seed=0)
    save_model(tmp_path / "ours", model.config, model.state_dict())
    folder = hf.export_as(family, tmp_path / "ours", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model.eval()(TOKENS)[0]
    assert (theirs(TOKENS, use_cache=False).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert load_model(hf.convert(folder, tmp_path / "back").path)[0].config.tie_embeddings


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_greedy_tokens_of_a_padded_batch_are_those_of_transformers_row_by_row(family, tmp_path):
    theirs = build(family, len(CASES[family]) - 2)
    theirs.save_pretrained(tmp_path / "source")
    model, _ = load_model(hf.convert(tmp_path / "source", tmp_path / "ours").path)
    wrapped = wrap(model, hf.LinnetConfig(model=model.config.model_dump(mode="json")))
    rows, count = [TOKENS[0], TOKENS[1, :5]], 10
    mask = torch.stack([F.pad(torch.ones_like(row), (12 - len(row), 0)) for row in rows])
    batch = torch.stack([F.pad(row, (12 - len(row), 0)) for row in rows])
    tokens = wrapped.generate(batch, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0)
    for row, text in zip(rows, tokens, strict=True):
        text = text[12 - len(row) :]
        expected = theirs(text[None], use_cache=False).logits[0]
        assert (model(text[None])[0][0] - expected).abs().max() < 1e-4 * expected.abs().max()
        best, second = expected[len(row) - 1 : -1].topk(2).values.unbind(-1)
        sure = int((best - second >= 1e-4).cumprod(0).sum())  # up to the first place where the two best are close
        assert sure > 2 and len(text) == len(row) + count
        assert text[len(row) :][:sure].tolist() == expected[len(row) - 1 : -1].argmax(-1)[:sure].tolist()


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def convolved(x, weight):
    """silu of a causal convolution of each channel, x [T, C] and weight [C, 1, W]."""
    taps = weight.shape[-1]
    padded = torch.cat([x.new_zeros(taps - 1, x.shape[1]), x])
    return F.silu(sum(padded[tap : tap + len(x)] * weight[:, 0, tap] for tap in range(taps)))


def delta(kind, config, w, x):
    """A mixer of flash-linear-attention on the delta rule, x [T, D]."""
    q, k, v = (convolved(x @ w(f"{name}_proj.weight").T, w(f"{name}_conv1d.weight")) for name in "qkv")
    heads = config["num_heads"]
    count = config.get("num_v_heads", heads)
    q, k = (y.unflatten(-1, (heads, -1)).repeat_interleave(count // heads, 1) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    v = v.unflatten(-1, (count, -1))
    beta = (x @ w("b_proj.weight").T).sigmoid() * (2 if config.get("allow_neg_eigval") else 1)
    decay = x.new_zeros(len(x), count, 1)
    if kind == "gated_deltanet":
        decay = -(w("A_log").exp() * F.softplus(x @ w("a_proj.weight").T + w("dt_bias")))[..., None]
    elif kind == "kda":
        f = (x @ w("f_proj.0.weight").T @ w("f_proj.1.weight").T + w("dt_bias")).unflatten(-1, (count, -1))
        rates, bound = w("A_log").exp()[:, None], config.get("lower_bound")
        decay = -rates * F.softplus(f) if bound is None else bound * (rates * f).sigmoid()
    state, rows = x.new_zeros(count, k.shape[-1], v.shape[-1]), []
    for t in range(len(x)):
        state = decay[t].exp()[..., None] * state
        error = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * error[:, None]
        rows.append(torch.einsum("hkv,hk->hv", state, q[t]) * k.shape[-1] ** -0.5)
    o = rms(torch.stack(rows), config["norm_eps"]) * w("o_norm.weight")
    if kind == "kda":
        gate = x @ w("g_proj.0.weight").T @ w("g_proj.1.weight").T + w("g_proj.1.bias")
        o = o * gate.sigmoid().unflatten(-1, (count, -1))
    elif config.get("use_gate", kind == "gated_deltanet"):
        o = o * F.silu(x @ w("g_proj.weight").T).unflatten(-1, (count, -1))
    return o.flatten(1) @ w("o_proj.weight").T


def softmax(config, w, x):
    """An attention layer of flash-linear-attention with all heads of keys, x [T, D]."""
    q, k, v = ((x @ w(f"{name}_proj.weight").T).unflatten(-1, (config["num_heads"], -1)) for name in "qkv")
    half = q.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 1e4 ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q, k = (
        torch.cat([y[..., :half] * cos - y[..., half:] * sin, y[..., half:] * cos + y[..., :half] * sin], -1)
        for y in (q, k)
    )
    scores = torch.einsum("thk,shk->hts", q, k) * q.shape[-1] ** -0.5
    mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return (
        torch.einsum("hts,shk->thk", scores.masked_fill(mask, -torch.inf).softmax(-1), v).flatten(1)
        @ w("o_proj.weight").T
    )


def of_fla(config, weights, tokens):
    """Logits of a model of flash-linear-attention on the delta rule, tokens [T]."""
    w, eps = {name: tensor.double() for name, tensor in weights.items()}, config["norm_eps"]
    x = w["model.embeddings.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        y = rms(x, eps) * w[f"{layer}attn_norm.weight"]
        own = lambda name, layer=layer: w[f"{layer}attn.{name}"]  # noqa: E731
        attention = config.get("attn") or {"layers": []}
        if index in attention["layers"]:
            x = x + softmax(attention, own, y)
        else:
            x = x + delta(config["model_type"], config, own, y)
        y = rms(x, eps) * w[f"{layer}mlp_norm.weight"]
        gate, up, down = (w[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    head = w.get("lm_head.weight", w["model.embeddings.weight"])
    return rms(x, eps) * w["model.norm.weight"] @ head.T


def of_author(heads, weights, tokens):
    """Logits of RWKV-7 with its author's names, tokens [T]."""
    w = {name: tensor.double() for name, tensor in weights.items()}

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def before(x):
        return torch.cat([x.new_zeros(1, x.shape[1]), x[:-1]]) - x

    x, first = norm(w["emb.weight"][tokens], "blocks.0.ln0"), None
    for index in range(sum(name.endswith("ln1.weight") for name in w)):
        p = {name.removeprefix(f"blocks.{index}.att."): tensor.squeeze() for name, tensor in w.items()}
        p |= {name: w[f"blocks.{index}.att.{name}"] for name in ("w1", "w2", "a1", "a2", "g1", "g2", "r_k")}
        y = norm(x, f"blocks.{index}.ln1")
        r, d, k, v, a, g = (y + before(y) * p[f"x_{name}"] for name in "rwkvag")
        decay = (-math.exp(-0.5) * (p["w0"] + (d @ p["w1"]).tanh() @ p["w2"]).sigmoid()).exp()
        a, g = (p["a0"] + a @ p["a1"] @ p["a2"]).sigmoid(), (g @ p["g1"]).sigmoid() @ p["g2"]
        r, k = r @ p["receptance.weight"].T, k @ p["key.weight"].T
        shared, v = v, v @ p["value.weight"].T
        if first is None:
            first = v
        else:
            v = v + (first - v) * (p["v0"] + shared @ p["v1"] @ p["v2"]).sigmoid()
        kappa = F.normalize((k * p["k_k"]).unflatten(-1, (heads, -1)), dim=-1)
        k = k * (1 + (a - 1) * p["k_a"])
        r, k, v, a, decay = (z.unflatten(-1, (heads, -1)) for z in (r, k, v, a, decay))
        state, rows = x.new_zeros(heads, r.shape[-1], r.shape[-1]), []
        for t in range(len(x)):
            read = torch.einsum("hkv,hk->hv", state, kappa[t])
            state = decay[t][..., None] * state - (kappa[t] * a[t])[..., None] * read[:, None]
            state = state + k[t][..., None] * v[t][:, None]
            rows.append(torch.einsum("hkv,hk->hv", state, r[t]))
        o = F.group_norm(torch.stack(rows).flatten(1), heads, eps=1e-5 * r.shape[-1])
        o = o * p["ln_x.weight"] + p["ln_x.bias"] + ((r * k * p["r_k"]).sum(-1, keepdim=True) * v).flatten(1)
        x = x + (o * g) @ p["output.weight"].T
        y = norm(x, f"blocks.{index}.ln2")
        y = y + before(y) * w[f"blocks.{index}.ffn.x_k"].squeeze()
        key, value = (w[f"blocks.{index}.ffn.{name}.weight"] for name in ("key", "value"))
        x = x + F.relu(y @ key.T).square() @ value.T
    return norm(x, "ln_out") @ w["head.weight"].T


FLA = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97, "num_heads": 2, "norm_eps": 1e-6}
FLA |= {"intermediate_size": 48}
BETWEEN = {"attn": {"layers": [1], "num_heads": 4}}
RESTATED = {
    "gated_deltanet": [{"head_dim": 8}, {"head_dim": 6, "expand_v": 1.5, "use_gate": False, "num_v_heads": 4}]
    + [{"head_dim": 8, "allow_neg_eigval": True, "conv_size": 3, "norm_eps": 1e-3} | BETWEEN],
    "delta_net": [{}, {"expand_k": 0.5, "expand_v": 2.0, "use_gate": True}, {"allow_neg_eigval": True} | BETWEEN],
    "kda": [{"head_dim": 8}, {"head_dim": 8, "lower_bound": -5.0, "safe_gate": True, "expand_v": 2.0}]
    + [{"head_dim": 8, "num_v_heads": 4, "tie_word_embeddings": True} | BETWEEN],
}


def drawn(kind, config):
    from linnet.hf.layouts import FAMILIES, Settings
    from linnet.models import empty_of

    plan = FAMILIES[kind].read(Settings(config, config.get("tie_word_embeddings", False)))
    own = {name: tuple(tensor.shape) for name, tensor in empty_of(plan.model, "meta").state_dict().items()}
    shapes = {}
    for name, part in plan.parts.items():
        shapes[part.name] = part.shape(own[name])
    return random_tensors(shapes)


def inverse(kind, folder, tensors, path):
    """Writes the converted model back, and compares tensors and a second reading."""
    back = hf.export_as(kind, folder, path / "back")
    found = load_file(back / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    first, second = load_model(folder)[0], load_model(hf.convert(back, path / "twice").path)[0]
    assert first.config == second.config


@pytest.mark.parametrize("kind, case", [(kind, case) for kind in RESTATED for case in range(3)])
@torch.no_grad()
def test_the_delta_rule_of_flash_linear_attention(kind, case, tmp_path):
    config = FLA | {"model_type": kind, **RESTATED[kind][case]}
    tensors = drawn(kind, config)
    write_folder(tmp_path / "source", config, tensors)
    model, _ = load_model(hf.convert(tmp_path / "source", tmp_path / "ours").path)
    expected = torch.stack([of_fla(config, tensors, row) for row in TOKENS])
    assert (model(TOKENS)[0] - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (model.double()(TOKENS)[0] - expected).abs().max() < 1e-7 * expected.abs().max()
    assert (steps(model, TOKENS) - expected[:, -1]).abs().max() < 1e-7 * expected.abs().max()
    inverse(kind, tmp_path / "ours", tensors, tmp_path)


RWKV = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 97, "head_dim": 8, "intermediate_size": 48}
RWKV |= {"decay_low_rank_dim": 5, "gate_low_rank_dim": 6, "a_low_rank_dim": 7, "v_low_rank_dim": 9}
LORAS = {"w": "w_lora", "a": "a_lora", "v": "v_lora", "g": "g_lora"}
RENAMED = {"emb": "model.embeddings", "ln_out": "model.norm", "head": "lm_head"}
RENAMED |= {"blocks.0.ln0": "model.layers.0.pre_norm"}
PLACES = {"ln1": "attn_norm", "ln2": "ffn_norm", "att.receptance": "attn.r_proj", "att.key": "attn.k_proj"}
PLACES |= {"att.value": "attn.v_proj", "att.output": "attn.o_proj", "att.ln_x": "attn.g_norm"}


def names_of_fla(tensors):
    """The tensors of RWKV-7 with the author's names as flash-linear-attention has them."""
    found = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        _, _, rest = module.partition(".")
        layer, _, place = rest.partition(".")
        own = f"model.layers.{layer}."
        if module in RENAMED:
            found[f"{RENAMED[module]}.{end}"] = tensor
        elif end[0] in LORAS and end[1:] in ("0", "1", "2"):
            index = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[end[1:]]
            found[f"{own}attn.{LORAS[end[0]]}.lora.{index}"] = (
                tensor.flatten() if end[1:] == "0" else tensor.T.contiguous()
            )
        elif place in PLACES:
            found[f"{own}{PLACES[place]}.{end}"] = tensor
        else:
            flat = end.startswith("k_") or place == "ffn" and end == "x_k"
            found[f"{own}{place.replace('att', 'attn')}.{end}"] = tensor.flatten() if flat else tensor
    return found


def test_the_file_of_rwkv7s_author_has_a_head_that_shares_the_embedding(tmp_path):
    config = get_recipe("rwkv7-10m").model_copy(update={"d_model": 64, "layout": "rwkv7+rwkv x1", "vocab_size": 97})
    config = config.model_copy(update={"tie_embeddings": True})
    save_model(tmp_path / "ours", config, build_model(config, seed=0).state_dict())
    tensors = load_file(hf.export_as("rwkv7_author", tmp_path / "ours", tmp_path / "out") / "model.safetensors")
    assert torch.equal(tensors["head.weight"], tensors["emb.weight"])
    assert load_model(hf.convert(tmp_path / "out", tmp_path / "back").path)[0].config.tie_embeddings


@pytest.mark.parametrize("described", [True, False])
@torch.no_grad()
def test_rwkv7_of_its_author_and_of_flash_linear_attention(described, tmp_path):
    tensors = drawn("rwkv7_author", RWKV)
    expected = torch.stack([of_author(4, tensors, row) for row in TOKENS])
    for kind, names in (("rwkv7_author", lambda given: given), ("rwkv7", names_of_fla)):
        config = RWKV | {"model_type": "rwkv7", "norm_eps": 1e-5} if described else {"model_type": "rwkv7"}
        source = write_folder(tmp_path / kind / "source", config, names(tensors))
        if kind == "rwkv7_author" and not described:  # the author publishes none
            (source / "config.json").unlink()
        model, _ = load_model(hf.convert(source, tmp_path / kind / "ours").path)
        assert (model(TOKENS)[0] - expected).abs().max() < 1e-4 * expected.abs().max()
        assert (steps(model, TOKENS) - expected[:, -1]).abs().max() < 1e-4 * expected.abs().max()
        assert (model.double()(TOKENS)[0] - expected).abs().max() < 1e-5 * expected.abs().max()
        inverse(kind, tmp_path / kind / "ours", names(tensors), tmp_path / kind)


@torch.no_grad()
def test_mamba2_of_state_spaces_and_of_flash_linear_attention(tmp_path):
    theirs = build("mamba2", 0)
    expected = theirs(TOKENS, use_cache=False).logits
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    fla = {"hidden_size": 32, "vocab_size": 97, "head_dim": 16, "state_size": 8, "num_hidden_layers": 2}
    fla |= {"model_type": "mamba2", "norm_eps": 1e-5, "dt_limit": [0.0, float("inf")]}
    own = {"d_model": 32, "n_layer": 2, "vocab_size": 95, "pad_vocab_size_multiple": 97, "rms_norm": True}
    own |= {"ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 8}, "tie_embeddings": False}
    renamed = {name.replace("embeddings", "embedding"): tensor for name, tensor in weights.items()}
    for name, config, tensors in (("fla", fla, weights), ("own", own, renamed)):
        source = write_folder(tmp_path / name, config, tensors)
        model, _ = load_model(hf.convert(source, tmp_path / f"{name}-ours").path)
        assert (model(TOKENS)[0] - expected).abs().max() < 1e-4 * expected.abs().max()
    for config, key in ((fla | {"n_groups": 2, "D_has_hdim": True}, "D_has_hdim"), (own | {"ssm_cfg": {}}, "layer")):
        with pytest.raises(ConfigError, match=key):
            hf.convert(write_folder(tmp_path / f"wrong-{key}", config, weights), tmp_path / "out")


@torch.no_grad()
def test_a_model_that_also_reads_images_is_read_as_text(tmp_path):
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=QWEN, vision_config=vision | {"num_position_embeddings": 16})
    torch.manual_seed(0)
    theirs = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(3, 3)
    write_folder(tmp_path / "more", json.loads((tmp_path / "source" / "config.json").read_text()), tensors)
    found = hf.convert(tmp_path / "more", tmp_path / "ours")
    assert any("the vision tower was left out" in note for note in found.notes)
    assert any("multi-token prediction was left out: 1 tensor" in note for note in found.notes)
    model, _ = load_model(found.path)
    expected = theirs(TOKENS, use_cache=False).logits
    assert (model(TOKENS)[0] - expected).abs().max() < 1e-4 * expected.abs().max()
    text = transformers.AutoModelForCausalLM.from_pretrained(
        hf.export_as("qwen3_5", tmp_path / "ours", tmp_path / "back"), dtype=torch.float32
    )
    assert (text(TOKENS, use_cache=False).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_what_does_not_fit_is_named_before_anything_is_written(tmp_path):
    theirs = build("granitemoehybrid", 0)
    theirs.save_pretrained(tmp_path / "source", max_shard_size="8KB")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    harm = "raise SystemExit('ran')"

    def refused(*keys, **changes):
        (tmp_path / "source" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ConfigError) as error:
            hf.convert(tmp_path / "source", tmp_path / "out")
        assert all(key in str(error.value) for key in keys) and not (tmp_path / "out").exists()

    refused("mamba.in_proj.weight", "[140, 32]", "[148, 32]", mamba_d_state=4)
    kinds = ["full_attention", "full_attention", "linear_attention"]
    refused("layers.0.mamba.A_log: Linnet", "layers.0.self_attn.q_proj.weight: is missing", layer_types=kinds)
    refused("quantization_config", "num_local_experts", quantization_config={"bits": 4}, num_local_experts=-8)
    (tmp_path / "source" / "modeling_evil.py").write_text(harm)
    refused("layer_types", auto_map={"AutoModelForCausalLM": "modeling_evil.Model"}, layer_types=["mamba"])
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    shard = sorted((tmp_path / "source").glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(shard.name)


def test_tensors_of_experts_that_do_not_fit_are_named_together(tmp_path):
    build("kimi_linear", 0).save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe"
    tensors[f"{layer}.experts.9.w1.weight"] = tensors.pop(f"{layer}.experts.2.w1.weight")
    tensors[f"{layer}.experts.3.w2.weight"] = torch.zeros(32, 5)
    tensors[f"{layer}.experts.0.w3.weight"] = torch.zeros(12, 32, dtype=torch.int8)
    write_folder(tmp_path / "wrong", config, tensors)
    with pytest.raises(ConfigError) as error:
        hf.convert(tmp_path / "wrong", tmp_path / "out")
    problems = {problem.partition(":")[0].removeprefix(f"{layer}."): problem for problem in error.value.problems}
    assert problems.keys() == {
        f"{name}.weight" for name in ("experts.2.w1", "experts.3.w2", "experts.0.w3", "experts.9.w1")
    }
    assert "[32, 5], but config.json implies [32, 12]" in problems["experts.3.w2.weight"]
    assert "missing; its shape must be [12, 32]" in problems["experts.2.w1.weight"]
    assert not (tmp_path / "out").exists()


def test_layers_after_the_last_that_predict_several_tokens_are_left_out(tmp_path):
    build("bailing_hybrid", 0).save_pretrained(tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    write_folder(tmp_path / "more", config, tensors | {"model.layers.3.eh_proj.weight": torch.zeros(3, 3)})
    notes = hf.convert(tmp_path / "more", tmp_path / "ours").notes
    assert any("multi-token prediction was left out: 1 tensor" in note for note in notes)
    write_folder(tmp_path / "wrong", config, tensors | {"model.layers.30.eh_proj.weight": torch.zeros(3, 3)})
    with pytest.raises(ConfigError, match="model.layers.30.eh_proj.weight: Linnet's model does not use it"):
        hf.convert(tmp_path / "wrong", tmp_path / "out")


def test_an_export_names_every_setting_that_the_family_lacks(tmp_path):
    def refused(target, *keys, **model):
        made = parse(ModelConfig, {"d_model": 32, "vocab_size": 97} | model)
        folder = tmp_path / f"{target}-{len(list(tmp_path.iterdir()))}"
        save_model(folder, made, build_model(made).state_dict())
        with pytest.raises(ConfigError) as error:
            hf.export_as(target, folder, tmp_path / "out")
        named = {problem.partition(":")[0] for problem in error.value.problems}
        assert named == set(keys) and not (tmp_path / "out").exists()

    window = {"num_heads": 4, "window": 8, "out_norm": "rmsnorm"}
    refused("granitemoehybrid", "layout", layout="tnl+swiglu attention+swiglu", options={"attention": {"num_heads": 4}})
    refused(
        *("granitemoehybrid", "options.attention.window", "options.attention.out_norm", "embedding_norm", "norm"),
        **{"layout": "attention+swiglu x2", "options": {"attention": window}, "norm": "layernorm"},
        embedding_norm=True,
    )
    gdn = {"num_heads": 2, "head_dim": 8, "allow_neg_eigval": True}
    refused(
        *("qwen3_5", "options.gdn.allow_neg_eigval", "options.gdn.norm_eps", "norm"),
        **{"layout": "gdn+swiglu x2", "options": {"gdn": gdn}},
    )
    refused(
        "mamba2",
        "residual_scale",
        "bias",
        "options.mamba2.norm_eps",
        layout="mamba2 x2",
        residual_scale=0.5,
        bias="qkv",
    )
    refused("rwkv7", "embedding_norm", layout="rwkv7+rwkv x2", norm="layernorm")
    mixed = {
        "attention": {"num_heads": 4, "rope": False},
        "moe": {"inner": 8, "shared_inner": 8},
        "swiglu": {"inner": 8},
    }
    refused("granitemoehybrid", "layout", layout="attention+moe attention+swiglu", options=mixed)
    refused(
        "jamba",
        "layout",
        layout="attention+moe x2 attention+swiglu",
        options=mixed | {"moe": {"normalise": False, "inner": 8}},
    )
    moe = {"score": "sigmoid", "correction": True, "shared_inner": 12, "inner": 8, "shared_gate": True, "latent": 8}
    refused(
        *("kimi_linear", "options.moe.shared_gate", "options.moe.latent", "options.moe.shared_inner", "residual_norm"),
        *("options.kda.gate_bias", "options.kda.norm_eps"),
        **{"layout": "kda+moe x2", "options": {"kda": {"num_heads": 4, "norm_eps": 1e-4}, "moe": moe}},
        residual_norm=2.0,
    )


@pytest.mark.parametrize("size", ["5", "GB", "0KB", "-1GB", "5 gigabytes", pytest.param("9" * 400 + "GB", id="long")])
def test_a_size_of_shards_is_a_number_with_a_unit(size, tmp_path):
    with pytest.raises(ConfigError, match="shard_size"):
        hf.export_as("mamba2", tmp_path, tmp_path / "out", shard_size=size)


def test_what_the_command_writes_are_the_families():
    from typing import get_args

    from linnet.cli.convert import Target
    from linnet.hf.layouts import FAMILIES

    others = {"hf", "vit", "timm", "linnet"}
    assert set(get_args(Target)) - others == set(FAMILIES) - {"qwen3_5_text", "rwkv7_fla"}


def test_how_a_checkpoint_draws_tokens_comes_along(tmp_path):
    theirs = build("mamba2", 0)
    theirs.save_pretrained(tmp_path / "source")
    hf.to_transformers(ByteTokenizer()).save_pretrained(tmp_path / "source")
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [3, 5], "min_p": "x"}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(values))
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    weights = load_file(tmp_path / "source" / "model.safetensors")
    weights["backbone.embeddings.weight"] = torch.zeros(256, 32)
    weights["lm_head.weight"] = torch.zeros(256, 32) + 1
    write_folder(tmp_path / "source", config | {"vocab_size": 256}, weights)
    found = hf.convert(tmp_path / "source", tmp_path / "ours")
    tokenizer = load_model(found.path)[1]
    assert tokenizer.sampling == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert {3, 5} <= {tokenizer.end_of_document, *tokenizer.generation_ends}
    request = parse(CompletionRequest, {"model": "m", "prompt": "a", "top_k": 3})
    drawn = request.sampling(0, 4, None, tokenizer.sampling)
    assert (drawn.temperature, drawn.top_p, drawn.top_k) == (0.6, 0.95, 3)
    folder = hf.export_as("mamba2", tmp_path / "ours", tmp_path / "back")
    again = transformers.GenerationConfig.from_pretrained(folder)
    assert (again.temperature, again.top_p, again.top_k, again.do_sample) == (0.6, 0.95, 20, True)
    assert set(again.eos_token_id) == {0, 3, 5}
    for number, values in enumerate(({"top_p": 0.9}, {"temperature": 0.0, "top_k": 5, "repetition_penalty": 1.2})):
        (tmp_path / "source" / "generation_config.json").write_text(json.dumps(values))
        hf.convert(tmp_path / "source", tmp_path / f"ours-{number}")
        folder = hf.export_as("mamba2", tmp_path / f"ours-{number}", tmp_path / f"back-{number}")
        again = transformers.GenerationConfig.from_pretrained(folder)
        assert (again.do_sample is True, again.top_p) == ((True, 0.9) if number == 0 else (False, None))
        assert again.repetition_penalty == (None if number == 0 else 1.2)
    with pytest.raises(ConfigError, match="'mamba3' is not a layout"):
        hf.export_as("mamba3", tmp_path / "ours", tmp_path / "none")


def test_two_values_that_share_a_key_of_a_layout_must_be_alike():
    model = models.family("gdn")(64, 1, vocab_size=64).model_copy(update={"norm_eps": 1e-6})
    alike = (
        "gdn.norm_eps: 1e-05 is not .* 1e-06, as model.norm_eps, since it has one norm_eps for both; train with that"
    )
    with pytest.raises(ConfigError, match=alike):
        FAMILIES["gated_deltanet"].write(model)


@pytest.mark.parametrize("family", ["granitemoehybrid", "kimi_linear"])
def test_a_conversion_holds_one_tensor_at_a_time(family, tmp_path, monkeypatch):
    from linnet.hf.source import Source

    build(family, 0).save_pretrained(tmp_path / "source", max_shard_size="8KB")
    alive, read = [], Source.read

    def watched(self, name):
        tensor = read(self, name)
        assert sum(kept() is not None for kept in alive) <= 1
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Source, "read", watched)
    hf.convert(tmp_path / "source", tmp_path / "ours")
    assert len(alive) > 40


def test_the_table_of_the_docs_is_the_registry():
    from linnet.hf.layouts import FAMILIES, LAYOUTS

    text = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.partition("## Which models")[2].partition("\n\n## ")[0].splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 6][2:]
    names = {name: row for row in rows for name in re.findall("`(.*?)`", row[0])}
    aliases = {"qwen3_5_text", "rwkv7_fla", "rwkv7_author", "mamba_ssm"}  # in the text of a row
    assert names.keys() - {"architecture"} == LAYOUTS.keys() - aliases - {"timm"}
    written = {name for name, row in names.items() if row[4].startswith("yes")}
    assert written == (FAMILIES.keys() - aliases) | {"vit", "architecture", "linnet"}
    assert all(row[3] == "yes" for row in rows)


@pytest.mark.parametrize(
    ("recipe", "family"),
    [
        ("gdn-10m", "gated_deltanet"),
        ("kda-10m", "kda"),
        ("delta_net-10m", "delta_net"),
        ("mamba2-10m", "mamba2"),
        ("gdn_hybrid-10m", "qwen3_5"),
        ("lfm2-10m", "lfm2"),
        ("rwkv7-10m", "rwkv7"),
    ],
)
def test_recipes_are_written_in_the_layouts_of_their_families(recipe, family, tmp_path):
    config = get_recipe(recipe)
    save_model(tmp_path / "ours", config, build_model(config, seed=0).state_dict())
    assert (hf.export_as(family, tmp_path / "ours", tmp_path / "out") / "config.json").is_file()
