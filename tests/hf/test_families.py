"""Families of hybrids against transformers' own models: read, stepped, and written back."""

import pytest
import torch

from linnet.runs import load_model

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")

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
    ),
    "bamba": (
        "BambaConfig",
        BAMBA,
        BAMBA | {"mlp_bias": True, "attention_bias": True, "mamba_proj_bias": True, "tie_word_embeddings": True},
        BAMBA | {"mamba_n_groups": 2, "mamba_conv_bias": False, "mamba_d_conv": 3, "time_step_limit": [0.1, 0.5]},
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
    ),
    "mamba2": (
        "Mamba2Config",
        MAMBA2 | {"n_groups": 1},
        MAMBA2 | {"n_groups": 2, "use_bias": True, "tie_word_embeddings": True},
        MAMBA2 | {"n_groups": 4, "use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-3},
        MAMBA2 | {"time_step_limit": [0.1, 0.5], "n_groups": 1, "expand": 3, "num_heads": 6},
    ),
}
TESTS = [(family, index) for family, (_, *cases) in CASES.items() for index in range(len(cases))]


def build(family, case):
    name, *cases = CASES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**cases[case])).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that gains and biases show
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family, case", TESTS)
def test_logits_are_those_of_transformers(family, case, tmp_path):
    theirs = build(family, case)
    theirs.save_pretrained(tmp_path / "source")
    found = hf.convert(tmp_path / "source", tmp_path / "out")
    model, _ = load_model(found.path)
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, logits = theirs(tokens, use_cache=False).logits, model(tokens)[0]
        states = model.init_state(2, 24)
        for place in range(24):
            last, states = model.step(tokens[:, place], states)
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (last - expected[:, -1]).abs().max() < 1e-4 * expected.abs().max()
