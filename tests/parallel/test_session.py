"""What the ranks of a training agree on: bad batches, flags, scores of held-out text, checkpoints, Muon's updates."""

from pathlib import Path

import pytest
import torch
from test_shard import Random, Tokens, config, difference

from linnet.evaluate import score
from linnet.parallel.mesh import Mesh
from linnet.runs import checkpoint, sharded
from linnet.runs.saver import Saver
from linnet.train.config import TrainConfig
from linnet.train.session import Session, start_from

IGNORE = -100


def begin(settings: TrainConfig, mesh: Mesh | None, dtype: torch.dtype = torch.float64) -> Session:
    return Session(settings, Random(settings, dtype), torch.device("cpu"), mesh)


def step(session: Session, **options) -> None:
    session.gradients(**options)
    assert session.judge() is None
    session.apply()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = [Tokens(config("hgrn2")).batch(100 + number) for number in range(count)]
    found[-1] = (found[-1][0], found[-1][1].clone())
    found[-1][1][1:] = IGNORE  # as in the last batch of a validation
    return found


def agree():
    """Runs in a worker. Flags, a bad batch on one rank, and scores with fewer batches than ranks, and with more."""
    settings = config("hgrn2", guard={"policy": "skip"}, parallel={"dp_replicate": 1})
    mesh = Mesh(settings.parallel, torch.device("cpu"))
    session = begin(settings, mesh)
    assert session.flags == (False, False)
    step(session, flags=(mesh.rank == 1, False))
    assert session.flags == (True, False)
    loss, bad = session._loss, mesh.rank == 2
    session._loss = lambda *batch: tuple(number * (float("nan") if bad else 1.0) for number in loss(*batch))
    session.gradients()
    trouble = session.judge()
    session.skip()
    session._loss = loss
    scores = [score(session.model, batches(count), 2.0, mesh=mesh) for count in (2, 4)]
    step(session)  # after a forward pass without a backward pass
    assert session.flags == (False, False)
    return trouble.kind, trouble.position, [(s.loss, s.bits_per_byte, s.tokens) for s in scores], session.recent[-1]


def test_ranks_agree(pool):
    ranks = pool.run(3, agree)
    assert ranks[0] == ranks[1] == ranks[2]
    kind, position, scores, last = ranks[0]
    assert (kind, position) == ("non-finite", 1)
    session = begin(config("hgrn2"), None)
    step(session)
    for found, count in zip(scores, (2, 4), strict=True):
        expected = score(session.model, batches(count), 2.0)
        assert found == (
            pytest.approx(expected.loss, rel=1e-12),
            pytest.approx(expected.bits_per_byte, rel=1e-12),
            expected.tokens,
        )
    session.position = 2
    step(session)
    assert last == pytest.approx(session.recent[-1], rel=1e-12)


def scores(degrees: dict):
    """Runs in a worker."""
    settings = config("hgrn2", parallel=degrees)
    session = begin(settings, mesh := Mesh(settings.parallel, torch.device("cpu")))
    found = score(session.model, batches(3), 2.0, mesh=mesh)
    return found.loss, found.bits_per_byte, found.tokens


def test_spans_and_slices_of_layers_score_like_one_process(pool):
    expected = score(begin(config("hgrn2"), None).model, batches(3), 2.0)
    for rank in pool.run(4, scores, {"sp": 2, "tp": 2}):
        assert rank == pytest.approx((expected.loss, expected.bits_per_byte, expected.tokens), rel=1e-12)


def save(folder: str, settings: TrainConfig):
    """Runs in a worker: two steps, a checkpoint, a third step."""
    mesh = Mesh(settings.parallel, torch.device("cpu"))
    session = begin(settings, mesh, torch.float32)
    step(session)
    step(session)
    tensors, meta = session.state()
    Saver(Path(folder), None, mesh, session.split).save(2, tensors, meta)
    step(session)
    return session.recent[-1]


def resume(folder: str, settings: TrainConfig):
    """Runs in a worker: the third step, from the checkpoint; the optimizer's state before it was another one."""
    mesh = Mesh(settings.parallel, torch.device("cpu"))
    session = begin(settings, mesh, torch.float32)
    step(session)
    path, meta, problems = sharded.latest_good(Path(folder), mesh)
    assert not problems
    session.load(path, meta)
    assert (session.step, session.position) == (2, 2)
    step(session)
    return session.recent[-1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoints_resume_in_other_layouts(pool, tmp_path, optimizer):
    settings = config("hgrn2", optimizer={"name": optimizer})
    expected = pool.run(3, save, str(tmp_path), settings)[0]
    assert pool.run(3, resume, str(tmp_path), settings)[1] == expected
    copies = settings.model_copy(update={"parallel": settings.parallel.model_copy(update={"dp_replicate": 2})})
    assert pool.run(4, resume, str(tmp_path), copies)[0] == pytest.approx(expected, rel=2e-6)
    _, tensors, meta, _ = checkpoint.latest_good(tmp_path)
    session = begin(settings, None, torch.float32)
    session.load(tensors, meta)
    step(session)
    assert session.recent[-1] == pytest.approx(expected, rel=2e-6)


def start(run: str):
    """Runs in a worker."""
    settings = config("hgrn2", seed=4)
    session = begin(settings, Mesh(settings.parallel, torch.device("cpu")), torch.float32)
    start_from(session, run)
    return (
        session.weights(),
        session.step,
        {name: x.to_local().abs().sum().item() for name, x in session.optimizer.tensors().items() if x.ndim},
    )


def test_init_from_reads_the_weights_of_one_process(pool, tmp_path):
    session = begin(config("hgrn2"), None, torch.float32)
    step(session)
    tensors, meta = session.state()
    (tmp_path / "config.yaml").write_text("{}")
    Saver(tmp_path / "checkpoints").save(1, tensors, meta)
    weights, steps, state = pool.run(3, start, str(tmp_path))[0]
    assert steps == 0 and not any(state.values())
    assert difference(weights, tensors["model"]) == 0.0
