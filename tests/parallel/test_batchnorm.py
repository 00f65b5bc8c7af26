"""Batch norm: its definition, its running statistics, several ranks as one, and where it is refused."""

import pytest
import torch
import torch.distributed as dist

from linnet.config import ConfigError, parse
from linnet.layers.norm import MOMENTUM, BatchNorm, build_norm, synchronise
from linnet.models import ModelConfig, build
from linnet.train import read_training
from linnet.train.together import Ensemble
from linnet.vision.config import VisionConfig

VALUES = {"d_model": 8, "layout": "hgrn2+glu", "options": {"hgrn2": {"num_heads": 2}}, "norm": "batchnorm"}
IMAGES = {"image_size": 8, "patch": 4, "channels": 1, "classes": 10}


def norm_of(dim: int) -> BatchNorm:
    norm = build_norm("batchnorm", dim).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, dim))
        norm.bias.copy_(torch.linspace(-1.0, 1.0, dim))
    return norm


def test_training_takes_the_batch_and_evaluation_the_running_statistics():
    torch.manual_seed(0)
    norm, x = norm_of(5), 3 * torch.randn(4, 7, 5, dtype=torch.float64) + 1
    rows = x.flatten(0, 1)
    mean, variance = rows.mean(0), ((rows - rows.mean(0)) ** 2).mean(0)
    expected = (x - mean) / torch.sqrt(variance + 1e-5) * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)
    running = (MOMENTUM * mean, (1 - MOMENTUM) + MOMENTUM * variance * 28 / 27)
    torch.testing.assert_close((norm.running_mean, norm.running_var), running)
    norm.eval()
    expected = (x - running[0]) / torch.sqrt(running[1] + 1e-5) * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm(x[:1]), expected[:1])  # a row alone


def pass_of(rows: torch.Tensor, group=None) -> list[torch.Tensor]:
    """Output, running statistics and gradients of a loss over the rows; the losses of ranks add up."""
    norm = norm_of(3)
    if group is not None:
        synchronise(norm, group)
    x = rows.clone().requires_grad_()
    y = norm(x)
    (y**3 / 10).sum().backward()
    return [y.detach(), norm.running_mean, norm.running_var, x.grad, norm.weight.grad, norm.bias.grad]


def on_ranks(rows: torch.Tensor):
    """Runs in a worker: the ranks have different numbers of rows."""
    own = rows[:2] if dist.get_rank() == 0 else rows[2:]
    return pass_of(own, dist.group.WORLD)


def test_two_ranks_are_one_batch(pool):
    torch.manual_seed(1)
    rows = torch.randn(7, 3, dtype=torch.float64)
    whole, (first, second) = pass_of(rows), pool.run(2, on_ranks, rows)
    for index in (0, 3):  # by rows
        torch.testing.assert_close(torch.cat([first[index], second[index]]), whole[index])
    for index in (1, 2):  # the same statistics everywhere
        torch.testing.assert_close(first[index], whole[index])
        assert first[index].equal(second[index])
    for index in (4, 5):  # gradients of weights are summed by the trainer
        torch.testing.assert_close(first[index] + second[index], whole[index])


def test_it_is_refused_where_a_token_would_see_later_ones():
    with pytest.raises(ConfigError, match="norm: batchnorm .* causal language model"):
        parse(ModelConfig, VALUES)
    assert parse(VisionConfig, VALUES | IMAGES).norm == "batchnorm"


def test_a_training_that_would_not_count_each_batch_once_is_refused():
    values = {"objective": "images", "model": VALUES | IMAGES, "batch_size": 8}
    more = {"accumulation": 2, "run": {"recompute": "block"}, "guard": {"policy": "skip"}}
    with pytest.raises(ConfigError) as caught:
        read_training(values | more | {"parallel": {"accumulation": 4}})
    told = "\n".join(caught.value.problems)
    assert all(key in told for key in ("accumulation: 2", "parallel.accumulation: 4", "run.recompute", "guard.policy"))
    read_training(values)


def test_an_ensemble_refuses_running_statistics():
    model = build("classifier", parse(VisionConfig, VALUES | IMAGES))
    with pytest.raises(ValueError, match="batchnorm"):
        Ensemble([model], [0.1], [0.0], 3)
