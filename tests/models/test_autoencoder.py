"""The auto-encoder of the compression task: everything goes through the last position."""

import math

import numpy as np
import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap

from linnet.data.synthetic import TASKS, generate
from linnet.models import ModelConfig, build_model
from linnet.models.causal_lm import draw_weights
from linnet.models.synthetic import AutoEncoder, sin_cos


def configuration(**changes):
    values = {"d_model": 32, "layout": "gla+swiglu attention+mlp", "vocab_size": 17}
    options = {"gla": {"num_heads": 2}, "attention": {"num_heads": 2}}
    return ModelConfig(**{**values, "options": options, **changes})


def build_autoencoder(config: ModelConfig, num_positions: int, seed: int = 0) -> AutoEncoder:
    return draw_weights(lambda: AutoEncoder(config, num_positions), config, seed)


def test_positions_are_sines_then_cosines():
    table = sin_cos(9, 6)
    for i in range(9):
        rates = [1.0, 10000.0**-0.5, 10000.0**-1]
        expected = [math.sin(i * r) for r in rates] + [math.cos(i * r) for r in rates]
        torch.testing.assert_close(table[i], torch.tensor(expected))
    with pytest.raises(ValueError, match="d_model: 7 "):
        sin_cos(3, 7)


def test_logits_come_from_the_last_position_alone():
    model = build_autoencoder(configuration(), 12, seed=2).double()
    tokens = torch.randint(0, 17, (3, 12))
    x, _ = model.backbone(model.embedding(tokens))
    for position in (0, 5, 11):
        inner = torch.nn.functional.gelu(model.hidden(x[:, -1] + model.positions[position]))
        torch.testing.assert_close(model.logits(tokens)[:, position], model.head(inner))
    assert torch.equal(model(tokens)[0], model.logits(tokens)) and model(tokens)[1] is None


def test_the_published_decoder_has_three_linear_layers_with_norms_before():
    model = draw_weights(lambda: AutoEncoder(configuration(norm_eps=1e-5), 12, published=True), configuration(), 1)
    model = model.double()
    tokens = torch.randint(0, 17, (3, 12))
    x = model.embedding(tokens)
    for block in model.backbone.blocks:  # there is no norm after the encoder
        x = block(x)[0]

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    first, second = (layer for layer in model.decoder if isinstance(layer, torch.nn.Linear))
    y = torch.nn.functional.gelu(first(rms(x[:, -1:] + model.positions)))
    y = torch.nn.functional.gelu(second(rms(y)))
    torch.testing.assert_close(model.logits(tokens), model.head(rms(y)))


def test_the_loss_is_that_of_its_logits_over_scored_targets():
    model = build_autoencoder(configuration(), 12)
    tokens = torch.randint(0, 17, (3, 12))
    targets = tokens.clone()
    targets[:, -1] = -100
    total, count = model.loss(tokens, targets)
    log_p = model.logits(tokens).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(total, -log_p[:, :-1].sum())
    assert count == 33
    with pytest.raises(ValueError, match=r"targets: .*\[3, 11\]"):
        model.loss(tokens, targets[:, :-1])


def test_weights_depend_on_the_seed_alone_and_the_encoder_is_the_model_s():
    config = configuration()
    one, same, other = (build_autoencoder(config, 12, seed=s) for s in (5, 5, 6))
    torch.testing.assert_close(one.state_dict(), same.state_dict())
    assert not torch.equal(one.hidden.weight, other.hidden.weight)
    torch.testing.assert_close(one.backbone.state_dict(), build_model(config, seed=5).backbone.state_dict())
    assert torch.equal(one.embedding.weight, build_model(config, seed=5).embedding.weight)


def test_a_bundle_is_each_alone():
    members = [build_autoencoder(configuration(), 6, seed=s).double() for s in range(3)]
    weights, buffers = stack_module_state(members)
    tokens = torch.randint(0, 17, (3, 4, 6))

    def run(weights, buffers, tokens):
        return functional_call(members[0], (weights, buffers), (tokens,))[0]

    bundled = vmap(run)(weights, buffers, tokens)
    torch.testing.assert_close(bundled, torch.stack([m.logits(t) for m, t in zip(members, tokens, strict=True)]))


def test_it_learns_to_compress():
    """From eight kinds of token, of which the most frequent alone would be right one time in four or five."""
    task = TASKS["compression"](vocab_size=8, seq_len=4)
    samples = generate(task, "train", 16, seed=0)
    tokens, targets = (torch.from_numpy(np.asarray(x)) for x in samples)
    config = configuration(layout="gla+mlp x2", options={"gla": {"num_heads": 2}}, vocab_size=task.num_tokens)
    model = build_autoencoder(config, task.input_length)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    for _ in range(120):
        total, count = model.loss(tokens, targets)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert (model.logits(tokens).argmax(-1) == targets)[targets != -100].float().mean() > 0.7
