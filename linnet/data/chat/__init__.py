"""Conversations for fine-tuning: lines of JSON, their tokens with the assistant's turns marked, and packed rows.

A line has `messages`, a list of {role, content, ...} as OpenAI's API has it, with `tools` if there are any; or `prompt`
and `completion`, two texts. The model's chat template makes tokens of it. Targets are the tokens of the assistant's
turns alone, each with the token that ends it; a turn with `weight: 0` is context, as in OpenAI's files for fine-tuning.

Rows are packed first-fit, in an order that is a function of the seed, and hold whole conversations: each starts with a
new state (`linnet.data.loader.flatten_documents`). A conversation that is longer than a row loses its last turns. The
tokens behind its last target are left out, since they change no loss.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor

from linnet.config import Config, ConfigError, checking, digest, gather, refuse, shown
from linnet.data.chat.template import ChatTemplate
from linnet.data.loader import IGNORED
from linnet.data.order import shuffled
from linnet.data.records import REPORTED, UNREADABLE, BadRow, damage, read_rows
from linnet.data.sources import find_files, fingerprints
from linnet.data.tokenizer import Tokenizer, check_utf8

OPEN = 256  # rows in which first-fit looks for room
COUNTS = ("conversations", "held_out", "shortened", "left_out", "copies_left_out")
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of an answer's reasoning; transformers takes them too
TURNS = ("first", "second", "later")  # assistant's turns whose losses are told apart
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatConfig(Config):
    """The conversations that a model is fine-tuned on.

    Attributes:
        source: JSONL files, folders and globs of them; each line has `messages`, or `prompt` and `completion`.
        validation: held-out conversations, as `source`. Copies of them are left out of training. If empty,
            `validation_fraction` of `source` is held out.
        validation_fraction: share of the conversations to hold out.
        template: file of a chat template, in Jinja; null takes that of `init_from`.
        per_answer: each answer is a conversation of its own, with the turns before it as a server shows them. For
            templates that change earlier turns, as Qwen3's; a long conversation takes as many more tokens.
        packing: several conversations share a row, and each starts with a new state (`reset`).
        seed: seed of the choice of held-out conversations. The order of training has its own seed.
    """

    source: list[str]
    validation: list[str] = []
    validation_fraction: float = Field(0.05, gt=0, lt=1)
    template: str | None = None
    per_answer: bool = False
    packing: Literal["reset"] = "reset"
    seed: int = Field(0, ge=0, lt=1 << 63)

    @field_validator("source", "validation", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


@dataclass(frozen=True)
class Chat:
    """One conversation as tokens.

    Attributes:
        tokens: int32 [n].
        turns: int8 [n], 0 for tokens that are not targets, else the number of the assistant's turn, from 1; the last
            name of `TURNS` stands for all further turns.
        ends: where the assistant's turns end.
    """

    tokens: np.ndarray
    turns: np.ndarray
    ends: tuple[int, ...]

    def parts(self) -> Iterator[tuple[bool, np.ndarray]]:
        """Yields whether tokens are targets, and these tokens, of each part of the conversation."""
        borders = np.flatnonzero(np.diff(self.turns > 0)) + 1
        for tokens, turns in zip(np.split(self.tokens, borders), np.split(self.turns, borders), strict=True):
            yield bool(turns[0]), tokens

    def answers(self) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yields the number of each assistant's turn (as `turns`), the tokens before it, and its own.

        The first token of a conversation follows none and is not a target, as in a row.
        """
        borders = [0, *(np.flatnonzero(np.diff(self.turns)) + 1).tolist(), len(self.turns)]
        for start, end in itertools.pairwise(borders):
            if self.turns[start] and end > max(start, 1):
                first = max(start, 1)
                yield int(self.turns[start]), self.tokens[:first].tolist(), self.tokens[first:end].tolist()

    def cut(self, length: int) -> "Chat | None":
        """Returns the turns that fit into a row, up to the last target; None if the assistant's first does not fit."""
        ends = [end for end in self.ends if end <= length + 1]  # the last token of a row is a target alone
        return Chat(self.tokens[: ends[-1]], self.turns[: ends[-1]], tuple(ends)) if ends else None


def read_messages(row: Mapping[str, Any]) -> tuple[list[dict], list[dict]]:
    """Returns the messages and the tools of a line.

    Raises:
        ConfigError: the line holds no conversation that a model can learn from.
    """
    messages, keys = row.get("messages"), ["prompt", "completion"]
    if messages is None and set(keys) <= row.keys():  # tables of both kinds have null for the keys of the other
        messages = [{"role": role, "content": row[key]} for role, key in zip(("user", "assistant"), keys, strict=True)]
    elif not isinstance(messages, list) or not messages:
        have = f"{shown(messages)} is not a list" if "messages" in row else f"is missing (keys: {', '.join(row)})"
        raise ConfigError([f"messages: {have}; write messages: [{{role, content}}, ...], or prompt and completion"])
    else:
        keys = [f"messages.{place}" for place in range(len(messages))]
    tools = row.get("tools") or []
    with checking("messages") as problems:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            problems.append(f"tools: {shown(tools)} is not a list of tools; write them as OpenAI's API has them")
        for message, key in zip(messages, keys, strict=True):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                problems.append(f"{key}: {shown(message)} is not a message; write {{role, content}}")
        roles = {} if problems else dict.fromkeys(message["role"] for message in messages)
        if roles and "assistant" not in roles:
            problems.append(f"messages: have no turn of role 'assistant' (roles: {', '.join(roles)}); add an answer")
        elif roles and not any(message["role"] == "assistant" and message.get("weight") != 0 for message in messages):
            problems.append("messages: every answer has weight: 0; leave the line out, or give one weight: 1")
    return [_message(message, key) for message, key in zip(messages, keys, strict=True)], tools


def _message(message: dict, key: str) -> dict:
    """Returns a message as a server gives it to the template. Raises ConfigError if it says nothing."""
    where = f"{key}.content" if key.startswith("messages") else key
    turn = {name: value for name, value in message.items() if value is not None and value != []}
    answers, calls = message["role"] == "assistant", turn.get("tool_calls")
    if (weight := turn.get("weight", 1)) not in (0, 1) or "weight" in turn and not answers:
        fix = "use 0 or 1, in turns of role 'assistant'"
        raise ConfigError([f"{key}.weight: {shown(weight)} of role {message['role']!r} is not a weight; {fix}"])
    if turn.get("function_call"):
        raise ConfigError([f"{key}.function_call: {shown(turn['function_call'])} is not supported; write tool_calls"])
    if calls and answers:
        turn.setdefault("content", "")
    texts: dict[str, Any] = {where: turn.get("content", message.get("content"))}
    if answers and (name := next((name for name in REASONING if name in turn), None)):
        texts[f"{key}.{name}"] = reasoning = turn[name]
        turn = {"thinking": reasoning, **turn, "reasoning_content": reasoning}
    for at, text in texts.items():
        if not isinstance(text, str):
            raise ConfigError([f"{at}: {shown(text)} is not text; give text"])
        try:
            check_utf8(text)
        except ValueError as error:
            raise ConfigError([f"{at}: {error}"]) from None
    if answers and not texts[where].strip() and not calls:
        raise ConfigError([f"{where}: {texts[where]!r} is an empty answer; give it a text, or leave the turn out"])
    try:
        return turn | ({"tool_calls": [_call(call) for call in calls]} if calls else {})
    except (ValueError, KeyError, TypeError, RecursionError):
        fix = "write [{type: function, function: {name, arguments}}], with arguments that are a JSON object"
        raise ConfigError([f"{key}.tool_calls: {shown(calls)} are not calls; {fix}"]) from None


def _call(call: dict) -> dict:
    """Returns a call with its arguments as an object, as templates expect them."""
    function = call["function"]
    arguments = function["arguments"]
    arguments = dict(json.loads(arguments) if isinstance(arguments, str) else arguments)
    return call | {"function": function | {"name": str(function["name"]), "arguments": arguments}}


def encode_chat(messages: list[dict], tools: list[dict], template: ChatTemplate) -> Chat:
    """Returns the tokens of a conversation. Raises ConfigError as `ChatTemplate.encode_turns`."""
    if tools and not template.knows_tools:
        raise ConfigError(["tools: the chat template shows the model no tools; leave them out"], "messages")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    numbers = {index: number for number, index in enumerate(answers, 1) if messages[index].get("weight", 1)}
    plain = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    tokens, spans = template.encode_turns(plain, tools, list(numbers))
    turns = np.zeros(len(tokens), dtype=np.int8)
    for number, (start, end) in zip(numbers.values(), spans, strict=True):
        turns[start:end] = min(number, len(TURNS))
    return Chat(np.array(tokens, dtype=np.int32), turns, tuple(end for _, end in spans))


def split_answers(messages: list[dict]) -> Iterator[list[dict]]:
    """Yields, for each answer that is a target, the messages up to it, of which it is the only target."""
    for end, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("weight", 1):
            before = [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in messages[:end]]
            yield [*before, message]


def read_chats(names: list[str], key: str, template: ChatTemplate, per_answer: bool = False) -> list[list[Chat]]:
    """Returns the conversations of files, folders and globs, with `per_answer` each as one `Chat` per answer.

    Args:
        key: the key of the files, for messages.

    Raises:
        ConfigError: lists the files that cannot be used, and the first bad lines of each.
    """
    problems: list[str] = []
    chats: list[list[Chat]] = []
    for file in find_files(names, key, problems, []):
        wrong: list[str] = []
        if file.kind != "jsonl":  # in a folder, other files may stand beside the conversations
            fix = "write one conversation per line, and end its name in .jsonl"
            problems += [f"{key}: {file.path} is not JSONL; {fix}"] if file.named else []
            continue
        try:
            for number, row, _ in read_rows(file):
                if isinstance(row, BadRow):
                    wrong.append(f"line {number + 1}: {row}")
                    continue
                bad: list[str] = []
                with gather(bad):
                    messages, tools = read_messages(row)
                    parts = split_answers(messages) if per_answer else [messages]
                    chats.append([encode_chat(part, tools, template) for part in parts])
                wrong += [f"line {number + 1}: {line}" for line in bad]
        except UNREADABLE as error:
            problems.append(f"{file.path}: {damage(error)}")
        problems += [f"{file.path}: {line}" for line in wrong[:REPORTED]]
        problems += [f"{file.path}: and {more} more bad lines"] if (more := len(wrong) - REPORTED) > 0 else []
    if not problems and not chats:
        problems.append(f"{key}: has no conversations; give files with at least one line")
    refuse(problems, "data")
    return chats


class ChatRows:
    """Conversations packed into rows, for `linnet.data.labelled`.

    Args:
        chats: conversations of at most length + 1 tokens. seed: of the order in which they are packed.
        filler: the token after the last conversation of a row.

    Attributes:
        packed: numbers of the conversations of each row.
        documents: number of conversations.
        turns: the numbers of turns that have targets (`Chat.turns`); a number has none if all its turns have weight 0.
    """

    def __init__(self, chats: Sequence[Chat], length: int, seed: int, filler: int):
        self.chats, self.length, self._filler = chats, length, filler
        self.packed: list[list[int]] = []
        free: list[int] = []
        for number in shuffled(np.arange(len(chats)), len(chats), seed).tolist() if chats else ():
            size = len(chats[number].tokens) - 1
            near = range(max(0, len(free) - OPEN), len(free))
            if (row := next((row for row in near if free[row] >= size), None)) is None:
                row = len(free)
                free.append(length)
                self.packed.append([])
            free[row] -= size
            self.packed[row].append(number)
        self._most = 1 << (max(map(len, self.packed), default=1) - 1).bit_length()  # few shapes, as `mark_documents`
        self.documents = len(chats)
        self.turns = sorted({int(number) for chat in chats for number in np.unique(chat.turns)} - {0})

    def __len__(self) -> int:
        return len(self.packed)

    def rows(self, numbers: np.ndarray) -> tuple[Tensor, ...]:
        """Returns tokens and targets, int64 [b, length]; starts of conversations, int32 [b, N], as `mark_documents`;
        and the turn of each target, int8 [b, length]."""
        shape = (len(numbers), self.length)
        tokens, targets = np.full(shape, self._filler, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        turns, starts = np.zeros(shape, dtype=np.int8), np.full((len(numbers), self._most), self.length, dtype=np.int32)
        for row, number in enumerate(numbers.tolist()):
            at = 0
            for place, chat in enumerate(self.chats[index] for index in self.packed[number]):
                end = at + len(chat.tokens) - 1
                starts[row, place], tokens[row, at:end], turns[row, at:end] = at, chat.tokens[:-1], chat.turns[1:]
                targets[row, at:end] = np.where(chat.turns[1:] > 0, chat.tokens[1:], IGNORED)
                at = end
        return tuple(map(torch.from_numpy, (tokens, targets, starts, turns)))


@dataclass(frozen=True)
class Chats:
    """Prepared conversations.

    Attributes:
        digest: of the tokens and targets of both splits.
        counts: of `COUNTS`: conversations to train on and held out; those of both that lose their last turns, and those
            left out, because the first answer does not fit into a row; copies of held-out ones that are left out.
        needed: tokens per row with which no conversation is left out, and with which none is shortened either.
    """

    train: ChatRows
    validation: ChatRows
    template: ChatTemplate
    digest: str
    counts: dict[str, int]
    needed: tuple[int, int]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.template.tokenizer


def prepare_chats(config: ChatConfig, template: ChatTemplate, length: int, seed: int) -> Chats:
    """Returns the rows of both splits.

    Args:
        length: tokens per row. seed: of the order in which conversations are packed.

    Raises:
        ConfigError: lists the files and lines that cannot be used; or a split would be empty.
    """
    trained: list[list[Chat]] = []
    scored: list[list[Chat]] = []
    with checking("data") as problems:
        with gather(problems):
            trained = read_chats(config.source, "data.source", template, config.per_answer)
        if config.validation:
            with gather(problems):
                scored = read_chats(config.validation, "data.validation", template, config.per_answer)
    if not config.validation:
        order = shuffled(np.arange(len(trained)), len(trained), config.seed).tolist()
        out = set(order[: max(1, round(config.validation_fraction * len(trained)))])
        scored, trained = (
            [trained[index] for index in sorted(out)],
            [chats for index, chats in enumerate(trained) if index not in out],
        )
    train, held = ([chat for chats in split for chat in chats] for split in (trained, scored))
    known = {chat.tokens.tobytes() for chat in held}
    counts = dict.fromkeys(COUNTS, 0) | {"copies_left_out": sum(chat.tokens.tobytes() in known for chat in train)}
    splits = {"conversations": [chat for chat in train if chat.tokens.tobytes() not in known], "held_out": held}
    kept = [chat for chats in splits.values() for chat in chats]
    first, last = (max((chat.ends[turn] - 1 for chat in kept), default=0) for turn in (0, -1))
    with checking("data") as problems:
        short_of: dict[str, int] = {}  # by key: seq_len that the shortest conversation of each split needs
        for name, chats in splits.items():
            pairs = [(chat, chat.cut(length)) for chat in chats]
            splits[name] = [short for _, short in pairs if short is not None]
            counts[name] = len(splits[name])
            counts["left_out"] += len(chats) - counts[name]
            counts["shortened"] += sum(short is not None and len(short.ends) < len(chat.ends) for chat, short in pairs)
            key = "data.validation" if name == "held_out" and config.validation else "data.source"
            if not chats:
                problems.append(f"{key}: no conversation is left to train on; give more, or others in data.validation")
            elif not splits[name]:
                least = min(chat.ends[0] for chat in chats) - 1
                short_of[key] = max(least, short_of.get(key, 0))
        for key, least in short_of.items():
            problems.append(f"{key}: no answer fits into seq_len: {length}; set seq_len={least} or more")
    rows = [ChatRows(chats, length, seed, template.tokenizer.end_of_document) for chats in splits.values()]
    content = [[chat.tokens.tobytes().hex() + chat.turns.tobytes().hex() for chat in part.chats] for part in rows]
    return Chats(rows[0], rows[1], template, digest([content, length]), counts, (first, last))


def content(config: ChatConfig, cache: Path | None = None) -> dict[str, str]:
    """Returns digests of the content of the files of conversations, independent of their location.

    Raises:
        ConfigError: a file does not exist. OSError: a file cannot be read.
    """
    problems: list[str] = []
    named = {key: names for key in ("source", "validation") if (names := getattr(config, key))}
    files = {key: find_files(names, key, problems, []) for key, names in named.items()}
    refuse(problems, "data")
    return {key: digest(fingerprints(listed, cache)) for key, listed in files.items()}
