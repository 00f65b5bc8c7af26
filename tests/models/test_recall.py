"""A model that computes the logits of what is asked alone is the causal language model."""

import pytest
import torch

from linnet.data.synthetic import Mqar, generate
from linnet.models import ModelConfig, build_model
from linnet.models.causal_lm import draw_weights
from linnet.models.synthetic import RecallLM


@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_of_the_causal_model(tied):
    config = ModelConfig(
        d_model=16, layout="hgrn2 x2", vocab_size=64, tie_embeddings=tied, options={"hgrn2": {"num_heads": 1}}
    )
    tokens, targets = map(torch.from_numpy, generate(Mqar(vocab_size=64, seq_len=24, num_pairs=4), "train", 6))
    whole, sparse = build_model(config, seed=3), draw_weights(lambda: RecallLM(config, 4), config, 3)
    assert (targets != -100).sum(1).eq(4).all()
    losses = [model.loss(tokens, targets) for model in (whole, sparse)]
    for total, _ in losses:
        total.backward()
    torch.testing.assert_close(losses[0], losses[1])
    for (name, one), (other, two) in zip(whole.named_parameters(), sparse.named_parameters(), strict=True):
        assert name == other and one.grad.abs().sum() > 0
        torch.testing.assert_close(one.grad, two.grad)
    torch.testing.assert_close(whole(tokens)[0], sparse(tokens)[0])

    fewer = targets.clone()
    fewer[0, targets[0] != -100] = torch.tensor([-100, -100, -100, 40])
    torch.testing.assert_close(whole.loss(tokens, fewer), sparse.loss(tokens, fewer))
    assert sparse.loss(tokens, fewer)[1] == 21
