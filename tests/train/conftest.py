"""A small text and a small model, so that a whole run takes a fraction of a second."""

from collections.abc import Callable

import pytest

from linnet.config import parse
from linnet.models import family
from linnet.train import TrainConfig
from linnet.train.config import RunConfig

TINY = {"seq_len": 32, "batch_size": 4, "steps": 12, "log_every": 2, "evaluate_tokens": 512, "device": "cpu"}
RATE = 1e-2


@pytest.fixture(scope="session")
def settings(text) -> Callable[..., TrainConfig]:
    """settings(seed=1, log_every=3, ...) -> TrainConfig of a tiny run; keys of `run` go there."""

    def build(**changes) -> TrainConfig:
        model = family("tnl")(16, 2, num_heads=2).model_dump()
        changes = {**TINY, **changes, "optimizer": {"learning_rate": RATE, **changes.get("optimizer", {})}}
        run = {key: changes.pop(key) for key in RunConfig.model_fields if key in changes}
        return parse(TrainConfig, {"model": model, "data": {"source": [str(text)]}, "run": run} | changes)

    return build
