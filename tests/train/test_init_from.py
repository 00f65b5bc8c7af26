"""Starting from another run's weights, and the checks that the two fit."""

import re
from pathlib import Path

import pytest

from linnet.config import ConfigError, parse
from linnet.data import ByteTokenizer
from linnet.models import build_model, family
from linnet.runs import save_model
from linnet.train import TrainConfig, train
from linnet.train.preflight import preflight


def first_loss(run) -> float:
    return run.metrics()[0]["loss"]


def test_starts_where_the_other_run_ended(settings, cache, tmp_path):
    other = train(settings(steps=40), tmp_path, cache)
    run = train(settings(init_from=str(other.path), log_every=1, seed=1), tmp_path, cache)
    assert first_loss(run) == pytest.approx(other.result()["loss"], abs=0.5) and first_loss(run) < 4
    assert run.metrics()[0]["step"] == 1, "step and optimizer start anew"


def test_another_vocabulary_is_refused(settings, cache, tmp_path):
    other = train(settings(), tmp_path, cache)
    model = {**settings().model.model_dump(), "vocab_size": 300}
    data = {**settings().data.model_dump(mode="json"), "tokenizer": {"kind": "bpe", "vocab_size": 300}}
    values = settings(init_from=str(other.path)).model_dump(mode="json") | {"model": model, "data": data}
    with pytest.raises(ConfigError, match="init_from") as caught:
        train(parse(TrainConfig, values), tmp_path, cache)
    message = str(caught.value)
    assert " 256 " in message and " 300 " in message
    assert str(other.path) in message and "data.tokenizer" in message


FORGED = ["many", {"tokens": [0] * 10**6, "tokenizer": "\x1b]0;title", "digest": "0" * 10**6}, {"model": {}}]


@pytest.mark.parametrize("vocabulary", FORGED)
def test_a_forged_vocabulary_is_refused_in_a_line(settings, cache, vocabulary):
    [line] = preflight(settings(), cache).objective.start_problems({"vocabulary": vocabulary}, Path("start"))
    assert line.startswith("the vocabulary differs: start has ") and len(line) < 1000 and "\x1b" not in line


def test_a_tokenizer_may_be_named_by_its_file(settings, cache, tmp_path):
    values = settings(steps=1).model_dump(mode="json")
    values["model"] |= {"vocab_size": 300}
    values["data"] |= {"tokenizer": "bpe:300"}
    other = train(parse(TrainConfig, values), tmp_path, cache)
    values["data"] |= {"tokenizer": str(other.path / "tokenizer.json")}
    run = train(parse(TrainConfig, values | {"init_from": str(other.path)}), tmp_path, cache)
    assert run.done and run.path != other.path


def test_another_shape_is_refused_with_every_difference(settings, cache, tmp_path):
    other = train(settings(), tmp_path, cache)
    values = settings(init_from=str(other.path)).model_dump(mode="json")
    values["model"] = family("tnl")(32, 3, num_heads=2).model_dump()
    with pytest.raises(ConfigError) as caught:
        train(parse(TrainConfig, values), tmp_path, cache)
    problems = caught.value.problems
    assert any(re.match(r"embedding.weight: .*\[256, 16\].*\[256, 32\]", line) for line in problems)
    assert any(line.startswith("backbone.blocks.2.") for line in problems)


def test_a_run_without_a_checkpoint_is_named(settings, cache, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="empty: .*checkpoint"):
        train(settings(init_from=str(tmp_path / "empty")), tmp_path, cache)


def test_a_start_that_does_not_fit_leaves_no_folder(settings, cache, tmp_path):
    """Width, vocabulary and missing weights show in headers, so no folder is made; damage leaves none behind."""
    other = train(settings(), tmp_path / "first", cache)
    values = settings(init_from=str(other.path)).model_dump(mode="json")
    wide = values | {"model": family("tnl")(32, 3, num_heads=2).model_dump()}
    words = values | {
        "model": values["model"] | {"vocab_size": 300},
        "data": values["data"] | {"tokenizer": {"kind": "bpe", "vocab_size": 300}},
    }
    for changed in (wide, words):
        with pytest.raises(ConfigError, match=re.escape(str(other.path))):
            train(parse(TrainConfig, changed), tmp_path / "runs", cache)
        assert not (tmp_path / "runs").exists()
    weights = other.checkpoints()[-1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # the header is whole, so only reading the weights finds it
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{weights}: the contents changed")):
        train(parse(TrainConfig, values), tmp_path / "runs", cache)
    assert not list((tmp_path / "runs").iterdir())
    weights.write_bytes(content[:-40])
    with pytest.raises(ConfigError, match=re.escape(str(weights.parent))):
        train(parse(TrainConfig, values), tmp_path / "other", cache)
    assert not (tmp_path / "other").exists()


def test_options_that_are_not_named_stay_those_of_the_start(settings, cache, tmp_path):
    """Most options change no shape, so that nothing would tell of a default in the place of the start's value."""
    model = family("llama")(16, 2, num_heads=2).model_dump()
    model["options"]["attention"] |= {"rope_base": 500.0, "num_kv_heads": 1}
    model["options"]["swiglu"] |= {"inner": 24}
    values = settings(steps=1).model_dump(mode="json") | {"model": model}
    other = train(parse(TrainConfig, values), tmp_path, cache)
    del values["model"]
    values |= {"init_from": str(other.path), "model": {"options": {"attention": {"window": 8}}}}
    begun = parse(TrainConfig, values).model.model_dump()
    assert begun["options"]["attention"] == model["options"]["attention"] | {"window": 8}
    assert begun["options"]["swiglu"] == model["options"]["swiglu"]
    assert train(parse(TrainConfig, values), tmp_path, cache).done
    for key, value in (("layout", "attention+swiglu x2"), ("d_model", 32)):
        with pytest.raises(ConfigError, match=f"model.{key}: .*leave it out"):
            parse(TrainConfig, values | {"model": {key: value}})


def test_weights_that_are_not_finite_are_refused(settings, cache, tmp_path):
    """A checkpoint of a run that went wrong, say. The loss would be NaN, which no learning rate changes."""
    config = settings().model
    weights = build_model(config).state_dict()
    weights["embedding.weight"][3, 1] = float("nan")
    save_model(tmp_path / "model", config, weights, ByteTokenizer())
    with pytest.raises(ConfigError, match="NaN or infinite: embedding.weight"):
        train(settings(init_from=str(tmp_path / "model")), tmp_path / "runs", cache)
    assert not list((tmp_path / "runs").iterdir())
