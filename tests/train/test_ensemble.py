"""Models trained together are the same models trained alone."""

import math

import pytest
import torch

from linnet.models import ModelConfig, build_model
from linnet.models.causal_lm import draw_weights
from linnet.models.synthetic import AutoEncoder
from linnet.train.together import Ensemble, cosine

STEPS = 6
POINTS = [(1e-3, 0.0), (3e-3, 0.1), (1e-2, 0.5)]
LAYOUTS = [
    "attention+swiglu",
    "tnl+swiglu",
    "hgrn2+sglu attention",
    "gla+moe",
    "mamba",
    "hgrn",
    "lightnet",
    "cosformer2",
    "hyena",
    "mh_hyena",
    "hyena_experts",
    "lru s4d",
    "rwkv4 tnn",
]


def model_of(layout, seed=0):
    options = {"moe": {"num_experts": 4, "inner": 8}} if "moe" in layout else {}
    config = ModelConfig(d_model=32, layout=layout, vocab_size=12, tie_embeddings=False, options=options)
    return build_model(config, seed=seed)


def batches(count=STEPS, members=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, 4, 16) if members is None else (count, members, 4, 16)
    tokens = torch.randint(12, shape, generator=generator)
    targets = torch.randint(12, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.5] = -100
    return list(zip(tokens, targets, strict=True))


def alone(model, rate, decay, data):
    """The same run with PyTorch's own AdamW and schedule: losses and final parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay, betas=(0.9, 0.98), eps=1e-8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(data))
    losses = []
    for tokens, targets in data:
        total, count = model.loss(tokens, targets)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        schedule.step()
        losses.append((total / count).item())
    return losses, dict(model.named_parameters())


def together(models, data, points=POINTS, **options):
    ensemble = Ensemble(models, *zip(*points, strict=True), len(data), **options)
    losses = torch.stack([ensemble.step(*batch) for batch in data], dim=1)
    return ensemble, losses


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_member_is_the_run_alone(layout):
    data = batches()
    ensemble, losses = together([model_of(layout) for _ in POINTS], data)
    assert ensemble.vectorised and ensemble.alive.all() and ensemble.diverged_at() == [None] * 3
    for index, point in enumerate(POINTS):
        expected, parameters = alone(model_of(layout), *point, data)
        torch.testing.assert_close(losses[index], torch.tensor(expected), rtol=1e-4, atol=1e-5)
        member = ensemble.member(index)
        assert list(member) == list(parameters)
        # Adam divides by the size of the gradient, so where that is rounding alone an update is, too.
        differences = torch.cat([(member[name] - p).detach().flatten().abs() for name, p in parameters.items()])
        assert differences.quantile(0.99) < 1e-5 * (1 + 100 * point[0])


def test_members_may_have_data_and_weights_of_their_own():
    data = batches(members=3)
    ensemble, losses = together([model_of("tnl+swiglu", seed) for seed in range(3)], data)
    scores = ensemble.score(*data[0], batch_size=3)
    for index, point in enumerate(POINTS):
        own = [(tokens[index], targets[index]) for tokens, targets in data]
        model = model_of("tnl+swiglu", index)
        expected, _ = alone(model, *point, own)
        torch.testing.assert_close(losses[index], torch.tensor(expected), rtol=1e-4, atol=1e-5)
        total, count = model.loss(*own[0])
        assert scores[index].loss == pytest.approx((total / count).item(), rel=1e-4)


def test_an_autoencoder_and_a_loop_in_place_of_vmap():
    config = ModelConfig(d_model=32, layout="gla+mlp", vocab_size=12)
    data = batches()
    ensembles = [
        together([draw_weights(lambda: AutoEncoder(config, 16), config, 0) for _ in POINTS], data, vectorised=choice)
        for choice in (True, False)
    ]
    assert [ensemble.vectorised for ensemble, _ in ensembles] == [True, False]
    torch.testing.assert_close(ensembles[0][1], ensembles[1][1], rtol=1e-4, atol=1e-5)


class Reads(torch.nn.Module):
    """A model whose loss depends on a number that is read, which neither vmap nor a CUDA graph goes through."""

    def __init__(self):
        super().__init__()
        self.inner = model_of("tnl+swiglu")

    def loss(self, tokens, targets):
        total, count = self.inner.loss(tokens, targets)
        return total * (1.0 if total.item() > 0 else 0.5), count


def test_what_vmap_does_not_go_through_runs_one_by_one():
    data = batches()
    with pytest.warns(UserWarning, match="one by one|vmap"):
        ensemble, losses = together([Reads() for _ in POINTS], data)
    assert not ensemble.vectorised
    expected, _ = alone(Reads(), *POINTS[1], data)
    torch.testing.assert_close(losses[1], torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vectorised", [True, False])
def test_a_diverging_member_is_masked_and_the_others_go_on(vectorised):
    data = batches(10)
    points = [(1e-3, 0.0), (1e30, 0.0), (3e-3, 0.1)]
    ensemble, losses = together([model_of("tnl+swiglu") for _ in points], data, points, vectorised=vectorised)
    assert ensemble.alive.tolist() == [True, False, True]
    first, second, third = ensemble.diverged_at()
    assert first is None and third is None and 0 < second < 10
    assert losses[1, :second].isfinite().all() and not losses[1, second].isfinite()
    for index in (0, 2):
        expected, _ = alone(model_of("tnl+swiglu"), *points[index], data)
        torch.testing.assert_close(losses[index], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    before = ensemble.member(1)
    ensemble.step(*data[0])
    for name, p in ensemble.member(1).items():
        torch.testing.assert_close(p, before[name], equal_nan=True)


def test_scores_count_tokens_and_classes():
    class Fixed(torch.nn.Module):
        """Always answers the token it reads."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(4))

        def forward(self, tokens):
            return self.weight[tokens], None

        def loss(self, tokens, targets):
            return self.weight.sum(), (targets != -100).sum()

    ensemble = Ensemble([Fixed(), Fixed()], [1e-3] * 2, [0.0] * 2, 1)
    tokens = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 3], [2, 2, 2, 3]])
    targets = torch.tensor([[0, 1, 1, -100], [0, 1, 1, -100], [2, 2, 0, -100]])
    for score in ensemble.score(tokens, targets, batch_size=2):
        assert score.accuracy == pytest.approx(7 / 9)
        # First batch: class 0 is right 2 of 2, class 1 is right 3 of 4. Second: class 2 2 of 2, class 0 0 of 1.
        assert score.macro_batch == pytest.approx((2 * (1 + 3 / 4) / 2 + (1 + 0) / 2) / 3)
        wrong, right = -math.log(1 / (math.e + 3)), -math.log(math.e / (math.e + 3))
        assert score.loss == pytest.approx((7 * right + 2 * wrong) / 9)


def test_bfloat16_is_near_float32():
    data = batches()
    _, losses = together([model_of("tnl+swiglu") for _ in POINTS], data, precision="bfloat16")
    expected, _ = alone(model_of("tnl+swiglu"), *POINTS[0], data)
    torch.testing.assert_close(losses[0], torch.tensor(expected), rtol=0, atol=0.05)


def test_a_compiled_bundle_is_one_graph(monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compiler(function, fullgraph=True, backend="aot_eager"))
    data = batches(3)
    ensemble, losses = together([model_of("tnl+swiglu") for _ in POINTS], data, compile=True)
    assert ensemble.vectorised
    torch.testing.assert_close(losses, together([model_of("tnl+swiglu") for _ in POINTS], data)[1])


def test_models_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="parameters"):
        Ensemble([model_of("tnl"), model_of("gla")], [1e-3] * 2, [0.0] * 2, 3)
    with pytest.raises(ValueError, match="1.* 2"):
        Ensemble([model_of("tnl")], [1e-3] * 2, [0.0] * 2, 3)


def test_the_rate_falls_to_zero():
    assert cosine(0, 10) == 1.0 and cosine(5, 10) == pytest.approx(0.5) and cosine(9, 10) < 0.03


def test_other_momenta_a_constant_rate_and_parameters_without_decay():
    data, (rate, decay) = batches(), POINTS[2]
    reference = model_of("tnl+swiglu")
    excluded = [name for name, _ in reference.named_parameters() if "norm" in name or "embedding" in name]
    kept = [p for name, p in reference.named_parameters() if name not in excluded]
    rest = [p for name, p in reference.named_parameters() if name in excluded]
    optimizer = torch.optim.AdamW([{"params": kept}, {"params": rest, "weight_decay": 0.0}], rate, weight_decay=decay)
    for tokens, targets in data:
        total, count = reference.loss(tokens, targets)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    form = {"betas": (0.9, 0.999), "constant": True, "no_decay": excluded}
    ensemble, _ = together([model_of("tnl+swiglu")] * 2, data, [POINTS[0], (rate, decay)], **form)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(ensemble.member(1)[name], parameter, rtol=1e-3, atol=1e-4)
    assert excluded and rest and kept


def test_an_ensemble_goes_on_from_its_state_as_if_nothing_had_been():
    data = batches()
    whole, losses = together([model_of("gla+swiglu") for _ in POINTS], data)
    first = Ensemble([model_of("gla+swiglu") for _ in POINTS], *zip(*POINTS, strict=True), len(data))
    for batch in data[:3]:
        first.step(*batch)
    state = {name: x.clone() for name, x in first.state().items()}
    second = Ensemble([model_of("gla+swiglu", seed=5) for _ in POINTS], *zip(*POINTS, strict=True), len(data))
    second.load_state(state)
    assert second.step_number == 3
    for index in range(3, len(data)):
        assert torch.equal(second.step(*data[index]), losses[:, index])
    for name, x in whole.state().items():
        assert torch.equal(x, second.state()[name])
    with pytest.raises(ValueError, match="other models"):
        second.load_state(together([model_of("tnl")], data[:1], POINTS[:1])[0].state())


def test_parameters_without_a_gradient_stay():
    class Idle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.idle = model_of("tnl"), torch.nn.Parameter(torch.ones(3))

        def loss(self, tokens, targets):
            return self.inner.loss(tokens, targets)

    ensemble, losses = together([Idle() for _ in POINTS], batches())
    expected, _ = alone(model_of("tnl"), *POINTS[2], batches())
    torch.testing.assert_close(losses[2], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert torch.equal(ensemble.member(2)["idle"], torch.ones(3))


def test_where_the_compiler_fails_a_bundle_runs_without_it(monkeypatch):
    def broken(function):
        def call(*arguments):
            raise RuntimeError("no compiler\nand more")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    data = batches(3)
    with pytest.warns(UserWarning, match="no compiler$"):
        ensemble, losses = together([model_of("tnl") for _ in POINTS], data, compile=True)
    assert not ensemble.compiled
    assert torch.equal(losses, together([model_of("tnl") for _ in POINTS], data)[1])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("layout", ["attention+swiglu", "tnl+swiglu", "hgrn2+swiglu", "gla+moe", "hyena", "mh_hyena"])
def test_a_captured_step_is_the_step(layout):
    """Over batches of two sizes, the second of which comes now and then, and with a member that diverges."""
    data = [tuple(x.cuda() for x in batch) for batch in batches(24)]
    data = [tuple(x[:3] for x in batch) if i % 3 == 2 else batch for i, batch in enumerate(data)]
    points = [*POINTS, (1e30, 0.0)]
    models = [model_of(layout) for _ in points]
    ensemble, losses = together(models, data, points, device="cuda")
    assert ensemble.vectorised and ensemble._advance.graphs == 2
    plain, expected = together(models, data, points, device="cuda", capture=False)
    torch.testing.assert_close(losses[:3], expected[:3], rtol=1e-4, atol=1e-5)
    assert ensemble.alive.tolist() == plain.alive.tolist() == [True, True, True, False]
    assert ensemble.diverged_at() == plain.diverged_at()


@needs_gpu
@pytest.mark.parametrize("layout", ["attention+swiglu", "tnl+swiglu", "gla+moe", "mamba", "hyena"])
def test_a_captured_score_is_the_score_and_follows_the_weights(layout):
    """On a split whose last batch is smaller, before and after further steps."""
    data = [tuple(x.cuda() for x in batch) for batch in batches(12)]
    split = [torch.cat([batch[i] for batch in data])[:46] for i in range(2)]
    ensemble, _ = together([model_of(layout) for _ in POINTS], data, device="cuda")
    plain, _ = together([model_of(layout) for _ in POINTS], data, device="cuda", capture=False)
    for _ in range(2):
        plain.load_state(ensemble.state())
        own, expected = ensemble.score(*split, batch_size=4), plain.score(*split, batch_size=4)
        assert [(one.accuracy, one.macro_batch) for one in own] == [(one.accuracy, one.macro_batch) for one in expected]
        assert [one.loss for one in own] == pytest.approx([one.loss for one in expected], rel=1e-6)
        ensemble.step(*data[0])
    assert ensemble._sums.graphs >= 1 and not ensemble._sums.failed


def test_scores_are_those_of_each_batch():
    """Losses, accuracies and the published mean over classes and batches, against a loop over members and batches."""
    data = batches(5)
    tokens, targets = (torch.cat([batch[i] for batch in data])[:18] for i in range(2))
    models = [model_of("tnl+swiglu", seed) for seed in range(3)]
    ensemble = Ensemble(models, *zip(*POINTS, strict=True), 1)
    for model, found in zip(models, ensemble.score(tokens, targets, batch_size=4), strict=True):
        nats, right, macro = 0.0, 0, 0.0
        for rows, answers in zip(tokens.split(4), targets.split(4), strict=True):
            given = model(rows)[0].argmax(-1)
            nats += model.loss(rows, answers)[0].item()
            kept = answers >= 0
            right += int((given == answers)[kept].sum())
            classes = set(answers[kept].tolist()) | set(given[kept].tolist())
            shares = [(given[kept & (answers == c)] == c).float().nan_to_num().mean().nan_to_num() for c in classes]
            macro += len(rows) * float(torch.stack(shares).mean())
        total = int((targets >= 0).sum())
        assert found.loss == pytest.approx(nats / total, rel=1e-5)
        assert (found.accuracy, found.macro_batch) == pytest.approx((right / total, macro / len(tokens)), rel=1e-6)


@needs_gpu
def test_what_cannot_be_captured_runs_as_it_is():
    data = [tuple(x.cuda() for x in batch) for batch in batches(6)]
    with pytest.warns(UserWarning, match="CUDA graph"):
        ensemble, losses = together([Reads() for _ in POINTS], data, device="cuda")
    assert not ensemble.vectorised and ensemble._advance.failed
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    expected, _ = alone(Reads().cuda(), *POINTS[1], data)
    torch.testing.assert_close(losses[1].cpu(), torch.tensor(expected), rtol=1e-3, atol=1e-4)
