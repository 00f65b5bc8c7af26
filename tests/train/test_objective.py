"""The seam between training and what is trained: a text run is a plain loop, and another objective needs no other."""

import ast
import inspect
from typing import get_args

import pytest
import torch
from torch import nn

from linnet.config import ConfigError
from linnet.data import Batches, prepare, validation_batches
from linnet.evaluate import score
from linnet.models import build_model
from linnet.papers.verbs.base import numbers, with_derived
from linnet.runs import latest_good
from linnet.train import TrainConfig, loop, read_training, session, train
from linnet.train.evaluation import Evaluations
from linnet.train.loop import result_numbers
from linnet.train.objective import Costs, RunObjective
from linnet.train.objectives import OBJECTIVES, find_objective
from linnet.train.objectives.text import scored_rows
from linnet.train.optimizer import factor


def plain(config, cache):
    """Losses, gradient norms, weights and validation of a loop written by hand."""
    corpus = prepare(config.data, cache)
    model = build_model(config.model, seed=config.seed)
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - embedded
    hidden = [p for p in model.parameters() if id(p) in matrices]
    rest = [p for p in model.parameters() if id(p) not in matrices]
    own = config.optimizer
    groups = [{"params": hidden, "weight_decay": own.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=own.betas, eps=own.eps, fused=True)
    batches = Batches(corpus.train, config.seq_len, config.batch_size, config.seed)
    losses, norms = [], []
    for step in range(config.total_steps):
        tokens, targets = batches.batch(step)
        loss = torch.zeros(())
        for rows in torch.arange(config.batch_size).tensor_split(config.accumulation):
            nll, _ = model.loss(tokens[rows], targets[rows])
            part = nll / targets.numel()
            part.backward()
            loss += part.detach()
        gradients = [p.grad for p in model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        scale = torch.clamp(own.clip / (norm + 1e-12), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        for group in optimizer.param_groups:
            group["lr"] = factor(config.schedule, step, config.total_steps) * own.learning_rate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item()), norms.append(norm.item())
    held_out = validation_batches(corpus.validation, config.seq_len, scored_rows(config), config.evaluate_tokens)
    return losses, norms, model.state_dict(), score(model, held_out, corpus.tokenizer.byte_lengths)


@pytest.mark.parametrize("parts, stopped", [(1, False), (3, False), (3, True)])
def test_training_a_text_is_a_plain_loop_bit_for_bit(settings, cache, tmp_path, parts, stopped, stop_at):
    config = settings(accumulation=parts, log_every=1, checkpoint_every=3)
    losses, norms, weights, scores = plain(config, cache)

    if stopped:
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path, cache, stop_at(7))
    run = train(config, tmp_path, cache)
    rows = [row for row in run.metrics() if "loss" in row]
    assert [row["loss"] for row in rows] == losses
    assert [row["grad_norm"] for row in rows] == norms
    saved = latest_good(run.checkpoint_folder)[1]["model"]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in saved.items()) and saved
    result = run.result()
    assert numbers(result).keys() <= with_derived(result_numbers(config))
    assert (result["loss"], result["bits_per_byte"]) == (scores.loss, scores.bits_per_byte)


@pytest.mark.parametrize("module", [loop, session])
def test_the_loop_knows_neither_texts_nor_models_of_texts(module):
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
    assert not [name for name in imported if name.startswith(("linnet.data", "linnet.evaluate", "linnet.models"))]
    assert not hasattr(module, "CausalLM") and not hasattr(module, "Corpus")


def test_every_objective_of_the_configuration_is_there(settings):
    for name, kind in OBJECTIVES.items():
        assert kind.name == name and get_args(kind.Config.model_fields["objective"].annotation) == (name,)
    assert find_objective(settings()) is OBJECTIVES["text"] and settings(objective="text") == settings()
    with pytest.raises(ConfigError, match="objective: .*'text'"):
        settings(objective="points")
    with pytest.raises(ConfigError, match="objective: 'txt'.*'text'"):
        read_training({"objective": "txt", "model": "tnl-10m"})


class Line(nn.Module):
    """A line through points, in the shape that optimizer and recomputation expect."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(1, 1)

    def loss(self, x, y):
        return (self.backbone(x) - y).square().sum(), torch.tensor(y.numel())


class Points(RunObjective):
    """Fits y = 3 x - 1: no tokens, no vocabulary, three tensors never seen by text."""

    Config, name, units = TrainConfig, "points", "points"

    def __init__(self, config):
        self.config, self.costs = config, Costs(2, 2, config.batch_size, 12.0 * config.batch_size)
        self.evaluations = Evaluations([], None, 0)

    @classmethod
    def content(cls, config, cache=None):
        return {}

    @classmethod
    def read(cls, config, cache, show=None):
        return None

    @classmethod
    def data_problems(cls, config, data):
        return []

    @classmethod
    def row_tokens(cls, config):
        return 1

    @classmethod
    def step_flops(cls, config):
        return 12.0 * config.batch_size

    @classmethod
    def prepare(cls, config, device, cache, progress=None):
        return cls(config)

    def build(self, seed, device=None):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Line()

    def batches(self):
        return self

    def batch(self, step):
        x = torch.rand(self.config.batch_size, 1, generator=torch.Generator().manual_seed(step))
        return x, 3 * x - 1

    def count(self, x, y):
        return torch.tensor(y.numel())

    def loss_fields(self, loss):
        return {"root": loss**0.5}

    def validate(self, model, autocast, show=None):
        with torch.no_grad(), autocast:
            total, count = model.loss(*self.batch(1 << 20))
        return {"validation_loss": (total / count).item()}

    def result_fields(self, step, validation):
        return {"slope": 3.0}

    def files(self):
        return {"points.txt": "y = 3 x - 1\n"}

    def meta(self):
        return {"data": "points"}

    def resume_problems(self, meta):
        return [] if meta["data"] == "points" else ["data: other points"]

    def start_problems(self, meta, path):
        return []


def test_another_objective_trains_records_and_resumes(settings, cache, tmp_path, monkeypatch, stop_at):
    """Accumulation, guards, checkpoints, validation and the record belong to the loop, not to text."""
    monkeypatch.setitem(OBJECTIVES, "text", Points)
    own = {"batch_size": 6, "steps": 30, "log_every": 1, "evaluate_every": 10, "checkpoint_every": 4}
    own |= {"optimizer": {"learning_rate": 0.3, "weight_decay": 0.0}}
    whole = train(settings(**own, accumulation=2), tmp_path / "whole", cache)
    row = whole.metrics()[0]
    assert list(row)[:5] == ["step", "points", "flops", "loss", "root"] and row["points"] == 6 and row["flops"] == 72
    assert row["points_per_second"] > 0 and "tokens" not in row and row["root"] == row["loss"] ** 0.5
    result = whole.result()
    assert result["points"] == 180 and result["slope"] == 3.0 and result["loss"] < 0.05 * whole.metrics()[0]["loss"]
    assert "bits_per_byte" not in result and (whole.path / "points.txt").read_text() == "y = 3 x - 1\n"
    assert not (whole.path / "tokenizer.json").exists()

    with pytest.raises(KeyboardInterrupt):
        train(settings(**own, accumulation=2), tmp_path / "stopped", cache, stop_at(15))
    stopped = train(settings(**own, accumulation=2), tmp_path / "stopped", cache)
    assert [row.get("loss") for row in stopped.metrics()] == [row.get("loss") for row in whole.metrics()]
    assert torch.equal(
        latest_good(stopped.checkpoint_folder)[1]["model"]["backbone.weight"],
        latest_good(whole.checkpoint_folder)[1]["model"]["backbone.weight"],
    )
