"""Masked language models and models of sentences: counts, losses at masked places, packing, both directions."""

import pytest
import torch
from torch.nn import functional as F

from linnet.encoders.config import MaskedConfig, SentenceConfig
from linnet.layers import dropout
from linnet.models import build, empty_of, get_recipe, recipes_of
from linnet.models.causal_lm import IGNORE

SMALL = {
    "bert": {"layout": "attention+glu x2", "positions": "scaled_sinusoidal"},
    "lightnet": {"layout": "tpe lightnet+glu x2", "positions": "none"},
    "scans": {"layout": "hgrn2+glu tnl+glu", "positions": "sinusoidal"},
}


def masked(name: str, **changes):
    options = {"glu": {"activation": "gelu"}}
    if name == "bert":
        options["attention"] = {"num_heads": 2, "rope": False}
    common = {"d_model": 16, "vocab_size": 50, "embedding_norm": True, "norm": "layernorm", "options": options}
    config = MaskedConfig(**common | SMALL[name] | changes)
    return build("masked_lm", config, seed=1).double()


def sentences(name: str, **changes):
    values = masked(name).config.model_dump() | {"outputs": 3, **changes}
    return build("sentence", SentenceConfig(**values), seed=1).double()


def rows(batch=3, length=12, count=3):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (batch, length), generator=generator)
    places = torch.rand(batch, length, generator=generator).topk(count).indices
    targets = torch.full_like(tokens, IGNORE).scatter(1, places, tokens.gather(1, places))
    return tokens.masked_fill(targets != IGNORE, 50), targets


# The shapes of the paper and of Cramming, with one row of 768 for the mask token: 119.6 M.
COUNTS = {
    "bert-crammed": 119_590_657,
    "lightnet-bert": 121_286_400,
    "bert-4x128": 690_817,
    "lightnet-bert-4x128": 773_760,
    "bert-4x512": 10_627_585,
    "lightnet-bert-4x512": 10_959_360,
}


def test_the_recipes_have_the_published_number_of_parameters():
    assert set(recipes_of("masked_lm")) == set(COUNTS)
    found = {}
    for name in COUNTS:
        model = empty_of(get_recipe(name), "meta")
        found[name] = sum(p.numel() for p in model.parameters())
    assert found == COUNTS
    assert round(found["bert-crammed"] / 1e6, 1) == 119.6
    per_layer = 4 * 768**2 + 3 * 768 * 1536 + 2 * 2 * 768
    around = 32_769 * 768 + 2 * 2 * 768 + 1  # embedding, the norms of embedding and output, the scale of the sinusoids
    assert found["bert-crammed"] == 16 * per_layer + around


@pytest.mark.parametrize("name", SMALL)
def test_the_loss_is_that_of_the_logits_at_masked_places(name):
    model = masked(name)
    tokens, targets = rows()
    logits = model(tokens)
    assert logits.shape == (3, 12, 50)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    expected_grad = torch.autograd.grad(expected, model.embedding.weight)[0]
    for answers in (None, 3, 5):
        total, count = model.loss(tokens, targets, answers=answers)
        assert count == 9 and torch.allclose(total, expected, rtol=1e-12)
        assert torch.allclose(torch.autograd.grad(total, model.embedding.weight)[0], expected_grad, atol=1e-12)
    untied = masked(name, tie_embeddings=False)
    total, _ = untied.loss(tokens, targets, answers=3)
    logits = untied(tokens)[targets != IGNORE]
    assert torch.allclose(total, F.cross_entropy(logits, targets[targets != IGNORE], reduction="sum"))


@pytest.mark.parametrize("name", SMALL)
def test_every_token_sees_all_others_and_there_is_no_next_token(name):
    model = masked(name).eval()
    tokens, _ = rows(1)
    logits, changed = model(tokens), tokens.clone()
    changed[0, -1] = 3
    assert (model(changed)[0, 0] - logits[0, 0]).abs().max() > 1e-6
    changed = tokens.clone()
    changed[0, 0] = 3
    assert (model(changed)[0, -1] - logits[0, -1]).abs().max() > 1e-6
    with pytest.raises(ValueError, match="no next token"):
        model.backbone.init_state(1, 8)
    with pytest.raises(ValueError, match="no next token"):
        model.backbone.step(torch.zeros(1, 16).double(), {})


@pytest.mark.parametrize("name", SMALL)
def test_packed_sentences_are_those_of_one_at_a_time(name):
    lengths = [5, 1, 12, 7]
    tokens, _ = rows(4, 12)
    packed = torch.cat([row[:length] for row, length in zip(tokens, lengths, strict=True)])[None]
    cu_seqlens = torch.tensor([0, 5, 6, 18, 25], dtype=torch.int32)
    model = masked(name).eval()
    alone = [model(row[None, :length])[0] for row, length in zip(tokens, lengths, strict=True)]
    assert torch.allclose(model(packed, cu_seqlens)[0], torch.cat(alone), atol=1e-10)
    for pool in ("first", "mean"):
        model = sentences(name, pool=pool).eval()
        found = model(packed, cu_seqlens)
        for row, length, output in zip(tokens, lengths, found, strict=True):
            one = model(row[None, :length], torch.tensor([0, length], dtype=torch.int32))
            assert torch.allclose(one[0], output, atol=1e-10)
    labels = torch.tensor([0, 2, 1, 1])
    total, count = model.loss(packed, labels, cu_seqlens)
    assert count == 4 and torch.allclose(total, F.cross_entropy(found.float(), labels, reduction="sum"))
    numbers = sentences(name, outputs=1).eval()
    total, _ = numbers.loss(packed, labels.float(), cu_seqlens)
    assert torch.allclose(total, (numbers(packed, cu_seqlens)[:, 0].float() - labels).square().sum())


def test_a_model_of_sentences_has_the_weights_of_the_masked_one_and_a_head():
    own = {name: p.shape for name, p in sentences("lightnet").state_dict().items()}
    theirs = {name: p.shape for name, p in masked("lightnet").state_dict().items()}
    head = {name for name in own if name.startswith(("pooler.", "head."))}
    assert {name: own[name] for name in own if name not in head} == theirs and len(head) == 4


def test_dropout_of_a_sentence_does_not_depend_on_its_neighbours():
    model = sentences("bert", dropout=0.3, head_dropout=0.5, drop_path=0.3).train()
    tokens, _ = rows(4, 6)
    whole = torch.arange(0, 25, 6, dtype=torch.int32)
    with dropout.position(model, step=7, first_row=0):
        together = model(tokens.reshape(1, -1), whole)
    with dropout.position(model, step=7, first_row=2):
        last = model(tokens[2:].reshape(1, -1), whole[:3])
    assert torch.allclose(last, together[2:], atol=1e-12)
    with dropout.position(model, step=8, first_row=0):
        assert not torch.allclose(model(tokens.reshape(1, -1), whole), together)
    assert torch.equal(model.eval()(tokens.reshape(1, -1), whole), model(tokens.reshape(1, -1), whole))
