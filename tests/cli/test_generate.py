"""`linnet generate` as a person uses it."""

import argparse
import json
import math
from pathlib import Path

import pytest
from chats import CHATML, VOCABULARY, model_folder, turns
from hf_models import small
from typer.testing import CliRunner

from linnet.cli import app
from linnet.cli.generate import _read_prompt
from linnet.config import ConfigError
from linnet.data import DataConfig
from linnet.data.chat.template import ChatTemplate
from linnet.inference import Engine, Sampling
from linnet.models import ModelConfig, build_model
from linnet.runs.model import save_model
from linnet.train import TrainConfig, train

PROMPT = "def parse"


def make(folder, mixer):
    config = TrainConfig(
        model={"d_model": 16, "layout": f"{mixer}+sglu x2", "options": {mixer: {"num_heads": 2}}},
        data=DataConfig(source=[argparse.__file__], tokenizer={"kind": "bpe", "vocab_size": 400}),
        seq_len=32,
        batch_size=4,
        steps=5,
        evaluate_tokens=256,
    )
    return train(config, folder / "runs", folder / "cache").path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return make(tmp_path_factory.mktemp("generate"), "tnl")


@pytest.fixture
def linnet(trained, tmp_path, monkeypatch):
    """linnet(*arguments) runs `linnet generate RUN` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments, **rest: CliRunner().invoke(app, ["generate", str(trained), *map(str, arguments)], **rest)


def generated(linnet, *arguments):
    done = linnet(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_turn_is_answered_in_the_chat_template_of_the_folder(tmp_path):
    path = model_folder(tmp_path / "chat", small("tnl-attention", vocab_size=VOCABULARY))

    def call(*arguments):
        return CliRunner().invoke(app, ["generate", str(path), *map(str, arguments), "--max-tokens", "6"])

    engine = Engine.of_run(path)
    template = ChatTemplate(CHATML, engine.tokenizer)
    prompt = template.encode(turns("hi <|im_end|>"))
    [expected] = engine.generate([prompt], Sampling(max_tokens=6, stop_tokens=template.turn_ends))
    done = call("hi <|im_end|>", "--chat", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)[0]["tokens"] == expected.tokens
    assert json.loads(done.stdout)[0]["prompt_tokens"] == len(prompt)
    assert call("hi <|im_end|>", "--chat").stdout == expected.text + "\n"
    file = tmp_path / "turn.state"
    assert call("hi <|im_end|>", "--chat", "--save-state", file).exit_code == 0
    assert json.loads(call("--from-state", file, "--json").stdout)[0]["tokens"] == expected.tokens
    both = call("hi", "--chat", "--from-state", file)
    assert both.exit_code == 2 and "--chat" in both.stderr and "--from-state" in both.stderr
    assert "'<|im_end|>'" in call("hi <|im_end|>").stderr and "special" not in call("hi im_end").stderr
    (path / "chat_template.jinja").unlink()
    without = call("hi", "--chat")
    assert without.exit_code == 2 and "chat_template.jinja" in without.stderr


def test_streams_the_text_that_the_json_has(linnet):
    [found] = generated(linnet, PROMPT, "--max-tokens", 12)
    assert len(found["tokens"]) == 12 and found["finish"] == "length" and found["prompt_tokens"] > 1
    done = linnet(PROMPT, "--max-tokens", 12)
    assert done.exit_code == 0 and done.stdout == found["text"] + "\n"
    assert linnet("-", "--max-tokens", 12, input=PROMPT).stdout == done.stdout
    Path("prompt.txt").write_bytes(b"\xef\xbb\xbf" + PROMPT.encode())
    assert linnet("--prompt-file", "prompt.txt", "--max-tokens", 12).stdout == done.stdout
    Path("prompt.txt").write_bytes(b"a\r\nb")
    assert generated(linnet, "--prompt-file", "prompt.txt", "--seed", 1) == generated(linnet, "a\r\nb", "--seed", 1)


def test_a_closed_standard_input_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # as Python has it after `<&-`
    with pytest.raises(ConfigError, match="PROMPT: -.*--prompt-file"):
        _read_prompt("-", None, may_be_empty=False)


def test_an_empty_prompt_begins_a_document(linnet):
    [found] = generated(linnet, "", "--max-tokens", 6)
    assert found["prompt_tokens"] == 1 and len(found["tokens"]) > 0


def test_a_text_ends_with_the_context_unless_a_number_of_tokens_was_asked_for(tmp_path):
    arguments = ["generate", str(make(tmp_path, "attention")), PROMPT, "--context-length", "20"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    [found] = json.loads(done.stdout)
    assert found["prompt_tokens"] + len(found["tokens"]) == 20 or found["finish"] == "stop"
    refused = CliRunner().invoke(app, [*arguments, "--max-tokens", "256"])
    assert refused.exit_code == 2 and "256" in refused.output


def test_samples_have_seeds_and_logprobs(linnet):
    options = (PROMPT, "--max-tokens", 8, "--temperature", 1.0, "--top-p", 0.9, "--samples", 3, "--logprobs", 2)
    found = generated(linnet, *options, "--seed", 7)
    assert [sample["seed"] for sample in found] == [7, 8, 9] and len({sample["text"] for sample in found}) == 3
    assert generated(linnet, *options, "--seed", 7) == found
    for sample in found:
        assert len(sample["logprobs"]) == len(sample["tokens"]) == len(sample["top_logprobs"])
        assert all(len(top) == 2 and top[0][1] >= top[1][1] for top in sample["top_logprobs"])
        assert all(x <= 0 and math.isfinite(x) for x in sample["logprobs"])
    shown = linnet(*options[:-2], "--seed", 7)
    assert shown.exit_code == 0 and "--- 2, seed 8" in shown.stdout


def test_a_state_goes_on_where_it_was_saved(linnet):
    [whole] = generated(linnet, PROMPT + "_args(self", "--max-tokens", 10)
    done = linnet(PROMPT, "--save-state", "parse.state")
    assert done.exit_code == 0 and "parse.state" in done.output
    [rest] = generated(linnet, "_args(self", "--from-state", "parse.state", "--max-tokens", 10)
    assert rest["tokens"] == whole["tokens"]
    assert linnet("--from-state", "parse.state", "--max-tokens", 3).exit_code == 0


def test_how_much_of_a_long_prompt_is_read_is_said(linnet, monkeypatch):
    monkeypatch.setattr("linnet.options.QUIET", 0.0)
    done = linnet("a" * 600, "--save-state", "long.state")
    assert "reading the prompt: 600 of 600 tokens" in done.stderr and done.stdout == ""


def test_stop_strings_end_the_text(linnet):
    text = generated(linnet, PROMPT, "--max-tokens", 40)[0]["text"]
    stop = text[10:14]
    [found] = generated(linnet, PROMPT, "--max-tokens", 40, "--stop", stop)
    assert found["finish"] == "stop" and found["text"] == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ((PROMPT, "--temperature", "nan", "--max-tokens", "-3"), ("--temperature: ", "--max-tokens: ", "given -3")),
        ((PROMPT, "--top-p", "0", "--dtype", "int8"), ("--top-p: ", "--dtype: 'int8' is unknown")),
        ((), ("PROMPT: ",)),
        ((PROMPT, "--prompt-file", "x"), ("PROMPT, --prompt-file: ",)),
        (("--prompt-file", "missing.txt"), ("missing.txt: cannot be read",)),
        ((PROMPT, "--from-state", "missing.state"), ("--from-state missing.state: ",)),
        ((PROMPT, "--device", "gpu"), ("device: 'gpu' is unknown",)),
        ((PROMPT, "--samples", "0"), ("--samples: 0 ",)),
        ((PROMPT, "--samples", "99999999999"), ("--samples: 99999999999 is not between 1 and 1,000,000",)),
        ((PROMPT, "--save-state", "none/a.state", "--top-k", "-1"), ("--save-state none/a.state: ", "--top-k: ")),
        (
            (PROMPT, "--save-state", ".", "--from-state", "x"),
            ("--save-state .: ", "--from-state x: "),
        ),
        ((PROMPT, "--logprobs", "2"), ("--logprobs 2: ",)),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(linnet, arguments, messages):
    done = linnet(*arguments)
    assert done.exit_code == 2 and "Traceback" not in done.output
    for message in messages:
        assert message in done.output


def test_an_unknown_run_is_named(tmp_path):
    done = CliRunner().invoke(app, ["generate", str(tmp_path / "none"), "x"])
    assert done.exit_code == 2 and "folder" in done.output
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"ok \xff")
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt-file", str(broken)])
    assert done.exit_code == 2 and "UTF-8: byte 3" in done.output and "run folder" in done.output


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(tmp_path):
    config = ModelConfig(d_model=16, layout="tnl+sglu", options={"tnl": {"num_heads": 2}})
    save_model(tmp_path / "bare", config, build_model(config).state_dict())
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"not read")
    for arguments in (["Once"], ["Once", "--chat"]):
        done = CliRunner().invoke(app, ["generate", str(tmp_path / "bare"), *arguments], terminal_width=200)
        assert done.exit_code == 2 and "has no tokenizer.json" in done.output and "linnet serve" in done.output


def test_a_model_of_images_is_not_asked_for_a_tokenizer(tmp_path):
    (tmp_path / "config.yaml").write_text("objective: images\nmodel: vit-8px\n")
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "Once"], terminal_width=200)
    assert done.exit_code == 2 and "is needed here" in done.output and "tokenizer" not in done.output
