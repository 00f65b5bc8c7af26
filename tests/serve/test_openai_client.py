"""The real `openai` client against a real server: what it is given is what the engine says."""

import json

import pytest
import tokenizers
import torch
from serving import Running, serve, tiny_model

from linnet.data import ByteTokenizer, FileTokenizer
from linnet.inference import Completion, Engine, Sampling
from linnet.runs.model import Generation
from linnet.serve.scoring import Echo


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny_model(), ByteTokenizer(), device="cpu", slots=1)


def alone(engine: Engine, prompt: str | list[int], **sampling) -> Completion:
    return engine.generate([prompt], Sampling(**sampling))[0]


def test_completion_is_the_engines(tiny: Running, engine: Engine):
    found = tiny.client().completions.create(
        model="tiny", prompt="The bird", max_tokens=24, temperature=0, extra_body={"return_token_ids": True}
    )
    expected = alone(engine, "The bird", max_tokens=24)
    [choice] = found.choices
    assert choice.token_ids == expected.tokens and choice.text == expected.text
    assert choice.finish_reason == expected.finish == "length" and choice.logprobs is None
    assert found.object == "text_completion" and found.model == "tiny" and found.id.startswith("cmpl-")
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (8, 24, 32)


def test_every_setting_of_sampling_arrives(tiny: Running, engine: Engine):
    settings = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2}
    found = tiny.client().completions.create(
        model="tiny",
        prompt="The bird",
        max_tokens=32,
        temperature=1.3,
        top_p=0.9,
        seed=7,
        extra_body={**settings, "return_token_ids": True, "ignore_eos": True, "stop_token_ids": [255]},
    )
    sampling = {"temperature": 1.3, "top_p": 0.9, "seed": 7, **settings}
    expected = alone(engine, "The bird", max_tokens=32, ignore_end=True, stop_tokens=[255], **sampling)
    assert found.choices[0].token_ids == expected.tokens
    assert found.choices[0].token_ids != alone(engine, "The bird", max_tokens=32).tokens


def test_stream_is_the_whole_answer_in_parts(tiny: Running, engine: Engine):
    ask = {"model": "tiny", "prompt": "The bird", "max_tokens": 40, "seed": 3, "n": 2, "logprobs": 2}
    ids = {"return_token_ids": True}
    whole = tiny.client().completions.create(**ask, extra_body=ids)
    chunks = list(
        tiny.client().completions.create(**ask, stream=True, stream_options={"include_usage": True}, extra_body=ids)
    )
    *parts, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert all(part.usage is None and part.id == last.id for part in parts)
    for index, choice in enumerate(whole.choices):
        own = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert "".join(c.text for c in own) == choice.text
        assert [t for c in own for t in c.token_ids] == choice.token_ids
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in own for x in getattr(c.logprobs, key)] == getattr(choice.logprobs, key)
        assert choice.token_ids == alone(engine, "The bird", max_tokens=40, temperature=1.0, seed=3 + index).tokens
    assert whole.choices[0].token_ids != whole.choices[1].token_ids


def test_stream_ends_with_done_and_only_then(tiny: Running):
    reply = tiny.post(prompt="a", max_tokens=3, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [event for event in reply.body.decode().split("\n\n") if event]
    assert events[-1] == "data: [DONE]" and events.count("data: [DONE]") == 1
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-1])


def test_prompts_in_batches_and_as_tokens(tiny: Running, engine: Engine):
    client, ids = tiny.client(), {"return_token_ids": True}
    texts = ["The bird", "Seven", "x"]
    expected = [alone(engine, text, max_tokens=9).tokens for text in texts]
    for prompts in (texts, [list(text.encode()) for text in texts]):
        found = client.completions.create(model="tiny", prompt=prompts, max_tokens=9, temperature=0, extra_body=ids)
        assert [choice.token_ids for choice in found.choices] == expected
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert found.usage.prompt_tokens == 14 and found.usage.completion_tokens == 27
    found = client.completions.create(
        model="tiny", prompt=list(b"Seven"), max_tokens=9, temperature=0, n=2, extra_body=ids
    )
    assert [choice.token_ids for choice in found.choices] == [expected[1]] * 2
    assert found.usage.prompt_tokens == 5


def test_no_prompt_begins_a_document(tiny: Running, engine: Engine):
    found = tiny.client().completions.create(
        model="tiny", prompt="", max_tokens=5, temperature=0, extra_body={"return_token_ids": True}
    )
    assert found.choices[0].token_ids == alone(engine, [0], max_tokens=5).tokens


def test_stop_text_ends_a_completion_and_is_not_in_it(tiny: Running):
    client = tiny.client()
    ask = {
        "model": "tiny",
        "prompt": "The bird",
        "max_tokens": 60,
        "seed": 5,
        "temperature": 2,
        "extra_body": {"ignore_eos": True},
    }
    free = client.completions.create(**ask).choices[0]
    stop = free.text[12:14]
    for stream in (False, True):
        found = client.completions.create(**ask, stop=[stop, "never there"], stream=stream)
        choices = [part.choices[0] for part in found] if stream else [found.choices[0]]
        assert "".join(choice.text for choice in choices) == free.text[: free.text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_echo_scores_the_prompt_as_the_model_does(tiny: Running):
    prompt = "A prompt that is longer than a chunk of sixteen tokens."
    with torch.no_grad():
        logits = tiny_model().eval()(torch.tensor([list(prompt.encode())]))[0][0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(list(prompt.encode()))[1:, None])[:, 0]
    for most in (0, 1):
        found = tiny.client().completions.create(
            model="tiny", prompt=prompt, max_tokens=most, temperature=0, logprobs=1, echo=True
        )
        choice = found.choices[0]
        scores = choice.logprobs
        size = len(prompt)
        assert choice.text.startswith(prompt) and choice.finish_reason == "length"
        assert scores.tokens[:size] == list(prompt) and scores.text_offset[:size] == list(range(size))
        assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
        assert torch.allclose(torch.tensor(scores.token_logprobs[1:size]), expected, atol=1e-4)
        assert all(scores.tokens[i] in scores.top_logprobs[i] for i in range(1, size))
        assert len(scores.tokens) == size + most == found.usage.total_tokens
    whole = tiny.client().completions.create(model="tiny", prompt=prompt, max_tokens=4, echo=True, temperature=0)
    plain = tiny.client().completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0)
    assert whole.choices[0].text == prompt + plain.choices[0].text and whole.choices[0].logprobs is None


def test_offsets_are_those_of_the_text(tiny: Running):
    """A byte is a token: three bytes of a character share its offset, and a prompt may end within a character."""
    for prompt, ids in (("a漢b", list("a漢b".encode())), (list("a漢b".encode()),) * 2):
        [choice] = tiny.post(prompt=prompt, max_tokens=0, echo=True, logprobs=0).json["choices"]
        assert choice["text"] == "a漢b" and choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
        assert len(choice["logprobs"]["tokens"]) == len(ids)
    split = {"prompt": [97, 0xE6, 0xBC], "echo": True, "logprobs": 0}
    [choice] = tiny.post(**split, max_tokens=0).json["choices"]
    assert choice["text"] == "a\ufffd" and choice["logprobs"]["text_offset"] == [0, 1, 1]
    [choice] = tiny.post(**split, max_tokens=4, ignore_eos=True, seed=0, return_token_ids=True).json["choices"]
    assert choice["text"] == ByteTokenizer().decode(choice["token_ids"])
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 1]


@pytest.mark.parametrize("prompt", ["a漢b", [1, *(4 + byte for byte in "a漢b".encode())]])
def test_tokens_before_a_prompt_have_no_width(prompt):
    """Neither the spelling of the start token of a Llama nor the space that is put first belongs to the text."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    inner.decoder = tokenizers.decoders.Sequence(steps)
    if isinstance(prompt, str):
        inner.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        )
    inner.add_special_tokens(["<s>", "</s>"])
    tokenizer = FileTokenizer(inner)
    tokenizer.prompt_start = (1,)
    space = [3] if isinstance(prompt, str) else []
    ids = [1, *space, *(4 + byte for byte in "a漢b".encode())]
    echo = Echo.of(prompt, ids, tokenizer, continues=True, scored=True)
    if space:
        assert tokenizer.encode("a漢b").tolist() == ids[1:]
    assert echo.text == "a漢b" and echo.offsets == [0, *(0 for _ in space), 0, 1, 1, 1, 2]


def test_chat(tiny: Running, engine: Engine):
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    text = "<system>Be brief.</system>\n<user>Hello</user>\n<assistant>"
    expected = alone(engine, text, max_tokens=20, temperature=1.0, seed=11)
    client = tiny.client()
    found = client.chat.completions.create(
        model="tiny", messages=talk, max_completion_tokens=20, seed=11, logprobs=True, top_logprobs=3
    )
    [choice] = found.choices
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish and found.usage.prompt_tokens == len(text)
    assert len(choice.logprobs.content) == len(expected.tokens)
    for line, token in zip(choice.logprobs.content, expected.tokens, strict=True):
        assert len(line.top_logprobs) == 3
        assert line.bytes == ([token] if token else None)  # a part of a character has bytes, the end token has none
        assert all(top.bytes for top in line.top_logprobs if top.token != "token_id:0")
        assert 0 < token < 128 or line.token == f"token_id:{token}"
    parts = list(client.chat.completions.create(model="tiny", messages=talk, max_tokens=20, seed=11, stream=True))
    assert "".join(part.choices[0].delta.content for part in parts) == expected.text
    assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert parts[-1].choices[0].finish_reason == expected.finish


def test_chat_without_a_limit_ends_at_the_servers(tiny: Running):
    with serve(max_tokens=50) as small:
        found = small.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={"ignore_eos": True}
        )
    assert found.usage.completion_tokens == 50 and found.choices[0].finish_reason == "length"


def test_models(tiny: Running, openai):
    client = tiny.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "linnet"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt")
    assert error.value.code == "model_not_found"


def test_errors_become_the_clients_exceptions(tiny: Running, openai):
    client = tiny.client()
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="other", prompt="x")
    assert error.value.param == "model" and error.value.code == "model_not_found" and "'tiny'" in error.value.message
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x", max_tokens=-1)
    assert error.value.param == "max_tokens" and error.value.type == "invalid_request_error"
    with serve(api_key="right", template=None) as locked:
        with pytest.raises(openai.AuthenticationError):
            locked.client(api_key="wrong").models.list()
        with pytest.raises(openai.NotFoundError) as error:
            locked.client(api_key="right").chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}]
            )
        assert error.value.code == "no_chat_template"


def test_model_without_a_tokenizer_takes_and_gives_tokens():
    with serve(with_tokenizer=False) as bare:
        found = bare.client().completions.create(
            model="tiny",
            prompt=[1, 2, 3],
            max_tokens=4,
            temperature=0,
            logprobs=0,
            extra_body={"return_token_ids": True},
        )
        [choice] = found.choices
        engine = Engine(tiny_model(), None, device="cpu", slots=1)
        assert choice.token_ids == alone(engine, [1, 2, 3], max_tokens=4).tokens and choice.text == ""
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
        assert bare.post(prompt="text").error["param"] == "prompt"
        assert bare.post(prompt=[1], stop="x").error["param"] == "stop"
        bare.service.engine.generation = Generation(ends=(choice.token_ids[1],))
        ask = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        [ended], [unended] = (bare.post(**ask, ignore_eos=value).json["choices"] for value in (False, True))
        assert (ended["token_ids"], ended["finish_reason"]) == (choice.token_ids[:2], "stop")
        assert unended["token_ids"] == choice.token_ids
