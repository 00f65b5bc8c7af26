"""Dropout masks are a function of (seed, step, layer, global row, position, channel), and look random."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, stack_module_state

from linnet.config import parse
from linnet.evaluate.likelihood import evaluating
from linnet.layers import dropout
from linnet.layers.dropout import Dropout, DropoutPosition
from linnet.models import ModelConfig, build_model
from linnet.train import recompute
from linnet.train.together import Ensemble

VALUES = {"d_model": 16, "layout": "gla+swiglu hgrn2", "vocab_size": 32, "dropout": 0.25}
OPTIONS = {"gla": {"num_heads": 2}, "hgrn2": {"num_heads": 2}, "swiglu": {"inner": 24}}
CONFIG = parse(ModelConfig, VALUES | {"options": OPTIONS})
TOKENS = torch.randint(0, 32, (6, 13), generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


def keys(batch=2, length=8, **place) -> torch.Tensor:
    holder = torch.nn.Module()
    holder.backbone = torch.nn.Module()
    holder.backbone.dropout_position = DropoutPosition()
    with dropout.position(holder, **{"seed": 1, "step": 0} | place):
        return holder.backbone.dropout_position(torch.zeros(batch, length, 1))


def mask(p=0.5, site=3, channels=64, **place) -> torch.Tensor:
    return Dropout(p, site).kept(keys(**place), channels)[0]


def gradients(model, parts=1, step=5) -> dict[str, torch.Tensor]:
    model.zero_grad()
    row = 0
    for tokens, targets in zip(INPUTS.tensor_split(parts), TARGETS.tensor_split(parts), strict=True):
        with dropout.position(model, step=step, first_row=row):
            total, _ = model.loss(tokens, targets)
        total.backward()
        row += len(tokens)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_that_stays_is_one_minus_p(p):
    kept = mask(p, batch=8, length=64, channels=255)
    n = kept.numel()
    assert kept.shape == (8, 64, 255)
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    for dim in (0, 1, 2):  # no row, position or channel differs from the rest
        shares = kept.double().mean([d for d in range(3) if d != dim])
        assert (shares - (1 - p)).abs().max() < 5.5 * (p * (1 - p) * len(shares) / n) ** 0.5


def test_all_that_names_an_element_changes_its_mask_and_nothing_is_correlated():
    base = mask(batch=4, length=32, channels=128)
    others = [
        mask(batch=4, length=32, channels=128, **change)
        for change in ({"seed": 2}, {"seed": 1 + (1 << 40)}, {"step": 1}, {"first_row": 4}, {"site": 4})
    ]
    others += [base.roll(1, dim) for dim in (0, 1, 2)] + [base.roll(64, 2)]
    for other in others:
        agreed = (base == other).double().mean().item()
        assert abs(agreed - 0.5) < 5 * 0.5 / base.numel() ** 0.5


def test_rows_are_counted_over_the_whole_step():
    whole = mask(batch=6)
    assert torch.equal(whole[2:], mask(batch=4, first_row=2))
    joined = mask(batch=1, length=48, row_length=8)  # six rows of 8 that the model sees as one
    assert torch.equal(whole.flatten(0, 1), joined[0])
    assert torch.equal(whole, mask(batch=6, step=0)) and not torch.equal(whole, mask(batch=6, step=1))


def test_kept_elements_are_scaled_and_gradients_follow_the_mask():
    x, drop = torch.ones(2, 8, 7, requires_grad=True), Dropout(0.25, 1)
    y = drop(x, keys())
    y.sum().backward()
    assert sorted(set(y.detach().flatten().tolist())) == pytest.approx([0.0, 1 / 0.75])
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_accumulation_gives_the_same_gradients(parts):
    model = build_model(CONFIG, seed=1).double()
    whole, split = gradients(model), gradients(model, parts)
    assert all(torch.allclose(whole[name], split[name], rtol=1e-9, atol=1e-12) for name in whole)
    assert not torch.allclose(gradients(model, step=6)["embedding.weight"], whole["embedding.weight"])


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_recomputation_gives_the_same_gradients(mode):
    plain, again = build_model(CONFIG, seed=1), build_model(CONFIG, seed=1)
    recompute.apply(again, mode)
    expected, found = gradients(plain), gradients(again)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_compiled_model_has_the_same_masks_and_is_compiled_once_for_all_steps():
    model = build_model(CONFIG, seed=1)
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model.loss, backend=count, fullgraph=True)
    for step in range(4):
        with dropout.position(model, step=step):
            torch.testing.assert_close(compiled(INPUTS, TARGETS)[0], model.loss(INPUTS, TARGETS)[0])
    assert count.frame_count == 1


def test_members_of_an_ensemble_have_the_masks_that_they_have_alone():
    models = [build_model(CONFIG, seed=seed) for seed in (4, 9)]
    parameters, buffers = stack_module_state(models)
    places = [name for name in buffers if name.endswith("dropout_position.value")]
    assert buffers[places[0]][:, 0].tolist() == [4, 9]
    buffers[places[0]][:, 1] = 7
    template = build_model(CONFIG)
    dropout.place_of(template).given = True

    def one(parameters, buffers):
        return functional_call(template, (parameters, buffers), (INPUTS,))[0]

    together = torch.vmap(one)(parameters, buffers)
    for model, logits in zip(models, together, strict=True):
        with dropout.position(model, step=7):
            torch.testing.assert_close(logits, model(INPUTS)[0])


def test_an_ensemble_trains_as_each_alone():
    losses = []
    for seeds in ((3, 8), (3,), (8,)):
        ensemble = Ensemble(
            [build_model(CONFIG, seed=seed) for seed in seeds],
            [1e-2] * len(seeds),
            [0.0] * len(seeds),
            4,
            vectorised=len(seeds) > 1,
        )
        losses.append(torch.stack([ensemble.step(INPUTS, TARGETS) for _ in range(4)]))
        scores = [ensemble.score(INPUTS, TARGETS, 3) for _ in range(2)]
        assert scores[0] == scores[1]  # without dropout
    torch.testing.assert_close(losses[0], torch.cat(losses[1:], 1), rtol=1e-4, atol=1e-5)


def test_none_in_evaluation_and_other_masks_outside_a_training_loop():
    model, plain = build_model(CONFIG, seed=1), build_model(CONFIG.model_copy(update={"dropout": 0.0}), seed=1)
    with evaluating(model):
        assert torch.equal(model(INPUTS)[0], plain(INPUTS)[0])
    assert not torch.equal(model(INPUTS)[0], model(INPUTS)[0])
    torch.manual_seed(0)
    one = model(INPUTS)[0]
    torch.manual_seed(0)
    assert torch.equal(model(INPUTS)[0], one)
    assert list(plain.state_dict()) == list(model.state_dict())
