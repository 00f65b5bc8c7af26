"""A model comes back from its folder as it was: weights, fixed tables, tokenizer; and what does not fit is named."""

import argparse
import importlib.util
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from chats import VOCABULARY, model_folder, special_tokenizer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError, parse
from linnet.data import ByteTokenizer, load_tokenizer
from linnet.models import FAMILIES, ModelConfig, build_model, empty_model, family
from linnet.models.causal_lm import empty
from linnet.runs import load_model, save_model
from linnet.runs.model import TEMPLATE, DamagedCheckpoint, assign_weights, files_of_start
from linnet.train import TrainConfig, train
from linnet.trust import ChangedPlugin


@pytest.fixture(scope="module", params=["byte", "bpe:300"])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    values = {
        "data": {"tokenizer": request.param, "source": [str(folder / "text.txt")]},
        "model": {
            "d_model": 16,
            "layout": "tnl+sglu attention+swiglu",
            "vocab_size": 320,
            "options": {"tnl": {"num_heads": 2}, "attention": {"num_heads": 2}},
        },
        "steps": 2,
        "seq_len": 16,
        "batch_size": 2,
        "evaluate_tokens": 64,
        "run": {"device": "cpu"},
    }
    (folder / "text.txt").write_text(open(argparse.__file__, encoding="utf-8").read() * 2, encoding="utf-8")
    return train(parse(TrainConfig, values), folder / "out", folder / "cache").path


def test_a_run_gives_its_model_and_tokenizer(run, tmp_path):
    model, tokenizer = load_model(run)
    saved = load_file(sorted((run / "checkpoints").iterdir())[-1] / "model.safetensors")
    assert not model.training and {n: t.dtype for n, t in model.state_dict().items()} == {
        n: t.dtype for n, t in saved.items()
    }
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    fresh = build_model(model.config)
    for (name, mine), (_, its) in zip(model.named_buffers(), fresh.named_buffers(), strict=True):
        assert torch.equal(mine, its), name
    assert tokenizer.decode(tokenizer.encode("def main(): pass")) == "def main(): pass"

    copy = save_model(tmp_path / "copy", model.config, model.state_dict(), tokenizer)
    again, its_tokenizer = load_model(copy)
    tokens = torch.from_numpy(tokenizer.encode("import sys"))[None]
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    assert its_tokenizer.digest == tokenizer.digest


def test_parameters_take_a_dtype_and_fixed_tables_keep_theirs(run):
    model, _ = load_model(run, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}  # this one has no parameter that must be float32
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert model(torch.ones(1, 5, dtype=torch.int64))[0].dtype == torch.bfloat16


def test_a_damaged_checkpoint_gives_way_to_the_one_before(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    last = sorted((copy / "checkpoints").iterdir())[-1]
    (last / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError, match="model.safetensors.* 2 bytes.*; copy the run folder again"):
        load_model(copy)
    shutil.copytree(sorted((run / "checkpoints").iterdir())[-1], copy / "checkpoints" / "step-00000001")
    with pytest.warns(DamagedCheckpoint, match="model.safetensors.* 2 bytes.*step-00000001"):
        load_model(copy)
    # The command line prints it without a line of source code, and the step of the scores.
    (copy / "x.txt").write_text("some text")
    commands = [["convert", copy, "--out", tmp_path / "hf"]] if importlib.util.find_spec("transformers") else []
    commands += [["generate", copy, "a", "--max-tokens", 1], ["evaluate", "text", copy, copy / "x.txt"]]
    for command in commands:
        done = CliRunner().invoke(app, list(map(str, command)))
        assert done.exit_code == 0 and "model.safetensors" in done.stderr
        assert "UserWarning" not in done.stderr and "warnings.warn" not in done.stderr
    assert re.search(r"step\s1\b", done.stdout)
    assert "single document" in done.stderr  # as this run was


def test_everything_that_does_not_fit_is_named(tmp_path):
    config = family("tnl")(16, 1, num_heads=2)
    tensors = dict(build_model(config).state_dict())
    folder = save_model(tmp_path / "model", config, tensors)
    assert load_model(folder)[1] is None
    name = "backbone.blocks.0.mixer.q_proj.weight"
    tensors["extra"] = tensors.pop("backbone.blocks.0.mixer.k_proj.weight")
    tensors[name] = tensors[name][:3].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        load_model(folder)
    assert len(error.value.problems) == 3 and "extra: " in str(error.value)
    (folder / "model.safetensors").write_bytes(b"12")
    with pytest.raises(ConfigError, match="model.safetensors"):
        load_model(folder)
    with pytest.raises(ConfigError, match=re.escape(str(folder))):
        save_model(folder, config, tensors)
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        load_model(tmp_path)


def test_a_run_from_before_tokenizers_were_kept(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    kept = load_tokenizer(copy / "tokenizer.json")
    (copy / "tokenizer.json").unlink()
    if kept.name == "byte":
        assert load_model(copy)[1].name == "byte"
    else:
        with pytest.raises(ConfigError, match="tokenizer.json"):
            load_model(copy)


def test_a_model_of_shapes_alone_has_those_of_a_real_one():
    for name in FAMILIES:
        config = family(name)(64, 2)
        if isinstance(config, ModelConfig):
            shapes, real = (
                {n: (t.shape, t.dtype) for n, t in [*m.named_parameters(), *m.named_buffers()]}
                for m in (empty_model(config, "meta"), empty_model(config))
            )
            assert shapes == real, name


def test_arithmetic_of_shapes_alone_has_the_types_of_real_arithmetic():
    def tables() -> list[torch.Tensor]:
        column, whole, turns = torch.ones(3, 1), torch.arange(1, 5), torch.ones(4, dtype=torch.complex64)
        unary = [f(x) for x in (column, whole, turns) for f in (torch.log, torch.exp, torch.neg, torch.abs)]
        return [*unary, column * whole, whole / 2, 1 - whole, whole % 3, 2**whole, column + turns, whole.clamp(min=2)]

    shapes, real = ([(x.shape, x.dtype) for x in empty(tables, device)] for device in ("meta", "cpu"))
    assert shapes == real


def test_an_empty_model_draws_nothing_and_takes_any_weights():
    for name in ("tnl", "mamba", "cosformer2", "hgrn2"):
        config = family(name)(16, 2, num_heads=2)
        random = torch.get_rng_state()
        model, source = empty_model(config), build_model(config, seed=3)
        assert torch.equal(torch.get_rng_state(), random)
        assign_weights(model, source.state_dict(), "here")
        tokens = torch.arange(7)[None]
        assert torch.equal(model(tokens)[0], source(tokens)[0])


def test_weights_of_another_model_and_quantised_ones_are_named():
    config = family("tnl")(16, 2, num_heads=2)
    model, good = empty_model(config), build_model(config, seed=3).state_dict()
    name = "embedding.weight"
    with pytest.raises(ConfigError, match=rf"{name}: holds torch.int8; use weights that are not quantised"):
        assign_weights(model, good | {name: good[name].to(torch.int8)}, "here")
    with pytest.raises(ConfigError, match="x: is not in the model; take config.yaml and the weights from one folder"):
        assign_weights(model, good | {"x": good[name]}, "here")
    with pytest.raises(ConfigError, match="and 900 more problems") as error:
        assign_weights(model, good | {f"x{number}": good[name] for number in range(1000)}, "here")
    assert len(error.value.problems) == 101


def test_a_mixer_that_has_changed_since_is_refused_unless_allowed(tmp_path):
    text = (Path(__file__).parents[2] / "examples" / "my_mixer.py").read_text()
    (mixer := tmp_path / "mine.py").write_text(text.replace('"my_mixer"', '"altered"'))  # other tests load the example
    values = {
        "plugins": [f"{mixer}:MyMixer"],
        "data": {"source": [argparse.__file__]},
        "model": {"d_model": 16, "layout": "altered+sglu"},
        "steps": 1,
        "seq_len": 16,
        "batch_size": 2,
        "evaluate_tokens": 64,
        "run": {"device": "cpu"},
    }
    run = train(parse(TrainConfig, values), tmp_path / "out", tmp_path / "cache").path
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(run)
    mixer.write_text(mixer.read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match=r"mine\.py:MyMixer.*changed.*--allow-plugins"):
        load_model(run)
    with pytest.warns(ChangedPlugin, match=r"mine\.py:MyMixer .*changed"):
        load_model(run, allow_plugins=True)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    config = family("tnl")(16, 1, num_heads=2)
    tensors = dict(build_model(config).state_dict())
    tensors["embedding.weight"] = torch.full_like(tensors["embedding.weight"], torch.nan)
    tensors["backbone.blocks.0.mixer.q_proj.weight"][3, 1] = -torch.inf
    folder = save_model(tmp_path / "model", config, tensors, ByteTokenizer())
    (text := tmp_path / "text.txt").write_text("some text")
    for command in (["generate", str(folder), "a"], ["evaluate", "text", str(folder), str(text)]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and "backbone.blocks.0.mixer.q_proj.weight, embedding.weight" in result.output


def test_a_chat_template_that_is_not_utf_8_is_named_by_the_training_that_would_take_it(tmp_path):
    folder = model_folder(tmp_path, family("llama")(16, 1, vocab_size=VOCABULARY))
    assert TEMPLATE in files_of_start(folder, special_tokenizer())
    (folder / TEMPLATE).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"{TEMPLATE}: cannot be read"):
        files_of_start(folder, special_tokenizer())


@pytest.mark.parametrize("text", ["[1]", "[" * 100_000, "{", '{"sampling": 3}'])
def test_damaged_notes_on_prompts_are_named(tmp_path, text):
    folder = model_folder(tmp_path, family("llama")(16, 1, vocab_size=VOCABULARY))
    load_model(folder)
    (folder / "prompts.json").write_text(text)
    result = CliRunner().invoke(app, ["generate", str(folder), "a"])
    assert result.exit_code == 2 and "prompts.json" in result.output


def test_files_of_a_model_folder_that_changed_are_named(tmp_path):
    config = family("tnl")(16, 1, num_heads=2)
    model = build_model(config)
    folder = save_model(tmp_path / "model", config, model.state_dict(), ByteTokenizer())
    load_model(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # of the last weight's exponent or sign: a number all the same
    weights.write_bytes(content)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError) as error:
        load_model(folder)
    assert len(error.value.problems) == 2 and all(name in str(error.value) for name in ("SHA-256", "tokenizer.json"))
    (folder / "SHA256SUMS").unlink()  # as in a folder of 0.1.0
    assert load_model(folder)[1] is None


def test_a_changed_configuration_of_a_model_folder_is_named(tmp_path):
    config = family("tnl")(16, 1, num_heads=2)
    folder = save_model(tmp_path / "model", config, build_model(config).state_dict(), ByteTokenizer())
    file, sums = folder / "config.yaml", folder / "SHA256SUMS"
    written = file.read_text()
    for changed in (written.replace("init_std: 0.02", "init_std: 0.03"), written + "plugins: [a.py:A]\n", "[]"):
        file.write_text(changed)
        with pytest.raises(ConfigError, match=r"config\.yaml: the contents changed .*SHA256SUMS"):
            load_model(folder)
    file.write_text(written + "# a note\n")
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if "config.yaml" not in line))
    assert load_model(folder)[0].config == config  # a folder of an earlier build has no sum of it
