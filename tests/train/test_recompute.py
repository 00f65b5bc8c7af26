"""Recomputation changes what is kept, not what comes out."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from linnet.models import ModelConfig, build_model
from linnet.train import recompute

CONFIG = ModelConfig(
    d_model=32,
    layout="tnl+sglu hgrn2+sglu hgrn2+sglu lightnet+swiglu attention+swiglu",
    options={name: {"num_heads": 2} for name in ("tnl", "hgrn2", "lightnet", "attention")},
)


class Count(TorchDispatchMode):
    """Counts the ops that run, by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls[op.name().split(".")[0]] += 1
        return op(*args, **(kwargs or {}))


def run(mode: str, autocast: bool = False):
    model = build_model(CONFIG, seed=3)
    recompute.apply(model, mode)
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
    with Count() as count:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            nll, _ = model.loss(tokens, tokens.roll(-1, 1))
        forward = Counter(count.calls)
        nll.backward()
    return nll.item(), {name: p.grad for name, p in model.named_parameters()}, forward, count.calls


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["block", "selective"])
def test_gradients_are_those_without(mode, autocast):
    loss, gradients, _, _ = run("none", autocast)
    again, others, _, _ = run(mode, autocast)
    assert again == loss
    for name, gradient in gradients.items():
        assert torch.equal(others[name], gradient), name


def test_selective_computes_norms_again():
    """A norm moves few bytes, and a compiled LayerNorm is an op too (`linnet.ops.norm.layer_norm`)."""
    assert recompute.is_kept(torch.ops.linnet.additive.default)
    assert not recompute.is_kept(torch.ops.linnet.layer_norm.default)


def test_selective_runs_kept_ops_once_and_block_twice():
    _, _, forward, plain = run("none")
    _, _, _, block = run("block")
    _, _, _, selective = run("selective")
    kept = {name for name in forward if name.startswith("linnet::")}
    assert len(kept) >= 3, "the ops of three mixers"
    for name in kept:
        assert plain[name] == forward[name] == selective[name]
        assert block[name] == 2 * forward[name]
    assert selective["aten::mm"] == plain["aten::mm"] < block["aten::mm"]
    assert selective["aten::silu"] > plain["aten::silu"]


def test_a_block_still_runs_without_gradients():
    model = build_model(CONFIG, seed=3)
    tokens = torch.arange(20).reshape(1, 20)
    with torch.no_grad():
        expected, _ = model(tokens)
        recompute.apply(model, "selective")
        torch.testing.assert_close(model(tokens)[0], expected, rtol=0, atol=0)
