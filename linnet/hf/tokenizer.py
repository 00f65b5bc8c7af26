"""Converts a Linnet tokenizer to a transformers tokenizer that gives the same ids for the same text."""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from linnet.data import ByteTokenizer, Tokenizer
from linnet.data.chat.template import bos_token
from linnet.data.tokenizer import END_OF_DOCUMENT


class LinnetTokenizer(PreTrainedTokenizerFast):
    """A transformers tokenizer that keeps the spelling of its own special tokens in a text apart from these tokens.

    Special tokens that a user adds are recognised in a text, and chat templates write all special tokens. transformers
    without Linnet loads a saved folder as its own class, for which `split_special_tokens` applies to all special tokens
    that are added afterwards.
    """

    def _add_tokens(self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False) -> int:
        if self.split_special_tokens:  # which the library applies to every token that it knows as special
            guarded = {token.content for token in self.added_tokens_decoder.values() if token.special}
            tokens = [AddedToken(t, special=special_tokens) if isinstance(t, str) else t for t in new_tokens]
            new_tokens = [token if token.content in guarded else _recognised(token) for token in tokens]
        return super()._add_tokens(new_tokens)

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, *args: Any, **kwargs: Any) -> str:
        if skip_special_tokens and not isinstance(token_ids, dict):
            special, ids = set(self.all_special_ids), [token_ids] if isinstance(token_ids, int) else token_ids
            token_ids = [number for number in ids if number not in special]
        return super()._decode(token_ids, skip_special_tokens, *args, **kwargs)

    def apply_chat_template(self, *args: Any, tokenizer_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        options = {"split_special_tokens": False, **(tokenizer_kwargs or {})}
        return super().apply_chat_template(*args, tokenizer_kwargs=options, **kwargs)


def _recognised(token: AddedToken) -> AddedToken:
    """Returns the token without the mark of special tokens."""
    sides = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
    return AddedToken(token.content, normalized=token.normalized, **sides)


def to_transformers(tokenizer: Tokenizer, chat_template: str | None = None) -> LinnetTokenizer:
    """Returns the tokenizer for transformers. It pads on the left with the end of a document, as generation needs.

    The spelling of a special token in a text stays text, as everywhere in Linnet. Tokens that are added afterwards are
    recognised. With a chat template the spelling of each becomes the token, because the template writes special tokens
    by their spelling. A byte tokenizer becomes a byte-level tokenizer with one token per byte, whose id 0 is the end of
    a document. It drops NUL from text, which Linnet refuses.
    """
    if isinstance(tokenizer, ByteTokenizer):
        inner, end = _bytes(tokenizer), END_OF_DOCUMENT
    else:
        values = json.loads(tokenizer.to_json())
        values.pop("linnet", None)
        if not tokenizer.prompt_start:
            values["post_processor"] = None  # it would add tokens that the training text does not have
        inner = tokenizers.Tokenizer.from_str(json.dumps(values))
        end = inner.id_to_token(tokenizer.end_of_document)
        if tokenizer.end_of_document not in inner.get_added_tokens_decoder():
            inner.add_special_tokens([end])
    return LinnetTokenizer(
        tokenizer_object=inner,
        bos_token=bos_token(tokenizer) or None,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        split_special_tokens=chat_template is None,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _bytes(tokenizer: ByteTokenizer) -> tokenizers.Tokenizer:
    # The byte-level alphabet writes each byte as one character; ids are the bytes themselves.
    alphabet = dict(zip(_order(), sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord), strict=True))
    vocab = {END_OF_DOCUMENT: tokenizer.end_of_document} | {alphabet[byte]: byte for byte in range(1, 256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END_OF_DOCUMENT])
    return inner


def _order() -> list[int]:
    """Returns the 256 bytes in the order of their characters: printable bytes, which map to themselves, come first."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return shown + [byte for byte in range(256) if byte not in shown]
