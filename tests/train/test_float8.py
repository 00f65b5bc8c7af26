"""`precision: float8`: which layers it takes, that nothing else changes, and what it refuses. The CPU emulates it."""

import json
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from linnet.cli import app
from linnet.config import ConfigError, parse
from linnet.models import empty_model
from linnet.runs import RunFolder, checkpoint, load_model
from linnet.train import TrainConfig, float8, train
from linnet.train.objectives import read_training
from linnet.train.objectives.text import TextObjective
from linnet.train.preflight import check_devices
from linnet.train.session import Session
from linnet.train.together import alone_because

CPU = torch.device("cpu")
WIDE = {"model": "tnl-7b", "precision": "float8"}


@pytest.fixture
def narrow(monkeypatch):
    """Lets layers of 16 channels multiply in float8, and trainings run on a CPU, which emulates it."""
    pytest.importorskip("torchao", reason="needs the extra float8")
    monkeypatch.setattr(float8, "LEAST", 16)
    monkeypatch.setattr(float8, "problems", lambda config, device: [])


def float8_layers(model: torch.nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"]


def test_plan_names_the_layers_that_stay_in_bfloat16(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {recipe: tnl-7b, num_layers: 2}\nseq_len: 8192\nprecision: float8\nrun: {compile: true}\n")
    command = ["train", str(file), "--plan", "--gpu", "h200"]
    text = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["float8"]
    assert text.startswith("float8: 14 linear layers; ")
    left = ["2 x mixer.output.gate_down (4096 to 128)", "2 x mixer.output.gate_up (128 to 4096)"]
    assert re.findall(r"\d+ x \S+ \(\d+ to \d+\)", text) == left
    assert text in CliRunner().invoke(app, command).stdout
    warned = CliRunner().invoke(app, [*command, "--set", "run.compile=false"]).stdout
    assert f"warning {text}" in warned and "run.compile" in warned
    refused = CliRunner().invoke(app, [*command, "--set", "model=tnl-10m"])
    assert refused.exit_code == 2 and "precision: float8" in refused.stderr and "256" in refused.stderr


def test_layers():
    """Layers with experts, weights in full precision, and widths that are narrow or no multiple of 16 stay out."""
    options = {"moe": {"num_experts": 1024, "inner": 32, "shared_inner": 1024}, "tnn": {"rpe_dim": 1024}}
    layout = "hgrn2+glu attention+moe tnn"
    values = {"vocab_size": 2048, "d_model": 1024, "layout": layout, "options": options | {"glu": {"inner": 1032}}}
    model = empty_model(TrainConfig(model=values).model, "meta")
    chosen, others = float8.linear_layers(model)
    projections = ("q_proj", "f_proj", "i_proj", "out_proj", "q_proj", "k_proj", "v_proj", "out_proj")
    expected = [f"{index // 4}.mixer.{name}" for index, name in enumerate(projections)]
    assert list(chosen) == [*expected, *(f"2.mixer.{name}" for name in ("u_proj", "v_proj", "out_proj"))]
    assert {"0.channel.gate_proj", "1.channel.router", "1.channel.up_proj", "1.channel.shared_up_proj"} < others.keys()
    assert sum(name.startswith("2.mixer") for name in others) == 8  # the network of the coefficients
    assert not any("embedding" in name or "head" in name for name in (*chosen, *others))


class Steps(TextObjective):
    """Random tokens, the same for all configurations."""

    def __init__(self, config: TrainConfig):
        self.config, self.row_length, self.targets_per_row = config, config.seq_len, config.seq_len

    def batches(self):
        return self

    def batch(self, step: int, **share) -> tuple[torch.Tensor, ...]:
        rows = torch.randint(256, (self.config.batch_size, 33), generator=torch.Generator().manual_seed(step % 2))
        return rows[:, :-1], rows[:, 1:]


def steps(config: TrainConfig, count: int = 6) -> tuple[Session, list[float]]:
    """Returns a session after some steps, and its losses and the norm of the last gradient."""
    session = Session(config, Steps(config), CPU)
    for _ in range(count):
        session.gradients()
        assert session.judge() is None
        session.apply()
    return session, [*session.recent, session.grad_norm]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer": {"name": "muon"}, "accumulation": 2},
        {"model": {"parametrisation": "mup", "base_width": 16, "layout": "hgrn2+glu attention+glu"}},
    ],
)
def test_losses_are_near_those_of_bfloat16(narrow, settings, changes):
    model = {"vocab_size": 256, "d_model": 32, "layout": "tnl+glu x2"} | changes.get("model", {})
    changes |= {"model": model, "optimizer": {"learning_rate": 1e-3} | changes.get("optimizer", {})}
    low, near = (settings(precision=name, **changes) for name in ("bfloat16", "float8"))
    (other, expected), (session, losses) = steps(low), steps(near)
    assert expected[5] < expected[1] - 0.05  # it learns
    assert losses[:-1] == pytest.approx(expected[:-1], abs=0.005) and losses != expected
    assert losses[-1] == pytest.approx(expected[-1], rel=0.02)
    assert float8_layers(session.model) == [f"backbone.blocks.{name}" for name in float8.linear_layers(other.model)[0]]
    assert session.optimizer.tensors().keys() == other.optimizer.tensors().keys()


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_recomputation_has_the_same_bits(narrow, settings, mode):
    model = {"vocab_size": 256, "d_model": 32, "layout": "attention+glu hgrn2+glu"}
    losses = [steps(settings(precision="float8", model=model, recompute=how), 3)[1] for how in ("none", mode)]
    assert losses[0] == losses[1]


def test_a_run_has_the_files_of_bfloat16_and_resumes(narrow, settings, cache, tmp_path, monkeypatch):
    long = {"log_every": 1, "checkpoint_every": 5, "evaluate_every": 6, "average": {"decay": 0.9}}
    run, low = (train(settings(precision=name, **long), tmp_path, cache) for name in ("float8", "bfloat16"))
    files = [checkpoint.load(folder.checkpoints()[-1])[0] for folder in (run, low)]
    for group in files[1]:
        assert {name: (t.shape, t.dtype) for name, t in files[0][group].items()} == {
            name: (t.shape, t.dtype) for name, t in files[1][group].items()
        }
    assert {p.name for p in run.path.rglob("*")} == {p.name for p in low.path.rglob("*")}
    stopped = train_until(7, settings(precision="float8", **long), tmp_path / "stopped", cache)
    assert not stopped.done
    again = train(settings(precision="float8", **long), tmp_path / "stopped", cache)
    assert losses(again) == losses(run) != losses(low)
    # Everything but training works without the package.
    monkeypatch.setitem(sys.modules, "torchao", None)
    model, _ = load_model(run.path)
    objective = TextObjective.prepare(settings(), CPU, cache)
    assert float8_layers(model) == []
    scores = objective.validate(model, torch.autocast("cpu", torch.bfloat16))
    assert scores["validation_loss"] == run.result()["loss"]  # validations during training are in bfloat16 as well


def losses(run: RunFolder) -> list[float]:
    return [row.get("loss", row.get("validation_loss")) for row in run.metrics()]


def train_until(step: int, config: TrainConfig, root, cache) -> RunFolder:
    def stop(row: dict) -> None:
        if row.get("step") == step and "loss" in row:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, root, cache, progress=stop)
    (folder,) = RunFolder.all(root)
    return folder


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"seq_len": 1000}, "seq_len: 1000 .*1008"),
        ({"run": {"graph": True}}, "run.graph: true .*false"),
        ({"parallel": {"tp": 2}}, "parallel.tp: 2 .*dp_shard"),
        ({"parallel": {"sp": 2}}, "parallel.sp: 2 .*dp_shard"),
    ],
)
def test_refused_combinations(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(TrainConfig, WIDE | changes)


def test_refused_objectives_and_bundles():
    with pytest.raises(ConfigError, match="precision: float8 .*not images; use bfloat16"):
        read_training({"objective": "images", "model": "vim-t", "precision": "float8"})
    assert alone_because(TrainConfig(**WIDE)) == "precision: float8"
    assert alone_because(TrainConfig(**WIDE | {"precision": "bfloat16"})) is None


def test_refused_devices_and_packages(monkeypatch, settings, cache, tmp_path):
    with pytest.raises(ConfigError) as caught:
        train(settings(precision="float8"), tmp_path, cache)
    narrow, device, *package = caught.value.problems
    assert re.match("precision: float8 .*1,024.* 16.*d_model 16.*use precision: bfloat16", narrow)
    assert re.match("precision: float8 .* 8.9 .*cpu; use precision: bfloat16", device)
    assert not any(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"precision: float8 .*torchao.*pip install .*\[float8\]") as caught:
        check_devices(TrainConfig(**WIDE, run={"device": "cpu"}), 1)
    assert len(caught.value.problems) == 2
    capabilities = iter([(8, 6), (8, 9), (9, 0)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: next(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A40")
    problems = [float8.problems(TrainConfig(**WIDE).model, torch.device("cuda")) for _ in range(3)]
    assert [len(lines) for lines in problems] == [2, 1, 1] and "A40" in problems[0][0]
