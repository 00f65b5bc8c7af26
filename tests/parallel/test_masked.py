"""Masked language models and their fine-tuning on two ranks: the losses, scores and weights of one process."""

import argparse

import pytest
import torch

from linnet.parallel.mesh import Mesh
from linnet.train import read_training, train
from linnet.train.objectives import find_objective
from linnet.train.session import Session, start_from

pytest.importorskip("sklearn")
STEPS = 2
MODEL = {
    "d_model": 16,
    "layout": "tpe lightnet+glu attention+glu",
    "options": {"lightnet": {"num_heads": 2}, "attention": {"num_heads": 2}},
    "positions": "scaled_sinusoidal",
    "embedding_norm": True,
    "dropout": 0.1,
    "drop_path": 0.2,
}
COMMON = {"batch_size": 6, "steps": STEPS, "optimizer": {"learning_rate": 0.01}, "seed": 3, "run": {"device": "cpu"}}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def masked():
    return COMMON | {
        "objective": "masked",
        "model": MODEL,
        "data": {"source": [argparse.__file__]},
        "seq_len": 32,
        "evaluate_tokens": 400,
    }


@pytest.fixture(scope="module")
def sentences(masked, cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    lines = ["sentence\tlabel", *(f"{'abc' * (number % 5 + 1)} {number}\t{number % 2}" for number in range(40))]
    for file in ("train.tsv", "dev.tsv"):
        (folder / file).write_text("\n".join(lines) + "\n")
    start = train(read_training(masked | {"steps": 1}), tmp_path_factory.mktemp("start"), cache)
    data = {"source": str(folder), "task": "sst2"}
    return COMMON | {"objective": "sentences", "data": data, "init_from": str(start.path)}


def make_steps(cache: str, mesh: Mesh | None, values: dict):
    """Losses, norms and scores of some steps, and the whole weights after them."""
    config = read_training(values)
    kind = find_objective(config)

    class Double(kind):
        def build(self, seed, device=None):
            return super().build(seed, device).double()

    objective = Double(config, kind.read(config, cache), torch.device("cpu"))
    session = Session(config, objective, torch.device("cpu"), mesh)
    if config.init_from is not None:
        start_from(session, config.init_from)
    norms, ranks = [], {} if mesh is None else {"mesh": mesh}
    for _ in range(STEPS):
        session.gradients()
        assert session.judge() is None
        norms.append(session.grad_norm)
        session.apply()
    scores = objective.validate(session.model, session.autocast, **ranks)
    session.gradients()  # after a forward pass without a backward pass
    return session.recent, norms, list(scores.values()), dict(session.weights())


def on_ranks(cache: str, values: dict):
    """Runs in a worker."""
    return make_steps(cache, Mesh(read_training(values).parallel, torch.device("cpu")), values)


@pytest.mark.parametrize("objective", ["masked", "sentences"])
@pytest.mark.parametrize("changes", [{}, {"accumulation": 3}], ids=["shards", "parts"])
def test_two_ranks_train_like_one_process(pool, cache, request, objective, changes):
    values = request.getfixturevalue(objective)
    expected = make_steps(str(cache), None, values)
    ranks = pool.run(2, on_ranks, str(cache), values | changes)
    for found in ranks:
        for one, other in zip(found[:3], expected[:3], strict=True):
            assert one == pytest.approx(other, rel=1e-6)  # losses and scores of sentences are float32
    weights = ranks[0][3]
    assert weights.keys() == expected[3].keys() and not ranks[1][3]
    for name, own in expected[3].items():
        torch.testing.assert_close(weights[name], own, rtol=0, atol=1e-6, msg=name)
