"""An exported folder: it loads with `trust_remote_code` alone, has a model card, and does what Trainers expect."""

import json
import sys

import pytest
import torch
import yaml
from hf_models import small

from linnet.data import ByteTokenizer
from linnet.models import build_model
from linnet.runs import save_model

transformers = pytest.importorskip("transformers", reason="needs the extra hf")
hf = pytest.importorskip("linnet.hf")


def exported(folder, name):
    config = small(name)
    model = build_model(config, seed=2).eval()
    save_model(folder / "model", config, model.state_dict(), ByteTokenizer())
    return model, hf.export(folder / "model", folder / "exported")


@pytest.fixture
def strange(monkeypatch, tmp_path):
    """transformers as in a process that never imported linnet.hf; the ops stay, torch registers them only once."""
    from transformers import dynamic_module_utils
    from transformers.models.auto import configuration_auto, modeling_auto

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.split(".")[:2] == ["linnet", "hf"]]:
        monkeypatch.delitem(sys.modules, name)
    for mapping in (configuration_auto.CONFIG_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    yield transformers
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_it_loads_with_trust_remote_code_alone(strange, tmp_path):
    model, folder = exported(tmp_path, "tnl-attention")
    tokens = torch.arange(1, 20)[None]
    with pytest.raises(ValueError, match="trust_remote_code"):
        strange.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    assert "linnet.hf" not in sys.modules
    again = strange.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, attn_implementation="sdpa")
    assert type(again).__module__ == "linnet.hf.model" and type(again) is not hf.LinnetForCausalLM
    with torch.no_grad():
        assert (again(tokens).logits - model(tokens)[0]).abs().max() <= 3e-6  # sums in another order on some CPUs
    words = strange.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    write = strange.pipeline("text-generation", model=again, tokenizer=words)
    assert write("abc", max_new_tokens=3, do_sample=False)[0]["generated_text"].startswith("abc")
    again.save_pretrained(tmp_path / "saved")  # what a Trainer saves loads alike, and holds no copy of Linnet's code
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == {"modeling_linnet.py"}
    assert (tmp_path / "saved" / "modeling_linnet.py").read_text() == (folder / "modeling_linnet.py").read_text()
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "modeling_linnet.LinnetConfig",
        "AutoModelForCausalLM": "modeling_linnet.LinnetForCausalLM",
    }


def test_without_linnet_the_message_names_the_distribution(tmp_path, monkeypatch):
    """transformers would say `pip install linnet`, which is another project."""
    _, folder = exported(tmp_path, "tnl")
    code = (folder / "modeling_linnet.py").read_text()
    monkeypatch.setitem(sys.modules, "linnet.hf", None)
    with pytest.raises(ImportError, match="linnet-lm"):
        exec(compile(code, "modeling_linnet.py", "exec"), {})
    from transformers.dynamic_module_utils import get_imports

    assert "linnet" not in get_imports(folder / "modeling_linnet.py")


def test_attn_implementation(tmp_path):
    model, folder = exported(tmp_path, "tnl-attention")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.arange(1, 9)[None]
    assert (again(tokens).logits - model(tokens)[0]).abs().max() <= 3e-6  # sums in another order on some CPUs
    with pytest.raises((ImportError, ValueError)):
        transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_attention_2")


@pytest.mark.parametrize("name", ["tnl-attention", "cosformer2"])
def test_hidden_states_are_the_inputs_of_the_blocks(name, tmp_path):
    model, folder = exported(tmp_path, name)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.randint(1, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = again(tokens, output_hidden_states=True, use_cache=False)
        expected, x = [], model.embed(tokens)
        for _, mixer in model.backbone.mixers_before():
            x, _ = mixer(x)
        for block in model.backbone.blocks:
            expected.append(x)
            x, _ = block(x)
        expected.append(model.backbone.norm(x))
        assert len(plain.hidden_states) == again.config.num_hidden_layers + 1
        for mine, its in zip(plain.hidden_states, expected, strict=True):
            torch.testing.assert_close(mine, its)
        torch.testing.assert_close(model.logits(plain.hidden_states[-1]), plain.logits)
        mask = torch.ones_like(tokens)
        mask[1, :4] = 0
        padded = again(tokens, attention_mask=mask, output_hidden_states=True)
        alone = again(tokens[1:, 4:], output_hidden_states=True)
        for mine, its in zip(padded.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(mine[1, 4:], its[0], rtol=1e-4, atol=1e-4)
            assert not mine[1, :4].any()
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        written = again.generate(
            tokens, attention_mask=mask, output_hidden_states=True, return_dict_in_generate=True, **options
        )
        assert torch.equal(written.sequences, again.generate(tokens, attention_mask=mask, **options))
        assert [step[0].shape[1] for step in written.hidden_states] == [9, 1, 1, 1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["tnl-attention", "rwkv7"])
def test_gradient_checkpointing_gives_the_same_gradients(name, reentrant, tmp_path):
    _, folder = exported(tmp_path, name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    for module in model.modules():
        if getattr(module, "starts_zero", False):  # nothing before it would have a gradient
            torch.nn.init.normal_(module.weight, 0.0, 0.1)
    tokens = torch.arange(1, 33)[None]
    calls = []
    block = model.model.backbone.blocks[1]
    block.channel.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients():
        calls.clear()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [p.grad.clone() for p in model.parameters()], len(calls)

    expected, once = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    found, twice = gradients()
    assert (once, twice) == (1, 2)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its)
    written = model.eval().generate(tokens, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert written.shape == (1, 34)  # with a cache, and nothing computed again
    model.train().gradient_checkpointing_disable()
    assert gradients()[1] == 1 and not model.is_gradient_checkpointing


def front_matter(text):
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_the_run_recorded(tmp_path):
    from linnet.config import parse
    from linnet.train import TrainConfig, train

    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    values = {"model": {"recipe": "tnl-10m", "d_model": 32, "num_layers": 1}, "steps": 2, "batch_size": 2}
    values |= {"seq_len": 32, "data": {"source": [str(tmp_path / "text.txt")]}, "run": {"device": "cpu"}}
    run = train(parse(TrainConfig, values), tmp_path / "runs", tmp_path / "cache").path
    found, body = front_matter((hf.export(run, tmp_path / "hf") / "README.md").read_text())
    assert found == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["linnet", "tnl"]}
    numbers = json.loads((run / "result.json").read_text())
    sizes = f"{numbers['params_total']:,}", "| tokens | 128 |", f"{numbers['loss']:.4f}"
    for part in ("trust_remote_code=True", "`text.txt`", *sizes):
        assert part in body
    assert str(tmp_path) not in body.partition("## How")[0]  # paths of this machine stay here


def test_a_model_folder_without_history_has_a_card(tmp_path):
    _, folder = exported(tmp_path, "mamba-attention")
    text = (folder / "README.md").read_text()
    found, body = front_matter(text)
    assert found["tags"] == ["linnet", "attention", "mamba"] and "# license:" in text
    assert "does not record its training" in body
