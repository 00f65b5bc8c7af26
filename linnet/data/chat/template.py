"""Chat templates: turn a conversation into the tokens of a prompt."""

import itertools
import json
import math
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from linnet.config import ConfigError, load_text
from linnet.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, encode_inside

FILE = "chat_template.jinja"
MOST_BYTES = 1 << 20  # of a template
SECONDS, START_SECONDS = 5.0, 60.0  # for one conversation; for the start of the process, on a busy machine
PAUSE = 60.0  # seconds in which a template that exceeded `SECONDS` is not tried: others would wait as long each time
MARKS = re.compile(r"{%-?\s*generation\b")  # the start of a template's own mark of an assistant's turn
# The date that a template shows in training, as Llama 3's does by default: that of the day would change a run's data.
TRAINED = "2024-07-26"
GIVEN = ("messages", "add_generation_prompt", "tools", "generation_mark", "date")  # variables of every rendering
COMMON_STARTS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]")


def bos_token(tokenizer: Tokenizer) -> str:
    """Returns the token that templates call `bos_token`, "" for none; of a tokenizer that names none, a common one."""
    if tokenizer.bos_token is not None or isinstance(tokenizer, ByteTokenizer):
        return tokenizer.bos_token or ""
    special = special_tokens(tokenizer)
    return next((token for token in COMMON_STARTS if token in special), "")


def special_tokens(tokenizer: Tokenizer | None) -> dict[str, int]:
    """Returns the ids of the tokens that a tokenizer adds to its vocabulary, such as <|im_end|>, by their spelling."""
    if tokenizer is None or isinstance(tokenizer, ByteTokenizer):
        return {}
    return {token["content"]: token["id"] for token in json.loads(tokenizer.to_json())["added_tokens"]}


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers use it, run in a sandbox and in a process of its own.

    Special tokens in the template are tokens. Their spelling in a message stays text, so that a user cannot end their
    turn and continue in another role; so does that of tokens around a turn which are not special. The template sees all
    other text of a message: what it looks for there, such as <think>, and tokens that are not special are tokens.

    Attributes:
        source, tokenizer: the template, and the tokenizer of its texts.
        turn_ends: special tokens that follow an assistant's turn; they end a completion.
        knows_tools: whether the template shows tools to the model.
        options: variables of its own that the template reads, such as `enable_thinking`.
        note: what a person should know who uses the template; "" for nothing.

    Raises:
        ConfigError: the source is not a template, or it fails on a simple conversation.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, where: str = FILE):
        self.source, self.tokenizer, self._inner, self.note = source, tokenizer, None, ""
        self._special: dict[str, int] = {}
        self._anchors: set[str] = set()
        guarded: set[str] = set()
        if not isinstance(tokenizer, ByteTokenizer):
            values = json.loads(tokenizer.to_json())
            values.pop("linnet", None)
            values["post_processor"] = None  # the template itself adds the tokens at the start and end of a text
            self._special = {token["content"]: token["id"] for token in values["added_tokens"]}
            guarded = {token["content"] for token in values["added_tokens"] if token["special"]}
            self._inner = tokenizers.Tokenizer.from_str(json.dumps(values))
            # Those that never take in a character of the text around them, or belong to a longer one with what follows.
            changing = ("lstrip", "rstrip", "single_word", "normalized")
            plain = [token["content"] for token in values["added_tokens"] if not any(token[key] for key in changing)]
            self._anchors = {token for token in plain if sum(other.startswith(token) for other in self._special) == 1}
        self._spelled = _any_of(self._special)
        ends = {number: token for token, number in self._special.items()}
        self._variables = {
            "bos_token": bos_token(tokenizer),
            "eos_token": ends.get(tokenizer.end_of_document, ""),
            "documents": None,
        }
        try:
            self._renderer = _Renderer(source)
            self.turn_ends, self._borders = self._find_turn_ends()
            self.knows_tools = self._finds_tools()
            self.options = [name for name in self._renderer.names if name not in (*GIVEN, *self._variables)]
        except Exception as error:  # a template is a program and can raise any exception
            problem = f"{where}: not a valid chat template ({error}); correct it, or give another"
            raise ConfigError([problem], "chat template") from None
        # Some tokenizers call </think> and <think> special; a template may look for the first alone.
        guarded -= {part for text in self._renderer.sought for part in (text, text.replace("/", ""))}
        self._secluded = _any_of({*guarded, *self._borders, ends.get(tokenizer.end_of_document, "")} - {""})

    def encode(
        self, messages: list[dict], tools: Sequence[dict] = (), options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Returns the tokens of a conversation up to the start of the assistant's answer.

        Args:
            messages: the turns, with `role`, `content` and optionally `name`, `tool_calls`, `tool_call_id`.
            tools: what the model may call, each as OpenAI's API has it.
            options: values of variables in `options`.

        Raises:
            ConfigError: the template refuses this conversation, or the tokenizer refuses its text.
        """
        hidden = _Hidden(self._secluded)
        try:
            self._check_shown(messages, list(tools))
            extra = hidden.hide(dict(options or {}))
            text = self._render(hidden.hide(messages), True, hidden.hide(list(tools)), options=extra)
            return self._encode(text, hidden)
        except Exception as error:
            raise ConfigError([f"messages: do not fit the model's chat template ({error})"], "request") from None

    def encode_turns(
        self, messages: list[dict], tools: Sequence[dict] = (), targets: Collection[int] | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of a whole conversation, and where the assistant's turns are in them.

        A template with `{% generation %}` says itself where they are. Otherwise a turn is what follows the start of
        the answer, up to the special token that ends it. Tokens before a turn are those of `encode`, so that a model is
        trained on the prompts that a server gives it. A template that shows the date shows `TRAINED`, on any day.

        Args:
            messages, tools: as `encode`.
            targets: indices of the assistant's turns to find; None is all. The others are context, as in a server's
                prompt: the template may change them later.

        Returns:
            The tokens, and (start, end) of each of these turns in their order, with the token that ends the turn.

        Raises:
            ConfigError: as `encode`, or the template changes earlier turns, so that it cannot be split.
        """
        hidden = _Hidden(self._secluded)
        try:
            self._check_shown(messages, list(tools))
            answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            if targets is not None:
                answers = [index for index in answers if index in targets]
            arguments = hidden.hide(messages), hidden.hide(list(tools)), hidden
            marked = MARKS.search(self.source) is not None
            pieces = (self._marked if marked else self._compared)(*arguments, answers)
            tokens: list[int] = []
            turns: list[tuple[int, int]] = []
            text, split = "", False
            anchor = fixed = 0  # characters and tokens up to the last special token, which no later text changes
            for answer, piece in pieces:
                if answer and not piece.strip():
                    raise ValueError(f"its text of the assistant's turn {len(turns) + 1} is empty; correct it")
                start, before, text = len(tokens), text, text + piece
                # A token over the border would be known only after the answer: a server never gives it.
                last_part = [] if split else self._encode(text[anchor:], hidden, text[:anchor])
                split = split or last_part[: start - fixed] != tokens[fixed:]
                tokens[start if split else fixed :] = self._encode(piece, hidden, before) if split else last_part
                anchors = [match.end() for match in self._spelled.finditer(text, anchor) if match[0] in self._anchors]
                if anchors and not split:
                    anchor = anchors[-1]
                    fixed = len(tokens) - len(self._encode(text[anchor:], hidden, text[:anchor]))
                if answer:
                    last = {token: place for place, token in enumerate(tokens[start:], start + 1)}
                    ends = [last[token] for token in ([] if marked else self.turn_ends) if token in last]
                    turns.append((start, max(ends, default=len(tokens))))
            return tokens, turns
        except Exception as error:
            raise ConfigError([f"messages: do not fit the model's chat template ({error})"], "messages") from None

    def _marked(
        self, messages: list[dict], tools: list[dict], hidden: "_Hidden", targets: Collection[int]
    ) -> list[tuple[bool, str]]:
        """Returns the parts of a rendering: whether it is a target by the template's marks, and its text."""
        mark = hidden.mark("0")
        parts = self._render(messages, False, tools, mark=mark, date=TRAINED).split(mark)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if len(parts) != 2 * len(answers) + 1:
            marked = f"its {{% generation %}} marks {len(parts) // 2} turns of {len(answers)}"
            raise ValueError(f"{marked}; correct the template")
        pieces: list[tuple[bool, str]] = [(False, "")]
        for number, part in enumerate(parts):
            target = number % 2 == 1 and answers[number // 2] in targets
            if target or pieces[-1][0]:
                pieces.append((target, part))
            else:
                pieces[-1] = (False, pieces[-1][1] + part)
        return pieces

    def _compared(
        self, messages: list[dict], tools: list[dict], hidden: "_Hidden", targets: Collection[int]
    ) -> list[tuple[bool, str]]:
        """Returns the parts as `_marked`, from renderings of the first messages, each of which starts the next one."""
        pieces, before = [], ""
        for index in targets:
            for answer, text in (
                (False, self._render(messages[:index], True, tools, date=TRAINED)),
                (True, self._render(messages[: index + 1], False, tools, date=TRAINED)),
            ):
                if not text.startswith(before):
                    what = "the start of its answer is not in the whole turn" if answer else "it changes earlier turns"
                    fix = "mark answers in the template with {% generation %}"
                    fix = fix if answer else "set data.per_answer=true, which makes one conversation of each answer"
                    raise ValueError(f"the template cannot be split at messages.{index}: {what}; {fix}")
                pieces.append((answer, text[len(before) :]))
                before = text
        return pieces

    def _encode(self, text: str, hidden: "_Hidden", before: str = "") -> list[int]:
        """Returns the tokens of a rendering behind `before`, in which special tokens that messages spell are hidden."""
        tokens: list[int] = []
        begins = not before or before.endswith(self._spaced)
        for spelled, part in hidden.parts(text):
            if part:
                encode = self._spelled_tokens if spelled else self._tokens
                tokens += encode(part) if begins else encode_inside(encode, part)
                begins = not spelled and part.endswith(self._spaced)
        return tokens

    def _plain_tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    def _spelled_tokens(self, text: str) -> list[int]:
        """Returns the tokens of a token's spelling in a message, which stays text."""
        if isinstance(self.tokenizer, FileTokenizer):
            return self.tokenizer.encode_apart(text, self._borders)
        return self._plain_tokens(text)

    @cached_property
    def _spaced(self) -> tuple[str, ...]:
        """The special tokens behind which a text begins as a text of its own does."""
        letter = self._tokens("b")
        return tuple(token for token in self._special if self._tokens(f"{token}b")[1:] == letter)

    def _tokens(self, text: str) -> list[int]:
        if self._inner is None:
            return self._plain_tokens(text)
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids with all special tokens, also the one that ends a document and often a turn."""
        end = self._variables["eos_token"] or ""
        runs = itertools.groupby(map(int, ids), lambda number: number == self.tokenizer.end_of_document)
        return "".join(end * len(list(run)) if ends else self.tokenizer.decode(list(run)) for ends, run in runs)

    def _render(
        self,
        messages: list[dict],
        add_generation_prompt: bool,
        tools: list[dict] | None = None,
        mark: str = "",
        date: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        variables = {**(options or {}), **self._variables}
        values = (messages, add_generation_prompt, tools or None, mark, date)
        variables |= dict(zip(GIVEN, values, strict=True))
        return self._renderer.render(variables)

    def _find_turn_ends(self) -> tuple[list[int], tuple[str, ...]]:
        """Returns `turn_ends`, and the tokens next to a user's turn and behind an answer."""
        question, answer = f"question {secrets.randbits(63)}", f"answer {secrets.token_hex(8)}"
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        self._render(talk[:1], add_generation_prompt=True)  # as every chat does
        before, _, behind = self._render(talk, add_generation_prompt=False).partition(answer)
        head, _, between = before.rpartition(question)
        behind = behind.lstrip()
        # Tokens for runs of spaces or line feeds belong to texts.
        marks = [[token for token in self._spelled.findall(part) if token.strip()] for part in (head, between, behind)]
        borders = tuple(dict.fromkeys([*marks[0][-1:], *marks[1][:1], *marks[2][:1]]))
        if match := self._spelled.match(behind):
            return [self._special[match[0]]], borders
        end = behind.splitlines()[0].strip()[:40] if behind.strip() else ""
        what = f"{end!r} behind an answer is text for this tokenizer" if end else "the template writes none behind it"
        fix = "end the assistant's turns in the template with eos_token, or with a special token of tokenizer.json"
        self.note = f"no special token ends an answer, so answers run to max_tokens: {what}; {fix}"
        return [], borders

    def _finds_tools(self) -> bool:
        talk, name = [{"role": "user", "content": "question"}], f"tool_{secrets.token_hex(8)}"
        function = {"name": name, "description": "a tool", "parameters": {"type": "object", "properties": {}}}
        try:
            return name in self._render(talk, True, [{"type": "function", "function": function}])
        except ValueError:
            return False

    def _check_shown(self, messages: list[dict], tools: list[dict]) -> None:
        """Raises ValueError if the template leaves out calls, reasoning, or a turn of a third role, such as system."""
        reasoned = [place for place, message in enumerate(messages) if message.get("reasoning_content")]
        if reasoned and not self._knows_reasoning:
            where = f"messages.{reasoned[0]}.reasoning_content"
            raise ValueError(f"{where}: it shows no reasoning; write it as content, or leave the key out")
        called = [place for place, message in enumerate(messages) if message.get("tool_calls")]
        if called and not self._knows_calls:
            raise ValueError(f"messages.{called[0]}.tool_calls: it shows no calls of tools; write them as content")
        said = [place for place, message in enumerate(messages) if message["role"] not in ("user", "assistant")]
        marks = {place: str(secrets.randbits(63)) for place in said if (messages[place].get("content") or "").strip()}
        if not marks:
            return
        try:
            turns = [
                turn | ({"content": marks[place]} if place in marks else {}) for place, turn in enumerate(messages)
            ]
            text = self._render(turns, False, tools)
        except ValueError:  # it looks at their texts, or refuses the conversation
            return
        if left_out := [place for place, mark in marks.items() if mark not in text]:
            role = messages[left_out[0]]["role"]
            fix = "leave the turn out, or write its text into a turn of role 'user'"
            raise ValueError(f"messages.{left_out[0]}: it does not show this turn of role {role!r}; {fix}")

    @cached_property
    def _knows_reasoning(self) -> bool:
        """Whether the template shows the reasoning of a last answer; True if it refuses this one."""
        thought = f"thought {secrets.token_hex(8)}"
        talk = [{"role": "user", "content": "question"}]
        talk.append({"role": "assistant", "content": "answer", "reasoning_content": thought, "thinking": thought})
        try:
            return thought in self._render(talk, False)
        except ValueError:
            return True

    @cached_property
    def _knows_calls(self) -> bool:
        """Whether the template shows a call, its name or its arguments; True if it refuses this one, so looks at it."""
        name = f"tool_{secrets.token_hex(8)}"
        call = {"id": "call_0001", "type": "function", "function": {"name": name, "arguments": {"x": name}}}
        other = {"name": "other", "description": "a tool", "parameters": {"type": "object", "properties": {}}}
        talk: list[dict] = [{"role": "user", "content": "question"}]
        talk.append({"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            return name in self._render(talk, False, [{"type": "function", "function": other}])
        except ValueError:
            return True


class _Hidden:
    """The tokens that the messages of one conversation must not spell, hidden from the template and the tokenizer."""

    def __init__(self, spelled: re.Pattern):
        self._pattern, self._spelled = spelled, [""]  # the first is what `mark` is for other uses
        self._secret = str(secrets.randbits(63))  # digits only, because filters of a template may change letters

    def mark(self, number: str) -> str:
        """Returns a text that no message contains."""
        return f"{self._secret}:{number}:"

    def hide(self, values: Any) -> Any:
        def replace(match: re.Match) -> str:
            self._spelled.append(match[0])
            return self.mark(str(len(self._spelled) - 1))

        return _each_text(values, lambda text: self._pattern.sub(replace, text))

    def parts(self, text: str) -> list[tuple[bool, str]]:
        """Returns the parts of a rendering: whether a message spells this special token, and the text."""
        parts = re.split(self.mark("(\\d+)"), text)
        return [(i % 2 == 1, self._spelled[int(part)] if i % 2 else part) for i, part in enumerate(parts)]


def _any_of(tokens: Iterable[str]) -> re.Pattern:
    """Returns a pattern of any of some tokens, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Returns nested lists and objects with every text in them changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(part, change) for part in value]
    if isinstance(value, dict):
        return {change(key): _each_text(part, change) for key, part in value.items()}
    return value


def load_chat_template(run: str | Path, tokenizer: Tokenizer | None, file: Path | None = None) -> ChatTemplate | None:
    """Returns the template in `file`, or else in a model's folder; None if there is no template or no tokenizer.

    Raises:
        ConfigError: the template cannot be read or used.
    """
    path = file or Path(run) / FILE
    if tokenizer is None or (file is None and not path.is_file()):
        return None
    try:
        if not path.is_file():
            raise OSError("it is not a file")
        source = load_text(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}); give a template in UTF-8"], "chat template") from None
    return ChatTemplate(source, tokenizer, str(path))


def read_template(folder: Path) -> str | None:
    """Returns the source of the chat template of a folder, None without one. Raises ConfigError if it is damaged."""
    file = folder / FILE
    try:
        return load_text(file, MOST_BYTES) if file.is_file() else None
    except (OSError, ValueError) as error:
        problem = f"{file}: cannot be read ({error}); copy it again as UTF-8, or remove it"
        raise ConfigError([problem], "chat template") from None


class _Renderer:
    """Renders a template in a process of its own (`render.py` here), with bounds of time, memory and length."""

    def __init__(self, source: str):
        self._source, self._lock = source, threading.Lock()
        self.names: list[str] = []  # of the variables that the template reads, once its process has started
        self.sought: list[str] = []  # the texts that it looks for in others, likewise
        self._refusal, self._refused_until = "", 0.0  # why the template is not tried before that time
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        weakref.finalize(self, _end, self.__dict__)

    def render(self, variables: dict) -> str:
        """Returns the text of the template. Raises ValueError if it fails or exceeds a bound."""
        with self._lock:
            if (left := self._refused_until - time.monotonic()) > 0:
                raise ValueError(f"{self._refusal}; try again in {math.ceil(left)} s")
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                return self._ask(variables)
            except TimeoutError as error:
                self._refusal = f"the template is not tried, because a conversation before took too long: {error}"
                self._refused_until = time.monotonic() + PAUSE  # for ever would end a server on a busy machine
                raise ValueError(str(error)) from None

    def _start(self) -> None:
        _end(self.__dict__)
        ours, theirs = socket.socketpair()
        self._socket, self._buffer = ours, bytearray()
        with theirs:
            # -P: the folder of the script, whose modules have names of other packages, must not be imported from.
            command = [sys.executable, "-P", str(Path(__file__).with_name("render.py"))]
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL
            )
        about = json.loads(self._ask(self._source, START_SECONDS))
        self.names, self.sought = about["variables"], about["sought"]

    def _ask(self, values: object, seconds: float | None = None) -> str:
        assert self._socket is not None
        seconds = SECONDS if seconds is None else seconds
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(values).encode() + b"\n")
            while not self._buffer.endswith(b"\n"):
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                part = self._socket.recv(1 << 16)
                if not part:
                    raise ValueError("its process ended, for example because it used too much memory")
                self._buffer += part
        except TimeoutError:
            _end(self.__dict__)
            raise TimeoutError(f"it takes more than {seconds:g} seconds; simplify its loops") from None
        except (OSError, ValueError) as error:
            _end(self.__dict__)
            raise ValueError(str(error)) from None
        answer = json.loads(self._buffer)
        self._buffer.clear()
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]


def _end(state: dict) -> None:
    """Ends the process of a renderer, given its attributes, which outlive it."""
    process, ours = state.get("_process"), state.get("_socket")
    if ours is not None:
        ours.close()
    if process is not None:
        process.kill()
        process.wait()
    state["_process"] = state["_socket"] = None
