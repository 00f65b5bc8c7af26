"""A corpus: sources that are tokenized once into shards in a cache folder.

The folder's name is a digest of the configuration and of the content of every source file. So the same text gives the
same corpus in any place, and a changed file gives another one. Everything is checked before anything is written.

A document is held out if a keyed hash of its content is below `validation_fraction`. So it stays in its split when
other documents are added, whatever its name or place, and its exact copies are in the same split. If this misses the
fraction by more than a factor of `TOLERANCE` (few documents, or one much larger than the rest), the documents with the
smallest hashes are held out until the fraction is reached. If this misses it too (a single document, for example), the
last part of each document is held out, as a separate document.
"""

import bisect
import itertools
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator, model_validator

from linnet.config import Config, ConfigError, digest, gather, refuse, unwritable
from linnet.data import hub, records, shards, sources, wikitext
from linnet.data.order import hash64, uniform
from linnet.data.parts import batches
from linnet.data.records import SourceFile
from linnet.data.tokenizer import (
    FILES,
    ByteTokenizerConfig,
    FileTokenizerConfig,
    Tokenizer,
    TokenizerConfig,
    WordPieceTokenizerConfig,
    expand_tokenizer,
    given_tokenizer,
    load_tokenizer,
    token_dtype,
    tokenizer_fingerprint,
    train_bpe,
    train_wordpiece,
)

TOLERANCE = 4.0


@dataclass(frozen=True)
class Split:
    """The use of each document, by bytes: [0, cut) is for training, [cut, keep) is held out, the rest is not used.

    Attributes:
        keep, cut: int64 [documents]. `cut_text` later moves these places to whole characters or lines.
        by: "documents", "tails" (the end of each document is held out) or "given" (the held-out text was named).
        copies: number of documents left out of training because the given held-out text contains them.
    """

    keep: np.ndarray
    cut: np.ndarray
    by: str
    copies: int = 0


def split_documents(sizes: np.ndarray, hashes: np.ndarray, fraction: float, max_bytes: int | None, seed: int) -> Split:
    """Takes documents in a random order until they have `max_bytes` bytes, and holds out about `fraction` of these.

    Args:
        sizes: int64 [documents], in bytes.
        hashes: uint64 [documents], of their content.
        fraction: share of the bytes to hold out, in (0, 1).
        max_bytes: None takes all; the document that crosses the limit is cut there.
        seed: seed of both choices.
    """
    keep = take(sizes, uniform(hashes, seed, "limit"), max_bytes)
    place = uniform(hashes, seed, "held out")
    total = keep.sum()
    for held in (place < fraction, place <= _reach(keep, place, fraction * total)):
        if fraction / TOLERANCE <= keep[held].sum() / total <= min(fraction * TOLERANCE, (1 + fraction) / 2):
            return Split(keep, np.where(held, 0, keep), "documents")
    return Split(keep, np.floor(keep * (1 - fraction)).astype(np.int64), "tails")


def given_split(sizes: np.ndarray, hashes: np.ndarray, held: np.ndarray, max_bytes: int | None, seed: int) -> Split:
    """Holds out the documents for which `held` is True, and leaves exact copies of them out of training."""
    copies = np.isin(hashes, hashes[held]) & ~held
    train = np.where(held | copies, 0, sizes)
    keep = np.where(held, sizes, take(train, uniform(hashes, seed, "limit"), max_bytes))
    return Split(keep, np.where(held, 0, keep), "given", int(copies.sum()))


def take(sizes: np.ndarray, place: np.ndarray, max_bytes: int | None) -> np.ndarray:
    """Returns the used bytes of each document if documents are taken by ascending `place` up to `max_bytes` bytes."""
    if max_bytes is None or sizes.sum() <= max_bytes:
        return sizes
    order = np.argsort(place, kind="stable")
    before = np.cumsum(sizes[order]) - sizes[order]
    taken = np.empty_like(sizes)
    taken[order] = np.clip(max_bytes - before, 0, sizes[order])
    return taken


def cut_text(text: bytes, keep: int, cut: int) -> tuple[bytes, bytes]:
    """Returns the training part and the held-out part of a document.

    The cut is at the end of a line if one is near, else between two characters.
    """
    text = text[: _character(text, keep)]
    if not 0 < cut < len(text):
        return (text, b"") if cut else (b"", text)
    line = text.find(b"\n", cut, cut + (len(text) - cut) // 2)
    cut = line + 1 if line >= 0 else _character(text, cut)
    return text[:cut], text[cut:]


def _reach(sizes: np.ndarray, place: np.ndarray, target: float) -> float:
    order = np.argsort(place, kind="stable")
    return place[order[min(int(np.searchsorted(np.cumsum(sizes[order]), target)), len(order) - 1)]]


def _character(text: bytes, at: int) -> int:
    while 0 < at < len(text) and text[at] & 0xC0 == 0x80:
        at -= 1
    return at


FORMAT = 1  # increase it when the same inputs give other files
TOKENIZER = "tokenizer.json"
LISTED = 100  # most skipped files that corpus.json names
BATCH = 4 << 20  # bytes of text that are encoded at a time

Progress = Callable[[str, int, int], None]

_Tokenizer = Annotated[TokenizerConfig, Field(discriminator="kind")]


class MixtureSource(Config):
    """One source of a mixture, and how much of it a training reads.

    Attributes:
        source: paths of files and folders, globs, names on the Hub, and "stdlib", as in `DataConfig`.
        epochs: how many times the whole mixture reads this source; a fraction reads a part of its rows once more.
        weight: share of the rows that this source gives, relative to the sum of all weights, in place of `epochs`.
    """

    source: list[str]
    epochs: float | None = Field(None, gt=0)
    weight: float | None = Field(None, ge=0)

    @field_validator("source", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("weight")
    @classmethod
    def _epochs_or_weight(cls, weight: float | None, info: ValidationInfo) -> float | None:
        if "epochs" in info.data and (weight is None) == ((epochs := info.data["epochs"]) is None):
            if epochs is None:
                raise ValueError("neither epochs nor weight is given; give one of the two, such as epochs: 1")
            raise ValueError(f"epochs ({epochs:g}) and weight ({weight:g}) are both given; drop one")
        return weight

    @property
    def name(self) -> str:
        return ", ".join(self.source)


@dataclass(frozen=True)
class Portion:
    """What one source of a mixture gives to a training: its tokens [start, end) of the split, by epochs or weight.

    `bytes` is the size of their text, and `held` has the start and end of its held-out tokens in the validation split:
    (0, 0) if the held-out text was named in `data.validation`.
    """

    name: str
    digest: str
    start: int
    end: int
    bytes: int
    epochs: float | None = None
    weight: float | None = None
    held: tuple[int, int] = (0, 0)


class DataConfig(Config):
    """The text that a model is trained and validated on.

    Attributes:
        source: "stdlib" (the source text of the Python standard library of this machine), or a list of paths of files
            and folders, globs, `hf:NAME[:CONFIG[:SPLIT]]` (a data set of the Hub), `wikitext-103=FOLDER[:SPLIT]`, and
            "stdlib". With `mixture` it lists all of its sources.
        mixture: sources with epochs or weights, [{source, epochs}, ...] or [{source, weight}, ...], in any order; in
            place of `source`.
        text_key: key (JSONL) or column (Parquet) of the text.
        tokenizer: {kind: byte}, {kind: bpe, vocab_size: N}, {kind: wordpiece, vocab_size: N}, {kind: file, path:
            tokenizer.json}, {kind: fairseq, path: FOLDER} or {kind: tiktoken, path: FILE, split: cl100k}; in short
            `byte`, `bpe:N`, `wordpiece:N`, the path, `hf:NAME` (a model of the Hub) or `fairseq:FOLDER`.
        validation: sources of held-out text. Exact copies of their documents are left out of training. If empty,
            `validation_fraction` of `source` is held out; of `wikitext-103=FOLDER` the part `valid` is.
        validation_fraction: share of the bytes to hold out, by document (see linnet/data/corpus.py).
        max_bytes: takes documents of `source` in a random order until they hold this many bytes; None takes all.
        seed: seed of the random choices above. The order of training samples has its own seed.
        packing: how a model treats several documents in one row; `cross` carries state and attention over their
            ends, `reset` starts anew at each document (see docs/data.md). The prepared corpus is the same.
    """

    mixture: list[MixtureSource] = []
    source: Literal["stdlib"] | list[str] = Field("stdlib", validate_default=True)
    text_key: str = "text"
    tokenizer: _Tokenizer = ByteTokenizerConfig()
    validation: list[str] = Field([], validate_default=True)
    validation_fraction: float = Field(0.02, gt=0, lt=1)
    max_bytes: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)
    packing: Literal["cross", "reset"] = Field(
        "cross", description="what happens at the end of a document in a row: cross reads on, reset starts anew"
    )

    @model_validator(mode="before")
    @classmethod
    def _no_empty_mixture(cls, values: object) -> object:
        """Refuses a mixture of nothing, which would be trained on the default source; records have `source` too."""
        if isinstance(values, dict) and values.get("mixture") == [] and "source" not in values:
            raise ValueError("mixture: is an empty list; add sources, such as {source: books, epochs: 1}, or remove it")
        return values

    @field_validator("mixture")
    @classmethod
    def _one_measure(cls, mixture: list[MixtureSource]) -> list[MixtureSource]:
        weights = [source.weight for source in mixture if source.weight is not None]
        if 0 < len(weights) < len(mixture):
            raise ValueError("some sources have epochs and others a weight; give all of them epochs, or all a weight")
        if weights and not sum(weights):
            raise ValueError("the weights sum to 0, so no source gives a row; give at least one a weight above 0")
        return mixture

    @field_validator("source", "validation", mode="before", json_schema_input_type=str | list[str])
    @classmethod
    def _as_list(cls, value: object, info: ValidationInfo) -> object:
        value = [value] if isinstance(value, str) else value
        train = info.data.get("source")
        if info.field_name == "source" and (mixture := info.data.get("mixture")):
            names = [name for source in mixture for name in source.source]
            if value not in ([sources.STDLIB], names):
                raise ValueError(f"{value!r} and mixture are both given; add the text to mixture, or drop one")
            value = names
        if info.field_name == "validation" and value == [] and isinstance(train, list) and len(train) == 1:
            value = [held] if (held := wikitext.held_out(train[0])) else value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{value!r} must be a list of paths of files and folders, globs and {sources.STDLIB!r}")
        return sources.STDLIB if info.field_name == "source" and value == [sources.STDLIB] else value

    @field_validator("tokenizer", mode="before", json_schema_input_type=str | _Tokenizer)
    @classmethod
    def _expand_tokenizer(cls, value: object) -> object:
        return expand_tokenizer(value)


class Corpus:
    """A prepared corpus, as `prepare` and `open_corpus` return it.

    Attributes:
        folder: the corpus folder.
        digest: the folder's name, 12 hexadecimal digits computed from configuration and content.
        train, validation: the `TokenShards` of the two splits.
        tokenizer, vocab_size: the tokenizer and the number of its tokens.
        metadata: the content of `corpus.json`: config, split, skipped files, sizes.
    """

    def __init__(self, folder: Path, metadata: dict, tokenizer: Tokenizer):
        self.folder, self.metadata, self.tokenizer = folder, metadata, tokenizer
        self.digest, self.vocab_size = metadata["digest"], tokenizer.vocab_size
        self.train, self.validation = (
            shards.TokenShards(folder, split, metadata["splits"][split], tokenizer.end_of_document)
            for split in ("train", "validation")
        )

    def split(self, name: str) -> shards.TokenShards:
        """Returns the split "train" or "validation". Raises ValueError for another name."""
        if name not in ("train", "validation"):
            raise ValueError(f"split {name!r} is unknown; use train or validation")
        return getattr(self, name)

    def bytes_per_token(self, split: str = "validation") -> float:
        """Returns the bytes of text per token; ends of documents count as tokens.

        Bits per byte = loss [nats per token] / ln 2 / this number.
        """
        tokens = self.split(split)
        return tokens.bytes / len(tokens)

    def verify(self) -> None:
        """Reads all shards and checks them. Raises `ConfigError` that names missing, truncated and corrupted files."""
        self.train.verify()
        self.validation.verify()


def prepare(
    config: DataConfig, cache_dir: str | Path, rebuild: bool = False, progress: Progress | None = None
) -> Corpus:
    """Opens the corpus of a configuration, and builds it first if it is not in the cache.

    Args:
        config: the text to prepare.
        cache_dir: folder of corpora; created if it does not exist.
        rebuild: build a damaged corpus again. Without it, damage is an error, so that it is noticed.
        progress: called with the current phase, the bytes done and the bytes in total.

    Raises:
        ConfigError: lists all problems of configuration, sources and tokenizer before anything is written; or names a
            truncated or corrupted shard (`CorpusDamaged`); or says that the disk is full.
    """
    cache, skipped = Path(cache_dir), []
    train, held, tokenizer = _find(config, skipped, cache)
    try:
        name = digest(_identity(config, train, held, cache))
        folder = cache / name
        if exists := folder.exists():
            try:
                return open_corpus(folder)
            except shards.CorpusDamaged:
                if not rebuild:
                    raise
        if reason := unwritable(cache):
            raise ConfigError([f"{cache}: {reason}; choose another cache folder"], "data")
        inputs = _read(config, train, held, skipped, progress)
        with shards.new_folder(folder, replace=exists) as temporary:
            _build(temporary, name, config, inputs, tokenizer, skipped, progress)
            if digest(_identity(config, train, held, cache)) != name:
                raise ConfigError(
                    ["source: files changed while they were read; run again when nothing writes to them"], "data"
                )
    except OSError as error:
        problem = f"{cache}: cannot prepare the corpus: {error}; free disk space, or choose another cache folder"
        raise ConfigError([problem], "data") from None
    return open_corpus(folder)


def check(config: DataConfig, cache_dir: str | Path, seq_len: int | None = None) -> None:
    """Checks the text of a configuration without writing anything. Reads the text unless the cache has its corpus.

    Args:
        seq_len: tokens per row of training; None does not check that the text fills a row.

    Raises:
        ConfigError: lists all problems of sources, text and tokenizer that can be found without learning a tokenizer
            or encoding text, including a text too short for one row.
    """
    cache, skipped = Path(cache_dir), []
    train, held, _ = _find(config, skipped, cache)
    if cache.is_dir() and (folder := cache / digest(_identity(config, train, held, cache))).exists():
        tokens = len(open_corpus(folder).train)
    else:
        cut = _read(config, train, held, skipped, None).split.cut
        tokens = int(cut.sum() + (cut > 0).sum())  # upper bound: one token per byte, and the ends of documents
        if isinstance(config.tokenizer, FILES):  # it may make more than one token per byte
            return
    if seq_len is not None and tokens < seq_len + 1:
        have = f"the text to train on gives at most {tokens} tokens"
        raise ConfigError([f"seq_len: {seq_len} is too long: {have}; use at most {tokens - 1}, or more text"], "data")


def open_corpus(folder: str | Path) -> Corpus:
    """Opens a prepared corpus. Checks file sizes every time, and SHA-256 once per process.

    Raises:
        CorpusDamaged: a file is missing, truncated or changed since it was written.
    """
    folder = Path(folder)
    metadata = shards.read_metadata(folder)
    entry = metadata["tokenizer"]
    path = folder / TOKENIZER
    if problem := shards.size_problem(path, entry) or shards.content_problem(path, entry):
        raise shards.damaged(folder, [problem])
    tokenizer = load_tokenizer(path)
    tokenizer.name = entry["name"]
    corpus = Corpus(folder, metadata, tokenizer)
    corpus.train.verify_once()
    corpus.validation.verify_once()
    return corpus


@dataclass(frozen=True)
class _Inputs:
    """Files, sizes, hashes and split of the documents before they are encoded, and counts of the rows without text.

    `ends` has the number of documents up to the end of each source.
    """

    files: list[SourceFile]
    ends: list[int]
    text_key: str
    sizes: np.ndarray
    hashes: np.ndarray
    split: Split
    empty: Counter[str]

    def texts(self) -> Iterator[tuple[int, bytes]]:
        """Yields number and text of each document; reads it again and compares it with the hash of the scan."""
        number = 0
        for file in self.files:
            for text in records.read_documents(file, self.text_key, []):
                if number == len(self.sizes) or hash64(text) != self.hashes[number]:
                    raise ConfigError(
                        [f"{file.path}: changed while it was read; run again when nothing writes to it"], "data"
                    )
                yield number, text
                number += 1
        if number < len(self.sizes):
            raise ConfigError(
                [
                    f"source: {len(self.sizes) - number} documents vanished while they were read; run again when "
                    "nothing writes to the files"
                ],
                "data",
            )

    def parts(self) -> Iterator[tuple[str, bytes, int]]:
        """Yields split, text and source of each document, or part of a document, that is used."""
        for number, text in self.texts():
            train, held = cut_text(text, int(self.split.keep[number]), int(self.split.cut[number]))
            source = bisect.bisect_right(self.ends, number)
            if train:
                yield "train", train, source
            if held:
                yield "validation", held, source


def _find(
    config: DataConfig, skipped: list[str], cache: Path
) -> tuple[list[list[SourceFile]], list[SourceFile], Tokenizer | None]:
    """Returns the files of each source and those held out, and the tokenizer unless it must be learned.

    The sources of a mixture are in the order of their digests, so that a corpus does not depend on that of the list.

    Raises:
        ConfigError: problems of the files and of the tokenizer.
    """
    problems: list[str] = []
    train = _find_sources(config, problems, skipped)
    held = sources.find_files(config.validation, "validation", problems, skipped) if config.validation else []
    tokenizer = None
    with gather(problems):
        tokenizer = given_tokenizer(config.tokenizer)
    if problems:
        files = [file for source in train for file in source]
        _scan([*files, *held], config.text_key, problems, skipped, None)  # so that all problems are listed at once
        raise ConfigError(problems, "data")
    if config.mixture:
        digests = _mixture_digests(config, train, cache)
        apart = set(sources.fingerprints(held, cache))
        for source, files in zip(config.mixture, train, strict=True):
            if apart & set(sources.fingerprints(files, cache)):
                what = f"data.validation: text of it is also in the source {source.name!r} of data.mixture"
                fix = "training leaves its copies out; hold out other text to keep the whole source"
                warnings.warn(f"{what}; {fix}", stacklevel=3)
        train = [files for _, files in sorted(zip(digests, train, strict=True), key=lambda pair: pair[0])]
    return train, held, tokenizer


def _find_sources(config: DataConfig, problems: list[str], skipped: list[str]) -> list[list[SourceFile]]:
    """Returns the files of each source of a mixture, in the order of the list, or those of the only source."""
    if not config.mixture:
        return [sources.find_files(config.source, "source", problems, skipped)]
    return [sources.find_files(source.source, "mixture", problems, skipped) for source in config.mixture]


def _mixture_digests(config: DataConfig, file_lists: list[list[SourceFile]], cache: Path | None) -> list[str]:
    """Returns the digest of each source of a mixture: of the content of its files alone.

    Raises:
        ConfigError: two sources have the same content.
    """
    names: dict[str, str] = {}
    for source, files in zip(config.mixture, file_lists, strict=True):
        key = digest(sources.fingerprints(files, cache))
        if key in names:
            what = f"{names[key]!r} and {source.name!r} have the same content (digest {key})"
            raise ConfigError([f"mixture: {what}; name it once, with the sum of both epochs or weights"], "data")
        names[key] = source.name
    return list(names)


def mixture_of(config: DataConfig, corpus: Corpus) -> list[Portion]:
    """Returns what each source of a mixture gives, in the order of their digests; [] without a mixture.

    Args:
        corpus: the prepared corpus of the configuration.

    Raises:
        ConfigError: a source is gone.
    """
    if not config.mixture:
        return []
    problems: list[str] = []
    files = _find_sources(config, problems, [])
    refuse(problems, "data")
    digests = _mixture_digests(config, files, corpus.folder.parent)
    alone = [{"documents": corpus.train.documents, "bytes": corpus.train.bytes, "held": corpus.validation.documents}]
    start, first, portions = 0, 0, []
    order = sorted(zip(digests, config.mixture, strict=True), key=lambda pair: pair[0])
    for (key, source), part in zip(order, corpus.metadata.get("sources", alone), strict=True):
        end, last = start + part["documents"], first + part.get("held", 0)
        tokens = [int(corpus.train.document_starts[number]) for number in (start, end)]
        held = (int(corpus.validation.document_starts[first]), int(corpus.validation.document_starts[last]))
        held = held if last > first else (0, 0)
        whole = Portion(source.name, key, tokens[0], tokens[1], part["bytes"], source.epochs, source.weight, held)
        portions.append(whole)
        start, first = end, last
    return portions


def content(config: DataConfig, cache_dir: str | Path | None = None) -> dict[str, str]:
    """Returns digests of the content of all files that a configuration names, independent of their location.

    Args:
        cache_dir: folder of corpora, which stores the digests of large files; None reads every file.

    Returns:
        `source`, `mixture` if it is one, and `validation` and `tokenizer` if they are files: 12 hexadecimal digits
        each.

    Raises:
        ConfigError: a file does not exist.
        OSError: a file cannot be read.
    """
    problems: list[str] = []
    train = _find_sources(config, problems, [])
    files = {} if config.mixture else {"source": train[0]}
    if config.validation:
        files["validation"] = sources.find_files(config.validation, "validation", problems, [])
    refuse(problems, "data")
    cache = None if cache_dir is None else Path(cache_dir)
    digests = {key: digest(_content(listed, cache)) for key, listed in files.items()}
    if config.mixture:
        listed = zip(_mixture_digests(config, train, cache), config.mixture, train, strict=True)
        digests["mixture"] = digest(
            sorted([key, source.epochs, source.weight, _content(files, cache)] for key, source, files in listed)
        )
    if isinstance(config.tokenizer, FILES):
        digests["tokenizer"] = tokenizer_fingerprint(config.tokenizer)[:12]
    return digests


def revisions(config: DataConfig) -> dict[str, str]:
    """Returns the commit of each name on the Hub that a configuration has, by the name."""
    names = [] if isinstance(config.source, str) else config.source
    commits = hub.revisions([*names, *config.validation], "dataset")
    if isinstance(config.tokenizer, FileTokenizerConfig):
        commits |= hub.revisions([config.tokenizer.path], "model")
    return commits


def _content(files: list[SourceFile], cache: Path | None) -> list[list]:
    prints = sources.fingerprints(files, cache)
    return [[file.kind, file.named, content] for file, content in zip(files, prints, strict=True)]


def _identity(config: DataConfig, train: list[list[SourceFile]], held: list[SourceFile], cache: Path) -> dict:
    values = config.model_dump(mode="json", exclude={"packing", "mixture"})
    if isinstance(config.tokenizer, FILES):
        values["tokenizer"]["path"] = tokenizer_fingerprint(config.tokenizer)
    if held:
        del values["validation_fraction"]
    contents = [_content(files, cache) for files in train]
    # A mixture of one source is the corpus of this source.
    values["source"] = contents[0] if len(contents) == 1 else {"mixture": contents}
    values["validation"] = _content(held, cache)
    return {"format": FORMAT, **values}


def _read(
    config: DataConfig,
    train: list[list[SourceFile]],
    held: list[SourceFile],
    skipped: list[str],
    progress: Progress | None,
) -> _Inputs:
    problems, empty = list[str](), Counter[str]()
    before = len(skipped)
    scans = [_scan(files, config.text_key, problems, skipped, progress, empty) for files in train]
    sizes, hashes = (np.concatenate(arrays) for arrays in zip(*scans, strict=True))
    ends = list(itertools.accumulate(len(scan[0]) for scan in scans))
    files = [file for source in train for file in source]
    held_sizes, held_hashes = _scan(held, config.text_key, problems, skipped, progress, empty)
    for key, documents, listed in (("source", sizes, files), ("validation", held_sizes, held)):
        if listed and not problems and not len(documents):
            first = f" (the first that is left out: {skipped[before]})" if skipped[before:] else ""
            problems.append(f"{key}: its {len(listed)} files contain no text{first}; give files with UTF-8 text")
    refuse(problems, "data")
    if held:
        sizes, hashes = np.concatenate([sizes, held_sizes]), np.concatenate([hashes, held_hashes])
        is_held = np.arange(len(sizes)) >= len(sizes) - len(held_sizes)
        split = given_split(sizes, hashes, is_held, config.max_bytes, config.seed)
    else:
        split = split_documents(sizes, hashes, config.validation_fraction, config.max_bytes, config.seed)
    if not split.cut.any():
        why = f"holding out {config.validation_fraction} of its {split.keep.sum()} bytes leaves none"
        fix = "lower validation_fraction, or"
        if held:
            why, fix = "all of its documents are also held-out text", "name other validation files, or"
        raise ConfigError([f"source: no text is left to train on: {why}; {fix} give more text"], "data")
    if (split.cut == split.keep).all():
        small = f"{split.keep.sum()} bytes of text are too few to hold out {config.validation_fraction} of them"
        raise ConfigError([f"validation_fraction: {small}; give more text, raise it, or name validation files"], "data")
    return _Inputs([*files, *held], ends, config.text_key, sizes, hashes, split, empty)


def _scan(
    files: list[SourceFile],
    text_key: str,
    problems: list[str],
    skipped: list[str],
    progress: Progress | None,
    empty: Counter[str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Reads all documents. Returns their sizes in bytes (int64) and content hashes (uint64); collects the problems."""
    sizes, hashes, count = array("q"), array("Q"), 0
    total, done = sum(file.path.stat().st_size for file in files), 0
    for file in files:
        reasons: list[str] = []
        for text in records.read_documents(file, text_key, reasons, empty):
            sizes.append(len(text))
            hashes.append(hash64(text))
        # A folder of programs holds JSON that is no rows of text.
        is_text = file.kind != "text" and (len(sizes) > count or "json" not in file.path.name.lower().split(".")[1:])
        (problems if file.named or is_text else skipped).extend(reasons)
        count = len(sizes)
        done += file.path.stat().st_size
        if progress:
            progress("reading", done, total)
    return np.array(sizes, dtype=np.int64), np.array(hashes, dtype=np.uint64)


def _build(
    folder: Path,
    name: str,
    config: DataConfig,
    inputs: _Inputs,
    tokenizer: Tokenizer | None,
    skipped: list[str],
    progress: Progress | None,
) -> None:
    total = int(inputs.split.keep.sum())
    if tokenizer is None:
        if progress:
            progress("learning merges", 0, total)
        tokenizer = _learn(config, inputs)
    tokenizer.save(folder / TOKENIZER)
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {
        split: shards.ShardWriter(folder, split, dtype, tokenizer.end_of_document, tokenizer.unknown)
        for split in ("train", "validation")
    }
    # Documents and bytes of the training split, and held-out documents, by source.
    written = [{"documents": 0, "bytes": 0, "held": 0} for _ in inputs.ends]
    try:
        done = 0
        for batch in batches(inputs.parts(), BATCH, lambda part: len(part[1])):
            encoded = tokenizer.encode_documents([text for _, text, _ in batch])
            for (split, text, source), tokens in zip(batch, encoded, strict=True):
                writers[split].add(tokens, len(text))
                if split == "train":
                    written[source]["documents"] += 1
                    written[source]["bytes"] += len(text)
                elif source < len(written):
                    written[source]["held"] += 1
                done += len(text)
            if progress:
                progress("tokenizing", done, total)
        splits = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    values = {
        "digest": name,
        "config": config.model_dump(mode="json", exclude={"packing", "mixture"}),
        "split": inputs.split.by,
        "copies_left_out": inputs.split.copies,
        "skipped": len(skipped),
        "skipped_files": skipped[:LISTED],
        "tokenizer": {"name": tokenizer.name, **shards.file_entry(folder / TOKENIZER)},
        "splits": splits,
    }
    if len(written) > 1:
        values["sources"] = written
    if inputs.empty:
        values["rows_left_out"] = dict(sorted(inputs.empty.items()))
    if commits := revisions(config):
        values["revisions"] = commits
    shards.write_metadata(folder, values)


def _learn(config: DataConfig, inputs: _Inputs) -> Tokenizer:
    """Learns a tokenizer from the training part of documents, taken in a random order up to `train_bytes` bytes."""
    asked = config.tokenizer
    place = uniform(inputs.hashes, config.seed, "learn merges")
    used = take(inputs.split.cut, place, asked.train_bytes)
    texts = (cut_text(text, int(used[number]), int(used[number]))[0] for number, text in inputs.texts() if used[number])
    decoded = (text.decode() for text in texts)
    if isinstance(asked, WordPieceTokenizerConfig):
        return train_wordpiece(decoded, asked.vocab_size, asked.lowercase)
    return train_bpe(decoded, asked.vocab_size, asked.line_ends)
