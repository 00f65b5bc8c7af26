"""Tools: the template shows them, calls in an answer become `tool_calls`, and what is no call stays text."""

import json
import time

import pytest
import torch
from serving import Running, run

from linnet.data import ByteTokenizer
from linnet.inference import Engine
from linnet.models import build_model, family
from linnet.serve import ChatTemplate, ServeConfig, Service
from linnet.serve.formats import ToolCalls

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function | tojson }}]{% endfor %}{% for m in messages %}{{ m.role[0] }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
ASK = [{"role": "user", "content": "1"}]


def parse(*parts: str) -> tuple[str, list[dict]]:
    tools, text, calls = ToolCalls(), "", []
    for part in parts:
        shown, more = tools.push(part)
        text, calls = text + shown, calls + more
    return text + tools.flush(), [call["function"] for call in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "text", "names"),
    [
        (CALL, "", ["add"]),
        (f"\n\n{CALL}\n{CALL}\n", "", ["add", "add"]),
        (f"I add. \n{CALL}", "I add.", ["add"]),
        (f"{CALL}\n\nDone. \n", "Done.", ["add"]),
        ("a < b, <tool_box> and <tool_call", "a < b, <tool_box> and <tool_call", []),
        ("<tool_call>{}</tool_call> x", "<tool_call>{}</tool_call> x", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', None, []),
        ('<tool_call>{"name": "f"', None, []),
        ('<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', None, []),  # no answer can hold these
        ('<tool_call>{"name": "\\udc00"}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None, []),
        (" plain text \n", " plain text \n", []),
    ],
)
def test_text_and_calls_are_told_apart(size: int, answer: str, text: str | None, names: list[str]):
    shown, calls = parse(*(answer[i : i + size] for i in range(0, len(answer), size)))
    assert shown == (answer if text is None else text)
    assert [call["name"] for call in calls] == names
    assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)


def test_text_that_begins_no_call_is_sent_at_once():
    tools = ToolCalls()
    assert tools.push("one two") == ("one two", [])
    assert tools.push(" <to") == ("", [])
    assert tools.push("p>") == (" <top>", [])


@pytest.mark.parametrize(
    ("text", "shown", "count"),
    [
        (" " * 200_000 + "x", " " * 200_000 + "x", 0),
        ("<tool_call>" + "word " * 40_000, None, 0),
        (CALL.replace("ü", "word " * 40_000), "", 1),
    ],
    ids=["white space", "no end", "call"],
)
def test_held_text_takes_linear_time(text: str, shown: str | None, count: int):
    """200,000 tokens of one character take 0.1 s; when each token searched all of the held text anew, 9 to 26 s."""
    start = time.process_time()
    found, calls = parse(*text)
    assert time.process_time() - start < 5
    assert (found, len(calls)) == (text if shown is None else shown, count)


@pytest.fixture(scope="module")
def calling() -> Running:
    """A server of a model that has learnt one call by heart."""
    tokenizer = ByteTokenizer()
    template = ChatTemplate(TEMPLATE, tokenizer)
    prompt = template.encode(ASK, [TOOL])
    answer = [*tokenizer.encode(CALL).tolist(), tokenizer.end_of_document]
    model = build_model(family("llama")(64, 2, vocab_size=256), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    row = torch.tensor([prompt + answer])
    targets = row[:, 1:].clone()
    targets[:, : len(prompt) - 1] = -100
    for _ in range(90):
        total, count = model.loss(row[:, :-1], targets)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert total.item() < 0.1 * count.item()
    engine = Engine(model, tokenizer, name="tiny", slots=2, device="cpu", context_length=400, prefix_cache=0.1)
    with run(Service(engine, ServeConfig(port=0, grace=1.0), template)) as running:
        yield running


def test_an_answer_becomes_a_call_that_the_next_request_sends_back(calling: Running):
    client = calling.client()
    asked = {"model": "tiny", "messages": ASK, "tools": [TOOL], "temperature": 0, "max_tokens": 120}
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": "ü"})

    chunks = list(client.chat.completions.create(**asked, stream=True))
    [streamed] = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert streamed.function.arguments == call.function.arguments
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    reply = calling.post("/v1/chat/completions", messages=[*ASK, said, result], tools=[TOOL], max_tokens=1)
    assert reply.status == 200, reply.body
    expected = '[{"name": "add", "parameters": {"type": "object"}}]u:1;a:({"a": 1, "b": "ü"});t:2;a:'
    assert reply.json["usage"]["prompt_tokens"] == len(expected.encode())


def test_without_tools_the_same_text_stays_text(calling: Running):
    tokens = ChatTemplate(TEMPLATE, ByteTokenizer()).encode(ASK, [TOOL])
    plain = calling.post(prompt=tokens, temperature=0, max_tokens=120).json["choices"][0]
    assert plain["text"] == CALL
    for unused in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        reply = calling.post("/v1/chat/completions", messages=ASK, temperature=0, max_tokens=3, **unused).json
        assert reply["usage"]["prompt_tokens"] == len("u:1;a:")
        assert "tool_calls" not in reply["choices"][0]["message"]
