"""Text from which a small model learns to find needles: a question with its answer, hidden, and asked again.

The words are those of `linnet.evaluate.needle` in its easy mode, the questions are drawn anew. Recall is learned
suddenly, after a plateau that long texts make longer (most of what they hold says nothing about it), so begin with
few sentences of haystack and go on with more: a curriculum of two or three trainings, each from the weights of the
one before (`init_from`).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from linnet.evaluate.needle import NeedleConfig, draw_question, draw_sentence
from linnet.runs.files import write_atomic

SHORT = 0.3  # share of documents with at most two sentences of haystack, so that what was learned is kept


def lessons(count: int, sentences: int, *, hidden: int = 3, digits: int = 2, seed: int = 0) -> Iterator[str]:
    """Documents, each with one question and its answer among sentences of haystack and once more at the end.

    Args:
        count: how many documents.
        sentences: most sentences of haystack in a document; as many as that or any fewer are as likely.
        hidden: most times that the question with its answer stands in the haystack; once or more are as likely.
        digits: of the answer.
    """
    generator = np.random.default_rng(seed)
    config = NeedleConfig(digits=digits)
    for _ in range(count):
        [needle] = draw_question(config, generator).needles
        most = 2 if generator.random() < SHORT else sentences
        parts = [f"{needle} "] * int(generator.integers(1, hidden + 1))
        for _ in range(int(generator.integers(most + 1))):
            parts.insert(int(generator.integers(len(parts) + 1)), draw_sentence(generator))
        yield "".join([*parts, needle])


def write_lessons(path: str | Path, count: int, sentences: int, **options) -> Path:
    """Writes `lessons` as JSONL with the key `text`, whole or not at all; a file that is there is left as it is."""
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps({"text": text}) + "\n" for text in lessons(count, sentences, **options)))
    return path
