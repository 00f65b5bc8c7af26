"""What people decided about a sample: pass rates with Wilson intervals, and whether another round is needed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from linnet.config import Config, ConfigError, parse
from linnet.evaluate.classification import wilson

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
        found = {name: [rate.to_dict() for rate in rates] for name, rates in groups.items()}
        return {
            "decision": "stop" if self.stop else "go",
            "reason": self.reason,
            "total": self.total.to_dict(),
            **found,
        }


def read_verdicts(path: str | Path) -> Verdicts:
    """Reads the file that a review page saved.

    Raises:
        ConfigError: the file is missing or damaged; lists all problems.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"{path}: cannot be read ({error.strerror or error}); name the file that the review page saved"
        raise ConfigError([problem], "verdicts") from None
    except (ValueError, RecursionError) as error:
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
    total = _rates(verdicts, lambda one: "all")[0]
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
        _rates(verdicts, lambda one: one.source),
        _rates(verdicts, lambda one: _decile(one.decile)),
        _rates(verdicts, lambda one: f"{one.source}, {_decile(one.decile)}"),
    )


def _decile(decile: int) -> str:
    return f"decile {decile}" if decile else "not scored"


def _rates(verdicts: Verdicts, name: Callable[[Verdict], str]) -> list[Rate]:
    """Returns the rates of the groups that `name` makes, ordered by source and decile."""
    groups: dict[str, list[str | None]] = {}
    for one in sorted(verdicts.documents, key=lambda one: (one.source, one.decile)):
        groups.setdefault(name(one), []).append(one.verdict)
    counted = (
        Rate(group, *(found.count(kind) for kind in ("good", "bad", "unsure", None))) for group, found in groups.items()
    )
    return list(counted)
