"""Text from which a small model learns to find needles: a question with its answer, hidden, and asked again.

The words are those of `linnet.evaluate.needle` in its easy mode, the questions are drawn anew. Recall is learned
suddenly, after a plateau that long texts make longer (most of what they hold says nothing about it), so begin with one
question and few sentences of haystack, go on with several questions, of which the right one must be looked up, and
then with longer texts: a curriculum of trainings, each from the weights of the one before (`init_from`). With one
question alone, a model learns to copy the last number that it saw, which is another text's where texts follow one
another in a sequence.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from linnet.evaluate.needle import NeedleConfig, draw_question, draw_sentence
from linnet.runs.files import write_atomic

SHORT = 0.3  # share of documents with at most two sentences of haystack, so that what was learned is kept


def lessons(
    count: int, sentences: int, *, keys: int = 1, hidden: int = 1, digits: int = 2, seed: int = 0
) -> Iterator[str]:
    """Documents: questions with their answers among sentences of haystack, and some of them again at the end.

    Args:
        count: how many documents.
        sentences: most sentences of haystack in a document; any number up to it is as likely.
        keys: most questions in a document; one or more are as likely, and as many or one more are asked again.
        hidden: most times that each stands in the haystack; once or more are as likely.
        digits: of the answers.
    """
    generator = np.random.default_rng(seed)
    config = NeedleConfig(digits=digits)
    for _ in range(count):
        known: dict[str, str] = {}
        for _ in range(int(generator.integers(1, keys + 1))):
            question = draw_question(config, generator)
            known.setdefault(question.asked, question.needles[0])  # no thing has two numbers
        needles = list(known.values())
        parts = [f"{needle} " for needle in needles for _ in range(int(generator.integers(1, hidden + 1)))]
        most = min(sentences, 2) if generator.random() < SHORT else sentences
        for _ in range(int(generator.integers(most + 1))):
            parts.insert(int(generator.integers(len(parts) + 1)), draw_sentence(generator))
        asked = generator.integers(len(needles), size=int(generator.integers(1, keys + 2))).tolist()
        yield "".join([*parts, *(f"{needles[place]} " for place in asked)]).rstrip()


def write_lessons(path: str | Path, count: int, sentences: int, **options) -> Path:
    """Writes `lessons` as JSONL with the key `text`, whole or not at all; a file that is there is left as it is."""
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps({"text": text}) + "\n" for text in lessons(count, sentences, **options)))
    return path
