"""Converts a Linnet tokenizer to a transformers tokenizer that gives the same ids for the same text."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from linnet.data import ByteTokenizer, Tokenizer
from linnet.data.tokenizer import END_OF_DOCUMENT


def to_transformers(tokenizer: Tokenizer, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Returns the tokenizer for transformers. It pads on the left with the end of a document, as generation needs.

    The spelling of a special token in a text stays text, as everywhere in Linnet. With a chat template it becomes the
    token, because the template writes special tokens by their spelling. A byte tokenizer becomes a byte-level tokenizer
    with one token per byte, whose id 0 is the end of a document. It drops NUL from text, which Linnet refuses.
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
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
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
