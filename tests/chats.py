"""A tokenizer with special tokens, a chat template and conversations, which tests of several folders share."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from linnet.data.chat.template import FILE
from linnet.data.tokenizer import FileTokenizer
from linnet.models import ModelConfig, build_model
from linnet.runs import save_model

CHATML = """{{ bos_token }}{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}"""
MARKED = """{{ bos_token }}{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}
{{- message['content'] | trim + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{- message['content'] | trim + '<|im_end|>' + '\\n' }}{%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}"""
VOCABULARY = 260


def special_tokenizer(merges: tuple[tuple[str, str], ...] = ()) -> FileTokenizer:
    """Returns a byte-level tokenizer whose special tokens follow the bytes and the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in merges)]
    inner = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(words)}, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"])  # 256 to 259 without merges
    return FileTokenizer(inner)


def sentencepiece(kind: str) -> FileTokenizer:
    """A tokenizer as Llama 2's, which puts a space before a text, and behind special tokens by its kind."""
    pairs = [("▁", "4"), ("▁", "h"), ("▁h", "i"), ("▁", "b")]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    words += ["".join(pair) for pair in pairs]
    numbers = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(models.BPE(numbers, pairs, unk_token="<unk>", byte_fallback=True))
    if kind == "normalizer":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    inner.decoder = decoders.Fuse()  # keeps "▁", so that tests see each space
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    return FileTokenizer(inner)


def turns(*texts: str) -> list[dict]:
    """Returns messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def write_chats(path: Path, *rows: object) -> Path:
    """Writes conversations, or other rows, as JSONL."""
    lines = [json.dumps({"messages": row} if isinstance(row, list) else row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def model_folder(path: Path, config: ModelConfig, template: str | None = CHATML, seed: int = 0) -> Path:
    """Writes a model folder with the tokenizer and a template."""
    save_model(path, config, build_model(config, seed).state_dict(), special_tokenizer())
    if template is not None:
        (path / FILE).write_text(template)
    return path
