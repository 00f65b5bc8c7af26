"""A classifier with batch norms on two ranks: losses, scores, weights and running statistics of one process."""

import pytest
import torch

from linnet.parallel.mesh import Mesh
from linnet.runs import RunFolder, checkpoint
from linnet.train import read_training, train
from linnet.train.objectives import find_objective
from linnet.train.session import Session

STEPS = 3
MODEL = {
    "d_model": 8,
    "layout": "hgrn+glu attention+glu",
    "options": {"attention": {"num_heads": 2}},
    "norm": "batchnorm",
    "positions": "sinusoidal",
    "dropout": 0.1,
}
VALUES = {
    "objective": "sequences",
    "data": {"task": "listops", "size": "reduced", "samples": {"train": 24, "validation": 10, "test": 9}},
    "model": MODEL,
    "batch_size": 6,
    "steps": STEPS,
    "optimizer": {"learning_rate": 0.01},
    "run": {"device": "cpu", "checkpoint_every": 1, "keep_checkpoints": 9, "log_every": 1},
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache")
    make_steps(str(path), None)  # so that ranks find the rows
    return path


def make_steps(cache: str, mesh: Mesh | None):
    config = read_training(VALUES)
    kind = find_objective(config)

    class Double(kind):
        def build(self, seed, device=None):
            return super().build(seed, device).double()

    session = Session(config, Double(config, kind.read(config, cache), torch.device("cpu")), torch.device("cpu"), mesh)
    norms, ranks = [], {} if mesh is None else {"mesh": mesh}
    for _ in range(STEPS):
        session.gradients()
        assert session.judge() is None
        norms.append(session.grad_norm)
        session.apply()
    scores = session.objective.validate(session.model, session.autocast, **ranks)
    return session.recent, norms, list(scores.values()), dict(session.weights())


def on_ranks(cache: str):
    """Runs in a worker."""
    return make_steps(cache, Mesh(read_training(VALUES).parallel, torch.device("cpu")))


def test_two_ranks_train_like_one_process(pool, cache):
    expected = make_steps(str(cache), None)
    ranks = pool.run(2, on_ranks, str(cache))
    for found in ranks:
        for one, other in zip(found[:3], expected[:3], strict=True):
            assert one == pytest.approx(other, rel=1e-7)
    weights = ranks[0][3]
    assert weights.keys() == expected[3].keys() and "backbone.blocks.0.mixer_norm.running_var" in weights
    for name, own in expected[3].items():
        torch.testing.assert_close(weights[name], own, rtol=1e-7, atol=1e-9, msg=name)


def train_on_rank(root: str, cache: str):
    """Runs in a worker."""
    return str(train(read_training(VALUES), root, cache).path)


def test_a_run_of_two_ranks_goes_on_in_one_process_with_its_running_statistics(pool, cache, tmp_path):
    path, _ = pool.run(2, train_on_rank, str(tmp_path / "two"), str(cache))
    run = RunFolder.open(path)
    losses = [row["loss"] for row in run.metrics() if "loss" in row]
    for one in run.checkpoints()[1:]:
        for file in sorted(one.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        one.rmdir()
    (run.path / "result.json").unlink()
    train(read_training(VALUES), tmp_path / "two", cache)
    again = [row["loss"] for row in run.metrics() if "loss" in row]
    assert again == pytest.approx(losses, rel=1e-5) and len(again) == STEPS
    last = checkpoint.load(run.checkpoints()[-1])[0]["model"]
    assert (last["backbone.norm.running_mean"] != 0).all()
