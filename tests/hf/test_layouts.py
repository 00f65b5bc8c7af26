"""Llama, its relatives and Mamba of transformers, against transformers' own models; files in all their forms."""

import json
import os
import pickle

import pytest
import tokenizers
import torch
from hf_folders import relative, write_folder

from linnet.config import ConfigError, parse
from linnet.data.chat.template import load_chat_template
from linnet.runs import load_model
from linnet.train import TrainConfig, train
from linnet.train.objectives.chat import ChatTraining

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}
LLAMA = {**SMALL, "num_attention_heads": 4, "intermediate_size": 48, "initializer_range": 0.2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-grouped-tied": lambda: transformers.LlamaConfig(
        **LLAMA, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-2
    ),
    "llama-3.1": lambda: transformers.LlamaConfig(**LLAMA, num_key_value_heads=1, rope_parameters=LLAMA3),
    "llama-linear": lambda: transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "llama-yarn": lambda: transformers.LlamaConfig(
        **LLAMA, head_dim=16, rope_parameters=YARN | {"mscale": 1.4, "mscale_all_dim": 0.6, "truncate": False}
    ),
    "llama-biases": lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "llama-wide-heads": lambda: transformers.LlamaConfig(**LLAMA, head_dim=12),
    "mistral": lambda: transformers.MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=7),
    "mistral-full": lambda: transformers.MistralConfig(
        **LLAMA, num_key_value_heads=4, sliding_window=None, head_dim=12
    ),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **LLAMA, num_key_value_heads=4, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=12, rms_norm_eps=1e-3),
    "qwen3-yarn": lambda: transformers.Qwen3Config(
        **LLAMA, num_key_value_heads=2, head_dim=16, rope_parameters=YARN | {"beta_fast": 4, "beta_slow": 0.5}
    ),
    "qwen3-windows": lambda: transformers.Qwen3Config(
        **LLAMA,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mamba": lambda: transformers.MambaConfig(**SMALL, state_size=8, initializer_range=0.2, layer_norm_epsilon=1e-3),
    "mamba-plain": lambda: transformers.MambaConfig(
        **SMALL, use_conv_bias=False, time_step_rank=5, expand=3, conv_kernel=3, tie_word_embeddings=False
    ),
}


@pytest.fixture
def tokens():
    return torch.randint(0, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def build(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CASES[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that gains and biases show
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens)[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, tokens, tmp_path):
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "source")
    found = hf.convert(tmp_path / "source", tmp_path / "out")
    model, tokenizer = load_model(found.path)
    assert tokenizer is None and "no tokenizer.json" in found.notes[0]
    assert model.config.tie_embeddings == theirs.config.tie_word_embeddings
    assert relative(logits(model, tokens), theirs(tokens).logits) < 2e-5
    states = model.init_state(2, 40)
    with torch.no_grad():
        for place in range(40):
            last, states = model.step(tokens[:, place], states)
    assert relative(last, theirs(tokens).logits[:, -1]) < 2e-5


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llama-3.1", {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}, "rope_scaling": LLAMA3}),
        ("llama-3.1", {"original_max_position_embeddings": 8}),
        ("llama-3.1", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": None}}),
        ("llama-3.1", {"rope_parameters": {**LLAMA3, "type": "linear"}}),
        ("qwen2-windows", {"max_window_layers": 2, "layer_types": None}),
        ("qwen3-windows", {"layer_types": ["full_attention"] * 2, "use_sliding_window": True}),
    ],
)
def test_keys_that_disagree_mean_what_they_mean_to_transformers(name, changes, tokens, tmp_path):
    build(name).save_pretrained(tmp_path / "source")
    file = tmp_path / "source/config.json"
    values = json.loads(file.read_text()) | {"max_position_embeddings": 24} | changes
    values["rope_parameters"] = {key: own for key, own in values["rope_parameters"].items() if own is not None}
    file.write_text(json.dumps({key: own for key, own in values.items() if own is not None}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
    model, _ = load_model(hf.convert(tmp_path / "source", tmp_path / "out").path)
    assert relative(logits(model, tokens), logits(theirs, tokens)) < 2e-5


def test_mamba_of_flash_linear_attention_has_the_same_tensors(tokens, tmp_path):
    theirs = build("mamba-plain")
    config = {**SMALL, "model_type": "mamba", "use_conv_bias": False, "dt_rank": 5, "expand": 3, "conv_kernel": 3}
    write_folder(tmp_path / "source", {**config, "norm_eps": 1e-5}, theirs.state_dict())
    model, _ = load_model(hf.convert(tmp_path / "source", tmp_path / "out").path)
    assert relative(logits(model, tokens), theirs(tokens).logits) < 2e-5


def test_shards_and_half_precision(tokens, tmp_path):
    theirs = build("llama").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "source", max_shard_size="8KB")
    shards = sorted((tmp_path / "source").glob("model-*.safetensors"))
    assert len(shards) > 3
    model, _ = load_model(hf.convert(tmp_path / "source", tmp_path / "out").path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    expected = again(tokens).logits
    assert relative(logits(load_model(tmp_path / "out", dtype=torch.float32)[0], tokens), expected) < 2e-5

    shards[0].unlink()
    shards[1].write_bytes(b"broken")
    index = tmp_path / "source" / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["extra"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        hf.convert(tmp_path / "source", tmp_path / "again")
    assert len(error.value.problems) == 3
    assert all(name in str(error.value) for name in (shards[0].name, shards[1].name, "../elsewhere.safetensors"))


def test_pickles_only_when_asked_for(tokens, tmp_path):
    theirs = build("llama-grouped-tied")
    source = tmp_path / "source"
    theirs.save_pretrained(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="model.safetensors"):
        hf.convert(source, tmp_path / "out")
    torch.save(theirs.state_dict(), source / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="--allow-pickle"):
        hf.convert(source, tmp_path / "out")
    model, _ = load_model(hf.convert(source, tmp_path / "out", allow_pickle=True).path)
    assert relative(logits(model, tokens), theirs(tokens).logits) < 2e-5
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model, _ = load_model(hf.convert(source, tmp_path / "shared", allow_pickle=True).path)
    assert not model.config.tie_embeddings and torch.equal(model.head.weight, model.embedding.weight)


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_never_runs_code(tmp_path):
    source = tmp_path / "source"
    build("llama").save_pretrained(source)
    (source / "model.safetensors").unlink()
    for content in (pickle.dumps({"norm": Harm(tmp_path / "harmed")}, 2), pickle.dumps([1], 2), b"", b"\x80"):
        (source / "pytorch_model.bin").write_bytes(content)
        with pytest.raises(ConfigError, match="pytorch_model.bin"):
            hf.convert(source, tmp_path / "out", allow_pickle=True)
    assert not (tmp_path / "harmed").exists() and not (tmp_path / "out").exists()


def test_an_untied_head_that_is_the_embedding_and_a_stale_one(tokens, tmp_path):
    theirs = build("llama-grouped-tied")
    config = {k: v for k, v in theirs.config.to_dict().items() if k != "tie_word_embeddings"}
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    write_folder(tmp_path / "source", config, tensors)
    model, _ = load_model(hf.convert(tmp_path / "source", tmp_path / "silent").path)
    assert model.config.tie_embeddings
    tensors["lm_head.weight"] += 1.0
    write_folder(tmp_path / "source", {**config, "tie_word_embeddings": True}, tensors)
    found = hf.convert(tmp_path / "source", tmp_path / "stale")
    assert "lm_head.weight" in found.notes[0]
    model, _ = load_model(found.path)
    assert torch.equal(model.head.weight, tensors["lm_head.weight"])  # the stored head, as transformers 5 takes it
    untied = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "source", tie_word_embeddings=False)
    assert relative(logits(model, tokens), untied(tokens).logits) < 2e-5
    write_folder(tmp_path / "source", config, tensors)
    assert not load_model(hf.convert(tmp_path / "source", tmp_path / "other").path)[0].config.tie_embeddings


def test_tokenizer_and_chat_template_come_along(tmp_path):
    from linnet.data import train_bpe

    tokenizer = train_bpe(["the cat sat on the mat; the dog sat on the log. " * 20], 260)
    source = tmp_path / "source"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "vocab_size": 300})).save_pretrained(source)
    wrapped = hf.to_transformers(tokenizer)
    wrapped.chat_template = "{{ messages[0]['content'] }}"
    wrapped.save_pretrained(source)
    found = hf.convert(source, tmp_path / "out")
    _, its = load_model(found.path)
    assert not found.notes and its.encode("the cat").tolist() == tokenizer.encode("the cat").tolist()
    assert its.end_of_document == tokenizer.end_of_document
    assert (found.path / "chat_template.jinja").read_text() == wrapped.chat_template
    again = transformers.AutoTokenizer.from_pretrained(hf.export(found.path, tmp_path / "hf"))
    message = [{"role": "user", "content": f"the cat {again.eos_token}"}]
    assert again.apply_chat_template(message, return_dict=False)[-1] == tokenizer.end_of_document
    (source / "tokenizer.json").write_text("{}")
    assert "tokenizer" in hf.convert(source, tmp_path / "without").notes[0]


def word_llama(source, **files):
    """Writes a Llama with a tokenizer of words whose end is 0, and keys of its JSON files."""
    vocab = {"<unk>": 1, "</s>": 0, **{f"w{i}": i for i in range(2, LLAMA["vocab_size"])}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    inner.add_special_tokens(["</s>"])
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(source)
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(source)
    for name, values in files.items():
        file = source / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return source


def test_a_generation_ends_at_every_token_that_the_checkpoint_names(tmp_path):
    from linnet.inference import Engine, Sampling

    ends = {"config": {"eos_token_id": [0, 3]}, "generation_config": {"eos_token_id": [5]}}
    found = hf.convert(word_llama(tmp_path / "source", **ends), tmp_path / "out")
    assert any("[0, 3] of config.json" in note and "[5] of generation_config.json" in note for note in found.notes)
    model, tokenizer = load_model(found.path)
    assert tokenizer.generation_ends == (3, 5)
    engine = Engine(model, tokenizer, device="cpu")
    settings = [Sampling(max_tokens=60, temperature=1.0, seed=seed) for seed in range(20)]
    sampled = engine.generate([[2, 4]] * 20, settings)
    samples = [completion.tokens for completion in sampled]
    assert all(not {0, 3, 5} & set(tokens[:-1]) for tokens in samples)
    assert any(tokens and len(tokens) < 60 for tokens in samples)
    exported = hf.export(found.path, tmp_path / "hf")
    assert sorted(transformers.GenerationConfig.from_pretrained(exported).eos_token_id) == [0, 3, 5]


@pytest.mark.parametrize("end", ["</s>", -1, True, [0, None]])
def test_an_end_that_is_no_token_is_refused(tmp_path, end):
    source = word_llama(tmp_path / "source", **dict.fromkeys(("config", "generation_config"), {"eos_token_id": end}))
    with pytest.raises(ConfigError, match="config.json: eos_token_id: .*not a token"):
        hf.convert(source, tmp_path / "out")


MARKERS = {str(id): {"content": f"<{id}>", "special": True} for id in (5, 6)}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": MARKERS}},
        {"tokenizer_config": {"eos_token": "<6>", "added_tokens_decoder": MARKERS, "pad_token": "<pad>"}},
        {"tokenizer_config": {"eos_token": "</s>", "additional_special_tokens": ["<5>", "<6>"]}},
        {"tokenizer_config": {"eos_token": "</s>", "extra_special_tokens": ["<5>", "<6>"]}},
        {"tokenizer_config": {"eos_token": "</s>"}, "added_tokens": {"<6>": 6, "<5>": 5}},
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": "<5>", "additional_special_tokens": ["<6>"]}},
        {"tokenizer_config": {"eos_token": "</s>", "additional_special_tokens": [f"<{id}>" for id in range(5, 300)]}},
    ],
)
def test_tokens_that_files_beside_the_tokenizer_name_are_tokens(files, tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: id for id, letter in enumerate("<>56")}, []))
    inner.add_special_tokens(["</s>"])
    source = word_llama(tmp_path / "source", config={"eos_token_id": 4})
    inner.save(str(source / "tokenizer.json"))
    for name, values in files.items():
        (source / f"{name}.json").write_text(json.dumps(values))
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    found = hf.convert(source, tmp_path / "out")
    _, tokenizer = load_model(found.path)
    assert tokenizer is not None, found.notes
    assert tokenizer.end_of_document == theirs.eos_token_id and tokenizer.vocab_size <= LLAMA["vocab_size"]
    special = {token["content"]: token["id"] for token in json.loads(tokenizer.to_json())["added_tokens"]}
    assert all(special[f"<{id}>"] == theirs.convert_tokens_to_ids(f"<{id}>") for id in (5, 6))


@pytest.mark.parametrize("end, ids", [(4, [4]), ([5, 4], [4, 5])])
def test_without_a_name_the_end_of_a_document_is_the_end_in_config_json(end, ids, tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: id for id, letter in enumerate("abcd")}, []))
    inner.add_special_tokens(["<done>", "<|im_end|>"])
    source = word_llama(tmp_path / "source", **dict.fromkeys(("config", "generation_config"), {"eos_token_id": end}))
    inner.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text("{}")
    _, tokenizer = load_model(hf.convert(source, tmp_path / "out").path)
    assert tokenizer.end_of_document == (end if end == 4 else 5)
    assert sorted({tokenizer.end_of_document, *tokenizer.generation_ends}) == ids


def test_of_several_chat_templates_the_default_one_comes_along(tmp_path):
    source = word_llama(tmp_path / "source")
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": templates}))
    found = hf.convert(source, tmp_path / "out")
    assert (found.path / "chat_template.jinja").read_text() == "D" and any("tool_use" in note for note in found.notes)


def test_a_run_that_continues_a_model_keeps_its_ends_its_start_and_its_template(tmp_path):
    template = "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }} {{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %} assistant{% endif %}"
    words = {word: id for id, word in enumerate(["<unk>", "</s>", "<s>", "<go>", "user", "assistant", "a", "b"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.add_special_tokens(["</s>", "<s>", "<go>"])
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<go> $A", special_tokens=[("<go>", 3)])
    ends = {"eos_token_id": [1, 5, 7]}
    source = word_llama(tmp_path / "source", config=ends, generation_config=ends | {"temperature": 0.5})
    names = {"bos_token": "<go>", "eos_token": "</s>", "chat_template": template}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    theirs.save_pretrained(source)
    model = hf.convert(source, tmp_path / "model").path
    (tmp_path / "text.txt").write_text("a b " * 400)
    (tmp_path / "chats.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n' * 4 + '{"prompt": "b", "completion": "a"}\n'
    )
    plan = {"init_from": str(model), "steps": 1, "batch_size": 2, "seq_len": 16, "run": {"device": "cpu"}}
    chat = parse(ChatTraining, plan | {"objective": "chat", "data": {"source": str(tmp_path / "chats.jsonl")}})
    one = train(chat, root=tmp_path / "runs", cache=tmp_path / "cache").path
    text = parse(TrainConfig, plan | {"init_from": str(one), "data": {"source": str(tmp_path / "text.txt")}})
    two = train(text, root=tmp_path / "runs", cache=tmp_path / "cache").path
    talk = [{"role": "user", "content": "a b"}]
    expected = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert expected[0] == 3
    for folder in (model, one, two):
        _, tokenizer = load_model(folder)
        assert (tokenizer.prompt_start, tokenizer.generation_ends) == ((3,), (5, 7))
        assert tokenizer.sampling == {"temperature": 0.5}
        assert load_chat_template(folder, tokenizer).encode(talk) == expected
    for out in (hf.export_as("llama", two, tmp_path / "llama"), hf.export(two, tmp_path / "hf")):
        assert sorted(transformers.GenerationConfig.from_pretrained(out).eos_token_id) == [1, 5, 7]
        again = transformers.AutoTokenizer.from_pretrained(out)
        assert again.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) == expected
        assert again("a b").input_ids == theirs("a b").input_ids
    (two / "prompts.json").write_text('{"generation_ends": [500]}')
    with pytest.raises(ConfigError, match=r"generation_ends: \[500\]"):
        load_model(two)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ['{"eos_token_id": [0, 3', "[]"])
def test_a_damaged_file_beside_the_tokenizer_is_named(name, content, tmp_path):
    source = word_llama(tmp_path / "source")
    (source / name).write_text(content)
    with pytest.raises(ConfigError, match=f"{name}: .*JSON"):
        hf.convert(source, tmp_path / "out")


def test_a_model_without_a_tokenizer_is_continued_when_it_gets_one(tmp_path):
    source = word_llama(tmp_path / "source", config={"eos_token_id": [0, 3]})
    inner = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "words.json"))
    (source / "tokenizer.json").unlink()
    model = hf.convert(source, tmp_path / "model").path
    (tmp_path / "text.txt").write_text("w5 w6 " * 400)
    plan = {"init_from": str(model), "steps": 1, "batch_size": 2, "seq_len": 16, "run": {"device": "cpu"}}
    data = {"source": str(tmp_path / "text.txt"), "tokenizer": {"kind": "file", "path": str(tmp_path / "words.json")}}
    with pytest.raises(ConfigError, match="model: has no tokenizer.json"):
        train(parse(TrainConfig, plan | {"data": data}), root=tmp_path / "runs", cache=tmp_path / "cache")
    (model / "tokenizer.json").write_bytes((tmp_path / "words.json").read_bytes())
    run = train(parse(TrainConfig, plan | {"data": data}), root=tmp_path / "runs", cache=tmp_path / "cache").path
    _, tokenizer = load_model(run)
    assert {tokenizer.end_of_document, *tokenizer.generation_ends} >= {0, 3}


@pytest.mark.parametrize("tokenizer", [None, "{}"])
def test_without_a_tokenizer_a_generation_ends_and_draws_as_the_checkpoint_says(tokenizer, tmp_path):
    from linnet.inference import Engine, Sampling

    drawing = {"eos_token_id": 5, "temperature": 0.7, "top_k": 9, "do_sample": True}
    source = word_llama(tmp_path / "source", config={"eos_token_id": [0, 3, 500]}, generation_config=drawing)
    (source / "tokenizer.json").unlink() if tokenizer is None else (source / "tokenizer.json").write_text(tokenizer)
    found = hf.convert(source, tmp_path / "out")
    engine = Engine.of_run(found.path, device="cpu")
    assert engine.tokenizer is None and engine.generation.sampling == {"temperature": 0.7, "top_k": 9}
    settings = [Sampling(max_tokens=60, temperature=1.0, seed=seed) for seed in range(20)]
    completions = engine.generate([[2, 4]] * 20, settings)
    assert any(completion.finish == "stop" for completion in completions)
    for completion in completions:
        assert not {0, 3, 5} & set(completion.tokens[:-1])
        assert (completion.tokens[-1] in (0, 3, 5)) == (completion.finish == "stop")
    [unending] = engine.generate([[2, 4]], Sampling(max_tokens=400, temperature=1.0, seed=0, ignore_end=True))
    assert unending.finish == "length" and {0, 3, 5} & set(unending.tokens)
    for exported in (hf.export(found.path, tmp_path / "hf"), hf.export_as("llama", found.path, tmp_path / "llama")):
        theirs = transformers.GenerationConfig.from_pretrained(exported)
        assert (theirs.eos_token_id, theirs.temperature, theirs.top_k) == ([0, 3, 5], 0.7, 9)
        again = hf.convert(exported, tmp_path / f"{exported.name}-back").path
        assert Engine.of_run(again, device="cpu").generation == engine.generation


def test_what_a_tokenizer_puts_in_front_of_a_text_comes_along(tmp_path):
    from linnet.inference import Engine, Sampling

    words = ["<unk>", "<s>", "</s>", "plain", "words", *(f"w{i}" for i in range(5, LLAMA["vocab_size"]))]
    vocab = {word: i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    source = tmp_path / "source"
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    llama.save_pretrained(source)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    theirs.save_pretrained(source)
    found = hf.convert(source, tmp_path / "out")
    model, tokenizer = load_model(found.path)
    assert not found.notes and tokenizer.prompt_start == (1,) and tokenizer.encode("plain words").tolist() == [3, 4]
    [completion] = Engine(model, tokenizer, device="cpu").generate(["plain words"], Sampling(max_tokens=5))
    ids = theirs("plain words", return_tensors="pt").input_ids
    expected = llama.generate(ids, max_new_tokens=5, do_sample=False)[0, 3:].tolist()
    assert completion.request.prompt_tokens == ids.shape[1] == 3
    assert completion.tokens == expected[: len(completion.tokens)]
    again = transformers.AutoTokenizer.from_pretrained(hf.export(found.path, tmp_path / "hf"))
    assert again("plain words").input_ids == ids[0].tolist()
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": False}))
    bare = hf.convert(source, tmp_path / "bare")  # transformers 5 follows tokenizer.json
    assert transformers.AutoTokenizer.from_pretrained(source)("plain words").input_ids == [1, 3, 4]
    assert load_model(bare.path)[1].prompt_start == (1,) and any("add_bos_token" in note for note in bare.notes)
    (found.path / "config.yaml").write_text((found.path / "config.yaml").read_text().replace("- 1", "- 500"))
    (found.path / "SHA256SUMS").unlink()  # as in a folder of an earlier release
    with pytest.raises(ConfigError, match=r"prompt_start: \[500\]"):
        load_model(found.path)
    (source / "tokenizer.json").rename(source / "tokenizer.model")
    [note] = hf.convert(source, tmp_path / "without").notes
    assert "tokenizer.model" in note and "save_pretrained" in note


LLAMAS = {
    "plain": {},
    "grouped-tied": {"options": {"attention": {"num_heads": 4, "num_kv_heads": 2}}, "tie_embeddings": True},
    "biases": {"bias": "all", "norm_eps": 1e-3, "options": {"attention": {"num_heads": 4, "head_dim": 12}}},
    "llama3": {
        "options": {
            "attention": {
                "num_heads": 4,
                "rope_base": 500.0,
                "rope_scaling": {"kind": "llama3", "factor": 8.0, "low": 1.0, "high": 4.0, "length": 16},
            },
            "swiglu": {"inner": 56},
        }
    },
    "yarn": {
        "options": {
            "attention": {
                "num_heads": 4,
                "rope_scaling": {"kind": "yarn", "factor": 8.0, "low": 2.0, "length": 16, "truncate": False},
            },
        }
    },
}


@pytest.mark.parametrize("name", LLAMAS)
def test_a_model_of_attention_and_swiglu_becomes_a_plain_llama(name, tokens, tmp_path):
    from linnet.config import parse
    from linnet.data import train_bpe
    from linnet.models import ModelConfig, build_model
    from linnet.runs import save_model

    values = {"d_model": 32, "layout": "attention+swiglu x2", "vocab_size": 300, "tie_embeddings": False}
    values |= {"init_std": 0.2, "options": {"attention": {"num_heads": 4}}, **LLAMAS[name]}
    model = build_model(parse(ModelConfig, values), seed=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # so that gains and biases show
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    words = train_bpe(["the cat sat on the mat; the dog sat on the log. " * 20], 260)
    save_model(tmp_path / "model", model.config, model.state_dict(), words)
    folder = hf.export_llama(tmp_path / "model", tmp_path / "llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs) is transformers.LlamaForCausalLM and not list(folder.glob("*.py"))
    assert theirs.config.eos_token_id == words.end_of_document
    assert relative(theirs(tokens).logits, logits(model, tokens)) < 1e-5
    assert "trust_remote_code" not in (folder / "README.md").read_text()
    assert transformers.AutoTokenizer.from_pretrained(folder)("the cat").input_ids == words.encode("the cat").tolist()
    again, _ = load_model(hf.convert(folder, tmp_path / "back").path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_what_no_llama_has_is_refused_by_key(tmp_path):
    from linnet.models import ModelConfig, build_model
    from linnet.runs import save_model

    odd = {
        "d_model": 32,
        "layout": "attention+swiglu near",
        "aliases": {"near": {"layer": "attention+swiglu", "options": {"attention": {"window": 8}}}},
        "options": {"attention": {"num_heads": 4, "qk_norm": True, "rope": False, "gate": "channel"}},
        "norm": "srmsnorm",
        "norm_after": ["attention"],
        "residual_scale": 0.5,
        "logit_scale": 0.5,
        "bias": "qkv",
        "embedding_scale": 2.0,
        "parametrisation": "mup",
    }
    for number, config in enumerate((ModelConfig(**odd), ModelConfig(d_model=32, layout="tnl+sglu attention+swiglu"))):
        save_model(tmp_path / f"{number}", config, build_model(config).state_dict())
        with pytest.raises(ConfigError) as error:
            hf.export_llama(tmp_path / f"{number}", tmp_path / "out")
        named = {problem.partition(":")[0] for problem in error.value.problems}
        expected = {f"options.attention.{key}" for key in ("window", "qk_norm", "rope", "gate")}
        expected |= {"norm", "norm_after", "residual_scale", "bias", "embedding_scale", "logit_scale"}
        assert named == ({"layout"} if number else expected | {"parametrisation"})
        assert not (tmp_path / "out").exists()


def test_an_export_comes_back(tmp_path):
    from hf_models import small

    from linnet.data import ByteTokenizer
    from linnet.models import build_model
    from linnet.runs import save_model

    for name in ("hgrn2", "hyenas"):
        config = small(name)
        model = build_model(config).eval()
        save_model(tmp_path / name, config, model.state_dict(), ByteTokenizer())
        hf.export(tmp_path / name, tmp_path / f"{name}-hf")
        again, _ = load_model(hf.convert(tmp_path / f"{name}-hf", tmp_path / f"{name}-back").path)
        assert again.config == config
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
