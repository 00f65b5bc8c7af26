"""Every channel mixer by its contract; the mixture of experts against its definition, dispatched and under vmap."""

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.flop_counter import FlopCounterMode

from linnet.config import ConfigError, parse
from linnet.layers import CHANNELS, LayerContext, Mixer
from linnet.layers.routing import record_loads, top_k_routing
from linnet.models import ModelConfig, build_model
from linnet.parallel import tensor

FORMS = {
    "glu": [{}, {"activation": "relu"}, {"activation": "relu2"}],
    "mlp": [{}, {"activation": "silu", "bias": True}, {"activation": "relu2"}],
    "moe": [
        {},
        {"inner": 5, "num_experts": 3, "num_active": 3},
        {"num_experts": 4, "num_active": 1},
        {"normalise": False, "shared_inner": 6, "shared_gate": True, "activation": "relu2", "weight_scale": 0.5},
        {"num_experts": 6, "num_active": 3, "score": "sigmoid", "weight_scale": 2.5, "correction": True}
        | {"groups": 3, "active_groups": 2, "gated": False, "activation": "relu2", "latent": 8, "shared_inner": 5},
    ],
    "sglu": [{}],
    "swiglu": [{"inner": 7}],
}
CASES = [(name, options) for name in FORMS for options in FORMS[name]]


def build(name, options=None, d_model=16, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    channel = CHANNELS[name](parse(CHANNELS[name].Config, options or {}), LayerContext(d_model=d_model))
    for buffer in channel.buffers():
        torch.nn.init.normal_(buffer)
    return channel.to(dtype)


def tokens(*shape, d_model=16):
    return torch.randn(*shape, d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def experts_one_by_one(moe, x):
    """The equation, token by token and expert by expert."""
    config, rows = moe.config, []
    size = config.num_experts // config.groups

    def expert(x, gate, up, down):
        act = {"silu": torch.nn.functional.silu, "relu2": lambda x: x.clamp(min=0) ** 2}[config.activation]
        return down @ (act(gate @ x) * (up @ x) if config.gated else act(up @ x))

    for token in x.flatten(0, -2):
        logits = moe.router.weight @ token
        scores = logits.sigmoid() if config.score == "sigmoid" else torch.softmax(logits, 0)
        ranked = (scores + (moe.correction if config.correction else 0)).tolist()
        of_groups = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(config.groups)]
        groups = sorted(range(config.groups), key=lambda g: -of_groups[g])[: config.active_groups]
        best = sorted((e for g in groups for e in range(g * size, (g + 1) * size)), key=lambda e: -ranked[e])
        best = best[: config.num_active]
        weights = scores[best] / (scores[best].sum() if config.normalise else 1) * config.weight_scale
        read = moe.latent_down.weight @ token if config.latent else token
        row = torch.zeros_like(read)
        for weight, e in zip(weights, best, strict=True):
            part = slice(e * moe.inner, (e + 1) * moe.inner)
            gate = moe.gate_proj.weight[part] if config.gated else None
            row = row + weight * expert(read, gate, moe.up_proj.weight[part], moe.down_proj.weight[:, part])
        row = moe.latent_up.weight @ row if config.latent else row
        if config.shared_inner:
            gate = moe.shared_gate_proj.weight if config.gated else None
            shared = expert(token, gate, moe.shared_up_proj.weight, moe.shared_down_proj.weight)
            row = row + shared * ((moe.shared_gate.weight @ token).sigmoid() if config.shared_gate else 1)
        rows.append(row)
    return torch.stack(rows).view(x.shape)


def test_relu2_is_the_square_of_relu():
    mlp, x = build("mlp", {"activation": "relu2"}), tokens(2, 9)
    torch.testing.assert_close(mlp(x), mlp.down_proj(mlp.up_proj(x).clamp(min=0) ** 2))


def test_every_registered_channel_that_sees_each_token_alone_is_tested_here():
    """Those that see others have the contract of a mixer: `test_mixers.py`."""
    own = {name: cls for name, cls in CHANNELS.items() if cls.__module__.startswith("linnet.layers")}
    assert set(FORMS) == {name for name, cls in own.items() if not issubclass(cls, Mixer)}


@pytest.mark.parametrize("name, options", CASES)
def test_tokens_are_computed_each_alone(name, options):
    channel, x = build(name, options), tokens(2, 9)
    y = channel(x)
    assert y.shape == x.shape
    torch.testing.assert_close(channel(x[:, 4]), y[:, 4])
    torch.testing.assert_close(channel(x[:1, 2:3]), y[:1, 2:3])


@pytest.mark.parametrize("name, options", CASES)
def test_gradients_reach_every_weight_and_compilation_changes_nothing(name, options):
    channel, x = build(name, options), tokens(4, 33).requires_grad_()
    y = channel(x)
    y.sin().sum().backward()
    for key, parameter in channel.named_parameters():
        silent = key == "router.weight" and channel.config.num_active == 1  # its softmax is 1, whatever the logit
        assert silent or parameter.grad.abs().max() > 0, key
    torch._dynamo.reset()
    backend = "aot_eager" if options == dict(reversed(CASES))[name] else "eager"
    torch.testing.assert_close(torch.compile(channel, backend=backend, fullgraph=True)(x), y)


@pytest.mark.parametrize("name, options", CASES)
def test_plans_costs_and_bfloat16(name, options):
    channel = build(name, options)
    assert set(tensor.words(channel)) == set(channel.state_dict())
    assert channel.flops_paper(64) == 64 * channel.flops_paper(1) > 0
    y = channel.bfloat16()(tokens(2, 9).bfloat16())
    assert y.dtype == torch.bfloat16 and y.isfinite().all()


@pytest.mark.parametrize("options", FORMS["moe"])
@pytest.mark.parametrize("count", [1, 2, 31, 400])
def test_dispatched_masked_and_defined_experts_agree(options, count):
    moe, x = build("moe", options), tokens(count).requires_grad_()
    expected = experts_one_by_one(moe, x)
    results = []
    for y in (moe(x), moe._combined(x, moe.route(x), masked=True), expected):
        torch.testing.assert_close(y, expected)
        results.append(torch.autograd.grad(y.sin().sum(), [x, *moe.parameters()]))
    for gradients in results[:2]:
        torch.testing.assert_close(gradients, results[2])


def test_experts_get_their_tokens_however_uneven_the_load():
    moe, x = build("moe", {"inner": 4}), tokens(300)
    for favourites in ([0, 1], [6, 7], [0, 7], [3, 4]):
        with torch.no_grad():
            moe.router.weight.zero_()
            moe.router.weight[favourites] = torch.tensor([[100.0], [50.0]], dtype=torch.float64)
        always = x.abs()
        torch.testing.assert_close(moe(always), experts_one_by_one(moe, always))
        expected = torch.zeros(8, dtype=torch.float64).index_fill(0, torch.tensor(favourites), 0.5)
        torch.testing.assert_close(moe.route(always).load(), expected)


def test_exactly_two_experts_have_weight_and_the_rest_are_never_touched():
    moe, x = build("moe", {"inner": 4}), tokens(50)
    routing = moe.route(x)
    weights = routing.dense_weights()
    assert ((weights != 0).sum(-1) == 2).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(50, dtype=torch.float64))
    kept = routing.logits.masked_fill(weights == 0, float("-inf"))
    torch.testing.assert_close(weights, kept.softmax(-1))
    y, chosen = moe(x), (weights[0] != 0).nonzero().flatten().tolist()
    with torch.no_grad():
        for expert in set(range(8)) - set(chosen):
            moe.up_proj.weight[expert * 4 : expert * 4 + 4] = float("nan")
    torch.testing.assert_close(moe(x[:1]), y[:1])


def test_the_work_is_that_of_two_experts_of_eight():
    moe, x = build("moe", {"inner": 32}), tokens(4096)
    with FlopCounterMode(display=False) as counter:
        moe(x)
    router, expert = 2 * 4096 * 16 * 8, 2 * 4096 * 3 * 16 * 32
    assert 2 * expert <= counter.get_total_flops() - router <= 1.125 * 2 * expert
    assert moe.flops_paper(4096) == 4096 * (16 * 8 + 4 * 16 * 32 * 8 + 2 * 16 * 32 * 2)


def test_a_bundle_of_experts_is_each_alone():
    members = [build("moe", {"inner": 4}, seed=seed) for seed in range(3)]
    weights, buffers = stack_module_state(members)
    x = tokens(3, 2, 20)

    def run(weights, x):
        return functional_call(members[0], weights, (x,))

    y = vmap(run)(weights, x)
    alone = torch.stack([member(part) for member, part in zip(members, x, strict=True)])
    torch.testing.assert_close(y, alone)
    y.sin().sum().backward()
    bundled = {name: weight.grad for name, weight in weights.items()}
    alone.sin().sum().backward()
    for name in bundled:
        torch.testing.assert_close(bundled[name], torch.stack([dict(m.named_parameters())[name].grad for m in members]))
    torch._dynamo.reset()
    compiled = torch.compile(lambda w, x: vmap(run)(w, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(weights, x), y)


def test_loads_are_recorded_while_a_model_runs():
    config = ModelConfig(d_model=16, layout="gla+moe x2", options={"gla": {"num_heads": 2}, "moe": {"inner": 4}})
    model = build_model(config)
    with record_loads(model) as loads:
        model(torch.randint(0, 256, (2, 9)))
        model(torch.randint(0, 256, (2, 9)))
    model(torch.randint(0, 256, (2, 9)))
    assert list(loads) == ["backbone.blocks.0.channel", "backbone.blocks.1.channel"]
    for passes in loads.values():
        assert len(passes) == 2 and all(load.shape == (8,) and load.sum() == pytest.approx(1) for load in passes)


def test_balance_is_one_where_experts_are_used_alike():
    logits = 5.0 * torch.eye(8)
    assert top_k_routing(logits, 1).balance_loss() == pytest.approx(1.0)
    assert top_k_routing(logits[:1].repeat(8, 1), 1).balance_loss() > 5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_experts": 2, "num_active": 3}, "num_active: 3 .*num_experts.* 2"),
        ({"groups": 3}, "groups: 3 groups of num_experts 8 are not whole"),
        ({"groups": 8}, "groups: 8 .*at least 2"),
        ({"groups": 4, "num_active": 3}, "active_groups: 1 must be 2 to 4 groups of 2, with num_active 3"),
        ({"groups": 2, "active_groups": 3}, "active_groups: 3 must be 1 to 2 groups of 4"),
        ({"routing": "zero_logits", "score": "sigmoid", "groups": 2}, "zero_logits does not read groups, score"),
        ({"score": "sigmoid", "balance_coefficient": 0.1}, "balance_coefficient: .*softmax"),
        ({"shared_gate": True}, "shared_gate: .*shared_inner"),
    ],
)
def test_options_of_experts_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        parse(CHANNELS["moe"].Config, options)


def test_costs_of_a_shared_expert_and_of_a_latent():
    plain, moe = build("moe"), build("moe", {"shared_inner": 6, "shared_gate": True})
    shared = 3 * 16 * 6 + 16
    assert sum(p.numel() for p in moe.parameters()) == sum(p.numel() for p in plain.parameters()) + shared
    assert moe.flops_paper(3) == plain.flops_paper(3) + 2 * 3 * shared
    assert moe.inactive_parameters() == plain.inactive_parameters() == 6 * 3 * 16 * plain.inner
    latent = build("moe", {"latent": 8, "gated": False, "inner": 4})
    assert latent.flops_paper(1) == 16 * 8 + 8 * 4 * (2 * 8 + 2 * 2) + 2 * 2 * 16 * 8
    assert latent.inactive_parameters() == 6 * 2 * 8 * 4


def test_default_widths():
    assert build("moe", d_model=96).inner == 128  # two of them are 8/3 of 96
    assert build("mlp").up_proj.out_features == 64


def test_dense_experts_are_their_equations():
    """As in the published implementation of paper 004: every expert reads the hidden units of all."""
    options = {"inner": 4, "num_experts": 3, "num_active": 2, "routing": "zero_logits", "router_bias": True}
    moe, x = build("moe", options | {"down": "dense", "activation": "gelu"}), tokens(7)
    logits = moe.router(x)
    kept = torch.where(logits >= logits.topk(2, -1).values[:, 1:], logits, 0.0).softmax(-1)
    hidden = torch.nn.functional.gelu(moe.gate_proj(x), approximate="tanh") * moe.up_proj(x)
    outputs = moe.down_proj(hidden).view(7, -1, 3)
    torch.testing.assert_close(moe(x), (outputs * kept[:, None]).sum(-1))
    assert moe.gates.shape == (3, 4) and moe.inactive_parameters() == 0
    own = build("moe", options | {"activation": "gelu"})
    hidden = torch.nn.functional.gelu(own.gate_proj(x), approximate="tanh") * own.up_proj(x)
    logits = own.router(x)
    kept = torch.where(logits >= logits.topk(2, -1).values[:, 1:], logits, 0.0).softmax(-1)
    parts = (hidden.view(7, 3, 4) * kept[..., None]).flatten(1)
    torch.testing.assert_close(own(x), own.down_proj(parts))
