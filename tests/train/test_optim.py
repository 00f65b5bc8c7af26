"""Which parameters are decayed, clipping, and a state that is named tensors."""

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.models import ModelConfig, build_model, family
from linnet.train.optimizer import Optimizer, OptimizerConfig, split

TOKENS = torch.arange(48).reshape(2, 24)


def model(**changes):
    config = family("cosformer2")(16, 2, num_heads=2).model_dump() | changes
    return build_model(ModelConfig.model_validate(config), seed=0)


def gradients(net) -> None:
    nll, count = net.loss(TOKENS, TOKENS.roll(-1, 1))
    (nll / count).backward()


@pytest.mark.parametrize("tied", [True, False])
def test_only_linear_weights_are_decayed(tied):
    net = model(tie_embeddings=tied)
    names = {id(p): name for name, p in net.named_parameters()}
    hidden, decayed, rest = ([names[id(p)] for p in part] for part in split(net))
    assert sorted([*hidden, *decayed, *rest]) == sorted(names.values())
    assert decayed == ([] if tied else ["head.weight"])
    assert "embedding.weight" in rest
    assert all(name.startswith("backbone.") and name.endswith("weight") for name in hidden)
    linear = [f"{name}.weight" for name, m in net.backbone.named_modules() if isinstance(m, torch.nn.Linear)]
    assert len(hidden) == len(linear)
    # LRPE angles and TPE coefficients are matrices too, but zero is not neutral for them.
    assert any("theta" in name or "tpe" in name for name in rest)


def test_layers_can_be_exempt_from_decay():
    net = model(layout="hyena+swiglu attention+swiglu", options={"attention": {"num_heads": 2}})
    names = {id(p): name for name, p in net.named_parameters()}
    hidden, _, rest = ([names[id(p)] for p in part] for part in split(net, ["hyena"]))
    mine = {name for name in names.values() if name.startswith("backbone.blocks.0.mixer.")}
    assert "backbone.blocks.0.mixer.out_proj.weight" in mine and mine <= set(rest)
    assert "backbone.blocks.1.mixer.out_proj.weight" in hidden
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, exempt=["hyena", "mamba"])  # a model without one
    optimizer, before = Optimizer(net, config), {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(factor=1.0)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if name in hidden else 1))


def test_wrong_exemptions_are_refused():
    with pytest.raises(ConfigError, match="exempt: no layer 'hyna'; did you mean 'hyena'"):
        parse(OptimizerConfig, {"exempt": ["hyna"]})
    with pytest.raises(ConfigError, match="Muon decays all matrices alike"):
        parse(OptimizerConfig, {"name": "muon", "exempt": ["hyena"]})


def test_decay_and_rate_reach_the_update():
    net = model()
    optimizer = Optimizer(net, OptimizerConfig(learning_rate=0.1, weight_decay=0.5, betas=(0.0, 0.0)))
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(factor=0.2)
    for name, p in net.named_parameters():
        hidden = any(p is q for q in split(net)[0])
        torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.2 * 0.5 if hidden else 1))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("as_number", [True, False])
def test_clipping_scales_the_whole_gradient(as_number):
    net = model()
    optimizer = Optimizer(net, OptimizerConfig(clip=0.01))
    gradients(net)
    before = [p.grad.clone() for p in net.parameters()]
    norm = optimizer.gradient_norm()
    expected = torch.cat([g.flatten() for g in before]).norm()
    torch.testing.assert_close(norm, expected)
    optimizer.clip(norm.item() if as_number else norm)
    torch.testing.assert_close(optimizer.gradient_norm().item(), 0.01)
    for p, g in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, g * (0.01 / expected))


@pytest.mark.parametrize("clip", [None, 1e9])
@pytest.mark.parametrize("as_number", [True, False])
def test_a_gradient_below_the_limit_stays_as_it_is(clip, as_number):
    net = model()
    optimizer = Optimizer(net, OptimizerConfig(clip=clip))
    gradients(net)
    before = [p.grad.clone() for p in net.parameters()]
    norm = optimizer.gradient_norm()
    optimizer.clip(norm.item() if as_number else norm)
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("clip", [0.3, 1.0, 3.0])
def test_a_norm_clips_alike_as_a_number_and_as_a_tensor(clip):
    """On a GPU it is a number at the steps where losses are read: more rows or evaluations change nothing else."""
    net, generator = model(), torch.Generator().manual_seed(0)
    optimizer = Optimizer(net, OptimizerConfig(clip=clip))
    norms = torch.cat(
        [5 * torch.rand(60, generator=generator), clip * (1 + 4e-7 * torch.randn(40, generator=generator))]
    )
    for norm in norms:
        found = []
        for one in (norm, norm.item()):
            for index, p in enumerate(net.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(index))
            optimizer.clip(one)
            found.append([p.grad for p in net.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), norm


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_learns_and_its_state_goes_on_exactly(name):
    config = OptimizerConfig(name=name, learning_rate=0.01)

    def steps(net, optimizer, count):
        losses = []
        for _ in range(count):
            nll, targets = net.loss(TOKENS, TOKENS.roll(-1, 1))
            losses.append((nll / targets).item())
            (nll / targets).backward()
            optimizer.step(1.0)
        return losses

    net = model()
    optimizer = Optimizer(net, config)
    first = steps(net, optimizer, 4)
    weights, state = net.state_dict(), {name: t.clone() for name, t in optimizer.tensors().items()}
    weights = {name: t.clone() for name, t in weights.items()}
    expected = steps(net, optimizer, 4)
    assert expected[-1] < first[0] - 0.5

    other = model()
    other.load_state_dict(weights)
    fresh = Optimizer(other, config)
    fresh.load(state)
    assert steps(other, fresh, 4) == expected
    assert set(fresh.tensors()) == set(optimizer.tensors())


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest():
    net = model(tie_embeddings=False)
    optimizer = Optimizer(net, OptimizerConfig(name="muon"))
    gradients(net)
    optimizer.step(1.0)
    kinds = {}
    for full in optimizer.tensors():
        name, _, what = full.rpartition(".")
        kinds.setdefault(name, set()).add(what)
    hidden, _, _ = split(net)
    for name, p in net.named_parameters():
        muon = any(p is q for q in hidden)
        assert kinds[name] == ({"momentum_buffer"} if muon else {"step", "exp_avg", "exp_avg_sq"}), name


def test_state_of_another_model_is_refused():
    net = model()
    with pytest.raises(ConfigError, match="elsewhere.weight"):
        Optimizer(net, OptimizerConfig()).load({"elsewhere.weight.step": torch.tensor(1.0)})
