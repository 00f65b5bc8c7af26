"""A saved prefix is the prompt that it was made of, and belongs to one model."""

import hashlib

import numpy as np
import pytest
import tokenizers
import torch
from chats import sentencepiece
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.data.tokenizer import FileTokenizer
from linnet.inference import Engine, Sampling
from linnet.inference.prefix import weights_digest
from linnet.models import ModelConfig, build_model, family

SAMPLING = Sampling(max_tokens=12, temperature=0.8, repetition_penalty=1.5, seed=4, ignore_end=True)


def make(seed=0, layout="tnl+sglu attention+swiglu", **settings):
    config = ModelConfig(d_model=32, layout=layout, init_std=0.3, options={})
    return Engine(build_model(config, seed=seed), ByteTokenizer(), slots=2, prefill_chunk=8, device="cpu", **settings)


def test_a_prefix_from_a_file_continues_like_the_whole_prompt(tmp_path):
    text = "a prompt of more than one chunk, "
    whole = make().generate([text + "and its rest"], SAMPLING)[0]
    engine = make()
    engine.prefix(text).save(tmp_path / "prefix.safetensors")
    again = make()
    prefix = again.load_prefix(tmp_path / "prefix.safetensors")
    assert prefix.tokens == len(text)
    for _ in range(2):  # it can be used again
        pieces = list(again.stream("and its rest", SAMPLING, prefix))
        assert [piece.token for piece in pieces] == whole.tokens
    extended = again.prefix("and its rest", prefix)
    assert [piece.token for piece in again.stream("", SAMPLING, extended)] == whole.tokens


def test_a_text_continues_a_prefix_without_a_space_of_its_own():
    tokenizer = sentencepiece("always")
    engine = Engine(build_model(family("tnl")(32, 1, vocab_size=tokenizer.vocab_size)), tokenizer, device="cpu")
    whole, part = engine.check("ab 4hi", SAMPLING), engine.check("b 4hi", SAMPLING, engine.prefix("a"))
    assert tokenizer.decode(whole.prompt) == "▁ab▁4hi" and tokenizer.decode(part.prompt) == "b▁4hi"


def test_a_text_is_the_same_after_a_saved_prefix(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "▁the": 2, "▁cat": 3}, "<unk>"))
    inner.decoder = tokenizers.decoders.Metaspace()  # which leaves out the space at the start of a text
    sampling = SAMPLING.model_copy(update={"temperature": 5.0})
    for tokenizer, prompt in (FileTokenizer(inner), [2, 3]), (ByteTokenizer(), [*"a漢".encode()][:-1]):
        model = build_model(family("tnl")(32, 1, vocab_size=tokenizer.vocab_size), seed=0)
        engine = Engine(model, tokenizer, slots=8, device="cpu")
        engine.prefix(prompt[1:], engine.prefix(prompt[:1])).save(tmp_path / "p")
        prefix = engine.load_prefix(tmp_path / "p")
        settings = [sampling.model_copy(update={"seed": seed}) for seed in range(8)]
        whole = [one.text for one in engine.generate([prompt] * 8, settings)]
        assert [one.text for one in engine.generate([[]] * 8, settings, prefix)] == whole


def test_a_prefix_of_an_earlier_version_has_no_last_tokens(tmp_path):
    engine, file = make(), tmp_path / "p.safetensors"
    engine.prefix("abc").save(file)
    with safe_open(file, "pt") as saved:
        values = {name: text for name, text in saved.metadata().items() if name != "last"}
        save_file({name: saved.get_tensor(name) for name in saved.keys()}, file, values)  # noqa: SIM118
    prefix = engine.load_prefix(file)
    assert (prefix.tokens, prefix.last) == (3, ()) and engine.generate(["d"], SAMPLING, prefix)[0].tokens


@pytest.mark.parametrize(
    ("metadata", "tensors", "problem"),
    [
        ({"tokens": None}, {}, "tokens is None"),
        ({"tokens": "-3"}, {}, "tokens is '-3', not a number above 0"),
        ({"tokens": "9" * 30}, {}, "tokens is '9999"),
        ({"tokens": "[" * 9999}, {}, "tokens is "),
        ({"last": "[256]"}, {}, "last is "),
        ({"last": str([1] * 9)}, {}, "last is "),
        ({}, {"logits": torch.zeros(256, dtype=torch.int32)}, "logits is not real"),
        ({}, {"seen": torch.zeros(256)}, "seen is not bool"),
    ],
)
def test_a_prefix_that_no_engine_saved_is_refused(tmp_path, metadata, tensors, problem):
    engine, file = make(), tmp_path / "p.safetensors"
    engine.prefix("abc").save(file)
    with safe_open(file, "pt") as saved:
        values = {name: text for name, text in (saved.metadata() | metadata).items() if text is not None}
        save_file({name: saved.get_tensor(name) for name in saved.keys()} | tensors, file, values)  # noqa: SIM118
    with pytest.raises(ConfigError) as error:
        engine.load_prefix(file)
    assert f"p.safetensors: {problem}" in str(error.value) and "; save it again" in str(error.value)


def test_a_recurrent_prefix_has_a_constant_size(tmp_path):
    engine = Engine(build_model(family("tnl")(32, 2)), ByteTokenizer(), device="cpu")
    sizes = []
    for length in (10, 1000):
        engine.prefix("x" * length).save(tmp_path / "p")
        sizes.append((tmp_path / "p").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 16  # the number of tokens has two digits more
    with pytest.raises(ConfigError, match="none/p"):
        engine.prefix("x").save(tmp_path / "none" / "p")


def test_a_full_disk_says_so_when_a_prefix_is_saved(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ConfigError, match="p.safetensors: .*the disk is full; free"):
        make().prefix("abc").save(tmp_path / "p.safetensors")


def test_a_prefix_of_something_else_is_refused(tmp_path):
    engine, file = make(), tmp_path / "p.safetensors"
    with pytest.raises(ConfigError, match="p.safetensors"):
        engine.load_prefix(file)
    file.write_bytes(b"not a prefix")
    with pytest.raises(ConfigError, match="p.safetensors: .*saved prefix .*; save it again"):
        engine.load_prefix(file)
    save_file({"logits": torch.zeros(3)}, file)
    with pytest.raises(ConfigError, match="p.safetensors: .*saved prefix .*; save it again"):
        engine.load_prefix(file)
    other = make(seed=1).prefix("abc")
    other.save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="p.safetensors: .*damaged.*; save it again"):
        engine.load_prefix(file)
    file.write_bytes(whole)
    with pytest.raises(ConfigError, match="p.safetensors: .*model.*save it again.*--save-state"):
        engine.load_prefix(file)
    with pytest.raises(ConfigError, match="prefix: .*model"):
        engine.submit("d", SAMPLING, other)
    save_file({"logits": torch.zeros(3)}, file, {"format": "1", "digest": "\x1b]0;title" + "0" * 9_000_000})
    with pytest.raises(ConfigError, match="belongs to the model ") as caught:
        engine.load_prefix(file)
    assert len(str(caught.value)) < 1000 and "\x1b" not in str(caught.value)
    engine.prefix("abc").save(file)
    with pytest.raises(ConfigError, match="context_length"):
        make(context_length=64).load_prefix(file)
    with pytest.raises(ConfigError, match="p.safetensors: .*model"):
        make(dtype=torch.bfloat16).load_prefix(file)
    with pytest.raises(ConfigError, match="prompt: 65 "):
        small = make(context_length=64)
        small.submit("x" * 5, SAMPLING, small.prefix("x" * 60))


def test_a_digest_takes_scalars_and_keeps_its_value():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))
            self.register_buffer("mean", torch.tensor([1.0, 3.0]))

    values = b"mean" + np.array([1.0, 3.0], np.float32).tobytes() + b"scale" + np.array(2.0, np.float32).tobytes()
    assert weights_digest(Scaled()) == hashlib.sha256(values).hexdigest()[:12]
    named = b"{}scale torch.float32 []" + np.array(2.0, np.float32).tobytes()
    assert weights_digest(Scaled(), "{}") == hashlib.sha256(named).hexdigest()[:12]
