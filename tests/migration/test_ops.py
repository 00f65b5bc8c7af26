"""Names of ops and mixers of 0.1.0, and what they are called now."""

import pytest
import torch

from linnet import ops
from linnet.deprecation import LinnetDeprecationWarning
from linnet.inference import Engine, Sampling
from linnet.layers.mixers.tnl import Tnl
from linnet.models import ModelConfig, build_model


@pytest.mark.parametrize(
    "old, new",
    [
        ("lightning_waiting_step", "lightning_pending_step"),
        ("forget_gated_waiting_step", "forget_gated_pending_step"),
    ],
)
def test_steps_with_pending_tokens(old, new):
    with pytest.warns(LinnetDeprecationWarning, match=new):
        assert getattr(ops, old) is getattr(ops, new)


def test_a_mixer_with_waiting_spec_decodes(monkeypatch):
    """As a mixer of another project: it has `waiting_spec` only, and reads `waiting` from its state."""
    model = build_model(ModelConfig(d_model=32, layout="(tnl+sglu) x1", vocab_size=11), seed=1).eval()
    monkeypatch.setattr("linnet.inference.decoding.decoder.choose_interval", lambda *_: 4)

    def generate():
        return [x.tokens for x in Engine(model, slots=2, device="cpu").generate([[1, 2], [3]], Sampling(max_tokens=9))]

    expected, read = generate(), []
    pending_spec, step = Tnl.pending_spec, Tnl.step
    monkeypatch.delattr(Tnl, "pending_spec")
    monkeypatch.setattr(Tnl, "waiting_spec", pending_spec, raising=False)
    monkeypatch.setattr(Tnl, "step", lambda self, x, state: read.append(state.get("waiting")) or step(self, x, state))
    with pytest.warns(LinnetDeprecationWarning, match="pending_spec"):
        assert generate() == expected
    assert read[0] is None and read[-1].dtype == torch.int32  # of a plain state, and of one with pending tokens
