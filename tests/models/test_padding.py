"""A head with a bias; a model whose vocabulary is padded is the same function, and trains as it does alone."""

import pytest
import torch

from linnet.config import ConfigError, parse
from linnet.models import ModelConfig, build_model
from linnet.models.causal_lm import draw_weights
from linnet.models.synthetic import AutoEncoder, RecallLM, pad_vocabulary
from linnet.parallel import tensor
from linnet.train.together import Ensemble

BUILDS = {
    "causal": build_model,
    "recall": lambda config, seed: draw_weights(lambda: RecallLM(config, 16), config, seed),
    "autoencoder": lambda config, seed: draw_weights(lambda: AutoEncoder(config, 16), config, seed),
}


def model_of(vocab, kind="causal", seed=0, **changes):
    values = {"d_model": 32, "layout": "gla+swiglu attention+moe", "options": {"moe": {"num_experts": 4, "inner": 8}}}
    values |= {"vocab_size": vocab, "tie_embeddings": False, "head_bias": True}
    return BUILDS[kind](ModelConfig(**{**values, **changes}), seed=seed)


def batch(vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(vocab, (2, 4, 16), generator=generator)
    targets[torch.rand(4, 16, generator=generator) < 0.5] = -100
    return tokens, targets


@torch.no_grad()
def test_a_head_with_a_bias():
    model, plain = model_of(12), model_of(12, head_bias=False)
    tokens, targets = batch(12)
    model.head.bias.copy_(torch.arange(12.0))
    torch.testing.assert_close(model(tokens)[0], plain(tokens)[0] + torch.arange(12.0))
    expected = torch.nn.functional.cross_entropy(
        model(tokens)[0].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(model.loss(tokens, targets)[0], expected)
    states = model.init_state(4, 16)
    for place in range(16):
        logits, states = model.step(tokens[:, place], states)
    torch.testing.assert_close(logits, model(tokens)[0][:, -1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="head_bias: .*tie_embeddings"):
        parse(ModelConfig, {"d_model": 16, "layout": "gla", "head_bias": True})
    config = ModelConfig(d_model=32, layout="tnl+swiglu", tie_embeddings=False, head_bias=True)
    assert any("head_bias" in problem for problem in tensor.problems(config, 2))


@pytest.mark.parametrize("kind", BUILDS)
def test_a_padded_model_is_the_same_function(kind):
    model, padded = model_of(12, kind), model_of(12, kind)
    pad_vocabulary(padded, 20)
    tokens, targets = batch(12)
    logits = padded(tokens)[0]
    torch.testing.assert_close(logits[..., :12], model(tokens)[0])
    assert bool((logits[..., 12:] == float("-inf")).all())
    losses = [one.loss(tokens, targets) for one in (model, padded)]
    torch.testing.assert_close(losses[0], losses[1])
    for total, _ in losses:
        total.backward()
    for (name, one), (other, two) in zip(model.named_parameters(), padded.named_parameters(), strict=True):
        assert name == other
        if one.shape != two.shape:
            assert not two.grad[12:].any(), "padding gets no gradient"
        torch.testing.assert_close(one.grad, two.grad[:12] if one.shape != two.shape else two.grad)
    with pytest.raises(ValueError, match="12"):
        pad_vocabulary(model_of(12, kind), 11)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", ["causal", "autoencoder"])
def test_models_of_several_vocabularies_train_together_as_they_do_alone(kind):
    vocabularies, points = (12, 20, 16), ([1e-3, 3e-3, 1e-2], [0.0, 0.1, 0.5])
    data = [[batch(vocab, step) for vocab in vocabularies] for step in range(5)]
    models = [model_of(vocab, kind, seed=2) for vocab in vocabularies]
    for model in models:
        pad_vocabulary(model, 20)
    together = Ensemble(models, *points, 5)
    losses = [together.step(*map(torch.stack, zip(*step, strict=True))) for step in data]
    assert together.vectorised
    scores = together.score(*map(torch.stack, zip(*data[0], strict=True)), batch_size=3)
    for index, vocab in enumerate(vocabularies):
        own = [[values[index]] for values in points]
        alone = Ensemble([model_of(vocab, kind, seed=2)], *own, 5, vectorised=False)
        for step, found in zip(data, losses, strict=True):
            torch.testing.assert_close(alone.step(*step[index])[0], found[index], rtol=1e-4, atol=1e-5)
        [score] = alone.score(*data[0][index], batch_size=3)
        assert (score.accuracy, score.macro_batch) == (scores[index].accuracy, scores[index].macro_batch)
        assert score.loss == pytest.approx(scores[index].loss, rel=1e-4)
        for name, p in together.member(index).items():
            if "embedding" in name or "head" in name:
                assert not p[vocab:].any(), "padding stays zero under weight decay"
