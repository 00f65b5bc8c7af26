"""`linnet convert` in both directions, from what a person types."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_folders import random_tensors, write_folder
from typer.testing import CliRunner

from linnet.cli import app
from linnet.layers import load_plugin
from linnet.models import ModelConfig, build_model
from linnet.runs import RunFolder, load_model, save_model
from linnet.runs.files import UNFINISHED
from linnet.train import TrainConfig, train

transformers = pytest.importorskip("transformers", reason="needs the extra hf")


@pytest.fixture
def convert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture
def run(tmp_path):
    (tmp_path / "text.txt").write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    model = {"d_model": 16, "layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 2}}}
    values = {
        "name": "tiny",
        "data": {"source": [str(tmp_path / "text.txt")], "tokenizer": {"kind": "bpe", "vocab_size": 300}},
        "model": model,
        "steps": 3,
        "seq_len": 16,
        "batch_size": 2,
        "evaluate_tokens": 64,
        "run": {"device": "cpu"},
    }
    return train(TrainConfig.model_validate(values), tmp_path / "runs", tmp_path / "cache").path


def test_a_run_goes_to_transformers_and_back(convert, run, tmp_path):
    done = convert(run, "--to", "hf")
    assert done.exit_code == 0, done.output
    folder = tmp_path / f"{run.name}-hf"
    assert "shards:" not in done.stderr  # a bar of transformers
    assert done.stdout.strip().endswith(folder.name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model, tokenizer = load_model(run)
    text = "def parse(self):\n    return None <|endoftext|>\t"
    assert words(text).input_ids == tokenizer.encode(text).tolist()
    tokens = torch.tensor([words(text).input_ids])
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)[0]).abs().max() < 1e-6

    assert convert(folder, "--out", "back").exit_code == 0
    back, its_tokenizer = load_model("back")
    assert torch.equal(back(tokens)[0], model(tokens)[0])
    assert its_tokenizer.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_a_mixer_of_ones_own_comes_back_with_its_file(convert, tmp_path):
    spec = f"{Path(__file__).parents[2] / 'examples' / 'my_mixer.py'}:MyMixer"
    settings = {"d_model": 16, "layout": "my_mixer+swiglu x1", "options": {load_plugin(spec): {"num_heads": 2}}}
    model = build_model(ModelConfig.model_validate(settings | {"vocab_size": 20}), seed=0)
    save_model(tmp_path / "mine", model.config, model.state_dict(), plugins=[spec])
    assert convert("mine", "--out", "theirs").exit_code == 0
    back = convert("theirs", "--mixer", spec, "--out", "back")
    assert back.exit_code == 0 and RunFolder.open("back").config["plugins"] == [spec], back.output
    tokens = torch.arange(6)[None]
    assert torch.equal(load_model("back")[0](tokens)[0], model.eval()(tokens)[0])
    Path("other.py").write_text(Path(spec.rpartition(":")[0]).read_text().replace('"my_mixer"', '"another"'))
    for arguments, reason in (
        (("theirs", "--mixer", "lacking.py:A"), "lacking.py does not exist"),
        (("theirs", "--mixer", spec, "--mixer", "other.py:MyMixer"), "--mixer other.py:MyMixer: has no effect"),
        (("mine", "--mixer", spec), "has no effect on --to hf"),
    ):
        done = convert(*arguments, "--out", "none")
        assert done.exit_code == 2 and reason in " ".join(done.stderr.split()), done.output


def test_a_checkpoint_becomes_a_model_folder(convert, tmp_path):
    config = {"model_type": "transnormer", "decoder_embed_dim": 16, "hidden_dim": 16, "decoder_layers": 1}
    config |= {"decoder_attention_heads": 2, "glu_dim": 24, "vocab_size": 20}
    shapes = {
        "model.embed_tokens.weight": (20, 16),
        "lm_head.weight": (20, 16),
        "model.layers.0.token_mixer.qkvu_proj.weight": (64, 16),
        "model.layers.0.token_mixer.out_proj.weight": (16, 16),
        "model.layers.0.channel_mixer.l1.weight": (24, 16),
        "model.layers.0.channel_mixer.l2.weight": (24, 16),
        "model.layers.0.channel_mixer.l3.weight": (16, 24),
    }
    source = write_folder(tmp_path / "TNL", config, random_tensors(shapes))
    done = convert(source)
    assert done.exit_code == 0 and "TransNormerLLM: tnl+sglu x1, width 16" in done.stderr
    assert "tokenizer.json" in done.stderr and done.stdout == "TNL-linnet\n"
    assert load_model("TNL-linnet")[0](torch.ones(1, 3, dtype=torch.int64))[0].shape == (1, 3, 20)
    again = convert(source)
    assert again.exit_code == 2 and "TNL-linnet" in again.stderr
    (tmp_path / "killed" / UNFINISHED).mkdir(parents=True)
    (tmp_path / "killed" / UNFINISHED / "model.safetensors").write_bytes(b"half")
    assert convert(source, "--out", "killed").exit_code == 0 and len(load_model("killed")) == 2


def test_what_cannot_be_done_is_said(convert, run, tmp_path):
    other = write_folder(tmp_path / "x", {"model_type": "gpt2"}, {"w": torch.zeros(1)})
    for arguments, reason in (
        ((tmp_path / "nothing",), "config.yaml"),
        (
            (run, "--to", "linnet"),
            f"--to linnet: {run} has Linnet's layout already, which every command reads; to share",
        ),
        ((other, "--shard-size", "1GB"), "--shard-size 1GB: has no effect on --to linnet"),
        ((other, "--allow-plugins"), f"--allow-plugins: has no effect on {other}, a checkpoint; leave it out: only"),
        ((run, "--allow-pickle"), "--allow-pickle: has no effect on --to hf"),
        ((run, "--out", run), "is not an empty folder"),
        ((other, "--to", "hf"), "to linnet first"),
        ((other,), "'gpt2' is not a layout that Linnet reads"),
    ):
        done = convert(*arguments)
        assert done.exit_code == 2 and reason in done.stderr, done.output


def test_a_folder_that_cannot_be_made_is_named(convert, run, tmp_path):
    (tmp_path / "file").write_text("")
    result = convert(run, "--out", tmp_path / "file" / "below")
    assert result.exit_code != 0 and "below: cannot be made" in str(result.output) + str(result.exception)


def test_what_does_not_fit_on_the_disk_leaves_nothing(convert, run, tmp_path):
    import resource

    before = set(tmp_path.iterdir())
    source = convert(run, "--out", "source")
    assert source.exit_code == 0
    for arguments in ((run, "--to", "hf"), ("source",)):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            done = convert(*arguments, "--out", "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert done.exit_code == 2 and "out: cannot be written" in done.stderr, done.output
    assert {path.name for path in tmp_path.iterdir()} - {path.name for path in before} == {"source"}


@pytest.mark.system
def test_the_command_prints_nothing_of_other_packages(tmp_path):
    """transformers imports torchao, which may fail to load libraries of its own."""
    config = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, vocab_size=40, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "theirs")
    command = [sys.executable, "-m", "linnet", "convert", "theirs", "--out", "ours"]
    path = str(Path(__file__).parents[2])
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert "torchao" not in output and "_pytree" not in output
