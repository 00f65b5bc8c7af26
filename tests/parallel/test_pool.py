"""The pool that the distributed tests run in: results by rank, errors and hangs reported, workers replaced."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from pool import Died, WorkerError


def ranks(x):
    dist.all_reduce(x)
    return dist.get_rank(), int(os.environ["WORLD_SIZE"]), x


def raises_on_one():
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def hangs_on_one():
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()


def kills_one():
    rank = dist.get_rank()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def starts_own_group():
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that ends first would close its connections while another one still connects
    return dist.get_world_size()


@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_results_by_rank(pool, world):
    results = pool.run(world, ranks, torch.ones(2, dtype=torch.float64))
    assert [(rank, size) for rank, size, _ in results] == [(rank, world) for rank in range(world)]
    assert all(torch.equal(total, torch.full((2,), world, dtype=torch.float64)) for _, _, total in results)


def test_a_function_may_start_its_own_group(pool):
    assert pool.run(2, starts_own_group, group=False) == [2, 2]


def test_error_names_the_rank_and_new_workers_follow(pool):
    with pytest.raises(WorkerError, match="rank 1 raised:(.|\n)*ValueError: only here"):
        pool.run(2, raises_on_one)
    assert len(pool.run(2, ranks, torch.ones(()))) == 2


def test_hang_is_killed_with_its_stack(pool):
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 took longer than 2 s:(.|\n)*hangs_on_one"):
        pool.run(2, hangs_on_one, timeout=2)
    assert time.monotonic() - start < 20
    assert len(pool.run(2, ranks, torch.ones(()))) == 2


def test_fresh_processes_may_die(pool):
    assert pool.run(2, kills_one, fresh=True) == [0, Died(-signal.SIGKILL)]
