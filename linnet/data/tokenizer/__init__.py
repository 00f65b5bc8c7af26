"""Tokenizers: bytes, byte-level BPE or WordPiece that Linnet learns, or any tokenizer.json.

Every tokenizer has an end-of-document token, which follows each document of a corpus. Text never encodes to it: a
document that contains its spelling ("<|endoftext|>") is encoded as ordinary text.
"""

from linnet.data.tokenizer.config import (
    END_OF_DOCUMENT,
    FILES,
    ByteTokenizerConfig,
    FileTokenizerConfig,
    TiktokenTokenizerConfig,
    TokenizerConfig,
    WordPieceTokenizerConfig,
    expand_tokenizer,
)
from linnet.data.tokenizer.encoding import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    check_utf8,
    encode_inside,
    token_dtype,
)
from linnet.data.tokenizer.learning import train_bpe, train_wordpiece, training_parts
from linnet.data.tokenizer.loading import (
    given_tokenizer,
    given_vocabulary,
    load_fairseq,
    load_tokenizer,
    tokenizer_fingerprint,
)

__all__ = [
    "END_OF_DOCUMENT",
    "FILES",
    "ByteTokenizer",
    "ByteTokenizerConfig",
    "FileTokenizer",
    "FileTokenizerConfig",
    "TiktokenTokenizerConfig",
    "Tokenizer",
    "TokenizerConfig",
    "WordPieceTokenizerConfig",
    "check_utf8",
    "encode_inside",
    "expand_tokenizer",
    "given_tokenizer",
    "given_vocabulary",
    "load_fairseq",
    "load_tokenizer",
    "token_dtype",
    "tokenizer_fingerprint",
    "train_bpe",
    "train_wordpiece",
    "training_parts",
]
