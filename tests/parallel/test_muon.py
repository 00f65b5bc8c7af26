"""Muon by owners makes the bits of `torch.optim.Muon` on whole matrices."""

import torch
from torch import nn

from linnet.parallel.config import ParallelConfig
from linnet.parallel.mesh import Mesh
from linnet.parallel.muon import Matrix, Muon

# Tall, square, wide, rows that the ranks do not divide, fewer rows than ranks; more of one shape than ranks, and fewer.
SHAPES = [(88, 32), (88, 32), (33, 32), (32, 32), (32, 32), (32, 32), (32, 32), (32, 88), (2, 32)]
SETTINGS = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
STEPS = 2


def draw(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def rows_of(whole: torch.Tensor, dim: int | None, mesh: Mesh) -> torch.Tensor:
    """This rank's rows of its tensor-parallel slice, as FSDP shards it."""
    part = whole if dim is None else whole.chunk(mesh.tp, dim)[mesh.tp_rank]
    each, number = -(-len(part) // mesh.dp_shard), mesh.fsdp.get_local_rank(mesh.fsdp.ndim - 1)
    return part[number * each : (number + 1) * each].contiguous()


def update(degrees: dict):
    """Runs in a worker. Differences of its rows from those of the whole matrices; the last has no gradient at first."""
    mesh = Mesh(ParallelConfig(**degrees), torch.device("cpu"))
    dims = [number % 3 - 1 if mesh.tp > 1 and number % 3 and number != 2 else None for number in range(len(SHAPES))]
    whole = [nn.Parameter(x) for x in draw(0)]
    own = [nn.Parameter(rows_of(x.detach(), dim, mesh)) for x, dim in zip(whole, dims, strict=True)]
    shapes = [
        (p if dim is None else p.chunk(mesh.tp, dim)[mesh.tp_rank]).shape for p, dim in zip(whole, dims, strict=True)
    ]
    matrices = [Matrix(rows, tuple(shape), dim) for rows, shape, dim in zip(own, shapes, dims, strict=True)]
    optimizer, expected = (
        Muon(matrices, mesh, **SETTINGS),
        torch.optim.Muon(whole, **SETTINGS, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(1, STEPS + 1):
        for rows, parameter, gradient, dim in zip(own, whole, draw(step), dims, strict=True):
            if parameter is not whole[-1] or step > 1:
                parameter.grad, rows.grad = gradient, rows_of(gradient, dim, mesh)
        optimizer.step()
        expected.step()
    return [torch.equal(rows, rows_of(p.detach(), dim, mesh)) for rows, p, dim in zip(own, whole, dims, strict=True)]


def layouts():
    """Runs in a worker."""
    return [update(degrees) for degrees in ({}, {"tp": 2}, {"dp_replicate": 2})]


def test_owners_make_the_bits_of_whole_matrices(pool):
    for world in (3, 4):
        function, arguments = (update, ({},)) if world == 3 else (layouts, ())
        for rank in pool.run(world, function, *arguments):
            assert rank == [True] * len(SHAPES) or rank == [[True] * len(SHAPES)] * 3
