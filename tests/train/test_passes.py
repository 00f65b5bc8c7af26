"""Passes over the data: what is said before a training, and the warning past four."""

import pytest

from linnet.config import parse
from linnet.data import DataConfig
from linnet.train import passes


def test_a_training_and_a_ladder():
    assert passes.line([500], 1000, "tokens") == ("passes over the training data (1,000 tokens): 0.5", False)
    text, warning = passes.line([500, 4000, 4001, 8000], 1000, "tokens", about=True)
    assert warning and "(about 1,000 tokens): 0.5 to 8 per run; 2 of 4 runs read them more than 4 times" in text


def test_an_estimate_from_the_sizes_of_the_files(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 10_000)
    one = parse(DataConfig, {"source": str(tmp_path / "a.txt"), "tokenizer": "byte", "validation_fraction": 0.1})
    assert passes.estimate(one) == pytest.approx(9_000)
    assert passes.estimate(one.model_copy(update={"max_bytes": 5_000})) == pytest.approx(4_500)
    (tmp_path / "b.txt.gz").write_bytes(b"")
    assert passes.estimate(one.model_copy(update={"source": [str(tmp_path / "missing.txt")]})) is None
