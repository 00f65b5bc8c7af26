"""Problems of a configuration: all of them, by key, before any work."""

import re

import pytest

from linnet.config import ConfigError, parse, parse_yaml
from linnet.train import TrainConfig, resolve
from linnet.train.config import DEFAULT_STEPS

MODEL = {"d_model": 32, "layout": "tnl+sglu x2", "options": {"tnl": {"num_heads": 2}}}

PLUGIN = """
from linnet.config import Config
from linnet.layers.base import Mixer, register_mixer


class EchoConfig(Config):
    pass


@register_mixer("echo", EchoConfig)
class Echo(Mixer):
    def __init__(self, config, context):
        super().__init__()

    def forward(self, x, state=None, cu_seqlens=None):
        return x, state

    def step(self, x, state):
        return x, state

    def state_spec(self, batch, context_length):
        return {}
"""


def problems(values: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(TrainConfig, values)
    return caught.value.problems


def test_all_problems_are_listed_at_once():
    found = problems(
        {
            "model": {**MODEL, "d_model": 33},
            "sequence_length": 64,
            "seq_len": "long",
            "steps": 10,
            "tokens": 1000,
            "batch_size": 4,
            "accumulation": 8,
            "optimizer": {"learning_rat": 1e-3, "betas": [0.9, 1.5]},
            "schedule": {"name": "cosin"},
            "data": {"tokenizer": "bpe:10"},
            "init_from": "nowhere",
            "precision": "float16",
        }
    )
    for start, message in {
        "sequence_length": "'seq_len'",
        "seq_len": "'long'",
        "tokens": "1000",
        "accumulation": " 4 ",
        "optimizer.learning_rat": "'learning_rate'",
        "optimizer.betas.1": "optimizer.betas.1",
        "schedule.name": "'cosin'",
        "data.tokenizer": "257",
        "init_from": "'nowhere'",
        "precision": "'float16'",
    }.items():
        assert any(line.startswith(start + ".") or line.startswith(start + ":") for line in found), (start, found)
        assert any(message in line for line in found), (message, found)
    assert any(line.startswith("model") and "33" in line and "heads" in line for line in found), found
    assert len(found) == 11


def test_vocabulary_of_model_and_tokenizer():
    [line] = problems({"model": {**MODEL, "vocab_size": 300}, "data": {"tokenizer": "bpe:512"}})
    assert re.match("model: vocab_size 300 .*512.*model.vocab_size=512", line)
    assert parse(TrainConfig, {"model": {**MODEL, "vocab_size": 320}}).model.vocab_size == 320
    # Not given: the tokenizer's, also for a recipe that was published with another one.
    assert parse(TrainConfig, {"model": MODEL, "data": {"tokenizer": "bpe:512"}}).model.vocab_size == 512
    assert parse(TrainConfig, {"model": "tnl-70m"}).model.vocab_size == 256


def test_length_in_steps_or_tokens():
    shape = {"model": MODEL, "batch_size": 3, "seq_len": 10}
    assert parse(TrainConfig, {**shape, "tokens": 61}).total_steps == 3
    assert parse(TrainConfig, {**shape, "steps": 7}).total_steps == 7
    assert parse(TrainConfig, shape).total_steps == DEFAULT_STEPS


def test_yaml_as_people_write_it():
    text = "model: tnl-10m\noptimizer: {learning_rate: 3e-3, betas: [0.9, 0.99]}\nschedule: {name: wsd, warmup: 10}"
    config = parse(TrainConfig, parse_yaml(text))
    assert config.optimizer.learning_rate == 3e-3 and config.optimizer.betas == (0.9, 0.99)
    assert config.architecture == "tnl"
    assert parse(TrainConfig, config.model_dump(mode="json")) == config


def test_a_plugin_is_loaded_before_the_layout_and_part_of_the_run(tmp_path):
    file = tmp_path / "echo.py"
    file.write_text(PLUGIN)
    values = {"plugins": [f"{file}:Echo"], "model": {"d_model": 16, "layout": "echo+glu x2"}}
    config = resolve(parse(TrainConfig, values))
    assert config.architecture == "echo"
    assert len(config.plugin_digests[f"{file}:Echo"]) == 64
    assert parse(TrainConfig, config.model_dump(mode="json")) == config
    file.write_text(PLUGIN + "\n# changed\n")
    assert resolve(parse(TrainConfig, values)) != config
    [line] = problems(config.model_dump(mode="json"))
    assert "echo.py:Echo" in line


def test_missing_plugins_are_all_named(tmp_path):
    found = problems({"plugins": ["a.py:A", "b"], "model": MODEL})
    assert len(found) == 1 and "'a.py:A'" in found[0] and "'b'" in found[0]
