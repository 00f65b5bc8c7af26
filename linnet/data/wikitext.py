"""WikiText as a source, `wikitext-103=FOLDER[:SPLIT]`, and GPT-2's vocabulary in the order of fairseq's dictionary.

FOLDER holds `wiki.train.raw`, `wiki.valid.raw` and `wiki.test.raw`, or the word-level files that end with `.tokens`,
Parquet (`train-00000-of-00002.parquet`, `validation-*.parquet`, one row per line, as on the Hub), or `train.txt` and so
on. SPLIT is train (the default), valid or test. A split is one document per file: its lines follow one another, and a
tokenizer with `line_ends: true` ends each of them with a token.

SHA-256 of the raw files of validation and test are known (WikiText-2 and WikiText-103 have the same articles there);
that of the training file is not. A file with another digest is used, and a warning says so.

Source of the setting: papers 001 to 003, whose scripts prepare the text as fairseq's RoBERTa does.
"""

import re
import warnings
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from linnet.config import load_json
from linnet.data.records import fingerprint as sha256

SPLITS = {"train": ("train",), "valid": ("valid", "validation"), "test": ("test",)}
PARQUET = (".parquet", ".pq")
RAW = {
    "valid": "4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7",
    "test": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
}  # SHA-256 of wiki.SPLIT.raw
GPT2 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}  # SHA-256 of GPT-2's vocabulary and merges
FILES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt", "dict.txt": "dict.txt"}  # and their other names
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # the first ids of a dictionary of fairseq
LINE_END = "</s>"
SYMBOLS = 50_260  # of fairseq's dict.txt for GPT-2
_NAME = re.compile(r"wikitext-(2|103)=(.+?)(?::([a-z]+))?", re.DOTALL)


class Name(NamedTuple):
    """A name of this source: the set ("2" or "103"), its folder, and the part after the colon or None."""

    set: str
    folder: str
    split: str | None


def parse_name(source: str) -> Name | None:
    """Returns the parts of `wikitext-103=FOLDER[:SPLIT]`, or None for a source of another kind."""
    match = _NAME.fullmatch(source)
    return None if match is None else Name(*match.groups())


def held_out(source: str) -> str | None:
    """Returns the name of the validation part of a source without a split; None for any other source."""
    name = parse_name(source)
    return None if name is None or name.split is not None else f"{source}:valid"


def find_split(name: Name) -> tuple[list[Path], str | None]:
    """Returns what `split_files` does. Warns about raw files that are not the known ones."""
    split = name.split or "train"
    paths, reason = split_files(name.folder, split)
    if paths and paths[0].suffix == ".raw" and split in RAW:
        _compare(paths[0], RAW[split])
    return paths, reason


def split_files(folder: str | Path, split: str) -> tuple[list[Path], str | None]:
    """Returns the files of a split (train, valid or test) in their order, or none and the reason."""
    folder = Path(folder).expanduser()
    if split not in SPLITS:
        return [], f"has no part {split!r}; use train, valid or test"
    if not folder.is_dir():
        return [], f"is not a folder at {folder}; give the folder with wiki.train.raw, wiki.valid.raw and wiki.test.raw"
    for ending in (".raw", ".tokens"):
        for word in SPLITS[split]:
            if (path := folder / f"wiki.{word}{ending}").is_file():
                return [path], None
    tables = [path for path in sorted(folder.rglob("*")) if path.suffix in PARQUET and _is_of(path, split)]
    if tables:
        return tables, None
    for word in SPLITS[split]:
        if (path := folder / f"{word}.txt").is_file():
            return [path], None
    return [], (
        f"has no file of its part {split!r}: wiki.{split}.raw, wiki.{split}.tokens, {SPLITS[split][-1]}-*.parquet or "
        f"{split}.txt; put one into {folder}"
    )


def _is_of(path: Path, split: str) -> bool:
    return re.split(r"[-.]", path.name.removeprefix("wiki."))[0] in SPLITS[split]


def _compare(path: Path, expected: str) -> None:
    if (digest := sha256(path)) != expected:
        warnings.warn(
            f"{path}: is not the published file: SHA-256 expected {expected}, found {digest}; results on it cannot be "
            "compared with published ones",
            stacklevel=2,
        )


class BadVocabulary(ValueError):
    """A folder that holds no vocabulary of GPT-2 with fairseq's dictionary; the message says why."""


def vocabulary_files(folder: str | Path) -> dict[str, Path]:
    """Returns the files of a vocabulary by their names at fairseq. Raises BadVocabulary with all that are missing."""
    folder = Path(folder).expanduser()
    paths = {name: path for name, other in FILES.items() for path in (folder / other, folder / name) if path.is_file()}
    if absent := [name for name in FILES if name not in paths]:
        raise BadVocabulary(
            f"{folder} has no {', '.join(absent)}; put encoder.json, vocab.bpe and dict.txt of fairseq there"
        )
    return paths


def vocabulary_size(folder: str | Path) -> int:
    """Returns the number of ids: of the dictionary in a folder, or of fairseq's own if there is none yet, so that a
    training can be planned before its files are there."""
    dictionary = Path(folder).expanduser() / "dict.txt"
    if not dictionary.is_file():
        return len(SPECIAL) + SYMBOLS
    with open(dictionary, "rb") as file:
        return len(SPECIAL) + sum(1 for _ in file)


def read_vocabulary(folder: str | Path) -> tokenizers.Tokenizer:
    """Returns GPT-2's byte-level BPE with the ids of fairseq's dictionary: <s>, <pad>, </s>, <unk>, then its symbols.

    Warns if encoder.json or vocab.bpe are not GPT-2's, with both digests.

    Raises:
        BadVocabulary: a file is missing or damaged, or a token of GPT-2 is not in the dictionary.
    """
    files = vocabulary_files(folder)
    for name, expected in GPT2.items():
        _compare(files[name], expected)
    try:
        encoder = load_json(files["encoder.json"])
        lines = files["vocab.bpe"].read_text(encoding="utf-8").split("\n")
        pairs = (line.partition(" ") for line in lines if line.strip() and not line.startswith("#version"))
        merges = [(first, second) for first, _, second in pairs]
        symbols = [line.rsplit(" ", 1)[0] for line in files["dict.txt"].read_text(encoding="utf-8").splitlines()]
        names = {str(number): token for token, number in encoder.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise BadVocabulary(f"{folder}: cannot be read: {error}; download the three files again") from None
    if missing := sorted(names.keys() - set(symbols)):
        raise BadVocabulary(
            f"{files['dict.txt']}: lacks the symbol {missing[0]} ({len(missing)} of {len(names)} tokens of "
            f"{files['encoder.json'].name}); take dict.txt, encoder.json and vocab.bpe from one place"
        )
    # An entry that is not a token of GPT-2, such as madeupword0000, keeps its row and never occurs in text.
    vocab = {token: number for number, token in enumerate(SPECIAL)}
    vocab |= {names.get(symbol, symbol): number for number, symbol in enumerate(symbols, len(SPECIAL))}
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library's own class for merges of unknown tokens
        raise BadVocabulary(f"{folder}: vocab.bpe and encoder.json do not fit together: {error}") from None
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([token for token in SPECIAL])
    return inner
