"""Options that differ between blocks survive an export and the way back."""

import torch

from linnet import hf
from linnet.config import parse
from linnet.models import ModelConfig, build_model
from linnet.runs import load_model, save_model

MODEL = {
    "d_model": 16,
    "vocab_size": 32,
    "layout": "tpe (L G) x2",
    "options": {"attention": {"num_heads": 2}, "swiglu": {"inner": 24}},
    "aliases": {
        "L": {"layer": "attention+swiglu", "options": {"attention": {"window": 4}, "swiglu": {"inner": 40}}},
        "G": "attention+swiglu",
    },
    "positions": "learned",
    "num_positions": 20,
    "bias": "qkv",
}


def test_export_and_conversion_keep_the_options_of_each_block(tmp_path):
    config, tokens = parse(ModelConfig, MODEL), torch.randint(0, 32, (2, 12))
    model = build_model(config, seed=1).eval()
    save_model(tmp_path / "model", config, model.state_dict())
    hf.export(tmp_path / "model", tmp_path / "exported")
    exported = hf.LinnetForCausalLM.from_pretrained(tmp_path / "exported")
    assert exported.config.linnet() == config and exported.config.num_hidden_layers == 4
    expected, _ = model(tokens)
    torch.testing.assert_close(exported(tokens).logits, expected)
    generated = exported.generate(tokens[:, :5], max_new_tokens=4, do_sample=False)
    assert torch.equal(generated[:, 5], model(tokens[:, :5])[0][:, -1].argmax(-1))
    hf.convert(tmp_path / "exported", tmp_path / "back")
    again, _ = load_model(tmp_path / "back")
    assert again.config == config
    torch.testing.assert_close(again(tokens)[0], expected)
