"""Training text from which a small model learns to find needles: hidden questions with answers, and the same again.

The sentences are those of the easy or standard mode of `linnet.evaluate.retrieval.needle`, with new questions. A model
learns recall suddenly, after a plateau. Long texts make the plateau longer, since most of their tokens do not depend on
recall. A curriculum of trainings avoids this, each starting from the weights of the previous one (`init_from`): first
one question and few sentences of haystack, then several questions, then longer texts. Several questions are needed
because with one question the model learns to copy the last number that it read, and if several texts share a sequence,
this number may belong to another text.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from linnet.evaluate.retrieval.needle import NeedleConfig, Question, draw_question, draw_sentence
from linnet.runs.files import write_atomic

SHORT = 0.3  # share of documents with at most two sentences of haystack, so that the model does not forget short texts


def lessons(
    count: int,
    sentences: int,
    *,
    keys: int = 1,
    hidden: int = 1,
    digits: int = 2,
    seed: int = 0,
    mode: Literal["easy", "standard"] = "easy",
) -> Iterator[str]:
    """Yields documents: needles among sentences of haystack, and questions about some of them with answers at the end.

    All numbers are drawn uniformly.

    Args:
        count: number of documents.
        sentences: upper bound of haystack sentences per document.
        keys: upper bound of different questions per document; the end asks 1 to `keys` + 1 of them.
        hidden: upper bound of copies of each needle in the haystack.
        digits: digits of the answers.
        seed: seed of all draws.
        mode: easy hides the question with its answer, standard the answer as a statement.
    """
    generator = np.random.default_rng(seed)
    config = NeedleConfig(digits=digits, mode=mode)
    for _ in range(count):
        known: dict[str, Question] = {}
        for _ in range(int(generator.integers(1, keys + 1))):
            question = draw_question(config, generator)
            known.setdefault(question.asked, question)  # one number per thing
        questions = list(known.values())
        parts = [f"{one.needles[0]} " for one in questions for _ in range(int(generator.integers(1, hidden + 1)))]
        most = min(sentences, 2) if generator.random() < SHORT else sentences
        for _ in range(int(generator.integers(most + 1))):
            parts.insert(int(generator.integers(len(parts) + 1)), draw_sentence(generator))
        asked = generator.integers(len(questions), size=int(generator.integers(1, keys + 2))).tolist()
        ends = (f"{questions[place].asked} {questions[place].answers[0]}. " for place in asked)
        yield "".join([*parts, *ends]).rstrip()


def write_lessons(path: str | Path, count: int, sentences: int, **options) -> Path:
    """Writes `lessons` as JSONL with the key `text`, in one atomic step; an existing file is kept unchanged."""
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps({"text": text}) + "\n" for text in lessons(count, sentences, **options)))
    return path
