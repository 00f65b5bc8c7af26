"""Training over GPUs with NCCL and the kernels, against one GPU."""

import os

import pytest
import torch
from test_shard import MUON, config, difference, train

from linnet.parallel.mesh import Mesh, join, stop
from linnet.train.config import TrainConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WIDE = {"d_model": 256}
CASES = {
    "tnl": {"model": WIDE | {"dropout": 0.1}},
    "hgrn2": {"model": WIDE, "run": {"recompute": "block"}, "accumulation": 2},
    "mamba": {"model": WIDE, "optimizer": MUON},
}


def train_on_gpus(settings: TrainConfig):
    """Runs in a worker, which forms its own group: NCCL for the GPUs, gloo for the host."""
    join()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    found = train(settings, Mesh(settings.parallel, device), torch.float32, device)
    stop()
    return found


def settings(name: str, **changes) -> TrainConfig:
    return config(name, seq_len=256, **CASES[name], **changes)


@pytest.mark.parametrize("name", CASES)
def test_one_rank_trains_like_one_gpu(pool, name):
    for precision in ("float32", "bfloat16"):
        one = settings(name, precision=precision)
        losses, norms, weights = train(one, None, torch.float32, torch.device("cuda"))
        (found,) = pool.run(1, train_on_gpus, one, group=False, timeout=120)
        assert found[0][0] == pytest.approx(losses[0], rel=1e-7)
        assert found[0] == pytest.approx(losses, rel=1e-5) and found[1] == pytest.approx(norms, rel=1e-4)
        assert difference(found[2], {key: value.cpu() for key, value in weights.items()}) < 1e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("parallel", [{}, {"dp_replicate": 2}, {"sp": 2}, {"tp": 2}], ids=str)
def test_two_gpus_train_like_one(pool, parallel):
    for name in CASES:
        losses, norms, _ = train(settings(name), None, torch.float32, torch.device("cuda"))
        ranks = pool.run(2, train_on_gpus, settings(name, parallel=parallel), group=False, timeout=120)
        assert ranks[0][:2] == ranks[1][:2]
        assert ranks[0][0] == pytest.approx(losses, rel=2e-5) and ranks[0][1] == pytest.approx(norms, rel=1e-3)
