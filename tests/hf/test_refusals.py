"""What cannot be read is refused before anything is written, all of it at once, by name."""

import itertools
import json
import re

import pytest
import torch
from hf_folders import random_tensors, write_folder
from safetensors.torch import load_file, save_file

from linnet.config import ConfigError, shown
from linnet.runs import load_model

pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")

HEADED = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "num_attention_heads": 2}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4}
LINEAR |= {"linear_value_head_dim": 4, "num_key_value_heads": 2}
SSD = {"mamba_n_heads": 4, "mamba_d_state": 4}
CONFIGS = {
    "llama": HEADED,
    "mamba": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20},
    **{kind: {**HEADED, "num_key_value_heads": 2} for kind in ("mistral", "qwen2", "qwen3")},
    "transnormer": {"decoder_embed_dim": 16, "hidden_dim": 16, "decoder_layers": 3, "vocab_size": 20},
    "hgrn2": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "expand_ratio": 8},
    "hgrn": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20},
    "lightnet": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "expand_ratio": 8},
    "gla": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "num_heads": 2},
    "transformer": {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 20, "num_heads": 2},
    **{kind: {**HEADED, **LINEAR, "head_dim": 8} for kind in ("qwen3_5", "qwen3_next", "olmo_hybrid")},
    "lfm2": {**HEADED, "num_key_value_heads": 2},
    **{kind: {**HEADED, "num_key_value_heads": 2, **SSD} for kind in ("granitemoehybrid", "bamba", "falcon_h1")},
    "nemotron_h": {
        **HEADED,
        "num_key_value_heads": 2,
        "layers_block_type": ["mlp", "mamba", "moe"],
        "head_dim": 8,
        "mamba_num_heads": 8,
    },
    "kimi_linear": {**HEADED, "linear_head_dim": 4, "linear_num_heads": 2, "num_hidden_layers": 2}
    | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 8, "num_experts_per_token": 2},
    "bailing_hybrid": {**HEADED, "linear_head_dim": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    | {"layer_group_size": 2, "num_experts": 16, "num_experts_per_token": 2},
    "jamba": {**HEADED, "num_key_value_heads": 2, "num_hidden_layers": 2, "attn_layer_period": 2, "num_experts": 4}
    | {"attn_layer_offset": 1},
    "minimax": {**HEADED, "num_key_value_heads": 2, "num_hidden_layers": 2, "num_local_experts": 4},
    "mamba2": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "vocab_size": 20,
        "num_heads": 4,
        "head_dim": 8,
        "n_groups": 2,
    },
}
CONFIGS["qwen3_next"] |= {"num_experts": 4, "num_experts_per_tok": 2}
CONFIGS["granitemoehybrid"] |= {"num_local_experts": 4}
CONFIGS["falcon_h1"] |= {"mamba_d_ssm": 32}
REFUSED = {
    "llama": {
        "attention_bias": "yes",
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "yarn"},
        "quantization_config": {"bits": 4},
    },
    "mistral": {"sliding_window": 0, "hidden_act": "gelu", "quantization_config": {"bits": 4}},
    "qwen2": {"layer_types": ["chunked_attention"], "rope_parameters": {"rope_type": "yarn"}},
    "qwen3": {"attention_bias": 1, "layer_types": ["full_attention"] * 2, "head_dim": 0},
    "mamba": {"use_bias": True, "hidden_act": "relu", "intermediate_size": 7},
    "transnormer": {
        "hidden_dim": 32,
        "norm_type": "layernorm",
        "bias": True,
        "linear_act_fun": "relu",
        "linear_use_lrpe_list": [0, 1, 0],
    },
    "hgrn2": {"use_short_conv": True, "elementwise_affine": False, "attn": {"layers": [0]}, "expand_ratio": 5},
    "hgrn": {"use_short_conv": True, "expand_ratio": 2, "attn": {"layers": [0], "num_heads": 2}},
    "lightnet": {"use_short_conv": True, "num_heads": 7, "hidden_act": "powlu"},
    "gla": {"num_kv_heads": 1, "feature_map": "relu", "clamp_min": -1.0, "expand_v": 2, "use_output_gate": False},
    "transformer": {"qkv_bias": True, "qk_norm": True, "attnres_block_size": 2},
    "qwen3_5": {"layer_types": ["sliding_attention"], "hidden_act": "gelu", "linear_key_head_dim": 0},
    "qwen3_next": {"num_experts": -4, "hidden_act": "gelu", "rope_parameters": {"rope_type": "dynamic"}}
    | {"mlp_only_layers": "all", "norm_topk_prob": 1, "quantization_config": {"bits": 4}},
    "olmo_hybrid": {"layer_types": ["conv"], "linear_allow_neg_eigval": 1, "quantization_config": {"bits": 4}},
    "lfm2": {"layer_types": "conv", "conv_bias": 1, "conv_L_cache": 0},
    "granitemoehybrid": {
        "num_local_experts": True,
        "num_experts_per_tok": 0,
        "position_embedding_type": "alibi",
        "time_step_limit": [2, 1],
    },
    "bamba": {"attn_layer_indices": [7], "mamba_n_heads": 3, "time_step_limit": 1, "partial_rotary_factor": 1.0},
    "falcon_h1": {"ssm_multipliers": [1, 2], "mlp_multipliers": [0, 1], "mamba_n_heads": 5, "hidden_act": "gelu"},
    "nemotron_h": {"mlp_hidden_act": "gelu", "sliding_window": 7, "mlp_bias": True}
    | {"n_group": 0, "moe_latent_size": 0},
    "kimi_linear": {"mla_use_nope": False, "num_key_value_heads": 1, "hidden_act": "gelu", "num_shared_experts": 0}
    | {"mlp_layer_types": ["dense"], "linear_attn_config": 3, "q_lora_rank": 0, "quantization_config": {"bits": 4}},
    "bailing_hybrid": {"kda_lower_bound": 1.0, "first_k_dense_replace": -1, "num_key_value_heads": 1}
    | {"rope_parameters": {"rope_type": "dynamic"}, "layer_group_size": 0},
    "jamba": {"attn_layer_offset": 2, "expert_layer_offset": -1, "mamba_proj_bias": True, "hidden_act": "gelu"}
    | {"mamba_dt_rank": 0, "num_experts": "many"},
    "minimax": {"mlp_alpha_factor": 2.0, "linear_attn_beta_factor": 0.5, "layer_types": ["conv"], "hidden_act": "gelu"}
    | {"sliding_window": 0, "num_local_experts": 0},
    "mamba2": {"conv_kernel": 0, "hidden_act": "gelu", "time_step_limit": [0.1]},
}


def hf_llama(path):
    """A checkpoint folder of a tiny Llama, as transformers writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**HEADED, intermediate_size=24)).save_pretrained(path)
    return path


def folder(path, kind, changes, tensors=None):
    return write_folder(path, {"model_type": kind, **CONFIGS[kind], **changes}, tensors or {"x": torch.zeros(1)})


@pytest.mark.parametrize("kind", CONFIGS)
def test_settings_that_layers_cannot_express_are_named_together(kind, tmp_path):
    with pytest.raises(ConfigError) as error:
        hf.convert(folder(tmp_path / "source", kind, REFUSED[kind]), tmp_path / "out")
    named = {problem.partition(":")[0].partition(".")[0] for problem in error.value.problems}
    assert named == {"expand_ratio" if key == "num_heads" else key for key in REFUSED[kind]}
    assert not (tmp_path / "out").exists()


def some(values: list, count: int) -> list[tuple]:
    """(kind, value): every kind, which differ in their keys, and every value, whose readers all kinds share."""
    turns = itertools.cycle(values)
    return [("llama", value) for value in values] + [(kind, next(turns)) for kind in CONFIGS for _ in range(count)]


@pytest.mark.parametrize("kind, value", some(["false", 0, 1, [True]], 1))
def test_whether_embeddings_are_tied_is_true_or_false(kind, value, tmp_path):
    with pytest.raises(ConfigError, match="tie_word_embeddings: must be true or false"):
        hf.convert(folder(tmp_path / "source", kind, {"tie_word_embeddings": value}), tmp_path / "out")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes, key",
    [
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    ],
)
def test_rotations_that_linnet_lacks_are_named(kind, changes, key, tmp_path):
    with pytest.raises(ConfigError, match=f"rope_parameters.{key}: Linnet's RoPE"):
        hf.convert(folder(tmp_path / "source", kind, changes), tmp_path / "out")
    neutral = {"rope_parameters": {"partial_rotary_factor": 1.0, "mrope_section": None}}
    with pytest.raises(ConfigError) as error:  # weights are missing, and nothing else is wrong
        hf.convert(folder(tmp_path / "neutral", kind, neutral), tmp_path / "out")
    assert not any("rope" in problem for problem in error.value.problems)


@pytest.mark.parametrize("kind, value", some([0, -3, 1 << 40, "large", 1.5, True, [1], {}], 3))
def test_wrong_values_are_named(kind, value, tmp_path):
    key = "decoder_embed_dim" if kind == "transnormer" else "hidden_size"
    with pytest.raises(ConfigError, match=key):
        hf.convert(folder(tmp_path / "source", kind, {key: value}), tmp_path / "out")
    if kind == "nemotron_h":  # which has a list of its blocks
        return
    layers = "decoder_layers" if kind == "transnormer" else "num_hidden_layers"
    with pytest.raises(ConfigError, match=layers):
        hf.convert(folder(tmp_path / "source", kind, {layers: value}), tmp_path / "out")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: .*num_active: 5 .*num_experts 4"),
        ({"n_group": 3}, "n_group: .*groups: 3 groups of num_experts 8 are not whole"),
        ({"n_group": 2, "topk_group": 3}, "topk_group: .*3 must be 1 to 2 groups of 4"),
    ],
)
def test_choices_among_experts_that_do_not_fit_are_named_by_their_keys(changes, message, tmp_path):
    kind = "qwen3_next" if "num_experts_per_tok" in changes else "nemotron_h"
    with pytest.raises(ConfigError, match=message):
        hf.convert(folder(tmp_path / "source", kind, changes), tmp_path / "out")


def test_tensors_that_do_not_fit_are_named_together(tmp_path):
    config = {**CONFIGS["transnormer"], "decoder_layers": 1, "decoder_attention_heads": 2, "glu_dim": -1}
    good = {
        "model.embed_tokens.weight": (20, 16),
        "lm_head.weight": (20, 16),
        "model.layers.0.token_mixer.qkvu_proj.weight": (64, 16),
        "model.layers.0.token_mixer.out_proj.weight": (16, 16),
        **{f"model.layers.0.channel_mixer.l{i}.weight": (16, 16) for i in (1, 2, 3)},
    }
    hf.convert(folder(tmp_path / "good", "transnormer", config, random_tensors(good)), tmp_path / "fine")
    bad = dict(good)
    bad["model.layers.0.token_mixer.qkvu_proj.weight"] = (48, 16)
    bad["model.layers.0.token_mixer.qkvu_proj.bias"] = bad.pop("model.layers.0.token_mixer.out_proj.weight")
    tensors = random_tensors(bad)
    tensors["model.layers.0.channel_mixer.l1.weight"] = torch.zeros(16, 16, dtype=torch.int8)
    with pytest.raises(ConfigError) as error:
        hf.convert(folder(tmp_path / "bad", "transnormer", config, tensors), tmp_path / "out")
    text = str(error.value)
    assert len(error.value.problems) == 4 and not (tmp_path / "out").exists()
    assert re.search(r"qkvu_proj\.weight: .*\[48, 16\].*\[64, 16\]", text)
    assert re.search(r"out_proj\.weight: .*\[16, 16\]", text)
    assert "qkvu_proj.bias: " in text
    assert "l1.weight: " in text
    more = tensors | {f"more.{number}": torch.zeros(1) for number in range(1000)}
    with pytest.raises(ConfigError, match="and 904 more problems") as error:
        hf.convert(folder(tmp_path / "many", "transnormer", config, more), tmp_path / "out")
    assert len(error.value.problems) == 101


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="none"):
        hf.convert(tmp_path / "none", tmp_path / "out")
    (tmp_path / "source").mkdir()
    with pytest.raises(ConfigError, match="config.json"):
        hf.convert(tmp_path / "source", tmp_path / "out")
    for text in ("[1]", "{", "\0", ""):
        (tmp_path / "source" / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="config.json"):
            hf.convert(tmp_path / "source", tmp_path / "out")
    (tmp_path / "source" / "config.json").write_text(json.dumps({"model_type": "llamas"}))
    with pytest.raises(ConfigError, match="model.safetensors"):
        hf.convert(tmp_path / "source", tmp_path / "out")
    with pytest.raises(ConfigError, match="'rwkv6' needs a layer .* RWKV-6"):
        hf.convert(write_folder(tmp_path / "two", {"model_type": "rwkv6"}, {"x": torch.zeros(1)}), tmp_path / "out")
    with pytest.raises(ConfigError, match="'llama'"):
        hf.convert(write_folder(tmp_path / "typo", {"model_type": "llamas"}, {"x": torch.zeros(1)}), tmp_path / "out")


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("config.json", b"[" * 100_000, "config.json: is not JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json: is not JSON"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja: cannot be read"),
    ],
)
def test_damaged_files_are_named_and_leave_no_folder(file, content, message, tmp_path):
    path = hf_llama(tmp_path / "source")
    (path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        hf.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_chat_template_of_any_name_is_left_out_by_it(tmp_path):
    path = hf_llama(tmp_path / "source")
    templates = [{"name": ["a"], "template": "x"}, {"name": "default", "template": "y"}, 7]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    found = hf.convert(path, tmp_path / "out")
    assert "['a']" in " ".join(found.notes) and (tmp_path / "out/chat_template.jinja").read_text() == "y"


@pytest.mark.parametrize("pickled", [False, True])
def test_a_tensor_in_two_shards_is_refused(pickled, tmp_path):
    path = hf_llama(tmp_path / "source")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    name, kind = min(tensors), "pytorch_model.bin" if pickled else "model.safetensors"
    for file, own in (("a", {name: tensors[name] + 1}), ("b", tensors)):
        torch.save(own, path / file) if pickled else save_file(own, path / file)
    index = {key: "b" for key in tensors} | {"one more": "a"}
    (path / f"{kind}.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ConfigError, match=f"source/b: holds {name}"):
        hf.convert(path, tmp_path / "out", allow_pickle=pickled)


def test_weights_of_8_bit_floats_load_unless_they_are_not_finite(tmp_path):
    path, damaged = hf_llama(tmp_path / "source"), r"NaN or infinite: backbone\.norm\.weight; use other weights"
    tensors = load_file(path / "model.safetensors")
    for value in (1.0, float("nan")):
        small = torch.full_like(tensors["model.norm.weight"], value).to(torch.float8_e4m3fn)
        save_file(tensors | {"model.norm.weight": small}, path / "model.safetensors")
        if value == 1.0:
            hf.convert(path, tmp_path / "good")
    model, _ = load_model(tmp_path / "good")
    assert model.backbone.norm.weight.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=f"(?s)source.*{damaged}"):
        hf.convert(path, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    weights = load_file(tmp_path / "good/model.safetensors")
    weights["backbone.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "good/model.safetensors")
    (tmp_path / "good/SHA256SUMS").unlink()
    with pytest.raises(ConfigError, match=damaged):
        load_model(tmp_path / "good")


def pointer(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


def cut(path):
    path.write_bytes(path.read_bytes()[:3000])


def link(path):
    path.unlink()
    path.symlink_to(path.parent / "blob")


def rename(path):
    path.rename(path.with_name("llama.safetensors"))


@pytest.mark.parametrize(
    "damage, fix",
    [
        (pointer, "model.safetensors: .*git lfs pull"),
        (cut, "model.safetensors: .*damaged.* again"),
        (link, "link to '.*blob'"),
        (rename, "rename llama.safetensors to model.safetensors"),
    ],
)
def test_weights_that_are_not_there_are_named_with_a_remedy(damage, fix, tmp_path):
    path = hf_llama(tmp_path / "source")
    damage(path / "model.safetensors")
    with pytest.raises(ConfigError, match=fix):
        hf.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "where",
    ["../source/model.safetensors", "/model.safetensors", "..", "", "a\0b", "\ud800", "w" * 300, "missing", None],
    ids=repr,
)
def test_an_index_names_files_of_its_folder(where, tmp_path):
    path = hf_llama(tmp_path / "source")
    names = sorted(load_file(path / "model.safetensors"))
    (path / "model.safetensors").rename(path / "all")
    index = {"weight_map": {} if where is None else dict.fromkeys(names, "all") | {names[0]: where}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError) as error:
        hf.convert(path, tmp_path / "out")
    [problem] = error.value.problems
    assert "model.safetensors.index.json" in problem and ";" in problem
    assert {None: "weight_map", "missing": "is missing"}.get(where, f"names {shown(where)}") in problem
    problem.encode()  # can be printed


def test_settings_of_quantised_weights_are_named_shortly(tmp_path):
    values = {"quant_method": "fp8", "modules_to_not_convert": [f"model.layers.{number}" for number in range(500)]}
    with pytest.raises(ConfigError, match="quantization_config: .*'fp8'.*bfloat16") as error:
        hf.convert(folder(tmp_path / "source", "llama", {"quantization_config": values}), tmp_path / "out")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "key, value",
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.5), ("top_k", 50.5), ("top_k", -1)]
    + [("min_p", 1), ("repetition_penalty", 0), ("temperature", True), ("temperature", float("nan"))],
)
def test_defaults_of_drawing_that_cannot_be_are_left_out_with_a_note(key, value, tmp_path):
    from linnet.inference import Engine

    path = hf_llama(tmp_path / "source")
    (path / "generation_config.json").write_text(json.dumps({"min_p": 0.1, "top_p": None, key: value}))
    found = hf.convert(path, tmp_path / "out")
    assert [note for note in found.notes if f"generation_config.json: {key}: {value!r}" in note]
    assert Engine.of_run(found.path, device="cpu").generation.sampling == ({} if key == "min_p" else {"min_p": 0.1})


def test_ends_that_are_no_tokens_of_the_model_are_left_out_with_a_note(tmp_path):
    path = hf_llama(tmp_path / "source")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, config["vocab_size"]]}))
    found = hf.convert(path, tmp_path / "out")
    assert [note for note in found.notes if f"eos_token_id: {config['vocab_size']} was left out" in note]
    assert "generation_ends:\n- 1\n" in (found.path / "config.yaml").read_text()


class Watched(dict):
    """A config.json that notes which keys are asked for."""

    def __init__(self, values):
        super().__init__(values)
        self.asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def test_keys_that_only_other_code_reads_are_named_in_a_note(tmp_path):
    file = hf_llama(tmp_path / "plain") / "config.json"
    assert not hf.convert(file.parent, tmp_path / "none").notes[1:]  # but for the tokenizer that it lacks
    values = {"final_logit_softcapping": 30.0, "use_sinks": False, "torch_dtype": "float32", "_commit": "abc"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **values, "auto_map": {"AutoModel": "m.Model"}}))
    notes = hf.convert(file.parent, tmp_path / "noted").notes
    assert [note for note in notes if "softcapping" in note] and not any("use_sinks" in note for note in notes)
    assert not any(key in note for note in notes for key in ("torch_dtype", "auto_map", "_commit", "hidden_size"))


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_value_of_any_key_is_a_crash(kind):
    """Every key that a reader asks for, with values of every type: a plan that fits itself, or ConfigError."""
    from linnet.hf.layouts import LAYOUTS, Settings
    from linnet.models import CausalLM

    read = LAYOUTS[kind][1]
    watched = Watched(CONFIGS[kind])
    read(Settings(watched))
    values = [0, 1, -1, 3, 1 << 70, 0.5, float("nan"), float("inf"), "", "x", True, False, [], [1], [[]], {}, {"a": 1}]
    keys, plans = {}, 0  # of the state dict of each model: most settings give the same one
    for key in sorted(watched.asked):
        for value in values:
            try:
                plan = read(Settings({**CONFIGS[kind], key: value}))
            except ConfigError:
                continue
            plans += 1
            model = plan.model.model_dump_json()
            if model not in keys:
                with torch.device("meta"):
                    keys[model] = CausalLM(plan.model).state_dict().keys()
            assert keys[model] == plan.parts.keys(), (key, value)
    assert plans > 10


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 1 << 70},
        {"d_model": 1 << 40},
        {"vocab_size": 1 << 62},
        {"layout": "tnl+sglu x1000000000000"},
        {"layout": "(" * 5000},
        {"layout": 3},
        {"options": []},
    ],
)
def test_an_export_that_was_tampered_with(change, tmp_path):
    model = {"d_model": 32, "layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 2}}, **change}
    folder = write_folder(tmp_path / "source", {"model_type": "linnet", "model": model}, {"x": torch.zeros(1)})
    with pytest.raises(ConfigError):
        hf.convert(folder, tmp_path / "out")
