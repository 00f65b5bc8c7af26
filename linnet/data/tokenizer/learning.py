"""BPE and WordPiece that are learned from text."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from linnet.config import ConfigError
from linnet.data.tokenizer.config import END_OF_DOCUMENT
from linnet.data.tokenizer.encoding import FileTokenizer, cut_pieces

UNKNOWN = "[UNK]"  # of WordPiece, for words with a rare character
MOST_CHARACTERS = 1000  # distinct characters of a WordPiece vocabulary, the most frequent ones (as BERT's)
WORD = 4096  # characters of a word from which merges are learned; the time per word grows with the square of its length
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{WORD},}}|(?<!\s)\s{{{WORD},}}")


def train_bpe(documents: Iterable[str], vocab_size: int, line_ends: bool = False) -> FileTokenizer:
    """Learns byte-level BPE. The same documents give the same tokenizer, in any order and with any number of threads.

    Args:
        line_ends: of the tokenizer; merges are then learned from lines without white space at both ends.

    Raises:
        ConfigError: the documents do not have enough repeated pairs for `vocab_size` tokens.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    if line_ends:
        documents = (line.strip() for document in documents for line in document.split("\n"))
    inner.train_from_iterator(training_parts(documents), trainer=trainer)
    if (size := inner.get_vocab_size()) != vocab_size:
        fix = f"the training text gives only {size} tokens; use at most {size}, or more text"
        raise ConfigError([f"tokenizer.vocab_size: {vocab_size} is too large: {fix}"], "data")
    return FileTokenizer(inner, END_OF_DOCUMENT, name=f"bpe:{vocab_size}", line_ends=line_ends)


def training_parts(documents: Iterable[str]) -> Iterator[str]:
    """Yields documents in parts from which merges can be learned in time and memory that grow with their length."""
    return (part for document in documents for piece in cut_pieces(document) for part in cut_words(piece))


def train_wordpiece(documents: Iterable[str], vocab_size: int, lowercase: bool = True) -> FileTokenizer:
    """Learns WordPiece. The same documents give the same tokenizer, in any order and with any number of threads.

    Args:
        documents: held in memory, because their characters are counted first.

    Raises:
        ConfigError: the documents do not have enough repeated pairs for `vocab_size` tokens, or have more characters.
    """
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    texts = [normalizer.normalize_str(part) for document in documents for part in cut_words(document)]
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    known = sorted(counts, key=lambda character: (-counts[character], character))
    alphabet = sorted([character for character in known if not character.isspace()][:MOST_CHARACTERS])
    # The library numbers pieces that continue a word in the order in which it meets them, which changes from run to
    # run, and pairs with equal counts are merged in the order of these numbers. So they are numbered here.
    first = [END_OF_DOCUMENT, UNKNOWN, *alphabet, *(f"##{character}" for character in alphabet)]
    if len(first) > vocab_size:
        fix = f"its {len(alphabet)} characters alone need {len(first)} tokens; use at least that"
        raise ConfigError([f"tokenizer.vocab_size: {vocab_size} is too small for the training text: {fix}"], "data")
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer=trainer)
    vocab = learner.get_vocab()
    if len(vocab) != vocab_size:
        fix = f"the training text gives only {len(vocab)} tokens; use at most {len(vocab)}, or more text"
        raise ConfigError([f"tokenizer.vocab_size: {vocab_size} is too large: {fix}"], "data")
    # A new tokenizer, because the characters above are not special tokens.
    inner = tokenizers.Tokenizer(models.WordPiece(vocab=vocab, unk_token=UNKNOWN))
    inner.normalizer, inner.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens([END_OF_DOCUMENT, UNKNOWN])
    return FileTokenizer(inner, END_OF_DOCUMENT, name=f"wordpiece:{vocab_size}")


def cut_words(text: str) -> Iterator[str]:
    """Yields the text in parts such that words of `WORD` characters or more, as in text without spaces, are cut."""
    start = 0
    for match in _LONG_WORD.finditer(text):
        for cut in range(match.start() + WORD, match.end() + 1, WORD):
            yield text[start:cut]
            start = cut
    if start < len(text) or not text:
        yield text[start:]
