"""Chat templates: turn a conversation into the text, and then the tokens, of a prompt."""

import datetime
import json
import re
import secrets
from pathlib import Path

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from linnet.config import ConfigError
from linnet.data import ByteTokenizer, Tokenizer

FILE = "chat_template.jinja"
COMMON_STARTS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<｜begin▁of▁sentence｜>", "[BOS]")


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers have it, run in a sandbox.

    Special tokens in the template are tokens; those spelled out in a message are text, so that a user cannot end their
    turn and speak as another.

    Attributes:
        turn_ends: special tokens that stand behind an assistant's turn, which end a completion.

    Raises:
        ConfigError: it is not a template, or fails on a plain conversation.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, where: str = FILE):
        self._tokenizer, self._inner = tokenizer, None
        self._special: dict[str, int] = {}
        if not isinstance(tokenizer, ByteTokenizer):
            values = json.loads(tokenizer.to_json())
            values.pop("linnet", None)
            values["post_processor"] = None  # the template says where a text begins and ends
            self._special = {token["content"]: token["id"] for token in values["added_tokens"]}
            self._inner = tokenizers.Tokenizer.from_str(json.dumps(values))
        self._spelled = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")
        ends = {number: token for token, number in self._special.items()}
        self._variables = {
            "bos_token": next((token for token in COMMON_STARTS if token in self._special), ""),
            "eos_token": ends.get(tokenizer.end_of_document, ""),
            "tools": None,
            "documents": None,
        }
        try:
            self._template = _environment().from_string(source)
            self.turn_ends = self._find_turn_ends()
        except Exception as error:  # a template is a program: it may fail in any way
            raise ConfigError([f"{where}: not a valid chat template ({error})"], "chat template") from None

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation up to where the assistant speaks; messages have `role`, `content`, maybe `name`.

        Raises:
            ConfigError: the template does not take this conversation, or the tokenizer its text.
        """
        mark, spelled = str(secrets.randbits(63)), []  # digits, which no filter for letters changes

        def hide(match: re.Match) -> str:
            spelled.append(match[0])
            return f"\ue000{mark}:{len(spelled) - 1}\ue001"

        hidden = [{key: self._spelled.sub(hide, value) for key, value in message.items()} for message in messages]
        try:
            text = self._render(hidden, add_generation_prompt=True)
            # Odd parts are numbers of spelled-out tokens, even ones text of the template and of messages.
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

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._variables)

    def _find_turn_ends(self) -> list[int]:
        answer = f"answer {secrets.token_hex(8)}"
        talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        behind = self._render(talk, add_generation_prompt=False).partition(answer)[2].lstrip()
        match = self._spelled.match(behind)
        return [self._special[match[0]]] if match else []


def load_chat_template(run: str | Path, tokenizer: Tokenizer | None, file: Path | None = None) -> ChatTemplate | None:
    """The template in `file`, or else in the folder of a model; None where it has none, or no tokenizer.

    Raises:
        ConfigError: it cannot be read or used.
    """
    path = file or Path(run) / FILE
    if tokenizer is None or (file is None and not path.is_file()):
        return None
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error})"], "chat template") from None
    return ChatTemplate(source, tokenizer, str(path))


def _environment() -> jinja2.Environment:
    """What templates of Hugging Face's tokenizers may count on."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
