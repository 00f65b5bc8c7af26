"""Chat templates: turn a conversation into the tokens of a prompt."""

import json
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from linnet.config import ConfigError
from linnet.data import ByteTokenizer, Tokenizer

FILE = "chat_template.jinja"
MOST_BYTES = 1 << 20  # of a template
SECONDS, START_SECONDS = 5.0, 60.0  # for one conversation; for the start of the process, on a busy machine
COMMON_STARTS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]")


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers use it, run in a sandbox and in a process of its own.

    Special tokens in the template are tokens. Their spelling in a message stays text, so that a user cannot end their
    turn and continue in another role.

    Attributes:
        turn_ends: special tokens that follow an assistant's turn; they end a completion.
        knows_tools: whether the template shows tools to the model.

    Raises:
        ConfigError: the source is not a template, or it fails on a simple conversation.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, where: str = FILE):
        self._tokenizer, self._inner = tokenizer, None
        self._special: dict[str, int] = {}
        if not isinstance(tokenizer, ByteTokenizer):
            values = json.loads(tokenizer.to_json())
            values.pop("linnet", None)
            values["post_processor"] = None  # the template itself adds the tokens at the start and end of a text
            self._special = {token["content"]: token["id"] for token in values["added_tokens"]}
            self._inner = tokenizers.Tokenizer.from_str(json.dumps(values))
        self._spelled = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")
        ends = {number: token for token, number in self._special.items()}
        self._variables = {
            "bos_token": next((token for token in COMMON_STARTS if token in self._special), ""),
            "eos_token": ends.get(tokenizer.end_of_document, ""),
            "documents": None,
        }
        try:
            self._renderer = _Renderer(source)
            self.turn_ends = self._find_turn_ends()
            self.knows_tools = self._finds_tools()
        except Exception as error:  # a template is a program and can raise any exception
            raise ConfigError([f"{where}: not a valid chat template ({error})"], "chat template") from None

    def encode(self, messages: list[dict], tools: Sequence[dict] = ()) -> list[int]:
        """Returns the tokens of a conversation up to the start of the assistant's answer.

        Args:
            messages: the turns, with `role`, `content` and optionally `name`, `tool_calls`, `tool_call_id`.
            tools: what the model may call, each as OpenAI's API has it.

        Raises:
            ConfigError: the template refuses this conversation, or the tokenizer refuses its text.
        """
        mark, spelled = str(secrets.randbits(63)), []  # digits only, because filters of a template may change letters

        def hide(match: re.Match) -> str:
            spelled.append(match[0])
            return f"\ue000{mark}:{len(spelled) - 1}\ue001"

        try:
            text = self._render(
                _each_text(messages, lambda text: self._spelled.sub(hide, text)),
                add_generation_prompt=True,
                tools=_each_text(list(tools), lambda text: self._spelled.sub(hide, text)),
            )
            # Odd parts are indices into `spelled`; even parts are text of the template and of messages.
            parts = re.split(f"\ue000{mark}:(\\d+)\ue001", text)
            tokens: list[int] = []
            for i, part in enumerate(parts):
                tokens += self._tokenizer.encode(spelled[int(part)]).tolist() if i % 2 else self._tokens(part)
        except Exception as error:
            raise ConfigError([f"messages: do not fit the model's chat template ({error})"], "request") from None
        return tokens

    def _tokens(self, text: str) -> list[int]:
        if self._inner is None:
            return self._tokenizer.encode(text).tolist()
        return self._inner.encode(text, add_special_tokens=False).ids

    def _render(self, messages: list[dict], add_generation_prompt: bool, tools: list[dict] | None = None) -> str:
        variables = {"messages": messages, "add_generation_prompt": add_generation_prompt, **self._variables}
        variables["tools"] = tools or None
        return self._renderer.render(variables)

    def _find_turn_ends(self) -> list[int]:
        answer = f"answer {secrets.token_hex(8)}"
        talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        self._render(talk[:1], add_generation_prompt=True)  # as every chat does
        behind = self._render(talk, add_generation_prompt=False).partition(answer)[2].lstrip()
        match = self._spelled.match(behind)
        return [self._special[match[0]]] if match else []

    def _finds_tools(self) -> bool:
        talk, name = [{"role": "user", "content": "question"}], f"tool_{secrets.token_hex(8)}"
        function = {"name": name, "description": "a tool", "parameters": {"type": "object", "properties": {}}}
        try:
            return name in self._render(talk, True, [{"type": "function", "function": function}])
        except ValueError:
            return False


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
        if (size := path.stat().st_size) > MOST_BYTES:
            raise OSError(f"it has {size:,} bytes; a template has at most {MOST_BYTES:,}")
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error})"], "chat template") from None
    return ChatTemplate(source, tokenizer, str(path))


class _Renderer:
    """Renders a template in a process of its own (`linnet/serve/render.py`), with bounds of time, memory and length."""

    def __init__(self, source: str):
        self._source, self._lock = source, threading.Lock()
        self._refusal = ""  # why the template is not tried again
        self._process: subprocess.Popen | None = None
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        weakref.finalize(self, _end, self.__dict__)

    def render(self, variables: dict) -> str:
        """Returns the text of the template. Raises ValueError if it fails or exceeds a bound."""
        with self._lock:
            if self._refusal:
                raise ValueError(self._refusal)
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                return self._ask(variables)
            except TimeoutError as error:
                # Each further conversation would wait as long, and all others behind it.
                self._refusal = f"the template is refused, because a conversation before took too long: {error}"
                raise ValueError(str(error)) from None

    def _start(self) -> None:
        _end(self.__dict__)
        ours, theirs = socket.socketpair()
        self._socket, self._buffer = ours, bytearray()
        with theirs:
            # -P: the folder of the script, whose modules have names of other packages, must not be imported from.
            command = [sys.executable, "-P", str(Path(__file__).with_name("render.py"))]
            self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL)
        self._ask(self._source, START_SECONDS)

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
        found = json.loads(self._buffer)
        self._buffer.clear()
        if "error" in found:
            raise ValueError(found["error"])
        return found["text"]


def _end(state: dict) -> None:
    """Ends the process of a renderer, given its attributes, which outlive it."""
    process, ours = state.get("_process"), state.get("_socket")
    if ours is not None:
        ours.close()
    if process is not None:
        process.kill()
        process.wait()
    state["_process"] = state["_socket"] = None
