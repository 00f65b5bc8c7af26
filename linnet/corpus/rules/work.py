"""The stage `clean`: rules applied to every document, with counts and samples of what each rule removed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from linnet.corpus.documents import Document, Part, Samples, read_part
from linnet.corpus.rules import DEFAULT, Change, Rules, clean_text
from linnet.corpus.rules.spans import MASK

BEFORE, AFTER = 25, 140  # characters of a sample before and behind the first place that changed
SPAN = 40  # characters of a span in a sample


@dataclass(frozen=True)
class Clean:
    """Cleans the documents of a part.

    Counts: `kind.KIND` and `dropped.REASON` (documents), `changed.RULE` (documents that are kept or dropped),
    `removed.RULE` (characters), and `kept.layout` (documents with tables or code in plain text, which stay as they
    are). Samples: `changed.RULE` with the text before and after, `dropped.REASON` with the text.
    """

    rules: Rules = DEFAULT

    def __call__(self, part: Part, counts: Counter, samples: Samples) -> Iterator[Document]:
        for document in read_part(part, counts, samples):
            kind = self.rules.kind_of(document.text, document.source, document.file)
            counts[f"kind.{kind}"] += 1
            cleaned = clean_text(document.text, self.rules, kind)
            for rule, characters in cleaned.removed.items():
                counts[f"changed.{rule}"] += 1
                counts[f"removed.{rule}"] += characters
            if any(samples.wants(f"changed.{rule}", document) for rule in cleaned.removed):
                trace: list[Change] = []
                clean_text(document.text, self.rules, kind, trace)
                for rule in cleaned.removed:
                    change = next(change for change in trace if change.rule == rule)
                    before, after = excerpts(change)
                    samples.add(f"changed.{rule}", document, before=before, after=after)
            if cleaned.text is None:
                counts[f"dropped.{cleaned.dropped}"] += 1
                samples.add(f"dropped.{cleaned.dropped}", document, text=document.text)
            else:
                if cleaned.layout:
                    counts["kept.layout"] += 1
                yield replace(document, text=cleaned.text)


def excerpts(change: Change) -> tuple[str, str]:
    """Returns the surroundings of the first place that a rule changed, before and after it."""
    place = _common(change.before, change.after)
    start = max(0, place - BEFORE)
    span = change.before.count(MASK, 0, start)
    return _excerpt(change.before, start, place, change.spans[span:]), _excerpt(
        change.after, start, place, change.spans[span:]
    )


def _common(one: str, other: str) -> int:
    """Returns the length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _excerpt(text: str, start: int, place: int, spans: list[str]) -> str:
    first, *others = text[start : place + AFTER].split(MASK)
    shown = [span if len(span) <= SPAN else f"{span[: SPAN // 2]}…{span[-SPAN // 2 :]}" for span in spans]
    return first + "".join(span + outside for span, outside in zip(shown, others, strict=False))
