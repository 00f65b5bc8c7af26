"""Text for training: sources, tokenizers, shards on disk, and the order in which a run reads them.

config = DataConfig(source=["corpus/*.txt"], tokenizer={"kind": "bpe", "vocab_size": 4096})
corpus = prepare(config, "cache")
batches = Batches(corpus.train, seq_len=512, batch_size=8, seed=0)
tokens, targets = batches.batch(step=0)

`Batches` and the other names of `linnet.data.loader` are imported at first use, so that the rest works without torch.
"""

from linnet.data.corpus import Corpus, DataConfig, check, open_corpus, prepare
from linnet.data.shards import CorpusDamaged, TokenShards
from linnet.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    Tokenizer,
    given_tokenizer,
    given_vocabulary,
    load_tokenizer,
    train_bpe,
)
from linnet.deprecation import lazily

__all__ = [
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "CorpusDamaged",
    "DataConfig",
    "FileTokenizer",
    "TokenShards",
    "Tokenizer",
    "check",
    "flatten_documents",
    "given_tokenizer",
    "given_vocabulary",
    "load_tokenizer",
    "open_corpus",
    "pack_documents",
    "prepare",
    "train_bpe",
    "validation_batches",
]
__getattr__ = lazily(
    __name__, dict.fromkeys(("Batches", "flatten_documents", "pack_documents", "validation_batches"), "loader")
)
