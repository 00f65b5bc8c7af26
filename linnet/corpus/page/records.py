"""What the report of a corpus shows: the counts of each stage, and what is measured on the documents that are left."""

import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from linnet.config import ConfigError, refuse
from linnet.corpus.bpe import Share, add_shares, in_order, script_of_document, some
from linnet.corpus.documents import Document, find_inputs
from linnet.data.parts import batches
from linnet.data.sources import PLAN, STAGE, read_stage
from linnet.data.tokenizer import Tokenizer

NATS = {"byte": "nats_per_byte", "letter": "nats_per_letter"}  # keys of the scores in `Document.extra`
MEASURED = 64 << 20  # bytes of text whose scripts, scores and tokens are looked at, roughly
BATCH = 1 << 22  # bytes of text that are encoded at a time
DROPPED = ("dropped", "left out")  # groups of counts of documents that a stage leaves out
REMOVED = "documents removed"  # the same by source: documents removed/REASON/SOURCE
COPIES = ("exact copy", "near copy", "all lines copied")  # reasons that are duplicates; an evaluation item is none

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Step:
    """A stage, finished.

    Attributes:
        name: of the stage, with a number if there are several of this name.
        folder: where it is, or None if only a later stage tells of it.
        values: its `stage.json`; without samples if `folder` is None.
    """

    name: str
    folder: Path | None
    values: dict[str, Any]

    @property
    def counts(self) -> dict[str, int]:
        return self.values.get("counts") or {}

    @property
    def samples(self) -> dict[str, list[dict]]:
        return self.values.get("samples") or {}

    @property
    def labels(self) -> list[str]:
        return list(self.values.get("labels") or [])

    @property
    def per(self) -> str:
        """What the scores of its examples are nats per: "byte" or "letter"."""
        return (self.values.get("settings") or {}).get("per", "byte")

    @property
    def raw(self) -> list[str]:
        """Labels of the sources that the stage read as files, and not from a stage before it."""
        inputs = self.values.get("inputs") or []
        return [source["label"] for source in inputs if source.get("kind") == "files"]

    def of(self, unit: str, labels: Sequence[str] | None = None) -> int:
        """Returns a count by source, such as "documents read": the sum over these sources, or over all."""
        return sum(self.counts.get(f"{unit}/{source}", 0) for source in (self.labels if labels is None else labels))

    def group(self, name: str) -> dict[str, int]:
        """Returns the counts `NAME.X` by X, the largest first."""
        counts = {key.partition(".")[2]: n for key, n in self.counts.items() if key.partition(".")[0] == name and n}
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def drops(self) -> dict[str, int]:
        """Returns the documents that the stage left out by reason, the largest first."""
        drops: dict[str, int] = {}
        for name in DROPPED:
            drops |= self.group(name)
        for key, number in self.counts.items():
            if key.startswith(f"{REMOVED}/"):
                reason = key.split("/", 2)[1]
                drops[reason] = drops.get(reason, 0) + number
        rest = self.of("documents read") - self.of("documents written") - sum(drops.values())
        if rest > 0:
            drops["not said"] = rest
        return dict(sorted(drops.items(), key=lambda item: (-item[1], item[0])))


@dataclass
class Tally:
    """Documents, bytes and tokens of a source or a script.

    Attributes:
        documents, bytes: exact for a source, and an estimate for a script unless everything was measured.
        tokens: an estimate unless everything was measured, ends of documents included; None without a tokenizer.
    """

    documents: float = 0
    bytes: float = 0
    tokens: float | None = None

    def rounded(self) -> dict[str, int | None]:
        tokens = None if self.tokens is None else round(self.tokens)
        return {"documents": round(self.documents), "bytes": round(self.bytes), "tokens": tokens}


@dataclass
class CorpusRecords:
    """Everything on the page.

    Attributes:
        name: of the corpus: the folders of its last stages.
        steps: oldest first.
        last: those whose documents are the corpus; no other stage reads them.
        sources, scripts: what they hold, the one with most bytes first.
        measured: share of the bytes that were measured, 0 to 1; scripts and tokens are estimates below 1.
        tokenizer: by which tokens were counted, or None.
        token_scripts: what the tokens of each script hold, over what was measured; empty without exact bytes per token.
        scores: nats per `per` of the documents that were measured, by source.
        per: "byte" or "letter", as in the last filter; without one, "byte".
        problems: folders that could not be read, one line each.
    """

    name: str
    steps: list[Step]
    last: list[Step]
    sources: dict[str, Tally]
    scripts: dict[str, Tally] = field(default_factory=dict)
    measured: float = 0.0
    tokenizer: Tokenizer | None = None
    token_scripts: dict[str, Share] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    per: str = "byte"
    problems: list[str] = field(default_factory=list)

    @property
    def total(self) -> Tally:
        known = [tally.tokens for tally in self.sources.values() if tally.tokens is not None]
        return Tally(
            sum(tally.documents for tally in self.sources.values()),
            sum(tally.bytes for tally in self.sources.values()),
            sum(known) if known else None,
        )

    @property
    def architectures(self) -> list[str]:
        """The sources, under the name that `drawing.Canvas` reads."""
        return [plain(label) for label in self.sources]

    def values(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        tokenizer = self.tokenizer
        return {
            "name": self.name,
            "total": self.total.rounded(),
            "sources": {name: tally.rounded() for name, tally in self.sources.items()},
            "scripts": {name: tally.rounded() for name, tally in self.scripts.items()},
            "measured": self.measured,
            "tokenizer": None if tokenizer is None else {"name": tokenizer.name, "digest": tokenizer.digest},
            "token_scripts": {name: vars(share) for name, share in self.token_scripts.items()},
            "stages": [_stage_values(step) for step in self.steps],
            "scores": {name: quantiles(scores) for name, scores in self.scores.items()},
            "problems": self.problems,
        }


def plain(text: str) -> str:
    """Returns text in which characters that are not seen are spelled out as their numbers. Pictures cannot have others:
    a control character ends the process that draws them."""
    return "".join(f"U+{ord(character):04X}" if is_hidden(character) else character for character in text)


def is_hidden(character: str) -> bool:
    """Whether a character is not seen, such as one that turns the direction of a line."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs") and character not in "\n\t"


def quantiles(scores: np.ndarray) -> dict[str, float]:
    """Returns the number of scores and their quantiles."""
    named = {"lowest": 0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "highest": 1}
    return {"documents": len(scores)} | {name: round(float(np.quantile(scores, q)), 4) for name, q in named.items()}


def read_corpus(
    folders: Sequence[str | Path],
    tokenizer: Tokenizer | None = None,
    *,
    measure_bytes: int = MEASURED,
    progress: Progress | None = None,
) -> CorpusRecords:
    """Reads stages, and measures the documents of the last ones.

    Args:
        folders: of stages; of a chain the last is enough for all counts, but each stage has its own samples.
        tokenizer: counts the tokens.
        measure_bytes: bytes of text whose scripts, scores and tokens are looked at; 0 takes all.

    Raises:
        ConfigError: none of the folders is a finished stage, or the shards of a last stage are damaged.
    """
    problems: list[str] = []
    steps = _steps([Path(folder) for folder in folders], problems)
    if not any(step.folder for step in steps):
        raise ConfigError(problems, "corpus report")
    read = {_key(earlier) for step in steps if step.folder for earlier in step.values.get("history") or []}
    last = [step for step in steps if step.folder and _key(step.values) not in read]
    sources: dict[str, Tally] = {}
    for step in last:
        for label in step.labels:
            tally = sources.setdefault(label, Tally())
            tally.documents += step.of("documents written", [label])
            tally.bytes += step.of("bytes written", [label])
    order = sorted(sources, key=lambda label: (-sources[label].bytes, label))
    records = CorpusRecords(
        ", ".join(dict.fromkeys(step.folder.resolve().name for step in last if step.folder)),
        steps,
        last,
        {label: sources[label] for label in order},
        tokenizer=tokenizer,
        problems=problems,
    )
    _measure(records, measure_bytes, progress)
    return records


def _steps(folders: list[Path], problems: list[str]) -> list[Step]:
    """Returns the stages of folders and those that they tell of, each once, earlier ones first."""
    stages: list[tuple[Path, dict]] = []
    for folder in folders:
        values = read_stage(folder.expanduser())
        if values is not None:
            stages.append((folder.expanduser(), values))
        elif (folder / PLAN).is_file():
            problems.append(f"{folder}: this stage is not finished; give its command again to resume it")
        elif inner := sorted(_stages_in(folder), key=lambda path: path.stat().st_mtime)[-2:]:
            within = " ".join(str(path.parent) for path in inner)
            problems.append(f"{folder}: holds stages; name the stages themselves, such as {within}")
        else:
            problems.append(f"{folder}: is not the folder of a stage; make one with: linnet corpus clean")
    known: dict[str, tuple[Path | None, dict]] = {}
    for folder, values in sorted(stages, key=lambda stage: len(stage[1].get("history") or [])):
        for earlier in values.get("history") or []:
            known.setdefault(_key(earlier), (None, earlier))
        known[_key(values)] = (folder, values)
    steps, seen = [], dict[str, int]()
    for folder_or_none, values in known.values():
        name = str(values["stage"])
        seen[name] = seen.get(name, 0) + 1
        steps.append(Step(name if seen[name] == 1 else f"{name} {seen[name]}", folder_or_none, values))
    return steps


def _stages_in(folder: Path) -> list[Path]:
    """Returns the `stage.json` of folders in a folder and of those in them, as in the rounds of a loop."""
    return [path for pattern in ("*", "*/*") for path in folder.glob(f"{pattern}/{STAGE}")]


def _key(values: dict) -> str:
    """Returns what identifies a stage: what it is, its settings and the content of its inputs."""
    return json.dumps([values.get(name) for name in ("stage", "settings_digest", "inputs")], sort_keys=True)


def _measure(records: CorpusRecords, measure_bytes: int, progress: Progress | None) -> None:
    total = records.total.bytes
    share = 1.0 if not measure_bytes or not total else measure_bytes / total
    # Documents and tokens by source and script, of the documents that are read.
    cells: dict[tuple[str, str], Tally] = {}
    scores: dict[str, list[float]] = {}
    for step in records.steps:
        records.per = step.per if step.values["stage"] == "filter" else records.per
    lengths = None if records.tokenizer is None else records.tokenizer.byte_lengths
    done = 0
    for batch in batches(_documents(records.last, share), BATCH, lambda document: len(document.text)):
        ids: Sequence[np.ndarray | None] = [None] * len(batch)
        if records.tokenizer is not None:
            ids = records.tokenizer.encode_documents([document.text.encode() for document in batch])
        for document, tokens in zip(batch, ids, strict=True):
            size = len(document.text.encode())
            cell = cells.setdefault((document.source, script_of_document(document.text)), Tally())
            cell.documents += 1
            cell.bytes += size
            done += size
            if tokens is not None:
                cell.tokens = (cell.tokens or 0) + len(tokens) + 1  # and the end of the document
                if lengths is not None:
                    add_shares(records.token_scripts, lengths, document.text, tokens)
            _add_score(scores, document, records.per)
        if progress:
            progress("measuring documents", done, max(done, int(min(1.0, share) * total)))
    records.measured = min(1.0, done / total) if total else 0.0
    records.token_scripts = in_order(records.token_scripts)
    # A filter has cut the tails from the last stage: a stage of scores that was named too has all of them.
    for step in [step for step in records.steps if step.folder and step.values["stage"] == "score"][-1:]:
        if step not in records.last:
            scores = {}
            for document in _documents([step], share):
                _add_score(scores, document, records.per)
    records.scores = {label: np.array(scores[label]) for label in records.sources if label in scores}
    _scale(records, cells)


def _scale(records: CorpusRecords, cells: dict[tuple[str, str], Tally]) -> None:
    """Sets tokens of sources, and scripts: each source's measured documents stand for all of its documents."""
    scripts: dict[str, Tally] = {}
    for label, source in records.sources.items():
        tallies = {script: tally for (of, script), tally in cells.items() if of == label}
        measured = sum(tally.bytes for tally in tallies.values())
        if not measured:
            continue
        by_bytes, by_documents = source.bytes / measured, source.documents / sum(t.documents for t in tallies.values())
        for script, tally in tallies.items():
            total = scripts.setdefault(script, Tally())
            total.documents += tally.documents * by_documents
            total.bytes += tally.bytes * by_bytes
            if tally.tokens is not None:
                total.tokens = (total.tokens or 0) + tally.tokens * by_bytes
                source.tokens = (source.tokens or 0) + tally.tokens * by_bytes
    records.scripts = dict(sorted(scripts.items(), key=lambda item: (-item[1].bytes, item[0])))


def _add_score(scores: dict[str, list[float]], document: Document, per: str) -> None:
    score = document.extra.get(NATS[per])
    if isinstance(score, int | float) and not isinstance(score, bool):
        scores.setdefault(document.source, []).append(float(score))


def _documents(steps: Sequence[Step], share: float) -> Iterable[Document]:
    for step in steps:
        wrong: list[str] = []
        parts = find_inputs([str(step.folder)], "FOLDER", wrong).parts if step.values.get("documents") else []
        refuse(wrong, "corpus report")
        yield from some(parts, share)


def _stage_values(step: Step) -> dict[str, Any]:
    kept = {key: step.values.get(key) for key in ("stage", "settings", "settings_digest", "counts", "results")}
    sizes = {f"{unit} {done}": step.of(f"{unit} {done}") for unit in ("documents", "bytes") for done in _DONE}
    return {"name": step.name, **kept, **sizes, "drops": step.drops()}


_DONE = ("read", "written")
