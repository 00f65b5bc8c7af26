"""Tokenizers from files, and those that a configuration names."""

import base64
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from linnet.config import ConfigError, load_json, shown
from linnet.data import hub, wikitext
from linnet.data.tokenizer.config import (
    END_OF_DOCUMENT,
    MOST_IDS,
    SPLITS,
    BPETokenizerConfig,
    ByteTokenizerConfig,
    FairseqTokenizerConfig,
    FileTokenizerConfig,
    TiktokenTokenizerConfig,
    TokenizerConfig,
    WordPieceTokenizerConfig,
)
from linnet.data.tokenizer.encoding import ByteTokenizer, FileTokenizer, Tokenizer
from linnet.data.tokenizer.file import bad_id, byte_values, endless_growth


def given_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """Returns the tokenizer that a configuration names, or None if it must be learned. Raises as `load_tokenizer`."""
    match config:
        case ByteTokenizerConfig():
            return ByteTokenizer()
        case FileTokenizerConfig():
            return load_tokenizer(config.path, config.end_of_document, config.line_ends)
        case FairseqTokenizerConfig():
            return load_fairseq(config.path)
        case TiktokenTokenizerConfig():
            return load_tiktoken(config)
    return None


def load_fairseq(folder: str | Path) -> FileTokenizer:
    """Reads GPT-2's vocabulary in fairseq's order (`linnet.data.wikitext.read_vocabulary`); </s> ends every line.

    Raises:
        ConfigError: a file is missing or damaged, or the files do not fit together.
    """
    try:
        inner = wikitext.read_vocabulary(folder)
    except wikitext.BadVocabulary as error:
        raise ConfigError([f"tokenizer.path: {error}"], "data") from None
    return FileTokenizer(inner, wikitext.LINE_END, name="fairseq", line_ends=True)


def load_tiktoken(config: TiktokenTokenizerConfig) -> FileTokenizer:
    """Reads a file of tiktoken with the `tokenizers` library, which gives the same ids.

    Raises:
        ConfigError: the file cannot be read or is damaged, lacks a byte, or has the id of the end of a document.
    """
    path = Path(config.path).expanduser()
    ranks: dict[bytes, int] = {}
    names = {value: character for character, value in byte_values().items()}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError([f"tokenizer {path}: cannot be read: {error.strerror or error}"], "data") from None
    for number, line in enumerate(lines, 1):
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
            if not token or not rank.isdigit() or token in ranks or int(rank) >= MOST_IDS:
                raise ValueError
        except ValueError:
            what = f"{shown(line.decode(errors='replace'))} is not a new token in base64 with its rank"
            raise ConfigError([f"tokenizer {path}: line {number}: {what}; download the file again"], "data") from None
        ranks[token] = int(rank)
    taken = set(ranks.values())
    _, end = SPLITS[config.split]
    end = config.end_of_document if config.end_of_document is not None else end
    if config.end_of_document is None and (len(ranks) <= end // 2 or end in taken):
        end = max(taken, default=-1) + 1
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing or len(taken) < len(ranks) or end in taken:
        what = f"lacks the byte {missing[0] if missing else ''}" if missing else "has one rank twice"
        what = f"has a token with the id of the end of a document, {end}" if end in taken and not missing else what
        raise ConfigError([f"tokenizer {path}: {what}; use another file, split or end_of_document"], "data")
    spelled = {token: "".join(map(names.__getitem__, token)) for token in ranks}
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | {END_OF_DOCUMENT: end}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    words = pre_tokenizers.Split(tokenizers.Regex(SPLITS[config.split][0]), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([words, whole]), decoders.ByteLevel()
    inner.add_special_tokens([END_OF_DOCUMENT])
    return FileTokenizer(inner, END_OF_DOCUMENT, name=path.name)


def tokenizer_fingerprint(config: FileTokenizerConfig | FairseqTokenizerConfig | TiktokenTokenizerConfig) -> str:
    """Returns the SHA-256 of the file of a tokenizer, or that of the digests of its files, in hexadecimal.

    Raises:
        ConfigError: a file is missing.
        OSError: a file cannot be read.
    """
    if not isinstance(config, FairseqTokenizerConfig):
        return wikitext.sha256(tokenizer_path(config.path))
    try:
        files = wikitext.vocabulary_files(config.path)
    except wikitext.BadVocabulary as error:
        raise ConfigError([f"tokenizer.path: {error}"], "data") from None
    return hashlib.sha256("".join(map(wikitext.sha256, files.values())).encode()).hexdigest()


def given_vocabulary(config: TokenizerConfig) -> int:
    """Returns the vocabulary size of a tokenizer's configuration without reading text. Raises as `load_tokenizer`."""
    if isinstance(config, FairseqTokenizerConfig):
        return wikitext.vocabulary_size(config.path)
    learned = isinstance(config, (BPETokenizerConfig, WordPieceTokenizerConfig))
    return config.vocab_size if learned else given_tokenizer(config).vocab_size


def load_tokenizer(
    path: str | Path,
    end_of_document: str | int | None = None,
    line_ends: bool = False,
    added: Iterable[tokenizers.AddedToken] = (),
    most: int = MOST_IDS,
) -> Tokenizer:
    """Reads a tokenizer.json, or a file that `Tokenizer.save` wrote.

    Args:
        path: the file, or `hf:NAME` of a model on the Hub.
        end_of_document: the token that ends a document, or its id; None takes the one noted in the file (or, on the
            Hub, in its tokenizer_config.json), else the first of `COMMON_ENDS` that the tokenizer has.
        line_ends: whether it ends lines too, also if the file does not note it.
        added: tokens that the files beside it name, which it gets if it lacks them and has fewer than `most` ids.

    Raises:
        ConfigError: the file does not exist, is not a tokenizer, or has no end-of-document token.
    """
    if hub.is_name(str(path)):
        file, end = _of_hub(str(path))
        tokenizer = load_tokenizer(file, end_of_document or end, line_ends)
        tokenizer.name = str(path)
        return tokenizer
    path = Path(path).expanduser()
    try:
        values = load_json(path)
        if not isinstance(values, dict):
            raise TypeError("it holds no object")
        notes = values.pop("linnet", {})
        if not isinstance(notes, dict):
            notes = {}
        if notes.get("kind") == "byte":
            return ByteTokenizer()
        if problem := bad_id(values) or endless_growth(values):
            raise ConfigError([f"tokenizer {path}: {problem}"], "data")
        inner = tokenizers.Tokenizer.from_str(json.dumps(values))
        known = {token.content for token in inner.get_added_tokens_decoder().values()}
        for token in added:
            if token.content not in known and inner.get_vocab_size() < most:
                inner.add_tokens([token])
        if isinstance(end_of_document, int):
            end_of_document = inner.id_to_token(end_of_document) if end_of_document < MOST_IDS else None
        end = end_of_document or notes.get("end_of_document")
        return FileTokenizer(inner, end, name=path.name, line_ends=line_ends or notes.get("line_ends") is True)
    except ConfigError:
        raise
    except OSError as error:
        reason = (
            f"cannot be read: {error.strerror or error}; give the path of a tokenizer.json as data.tokenizer, or byte"
        )
    except ValueError as error:
        reason = str(error) if "end_of_document" in str(error) else f"is not JSON ({error})"
    except RecursionError:
        reason = "is JSON that is nested too deeply to read"
    except BaseException as error:  # the library raises a bare Exception or panics for a file that it cannot use
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = f"is not a tokenizer.json of the tokenizers library ({error})"
    raise ConfigError([f"tokenizer {path}: {reason}"], "data")


def tokenizer_path(path: str) -> Path:
    """Returns the file of a `FileTokenizerConfig`. Raises ConfigError for a name on the Hub that cannot be had."""
    return _of_hub(path)[0] if hub.is_name(path) else Path(path).expanduser()


def _of_hub(name: str) -> tuple[Path, str | None]:
    try:
        return hub.tokenizer_file(name)
    except hub.HubError as error:
        raise ConfigError([f"tokenizer {name}: {error}"], "data") from None
