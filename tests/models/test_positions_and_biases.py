"""Absolute positions and biases: what they compute, and that they change nothing at their defaults."""

import math

import pytest
import torch
from torch import nn

from linnet.config import ConfigError, parse
from linnet.inference import Engine
from linnet.models import ModelConfig, build_model, count_parameters, family, flops_exact, state_bytes

SHAPE = {"d_model": 16, "vocab_size": 32, "layout": "gla+swiglu attention", "options": {"attention": {"num_heads": 2}}}
MIXERS = ["tnl", "gla", "hgrn", "hgrn2", "lightnet", "cosformer2", "attention", "mamba"]
KEYS = {"hgrn": {"in_proj", "f_proj"}, "hgrn2": {"q_proj", "f_proj", "i_proj"}, "mamba": {"in_proj"}}  # as q, k and v


def model(**changes) -> nn.Module:
    return build_model(parse(ModelConfig, SHAPE | changes), seed=1).double()


def tokens(batch=2, length=11) -> torch.Tensor:
    return torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [{"positions": "sinusoidal"}, {"positions": "learned", "num_positions": 40}])
def test_positions_go_on_in_states_and_steps_and_restart_at_documents(kind):
    net, x = model(**kind), tokens()
    whole, _ = net(x)
    states = net.init_state(2, 11)
    first, states = net(x[:, :4], states)
    steps = []
    with torch.no_grad():
        for t in range(4, 11):
            out, states = net.step(x[:, t], states)
            steps.append(out)
    torch.testing.assert_close(torch.cat([first, torch.stack(steps, 1)], 1), whole)
    packed, _ = net(x.view(1, -1), cu_seqlens=torch.tensor([0, 11, 22], dtype=torch.int32))
    torch.testing.assert_close(packed.view_as(whole), whole)
    assert state_bytes(net.config, 50) == state_bytes(model().config, 50) + 8


def test_sinusoids_are_those_of_the_paper():
    net, plain = model(positions="sinusoidal"), model()
    t, j = 7, 3
    row = net.backbone.positions(torch.tensor(t))
    rate = 10000 ** (-2 * j / 16)
    assert row[j].item() == pytest.approx(math.sin(t * rate)) and row[8 + j].item() == pytest.approx(math.cos(t * rate))
    x = plain.embed(tokens())
    shifted, _ = plain.backbone(x + net.backbone.positions(torch.arange(11)))
    torch.testing.assert_close(net.backbone(x)[0], shifted)
    assert set(net.state_dict()) == set(plain.state_dict())


def test_a_learned_table_is_drawn_by_its_name_and_left_out_of_the_count():
    net, plain = model(positions="learned", num_positions=40), model()
    weights = plain.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items() if name in weights)
    assert set(net.state_dict()) - set(weights) == {"backbone.positions.weight"}
    (total, inside), (plain_total, plain_inside) = count_parameters(net.config), count_parameters(plain.config)
    assert (total - plain_total, inside) == (40 * 16, plain_inside)
    assert flops_exact(net.config, 30) == flops_exact(plain.config, 30)


def test_rows_beyond_a_learned_table_are_refused_before_they_are_read():
    net = model(positions="learned", num_positions=10)
    with pytest.raises(ValueError, match="11.*num_positions: 10"):
        net(tokens())
    engine = Engine(net.float(), slots=1, device="cpu")
    assert engine.limit == 10
    with pytest.raises(ConfigError, match="prompt"):
        engine.generate([list(range(11))])
    assert len(engine.generate([[1, 2, 3]])[0].tokens) == 7


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("bias", ["none", "qkv", "all"])
def test_biases_of_mixers_and_gated_units(name, bias):
    config = family(name)(32, 2, num_heads=2, vocab_size=32)
    plain, net = (
        build_model(config, seed=1),
        build_model(parse(ModelConfig, config.model_dump() | {"bias": bias}), seed=1),
    )
    own = set(net.state_dict()) - set(plain.state_dict())
    weights = plain.state_dict()
    drawn = [key for key in weights if key.endswith("proj.weight")]  # what Mamba draws itself depends on the order
    assert drawn and all(torch.equal(net.state_dict()[key], weights[key]) for key in drawn)
    net.load_state_dict(weights, strict=False)
    assert all(key.endswith(".bias") and not net.state_dict()[key].any() for key in own)
    linear = {
        f"backbone.{key}.bias" for key, module in plain.backbone.named_modules()
        if isinstance(module, nn.Linear) and module.bias is None
    }  # fmt: skip
    keys = KEYS.get(name, {"q_proj", "k_proj", "v_proj"})
    reads = {key for key in linear if key.split(".")[-2] in keys}
    assert own == {"none": set(), "qkv": reads, "all": linear}[bias] and len(reads) == 2 * len(keys)
    x = torch.randint(0, 32, (1, 9))
    torch.testing.assert_close(net(x)[0], plain(x)[0])  # they start at zero


@pytest.mark.parametrize("name", ["tnl", "hgrn2", "attention", "mamba"])
def test_biases_enter_the_recurrence_and_learn(name):
    net = build_model(parse(ModelConfig, family(name)(32, 2, num_heads=2).model_dump() | {"bias": "all"}), seed=1)
    net = net.double()
    with torch.no_grad():
        for key, p in net.named_parameters():
            if key.endswith(".bias"):
                p.add_(0.1 * torch.randn_like(p))
    x = torch.randint(0, 256, (2, 9))
    whole, _ = net(x)
    states, steps = net.init_state(2, 9), []
    with torch.no_grad():
        for t in range(9):
            out, states = net.step(x[:, t], states)
            steps.append(out)
    torch.testing.assert_close(torch.stack(steps, 1), whole)
    total, count = net.loss(x[:, :-1], x[:, 1:])
    (total / count).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for n, p in net.named_parameters() if n.endswith(".bias"))
