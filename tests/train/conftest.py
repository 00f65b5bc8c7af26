"""A small text and a small model, so that a whole run takes a fraction of a second."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from linnet.config import parse
from linnet.models import family
from linnet.train import TrainConfig
from linnet.train.config import RunConfig

TINY = {"seq_len": 32, "batch_size": 4, "steps": 12, "log_every": 2, "evaluate_tokens": 512, "device": "cpu"}
RATE = 1e-2


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """About 100 kB of text that is on every machine."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def settings(text) -> Callable[..., TrainConfig]:
    """settings(seed=1, log_every=3, ...) -> TrainConfig of a tiny run; keys of `run` go there."""

    def build(**changes) -> TrainConfig:
        model = family("tnl")(16, 2, num_heads=2).model_dump()
        changes = {**TINY, **changes, "optimizer": {"learning_rate": RATE, **changes.get("optimizer", {})}}
        run = {key: changes.pop(key) for key in RunConfig.model_fields if key in changes}
        return parse(TrainConfig, {"model": model, "data": {"source": [str(text)]}, "run": run} | changes)

    return build
