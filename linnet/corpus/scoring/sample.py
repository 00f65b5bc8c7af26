"""Documents for people to judge: drawn from each source and each tenth of its scores, the same ones for a seed."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from linnet.config import Config, ConfigError, load_json, parse, refuse
from linnet.corpus.documents import Document, find_parts, read_part
from linnet.corpus.scoring.score import Per, score_of
from linnet.evaluate.classification import wilson
from linnet.runs.files import write_atomic

DECILES = 10
SHOWN = 8000  # most characters of a document on the page of a sample


@dataclass(frozen=True, order=True)
class Stratum:
    """A group of documents that are judged together.

    Attributes:
        decile: 1 (lowest scores) to 10; 0 for documents without a score.
    """

    source: str
    decile: int

    @property
    def name(self) -> str:
        return f"{self.source}, {f'decile {self.decile}' if self.decile else 'not scored'}"


@dataclass(frozen=True)
class Drawn:
    """A document of a sample."""

    document: Document
    stratum: Stratum
    score: float | None


@dataclass(frozen=True)
class Sample:
    """A sample of a corpus.

    Attributes:
        seed: of the choice.
        sizes: number of documents of the corpus in each stratum.
        drawn: the documents, in an order that mixes strata.
        per: whether scores are nats per byte or per letter.
    """

    seed: int
    sizes: dict[Stratum, int]
    drawn: list[Drawn]
    per: Per = "letter"

    @property
    def digest(self) -> str:
        """Names the sample: 12 hexadecimal digits of the identities and texts of its documents."""
        hashed = hashlib.sha256()
        for draw in self.drawn:
            hashed.update(f"{_identity(draw.document)}\0{draw.document.text}\0".encode())
        return hashed.hexdigest()[:12]


def draw_sample(sources: Sequence[str], n: int, seed: int = 0, per: Per = "letter", text_key: str = "text") -> Sample:
    """Draws up to `n` documents: of each stratum its share of the corpus, and at least one while `n` lasts.

    The choice depends on the seed and on the identities and scores of the documents. The sources are read twice.

    Raises:
        ConfigError: a source cannot be read, or has no document.
    """
    strata = _strata(sources, per, text_key)
    sizes = {stratum: len(keys) for stratum, keys in strata.items()}
    chosen: dict[str, Stratum] = {}
    for stratum, count in allocate(sizes, n).items():
        ordered = sorted(strata[stratum], key=lambda identity: _place(identity, seed))
        chosen |= dict.fromkeys(ordered[:count], stratum)
    drawn = [
        Drawn(document, chosen[identity], score_of(document, per))
        for document in _documents(sources, text_key)
        if (identity := _identity(document)) in chosen
    ]
    drawn.sort(key=lambda draw: _place(_identity(draw.document), seed + 1))
    return Sample(seed, sizes, drawn, per)


def allocate(sizes: Mapping[Stratum, int], n: int) -> dict[Stratum, int]:
    """Divides `n` draws among strata in proportion to their sizes, with at least one for each if `n` allows it.

    The next draw goes to the stratum that lacks most of its share; no stratum gets more than it has.
    """
    total = sum(sizes.values())
    n = min(n, total)
    strata = sorted(sizes, key=lambda stratum: (-sizes[stratum], stratum))
    counts = {stratum: int(place < n) for place, stratum in enumerate(strata)}
    for _ in range(n - sum(counts.values())):
        open_ = [stratum for stratum in strata if counts[stratum] < sizes[stratum]]
        counts[max(open_, key=lambda stratum: sizes[stratum] / total * n - counts[stratum])] += 1
    return counts


def deciles(scores: Sequence[float], keys: Sequence[str]) -> np.ndarray:
    """Returns the tenth of each score among all of them, 1 to 10, int64 [n]; `keys` order equal scores."""
    order = np.lexsort((np.asarray(keys), np.asarray(scores)))
    tenths = np.empty(len(order), dtype=np.int64)
    tenths[order] = np.arange(len(order)) * DECILES // max(1, len(order)) + 1
    return tenths


def _strata(sources: Sequence[str], per: Per, text_key: str) -> dict[Stratum, list[str]]:
    """Returns the identities of the documents of each stratum."""
    scored: dict[str, tuple[list[float], list[str]]] = {}
    strata: dict[Stratum, list[str]] = {}
    for document in _documents(sources, text_key):
        identity, score = _identity(document), score_of(document, per)
        if score is None:
            strata.setdefault(Stratum(document.source, 0), []).append(identity)
        else:
            scores, identities = scored.setdefault(document.source, ([], []))
            scores.append(score)
            identities.append(identity)
    for source, (scores, identities) in scored.items():
        for identity, decile in zip(identities, deciles(scores, identities).tolist(), strict=True):
            strata.setdefault(Stratum(source, decile), []).append(identity)
    if not strata:
        raise ConfigError([f"FOLDER: {', '.join(sources)} has no document to sample; name another"], "sample")
    return strata


def _documents(sources: Sequence[str], text_key: str) -> Iterator[Document]:
    problems: list[str] = []
    parts = find_parts(list(sources), "FOLDER", problems, [], text_key)
    refuse(problems, "sample")
    for part in parts:
        yield from read_part(part, Counter())


def _identity(document: Document) -> str:
    return f"{document.source}\0{document.file}\0{document.row}"


def _place(identity: str, seed: int) -> bytes:
    """Returns the place of a document in a random order that depends on it and on the seed alone."""
    return hashlib.blake2b(identity.encode(), digest_size=16, key=seed.to_bytes(8, "little")).digest()


def write_review(sample: Sample, page: Path) -> None:
    """Writes the page on which people judge a sample: one HTML file that needs no network.

    The keys 1, 2 and 3 judge a document as good, unsure or bad. Progress is kept in the browser; the page saves
    verdicts.json, which `linnet corpus verdicts` reads. Scores are hidden until the reader asks for them, so that they
    do not sway the verdict. The same sample gives the same bytes.
    """
    write_atomic(page, review_page(sample))


def review_page(sample: Sample) -> str:
    """Returns the page of a sample as HTML."""
    values = {"sample": sample.digest, "per": sample.per, "documents": [_values(draw) for draw in sample.drawn]}
    # Inside of a script, `</script>` and `<!--` of a document must not be read as HTML.
    data = json.dumps(values, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files("linnet.corpus.page").joinpath("review.html").read_text(encoding="utf-8")
    return template.replace("SAMPLE", data, 1)


def _values(drawn: Drawn) -> dict[str, Any]:
    document, decile = drawn.document, drawn.stratum.decile
    origin = {"source": document.source, "file": document.file, "row": document.row, "decile": decile}
    more = max(0, len(document.text) - SHOWN)
    return origin | {"score": drawn.score, "text": document.text[:SHOWN], "more": more}


# What people decided about a sample: pass rates with Wilson intervals, and whether another round is needed.

FORMAT = 1
PASS_RATE = 0.9


class Verdict(Config):
    """The decision about one document; null: not judged yet."""

    source: str
    file: str
    row: int
    decile: int = Field(ge=0, le=10)
    verdict: Literal["good", "unsure", "bad"] | None = None


class Verdicts(Config):
    """The file that the review page saves."""

    format: Literal[1] = Field(description="version of this file")
    sample: str = Field(description="digest of the sample, as the page shows it")
    documents: list[Verdict] = Field(min_length=1)


@dataclass(frozen=True)
class Rate:
    """How many documents of a group are good.

    Attributes:
        good, bad, unsure, open: counts; `unsure` and `open` (not judged) are not in the rate.
    """

    name: str
    good: int
    bad: int
    unsure: int
    open: int

    @property
    def judged(self) -> int:
        return self.good + self.bad

    @property
    def rate(self) -> float | None:
        """Share of good ones; None if nothing is judged."""
        return self.good / self.judged if self.judged else None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the rate."""
        return wilson(self.good, self.judged) if self.judged else (0.0, 1.0)

    def to_dict(self) -> dict:
        low, high = self.interval
        counts = {"good": self.good, "bad": self.bad, "unsure": self.unsure, "not_judged": self.open}
        return {"name": self.name, **counts, "rate": self.rate, "low": low, "high": high}


@dataclass(frozen=True)
class Decision:
    """The result of a review.

    Attributes:
        stop: True if the loop should stop.
        reason: one sentence.
        total: all documents. sources, deciles, strata: the documents by these groups.
    """

    stop: bool
    reason: str
    total: Rate
    sources: list[Rate]
    deciles: list[Rate]
    strata: list[Rate]

    def to_dict(self) -> dict:
        groups = {"sources": self.sources, "deciles": self.deciles, "strata": self.strata}
        breakdown = {name: [rate.to_dict() for rate in rates] for name, rates in groups.items()}
        return {
            "decision": "stop" if self.stop else "go",
            "reason": self.reason,
            "total": self.total.to_dict(),
            **breakdown,
        }


def read_verdicts(path: str | Path) -> Verdicts:
    """Reads the file that a review page saved.

    Raises:
        ConfigError: the file is missing or damaged; lists all problems.
    """
    try:
        values = load_json(path)
    except OSError as error:
        problem = f"{path}: cannot be read ({error.strerror or error}); name the file that the review page saved"
        raise ConfigError([problem], "verdicts") from None
    except ValueError as error:
        problem = f"{path}: is not JSON ({error}); save it from the review page again"
        raise ConfigError([problem], "verdicts") from None
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: is not a JSON object; save it from the review page again"], "verdicts")
    return parse(Verdicts, values, str(path))


def decide(verdicts: Verdicts, pass_rate: float = PASS_RATE) -> Decision:
    """Returns the rates of a review and its decision.

    The loop stops if the corpus is good enough: the lower end of the interval of all documents reaches `pass_rate`.
    Otherwise it goes on; documents that are not judged make the interval wide, so few verdicts never stop it.
    """
    total = _rates(verdicts, lambda verdict: "all")[0]
    low, high = total.interval
    if not total.judged:
        stop, reason = False, "no document is judged as good or bad"
    elif low >= pass_rate:
        stop, reason = True, f"the pass rate is at least {low:.3f}, and {pass_rate:g} is asked for"
    elif high < pass_rate:
        stop, reason = False, f"the pass rate is at most {high:.3f}, below the {pass_rate:g} that is asked for"
    else:
        stop, reason = False, f"the pass rate lies between {low:.3f} and {high:.3f}, so {pass_rate:g} is not certain"
    return Decision(
        stop,
        reason,
        total,
        _rates(verdicts, lambda verdict: verdict.source),
        _rates(verdicts, lambda verdict: _decile(verdict.decile)),
        _rates(verdicts, lambda verdict: f"{verdict.source}, {_decile(verdict.decile)}"),
    )


def _decile(decile: int) -> str:
    return f"decile {decile}" if decile else "not scored"


def _rates(verdicts: Verdicts, name: Callable[[Verdict], str]) -> list[Rate]:
    """Returns the rates of the groups that `name` makes, ordered by source and decile."""
    groups: dict[str, list[str | None]] = {}
    for verdict in sorted(verdicts.documents, key=lambda verdict: (verdict.source, verdict.decile)):
        groups.setdefault(name(verdict), []).append(verdict.verdict)
    counted = (
        Rate(group, *(decisions.count(kind) for kind in ("good", "bad", "unsure", None)))
        for group, decisions in groups.items()
    )
    return list(counted)
