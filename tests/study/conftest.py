"""A text and a study that are small enough to train in a test."""

import random

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text file of 40 kB with words that repeat, so that a model can learn from it."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(60)]
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(1000)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def tiny(text):
    """Settings of a study with four runs of a few dozen steps."""
    return {
        "name": "tiny",
        "architectures": ["llama", "tnl"],
        "budgets": [4e8],
        "sizes": [[16, 1], [24, 1]],
        "seq_len": 32,
        "batch_size": 4,
        "minimum_steps": 5,
        "data": {"source": [str(text)]},
        "train": {"evaluate_tokens": 1024},
        "executor": {"kind": "inline"},
    }
