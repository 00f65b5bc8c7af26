"""RWKV-7 and its channel mixer: the whole model by a plain loop, published parameter counts, initialisation, values."""

import math

import pytest
import torch
from torch.nn import functional as F

from linnet.config import ConfigError, parse
from linnet.encoders.config import MaskedConfig
from linnet.layers import MIXERS, LayerContext
from linnet.models import ModelConfig, build_model, count_parameters, get_recipe
from linnet.models.backbone import Backbone
from linnet.train.optimizer import split
from linnet.train.recompute import apply as recompute

WIDTH, HEADS, VOCAB = 32, 2, 29
RWKV = {
    "d_model": WIDTH,
    "layout": "rwkv7+rwkv x3",
    "options": {"rwkv7": {"num_heads": HEADS}},
    "norm": "layernorm",
    "embedding_norm": True,
    "vocab_size": VOCAB,
}
HYBRID = RWKV | {"layout": "attention+rwkv (rwkv7+swiglu attention+rwkv) x2", "tie_embeddings": False}


def build(layout=None, seed=0, **changes):
    """A model in float64 with every weight random, so that no term is silent."""
    model = build_model(ModelConfig(**RWKV | changes | ({"layout": layout} if layout else {})), seed=seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def tokens(batch=2, length=23):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def layer_norm(x, norm):
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt() * norm.weight + norm.bias


def plain_loop(model, row):
    """The logits of one row, token by token, from the equations and the parameters alone."""
    D, K = WIDTH, WIDTH // HEADS
    blocks = model.backbone.blocks
    states = [torch.zeros(HEADS, K, K, dtype=torch.float64) for _ in blocks]
    before = [[torch.zeros(D, dtype=torch.float64)] * 2 for _ in blocks]
    logits = []
    for token in row.tolist():
        x = layer_norm(model.embedding.weight[token], model.backbone.input_norm)
        for i, block in enumerate(blocks):
            m, h = block.mixer, layer_norm(x, block.mixer_norm)
            delta, before[i][0] = before[i][0] - h, h
            low = {name: getattr(m, name) for name in ("decay", "rate", "gate")}
            r = m.r_proj.weight @ (h + m.x_r * delta)
            k0 = m.k_proj.weight @ (h + m.x_k * delta)
            v = m.v_proj.weight @ (h + m.x_v * delta)
            w = m.w0 + low["decay"].up.weight @ torch.tanh(low["decay"].down.weight @ (h + m.x_w * delta))
            w = torch.exp(-math.exp(-0.5) * torch.sigmoid(w))
            a = torch.sigmoid(m.a0 + low["rate"].up.weight @ (low["rate"].down.weight @ (h + m.x_a * delta)))
            gate = low["gate"].up.weight @ torch.sigmoid(low["gate"].down.weight @ (h + m.x_g * delta))
            if i == 0:
                first = v
            else:
                share = m.v0 + m.value.up.weight @ (m.value.down.weight @ (h + m.x_v * delta))
                v = v + (first - v) * torch.sigmoid(share)
            k, y = k0 * (1 + (a - 1) * m.k_a), []
            for head in range(HEADS):
                part, S = slice(head * K, head * K + K), states[i][head]
                kappa = (k0 * m.k_k)[part]
                kappa = kappa / (kappa.square().sum() + 1e-6).sqrt()
                erased = torch.outer(kappa * a[part], kappa @ S)
                S = w[part, None] * S - erased + torch.outer(k[part], v[part])
                states[i][head] = S
                o = r[part] @ S
                o = (o - o.mean()) / (o.var(correction=0) + K * 1e-5).sqrt() * m.norm_weight[part] + m.norm_bias[part]
                y.append(o + (r[part] * k[part] * m.r_k[part]).sum() * v[part])
            x = x + m.out_proj.weight @ (torch.cat(y) * gate)
            c, h = block.channel, layer_norm(x, block.channel_norm)
            delta, before[i][1] = before[i][1] - h, h
            x = x + c.down_proj.weight @ torch.relu(c.up_proj.weight @ (h + c.x_k * delta)) ** 2
        logits.append(model.embedding.weight @ layer_norm(x, model.backbone.norm))
    return torch.stack(logits)


@torch.no_grad()
def test_the_model_is_its_equations():
    model, rows = build(), tokens(1, 70)
    torch.testing.assert_close(model(rows)[0][0], plain_loop(model, rows[0]), rtol=1e-9, atol=1e-9)


PUBLISHED = {"0.1b": 191_034_624, "0.4b": 450_767_872, "1.5b": 1_527_404_544, "2.9b": 2_947_735_040}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_parameter_counts(size):
    assert count_parameters(get_recipe(f"rwkv7-world-{size}"))[0] == PUBLISHED[size]


@torch.no_grad()
@pytest.mark.parametrize("config", [RWKV, HYBRID])
def test_steps_parts_and_packed_rows_are_the_model(config):
    model, rows = build(**config), tokens()
    logits, _ = model(rows)
    state, steps = model.init_state(2, 23), []
    for t in range(23):
        out, state = model.step(rows[:, t], state)
        steps.append(out)
    torch.testing.assert_close(torch.stack(steps, 1), logits)
    first, middle = model(rows[:, :9], model.init_state(2, 23))
    second, final = model(rows[:, 9:], middle)
    torch.testing.assert_close(torch.cat([first, second], 1), logits)
    torch.testing.assert_close(final, state)
    documents = torch.tensor([0, 1, 9, 9, 23], dtype=torch.int32)
    packed, _ = model(rows[:1], cu_seqlens=documents)
    alone = [model(rows[:1, a:b])[0] for a, b in ((0, 1), (1, 9), (9, 23))]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_the_state_of_a_block_has_that_of_its_channel_mixer():
    block = build().backbone.blocks[1]
    shapes = {name: spec.shape for name, spec in block.state_spec(2, 100).items()}
    K = WIDTH // HEADS
    assert shapes == {"matrix": (2, HEADS, K, K), "shift": (2, 1, WIDTH), "channel_shift": (2, 1, WIDTH)}


@torch.no_grad()
def test_kept_tokens_are_those_of_all():
    """The channel mixer looks at the token before, which need not be kept."""
    model = build()
    x, keep = model.embed(tokens()), (torch.tensor([0, 1, 1]), torch.tensor([7, 3, 22]))
    torch.testing.assert_close(model.backbone(x, keep=keep)[0], model.backbone(x)[0][keep])


@pytest.mark.parametrize("config", [RWKV, HYBRID])
@pytest.mark.parametrize("mode", ["block", "selective"])
def test_recomputation_passes_values_with_their_gradients(config, mode):
    results = []
    for how in ("none", mode):
        model = build(**config)
        recompute(model, how)
        loss, _ = model.loss(tokens()[:, :-1], tokens()[:, 1:])
        loss.backward()
        results.append([p.grad for p in model.parameters()])
        assert all(grad.abs().max() > 0 for grad in results[-1])
    torch.testing.assert_close(*results)


def test_later_layers_read_the_values_of_the_first_kind_of_mixer():
    model, rows = build(**HYBRID), tokens()
    first, later = (model.backbone.blocks[index].mixer for index in (1, 3))
    assert first.value is None and later.value is not None
    found = []
    first.v_proj.register_forward_hook(lambda *call: found.append(call[2]))
    later.register_forward_pre_hook(lambda _, arguments: found.extend(arguments[3]))
    model(rows)
    assert found[0] is found[1]


def test_a_layer_alone_reads_zeros():
    mixer = build().backbone.blocks[1].mixer
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0], mixer(x, None, None, [torch.zeros_like(x)])[0])
    values = []
    build().backbone.blocks[0].mixer(x, None, None, values)
    assert [value.shape for value in values] == [x.shape]


def test_without_causality_every_layer_has_its_own_values():
    backbone = Backbone(MaskedConfig(**RWKV), causal=False).double()
    assert all(block.mixer.value is None for block in backbone.blocks)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(0.2)
    torch.testing.assert_close(backbone(x.flip(1))[0].flip(1), backbone(x)[0])


def test_initial_vectors_and_matrices_are_the_published():
    model = build_model(ModelConfig(**RWKV | {"d_model": 128}), seed=3)
    for layer, block in enumerate(model.backbone.blocks):
        m, c, n = block.mixer, block.channel, torch.arange(128)
        lin, place = n / 127 - 0.5, 2 * (n % 64) / 63 - 1
        zigzag = place * place.abs()
        decay = -5.5 + 6 * (n / 127) ** (1 + (layer / 2) ** 0.3) + 2.5 * zigzag
        expected = {"w0": decay, "a0": -0.19 + 0.3 * zigzag + 0.4 * lin, "k_k": 0.71 - 0.1 * lin}
        expected |= {"k_a": torch.full((128,), 1.02), "r_k": torch.full((128,), -0.04)}
        expected |= {"norm_weight": torch.full((128,), ((layer + 1) / 3) ** 0.7), "norm_bias": torch.zeros(128)}
        for name, exponent in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            expected[f"x_{name}"] = 1 - (n / 128) ** (exponent * (1 - layer / 3))
        if layer:
            expected["v0"] = 0.73 - 0.4 * lin
        for name, values in expected.items():
            torch.testing.assert_close(getattr(m, name).data, values, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(c.x_k.data, 1 - (n / 128) ** ((1 - layer / 3) ** 4), rtol=1e-4, atol=1e-5)
        for weight, gain in ((m.r_proj.weight, 1), (m.k_proj.weight, 0.1), (m.v_proj.weight, 1), (c.up_proj.weight, 1)):
            torch.testing.assert_close(weight.T @ weight, gain**2 * torch.eye(128), rtol=1e-4, atol=1e-5)
        up = m.decay.up.weight
        torch.testing.assert_close(up.T @ up, 0.01 * torch.eye(up.shape[1]), rtol=1e-4, atol=1e-6)
        for zero in (m.out_proj, c.down_proj, m.decay.down, m.rate.down, m.gate.down):
            assert not zero.weight.any()


def test_vectors_have_no_weight_decay():
    hidden, decayed, _ = split(build_model(ModelConfig(**RWKV)), [])
    assert all(p.ndim == 2 for p in (*hidden, *decayed))


def test_long_sequences_of_large_inputs_stay_finite_in_bfloat16():
    model = build().bfloat16()
    x = (100 * torch.randn(1, 600, WIDTH)).bfloat16().requires_grad_()
    y, _ = model.backbone(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in (x, *model.backbone.parameters()))


def test_bad_options_are_refused_by_name():
    with pytest.raises(ConfigError, match="num_heads: 5 .*d_model.* 32"):
        parse(ModelConfig, RWKV | {"options": {"rwkv7": {"num_heads": 5}}})
    with pytest.raises(ConfigError, match="gate_rank.*-1"):
        parse(ModelConfig, RWKV | {"options": {"rwkv7": {"gate_rank": -1}}})
    beside = {"parallel": {"mixers": {"rwkv7": {}, "attention": {}}}}  # where no block passes values on
    with pytest.raises(ConfigError, match="mixers: 'rwkv7' .* parallel"):
        parse(ModelConfig, RWKV | {"layout": "parallel+rwkv", "options": beside})
    with pytest.raises(ValueError, match="rwkv7.num_heads: 5"):
        MIXERS["rwkv7"](MIXERS["rwkv7"].Config(num_heads=5), LayerContext(d_model=32))


def test_a_model_learns_from_its_start():
    """W_o and W_2 start at zero: the first step moves them, the second everything."""
    model = build_model(ModelConfig(**RWKV), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows, losses = tokens(8, 33), []
    for _ in range(12):
        loss = F.cross_entropy(model(rows[:, :-1])[0].flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad.abs().max() > 0 for p in model.parameters())
