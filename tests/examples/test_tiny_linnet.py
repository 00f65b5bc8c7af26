"""The one-file example: its two forms agree, documents do not see each other, and it ends in a law."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

from linnet.layers.base import LayerContext, find_mixer, load_plugin
from linnet.layers.check import check_mixers

FILE = Path(__file__).parents[2] / "examples" / "tiny_linnet.py"


@pytest.fixture(scope="module")
def example():
    return sys.modules[find_mixer(load_plugin(f"{FILE}:Tiny")).__module__]


def test_the_chunked_form_is_the_recurrence(example):
    assert example.check_forms(width=8) < 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_mixers([f"{FILE}:Tiny"], {"tiny": {}}, 16)


def test_a_state_carries_over_and_documents_do_not_mix(example):
    mixer = example.Tiny(example.TinyConfig(chunk=4), LayerContext(d_model=12)).double()
    x = torch.randn(1, 23, 12, dtype=torch.float64)
    whole, state = mixer(x)[0], mixer.init_state(1, 23, dtype=torch.float64)
    first, state = mixer(x[:, :10], state)
    torch.testing.assert_close(torch.cat([first, mixer(x[:, 10:], state)[0]], 1), whole)
    packed, _ = mixer(x, cu_seqlens=torch.tensor([0, 9, 23], dtype=torch.int32))
    torch.testing.assert_close(packed, torch.cat([mixer(x[:, :9])[0], mixer(x[:, 9:])[0]], 1))


def test_it_ends_in_a_law(example, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(example, "RUNS", ((8, 2), (8, 6), (16, 12)))
    example.main(str(tmp_path))
    shown = capsys.readouterr().out
    assert "L = " in shown and "C^-" in shown
    assert len(list(tmp_path.glob("tiny*/result.json"))) == 3
