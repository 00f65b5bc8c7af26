"""The page on which people judge a sample of a corpus: one HTML file that needs no network.

The keys 1, 2 and 3 judge a document as good, unsure or bad. Progress is kept in the browser; the page saves
verdicts.json, which `linnet corpus verdicts` reads. Scores are hidden until the reader asks for them, so that they do
not sway the verdict.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from linnet.corpus.scoring.sample import Drawn, Sample
from linnet.runs.files import write_atomic

SHOWN = 8000  # most characters of a document on the page


def write_review(sample: Sample, page: Path) -> None:
    """Writes the page of a sample. The same sample gives the same bytes."""
    write_atomic(page, review_page(sample))


def review_page(sample: Sample) -> str:
    """Returns the page of a sample as HTML."""
    values = {"sample": sample.digest, "per": sample.per, "documents": [_values(one) for one in sample.drawn]}
    # Inside of a script, `</script>` and `<!--` of a document must not be read as HTML.
    data = json.dumps(values, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    template = files("linnet.corpus.page").joinpath("review.html").read_text(encoding="utf-8")
    return template.replace("SAMPLE", data, 1)


def _values(one: Drawn) -> dict[str, Any]:
    document, decile = one.document, one.stratum.decile
    origin = {"source": document.source, "file": document.file, "row": document.row, "decile": decile}
    more = max(0, len(document.text) - SHOWN)
    return origin | {"score": one.score, "text": document.text[:SHOWN], "more": more}
