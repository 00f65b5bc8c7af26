"""Auxiliary losses of layers: the balance loss of experts in the gradient, in rows, and not in the loss."""

import pytest
import torch

from linnet.data import Batches, prepare
from linnet.layers.routing import record_loads
from linnet.models import ModelConfig, build_model
from linnet.train import recompute, train
from linnet.train.objective import training_loss
from linnet.train.together import Ensemble

LAYOUTS = ["gla+moe x2", "hyena_experts+swiglu x2", "hyena_experts+moe"]


def config_of(layout, coefficient):
    options = {
        "gla": {"num_heads": 2},
        "hyena_experts": {"num_experts": 4, "num_modes": 2, "balance_coefficient": coefficient},
        "moe": {"num_experts": 4, "inner": 8, "balance_coefficient": coefficient},
    }
    used = {name: values for name, values in options.items() if name in layout}
    return ModelConfig(d_model=16, layout=layout, vocab_size=17, options=used, init_std=0.2)


def loss_of(layout, coefficient, recomputed="none"):
    model = build_model(config_of(layout, coefficient))
    recompute.apply(model, recomputed)
    return model, training_loss(model, model.loss)


def batch():
    tokens = torch.randint(17, (3, 13), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model, loss):
    total, count, *auxiliary = loss(*batch())
    model.zero_grad()
    sum(auxiliary, total / count).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_coefficient_of_zero_changes_nothing(layout):
    model, loss = loss_of(layout, 0.0)
    assert len(loss(*batch())) == 2
    plain, plain_loss = loss_of(layout, 0.0)
    for found, expected in zip(gradients(model, loss), gradients(plain, plain.loss), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sum_over_layers_of_the_weighted_balance(layout):
    model, loss = loss_of(layout, 0.3)
    expected, handles = [], []
    for layer in model.modules():
        if hasattr(layer, "route"):
            handles.append(
                layer.register_forward_pre_hook(lambda m, x: expected.append(0.3 * m.route(x[0]).balance_loss()))
            )
    total, count, auxiliary = loss(*batch())
    assert len(expected) == 2 and torch.equal(total, model.loss(*batch())[0]) and count == 36
    torch.testing.assert_close(auxiliary, expected[0] + expected[1])
    routers = [p for name, p in model.named_parameters() if "router" in name]
    found = torch.autograd.grad(auxiliary, routers, retain_graph=True)
    assert all(gradient.abs().max() > 0 for gradient in found)
    torch.testing.assert_close(found, torch.autograd.grad(expected[0] + expected[1], routers))


def test_evaluation_computes_none():
    model, loss = loss_of("gla+moe x2", 0.3)
    model.eval()
    assert len(loss(*batch())) == 2
    with torch.no_grad():
        assert len(training_loss(model.train(), model.loss)(*batch())) == 2


@pytest.mark.parametrize("mode", ["block", "selective"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recomputation_gives_the_same_gradients(layout, mode):
    torch.testing.assert_close(gradients(*loss_of(layout, 0.3, mode)), gradients(*loss_of(layout, 0.3)))


def test_a_compiled_loss_is_the_same():
    model, loss = loss_of("hyena_experts+moe", 0.3)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, compiled), gradients(model, loss))


@pytest.mark.parametrize("vectorised", [True, False])
def test_members_of_an_ensemble_train_as_alone(vectorised):
    config, data = config_of("hyena_experts+moe", 0.3), batch()
    models = [build_model(config, seed=seed) for seed in range(2)]
    together = Ensemble(models, [0.01] * 2, [0.0] * 2, 5, vectorised=vectorised)
    alone = [Ensemble([model], [0.01], [0.0], 5) for model in models]
    without = Ensemble([build_model(config_of("hyena_experts+moe", 0.0), seed=0)], [0.01], [0.0], 5)
    for step in range(4):
        losses = together.step(*data)
        torch.testing.assert_close(losses, torch.cat([one.step(*data) for one in alone]))
        plain = without.step(*data)
        assert losses.shape == (2,) and torch.isclose(losses[0], plain[0]) == (step == 0)


def test_balance_evens_the_loads():
    spreads = []
    for coefficient in (0.0, 1.0):
        model, loss = loss_of("gla+moe x2", coefficient)
        with torch.no_grad():  # all tokens go to the same two experts
            model.embedding.weight += 1.0
            for block in model.backbone.blocks:
                block.channel.router.weight[:2] += 0.1
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        for _ in range(60):
            total, count, *auxiliary = loss(*batch())
            sum(auxiliary, total / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        with record_loads(model) as loads:
            model(batch()[0])
        spreads.append(max(float(load.max() * 4) for passes in loads.values() for load in passes))
    assert spreads[1] < 1.6 < 1.9 < spreads[0], spreads


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_have_a_number_of_their_own(settings, cache, tmp_path, parts, stop_at):
    changes = {"steps": 8, "log_every": 2, "checkpoint_every": 3, "accumulation": parts}
    model = config_of("gla+moe x2", 0.3).model_copy(update={"vocab_size": 256}).model_dump()
    plain = config_of("gla+moe x2", 0.0).model_copy(update={"vocab_size": 256}).model_dump()
    config = settings(model=model, **changes)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped", cache, stop_at(4))
    found = [
        [row for row in train(one, tmp_path / name, cache).metrics() if "loss" in row]
        for one, name in ((config, "stopped"), (config, "whole"), (settings(model=plain, **changes), "plain"))
    ]
    numbers = [[(row["loss"], row.get("auxiliary_loss")) for row in rows] for rows in found]
    assert numbers[0] == numbers[1]
    assert all(0.5 < auxiliary < 1.2 for _, auxiliary in numbers[0])  # two layers of 0.3 times 1 (even) to 4
    assert all("auxiliary_loss" not in row for row in found[2])
    assert numbers[0][0][0] == pytest.approx(numbers[2][0][0], rel=5e-3) and numbers[0][-1] != numbers[2][-1]


def test_accumulation_weighs_micro_batches_by_their_targets(settings, cache, tmp_path):
    model = config_of("gla+moe x2", 0.3).model_copy(update={"vocab_size": 256})
    config = settings(model=model.model_dump(), steps=1, log_every=1, batch_size=5, accumulation=2)
    row = next(row for row in train(config, tmp_path, cache).metrics() if "loss" in row)
    tokens, targets = Batches(prepare(config.data, cache).train, config.seq_len, 5, config.seed).batch(0)
    built = build_model(config.model, seed=config.seed)
    loss = training_loss(built, built.loss)
    parts = [loss(*part) for part in zip(tokens.tensor_split(2), targets.tensor_split(2), strict=True)]
    expected = sum(auxiliary.item() * count.item() for _, count, auxiliary in parts) / targets.numel()
    assert row["auxiliary_loss"] == pytest.approx(expected, rel=1e-5)
