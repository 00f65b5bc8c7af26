"""The outside mixer of the examples is a whole citizen: its forms agree, and a study takes it by its file alone."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from linnet.config import parse
from linnet.layers.base import LayerContext, find_mixer, load_plugin
from linnet.models import build_model, count_parameters, family, flops_exact
from linnet.study import StudyConfig, run_study
from linnet.study.collect import load_study
from linnet.train import TrainConfig
from linnet.train.objectives import read_training

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "my_mixer.py"


@pytest.fixture
def mixer():
    cls = find_mixer(load_plugin(f"{FILE}:MyMixer"))
    torch.manual_seed(0)
    return cls(cls.Config(num_heads=2), LayerContext(d_model=12)).double()


def definition(mixer, x):
    """The equations of the file's docstring, token by token, for one sequence [T, D]."""
    H, K = mixer.num_heads, mixer.head_dim
    q, k, v = mixer.qkv(x).reshape(-1, H, 3, K).unbind(2)
    gamma = torch.sigmoid(mixer.decay(x) + mixer.decay_bias) ** (1 / mixer.temperature)
    state, outputs = torch.zeros(H, K, K, dtype=x.dtype), []
    for t in range(len(x)):
        state = gamma[t, :, None, None] * state + k[t, :, :, None] * v[t, :, None, :]
        o = (q[t, :, None, :] @ state).squeeze(1) / K**0.5
        o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        outputs.append(o.flatten())
    return mixer.out(torch.stack(outputs) * torch.nn.functional.silu(mixer.gate(x)))


def test_forward_is_the_definition(mixer):
    x = torch.randn(1, 70, 12, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0][0], definition(mixer, x[0]), rtol=1e-8, atol=1e-10)


def test_steps_and_pieces_agree_with_forward(mixer):
    x = torch.randn(2, 33, 12, dtype=torch.float64)
    whole, _ = mixer(x)
    state = mixer.init_state(2, 33, dtype=torch.float64)
    start, state = mixer(x[:, :20], state)
    rest = []
    for t in range(20, 33):
        y, state = mixer.step(x[:, t], state)
        rest.append(y)
    pieces = torch.cat([start, torch.stack(rest, 1)], 1)
    torch.testing.assert_close(pieces, whole, rtol=1e-8, atol=1e-10)


def test_packed_documents_do_not_see_each_other(mixer):
    x = torch.randn(1, 24, 12, dtype=torch.float64)
    packed, _ = mixer(x, cu_seqlens=torch.tensor([0, 9, 24], dtype=torch.int32))
    torch.testing.assert_close(packed[:, 9:], mixer(x[:, 9:])[0], rtol=1e-8, atol=1e-10)


def test_a_model_of_it_counts_and_trains():
    config = family(load_plugin(f"{FILE}:MyMixer"))(32, 2)
    total, outside = count_parameters(config)
    assert total - outside == 32 * 256
    assert flops_exact(config, 64) > 6 * 64 * total
    model = build_model(config, seed=0)
    tokens = torch.randint(256, (2, 33))
    loss, count = model.loss(tokens[:, :-1], tokens[:, 1:])
    (loss / count).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_study_takes_it_by_its_file(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{n} and {n * n % 89}\n" for n in range(3000)))
    values = {
        "name": "outside",
        "architectures": ["my_mixer"],
        "plugins": [f"{FILE}:MyMixer"],
        "budgets": [2e8],
        "sizes": [[16, 1]],
        "seq_len": 32,
        "batch_size": 4,
        "data": {"source": [str(tmp_path / "text.txt")]},
        "train": {"evaluate_tokens": 1024},
        "minimum_steps": 5,
        "executor": {"kind": "local", "workers": 1, "threads": 1},
    }
    (row,) = run_study(parse(StudyConfig, values), tmp_path).rows
    assert (row["architecture"], row["status"]) == ("my_mixer", "done")
    notes = load_study(tmp_path / "outside")[2]
    assert any("the mixer my_mixer by weights alone" in note for note in notes), notes


def test_what_the_docs_show_of_it_is_so(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "mixers.md").read_text(), re.MULTILINE | re.DOTALL)
    drops, positions, convolution, costs, _, hf = (code for language, code in blocks if language == "python")
    assert "load_plugin(" in hf  # of a folder that is not there
    exec(drops, {})
    exec(positions, {})
    names: dict = {}
    exec(convolution, names)
    assert names["nothing"] is None and names["state"].shape == (2, 3, 16) and names["y"].shape == (2, 16)
    exec(costs, {})
    assert capsys.readouterr().out.split()
    layout, parallel, expanded, delta, rwkv, mamba, filters, images, _, file = (
        text for language, text in blocks if language == "yaml"
    )
    classifier = read_training(yaml.safe_load(images)).model
    assert classifier.layout == "my_mixer+swiglu x3" and not classifier.causal
    assert parse(TrainConfig, yaml.safe_load(expanded)).model.options["hgrn"]["expand"] == 4
    for shown, mixer in ((parallel, "parallel"), (rwkv, "rwkv7"), (mamba, "mamba2"), (filters, "lru")):
        assert {spec.mixer for spec in parse(TrainConfig, yaml.safe_load(shown)).model.blocks} == {mixer}
    hybrid = parse(TrainConfig, yaml.safe_load(delta)).model
    assert [spec.mixer for spec in hybrid.blocks] == ["gdn"] * 3 + ["attention"]
    assert hybrid.options["gdn"]["allow_neg_eigval"]
    stack = parse(TrainConfig, yaml.safe_load(layout)).model
    windows = [stack.layer_options("attention", spec).window for spec in stack.blocks]
    assert windows == [64, 64, 64, 0] * 2 and [spec.mixer for spec in stack.stack.before] == ["tpe"]
    assert parse(TrainConfig, yaml.safe_load(file)).model.layout == "my_mixer+swiglu x6"
