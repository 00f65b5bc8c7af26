"""A corpus with planted garbage small enough for a test."""

import json
import random

import pytest

ROWS, GARBAGE, SHORT = 80, 10, 17  # every 10th document is garbage, every 17th is short


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Two JSONL files with 40 documents each; `bad` says which are garbage."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("corpus")
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    rows: dict[str, list[dict]] = {"one": [], "two": []}
    for number in range(ROWS):
        bad = number % GARBAGE == 3
        text = (
            "".join(rng.choices("zyxwvuQRS019", k=150)) if bad else " ".join(rng.choices(words, k=rng.randint(20, 60)))
        )
        rows["one" if number < ROWS // 2 else "two"].append(
            {"text": text if number % SHORT else "short", "bad": bad and number % SHORT != 0}
        )
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))
    return [str(folder / f"{name}.jsonl") for name in rows]
