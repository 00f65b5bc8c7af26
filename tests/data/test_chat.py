"""Conversations: which tokens are targets, how rows hold them, and what is refused."""

import json
import re

import numpy as np
import pytest
from chats import CHATML, MARKED, sentencepiece, special_tokenizer, turns, write_chats

from linnet.config import ConfigError
from linnet.data import ByteTokenizer
from linnet.data.chat import ChatConfig, ChatRows, encode_chat, prepare_chats, read_messages
from linnet.data.chat.template import ChatTemplate, _Hidden

TALK = [{"role": "system", "content": "Be brief"}, *turns("2+2?", "4", "<|im_end|> 3+3?", " 6<|im_end|> ", "?")]


@pytest.fixture(scope="module")
def tokenizer():
    return special_tokenizer()


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate(CHATML, tokenizer)


def spelled(tokenizer, *parts: str | int) -> list[int]:
    return [t for part in parts for t in ([part] if isinstance(part, int) else tokenizer.encode(part).tolist())]


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_targets_are_the_answers_and_the_token_that_ends_each(source, tokenizer):
    template = ChatTemplate(source, tokenizer)
    chat = encode_chat(TALK, [], template)
    answers = [spelled(tokenizer, "4", 259), spelled(tokenizer, "6<|im_end|>", 259)]
    assert [chat.tokens[chat.turns == number].tolist() for number in (1, 2)] == answers
    assert [tuple(chat.tokens[end - 1 : end]) for end in chat.ends] == [(259,), (259,)]
    first = np.flatnonzero(chat.turns == 1)[0]
    assert chat.tokens[:first].tolist() == template.encode(TALK[:2]), "as a server's prompt"
    second = np.flatnonzero(chat.turns == 2)[0]
    assert chat.tokens[:second].tolist() == template.encode(TALK[:4])


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_an_answer_of_weight_0_is_context(source, tokenizer):
    template = ChatTemplate(source, tokenizer)
    first = [turn | ({"weight": 0} if place == 2 else {}) for place, turn in enumerate(TALK)]
    both, chat = encode_chat(TALK, [], template), encode_chat(read_messages({"messages": first})[0], [], template)
    assert chat.tokens.tolist() == both.tokens.tolist()
    assert chat.turns.tolist() == np.where(both.turns == 1, 0, both.turns).tolist() and chat.ends == both.ends[1:]


def test_null_stands_for_the_keys_of_the_other_kind_of_line():
    texts, turns = {"prompt": "a", "completion": "b"}, [{"role": "user", "content": "a"}]
    turns += [{"role": "assistant", "content": "b"}]
    rows = (texts, texts | {"messages": None}, {"messages": turns}, {"messages": turns, "prompt": None})
    assert all(read_messages(row) == (turns, []) for row in rows)


def test_a_token_over_the_border_is_cut_as_a_server_cuts_it():
    tokenizer = special_tokenizer((("Ċ", "Ċ"),))  # two line ends are one token
    template = ChatTemplate("{% for m in messages %}{{ m.role + '\\n' + m.content + '\\n' }}{% endfor %}"
                            "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}", tokenizer)  # fmt: skip
    talk = turns("a", "\nb")
    chat = encode_chat(talk, [], template)
    prompt = template.encode(talk[:1])
    assert chat.tokens[: len(prompt)].tolist() == prompt and not chat.turns[: len(prompt)].any()
    assert tokenizer.decode(chat.tokens[chat.turns == 1]) == "\nb\n"


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_twice_as_many_turns_take_twice_as_long_to_encode(source, tokenizer, monkeypatch):
    """The whole conversation again for each turn took 53 s for 800 turns of 200 characters."""
    template, read = ChatTemplate(source, tokenizer), []
    tokens = template._tokens
    monkeypatch.setattr(template, "_tokens", lambda text: read.append(len(text)) or tokens(text))
    counts = []
    for number in (20, 40):
        read.clear()
        ids, spans = template.encode_turns(talk := turns(*["hi, and so on"] * number))
        counts.append(sum(read))
        assert len(spans) == number // 2
        assert ids == template._encode(template._render(talk, False), _Hidden(template._spelled))
    assert counts[1] < 2.2 * counts[0]


@pytest.mark.parametrize("kind", ["normalizer", "first", "always", "never"])
def test_a_text_that_is_encoded_in_parts_gets_no_spaces_between_them(kind):
    """At a token over the border (" 4"), and where a message spells a special token."""
    tokenizer = sentencepiece(kind)
    template = ChatTemplate("{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content }}"
                            "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
                            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}", tokenizer)  # fmt: skip
    names = {number: word for word, number in json.loads(tokenizer.to_json())["model"]["vocab"].items()}
    chat = encode_chat(turns("hi <s>b", "4b", "hi", "b</s>b"), [], template)
    words = [names[token] for token in chat.tokens.tolist()]
    space = " " * (kind in ("normalizer", "always"))  # which begin anew behind a special token
    expected = f"<s>{space}user: hi <s>b\nassistant: 4b</s>{space}user: hi\nassistant: b</s>b</s>"
    assert "".join(words).replace("▁", " ").replace("<0x0A>", "\n") == expected
    assert words.count("<s>") == 1 and words.count("</s>") == 2
    answers = ["".join(names[token] for token in chat.tokens[chat.turns == turn].tolist()) for turn in (1, 2)]
    assert answers == ["4b</s>", "b</s>b</s>"]


CHANGES = """{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' and not loop.last %}...
{%- else %}{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


@pytest.mark.parametrize(
    "source, talk, message",
    [
        (CHANGES, turns("a", "b", "c", "d"), r"messages\.3: .*changes earlier turns.*data\.per_answer=true"),
        (CHATML.replace("assistant\\n", "model\\n"), turns("a", "b"), r"messages\.1: .*answer"),
        (MARKED.replace("== 'assistant'", "== 'model'"), turns("a", "b"), "marks 0 turns of 1"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML, TALK,
         "no system"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_split_is_refused(source, talk, message, tokenizer, tmp_path):
    file = write_chats(tmp_path / "c.jsonl", turns("a", "b"), talk)
    with pytest.raises(ConfigError, match=message) as caught:
        prepare_chats(ChatConfig(source=str(file)), ChatTemplate(source, tokenizer), 64, 0)
    assert "line 2" in str(caught.value)


def test_each_answer_is_a_conversation_with_the_prompt_of_a_server(tokenizer, tmp_path):
    """With a template that changes earlier turns, and one that marks answers; an answer of weight 0 is not a target."""
    talk = turns("a", "b", "c", "d", "e", "f")
    talk[3] |= {"weight": 0}
    for source in (CHANGES, MARKED):
        template = ChatTemplate(source, tokenizer)
        files = {name: str(write_chats(tmp_path / f"{name}.jsonl", row)) for name, row in (("a", talk), ("b", TALK))}
        config = ChatConfig(source=files["a"], validation=files["b"], per_answer=True)
        chats = prepare_chats(config, template, 256, 0).train.chats
        assert len(chats) == 2
        for chat, place in zip(chats, (1, 5), strict=True):
            prompt = template.encode([{name: turn[name] for name in ("role", "content")} for turn in talk[:place]])
            first = np.flatnonzero(chat.turns)[0]
            assert chat.tokens[:first].tolist() == prompt and (chat.turns[first:] == (1 + place // 2)).all()
            assert tokenizer.decode(chat.tokens[first:]).startswith(talk[place]["content"])


def test_the_answers_of_a_held_out_conversation_are_held_out_together(template, tmp_path):
    file = str(write_chats(tmp_path / "c.jsonl", *(turns(f"q{n}", "a", f"r{n}", "b") for n in range(10))))
    chats = prepare_chats(ChatConfig(source=file, validation_fraction=0.4, per_answer=True), template, 64, 0)
    held, train = ([chat.tokens[:20].tobytes() for chat in part.chats] for part in (chats.validation, chats.train))
    assert (len(held), len(train)) == (8, 12) and not set(held) & set(train)


def test_answers_of_weight_0_may_be_changed_later(tokenizer):
    template = ChatTemplate(CHANGES, tokenizer)
    talk = turns("a", "b", "c", "d")
    talk[1] |= {"weight": 0}
    chat = encode_chat(talk, [], template)
    assert tokenizer.decode(chat.tokens) == "user: a\nassistant: ...\nuser: c\nassistant: d\n"
    assert tokenizer.decode(chat.tokens[chat.turns == 2]) == "d\n" and not (chat.turns == 1).any()


def test_a_template_without_a_token_that_ends_an_answer_has_a_note(tokenizer):
    """A model of such a template answers without end, as one with ChatML and a tokenizer that lacks its tokens."""
    lacking = ChatTemplate(CHATML.replace("im_end", "end_of_turn"), tokenizer)
    assert not lacking.turn_ends and "'<|end_of_turn|>'" in lacking.note and "eos_token" in lacking.note
    assert "writes none" in ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", tokenizer).note
    for source in (CHATML, MARKED, CHATML.replace("'<|im_end|>'", "eos_token"), CHATML.replace("<|im", " <|im")):
        assert ChatTemplate(source, tokenizer).note == ""


DROPS = """{% for m in messages %}{% if loop.first or m.role != 'system' %}{{ m.role + ': ' + m.content + '\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def test_a_turn_that_the_template_leaves_out_is_refused(tokenizer):
    template = ChatTemplate(DROPS, tokenizer)
    later = [*TALK[1:3], {"role": "system", "content": "Be loud"}, *TALK[3:5]]
    assert encode_chat(TALK, [], template).ends and template.encode(TALK[:2])
    for refused in (lambda: encode_chat(later, [], template), lambda: template.encode(later[:4])):
        with pytest.raises(ConfigError, match=r"messages\.2: .*'system'.*'user'"):
            refused()
    later[2] = {"role": "system", "content": " "}  # nothing is lost
    assert (
        encode_chat(later, [], template).tokens.tolist()
        == encode_chat(later[:2] + later[3:], [], template).tokens.tolist()
    )


def test_a_template_with_the_date_makes_the_same_conversations_on_any_day(tokenizer):
    for source in (CHATML, MARKED):
        template = ChatTemplate("{{ strftime_now('%d %b %Y, %f') }}" + source, tokenizer)
        dated = [tokenizer.decode(encode_chat(TALK, [], template).tokens) for _ in range(2)]
        assert dated[0] == dated[1] and "26 Jul 2024" in dated[0]
        assert template.encode(TALK[:2]) != template.encode(TALK[:2])  # the time of now, to the microsecond


def test_one_answer_needs_no_template_that_keeps_earlier_turns(tokenizer):
    chat = encode_chat(turns("a", "b"), [], ChatTemplate(CHANGES, ByteTokenizer()))
    assert bytes(chat.tokens[chat.turns == 1].tolist()) == b"b\n"


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BAD = {
    '{"messages": [': "JSON",
    "[]": "object",
    "{}": r"messages: is missing.*prompt and completion",
    '{"text": "x"}': r"messages: is missing \(keys: text\)",
    '{"messages": []}': r"messages: \[\]",
    '{"messages": "x"}': "messages: 'x'",
    '{"messages": ["x"]}': r"messages\.0: 'x'",
    '{"messages": [{"from": "human", "value": "x"}]}': r"messages\.0: \{'from': 'human'",
    '{"messages": [{"role": "user", "content": "x"}]}': r"assistant.*\(roles: user\)",
    '{"messages": [{"role": "user", "content": [3]}, {"role": "assistant", "content": "x"}]}': "0.content: .*not text",
    '{"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}': r"messages\.0\.content: None",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": " "}]}': "1.content: ' '",
    '{"messages": [{"role": "assistant", "content": null, "tool_calls": ["x"]}]}': r"messages\.0\.tool_calls: \['x'\]",
    '{"messages": [{"role": "assistant", "content": "x", "function_call": {"a": 1}}]}': r"0\.function_call: .*calls",
    '{"messages": [{"role": "user", "content": "x", "y": ' + "[" * 900 + "]" * 900 + '}, {"role": "assistant", '
    '"content": "x"}]}': "recursion",
    '{"messages": [{"role": "assistant", "content": "x", "reasoning": 3}]}': "0.reasoning: 3 is not text",
    '{"messages": [{"role": "assistant", "content": "x", "thinking": "\\ud83d"}]}': "0.thinking: .*surrogate",
    '{"messages": [{"role": "assistant", "content": "x", "reasoning": "y"}]}': "0.reasoning_content: .*no reasoning",
    '{"prompt": "x\\ud83d", "completion": "x"}': "prompt: character 1 .*surrogate",
    '{"prompt": "x", "completion": ""}': "completion: .*empty",
    '{"prompt": 3, "completion": "x"}': "prompt: 3 is not text",
    '{"prompt": "x"}': r"messages: is missing \(keys: prompt\)",
    '{"messages": [{"role": "assistant", "content": "x"}], "tools": "x"}': "tools: 'x'",
    '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}': "messages.0.weight: 0.5",
    '{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}': "weight: 0",
    '{"messages": [{"role": "user", "content": "x", "weight": 1}, {"role": "assistant", "content": "x"}]}': "0.weight",
    '{"messages": [{"role": "assistant", "content": "x"}], "tools": [{}]}': "tools: .*no tools",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_are_named(line, template, tmp_path):
    file = tmp_path / "c.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=BAD[line]) as caught:
        prepare_chats(ChatConfig(source=str(file)), template, 64, 0)
    assert f"{file}: line 2: " in str(caught.value) and len(caught.value.problems) == 1


def test_bad_files_are_named(template, tmp_path):
    for name, message in {
        "no.jsonl": "no.jsonl",
        "x.txt": "x.txt is not JSONL",
        "empty.jsonl": "empty|no conv",
    }.items():
        if name != "no.jsonl":
            (tmp_path / name).write_text("x" if name == "x.txt" else "\n")
        with pytest.raises(ConfigError, match=f"data.source: .*({message})"):
            prepare_chats(ChatConfig(source=str(tmp_path / name)), template, 64, 0)
    many = tmp_path / "many.jsonl"
    many.write_text("x\n" * 9)
    with pytest.raises(ConfigError, match="and 4 more") as caught:
        prepare_chats(ChatConfig(source=str(many)), template, 64, 0)
    assert len(caught.value.problems) == 6


def test_calls_are_as_servers_give_them():
    talk = [
        {"role": "user", "content": "x", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    messages, tools = read_messages({"messages": talk, "tools": None})
    assert messages[0] == {"role": "user", "content": "x"} and tools == []
    assert messages[1]["content"] == "" and messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert read_messages({"prompt": "a", "completion": "b"})[0] == turns("a", "b")


def test_calls_that_the_template_leaves_out_are_refused(template):
    talk, _ = read_messages(
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    )
    for encode in (template.encode, template.encode_turns):
        with pytest.raises(ConfigError, match=r"messages\.1\.tool_calls"):
            encode(talk)
    shows = template.source.replace("message['content'] | trim", "message['content'] ~ (message.tool_calls or '')")
    assert shows != template.source
    assert ChatTemplate(shows, template.tokenizer).encode_turns(talk)[1]


TOOLS = [{"type": "function", "function": {"name": "zählt<s>", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    "shown",
    ["tools | tojson(separators=(',', ':'))", "tools | tojson(ensure_ascii=True)", "tools | tojson(False, 4)",
     "tools | tojson(sort_keys=True)", "tools | tojson"],
)  # fmt: skip
def test_json_in_a_template_is_that_of_transformers(shown, tokenizer):
    rendering = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs the extra hf")
    source = f"{{{{ {shown} }}}}{CHATML}"
    template = ChatTemplate(source, tokenizer)
    [[text], _] = rendering.render_jinja_template([TALK[:5]], tools=TOOLS, chat_template=source, bos_token="<s>")
    assert template.knows_tools and template.decode(encode_chat(TALK[:5], TOOLS, template).tokens) == text


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_is_shown_under_each_of_its_names(key, read, tokenizer):
    rendering = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs the extra hf")
    source = CHATML.replace("+ message['content']", f"+ (message.{read} or '') ~ message['content']")
    talk, _ = read_messages({"messages": [{"role": "user", "content": "x"}, {**TALK[2], key: "so "}]})
    template = ChatTemplate(source, tokenizer)
    chat = encode_chat(talk, [], template)
    [[text], _] = rendering.render_jinja_template(
        [[{"role": "user", "content": "x"}, {**TALK[2], key: "so "}]], chat_template=source, bos_token="<s>"
    )
    assert template.decode(chat.tokens) == text and "so " in tokenizer.decode(chat.tokens[chat.turns == 1])


def test_rows_hold_whole_conversations_once(template):
    chats = [encode_chat(turns(f"{i}" * (i % 7 + 1), "x" * (i % 5 + 1)), [], template) for i in range(30)]
    rows = ChatRows(chats, 120, seed=3, filler=256)
    tokens, targets, starts, turn = rows.rows(np.arange(len(rows)))
    assert sorted(number for packed in rows.packed for number in packed) == list(range(30))
    free = [120 - sum(len(chats[number].tokens) - 1 for number in packed) for packed in rows.packed]
    assert len(rows) < 30 and all(space < min(len(chats[n].tokens) for n in rows.packed[-1]) for space in free[:-1])
    found = []
    for row, packed in enumerate(rows.packed):
        places = [*starts[row][starts[row] < 120].tolist(), 120]
        for number, begin, end in zip(packed, places[:-1], places[1:], strict=True):
            size = len(chats[number].tokens) - 1
            assert tokens[row, begin : begin + size].tolist() == chats[number].tokens[:-1].tolist()
            assert (tokens[row, begin + size : end] == 256).all()
            wanted = np.where(chats[number].turns[1:] > 0, chats[number].tokens[1:], -100)
            assert targets[row, begin : begin + size].tolist() == wanted.tolist()
            found.append(number)
    assert sorted(found) == list(range(30)) and torch_equal(targets != -100, turn > 0)
    assert starts.shape[1] & (starts.shape[1] - 1) == 0
    assert ChatRows(chats, 120, 3, 256).packed == rows.packed != ChatRows(chats, 120, 4, 256).packed


def torch_equal(first, second) -> bool:
    return bool((first == second).all())


def test_truncation_keeps_whole_turns(template):
    chat = encode_chat(turns("a", "b", "c", "d", "e", "f"), [], template)
    for length in range(len(chat.tokens)):
        fits = [end for end in chat.ends if end <= length + 1]
        short = chat.cut(length)
        assert (short is None) == (not fits)
        if short is not None:
            assert len(short.tokens) == fits[-1] and short.turns[-1] and short.ends == tuple(fits)
    assert chat.turns.max() == 3 and len(chat.cut(10_000).tokens) == chat.ends[-1]


def test_long_ones_are_counted_and_copies_left_out(template, tmp_path):
    rows = [turns("a", "b"), turns("a", "b"), turns("a", "b", "c" * 60, "d"), turns("a" * 90, "b"), turns("q", "r")]
    held = write_chats(tmp_path / "held.jsonl", turns("q", "r"))
    config = ChatConfig(source=str(write_chats(tmp_path / "c.jsonl", *rows)), validation=str(held))
    chats = prepare_chats(config, template, 64, 0)
    counts = {"conversations": 3, "held_out": 1, "shortened": 1, "left_out": 1, "copies_left_out": 1}
    assert chats.counts == counts
    for place, key in enumerate(("left_out", "shortened")):
        assert prepare_chats(config, template, chats.needed[place], 0).counts[key] == 0
        short = prepare_chats(config, template, chats.needed[place] - 1, 0).counts
        assert short["left_out"] + short["shortened"] == 1
    with pytest.raises(ConfigError, match=r"data\.source: .*seq_len: 8; set seq_len=\d+") as caught:
        prepare_chats(config, template, 8, 0)
    least = int(re.search(r"data\.source.*seq_len=(\d+)", str(caught.value))[1])
    assert prepare_chats(config, template, least, 0).counts["conversations"] >= 1
    split = ChatConfig(source=str(write_chats(tmp_path / "d.jsonl", turns("a", "b"), turns("a" * 20, "b"))))
    with pytest.raises(ConfigError) as caught:
        prepare_chats(split, template, 8, 0)
    assert len(caught.value.problems) == 1
    prepare_chats(split, template, int(re.search(r"seq_len=(\d+)", str(caught.value))[1]), 0)


def test_held_out_share_is_a_function_of_the_seed(template, tmp_path):
    file = str(write_chats(tmp_path / "c.jsonl", *(turns(f"{i}", "x") for i in range(40))))

    def split(**keys):
        chats = prepare_chats(ChatConfig(source=file, validation_fraction=0.1, **keys), template, 64, 0)
        return [[chat.tokens.tolist() for chat in rows.chats] for rows in (chats.train, chats.validation)]

    train, held = split()
    assert (len(train), len(held)) == (36, 4) and not any(chat in train for chat in held)
    assert split() == [train, held] and split(seed=1)[1] != held
    only = str(write_chats(tmp_path / "one.jsonl", turns("a", "b")))
    with pytest.raises(ConfigError, match=r"data\.source: no conversation is left"):
        prepare_chats(ChatConfig(source=only), template, 64, 0)
